"""Adapters beside a model: what mlx-lm computes with them, in either format, one or several.

Run: pytest tests/fuse/test_unfused.py
"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxstacks import base_model
from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.settings import AdapterConvertSettings
from mlxstacks.fuse.in_memory import attach_adapters
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.training.modes import prepare_base
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe

IDS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_moe(tmp_path_factory.mktemp("unfused") / "moe", bits=4, hidden_size=64)


def attached(model: Path, *adapters: Path, base: str = "stored") -> nn.Module:
    loaded, _, _ = base_model.load(model)
    dtype = mx.float32 if prepare_base(loaded, base, []) else None
    settings = FuseSettings(model=str(model), adapter_path=tuple(map(str, adapters)))
    attach_adapters(loaded, open_checkpoint(model), settings, dtype)
    return loaded


@pytest.mark.parametrize(("dtype", "base"), [("float32", "stored"), ("bfloat16", "float32")])
@pytest.mark.parametrize("kind", ["moe", "dense with embedding"])
def test_logits_are_mlx_lms_to_the_bit(
    kind: str, dtype: str, base: str, moe: Path, tmp_path: Path
) -> None:
    model, keys = moe, None
    if kind != "moe":
        model = write_llama(tmp_path / "model", bits=4)
        keys = ["model.embed_tokens", "self_attn.q_proj"]
    adapter = random_adapter(model, keys, std=0.2, dtype=dtype, directory=tmp_path / "adapter")
    theirs, _, _ = base_model.load(model, adapter)
    prepare_base(theirs, base, [])
    assert mx.array_equal(attached(model, adapter, base=base)(IDS), theirs(IDS))
    assert not mx.array_equal(attached(model, base=base)(IDS), theirs(IDS))


def test_peft_is_the_same_adapter(moe: Path, tmp_path: Path) -> None:
    adapter = random_adapter(moe, ["self_attn.q_proj"], std=0.2, directory=tmp_path / "adapter")
    convert_adapter(
        AdapterConvertSettings(
            adapter_path=str(adapter), save_path=str(tmp_path / "peft"), model=str(moe), to="peft"
        )
    )
    assert mx.array_equal(attached(moe, adapter)(IDS), attached(moe, tmp_path / "peft")(IDS))


def test_several_add_up(tmp_path: Path) -> None:
    """As the one adapter that has the pairs of both beside each other."""
    model = write_llama(tmp_path / "model", bits=None, dtype="float32")
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    first, second = (
        random_adapter(model, keys, std=0.2, seed=seed, directory=tmp_path / str(seed))
        for seed in (1, 2)
    )
    both = random_adapter(model, keys, rank=4, directory=tmp_path / "both")
    pairs = [mx.load(str(path / "adapters.safetensors")) for path in (first, second)]
    joined = {
        name: mx.concatenate([pair[name] for pair in pairs], axis=1 if name.endswith("a") else 0)
        for name in pairs[0]
    }
    mx.save_safetensors(str(both / "adapters.safetensors"), joined)
    expected = attached(model, both)(IDS)
    assert mx.allclose(attached(model, first, second)(IDS), expected, rtol=1e-4, atol=1e-4)
    assert not mx.allclose(attached(model, first)(IDS), expected, rtol=1e-2, atol=1e-2)


def test_what_does_not_fit_is_refused(moe: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "model", bits=4)
    adapter = random_adapter(other, directory=tmp_path / "adapter")
    with pytest.raises(AdapterError, match="does not fit"):
        attached(moe, adapter)
    again = FuseSettings(model=str(other), adapter_path=(str(adapter),))
    with pytest.raises(CheckpointError, match="take adapters off first"):
        attach_adapters(attached(other, adapter), open_checkpoint(other), again)
