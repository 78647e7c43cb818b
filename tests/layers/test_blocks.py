"""Capability blocks: nothing at weight 0, protected directions, caches, the store.

Run: pytest tests/layers/test_blocks.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.block_file import METADATA_KEY, read_block, write_block
from mlxstacks.files.outputs import write_json
from mlxstacks.files.settings import StacksExportSettings, StacksVerifySettings
from mlxstacks.files.stack_adapters import export_stack
from mlxstacks.files.stack_file import write_arrays, write_tensors
from mlxstacks.files.store import Store
from mlxstacks.files.store_verify import verify_store
from mlxstacks.layers.blocks import (
    BlockedDecoder,
    CapabilityBlock,
    attach_blocks,
    load_block,
    new_block,
    store_block,
)
from mlxstacks.layers.settings import StackSettings
from mlxstacks.routing.blocks import ResidentBlocks
from mlxstacks.routing.features import without_stacks
from mlxstacks.training.initial import set_initial_weights
from tests.files.store_cases import BASE, add_domain

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 40,
    "tie_word_embeddings": True, "max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
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
    assert len(cache) == 2 + 1
    parts = [model(TOKENS[:, :2], cache), *(model(TOKENS[:, i : i + 1], cache) for i in (2, 3))]
    assert mx.allclose(mx.concatenate(parts, axis=1), whole, atol=1e-5)
    model.model.select({"a": 1.0, "b": 0.7})
    with pytest.raises(ValueError, match="when other blocks were selected"):
        model(TOKENS, cache)


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


def a_store(path: Path) -> Store:
    """Two blocks, the second one disabled."""
    store = Store.create(path, "base", BASE)
    for seed, name in ((1, "a"), (2, "b")):
        store_block(store, name, a_block(seed), StackSettings(rank=2), enabled=name == "a")
    return store


def test_a_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    store, x = a_store(tmp_path / "store"), mx.random.normal((1, 4, 16), key=mx.random.key(9))
    with pytest.raises(InputError, match="holds capability blocks in place of stacks; generate"):
        Store.open(store.path)
    again = Store.open(store.path, blocks=True)
    (record,) = again.enabled_stacks()
    assert mx.array_equal(load_block(again.read_block(record), CONFIG)(x), a_block(1)(x))
    assert not attach_blocks(base_model.build_model(CONFIG)).blocks
    model = base_model.build_model(CONFIG)
    resident = ResidentBlocks(model, again, CONFIG)
    assert resident.domains == ("a",)
    with resident.lease({"a": 0.5}) as lease:
        assert model.model.selected == lease.weights == {"a": 0.5}
        with without_stacks(model):
            assert model.model.selected == {}
        assert model.model.selected == {"a": 0.5}
    assert model.model.selected == {}


def test_blocks_and_stacks_do_not_share_a_store(tmp_path: Path) -> None:
    store = a_store(tmp_path / "store")
    before = store.manifest
    with pytest.raises(ValueError, match="must lie in blocks"):
        add_domain(store, "c", 1)
    with pytest.raises(ValueError, match="two domains named a"):
        store_block(store, "a", a_block(1), StackSettings(rank=2))
    other = replace(before, base_fingerprint="full:" + "c" * 64)
    with pytest.raises(StoreError, match="its header says base fingerprint"):
        Store(store.path, other).read_block(before.stacks[0])
    assert Store.open(store.path, blocks=True).manifest == before
    assert not list((store.path / "stacks").iterdir())


def verified(path: Path) -> dict[str, str]:
    """File -> kind of its problem."""
    problems = verify_store(StacksVerifySettings(store_path=str(path))).problems
    return {problem.file: problem.kind for problem in problems}


def test_verify_finds_a_byte_that_was_changed_anywhere(tmp_path: Path) -> None:
    store = a_store(tmp_path / "store")
    assert verified(store.path) == {}
    record = store.manifest.stacks[1]
    path = store.path / record.file.file
    whole = path.read_bytes()
    for place in (0, 9, 40, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert verified(store.path) == {record.file.file: "bytes"}
        with pytest.raises(StoreError, match=path.name):
            store.read_block(record)
    path.write_bytes(whole[:-1])
    assert verified(store.path) == {record.file.file: "size"}
    path.unlink()
    assert verified(store.path) == {record.file.file: "missing"}
    with pytest.raises(StoreError, match="missing"):
        store.read_block(record)


@pytest.mark.parametrize("dies_at", ["previous.json", "manifest.json"])
def test_a_write_that_dies_leaves_the_old_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    store = a_store(tmp_path / "store")
    before = store.manifest

    def write(path: Path, *args: Any, **options: Any) -> None:
        if path.name == dies_at:
            raise KeyboardInterrupt
        write_json(path, *args, **options)

    monkeypatch.setattr("mlxstacks.files.store.write_json", write)
    with pytest.raises(KeyboardInterrupt):
        store_block(store, "c", a_block(7), StackSettings(rank=2))
    assert Store.open(store.path, blocks=True).manifest == before
    assert verified(store.path) == {}


def test_hostile_files_of_blocks_are_refused(tmp_path: Path) -> None:
    store = a_store(tmp_path / "store")
    file = store.read_block(store.manifest.stacks[0])
    arrays, head = file.tensors, file.header
    path = tmp_path / "block.safetensors"
    with pytest.raises(ValueError, match="NaN or Inf"):
        write_block(path, arrays | {"norm.weight": mx.full((16,), mx.nan)}, head)
    write_tensors(path, head.tensors(), arrays | {"norm.weight": mx.full((16,), mx.nan)},
                  {METADATA_KEY: json.dumps(head.as_json())})  # fmt: skip
    with pytest.raises(StoreError, match=r"norm\.weight: NaN or Inf"):
        read_block(path)
    write_arrays(tmp_path / "arrays.safetensors", arrays)
    with pytest.raises(StoreError, match="no capability block: its metadata has no key"):
        read_block(tmp_path / "arrays.safetensors")
    lies: list[tuple[dict[str, Any], str]] = [
        ({"num_layers": 65_536}, "1 layers, its header says 65536"),
        ({"stack": {"rank": 8}}, "its arrays are not those of its settings and this base"),
        ({"stack": {"rank": 10**9}}, "rank"),
        ({"stack": {"colour": 1}}, "colour"),
    ]
    for number, (lie, message) in enumerate(lies):
        path = tmp_path / f"{number}.safetensors"
        write_block(path, arrays, replace(head, **lie))
        with pytest.raises(StoreError, match=message):
            load_block(read_block(path), CONFIG)
    path = tmp_path / "whole.safetensors"
    write_block(path, arrays, head)
    with pytest.raises(StoreError, match="not those of its settings and this base"):
        load_block(read_block(path), CONFIG | {"hidden_size": 32})


def test_any_domain_is_exported_as_a_store(tmp_path: Path) -> None:
    store = a_store(tmp_path / "store")

    def export(stack: str | None, to: str, name: str) -> Path:
        export_stack(StacksExportSettings.model_validate({
            "store_path": str(store.path), "stack": stack, "save_path": str(tmp_path / name),
            "to": to,
        }))  # fmt: skip
        return tmp_path / name

    one, whole = export("b", "store", "one"), export(None, "store", "whole")
    assert (whole / "manifest.json").read_bytes() == (store.path / "manifest.json").read_bytes()
    assert verified(one) == verified(whole) == {}
    assert [s.name for s in Store.open(one, blocks=True).manifest.stacks] == ["b-r1"]
    with pytest.raises(InputError, match="No weight of the base can take it in"):
        export("b", "mlx", "adapter")
    path = store.path / store.manifest.stacks[0].file.file
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match="not exported, for it is damaged: blocks/a-r1"):
        export("a", "store", "damaged")
    assert not (tmp_path / "damaged").exists()
