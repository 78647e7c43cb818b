"""DoRA adapters of mlx-lm and PEFT: fused, served, and refused where they cannot go.

Run: pytest tests/fuse/test_dora.py
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from mlxstacks import base_model
from mlxstacks.errors import AdapterError, CheckpointError, InputError
from mlxstacks.files.adapters import load_any_adapter, match_adapter, read_adapter, write_adapter
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.in_memory import attach_adapters
from mlxstacks.fuse.settings import FuseSettings
from tests.fuse.cases import fuse, tensors
from tests.tiny_models import write_llama

KEYS = ["self_attn.q_proj", "mlp.down_proj"]


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def write_dora(model: Path, directory: Path) -> Path:
    """By mlx-lm's own layers, with random pairs and magnitudes."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    loaded, _, _ = base_model.load(model)
    parameters: dict[str, Any] = {"rank": 2, "scale": 4.0, "dropout": 0.0, "keys": KEYS}
    loaded.freeze()
    linear_to_lora_layers(loaded, 2, parameters, use_dora=True)
    mx.random.seed(0)
    changed = []
    for name, value in tree_flatten(loaded.trainable_parameters()):
        if name.endswith(".m"):
            value = value * mx.random.uniform(0.9, 1.1, value.shape)
        elif name.endswith("lora_b"):
            value = mx.random.normal(value.shape) * 0.01
        changed.append((name, value))
    loaded.update(tree_unflatten(changed))
    directory.mkdir()
    weights = dict(tree_flatten(loaded.trainable_parameters()))
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "dora", "num_layers": 2, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def logits(model: Any) -> np.ndarray:
    return np.array(model(mx.array([[65, 66, 67, 68]])).astype(mx.float32))


def theirs(model: Path, adapter: Path) -> Any:
    from mlx_lm import load

    return load(str(model), adapter_path=str(adapter))[0]


