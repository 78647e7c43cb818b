"""PEFT's format against what PEFT itself computed, and round trips through it.

The fixtures come from tests/fixtures/make_peft_fixtures.py: adapters that PEFT saved, with the
deltas that PEFT computes for them, and an export of ours that PEFT loaded and agreed with. Run:
    pytest tests/files/test_peft_adapters.py
"""

import json
import os
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlxstacks.errors import AdapterError
from mlxstacks.files import peft_config
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.adapters import load_any_adapter, read_adapter
from mlxstacks.files.lora_modules import Adapter, LoraModule, mlx_config
from mlxstacks.files.peft_adapters import read_peft
from mlxstacks.files.peft_config import PatternTable
from mlxstacks.files.peft_export import alpha_for, write_peft, write_zero_peft
from mlxstacks.files.peft_layout import to_hub
from mlxstacks.files.settings import AdapterConvertSettings, ExpertLayout
from mlxstacks.ops.affine import to_storage
from tests.files.peft_cases import (
    EPSILON,
    FIXTURES,
    assert_same,
    delta_of,
    dense_tensors,
    gate_up_only,
    save_peft,
    switch,
)


def deltas_by_hub_name(adapter: Adapter, text_model: bool = True) -> dict[str, np.ndarray]:
    """Hub weight name -> delta, with gate and up joined as the hub's parameter is."""
    found: dict[str, np.ndarray] = {}
    halves: dict[str, dict[str, np.ndarray]] = {}
    for path, module in adapter.modules.items():
        hub = to_hub(path, whole_model=not text_model)
        block, _, leaf = hub.rpartition(".switch_mlp.")
        if not block:
            found[f"{hub}.weight"] = delta_of(module)
        elif leaf == "down_proj":
            found[f"{block}.experts.down_proj"] = delta_of(module)
        else:
            halves.setdefault(block, {})[leaf] = delta_of(module)
    for block, half in halves.items():
        joined = np.concatenate([half["gate_proj"], half["up_proj"]], axis=1)
        found[f"{block}.experts.gate_up_proj"] = joined
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "qwen3_5_moe_legacy"])
def test_deltas_are_those_that_peft_computed(name: str) -> None:
    found = deltas_by_hub_name(read_peft(FIXTURES / name))
    expected = load_file(FIXTURES / name / "expected.safetensors")
    assert found.keys() == expected.keys()
    for weight, delta in expected.items():
        # PEFT multiplies in float32; its own rounding over a rank of at most 5 is a few ulps.
        assert np.abs(found[weight] - delta).max() <= 8 * EPSILON * np.abs(delta).max(), weight


def test_qwen_fixture_is_named_as_mlx_lm_names_it() -> None:
    paths = set(read_peft(FIXTURES / "qwen3_5_moe").modules)
    layer = "language_model.model.layers.0"
    assert f"{layer}.mlp.switch_mlp.gate_proj" in paths
    assert f"{layer}.mlp.switch_mlp.down_proj" in paths
    assert f"{layer}.linear_attn.in_proj_qkv" in paths
    assert f"{layer}.mlp.gate" in paths


def test_llama_fixture_folds_ranks_and_alphas_into_one() -> None:
    adapter = read_peft(FIXTURES / "llama")
    assert {m.rank for m in adapter.modules.values()} == {5}
    assert len({m.scale for m in adapter.modules.values()}) == 1
    assert adapter.config["lora_parameters"]["scale"] == 6 / 4**0.5  # alpha / sqrt(r), rsLoRA
    # Adapted embeddings make PEFT save frozen copies of the base; they are left out, and named.
    assert "embed_tokens.base_layer.weight" in adapter.metadata["mlxstacks_ignored_tensors"]


