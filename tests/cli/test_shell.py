"""Man pages name every command and option; completion scripts are shell.

Run: pytest tests/cli/test_shell.py
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from mlxstacks.cli import make_group
from mlxstacks.cli.shell import SHELLS, _roff, shell_files
from mlxstacks.recipe.table import COMMANDS
from tests.cli.conftest import Run

FILES = shell_files(make_group())


def test_every_command_has_a_page_with_its_options() -> None:
    for name in COMMANDS:
        page = FILES[f"man/man1/mlxstacks-{name.replace(' ', '-')}.1"]
        assert "\\fB\\-\\-json" in page, name
        assert f".B mlxstacks {name}\n".replace("-", "\\-") in page, name
    assert "\\fB\\-\\-save\\-path PATH\\fR" in FILES["man/man1/mlxstacks-fuse.1"]
    top = FILES["man/man1/mlxstacks.1"]
    assert all(f"mlxstacks\\-{word}\\fR(1)" in top for word in ("fuse", "stacks", "run"))


def test_text_gives_roff_no_orders() -> None:
    assert _roff(".so /etc/passwd\n'x\na\\fBb -c") == "\\&.so /etc/passwd\n\\&'x\na\\efBb \\-c"


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_pages_are_roff(tmp_path: Path) -> None:
    text = "".join(text for path, text in FILES.items() if path.startswith("man/"))
    command = ["groff", "-man", "-Tutf8", "-z", "-ww"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert "warning" not in done.stderr, done.stderr[:2000]


def test_scripts_are_printed_and_are_shell(command: Run) -> None:
    for shell, path in SHELLS.items():
        code, out, _ = command("completion", shell)
        assert (code, out.strip()) == (0, FILES[path].strip())
        if shutil.which(shell):
            subprocess.run([shell, "-n"], input=FILES[path], text=True, check=True)
        assert "_MLXSTACKS_COMPLETE" in FILES[path]
    assert command("completion", "tcsh")[0] == 2
