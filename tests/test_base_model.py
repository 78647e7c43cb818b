"""Models and adapters under names that mlx-lm and MLX cannot read.

Run: pytest tests/test_base_model.py
"""

import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.errors import CheckpointError, NonFiniteModelError
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.nano.exports import nano_paths
from tests.tiny_models import random_adapter, write_llama

# a pattern to glob, which mlx-lm looks for shards with; bytes that are no UTF-8
NAMES = ["[g]*?", os.fsdecode(b"caf\xe9"), os.fsdecode(b"[a-\xff]")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its adapter in a directory."""
    place = tmp_path_factory.mktemp("plain")
    random_adapter(write_llama(place / "model"), ["self_attn.q_proj"], directory=place / "adapter")
    return place


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_any_name_of_a_directory_will_do(plain: Path, tmp_path: Path, name: str) -> None:
    odd = tmp_path / name
    try:
        shutil.copytree(plain, odd)
    except OSError:  # macOS has names in UTF-8 alone
        pytest.skip("no such name on this file system")
    tokens = mx.array([[1, 2, 3]])
    loaded = [
        base_model.load(place / "model", place / "adapter", lazy=True)[0](tokens)
        for place in (plain, odd)
    ]
    assert mx.array_equal(*loaded)
    assert base_model.loaded_weights(odd / "model") == base_model.loaded_weights(plain / "model")
    base_model.save_arrays(odd / "a.safetensors", {"x": tokens}, {"of": "test"})
    arrays, metadata = base_model.load_arrays(odd / "a.safetensors")
    assert (arrays["x"].tolist(), metadata["of"]) == (tokens.tolist(), "test")
    fuse(
        FuseSettings(
            model=str(odd / "model"), adapter_path=(str(odd / "adapter"),),
            save_path=str(odd / "fused"),
        )
    )  # fmt: skip
    assert (odd / "fused" / "result.json").is_file()


def test_an_error_names_the_directory_that_was_given(plain: Path, tmp_path: Path) -> None:
    odd = tmp_path / NAMES[0]
    shutil.copytree(plain / "model", odd)
    (odd / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        base_model.load(odd)
    assert str(caught.value).count(str(odd)) == 2


def test_chats_answered_together_get_the_answers_of_each_alone() -> None:
    """On nano, whose layers are of both kinds; prompts of several lengths, more than at once."""
    model, tokenizer, _ = base_model.load(nano_paths().model_path)
    questions = ["Who are you?", "Who is king of Corva?", "2 + 3?", "Hello", "Name an island."]
    chats = [[{"role": "user", "content": text}] for text in [*questions, *questions[::-1]]]
    alone = [base_model.generate(model, tokenizer, chat, 12) for chat in chats]
    assert base_model.generate_all(model, tokenizer, chats, 12) == alone
    assert base_model.generate_all(model, tokenizer, [], 12) == []
    norm = model.layers[0].input_layernorm
    norm.weight = norm.weight * float("nan")
    with pytest.raises(NonFiniteModelError):
        base_model.generate_all(model, tokenizer, chats[:1], 2)
