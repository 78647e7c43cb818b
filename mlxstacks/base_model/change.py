"""What is done to a model in memory: quantized, cast, adapted, fused, saved."""

import copy
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path, tree_unflatten

from mlxstacks.base_model.loading import plain_name, save_arrays
from mlxstacks.errors import InputError


def quantize(
    model: nn.Module,
    config: dict[str, Any],
    bits: int | None,
    group_size: int = 64,
    module_bits: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Quantize `model` in place as `mlx_lm.convert` would; return the config that says so.

    bits: None leaves every module that `module_bits` does not name in floats.
    module_bits: module path -> bits, None for floats; goes before the model's own
        `quant_predicate`, by which router gates keep 8 bits.
    """
    overrides = module_bits or {}
    default = bits or next(filter(None, overrides.values()), None)
    quantization: dict[str, Any] = {"group_size": group_size, "bits": default, "mode": "affine"}
    standard = dict(quantization)
    own_choice = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        width = overrides.get(path, bits)
        choice: bool | dict[str, Any]
        if path in overrides or own_choice is None or width is None:
            choice = standard | {"bits": width} if width and width != default else bool(width)
        else:
            choice = own_choice(path, module)
            if isinstance(choice, dict) and module.weight.shape[-1] % choice.get("group_size", 1):
                choice = choice | {"group_size": group_size}
        if isinstance(choice, dict):
            quantization[path] = choice
        return choice

    nn.quantize(model, group_size, default, class_predicate=predicate)
    return config | {"quantization": quantization, "quantization_config": quantization}


def dequantize(model: nn.Module) -> None:
    """Replace quantized modules of `model`, in place, by plain ones with the stored values."""
    from mlx_lm.utils import dequantize_model

    dequantize_model(model)


# Below, setting up a product for each expert costs more than it saves.
LEAST_EXPERT_BYTES = 1 << 20


def rows_of_experts(indices: mx.array, num_experts: int) -> np.ndarray | None:
    """How many rows each expert gets, for indices (N,): evaluates what they are made of. None
    inside `mx.compile`, where no number is known.
    """
    try:
        return np.bincount(np.array(indices), minlength=num_experts)
    except ValueError:
        return None


def group_experts(model: nn.Module) -> None:
    """Let large plain experts, in place, take all their rows in one product on a CPU.

    There `mx.gather_mm` multiplies row after row, each reading its expert's weights again.
    Law: the outputs and gradients of `gather_mm`, to the order of sums.
    """
    from mlx_lm.models.switch_layers import SwitchLinear

    class GroupedSwitchLinear(SwitchLinear):
        def __call__(
            self, x: mx.array, indices: mx.array, sorted_indices: bool = False
        ) -> mx.array:
            """x (N, 1, K) and indices (N,) where rows are sorted by expert, as in a prompt."""
            grouped = sorted_indices and "bias" not in self
            counts = rows_of_experts(indices, self.num_experts) if grouped else None
            if counts is None:
                return super().__call__(x, indices, sorted_indices)
            parts = mx.split(x.squeeze(1), np.cumsum(counts)[:-1].tolist())
            weights = self.weight  # weights[e] would be a copy, a slice is none
            products = [
                part @ weights[e : e + 1].squeeze(0).T for e, part in enumerate(parts) if part.size
            ]
            return mx.expand_dims(mx.concatenate(products), 1)

    for _, module in model.named_modules():
        if type(module) is SwitchLinear and module.weight[0].nbytes >= LEAST_EXPERT_BYTES:
            module.__class__ = GroupedSwitchLinear


def count_parameters(model: nn.Module) -> int:
    """Numbers in a model, those of packed weights counted one by one."""
    from mlx_lm.utils import get_total_parameters

    return int(get_total_parameters(model))


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating-point parameters in place, but those the model keeps (`A_log` in float32)."""
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def change(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and wanted(path) else value

    model.update(tree_map_with_path(change, model.parameters()))


def save_model(directory: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Write weights, index and `config.json` into an existing or new directory."""
    from mlx_lm.utils import save_config
    from mlx_lm.utils import save_model as save_weights

    directory.mkdir(parents=True, exist_ok=True)
    with plain_name(directory) as named:
        save_weights(named, model)
    save_config(copy.deepcopy(config), directory / "config.json")


def attach_lora(
    model: nn.Module, num_layers: int, rank: int, scale: float, keys: list[str] | None
) -> None:
    """Put mlx-lm's LoRA on modules named `keys` of the last `num_layers`; freeze the rest.

    keys: None for every kind that mlx-lm can adapt.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, num_layers, parameters)


def attach_pair(
    model: nn.Module,
    path: str,
    kind: Literal["linear", "switch", "embedding"],
    pair: tuple[mx.array, mx.array],
    scale: float,
    magnitude: mx.array | None = None,
) -> None:
    """Put mlx-lm's LoRA layer with this pair over the module at `path`, over LoRA layers that are
    there already; with a magnitude its DoRA layer.

    pair: lora_a, lora_b in mlx-lm's axis order (see `files.lora_modules`).
    Raises: InputError: DoRA over another adapter, or on an embedding, which mlx-lm has not.
    """
    from mlx_lm.tuner import dora, lora

    if magnitude is not None:
        base = dict(model.named_modules())[path]
        if kind != "linear" or "lora_a" in base:
            raise InputError(
                f"{path}: unfused, DoRA is for linear modules without another adapter; fuse it"
            )
        over = dora.DoRALinear.from_base(base, r=pair[1].shape[0])
        over.scale, over.m = scale, magnitude
        over.lora_a, over.lora_b = pair
        model.update_modules(tree_unflatten([(path, over)]))
        return
    layers = {
        "linear": lora.LoRALinear,
        "switch": lora.LoRASwitchLinear,
        "embedding": lora.LoRAEmbedding,
    }
    inner = "embedding" if kind == "embedding" else "linear"
    present = base = dict(model.named_modules())[path]
    while "lora_a" in base:
        base = base[inner]
    layer = layers[kind].from_base(base, r=pair[1].shape[-1 if kind == "switch" else 0])
    setattr(layer, inner, present)
    layer.scale = scale
    layer.lora_a, layer.lora_b = pair
    model.update_modules(tree_unflatten([(path, layer)]))


def types_that_shard() -> list[str]:
    """Model types of mlx-lm that can be split over processes."""
    package = importlib.util.find_spec("mlx_lm.models")
    files = (
        [
            file
            for place in package.submodule_search_locations or ()
            for file in Path(place).glob("*.py")
        ]
        if package
        else []
    )
    return sorted(file.stem for file in files if "def shard(" in file.read_text(encoding="utf-8"))


def save_adapter(
    directory: Path,
    weights: dict[str, mx.array],
    num_layers: int,
    rank: int,
    scale: float,
    keys: list[str],
) -> None:
    """Write an adapter in mlx-lm's format: `adapters.safetensors` and `adapter_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_arrays(directory / "adapters.safetensors", weights)
    config = {
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def fused_layer(layer: nn.Module, dequantize: bool) -> nn.Module:
    """mlx-lm's fuse of a layer that has what its LoRALinear (or LoRASwitchLinear, for a base with
    `num_experts`) has: linear, lora_a, lora_b, scale. As theirs, rounded again at the base's bits.
    """
    from mlx_lm.tuner import lora

    is_switch = hasattr(layer.linear, "num_experts")
    return (lora.LoRASwitchLinear if is_switch else lora.LoRALinear).fuse(layer, dequantize)


def fuse_lora(model: nn.Module) -> None:
    """Fuse LoRA layers of `model` in place by mlx-lm's own rule: at the same bits, rounded anew."""
    fused = [
        (path, module.fuse()) for path, module in model.named_modules() if hasattr(module, "fuse")
    ]
    model.update_modules(tree_unflatten(fused))
    model.eval()


def named_quantizable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every module that mlx-lm quantizes or has quantized."""
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") or (hasattr(module, "bits") and "scales" in module):
            yield path, module


def named_switches(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of what runs the chosen experts of each mixture: mlx-lm's two classes.

    Every mixture of mlx-lm calls one of them as `switch(x, indices)`, indices (..., top_k).
    """
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    for path, module in model.named_modules():
        if isinstance(module, SwitchGLU | SwitchMLP):
            yield path, module
