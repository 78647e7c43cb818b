"""A fuse in memory has the bytes of a fuse to disk. Run: pytest tests/fuse/test_in_memory.py"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.fuse.in_memory import MemoryFuse, fuse_in_memory
from mlxstacks.fuse.run import run
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.training.modes import prepare_base
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe

POLICIES = ("auto", "refit", "keep", "nearest", "promote", "stochastic", "dequantize")
KEYS = ["mlp.switch_mlp.down_proj", "mlp.gate", "self_attn.q_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mx.set_default_device(mx.cpu)
    return write_qwen_moe(tmp_path_factory.mktemp("base") / "model", bits=4, hidden_size=64)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """A delta of about a tenth of a step on experts, attention and an 8-bit gate."""
    return random_adapter(model, KEYS, rank=2, std=0.004)


def settings_for(model: Path, *adapters: Path, **options: Any) -> FuseSettings:
    paths = tuple(map(str, adapters))
    return FuseSettings(model=str(model), adapter_path=paths, **options)


def fused(settings: FuseSettings, model: Path) -> tuple[Any, MemoryFuse]:
    loaded, _, _ = base_model.load(model)
    return loaded, fuse_in_memory(loaded, settings)


def raw(model: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> dtype, shape and bytes of every tensor."""
    return {
        name: (str(value.dtype), value.shape, np.array(value.view(mx.uint8)).tobytes())
        for name, value in tree_flatten(model.parameters())
    }


def assert_as_from_disk(settings: FuseSettings, model: Path, target: Path) -> None:
    report = run(settings.model_copy(update={"save_path": str(target)}))
    wanted, _, _ = base_model.load(target)
    made, found = fused(settings, model)
    assert raw(made) == raw(wanted)
    one, two = dict(made.named_modules()), dict(wanted.named_modules())
    assert {p: getattr(m, "bits", None) for p, m in one.items()} == {
        p: getattr(m, "bits", None) for p, m in two.items()
    }
    stages = [stage.as_json() for stage in report.stages]
    assert [stage.as_json() for stage in found.stages] == stages
    assert found.extra_bytes == report.extra_bytes
    if settings.requant != "dequantize":  # MLX runs plain bfloat16 experts on a GPU only
        tokens = mx.array([[65, 66, 67, 68]])
        assert mx.array_equal(made(tokens), wanted(tokens))


@pytest.mark.parametrize(
    ("requant", "zero"),
    [*((p, False) for p in POLICIES), ("auto", True), ("refit", True), ("promote", True)],
)
def test_bytes_are_those_of_a_fuse_to_disk(
    model: Path, adapter: Path, tmp_path: Path, requant: str, zero: bool
) -> None:
    settings = settings_for(model, adapter, requant=requant, zero_delta=zero)
    assert_as_from_disk(settings, model, tmp_path / "out")


def test_two_adapters_and_asked_bits(model: Path, adapter: Path, tmp_path: Path) -> None:
    second = random_adapter(model, KEYS[:1], std=0.01, seed=3, directory=tmp_path / "second")
    settings = settings_for(model, adapter, second, requant="promote", bits=("*down_proj=6",))
    assert_as_from_disk(settings, model, tmp_path / "out")


@pytest.mark.parametrize("bits", [None, 4])
def test_plain_weights_and_tied_embeddings(bits: int | None, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "llama", bits=bits, tied=True)
    settings = settings_for(model, random_adapter(model, ["self_attn.q_proj", "embed_tokens"]))
    assert_as_from_disk(settings, model, tmp_path / "out")


@pytest.mark.parametrize("requant", ["refit", "promote", "dequantize"])
def test_a_widened_base_gets_the_same_values(
    model: Path, adapter: Path, tmp_path: Path, requant: str
) -> None:
    settings = settings_for(model, adapter, requant=requant)
    run(settings.model_copy(update={"save_path": str(tmp_path / "out")}))
    wanted, _, _ = base_model.load(tmp_path / "out")
    prepare_base(wanted, "float32", [])
    made, _, _ = base_model.load(model)
    prepare_base(made, "float32", [])
    fuse_in_memory(made, settings)
    assert raw(made) == raw(wanted)


def test_modules_the_adapter_leaves_alone_are_the_same_arrays(model: Path, adapter: Path) -> None:
    loaded, _, _ = base_model.load(model)
    before = dict(tree_flatten(loaded.parameters()))
    fuse_in_memory(loaded, settings_for(model, adapter, requant="promote"))
    after = dict(tree_flatten(loaded.parameters()))
    assert {name for name in after if after[name] is not before[name]} == {
        name for name in after if any(f"{key}." in name for key in KEYS)
    }


def test_another_model_is_refused_and_left_as_it_was(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    other = write_qwen_moe(tmp_path / "three", bits=3, hidden_size=64)
    loaded, _, _ = base_model.load(other)
    before = raw(loaded)
    with pytest.raises(CheckpointError, match=r"down_proj: weight .* there, .* stored"):
        fuse_in_memory(loaded, settings_for(model, adapter))
    assert raw(loaded) == before
    loaded, _, _ = base_model.load(model, adapter)
    with pytest.raises(CheckpointError, match=r"LoRA.* there; take adapters off first"):
        fuse_in_memory(loaded, settings_for(model, adapter))
    with pytest.raises(InputError, match="needs model and adapter_path"):
        fuse_in_memory(loaded, FuseSettings(model=str(model)))
