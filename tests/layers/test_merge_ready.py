"""LoRA that fuses without loss. Run: pytest tests/layers/test_merge_ready.py"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.decide import widths
from mlxstacks.fuse.in_memory import fuse_in_memory
from mlxstacks.fuse.module import gather_modules
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.adapted import AdaptedLayer, adapted_layers
from mlxstacks.layers.attach import lora_tensors
from mlxstacks.layers.merge_ready import as_stored
from mlxstacks.studies.train.run import run
from mlxstacks.studies.train.setup import set_up
from mlxstacks.training.modes import prepare_base
from tests.layers.build import assert_close, normal
from tests.studies.train_cases import settings_for, write_data
from tests.tiny_models import random_adapter, write_qwen_moe

KEYS = ("self_attn.q_proj", "switch_mlp.down_proj")
TOKENS = mx.array([[65, 66, 67, 68, 69]])


@pytest.fixture(scope="module", params=[3, 4])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    mx.set_default_device(mx.cpu)
    return write_qwen_moe(
        tmp_path_factory.mktemp("base") / "model", bits=request.param, group_size=32,
        hidden_size=64, shards=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def trained(model: Path, data: Path, target: Path, how: str, base: str) -> Any:
    options = {"keys": KEYS, "dropout": 0.0, "base": base, "merge_ready": how, "iters": 2}
    return run(settings_for(model, data, target, keep="last", **options))


def fused(model: Path, adapter: Path, base: str, **options: Any) -> tuple[Any, Any]:
    loaded, _, _ = base_model.load(model)
    prepare_base(loaded, base, [])
    about = FuseSettings(model=str(model), adapter_path=(str(adapter),), **options)
    report = fuse_in_memory(loaded, about)
    loaded.eval()
    return loaded, report


def with_adapter(model: Path, data: Path, adapter: Path, how: str, base: str) -> Any:
    """The model as training evaluates it, with the numbers that a run left."""
    options = {"keys": KEYS, "dropout": 0.0, "base": base, "merge_ready": how}
    training = set_up(settings_for(model, data, adapter / "none", **options)).model
    stored, _ = base_model.load_arrays(adapter / "adapters.safetensors")
    for path, layer in adapted_layers(training):
        a = stored[f"{path}.lora_a"]
        axis = 0 if a.ndim == 2 else 2
        step = a.shape[axis] // layer.lora_a.shape[axis]
        layer.lora_a = mx.take(a, mx.arange(0, a.shape[axis], step), axis=axis)
        layer.lora_b = stored[f"{path}.lora_b"]
    training.eval()
    return training


@pytest.mark.parametrize("base", ["float32", "stored"])
def test_grid_fuses_to_the_bit(model: Path, data: Path, tmp_path: Path, base: str) -> None:
    trained(model, data, tmp_path / "a", "grid", base)
    unfused = with_adapter(model, data, tmp_path / "a", "grid", base)
    made, report = fused(model, tmp_path / "a", base)
    assert {m.policy for m in report.stages[0].modules} == {"keep"}
    assert report.stages[0].total.codes_changed
    assert mx.array_equal(made(TOKENS), unfused(TOKENS))
    assert report.extra_bytes == 0


def test_pooled_is_what_mlx_lm_loads_and_fuses_by_biases(
    model: Path, data: Path, tmp_path: Path
) -> None:
    trained(model, data, tmp_path / "a", "pooled", "float32")
    pooled = with_adapter(model, data, tmp_path / "a", "pooled", "float32")
    upstream, _, _ = base_model.load(model, tmp_path / "a")
    base_model.dequantize(upstream)
    base_model.cast(upstream, mx.float32)
    upstream.eval()
    assert_close(pooled(TOKENS), upstream(TOKENS), 1e-4)
    made, report = fused(model, tmp_path / "a", "stored")
    assert {m.policy for m in report.stages[0].modules} == {"shift"}
    assert report.stages[0].total.codes_changed == 0
    assert report.stages[0].total.correlation > 0.9
    before = dict(base_model.load(model)[0].named_modules())
    for path, module in made.named_modules():
        if "scales" in module:
            assert mx.array_equal(module.weight, before[path].weight)
            assert mx.array_equal(module.scales, before[path].scales)
    about = FuseSettings(model=str(model), adapter_path=(str(tmp_path / "a"),))
    modules, _ = gather_modules(open_checkpoint(model), about)
    for module in modules:
        own, wider = widths(module)[:2]
        assert (own.decision.policy, own.decision.bits) == ("shift", module.stored.bits)
        assert own.lost + own.noise < wider.lost + wider.noise
    bits = tuple(f"{module.path}={module.stored.bits}" for module in modules)
    for options in ({"requant": "shift"}, {"bits": bits}):
        explicit, _ = fused(model, tmp_path / "a", "stored", **options)
        assert mx.array_equal(explicit(TOKENS), made(TOKENS))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("base", ["float32", "stored"])
def test_pooled_models_compute_the_same_fused_and_unfused(
    data: Path, tmp_path: Path, dtype: str, base: str
) -> None:
    """To the rounding of a bias in its dtype, through all layers; the adapter changes far more."""
    model = write_qwen_moe(
        tmp_path / "m", group_size=32, hidden_size=64, shards=1, dtype=dtype
    )  # fmt: skip
    trained(model, data, tmp_path / "a", "pooled", "float32")
    file = tmp_path / "a" / "adapters.safetensors"
    tensors, header = base_model.load_arrays(file)
    for name in tensors:
        if name.endswith("lora_b"):  # far more than two steps learn
            tensors[name] = 0.05 * normal(3, *tensors[name].shape)
    mx.save_safetensors(str(file), tensors, header)
    unfused = with_adapter(model, data, tmp_path / "a", "pooled", base)(TOKENS)
    made, report = fused(model, tmp_path / "a", base)
    assert {m.policy for m in report.stages[0].modules} == {"shift"}
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    off, largest = (mx.abs(x).max().item() for x in (made(TOKENS) - unfused, unfused))
    assert off <= 16 * unit * largest
    plain, _, _ = base_model.load(model)
    prepare_base(plain, base, [])
    assert mx.abs(plain(TOKENS) - unfused).max() > 10 * off


def test_shift_of_another_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = random_adapter(model, ["self_attn.q_proj"], directory=tmp_path / "a")
    with pytest.raises(InputError, match=r"q_proj: the delta differs inside of groups of 32"):
        fused(model, adapter, "stored", requant="shift")
    # a mark alone is not believed
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["mlxstacks_merge_ready"] = "pooled"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    _, report = fused(model, adapter, "stored")
    assert "shift" not in {m.policy for m in report.stages[0].modules}


def test_a_plain_base_is_refused(data: Path, tmp_path: Path) -> None:
    plain = write_qwen_moe(tmp_path / "m", bits=None, hidden_size=64, shards=1, dtype="float32")
    about = settings_for(plain, data, tmp_path / "a", merge_ready="pooled")
    with pytest.raises(InputError, match="merge_ready pooled is for affine quantized modules"):
        set_up(about)
    with pytest.raises(ValueError, match=r"dropout 0.1 .* merge_ready grid"):
        settings_for(plain, data, tmp_path / "a", merge_ready="grid")


def gradient(layer: AdaptedLayer, *x: mx.array) -> dict[str, mx.array]:
    def loss(numbers: dict[str, mx.array]) -> mx.array:
        layer.update(numbers)
        return (layer(*x) * 0.1).square().sum()

    return mx.grad(loss)({"lora_a": layer.lora_a, "lora_b": layer.lora_b})


@pytest.fixture(scope="module")
def layers(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """New layers of both kinds by kind of training."""
    target = tmp_path_factory.mktemp("none") / "a"
    options: dict[str, Any] = {"keys": KEYS, "dropout": 0.0, "base": "float32"}
    return {
        str(how): set_up(settings_for(model, data, target, merge_ready=how, **options)).model
        for how in ("grid", "pooled", None)
    }


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), std=st.sampled_from([0.0, 0.01, 0.1]))
def test_training_computes_on_the_grid_and_its_gradient_passes(
    layers: dict[str, Any], seed: int, std: float
) -> None:
    """Grid: the values of training are those of evaluation to the order of sums, and B learns
    from a delta of zero. Pooled: outputs are those of the repeated A, values and gradients."""
    plain = dict(adapted_layers(layers["None"]))
    for how in ("grid", "pooled"):
        for path, layer in adapted_layers(layers[how]):
            layer.lora_b = std * normal(seed, *layer.lora_b.shape)
            stored = as_stored(layers[how], lora_tensors(layers[how]))
            x: tuple[mx.array, ...] = (normal(seed + 1, 1, 3, layer.input_dims),)
            if "switch" in path:
                rows = normal(seed + 1, 1, 3, 1, 1, layer.input_dims)
                x = rows, mx.array(np.random.default_rng(seed).integers(0, 4, (1, 3, 2)))
            layer.train()
            values, gradients = layer(*x), gradient(layer, *x)
            layer.eval()
            assert_close(values, layer(*x), 1e-5)
            assert mx.abs(gradients["lora_b"]).max() > 0
            if how == "pooled":
                other = plain[path]
                other.lora_a = stored[f"{path}.lora_a"]
                other.lora_b = layer.lora_b
                assert_close(values, other(*x), 1e-5)
                assert_close(gradients["lora_b"], gradient(other, *x)["lora_b"], 1e-4)
