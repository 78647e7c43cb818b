"""`mlxstacks convert` as a command: what it prints, what it leaves where it stops.

Run: pytest tests/convert/test_run.py
"""

import errno
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from mlxstacks.convert import run as convert_run
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import CheckpointError, InputError, TargetError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.gguf_file import open_gguf
from mlxstacks.files.hub import resolve_model
from mlxstacks.study.result import Result
from tests.cli.conftest import Run, command
from tests.convert.ended import end_while_writing
from tests.convert.gguf_cases import config_of, random_tensors, write_gguf
from tests.convert.hub_cases import write_hub_model
from tests.warm import ended, start_command_line

__all__ = ["command"]  # a fixture


@pytest.fixture
def plain(work_dir: Path) -> Path:
    config = config_of("llama", tied=True)
    kinds = lambda name, array: "F32" if array.ndim == 1 else "Q5_0"  # noqa: E731
    return write_gguf(work_dir / "m.gguf", config, random_tensors(config), kinds)


def test_it_says_what_became_of_the_tensors(plain: Path, command: Run) -> None:
    code, out, err = command("convert", "m.gguf", "--save-path", "out")
    assert code == 0, err
    text = " ".join(out.split())
    assert "Q5_0 5 bits in groups of 32, the same codes 15" in text
    assert "F32 float16 5" in text
    assert "Try it: mlxstacks chat --model out" in out
    result = Result.open("out")
    assert not result.standing.reasons
    assert result.data["status"] == "converted"
    assert result.settings["model"] == "m.gguf"
    table = result.table("tensors")
    assert list(table) == ["in_the_source", "written_as", "tensors", "bytes"]
    assert table.bytes.sum() == result.data["written_bytes"]


def test_a_dry_run_plans_in_json_and_writes_nothing(plain: Path, command: Run) -> None:
    code, out, _ = command("convert", "m.gguf", "--upcycle", "3", "--dry-run", "--json")
    plan = json.loads(out)["data"]
    assert code == 0
    assert (plan["status"], plan["model_type"]) == ("planned", "mixtral")
    assert plan["files"] == [{"file": "model.safetensors", "bytes": plan["written_bytes"]}]
    assert [path.name for path in Path().iterdir()] == ["m.gguf"]


def test_an_existing_target_needs_force(plain: Path, command: Run) -> None:
    assert command("convert", "m.gguf", "--save-path", "out")[0] == 0
    code, _, err = command("convert", "m.gguf", "--save-path", "out", "--upcycle", "2")
    assert code == 2
    assert "--force to replace it" in err
    code, _, _ = command("convert", "m.gguf", "--save-path", "out", "--upcycle", "2", "--force")
    assert code == 0
    assert json.loads(Path("out/config.json").read_text())["model_type"] == "mixtral"


def test_the_target_may_not_hold_the_source(plain: Path, command: Run) -> None:
    Path("models").mkdir()
    plain.rename("models/m.gguf")
    code, _, err = command("convert", "models/m.gguf", "--save-path", "models", "--force")
    assert code == 2
    assert "mlxstacks did not write it (it holds m.gguf" in " ".join(err.split())
    assert Path("models/m.gguf").is_file()


def test_a_full_disk_leaves_nothing(
    plain: Path, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mlxstacks.files.shards.write_all", full)
    settings = ConvertSettings(model=str(plain), save_path=str(work_dir / "out"))
    with pytest.raises(TargetError, match="the disk is full"):
        convert_run.convert(settings)
    assert [path.name for path in work_dir.iterdir()] == ["m.gguf"]


def test_a_fault_found_late_leaves_nothing(plain: Path, work_dir: Path) -> None:
    """A scale in the last layer is a NaN, which is seen when it is written."""
    content = bytearray(plain.read_bytes())
    start = open_gguf(plain).tensors["blk.1.ffn_up.weight"].start
    content[start : start + 2] = b"\xff\x7f"
    plain.write_bytes(content)
    settings = ConvertSettings(model=str(plain), save_path=str(work_dir / "out"))
    with pytest.raises(InputError, match="no finite float16"):
        convert_run.convert(settings)
    assert [path.name for path in work_dir.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("source", ["m.gguf", "hub"])
def test_a_run_that_is_ended_leaves_the_target_as_it_was(
    source: str, plain: Path, work_dir: Path
) -> None:
    """Ctrl-C leaves nothing at all; kill -9 what the next run to this target removes."""
    if source == "hub":
        write_hub_model(work_dir / "hub", "qwen2")
    settings = ConvertSettings(model=source, save_path="out", bits=4 if source == "hub" else None)
    arguments = ["convert", source, "--save-path", "out", *(["--bits", "4"] * (source == "hub"))]
    before = {path.name for path in work_dir.iterdir()}

    def end(signal_number: int, *options: str) -> list[str]:
        change = partial(end_while_writing, signal_number)
        code = ended(start_command_line([*arguments, *options], change))
        assert code == (130 if signal_number == signal.SIGINT else -signal.SIGKILL)
        return sorted(path.name for path in work_dir.iterdir() if path.name not in before)

    assert end(signal.SIGINT) == []
    lock, staged = end(signal.SIGKILL)
    assert lock == ".out.lock"
    assert staged.startswith(".out.tmp-")
    convert_run.convert(settings)
    assert {path.name for path in work_dir.iterdir()} == {*before, "out"}
    whole = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert "out" in end(signal.SIGKILL, "--force")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == whole
    convert_run.convert(settings.model_copy(update={"force": True}))
    assert {path.name for path in work_dir.iterdir()} == {*before, "out"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--module-bits", "x"], "PATTERN=N"),
        (["--upcycle", "2", "--top-k", "3"], "--top-k is 3, more than the 2 experts"),
        (["--upcycle", "1"], "greater than or equal to 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    options: list[str], message: str, plain: Path, command: Run
) -> None:
    code, _, err = command("convert", "m.gguf", "--save-path", "out", *options)
    assert code == 2
    assert message in err
    assert not Path("out").exists()


def test_what_is_no_model_is_refused(work_dir: Path, command: Run) -> None:
    (work_dir / "m.bin").write_bytes(b"PK\3\4" + bytes(100))
    os.mkfifo(work_dir / "pipe.gguf")
    for model, message in (
        ("m.bin", "does not begin with 'GGUF'"),
        ("./no", "no such directory"),
        ("pipe.gguf", "not a regular file"),
    ):
        code, _, err = command("convert", model, "--save-path", "out")
        assert code == 2
        assert message in err


def test_where_a_gguf_file_goes_is_said(plain: Path, command: Run) -> None:
    Path("my models").mkdir()
    plain.rename("my models/m.gguf")
    code, _, err = command("convert", "my models", "--save-path", "out")
    assert code == 2
    assert "give a file: my models/m.gguf" in err
    for open_it, model in ((resolve_model, "my models/m.gguf"), (open_checkpoint, "my models")):
        with pytest.raises(CheckpointError, match=r"`mlxstacks convert 'my models/m\.gguf' --save"):
            open_it(model)


def test_nano_is_converted_where_nothing_is_given(work_dir: Path, command: Run) -> None:
    from mlx_lm.utils import load_model

    code, _, err = command("convert")
    assert code == 0, err
    _, config = load_model(Path("mlxstacks-out/convert"))
    assert config["quantization"]["bits"] == 4
