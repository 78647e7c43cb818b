"""A command for the tests of the generic layer: every kind of setting, and ways to fail."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Console

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import staged_directory
from mlxstacks.recipe.table import Command
from mlxstacks.settings import Settings


class Inner(Settings):
    steps: int = 10
    rate: float = 0.5


class ToySettings(Settings):
    source: str | None = Field(None, description="what to read")
    save_path: str | None = Field(None, description="Directory to write.")
    kind: Literal["plain", "fancy"] = Field("plain", description="which kind")
    bits: Literal[3, 4] | None = Field(4, description="bits a weight")
    names: tuple[str, ...] = Field((), description="repeatable")
    ratio: float | None = Field(None, ge=0, le=1, description="a share")
    count: int = Field(2, ge=1, description="how many")
    resume: bool = Field(True, description="go on")
    copy_files: bool = Field(False, json_schema_extra={"cli_name": "--copy"})
    force: bool = False
    inner: Inner = Inner()
    fail: str = ""
    seed: int = 0


class ReadSettings(Settings):
    model: str | None = None
    adapter_path: tuple[str, ...] = ()


@dataclass
class ToyResult:
    settings: Settings
    failed_gate: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"settings": self.settings.model_dump(mode="json"), "done": True}


def run(settings: ToySettings, progress: Any = None) -> ToyResult:
    print("a library that prints")
    if settings.fail == "input":
        raise InputError("toy.safetensors: got 3 bytes, at least 8 are needed; copy it again")
    if settings.fail == "path":
        open("x" * 300)  # noqa: SIM115
    if settings.fail == "compiler":
        raise RuntimeError("[Compile::eval_cpu] Failed to compile function\nand pages more")
    if settings.fail == "bug":
        raise ZeroDivisionError("seven by nothing")
    if settings.fail == "interrupt":
        raise KeyboardInterrupt
    if settings.fail == "pipe":
        raise BrokenPipeError(32, "Broken pipe")
    progress(1, 2)
    assert settings.save_path is not None
    report = settings.model_dump(mode="json", exclude={"force", "save_path"})
    with staged_directory(Path(settings.save_path), force=settings.force) as directory:
        text = json.dumps({"settings": report, "verdict": "made"})
        (directory / "manifest.json").write_text(text)
    return ToyResult(settings, "0.3 is below 0.5" if settings.fail == "gate" else None)


def read(settings: ReadSettings) -> ToyResult:
    return ToyResult(settings)


def render(console: Console, result: ToyResult) -> None:
    console.print("toy made", markup=False)


@dataclass
class Paths:
    model_path: Path = Path("built-in/model")
    adapter_path: Path = Path("built-in/adapter")


def nano_paths() -> Paths:
    return Paths()


TOY = Command(
    help="Make a toy.",
    settings="tests.cli.toy:ToySettings",
    function="tests.cli.toy:run",
    render="tests.cli.toy:render",
    arguments={"source": "IN"},
    report="manifest.json",
)
TOY_READ = Command(
    help="Read a toy.",
    settings="tests.cli.toy:ReadSettings",
    function="tests.cli.toy:read",
    render="tests.cli.toy:render",
    nano={"model": "model_path", "adapter_path": "adapter_path"},
)
