"""mlx-lm adapters: reading, the zero copy, and the match with a checkpoint.

mlx-lm is the judge: what is written must load there and do there what it says. Run:
    pytest tests/files/test_adapters.py
"""

import contextlib
import json
import re
import shutil
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxstacks.errors import AdapterError, TargetError
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.adapters import (
    load_any_adapter,
    match_adapter,
    read_adapter,
    write_adapter,
    zero_adapter,
)
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.lora_modules import CONFIG, Adapter, LoraModule, mlx_config, outside_config
from mlxstacks.files.settings import (
    AdapterConvertSettings,
)
from tests.files.adapter_cases import Q_PROJ, edited
from tests.files.peft_cases import FIXTURES
from tests.tiny_models import random_adapter

PROMPT = mx.array([[3, 1, 4, 1, 5, 9]])


def logits(model_path: Path, adapter_path: Path | None) -> mx.array:
    from mlx_lm.utils import load

    model = load(str(model_path), adapter_path=str(adapter_path) if adapter_path else None)[0]
    return model(PROMPT)


def test_read_then_write_is_the_same_adapter(moe_adapter: Path, tmp_path: Path) -> None:
    write_adapter(read_adapter(moe_adapter), tmp_path / "out")
    before, after = (
        mx.load(str(p / "adapters.safetensors")) for p in (moe_adapter, tmp_path / "out")
    )
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert mx.array_equal(after[name], tensor)
    configs = [
        json.loads((p / "adapter_config.json").read_text()) for p in (moe_adapter, tmp_path / "out")
    ]
    assert configs[0] == configs[1]


def test_a_streamed_adapter_is_the_one_in_memory(moe_adapter: Path) -> None:
    whole, streamed = read_adapter(moe_adapter), read_adapter(moe_adapter, stream=True)
    assert [*streamed.modules] == [*whole.modules]
    for path in reversed([*whole.modules]):  # in an order that is not the file's
        module, other = whole.modules[path], streamed.modules[path]
        assert (module.path, module.dtype, module.scale) == (other.path, other.dtype, other.scale)
        np.testing.assert_array_equal(module.lora_a, other.lora_a)
        np.testing.assert_array_equal(module.lora_b, other.lora_b)
    assert whole.config == streamed.config


def test_a_streamed_adapter_holds_one_module_at_a_time(llama: Path, tmp_path: Path) -> None:
    """Eight modules of 3 to 4 MB, checked, matched and read in the memory of two."""
    checkpoint, modules = open_checkpoint(llama), {}
    for layer in range(2):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            path = f"model.layers.{layer}.self_attn.{name}"
            rows = checkpoint.tensors[f"{path}.weight"].shape[0]
            a, b = np.zeros((128, 4096), np.float32), np.zeros((4096, rows), np.float32)
            modules[path] = LoraModule(path, a, b, "F32", 1.0)
    target = tmp_path / "adapter"
    write_adapter(Adapter(llama, mlx_config(modules), modules, {}), target)
    most = max(m.lora_a.nbytes + m.lora_b.nbytes for m in modules.values())
    del modules
    tracemalloc.start()
    try:
        adapter = load_any_adapter(target, stream=True)
        for match in match_adapter(adapter, checkpoint):
            assert match.module.rank == 4096
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * most < (target / "adapters.safetensors").stat().st_size / 3


def test_an_adapter_that_changes_under_a_stream_is_refused(
    moe_adapter: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(moe_adapter, tmp_path / "a")
    adapter = read_adapter(path, stream=True)
    new = tmp_path / "new"
    shutil.copyfile(path / "adapters.safetensors", new)
    new.replace(path / "adapters.safetensors")
    with pytest.raises(AdapterError, match=r"adapters\.safetensors: was changed"):
        adapter.modules[next(iter(adapter.modules))]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("dora", "has no magnitude"), ("full", "no low-rank delta"), ("x", "only")],
)
def test_other_fine_tunes_are_refused_by_name(
    kind: str, message: str, llama_adapter: Path, tmp_path: Path
) -> None:
    path = edited(llama_adapter, tmp_path / "a", lambda _, c: c.update(fine_tune_type=kind))
    with pytest.raises(AdapterError, match=message):
        read_adapter(path)


@pytest.mark.parametrize("stream", [False, True])
def test_every_problem_of_a_file_is_in_one_error(
    llama_adapter: Path, tmp_path: Path, stream: bool
) -> None:
    other = Q_PROJ.replace("0", "1")

    def spoil(tensors: dict[str, mx.array], config: dict[str, Any]) -> None:
        del tensors[f"{Q_PROJ}.lora_b"]
        tensors[f"{other}.lora_a"] = tensors[f"{other}.lora_a"][:, :1]
        tensors["model.layers.0.mlp.down_proj.lora_a"][5, 1] = float("nan")
        down = "model.layers.1.mlp.down_proj.lora_b"
        tensors[down] = tensors[down].astype(mx.int32)
        tensors["model.norm.weight"] = mx.ones(4)
        config["lora_parameters"] = {"rank": 2, "alpha": 16}

    with pytest.raises(AdapterError) as error:
        read_adapter(edited(llama_adapter, tmp_path / "a", spoil), stream)
    text = str(error.value)
    for part in (
        "6 problems",
        f"{Q_PROJ}.lora_b: missing",
        "ranks 1 and 2 differ",
        "NaN or Inf at index [5, 1]",
        "dtype I32",
        "model.norm.weight: not a LoRA tensor",
        "scale is None, not a finite number below 1e30; mlx-lm wants scale, not alpha",
    ):
        assert part in text, part


