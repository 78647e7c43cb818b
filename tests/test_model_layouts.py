"""Whatever mlx-lm opens, opens here, and a fuse loses no tensor and no file.

The directories are those of tests/model_layouts.py. Run: pytest tests/test_model_layouts.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx import nn
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file

from mlxstacks import base_model
from mlxstacks.cli import run as main
from mlxstacks.convert.run import convert
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import InputError
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.adapters import match_adapter, read_adapter, write_adapter
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.lora_modules import Adapter, LoraModule, mlx_config
from mlxstacks.files.outputs import MARK
from mlxstacks.files.settings import AdapterConvertSettings
from mlxstacks.files.shards import TensorInfo, read_header
from mlxstacks.files.stored_weight import weight_shape
from mlxstacks.fuse.in_memory import fuse_in_memory
from mlxstacks.fuse.report import FuseReport
from mlxstacks.fuse.run import run
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.guard.build import lazy_model, read_config
from mlxstacks.layers.targets import find_targets
from mlxstacks.training.modes import prepare_base
from tests.model_layouts import (
    INDEX,
    LAYOUTS,
    MOE_DOWN,
    MTP,
    VISION,
    Layout,
    sidecar,
    write_bases,
)
from tests.tiny_models import random_adapter, write_qwen_moe

WRITTEN_ANEW = {"config.json", "result.json", "result.md", INDEX, MARK}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bases")
    write_bases(directory)
    return directory


def built(layout: Layout, bases: Path, directory: Path) -> Path:
    if layout.base is not None:
        shutil.copytree(bases / layout.base, directory)
    layout.build(directory)
    return directory


def test_corpus_is_of_many_sources() -> None:
    assert len({layout.source for layout in LAYOUTS}) == len(LAYOUTS) >= 25


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_opens_if_and_only_if_mlx_lm_opens_it(layout: Layout, bases: Path, tmp_path: Path) -> None:
    model = built(layout, bases, tmp_path / "model")
    if not layout.opens:
        with pytest.raises(InputError) as caught:
            base_model.load(model, lazy=True)
        assert str(model) in str(caught.value)
        with pytest.raises(Exception):  # noqa: B017, PT011 (whatever mlx-lm raises)
            mlx_lm.load(str(model), lazy=True)
        base, _, _ = base_model.load(bases / (layout.base or "dense"), lazy=True)
        adapter = adapter_for(base, layout.touch, tmp_path / "adapter")
        assert_fuse_refuses_or_says_so(model, adapter, tmp_path / "fused")
        return
    loaded = every_command_opens(model)
    adapter = adapter_for(loaded, layout.touch, tmp_path / "adapter")
    shape = logical_shape(loaded, layout.touch)
    assert weight_shape(open_checkpoint(model), layout.touch) == shape  # stacks verify
    if layout.refuses is not None:
        with pytest.raises(InputError) as caught:
            fuse(model, adapter, tmp_path / "fused")
        assert f"{layout.touch}: " in str(caught.value)
        assert layout.refuses in str(caught.value)
        prepare_base(loaded, "float32", [])
        assert mx.isfinite(loaded(mx.array([[1, 2, 3]]))).all()
        return
    assert_peft_names_the_module(model, adapter, layout.touch, tmp_path)
    report = fuse(model, adapter, tmp_path / "fused")
    assert sorted(f.name for f in report.side_files if f.reason) == sorted(layout.left)
    assert_nothing_is_lost(model, tmp_path / "fused", layout)
    assert_only_the_touched_module_changed(model, tmp_path / "fused", layout.touch)
    if layout.name != "bitnet":  # needs Metal to run
        runs_as_fused(loaded, settings(model, adapter, tmp_path / "fused"))


def assert_fuse_refuses_or_says_so(model: Path, adapter: Path, target: Path) -> None:
    try:
        notes = fuse(model, adapter, target).notes
    except InputError as error:
        refusal = str(error)
    else:
        assert any(note.startswith("mlx-lm cannot load the result: ") for note in notes)
        assert json.loads((target / "result.json").read_text())["notes"] == notes
        return
    assert str(model) in refusal
    assert not target.exists()


def assert_peft_names_the_module(model: Path, adapter: Path, path: str, directory: Path) -> None:
    """PEFT's names in transformers 5, and from those of a file with no mark of ours the module."""
    peft, again = directory / "peft", directory / "again"
    options: dict[str, Any] = {"model": str(model), "peft_layout": "current"}
    convert_adapter(
        AdapterConvertSettings(adapter_path=str(adapter), save_path=str(peft), **options)
    )
    tensors = load_file(peft / "adapter_model.safetensors")
    assert not any("block_sparse_moe" in name or "switch_mlp" in name for name in tensors)
    save_file(tensors, peft / "adapter_model.safetensors")
    convert_adapter(
        AdapterConvertSettings(adapter_path=str(peft), save_path=str(again), to="mlx", **options)
    )
    assert list(read_adapter(again).modules) == [path]
    assert match_adapter(read_adapter(again), open_checkpoint(model))


