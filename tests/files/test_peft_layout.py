"""Names of modules and layouts of experts, of Hugging Face with PEFT and of mlx-lm, both ways.

Run: pytest tests/files/test_peft_layout.py
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlxstacks.errors import AdapterError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.peft_adapters import read_peft
from mlxstacks.files.peft_export import write_peft
from mlxstacks.files.peft_layout import (
    has_language_model,
    in_model,
    join_gate_up,
    to_hub,
    to_mlx,
)
from mlxstacks.files.settings import PeftLayout
from tests.files.peft_cases import (
    FIXTURES,
    as_pair,
    assert_same,
    delta_of,
    dense_tensors,
    gate_up_only,
    save_peft,
    switch,
)

NAMES = [
    (
        "language_model.model.layers.3.linear_attn.in_proj_qkv",
        "model.layers.3.linear_attn.in_proj_qkv",
    ),
    (
        "language_model.model.layers.3.mlp.shared_expert_gate",
        "model.layers.3.mlp.shared_expert_gate",
    ),
    ("language_model.model.embed_tokens", "model.embed_tokens"),
    ("language_model.lm_head", "lm_head"),
    ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
    ("lm_head", "lm_head"),
]


@pytest.mark.parametrize(("mlx", "hub"), NAMES)
def test_names_go_both_ways(mlx: str, hub: str) -> None:
    assert to_hub(mlx) == hub
    is_language_model = mlx.startswith("language_model.")
    assert to_mlx(hub, is_language_model) == mlx
    assert to_mlx(to_hub(mlx, whole_model=True), is_language_model) == mlx


LAYER = (
    "self_attn.q_proj", "self_attn.o_proj", "linear_attn.out_proj", "mlp.shared_expert.gate_proj",
    "mlp.switch_mlp.up_proj", "mlp.gate",
)  # fmt: skip
TEXT = [f"model.layers.{layer}.{name}" for layer in (1, 11) for name in LAYER]
WHOLE = [f"language_model.{name}" for name in (*TEXT, "model.embed_tokens", "lm_head")]
NESTED = [f"model.language_model.layers.1.{name}" for name in LAYER]
MIXTRAL = [name.replace(".mlp.", ".block_sparse_moe.") for name in TEXT]


@pytest.mark.parametrize(
    ("path", "modules", "module"),
    [
        ("model.layers.1.mlp.switch_mlp.up_proj", MIXTRAL, "block_sparse_moe.switch_mlp.up_proj"),
        ("model.layers.1.mlp.gate", MIXTRAL, "block_sparse_moe.gate"),
        ("model.layers.11.block_sparse_moe.gate", TEXT, "model.layers.11.mlp.gate"),
        ("language_model.model.layers.1.self_attn.q_proj", TEXT, "self_attn.q_proj"),
        ("model.language_model.layers.1.self_attn.q_proj", TEXT, "self_attn.q_proj"),
        ("layers.1.self_attn.q_proj", TEXT, "self_attn.q_proj"),
        ("model.layers.11.mlp.gate", WHOLE, "language_model.model.layers.11.mlp.gate"),
        ("model.language_model.layers.1.mlp.gate", WHOLE, "language_model.model.layers.1.mlp.gate"),
        ("model.embed_tokens", WHOLE, "language_model.model.embed_tokens"),
        ("lm_head", WHOLE, "language_model.lm_head"),
        ("model.layers.1.mlp.gate", NESTED, "model.language_model.layers.1.mlp.gate"),
        ("model.layers.1.mlp.switch_mlp.up_proj", ["model.layers.1.mlp.experts.switch_mlp.up_proj"],
         "mlp.experts.switch_mlp.up_proj"),
        ("mtp.layers.1.mlp.gate", [*TEXT, "mtp.layers.1.mlp.gate"], "mtp.layers.1.mlp.gate"),
    ],
)  # fmt: skip
def test_a_name_of_another_version_is_the_models_own(
    path: str, modules: list[str], module: str
) -> None:
    (found,) = in_model([path], modules)
    assert found in modules
    assert found in (module, f"model.layers.1.{module}")


@pytest.mark.parametrize("modules", [TEXT, WHOLE, NESTED, MIXTRAL])
@pytest.mark.parametrize(
    "path",
    [
        "vision_tower.encoder.layers.1.self_attn.o_proj",
        "model.vision_tower.encoder.layers.1.self_attn.o_proj",
        "audio_tower.layers.1.self_attn.o_proj",
        "mtp.layers.1.self_attn.o_proj",
        "model.mtp.layers.1.mlp.switch_mlp.up_proj",
        "model.layers.1.cross_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.self_attn.out_proj",
        "model.layers.1.feed_forward.switch_mlp.up_proj",
        "model.layers.2.mlp.gate",
        "model.decoder.layers.1.self_attn.q_proj",
    ],
)
def test_a_name_of_another_part_is_none_of_the_text_models(path: str, modules: list[str]) -> None:
    assert in_model([path], modules) == [path]


def test_a_name_that_two_modules_have_is_neither() -> None:
    both = ["model.layers.1.mlp.gate", "model.layers.1.block_sparse_moe.gate"]
    assert in_model(["layers.1.mlp.gate", both[1]], both) == ["layers.1.mlp.gate", both[1]]


def test_only_granite_keeps_the_old_name_of_its_block() -> None:
    name = "model.layers.0.block_sparse_moe.gate"
    assert to_hub(name) == to_hub(name, model_type="mixtral") == "model.layers.0.mlp.gate"
    assert to_hub(name, model_type="granitemoe") == name


@pytest.mark.parametrize(
    ("paths", "config", "expected"),
    [
        (["model.layers.0.self_attn.q_proj"], {}, False),
        (["model.language_model.layers.0.self_attn.q_proj"], {}, True),
        (["model.layers.0.linear_attn.in_proj_qkv"], {}, True),
        (["model.layers.0.linear_attn.in_proj_qkvz"], {}, False),
        (["model.layers.0.mlp.gate"], {"base_model_name_or_path": "Qwen/Qwen3.5-35B-A3B"}, True),
        (["model.layers.0.mlp.gate"], {"base_model_name_or_path": "Qwen/Qwen3-30B-A3B"}, False),
        (["lm_head"], {"auto_mapping": {"base_model_class": "Qwen3_5MoeForCausalLM"}}, True),
    ],
)
def test_family_is_known_by_evidence(
    paths: list[str], config: dict[str, Any], expected: bool
) -> None:
    assert has_language_model(paths, config) is expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_split_undoes_join_of_gate_and_up(experts: int, rank: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate = switch(rng, experts, rank, (5, 3))
    up = replace(switch(rng, experts, rank, (5, 3)), path="up_proj")
    joined, _ = join_gate_up(gate, up)
    with tempfile.TemporaryDirectory() as folder:
        config = {"target_parameters": ["experts.gate_up_proj"], "r": 2 * rank}
        path = save_peft(Path(folder) / "a", as_pair(joined, "current"), config)
        parts = read_peft(path, layout="current").modules
    for original, (name, part) in zip((gate, up), parts.items(), strict=True):
        assert name == f"model.layers.0.mlp.switch_mlp.{original.path}"
        assert np.array_equal(part.lora_a, original.lora_a)
        assert np.array_equal(part.lora_b, original.lora_b)


@given(st.sampled_from(["current", "legacy"]), st.integers(1, 4), st.integers(1, 3))
def test_both_layouts_hold_the_same_pair(layout: PeftLayout, experts: int, rank: int) -> None:
    module = switch(np.random.default_rng(experts), experts, rank, (5, 3))
    with tempfile.TemporaryDirectory() as folder:
        config = {"target_parameters": ["experts.down_proj"], "r": rank}
        path = save_peft(Path(folder) / "a", as_pair(module, layout), config)
        (read,) = read_peft(path, layout=layout).modules.values()
    assert np.array_equal(read.lora_a, module.lora_a)
    assert np.array_equal(read.lora_b, module.lora_b)


@pytest.mark.parametrize("layout", ["current", "legacy"])
def test_ambiguous_layout_needs_the_users_word(layout: PeftLayout, tmp_path: Path) -> None:
    path = gate_up_only(tmp_path / "a", (8, 8), layout)
    with pytest.raises(AdapterError, match="--peft-layout current"):
        read_peft(path)
    gate = read_peft(path, layout=layout).modules["model.layers.0.mlp.switch_mlp.gate_proj"]
    original = switch(np.random.default_rng(1), 3, 2, (8, 8))
    assert np.array_equal(gate.lora_a, original.lora_a)
    assert np.array_equal(gate.lora_b, original.lora_b[:, :4])


@pytest.mark.parametrize(
    ("layout", "version"), [("current", "0.19.1"), ("legacy", "0.18.2.dev0@x")]
)
def test_recorded_peft_version_decides_what_shapes_leave_open(
    layout: PeftLayout, version: str, tmp_path: Path
) -> None:
    path = gate_up_only(tmp_path / "a", (8, 8), layout, peft_version=version)
    assert_same(read_peft(path), read_peft(path, layout=layout))


@pytest.mark.parametrize("layout", ["current", "legacy"])
def test_dense_modules_or_the_model_tell_the_hidden_size(
    layout: PeftLayout, tmp_path: Path
) -> None:
    with_dense = gate_up_only(tmp_path / "a", (8, 12), layout, hidden=8)
    assert_same(read_peft(with_dense), read_peft(with_dense, layout=layout))
    alone = gate_up_only(tmp_path / "b", (8, 12), layout)
    stored: dict[str, Any] = {
        f"model.layers.0.mlp.switch_mlp.{n}_proj.weight": Mock(shape=(2, 2, 2))
        for n in ("gate", "up")
    }
    model = Checkpoint(Path("m"), {"text_config": {"hidden_size": 8}}, (), stored, None)
    assert_same(read_peft(alone, model=model), read_peft(alone, layout=layout))


def test_a_layout_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = gate_up_only(tmp_path / "a", (8, 12), "current", hidden=8)
    with pytest.raises(AdapterError, match=r"'legacy'.*hidden size 8"):
        read_peft(path, layout="legacy")
    odd = gate_up_only(tmp_path / "b", (7, 9), "current")
    with pytest.raises(AdapterError, match="neither layout"):
        read_peft(odd)


@pytest.mark.parametrize("version", ["0.18.1", "0.21.2"])
def test_legacy_fixture_is_known_by_its_shapes(version: str, tmp_path: Path) -> None:
    source = FIXTURES / "qwen3_5_moe_legacy"
    config = json.loads((source / "adapter_config.json").read_text()) | {"peft_version": version}
    tensors = load_file(source / "adapter_model.safetensors")
    again = save_peft(tmp_path / "a", tensors, config, full_names=True)
    assert_same(read_peft(again), read_peft(source))


def test_shared_rank_is_kept_by_gate_and_up(tmp_path: Path) -> None:
    adapter = read_peft(gate_up_only(tmp_path / "a", (8, 12), "current", peft_version="0.20.0"))
    gate, up = (adapter.modules[f"model.layers.0.mlp.switch_mlp.{n}_proj"] for n in ("gate", "up"))
    assert gate.rank == up.rank == 2
    assert np.array_equal(gate.lora_a, up.lora_a)
    write_peft(adapter, tmp_path / "b")
    written = load_file(tmp_path / "b" / "adapter_model.safetensors")
    original = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert all(np.array_equal(written[k], original[k]) for k in original)


def test_gate_and_up_of_unequal_scale_or_shape_are_not_joined() -> None:
    rng = np.random.default_rng(0)
    gate, up, wide = (switch(rng, 3, rank, (8, 6)) for rank in (2, 2, 4))
    with pytest.raises(AdapterError, match="one shape and scale"):
        join_gate_up(gate, replace(up, scale=2 * gate.scale))
    with pytest.raises(AdapterError, match="one shape and scale"):
        join_gate_up(gate, wide)


def test_a_half_that_is_zero_throughout_is_dropped(tmp_path: Path) -> None:
    module = switch(np.random.default_rng(2), 3, 2, (8, 12))
    module.lora_b[:, :6] = 0
    tensors = as_pair(module, "current")
    config = {"target_parameters": ["experts.gate_up_proj"]}
    adapter = read_peft(save_peft(tmp_path / "a", tensors, config), layout="current")
    assert list(adapter.modules) == ["model.layers.0.mlp.switch_mlp.up_proj"]


def test_experts_adapted_one_by_one_are_stacked(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {}
    for expert in range(3):
        tensors |= dense_tensors(f"mlp.experts.{expert}.up_proj", (8, 6), seed=expert)
    adapter = read_peft(save_peft(tmp_path / "a", tensors, {}))
    (module,) = adapter.modules.values()
    assert module.path == "model.layers.0.mlp.switch_mlp.up_proj"
    second = (
        tensors["mlp.experts.1.up_proj.lora_B.weight"]
        @ tensors["mlp.experts.1.up_proj.lora_A.weight"]
    )
    assert np.allclose(delta_of(module)[1], 2 * second)
    magnitudes = {
        f"mlp.experts.{e}.up_proj.lora_magnitude_vector": np.ones(6, np.float32) for e in range(3)
    }
    with pytest.raises(AdapterError, match="up_proj: DoRA of experts"):
        read_peft(save_peft(tmp_path / "dora", tensors | magnitudes, {"use_dora": True}))
    del (
        tensors["mlp.experts.1.up_proj.lora_A.weight"],
        tensors["mlp.experts.1.up_proj.lora_B.weight"],
    )
    with pytest.raises(AdapterError, match=r"experts \[0, 2\] are adapted one by one"):
        read_peft(save_peft(tmp_path / "b", tensors, {}))
