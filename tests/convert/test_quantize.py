"""Hub checkpoints to mlx-lm directories: the bytes of `mlx_lm.convert`, and nothing lost.

mlx-lm itself is the other side, run in this process on the same directory.
Run: pytest tests/convert/test_quantize.py
"""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlxstacks.convert.conversion import write
from mlxstacks.convert.quantize import checkpoint_conversion
from mlxstacks.convert.run import convert
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.study.result import Result
from tests.convert.hub_cases import CASES, Tensors, write_hub_model
from tests.tiny_models import random_adapter, write_llama

SIDECARS = {
    "llama": {"extra.safetensors"},
    "llama-tied": {"extra.safetensors"},
    "qwen3_next": {"mtp.safetensors"},
    "qwen3_5": {"mtp.safetensors", "vision.safetensors"},
    "qwen3_5_moe": {"mtp.safetensors", "vision.safetensors"},
    "gemma3": {"vision.safetensors"},
    "deepseek_v3-fp8": {"mtp.safetensors"},
}
GRIDS = [(4, 64), (3, 64), (2, 32), (5, 32), (6, 64), (8, 64)]


def ours(model: Path, target: Path, **settings: Any) -> Result:
    return convert(ConvertSettings(model=str(model), save_path=str(target), **settings))


def theirs(model: Path, target: Path, **options: Any) -> None:
    from mlx_lm.convert import convert as convert_by_mlx_lm

    with contextlib.redirect_stdout(io.StringIO()):
        convert_by_mlx_lm(str(model), str(target), **options)


def tensors_in(directory: Path, pattern: str = "model*.safetensors") -> Tensors:
    tensors: Tensors = {}
    for file in sorted(directory.glob(pattern)):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        assert not tensors.keys() & loaded.keys()
        tensors |= loaded
    return tensors