def runs_as_fused(loaded: nn.Module, fuse_settings: FuseSettings) -> None:
    """A forward of the widened model, fused in memory, is that of the fused directory."""
    fuse_in_memory(loaded, fuse_settings)
    fused, _ = load_model(Path(str(fuse_settings.save_path)), lazy=True)
    logits = []
    for model in (loaded, fused):
        prepare_base(model, "float32", [])
        logits.append(model(mx.array([[1, 2, 3]])))
    assert mx.isfinite(logits[0]).all()
    assert mx.array_equal(*logits)


def every_command_opens(model: Path) -> nn.Module:
    """What each command does with a base; returns the loaded model.

    `base_model.load` is `mlx_lm.load`: what it opens, mlx-lm opens.
    """
    assert fingerprint(open_checkpoint(model))
    lazy_model(read_config(str(model))[0])  # guard
    loaded, tokenizer, _ = base_model.load(model, lazy=True)  # generate, chat, eval, train
    assert tokenizer.encode("a")
    if any(".layers." in path for path, _ in base_model.named_quantizable(loaded)):
        assert find_targets(loaded)  # BitNet has none, in mlx-lm's own trainer either
    converts_unless_quantized(model)
    return loaded


def converts_unless_quantized(model: Path) -> None:
    to = ConvertSettings(model=str(model), save_path=str(model.with_name("converted")), bits=4)
    config = json.loads((model / "config.json").read_text())
    if config.keys() & {"quantization", "quantization_config"}:
        with pytest.raises(InputError, match="already quantized"):
            convert(to, dry_run=True)
    else:
        assert convert(to, dry_run=True).status == "planned"


def adapter_for(model: nn.Module, path: str, directory: Path) -> Path:
    """A rank 1 adapter of one module whose delta changes what the module computes."""
    *experts, rows, width = logical_shape(model, path)
    if "embed" in path:
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((rows, 1), (1, width))
    elif experts:
        shapes = ((*experts, 1, width), (*experts, rows, 1))
    else:
        shapes = ((width, 1), (1, rows))
    a, b = (np.full(shape, 0.5, np.float32) for shape in shapes)
    modules = {path: LoraModule(path, a, b, "F32", 1.0)}
    write_adapter(Adapter(Path("new"), mlx_config(modules), modules, {}), directory)
    return directory


def logical_shape(model: nn.Module, path: str) -> tuple[int, ...]:
    """(N, K) or (E, N, K): what the scales of a packed weight stand for."""
    module = dict(model.named_modules())[path]
    if "scales" not in module:
        return tuple(module["weight"].shape)
    return (*module["scales"].shape[:-1], module["scales"].shape[-1] * module.group_size)


def settings(model: Path, adapter: Path, target: Path) -> FuseSettings:
    return FuseSettings(
        model=str(model), adapter_path=(str(adapter),), save_path=str(target), requant="nearest"
    )


def fuse(model: Path, adapter: Path, target: Path, dry_run: bool = False) -> FuseReport:
    return run(settings(model, adapter, target), dry_run=dry_run)


def assert_nothing_is_lost(model: Path, fused: Path, layout: Layout) -> None:
    shards = {path.name for path in model.glob("model*.safetensors")}
    kept = {
        name: content
        for name, content in contents(model).items()
        if name not in layout.left and name.split("/")[0] not in layout.left
    }
    carried = contents(fused)
    assert carried.keys() == kept.keys() | WRITTEN_ANEW
    for name in kept.keys() - shards - WRITTEN_ANEW:
        assert carried[name] == kept[name], name


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def assert_only_the_touched_module_changed(model: Path, fused: Path, path: str) -> None:
    old, new = open_checkpoint(model), open_checkpoint(fused)
    assert new.tensors.keys() == old.tensors.keys()
    changed = {
        name
        for name, info in old.tensors.items()
        if (new.tensors[name].dtype, new.tensors[name].shape) != (info.dtype, info.shape)
        or (info.nbytes and raw_bytes(info) != raw_bytes(new.tensors[name]))
    }
    weight = old.loaded_weights[path].tensor
    assert weight is not None
    prefix = weight.removesuffix("weight")
    assert changed
    assert changed <= {weight, f"{prefix}scales", f"{prefix}biases"}
    assert new.loaded_weights[path] == old.loaded_weights[path]
    weight_map = json.loads((fused / INDEX).read_text())["weight_map"]
    assert weight_map.keys() >= new.tensors.keys()
    for file in set(weight_map.values()):
        held = read_header(fused / file).tensors.keys()
        assert held >= {name for name in weight_map if weight_map[name] == file}


def raw_bytes(info: TensorInfo) -> bytes:
    with info.file.open("rb") as file:
        file.seek(info.start)
        return file.read(info.nbytes)