def test_stack_with_a_token_router_is_refused_with_the_reason(
    llama_adapter: Path, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, mx.array], _: dict[str, Any]) -> None:
        tensors[f"{Q_PROJ}.router"] = mx.ones((4, 8))

    with pytest.raises(AdapterError, match="routes each token has no one delta"):
        read_adapter(edited(llama_adapter, tmp_path / "a", spoil))


def test_infinity_in_bfloat16_is_found(llama: Path, tmp_path: Path) -> None:
    source = random_adapter(llama, ["self_attn.q_proj"], dtype="bfloat16", directory=tmp_path / "a")

    def spoil(tensors: dict[str, mx.array], _: dict[str, Any]) -> None:
        tensors[f"{Q_PROJ}.lora_b"][1, 7] = float("-inf")

    with pytest.raises(AdapterError, match=r"lora_b: NaN or Inf at index \[1, 7\]"):
        read_adapter(edited(source, tmp_path / "b", spoil))


def test_old_expert_layout_is_refused_as_mlx_lm_refuses_it(
    moe_adapter: Path, tmp_path: Path
) -> None:
    name = "language_model.model.layers.0.mlp.switch_mlp.down_proj.lora_a"

    def flatten(tensors: dict[str, mx.array], _: dict[str, Any]) -> None:
        tensors[name] = tensors[name].reshape(-1, tensors[name].shape[-1])

    with pytest.raises(AdapterError, match="old mlx-lm"):
        read_adapter(edited(moe_adapter, tmp_path / "a", flatten))


def test_rank_that_contradicts_the_config_is_refused(llama_adapter: Path, tmp_path: Path) -> None:
    path = edited(llama_adapter, tmp_path / "a", lambda _, c: c["lora_parameters"].update(rank=4))
    with pytest.raises(AdapterError, match=r"rank 2, but adapter_config\.json says 4"):
        read_adapter(path)