def assert_same_bytes(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert mx.array_equal(actual[name].view(mx.uint8), array.view(mx.uint8)), name


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_mlx_lm_and_the_rest_is_kept(name: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    model, source = write_hub_model(tmp_path / "hub", name)
    bits, group_size = GRIDS[list(CASES).index(name) % len(GRIDS)]
    report = ours(model, tmp_path / "ours", bits=bits, group_size=group_size)
    theirs(model, tmp_path / "theirs", quantize=True, q_bits=bits, q_group_size=group_size)
    assert_same_bytes(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    config, peer = config_of(tmp_path / "ours"), config_of(tmp_path / "theirs")
    # mlx-lm drops vision_config, and its classes fill in text_config before it is saved.
    shown = config.keys() - {"vision_config", "text_config"}
    assert {key: config[key] for key in shown} == {key: peer.get(key) for key in shown}

    sidecars = {f.name for f in (tmp_path / "ours").glob("*.safetensors")} - {"model.safetensors"}
    assert sidecars == SIDECARS.get(name, set())
    unused = {name: source[name] for name in CASES[name][2]}
    kept: Tensors = {}
    for sidecar in sidecars:
        kept |= tensors_in(tmp_path / "ours", sidecar)
    assert_same_bytes(kept, unused)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_in(tmp_path / "ours").keys() | unused.keys()
    written = {file["file"]: file["bytes"] for file in report.data["files"]}
    assert written.keys() == sidecars | {"model.safetensors"}
    assert sum(written.values()) == index["metadata"]["total_size"]
    load_model(tmp_path / "ours")


def test_floats_and_dtype_are_those_of_mlx_lm(tmp_path: Path) -> None:
    """The dtype asked for goes before the config's; A_log stays float32, as mlx-lm has it."""
    model, _ = write_hub_model(tmp_path / "hub", "qwen3_5")
    plain = checkpoint_conversion(model, None, 64, dtype="float16")
    (tmp_path / "plain").mkdir()
    write(plain, tmp_path / "plain")
    theirs(model, tmp_path / "theirs", dtype="float16")
    assert_same_bytes(tensors_in(tmp_path / "plain"), tensors_in(tmp_path / "theirs"))
    assert "quantization" not in config_of(tmp_path / "plain")
    ours(model, tmp_path / "ours", bits=4, dtype="float16")
    shutil.rmtree(tmp_path / "theirs")
    theirs(model, tmp_path / "theirs", quantize=True, q_bits=4, dtype="float16")
    assert_same_bytes(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))


def test_mixed_widths_by_pattern(tmp_path: Path) -> None:
    """The last match wins, router gates included; config entries are those that mlx-lm writes."""

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path.endswith("embed_tokens"):
            return False
        width = {"gate": 5, "v_proj": 8, "gate_proj": 3}.get(path.rsplit(".", 1)[-1])
        width = 6 if path.startswith("model.layers.1.") and width == 3 else width
        return {"group_size": 64, "bits": width, "mode": "affine"} if width else True

    model, _ = write_hub_model(tmp_path / "hub", "qwen3_moe")
    pairs = [
        "*.gate_proj=8", "*.gate_proj=3", "*.mlp.gate=5", "*v_proj=8", "*embed*=none",
        "model.layers.1.*gate_proj=6",
    ]  # fmt: skip
    ours(model, tmp_path / "ours", bits=4, module_bits=pairs)
    theirs(model, tmp_path / "theirs", quantize=True, q_bits=4, quant_predicate=choose)
    assert_same_bytes(tensors_in(tmp_path / "ours"), tensors_in(tmp_path / "theirs"))
    quantization = config_of(tmp_path / "ours")["quantization"]
    assert quantization == config_of(tmp_path / "theirs")["quantization"]
    assert quantization["model.layers.0.self_attn.v_proj"]["bits"] == 8


def test_patterns_alone_quantize_only_what_they_name(tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    model, source = write_hub_model(tmp_path / "hub", "qwen3_moe")
    ours(model, tmp_path / "ours", module_bits=("*v_proj=6",))
    written = tensors_in(tmp_path / "ours")
    packed = {name for name in written if name.endswith(".scales")}
    assert packed == {f"model.layers.{n}.self_attn.v_proj.scales" for n in (0, 1)}
    assert mx.array_equal(written["lm_head.weight"], source["lm_head.weight"])
    load_model(tmp_path / "ours")


def test_memory_follows_the_largest_tensor_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, *rest = CASES["llama"]
    deep = (config | {"num_hidden_layers": 24, "hidden_size": 256}, *rest)
    monkeypatch.setitem(CASES, "deep", deep)
    model, source = write_hub_model(tmp_path / "hub", "deep")
    total = sum(array.nbytes for array in source.values())
    largest = max(array.nbytes for array in source.values())
    del source
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ours(model, tmp_path / "ours", bits=4)
    assert mx.get_peak_memory() - before < 6 * largest
    assert 6 * largest < total / 8


def test_what_is_carried_and_what_is_not(tmp_path: Path) -> None:
    model, _ = write_hub_model(tmp_path / "hub", "qwen3_5")
    (model / "preprocessor_config.json").write_text('{"size": 2}')
    (model / "modeling_own.py").write_text("raise SystemExit")
    (model / "onnx").mkdir()
    (model / "onnx" / "model.onnx").write_bytes(b"weights")
    (model / "onnx" / "notes.txt").write_text("in a folder")
    mx.save_safetensors(str(model / "consolidated.safetensors"), {"w": mx.zeros(2)})
    mx.save_safetensors(str(model / "mtp.safetensors"), {"head": mx.ones(2)})
    config = config_of(model) | {"auto_map": {"AutoModel": "modeling_own.Own"}}
    (model / "config.json").write_text(json.dumps(config))
    report = ours(model, tmp_path / "ours", bits=4)
    names = {path.name for path in (tmp_path / "ours").iterdir()}
    assert {"preprocessor_config.json", "chat_template.jinja", "tokenizer.json"} <= names
    assert (tmp_path / "ours" / "onnx" / "notes.txt").exists()
    assert not names & {"modeling_own.py", "consolidated.safetensors"}
    # The hub's own sidecar keeps its name; what its shards held of the kind lies beside it.
    assert tensors_in(tmp_path / "ours", "mtp.safetensors").keys() == {"head"}
    assert "mtp.norm.weight" in tensors_in(tmp_path / "ours", "extra-mtp.safetensors")
    assert "auto_map" not in config_of(tmp_path / "ours")
    assert config_of(tmp_path / "ours")["vision_config"] == config["vision_config"]
    assert "Left out (code): modeling_own.py." in report.notes
    assert any("consolidated.safetensors, onnx/model.onnx" in note for note in report.notes)


def test_a_fuse_refuses_the_hub_layout_and_takes_the_converted_model(tmp_path: Path) -> None:
    """The refusal names the command; what it carries survives the fuse too."""
    model, source = write_hub_model(tmp_path / "hub", "qwen3_5_moe")
    ours(model, tmp_path / "ours", bits=4)
    adapter = random_adapter(tmp_path / "ours", ["mlp.switch_mlp.gate_proj"])

    def fuse_into(base: Path) -> None:
        settings = {"model": str(base), "adapter_path": (str(adapter),)}
        fuse(FuseSettings(save_path=str(tmp_path / "fused"), **settings))

    with pytest.raises(InputError, match=r"first: `mlxstacks convert \S+hub --bits 4 "):
        fuse_into(model)
    fuse_into(tmp_path / "ours")
    for sidecar in SIDECARS["qwen3_5_moe"]:
        kept = tensors_in(tmp_path / "fused", sidecar)
        assert_same_bytes(kept, {name: source[name] for name in kept})


def test_dry_run_writes_nothing_and_plans_the_bytes(tmp_path: Path) -> None:
    model, _ = write_hub_model(tmp_path / "hub", "qwen3_5_moe")
    settings = ConvertSettings(model=str(model), save_path=str(tmp_path / "out"), bits=3)
    planned = convert(settings, dry_run=True)
    assert not (tmp_path / "out").exists()
    assert planned.data["files"] == convert(settings).data["files"]


def packed_by_mlx(model: Path) -> None:
    shutil.rmtree(model)
    write_llama(model)


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        (model / "config.json").write_text(json.dumps(config_of(model) | changes))

    return change


def retyped(name: str, change: Callable[[mx.array], mx.array | None]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / "model.safetensors.index.json").unlink()
        for file in model.glob("model*.safetensors"):
            tensors = mx.load(str(file))
            assert isinstance(tensors, dict)
            mx.eval(tensors)
            if name in tensors:
                changed = change(tensors.pop(name))
                tensors |= {} if changed is None else {name: changed}
            mx.save_safetensors(str(file), tensors)

    return damage


PROJECTION = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (packed_by_mlx, "already quantized"),
        (with_config(quantization_config={"quant_method": "awq"}), r"already quantized \(awq\)"),
        (with_config(text_config={"quantization_config": {"quant_method": "gptq"}}), "gptq"),
        (with_config(quantization_config={"quant_method": "fp8", "scale_fmt": "ue8m0",
                                          "weight_block_size": [32, 32]}), "fp8"),
        (lambda model: (model / "hf_quant_config.json").write_text("{}"), "already quantized"),
        (with_config(model_file="own.py"), "code to run"),
        (with_config(model_type="unheard_of"), "unheard_of"),
        (with_config(num_hidden_layers=3), "model.layers.2"),
        (with_config(num_hidden_layers=10**9), "layers"),
        (retyped(PROJECTION, lambda _: None), PROJECTION),
        (retyped(PROJECTION, lambda weight: weight[:, :64]), PROJECTION),
        (retyped(PROJECTION, mx.to_fp8), "model.layers.1.mlp.down_proj.weight is U8"),
        (retyped(PROJECTION, lambda w: w + mx.array([float("nan")] + [0.0] * 255)),
         r"down_proj.weight: NaN or Inf at index \[0, 0\]"),
        (retyped(NORM, lambda w: w * mx.array(float("inf"))), r"norm.weight: NaN or Inf"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_by_name(
    damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    model, _ = write_hub_model(tmp_path / "hub", "qwen2")
    damage(model)
    with pytest.raises(CheckpointError, match=message):
        ours(model, tmp_path / "ours", bits=4)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    model, _ = write_hub_model(tmp_path / "hub", "qwen2")
    with pytest.raises(InputError, match=r"matches 'down_porj'.* down_proj, embed_tokens"):
        ours(model, tmp_path / "ours", bits=4, module_bits=("down_porj=8",))
    with pytest.raises(ValueError, match="2, 3, 4, 5, 6, 8"):
        ConvertSettings(model="m", module_bits=("*=7",))


def test_a_hub_model_with_experts(tmp_path: Path) -> None:
    """Quantized and upcycled in one go: both experts hold the codes of the dense projection."""
    model, _ = write_hub_model(tmp_path / "hub", "llama-tied")
    ours(model, tmp_path / "dense", bits=4)
    ours(model, tmp_path / "experts", bits=4, upcycle=2, top_k=1)
    dense, experts = tensors_in(tmp_path / "dense"), tensors_in(tmp_path / "experts")
    copies = experts["model.layers.0.block_sparse_moe.switch_mlp.up_proj.weight"]
    for copy in copies:
        assert mx.array_equal(copy, dense["model.layers.0.mlp.up_proj.weight"])