def test_dry_run_lists_what_will_be_carried(bases: Path, tmp_path: Path) -> None:
    (layout,) = (layout for layout in LAYOUTS if layout.name == "sidecars_in_a_folder")
    model = built(layout, bases, tmp_path / "model")
    (model / "modeling.py").write_text("raise SystemExit\n")
    adapter = adapter_for(base_model.load(model, lazy=True)[0], MOE_DOWN, tmp_path / "adapter")
    planned = fuse(model, adapter, tmp_path / "fused", dry_run=True).as_json()
    assert not (tmp_path / "fused").exists()
    fused = fuse(model, adapter, tmp_path / "fused").as_json()
    for report in (planned, fused):
        assert [(file["name"], file["bytes"]) for file in report["carried"]] == [
            (name, len(content))
            for name, content in sorted(contents(model).items(), key=lambda item: item[0])
            if not name.startswith("model") and name != "config.json"
        ]
        assert report["left_out"] == [{"name": "modeling.py", "reason": "code"}]
    assert {file["how"] for file in planned["carried"]} == {"shared", "copied"}
    assert json.loads((tmp_path / "fused" / "result.json").read_text())["data"] == fused


def test_screen_says_what_came_along_and_what_did_not(
    bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (layout,) = (layout for layout in LAYOUTS if layout.name == "sidecars_in_a_folder")
    model = built(layout, bases, tmp_path / "model")
    (model / "modeling.py").write_text("raise SystemExit\n")
    adapter = adapter_for(base_model.load(model, lazy=True)[0], MOE_DOWN, tmp_path / "adapter")
    command = ["fuse", "--judge=none", "--model", str(model), "--adapter-path", str(adapter)]
    assert main([*command, "--save-path", str(tmp_path / "out")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Other files carried along: 7; unchanged weights: optiq/mtp.safetensors, " in text
    assert "optiq/optiq_vision.safetensors; left out: modeling.py (code)." in text


@pytest.mark.parametrize(
    ("kind", "architecture", "has_class"),
    [
        ("llama", None, True),
        ("mistral", None, True),  # llama's class
        ("qwen4_exp", "LlamaForCausalLM", False),
        (None, None, False),
        (["llama"], [1], False),
        ("../utils\0", None, False),
        ("x" * 5000, 5, False),
    ],
)
def test_a_class_is_known_as_mlx_lm_knows_it(
    kind: object, architecture: object, has_class: bool, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").touch()
    gaps = base_model.loading_gaps(tmp_path, {"model_type": kind, "architectures": architecture})
    assert not gaps if has_class else len(gaps) == 1 and len(gaps[0]) < 100


def test_counts_that_no_model_has_are_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    config = {"model_type": "llama", "num_hidden_layers": -1}
    (gap,) = base_model.loading_gaps(tmp_path, config)
    assert gap.startswith("num_hidden_layers is -1 in the config")


def test_screen_says_that_mlx_lm_cannot_load_the_result(
    bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (layout,) = (layout for layout in LAYOUTS if layout.name == "qwen38_flash_next")
    model = built(layout, bases, tmp_path / "model")
    base, _, _ = base_model.load(bases / "moe", lazy=True)
    adapter = adapter_for(base, layout.touch, tmp_path / "adapter")
    command = ["fuse", "--model", str(model), "--adapter-path", str(adapter), "--dry-run"]
    assert main([*command, "--save-path", str(tmp_path / "out")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "mlx-lm cannot load the result: it has no class for 'qwen4_exp'." in text


def test_vision_and_mtp_survive_our_fuse_and_not_that_of_mlx_lm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence of README, on one model: tensors in its shards, in a sidecar and in a folder."""
    from mlx_lm.fuse import main as mlx_lm_fuse

    model = write_qwen_moe(tmp_path / "model", bits=4, extra_tensors={**VISION, **MTP})
    sidecar(model, "mtp.safetensors", MTP)
    sidecar(model, "optiq/optiq_vision.safetensors", VISION)
    adapter = random_adapter(model, ["self_attn.o_proj"])
    fuse(model, adapter, tmp_path / "ours")
    options = ["--model", str(model), "--adapter-path", str(adapter)]
    monkeypatch.setattr(
        "sys.argv", ["mlx_lm.fuse", *options, "--save-path", str(tmp_path / "theirs")]
    )
    mlx_lm_fuse()
    side = VISION.keys() | MTP.keys()
    ours, theirs = (open_checkpoint(tmp_path / name).tensors.keys() for name in ("ours", "theirs"))
    assert side <= ours
    assert theirs == ours - side
    sidecars = {"mtp.safetensors", "optiq/optiq_vision.safetensors"}
    assert sidecars <= contents(tmp_path / "ours").keys()
    assert not sidecars & contents(tmp_path / "theirs").keys()
