"""What the documentation shows runs: every block of commands and of Python in README and docs.

A page's blocks run in order in one directory, where `model`, `adapters`, `store`, `data` and
`domains` are nano's. A block whose first line is `# needs a Mac`, `# takes` or `# real model` does
not run here; those of the real model do with `make test-real`. The strict build is `make docs`.

Run: pytest tests/test_docs.py
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstacks.cli import run
from mlxstacks.recipe.table import COMMANDS
from tests import laws

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": ROOT / "README.md"} | {
    path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))
}
MARKS = ("# needs a Mac", "# takes ", "# real model")
# Lines that are for a shell alone: they install, fetch, or start what waits for somebody.
SHELL = (
    "pip ", "uv ", "git ", "make ", "source ", "mkdir ", "cd ", "REAL=", "cp ", "python -m ",
    "mlx_lm.", "mlxstacks chat",
)  # fmt: skip


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(language, text) of every block of commands or of Python, marks included."""
    yield from re.findall(r"^```(bash|python)\n(.*?)^```", page, re.S | re.M)


def commands(block: str) -> Iterator[str]:
    """The lines of a block, without comments and with continuations joined."""
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#\s.*", "", line).strip()
        if line:
            yield line


def runnable(page: str) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in blocks(page) if not text.startswith(MARKS)]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nano under the names that the pages use."""
    from mlxstacks.nano.exports import nano_paths

    home, paths = tmp_path_factory.mktemp("docs"), nano_paths()
    for name, path in {
        "model": paths.model_path, "adapters": paths.adapter_path, "data": paths.data_path,
        "domains": paths.curriculum_path,
    }.items():  # fmt: skip
        (home / name).symlink_to(path)
    return home


@pytest.mark.parametrize("name", [n for n, path in PAGES.items() if runnable(path.read_text())])
def test_blocks_run(
    name: str, nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxstacks.nano.exports import nano_paths

    for link in nano.iterdir():
        (tmp_path / link.name).symlink_to(link.resolve())
    shutil.copytree(nano_paths().store_path, tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, object] = {}
    for kind, text in runnable(PAGES[name].read_text()):
        if kind == "python":
            exec(compile(text, name, "exec"), variables)
            continue
        for line in commands(text):
            if line.startswith("mlxstacks ") and not line.startswith(SHELL):
                assert run(shlex.split(line)[1:]) == 0, f"{name}: {line}"
            else:
                assert line.startswith(SHELL), f"{name}: no test can run: {line}"
                check_target(line)


def check_target(line: str) -> None:
    """A target of make that is named is there."""
    for target in re.findall(r"\bmake ([a-z][a-z-]*)", line):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), line


@pytest.mark.parametrize("name", PAGES)
def test_what_does_not_run_says_why(name: str) -> None:
    """No command stands in a block of another language, where it would not be run."""
    page = PAGES[name].read_text()
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```", page, re.S | re.M):
        if language not in ("bash", "python", "text"):
            assert not re.search(r"^mlxstacks ", text, re.M), f"{name}: {text}"


def test_pages_of_commands_have_their_settings() -> None:
    """`make docs` makes those of all commands."""
    from tools.docs.commands import names, page

    assert set(COMMANDS) < set(names())
    assert "| `--requant` | `auto` \\| `refit` \\|" in page("fuse")
    assert "| number, > 0, &lt; 1 | `0.98` |" in page("fuse")
    assert "| `stack.rank` | integer" in page("stack")
    assert "| `--dry-run`" not in page("stack")


def test_every_promise_has_its_test() -> None:
    assert "| promise | held by |" in laws.laws_page()


def test_a_promise_without_its_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"A fuse": {"It is right.": ("fuse/test_fuse_run.py::test_that_was_removed",)}}
    monkeypatch.setattr(laws, "LAWS", gone)
    with pytest.raises(LookupError, match="test_that_was_removed"):
        laws.laws_page()
