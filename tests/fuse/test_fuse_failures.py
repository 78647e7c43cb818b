"""Bad models, bad adapters, full disks, sudden ends. pytest tests/fuse/test_fuse_failures.py

Every refusal names the file, tensor or key, and leaves nothing behind. MLXSTACKS_SOAK=1 runs the
kill campaign in full.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import AdapterError, CheckpointError, InputError, TargetError
from mlxstacks.files.outputs import staged_directory
from mlxstacks.fuse.report import result_of
from tests.fuse.cases import assert_same_bytes, clone_by_copying, fuse, tensors
from tests.tiny_models import random_adapter, save_sharded, write_llama, write_qwen_moe
from tests.warm import ended, start_command_line

DOWN = "mlp.switch_mlp.down_proj"
SOAK = os.environ.get("MLXSTACKS_SOAK") == "1"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    mx.set_default_device(mx.cpu)
    model = write_qwen_moe(tmp_path_factory.mktemp("base") / "model", bits=4)
    return model, random_adapter(model, [DOWN, "self_attn.q_proj"], std=0.01)


@pytest.fixture
def model(pristine: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(pristine[0], tmp_path / "model")


@pytest.fixture
def adapter(pristine: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(pristine[1], tmp_path / "adapter")


def assert_refused(
    error: type[InputError], words: list[str], model: Path, adapter: Path, **options: Any
) -> None:
    """The fuse raises `error` with all the words, and leaves no trace beside the model."""
    target = model.parent / "out"
    before = {path.name for path in model.parent.iterdir()}
    with pytest.raises(error) as caught:
        fuse(model, adapter, target, **options)
    for word in words:
        assert word in str(caught.value)
    left = {path.name for path in model.parent.iterdir()} - before
    assert all(name.endswith(".lock") for name in left)


def replace(directory: Path, changes: dict[str, mx.array]) -> None:
    """Overwrite tensors of a checkpoint, keeping its shards."""
    for file in directory.glob("model*.safetensors"):
        stored = mx.load(str(file))
        hit = changes.keys() & stored.keys()
        if hit:
            mx.save_safetensors(str(file), {**stored, **{k: changes[k] for k in hit}})


def scales_of(directory: Path, ending: str) -> str:
    return next(n for n in tensors(directory) if n.endswith(f"{ending}.scales"))


@pytest.mark.parametrize(
    ("leaf", "value"),
    [("scales", float("nan")), ("scales", float("-inf")), ("biases", float("inf"))],
)
def test_non_finite_weights_name_tensor_and_index(
    model: Path, adapter: Path, value: float, leaf: str
) -> None:
    name = scales_of(model, DOWN).replace("scales", leaf)
    damaged = np.array(tensors(model)[name].astype(mx.float32))
    damaged[2, 7, 0] = value
    replace(model, {name: mx.array(damaged).astype(mx.bfloat16)})
    assert_refused(CheckpointError, [name, "(2, 7, 0)", str(value)], model, adapter)


def test_non_finite_adapter_names_tensor_and_index(model: Path, adapter: Path) -> None:
    stored = mx.load(str(adapter / "adapters.safetensors"))
    name = next(n for n in stored if n.endswith("down_proj.lora_b"))
    damaged = np.array(stored[name])
    damaged[1, 3, 1] = np.nan
    mx.save_safetensors(str(adapter / "adapters.safetensors"), {**stored, name: mx.array(damaged)})
    assert_refused(AdapterError, [name, "1, 3, 1"], model, adapter)


def test_adapter_that_overflows_the_dtype_is_refused(tmp_path: Path) -> None:
    model = write_qwen_moe(tmp_path / "half", bits=4, dtype="float16")
    adapter = random_adapter(model, [DOWN], std=1e6, directory=tmp_path / "adapter")
    for requant in ("refit", "dequantize"):
        assert_refused(
            CheckpointError, ["beyond the range of F16"], model, adapter, requant=requant
        )
    adapter = random_adapter(model, [DOWN], std=1e36, directory=tmp_path / "huge")
    assert_refused(AdapterError, ["down_proj", "float32"], model, adapter, requant="keep")


def test_an_estimate_that_overflows_is_no_remedy(tmp_path: Path) -> None:
    """Codes hold what is left of a delta of which a plain float16 weight would be infinite."""
    model = write_llama(tmp_path / "half", bits=4, dtype="float16")
    adapter = random_adapter(model, ["self_attn.q_proj"], std=1e5, directory=tmp_path / "adapter")
    for dry_run in (True, False):
        report = fuse(model, adapter, tmp_path / "out", dry_run=dry_run, requant="auto")
        assert report.alternative is not None
        assert report.alternative.correlation == 0
        result_of(report)


def test_missing_and_truncated_shards_are_named(model: Path, adapter: Path) -> None:
    shard = sorted(model.glob("model*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert_refused(CheckpointError, [shard.name], model, adapter)
    shard.unlink()
    assert_refused(CheckpointError, [shard.name], model, adapter)


def test_adapter_of_another_model_lists_everything(model: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", bits=4)
    adapter = random_adapter(other, ["self_attn.q_proj", "mlp.down_proj"], std=0.01)
    words = [
        "5 problems",
        "was trained on",
        "give that base",
        "layers.0.self_attn.q_proj",
        "layers.1.mlp.down_proj",
        "nearest",
    ]
    assert_refused(AdapterError, words, model, adapter)


def test_shape_that_contradicts_the_config_is_refused(model: Path, adapter: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    name = scales_of(model, DOWN).removesuffix(".scales")
    for key in ("quantization", "quantization_config"):
        config[key][name] = {"group_size": 64, "bits": 3}
    (model / "config.json").write_text(json.dumps(config))
    assert_refused(InputError, [name, "3 bits"], model, adapter)


def test_checkpoint_half_converted_is_refused_as_mlx_lm_does(model: Path, adapter: Path) -> None:
    stored = tensors(model)
    for file in model.glob("model*"):
        file.unlink()
    stored["language_model.model.layers.0.mlp.experts.gate_up_proj"] = mx.zeros((4, 8, 8))
    save_sharded(model, stored, 1)
    assert_refused(CheckpointError, ["mlx-lm cannot load it"], model, adapter)


def test_second_run_to_one_target_is_refused_at_once(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    with (
        staged_directory(tmp_path / "out"),
        pytest.raises(TargetError, match="is writing it"),
    ):
        fuse(model, adapter, tmp_path / "out")
    fuse(model, adapter, tmp_path / "out", force=True)


def _limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def command(model: Path, adapter: Path, target: Path, *more: str) -> list[str]:
    base = [sys.executable, "-m", "mlxstacks", "fuse", "--model", str(model)]
    return [*base, "--adapter-path", str(adapter), "--save-path", str(target), *more]


def test_a_write_that_fails_leaves_nothing(model: Path, adapter: Path, tmp_path: Path) -> None:
    """The kernel refuses bytes in the middle of a shard, as a full disk does."""
    done = subprocess.run(
        command(model, adapter, tmp_path / "out"),
        capture_output=True,
        text=True,
        preexec_fn=_limit_file_size,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.tmp*"))


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mount"), reason="needs to mount a small disk"
)
def test_full_disk_is_told_before_and_during_the_write(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)], check=False
    )
    if mounted.returncode:
        pytest.skip("no right to mount")
    try:
        with pytest.raises(TargetError, match="free"):
            fuse(model, adapter, disk / "out")
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(TargetError, match="not writable"):
            fuse(model, adapter, disk / "out")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    "change", [None, clone_by_copying], ids=["shards are rewritten", "shards are patched"]
)
def test_kill_at_any_moment_leaves_the_old_state_or_the_new(
    pristine: tuple[Path, Path],
    model: Path,
    adapter: Path,
    tmp_path: Path,
    change: Callable[[], None] | None,
    campaign: Callable[..., range],
) -> None:
    """kill -9 at random moments of a fuse that replaces an older one."""
    fuse(model, adapter, tmp_path / "old", requant="keep")
    fuse(model, adapter, tmp_path / "new", requant="refit")
    target = tmp_path / "out"
    shutil.copytree(tmp_path / "old", target)
    moments = random.Random(0)
    states = set()
    # Without the program's name: forked from a process that has the imports done.
    replacing = command(model, adapter, target, "--requant", "refit", "--force")[3:]
    assert ended(start_command_line(replacing, change)) == 0
    files = json.loads((target / "result.json").read_text())["data"]["files"]
    assert ("patched" in {file["how"] for file in files}) == (change is not None)
    started = time.monotonic()
    assert ended(start_command_line(replacing, change)) == 0
    takes = time.monotonic() - started
    for _ in campaign(100, usual=2):
        shutil.rmtree(target)
        shutil.copytree(tmp_path / "old", target)
        process = start_command_line(replacing, change)
        time.sleep(moments.uniform(0.1, 1.1) * takes)
        process.kill()
        ended(process)
        report = json.loads((target / "result.json").read_text())
        states.add(report["settings"]["requant"])
        assert_same_bytes(
            target, tmp_path / {"keep": "old", "refit": "new"}[report["settings"]["requant"]]
        )
    assert ended(start_command_line(replacing, change)) == 0
    assert_same_bytes(target, tmp_path / "new")
    assert_same_bytes(model, pristine[0])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".out") and p.is_dir()]
    assert states == {"keep", "refit"} or not SOAK
