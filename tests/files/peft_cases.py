"""Small adapters and PEFT files for several test files, and the formulas of both layouts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mlxstacks.files.lora_modules import Adapter, LoraModule, widened
from mlxstacks.files.settings import PeftLayout

FIXTURES = Path(__file__).parent.parent / "fixtures" / "peft"
EPSILON = 2.0**-23
PREFIX = "base_model.model.model.layers.0."


def delta_of(module: LoraModule) -> np.ndarray:
    """The delta in the weight's shape, float64 of the stored numbers."""
    wide = widened(module)
    a, b = wide.lora_a.astype(np.float64), wide.lora_b.astype(np.float64)
    if module.is_switch:
        return module.scale * (b @ a)
    product = a @ b
    return module.scale * (product if module.path.endswith("embed_tokens") else product.T)


def assert_same(one: Adapter, other: Adapter) -> None:
    assert one.modules.keys() == other.modules.keys()
    for path, module in one.modules.items():
        again = other.modules[path]
        assert (again.dtype, again.scale) == (module.dtype, module.scale), path
        for leaf in ("lora_a", "lora_b"):
            assert np.array_equal(getattr(again, leaf), getattr(module, leaf)), (path, leaf)


def switch(rng: np.random.Generator, experts: int, rank: int, dims: tuple[int, int]) -> LoraModule:
    """A random switch pair for weights (experts, dims[1], dims[0])."""
    a = rng.standard_normal((experts, rank, dims[0])).astype(np.float32)
    b = rng.standard_normal((experts, dims[1], rank)).astype(np.float32)
    return LoraModule("gate_proj", a, b, "F32", 1.5)


def as_pair(module: LoraModule, layout: PeftLayout) -> dict[str, np.ndarray]:
    """A switch pair as either PEFT lays it out, written here from the formulas alone."""
    experts, rank, input_dims = module.lora_a.shape
    output_dims = module.lora_b.shape[1]
    grouped = module.lora_a if layout == "current" else module.lora_b.transpose(0, 2, 1)
    mixed = module.lora_b if layout == "current" else module.lora_a.transpose(0, 2, 1)
    a = np.zeros((experts * rank, input_dims if layout == "current" else output_dims), np.float32)
    b = np.zeros((output_dims if layout == "current" else input_dims, rank * experts), np.float32)
    for e in range(experts):
        for r in range(rank):
            a[e * rank + r] = grouped[e, r]
            b[:, r * experts + e] = mixed[e, :, r]
    return {"mlp.experts.lora_A.weight": a, "mlp.experts.lora_B.weight": b}


def save_peft(
    directory: Path,
    tensors: dict[str, np.ndarray],
    config: dict[str, Any],
    full_names: bool = False,
) -> Path:
    directory.mkdir(parents=True)
    named = tensors if full_names else {f"{PREFIX}{k}": v for k, v in tensors.items()}
    save_file(
        {k: np.ascontiguousarray(v) for k, v in named.items()},
        directory / "adapter_model.safetensors",
    )
    base = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (directory / "adapter_config.json").write_text(json.dumps(base | config))
    return directory


def dense_tensors(path: str, dims: tuple[int, int], rank: int = 2, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        f"{path}.lora_A.weight": rng.standard_normal((rank, dims[0])).astype(np.float32),
        f"{path}.lora_B.weight": rng.standard_normal((dims[1], rank)).astype(np.float32),
    }


def gate_up_only(directory: Path, dims: tuple[int, int], layout: PeftLayout, **config: Any) -> Path:
    """Only gate_up_proj is adapted: 3 experts, base parameter (3, dims[1], dims[0])."""
    tensors = as_pair(switch(np.random.default_rng(1), 3, 2, dims), layout)
    if hidden := config.pop("hidden", None):
        tensors |= dense_tensors("self_attn.q_proj", (hidden, 5))
    return save_peft(directory, tensors, {"target_parameters": ["experts.gate_up_proj"]} | config)