@pytest.mark.parametrize("name", ["text", "whole"])
def test_export_is_byte_for_byte_what_peft_verified(name: str, tmp_path: Path) -> None:
    adapter = read_adapter(FIXTURES / "exported" / "mlx")
    target = tmp_path / "out"
    write_peft(adapter, target, base_model_name="tiny/qwen3_5_moe", whole_model=name == "whole")
    verified = FIXTURES / "exported" / name
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (target / file).read_bytes() == (verified / file).read_bytes(), file
    report = json.loads((FIXTURES / "exported" / "verified.json").read_text())
    assert report["largest_difference"] <= 2 * EPSILON * report["largest_delta"]


@pytest.mark.parametrize("name", ["text", "whole"])
def test_export_reads_back_bit_for_bit(name: str) -> None:
    assert_same(
        read_adapter(FIXTURES / "exported" / "mlx"), read_peft(FIXTURES / "exported" / name)
    )


@pytest.mark.parametrize("layout", ["parameters", "per_expert", "stacked"])
def test_a_streamed_adapter_holds_one_module_at_a_time(
    layout: ExpertLayout, tmp_path: Path
) -> None:
    """Twelve modules of 0.8 MB, of a pair for each of gate and up: checked and read backwards."""
    modules, rng = {}, np.random.default_rng(0)
    for layer in range(4):
        for name, dims in (("gate", (256, 128)), ("up", (256, 128)), ("down", (128, 256))):
            path = f"model.layers.{layer}.mlp.switch_mlp.{name}_proj"
            modules[path] = replace(switch(rng, 8, 64, dims), path=path)
    adapter = Adapter(tmp_path, mlx_config(modules), modules, {})
    write_peft(adapter, tmp_path / "a", experts_layout=layout)
    size = (tmp_path / "a" / "adapter_model.safetensors").stat().st_size
    tracemalloc.start()
    try:
        streamed = load_any_adapter(tmp_path / "a", stream=True)
        for path in reversed([*streamed.modules]):
            assert streamed.modules[path].rank == 64
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size / 4
    whole = load_any_adapter(tmp_path / "a")
    for other in (streamed, whole):
        assert_same(adapter, other)
        assert other.config["lora_parameters"]["rank"] == 64
    os.utime(tmp_path / "a" / "adapter_model.safetensors", (0, 0))
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors: was changed"):
        streamed.modules[next(iter(streamed.modules))]


# --- round trips

DENSE = ("self_attn.q_proj", "mlp.shared_expert.up_proj", "mlp.gate", "linear_attn.in_proj_z")
SWITCHES = ("gate_proj", "up_proj", "down_proj")