@pytest.mark.parametrize("bits", [None, 4])
def test_fused_and_unfused_are_mlx_lm_s_layers(bits: int | None, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", bits=bits, dtype="float32")
    adapter = write_dora(model, tmp_path / "dora")
    wanted = logits(theirs(model, adapter))
    assert not np.allclose(wanted, logits(base_model.load(model)[0]), atol=1e-2)

    loaded, _, _ = base_model.load(model)
    settings = FuseSettings(model=str(model), adapter_path=(str(adapter),))
    attach_adapters(loaded, open_checkpoint(model), settings)
    np.testing.assert_array_equal(logits(loaded), wanted)

    report = fuse(model, adapter, tmp_path / "out", requant="dequantize" if bits else "refit")
    np.testing.assert_allclose(logits(base_model.load(tmp_path / "out")[0]), wanted, atol=2e-4)
    assert report.total is not None
    assert report.total.correlation == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("requant", ["auto", "refit", "keep", "nearest", "stochastic"])
def test_every_policy_keeps_of_it_what_it_says(requant: str, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", bits=4)
    adapter = write_dora(model, tmp_path / "dora")
    report = fuse(model, adapter, tmp_path / "out", requant=requant)
    assert report.total is not None
    assert report.total.survival is not None
    assert report.total.survival > (0.9 if requant == "auto" else 0.1)
    base_model.load(tmp_path / "out")


def test_a_control_has_the_magnitudes_of_the_base(tmp_path: Path) -> None:
    """At zero delta the rows keep their norms: nothing is changed."""
    model = write_llama(tmp_path / "model", bits=4)
    adapter = write_dora(model, tmp_path / "dora")
    fuse(model, adapter, tmp_path / "out", requant="nearest", zero_delta=True)
    before, after = tensors(model), tensors(tmp_path / "out")
    assert all(mx.array_equal(before[name], after[name]) for name in before)


def test_peft_s_dora_has_the_delta_of_its_formula(tmp_path: Path) -> None:
    """Liu et al. 2024: the direction of W + s B A, at the trained norms; in float64."""
    model = write_llama(tmp_path / "model", bits=None, dtype="float32")
    random = np.random.default_rng(0)
    path = "model.layers.0.self_attn.q_proj"
    weight = np.array(tensors(model)[f"{path}.weight"]).astype(np.float64)
    rows, width = weight.shape
    a, b = random.normal(size=(2, width)) * 0.05, random.normal(size=(rows, 2)) * 0.05
    magnitude = np.linalg.norm(weight, axis=1) * random.uniform(0.9, 1.1, rows)
    adapter = tmp_path / "peft"
    adapter.mkdir()
    prefix = f"base_model.model.{path}"
    mx.save_safetensors(
        str(adapter / "adapter_model.safetensors"),
        {
            f"{prefix}.lora_A.weight": mx.array(a.astype(np.float32)),
            f"{prefix}.lora_B.weight": mx.array(b.astype(np.float32)),
            f"{prefix}.lora_magnitude_vector": mx.array(magnitude.astype(np.float32)),
        },
    )
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True,
        "target_modules": ["q_proj"],
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    fuse(model, adapter, tmp_path / "out")
    direction = weight + 2 * b @ a
    wanted = magnitude[:, None] * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    found = np.array(tensors(tmp_path / "out")[f"{path}.weight"])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    config["use_dora"] = False
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=r"has a magnitude, and \S+ has use_dora"):
        load_any_adapter(adapter, dora=True)


def test_dora_goes_where_it_can_be_and_nowhere_else(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", bits=4)
    adapter = write_dora(model, tmp_path / "dora")
    with pytest.raises(AdapterError, match="`mlxstacks fuse` puts it into its base"):
        load_any_adapter(adapter)
    read = read_adapter(adapter)
    write_adapter(read, tmp_path / "again")
    again = read_adapter(tmp_path / "again")
    for path, module in read.modules.items():
        np.testing.assert_array_equal(module.magnitude, again.modules[path].magnitude)
    loaded, _, _ = base_model.load(model)
    settings = FuseSettings(model=str(model), adapter_path=(str(adapter), str(adapter)))
    with pytest.raises(InputError, match="unfused, DoRA is for linear modules without another"):
        attach_adapters(loaded, open_checkpoint(model), settings)


@pytest.mark.parametrize(
    ("magnitude", "said"),
    [
        (mx.ones(4), r"shape \[4\]; a magnitude has a number for each row"),
        (mx.ones((128, 2)), "a number for each row"),
        (mx.full(128, float("nan")), "NaN or Inf among the magnitudes"),
        (mx.ones(128, mx.int32), "dtype I32"),
        (None, "has no magnitude"),
    ],
)
def test_magnitudes_that_cannot_be_are_named(
    magnitude: mx.array | None, said: str, tmp_path: Path
) -> None:
    model = write_llama(tmp_path / "model", bits=4)
    adapter = write_dora(model, tmp_path / "dora")
    stored = mx.load(str(adapter / "adapters.safetensors"))
    assert isinstance(stored, dict)
    name = "model.layers.0.self_attn.q_proj.m"
    stored.pop(name)
    if magnitude is not None:
        stored[name] = magnitude
    mx.eval(stored)
    mx.save_safetensors(str(adapter / "adapters.safetensors"), stored)
    with pytest.raises(AdapterError, match=said):
        read_adapter(adapter)


def test_magnitudes_of_another_width_do_not_fit(tmp_path: Path) -> None:
    """The input's width, where the output's is another."""
    model = write_llama(tmp_path / "model", bits=4)
    adapter = write_dora(model, tmp_path / "dora")
    stored = mx.load(str(adapter / "adapters.safetensors"))
    assert isinstance(stored, dict)
    name = "model.layers.0.mlp.down_proj"
    stored[f"{name}.m"] = mx.ones(stored[f"{name}.lora_a"].shape[0])
    mx.eval(stored)
    mx.save_safetensors(str(adapter / "adapters.safetensors"), stored)
    with pytest.raises((AdapterError, CheckpointError), match=r"magnitudes for .* rows"):
        match_adapter(read_adapter(adapter), open_checkpoint(model))