@pytest.mark.parametrize("text", ["{", "[1]", '{"lora_parameters": {"scale": NaN}}', ""])
def test_config_that_is_no_json_object_is_refused(
    text: str, llama_adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama_adapter, tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").write_text(text)
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read_adapter(tmp_path / "a")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
MLX_KEYS = ["fine_tune_type", "num_layers", "lora_parameters", "model"]
LORA_KEYS = ["rank", "scale", "dropout", "keys"]
PEFT_KEYS = [
    *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_parameters"),
    *("bias", "init_lora_weights", "base_model_name_or_path", "auto_mapping", "peft_version"),
    *("use_rslora", "modules_to_save", "target_modules"),
]


@settings(max_examples=settings().max_examples // 2)
@given(st.sampled_from(["mlx", "peft"]), st.data())
def test_any_json_in_a_config_is_read_or_refused_cleanly(kind: str, data: st.DataObject) -> None:
    source = FIXTURES / ("exported/mlx" if kind == "mlx" else "qwen3_5_moe")
    config = json.loads((source / "adapter_config.json").read_text())
    keys = MLX_KEYS if kind == "mlx" else PEFT_KEYS
    config |= data.draw(st.dictionaries(st.sampled_from(keys), JSON_VALUES, max_size=2))
    if kind == "mlx" and isinstance(config["lora_parameters"], dict):
        spoilt = st.dictionaries(st.sampled_from(LORA_KEYS), JSON_VALUES, max_size=1)
        config["lora_parameters"] = config["lora_parameters"] | data.draw(spoilt)
    with tempfile.TemporaryDirectory() as folder:
        for file in source.glob("*.safetensors"):
            shutil.copy(file, folder)
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        with contextlib.suppress(AdapterError):
            assert load_any_adapter(folder).modules


def test_broken_safetensors_is_an_adapter_error(llama_adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_adapter, tmp_path / "a")
    file = tmp_path / "a" / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(AdapterError):
        read_adapter(tmp_path / "a")


def test_only_safetensors_adapters_are_read(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="not there"):
        load_any_adapter(tmp_path / "none")
    with pytest.raises(AdapterError, match=r"neither adapters\.safetensors"):
        load_any_adapter(tmp_path)
    for name in ("adapter_model.bin", "adapters.npz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin, adapters\.npz; safetensors alone"):
        load_any_adapter(tmp_path)


def test_zero_copy_loads_in_mlx_lm_and_does_nothing(
    moe: Path, moe_adapter: Path, tmp_path: Path
) -> None:
    adapter = read_adapter(moe_adapter)
    zero = zero_adapter(adapter)
    write_adapter(zero, tmp_path / "zero")
    again = read_adapter(tmp_path / "zero")
    assert again.config == adapter.config
    assert again.modules.keys() == adapter.modules.keys()
    for path, module in again.modules.items():
        original = adapter.modules[path]
        assert (module.dtype, module.scale) == (original.dtype, original.scale)
        assert module.lora_a.shape == original.lora_a.shape
        assert module.lora_b.shape == original.lora_b.shape
        assert not module.lora_a.any()
        assert not module.lora_b.any()
    plain = logits(moe, None)
    assert mx.array_equal(logits(moe, tmp_path / "zero"), plain)
    assert not mx.array_equal(logits(moe, moe_adapter), plain)


@pytest.mark.parametrize("name", ["moe", "llama"])
def test_way_through_peft_gives_mlx_lm_the_same_model(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(name)
    source: Path = request.getfixturevalue(f"{name}_adapter")
    peft, back = str(tmp_path / "peft"), str(tmp_path / "back")
    to_peft = AdapterConvertSettings(adapter_path=str(source), save_path=peft, to="peft")
    assert convert_adapter(to_peft).source_format == "mlx"
    to_mlx = AdapterConvertSettings(adapter_path=peft, save_path=back, to="mlx")
    assert convert_adapter(to_mlx).source_format == "peft"
    before, after = (read_adapter(path).modules for path in (source, back))
    assert before.keys() == after.keys()
    for path, module in before.items():
        assert np.array_equal(after[path].lora_a, module.lora_a)
        assert np.array_equal(after[path].lora_b, module.lora_b)
    assert mx.array_equal(logits(model, Path(back)), logits(model, source))


def test_peft_fixture_loads_in_mlx_lm(tmp_path: Path) -> None:
    """The real PEFT adapter of a tiny Llama fits mlx-lm's model of the same shape."""
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.tuner.utils import load_adapters

    write_adapter(load_any_adapter(FIXTURES / "llama"), tmp_path / "mlx")
    args = ModelArgs("llama", 16, 2, 24, 2, 1e-6, 40, num_key_value_heads=1)
    args.tie_word_embeddings = False
    model = load_adapters(Model(args), str(tmp_path / "mlx"))
    adapted = [n for n, _ in tree_flatten(model.parameters()) if n.endswith("lora_b")]
    assert len(adapted) == 8
    assert mx.isfinite(model(PROMPT)).all()


def test_modules_of_several_scales_are_not_written(llama_adapter: Path, tmp_path: Path) -> None:
    adapter = read_adapter(llama_adapter)
    modules = dict(adapter.modules)
    modules[Q_PROJ] = replace(modules[Q_PROJ], scale=1.0)
    with pytest.raises(AdapterError, match=r"scale 1\.0, the config has 2 and 2\.0"):
        write_adapter(replace(adapter, modules=modules), tmp_path / "a")


def test_existing_target_is_kept_without_force(llama_adapter: Path, tmp_path: Path) -> None:
    adapter = read_adapter(llama_adapter)
    write_adapter(adapter, tmp_path / "a")
    with pytest.raises(TargetError):
        write_adapter(zero_adapter(adapter), tmp_path / "a")
    assert read_adapter(tmp_path / "a").modules[Q_PROJ].lora_a.any()
    write_adapter(zero_adapter(adapter), tmp_path / "a", force=True)
    assert not read_adapter(tmp_path / "a").modules[Q_PROJ].lora_a.any()
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["a"]


@pytest.mark.parametrize(
    ("num_layers", "keys"),
    [
        (1, ["self_attn.q_proj", "mlp.down_proj"]),
        (0, ["self_attn.q_proj", "mlp.down_proj"]),
        (-1, ["self_attn.q_proj"]),
        (16, ["model.layers.0.self_attn.q_proj"]),
        (1, ["model.layers.0.self_attn.q_proj", "mlp.down_proj"]),
        (1, None),
        (16, []),
    ],
)
def test_modules_outside_the_config_are_those_that_mlx_lm_refuses(
    llama: Path, tmp_path: Path, num_layers: int, keys: list[str] | None
) -> None:
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    directory = random_adapter(llama, ["self_attn.q_proj", "mlp.down_proj"], directory=tmp_path)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["num_layers"] = num_layers
    config["lora_parameters"]["keys"] = keys
    (directory / "adapter_config.json").write_text(json.dumps(config))
    model, _ = load_model(llama, lazy=True)
    refused = set()
    try:
        load_adapters(model, str(directory))
    except ValueError as error:
        refused = set(re.findall(r"(\S+)\.lora_[ab]: not an adapter", str(error)))
    assert set(outside_config(read_adapter(directory))) == refused


def test_a_training_that_has_not_finished_is_named(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(AdapterError, match="is there: its training has not finished, or"):
        load_any_adapter(tmp_path)
    (tmp_path / "0000100_adapters.safetensors").write_bytes(b"")
    copy = (
        "0000100_adapters.safetensors is of a training that has not finished: copy it to adapters.s"
    )
    with pytest.raises(AdapterError, match=copy):
        load_any_adapter(tmp_path)