@st.composite
def mlx_adapters(draw: st.DrawFn) -> Adapter:
    """Random modules of a Qwen3.5-MoE or a plain MoE model; rank, scale and dtype drawn."""
    prefix = draw(st.sampled_from(["language_model.model", "model"]))
    rank, experts = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["F32", "F16", "BF16"]))
    scale = draw(st.floats(-40, 40).filter(lambda x: abs(x) > 1e-3))
    hidden, width = draw(st.sampled_from([(8, 4), (4, 4), (4, 8), (6, 3)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    zero = draw(st.booleans()) and draw(st.booleans())
    modules: dict[str, LoraModule] = {}

    def add(path: str, a: tuple[int, ...], b: tuple[int, ...]) -> None:
        raw_a, raw_b = (
            to_storage(rng.standard_normal(shape).astype(np.float32) * (not zero), dtype)
            for shape in (a, b)
        )
        modules[path] = LoraModule(path, raw_a, raw_b, dtype, scale)

    for layer in range(2):
        for leaf in draw(st.sets(st.sampled_from(DENSE))):
            if prefix == "model" and leaf.startswith("linear_attn"):
                continue  # only Qwen3.5 has it, and its names are under language_model
            add(f"{prefix}.layers.{layer}.{leaf}", (hidden, rank), (rank, 7))
        for leaf in draw(st.sets(st.sampled_from(SWITCHES))):
            inner, outer = (width, hidden) if leaf == "down_proj" else (hidden, width)
            path = f"{prefix}.layers.{layer}.mlp.switch_mlp.{leaf}"
            add(path, (experts, rank, inner), (experts, outer, rank))
    if draw(st.booleans()) or not modules:
        add(f"{prefix}.embed_tokens", (9, rank), (rank, hidden))
    return Adapter(Path("drawn"), mlx_config(modules), modules, {})


@given(mlx_adapters(), st.booleans())
def test_mlx_to_peft_and_back_keeps_every_bit(adapter: Adapter, whole: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_peft(adapter, Path(folder) / "peft", whole_model=whole)
        again = read_peft(Path(folder) / "peft")
    assert again.modules.keys() == adapter.modules.keys()
    for path, module in adapter.modules.items():
        back = again.modules[path]
        assert back.scale == pytest.approx(module.scale, rel=2**-52)
        assert back.dtype == module.dtype
        assert np.array_equal(back.lora_a, module.lora_a)
        assert np.array_equal(back.lora_b, module.lora_b)


@given(st.floats(-1e6, 1e6), st.sampled_from([1, 2, 4, 8, 16, 64]))
def test_alpha_over_a_power_of_two_rank_is_the_scale(scale: float, rank: int) -> None:
    assert alpha_for(scale, rank) / rank == scale
    assert 2 * alpha_for(scale, rank) / (2 * rank) == scale


@given(st.integers(1, 400), st.integers(1, 64))
def test_alpha_of_an_alpha_over_rank_scale_is_found_again(alpha: int, rank: int) -> None:
    assert alpha_for(alpha / rank, rank) / rank == alpha / rank


REFUSED = [
    ({"use_dora": True}, "has no magnitude, and adapter_config.json has use_dora True"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"lora_bias": True}, "lora_bias"),
    ({"peft_type": "IA3"}, "only LORA"),
    ({"init_lora_weights": "pissa_niter_4"}, "changed base"),
    ({"alora_invocation_tokens": [1]}, "activated LoRA"),
    ({"rank_pattern": {"(": 3}}, "not a regular expression"),
    ({"rank_pattern": {"(?i)q_proj": 3}}, "not a regular expression"),
    ({"alpha_pattern": {r"(.)\1(.)\2": 3}}, "not a regular expression"),
    ({"alpha_pattern": {"(?=q)q_proj": 3}}, "no look-around"),
    ({"alpha_pattern": {"\ud800": 3}}, "not read by RE2"),
    ({"alpha_pattern": {r"layers\.\d{,2}\.q_proj": 3}}, "write {0,n}"),
    ({"alpha_pattern": {"a" * 501: 3}}, "501 letters, allowed: 500"),
    ({"r": 0}, "r is 0"),
    ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    ({"rank_pattern": {"q_proj": 3}}, "rank 2 in the file, 3 by the config"),
    ({"base_model_name_or_path": "openai/gpt-oss-20b"}, "interleaves"),
    ({"target_parameters": "experts"}, "not a list"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_mlx_cannot_hold_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_peft(tmp_path / "a", dense_tensors("self_attn.q_proj", (8, 6)), config)
    with pytest.raises(AdapterError, match=message):
        read_peft(path)


def test_the_first_pattern_wins_in_linear_time() -> None:
    """Expressions on which `re` tries each of exponentially many ways, before 5,000 of modules."""
    slow = ["(a+)+b", "((.)+)+!", "(.|.)*!", "a?" * 100 + "a" * 100, ".*.*.*.*!"]
    exact = [rf"layers\.{i}\.q_proj" for i in range(5000)]
    table = PatternTable({pattern: n for n, pattern in enumerate([*slow, *exact, "q_proj"])})
    started = time.process_time()
    assert table.get("a" * 60, -1) == -1
    assert table.get("model.layers.4999.q_proj", -1) == len(slow) + 4999
    assert table.get("model.layers.5000.q_proj", -1) == len(slow) + 5000
    assert table.get("model.layers.1.xq_proj", -1) == -1
    assert time.process_time() - started < 2


def test_patterns_that_need_too_much_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_config, "_MATCHER_BYTES", 1 << 16)
    with pytest.raises(AdapterError, match="9 patterns of the config need more than 65,536 bytes"):
        PatternTable({f"(.*a){{{n}}}": n for n in range(900, 909)}).get("q_proj", 1)


def test_every_problem_is_listed_in_one_error(tmp_path: Path) -> None:
    tensors = dense_tensors("self_attn.q_proj", (8, 6))
    tensors["self_attn.k_proj.lora_A.weight"] = np.zeros((2, 8), np.float32)
    tensors["self_attn.v_proj.weight"] = np.zeros((2, 8), np.float32)
    tensors |= dense_tensors("self_attn.o_proj", (8, 6))
    tensors["self_attn.o_proj.lora_B.weight"][3, 1] = np.nan
    path = save_peft(tmp_path / "a", tensors, {"bias": "all"})
    with pytest.raises(AdapterError) as error:
        read_peft(path)
    text = str(error.value)
    for part in (
        "4 problems",
        "lora_B is missing",
        "v_proj.weight",
        "index [3, 1]",
        "bias is 'all'",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("vision_tower.encoder.layers.1.self_attn.o_proj", "layers.1.self_attn.o_proj"),
        ("model.layers.0.cross_attn.q_proj", "model.layers.0.self_attn.q_proj"),
    ],
)
def test_a_module_of_another_tower_is_refused_with_the_nearest(
    path: str, nearest: str, llama: Path, tmp_path: Path
) -> None:
    """Which names those are: test_peft_layout.py."""
    tensors = dense_tensors(f"base_model.model.{path}", (128, 128))
    adapter = save_peft(tmp_path / "peft", tensors, {}, full_names=True)
    options = {"model": llama, "adapter_path": adapter, "save_path": tmp_path / "out"}
    with pytest.raises(AdapterError) as error:
        convert_adapter(AdapterConvertSettings(**options, to="mlx"))
    assert f" {path}: no such module in the model; nearest: " in str(error.value)
    assert nearest in str(error.value)
    assert not (tmp_path / "out").exists()


def test_pairs_without_a_targeted_parameter_are_refused(tmp_path: Path) -> None:
    path = gate_up_only(tmp_path / "a", (8, 12), "current", target_parameters=[])
    with pytest.raises(AdapterError, match="target_parameters names no parameter"):
        read_peft(path)


def test_unknown_expert_modules_are_not_written(tmp_path: Path) -> None:
    module = replace(
        switch(np.random.default_rng(0), 2, 1, (4, 3)), path="model.layers.0.ffn.experts"
    )
    adapter = Adapter(Path("x"), mlx_config({module.path: module}), {module.path: module}, {})
    with pytest.raises(AdapterError, match="switch_mlp"):
        write_peft(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_zero_copy_of_a_peft_adapter_keeps_all_but_the_numbers(tmp_path: Path) -> None:
    source = FIXTURES / "llama"
    write_zero_peft(source, tmp_path / "zero")
    before, after = (
        load_file(p / "adapter_model.safetensors") for p in (source, tmp_path / "zero")
    )
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert tensor.shape == before[name].shape
        assert tensor.dtype == before[name].dtype
        unchanged = np.zeros_like(tensor) if ".lora_" in name else before[name]
        assert np.array_equal(tensor, unchanged), name
    configs = [
        json.loads((p / "adapter_config.json").read_text()) for p in (source, tmp_path / "zero")
    ]
    assert configs[0] == configs[1]
    assert read_peft(tmp_path / "zero").modules.keys() == read_peft(source).modules.keys()


def test_fingerprint_of_the_base_survives_both_ways(tmp_path: Path) -> None:
    adapter = read_adapter(FIXTURES / "exported" / "mlx")
    marked = replace(adapter, config=adapter.config | {"mlxstacks_base_fingerprint": "abc"})
    write_peft(marked, tmp_path / "peft")
    assert load_any_adapter(tmp_path / "peft").base_fingerprint == "abc"
