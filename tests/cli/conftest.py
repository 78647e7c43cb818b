"""The toy commands in the table, and a way to run a command line in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxstacks.cli import run
from mlxstacks.recipe import resolve, table
from tests.cli.toy import TOY, TOY_READ

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, work_dir: Path) -> Path:
    """The commands `toy` and `toybox read`, in an empty directory."""
    monkeypatch.setitem(table.COMMANDS, "toy", TOY)
    monkeypatch.setitem(table.COMMANDS, "toybox read", TOY_READ)
    monkeypatch.setattr(resolve, "NANO_PATHS", "tests.cli.toy:nano_paths")
    return work_dir


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Run:
    """`command("toy", "--json")` is (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return call
