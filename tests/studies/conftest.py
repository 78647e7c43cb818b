"""A command as it is typed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlxstacks.cli import run


@pytest.fixture
def typed(work_dir: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(words of the command line) -> exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(arguments)
        return code, *capfd.readouterr()

    return call
