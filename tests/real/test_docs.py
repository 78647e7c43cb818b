"""Commands of the documentation that want the real model: Start from its first command to its
report, in order, with what the page shows of their output, and the conversions.

Run: make test-real
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from mlxstacks.cli import run
from tests.test_docs import ROOT, blocks, commands, missing


def real_blocks(name: str) -> list[tuple[str, str]]:
    """(language, text) of a page's blocks from its first for the real model on."""
    found = [*blocks((ROOT / name).read_text())]
    first = next(i for i, (_, text) in enumerate(found) if text.startswith("# This runs on"))
    return found[first:]


def run_line(line: str, real_model: Path) -> None:
    command, *arguments = shlex.split(line.replace("$REAL", str(real_model)))
    if command == "mkdir":
        Path(arguments[0]).mkdir()
    elif command == "cp":
        shutil.copy(*arguments)
    elif command != "make" and not line.startswith("REAL="):  # `make test-real` has done both
        assert command == "mlxstacks", line
        assert run(arguments) == 0, line


def test_start_runs(real_model: Path, work_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """About eight minutes of one core: the training, and three fuses judged by next tokens."""
    (work_dir / "benchmarks").symlink_to(ROOT / "benchmarks")
    printed = ""
    for kind, text in real_blocks("docs/index.md"):
        if kind == "text":
            assert missing(text, printed) == []
            continue
        for line in commands(text):
            run_line(line, real_model)
        captured = capsys.readouterr()
        printed += captured.out + captured.err
    shares = re.findall(r"the same next token in ([\d.]+)%", " ".join(printed.split()))
    auto, refit, *_ = map(float, shares)
    assert auto > 97
    assert refit < 92
    assert (work_dir / "page" / "index.html").is_file()
    readme = (ROOT / "README.md").read_text()
    (shown,) = [text for kind, text in blocks(readme) if kind == "text"]
    assert missing(shown, printed) == []


def test_conversions_run(real_model: Path, work_dir: Path) -> None:
    text = real_blocks("docs/howto/models.md")[0][1]
    lines = list(commands(text))
    assert len(lines) == 2
    for line in lines:
        run_line(line, real_model)
