"""Capability blocks: nothing at weight 0, protected directions, caches, the store.

Run: pytest tests/layers/test_blocks.py
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.errors import StoreError
from mlxstacks.files.block_store import BlockStore, add_block, read_store, verify_blocks
from mlxstacks.layers.blocks import (
    BlockedDecoder,
    CapabilityBlock,
    attach_blocks,
    block_arrays,
    load_block,
    new_block,
)
from mlxstacks.layers.settings import StackSettings
from mlxstacks.training.initial import set_initial_weights

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 40,
    "tie_word_embeddings": True, "max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
SHAPE = {"num_layers": 1, "stack": {"rank": 2}}
TOKENS = mx.array([[1, 5, 9, 2], [7, 7, 3, 30], [4, 8, 15, 16]])


def a_block(seed: int) -> CapabilityBlock:
    """With an output, as after training."""
    key = mx.random.key(seed)
    block = new_block(
        CONFIG, 1, StackSettings(rank=2), key, lambda model: set_initial_weights(model, seed)
    )
    block.out.weight = mx.random.normal((16, 16), key=key)
    block.eval()
    return block


@pytest.fixture
def model() -> nn.Module:
    model = base_model.build_model(CONFIG)
    set_initial_weights(model, 0)
    return model


@pytest.fixture
def blocked(model: nn.Module) -> BlockedDecoder:
    blocked = attach_blocks(model)
    blocked.blocks = {"a": a_block(1), "b": a_block(2)}
    return blocked


def test_at_weight_0_the_model_is_the_base_bit_for_bit(model: nn.Module) -> None:
    base = model(TOKENS)
    blocked = attach_blocks(model)
    blocked.blocks = {"a": a_block(1)}
    assert mx.array_equal(model(TOKENS), base)
    for weights in ({"a": 0.0}, {"a": mx.zeros((3,))}):
        blocked.select(weights)
        assert mx.array_equal(model(TOKENS), base)
    blocked.select({"a": mx.array([0.0, 1.0, 0.5])})
    mixed = model(TOKENS)
    assert mx.array_equal(mixed[0], base[0])
    assert not mx.allclose(mixed[1], base[1])
    with pytest.raises(ValueError, match="no block c; there are a"):
        blocked.select({"c": 1.0})


def test_a_new_block_adds_nothing(model: nn.Module) -> None:
    base = model(TOKENS)
    attach_blocks(model).blocks["new"] = new_block(
        CONFIG, 1, StackSettings(rank=2), mx.random.key(3)
    )
    model.model.select({"new": 1.0})
    model.eval()
    assert mx.allclose(model(TOKENS), base, atol=1e-6)


@pytest.mark.usefixtures("blocked")
def test_outputs_are_those_of_base_and_blocks_added_up(model: nn.Module) -> None:
    blocked = model.model
    x = blocked.embed_tokens(TOKENS)
    norm = blocked.decoder.norm
    blocked.decoder.norm = nn.Identity()
    h = blocked.decoder(TOKENS)
    blocked.decoder.norm = norm
    h = h + 0.25 * blocked.blocks["a"](x) + blocked.blocks["b"](x)
    blocked.select({"a": 0.25, "b": 1.0})
    assert mx.allclose(model(TOKENS), blocked.embed_tokens.as_linear(norm(h)), atol=1e-5)


@pytest.mark.usefixtures("blocked")
def test_with_a_cache_token_by_token_gives_the_same(model: nn.Module) -> None:
    model.model.select({"b": 0.7})
    whole = model(TOKENS)
    cache = base_model.make_prompt_cache(model)
    assert len(cache) == 2 + 1 + 1
    parts = [model(TOKENS[:, :2], cache), *(model(TOKENS[:, i : i + 1], cache) for i in (2, 3))]
    assert mx.allclose(mx.concatenate(parts, axis=1), whole, atol=1e-5)


def test_folding_keeps_the_output_and_its_orthogonality() -> None:
    vectors = mx.array(np.linalg.qr(np.random.default_rng(0).normal(size=(16, 5)))[0])
    vectors = vectors.astype(mx.float32)
    block, x = a_block(4), mx.random.normal((2, 4, 16), key=mx.random.key(9))
    free = block(x)
    block.protect(vectors)
    projected = block(x)
    block.fold()
    assert mx.max(mx.abs(free @ vectors)).item() > 0.1
    assert mx.allclose(block(x), projected, atol=1e-5)
    size = mx.sqrt(mx.sum(block.out.weight**2))
    assert (mx.max(mx.abs(vectors.T @ block.out.weight)) / size).item() < 1e-6
    assert (mx.max(mx.abs(block(x) @ vectors)) / mx.max(mx.abs(block(x)))).item() < 1e-5
    assert not block.trainable_parameters().get("out", {})


def test_a_store_gives_back_what_it_was_given_and_refuses_what_was_changed(tmp_path: Path) -> None:
    block, x = a_block(5), mx.random.normal((1, 4, 16), key=mx.random.key(9))
    store = add_block(
        tmp_path,
        BlockStore(base_fingerprint="full:0", config=CONFIG),
        "a",
        block_arrays(block),
        SHAPE,
    )
    with pytest.raises(StoreError, match="has a block a"):
        add_block(tmp_path, store, "a", block_arrays(block), SHAPE)
    assert verify_blocks(tmp_path) == ("a",)
    again = load_block(tmp_path, read_store(tmp_path), "a")
    assert mx.array_equal(again(x), block(x))
    with pytest.raises(StoreError, match="no block b; the store has a"):
        load_block(tmp_path, store, "b")
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(StoreError):
        verify_blocks(tmp_path)
