"""What the documentation shows runs: every block of commands and of Python in README and docs.

A page's blocks run in order in a directory that `mlxstacks nano export --samples` made, and what a
block of text shows is what they print. A block whose first line is one of `MARKS` does not run
here: `# takes` does with `make soak`, `# This runs on the real model` with `make test-real`, and
what `# This installs` is done by `make smoke`. The strict build is `make docs`.

Run: pytest tests/test_docs.py
"""

import importlib
import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from mlxstacks.cli import run
from mlxstacks.recipe.table import COMMANDS
from tests import laws
from tests.conftest import SOAK
from tests.test_readme import headings
from tools.docs.blocks import MARKS, PAGES, ROOT, blocks, commands, runnable

# Lines of marked blocks that are for a shell alone: they install, fetch, or make a place.
SHELL = (
    "pip ", "uv ", "git ", "make ", "source ", "mkdir ", "cd ", "REAL=", "cp ", "export ",
    "jupyter ", "mlx.launch ", "mlx.distributed_config ",
)  # fmt: skip
WIDEST_CODE = 84  # what a page has room for; README has 120
# Lines of text blocks that look like commands.
COMMAND = re.compile(r"^((mlxstacks|pip|uv|make|python) |mlx_lm\.)", re.M)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages begin with, as a reader makes it."""
    home = tmp_path_factory.mktemp("docs") / "practice"
    assert run(["nano", "export", str(home), "--samples"]) == 0
    return home


def masked(text: str) -> str:
    """Without line ends, numbers with signs, and sizes, which differ from run to run."""
    return re.sub(r"[-+]?[\d.,]*\d( [kMG]?B\b)?", "N", " ".join(text.split()))


def missing(shown: str, printed: str) -> list[str]:
    """What a block of text shows that was not printed; the columns of a line may be cut."""
    pieces = [piece for line in shown.splitlines() for piece in line.split(" | ")]
    pieces = [piece for piece in pieces if piece.strip() != "..."]
    return [piece for piece in pieces if masked(piece) not in masked(printed)]


@pytest.mark.usefixtures("short_judgement")
@pytest.mark.parametrize("name", [n for n, path in PAGES.items() if runnable(path.read_text())])
def test_blocks_run(
    name: str,
    nano: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    practice = tmp_path / "practice"
    shutil.copytree(nano, practice)
    monkeypatch.chdir(practice)
    variables: dict[str, object] = {}
    printed, runs = "", False
    marks = tuple(mark for mark in MARKS if not (SOAK and mark == "# takes "))
    for kind, text in blocks(PAGES[name].read_text()):
        if kind == "text":
            assert not runs or missing(text, printed) == []
            continue
        runs = not text.startswith(marks)
        if runs and kind == "python":
            exec(compile(text, name, "exec"), variables)
        for line in commands(text) if runs and kind == "bash" else ():
            command, *arguments = shlex.split(line)
            monkeypatch.setattr(sys, "stdin", io.StringIO())
            if command.startswith("mlx_lm."):
                monkeypatch.setattr(sys, "argv", [command, *arguments])
                importlib.import_module(command).main()
            else:
                assert command == "mlxstacks", f"{name}: no test can run: {line}"
                assert run(arguments) == 0, f"{name}: {line}"
        captured = capsys.readouterr()
        printed += captured.out + captured.err
    assert name != "README.md" or ("King Gus." in printed and "down_proj" in printed)


@pytest.mark.parametrize("name", PAGES)
def test_what_does_not_run_says_why(name: str) -> None:
    """Each mark is explained, each line behind one is known, targets of make are there, and no
    command stands in a block that nothing would run.
    """
    page = PAGES[name].read_text()
    for language, text in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page, re.S | re.M):
        if language not in ("bash", "python"):
            assert not COMMAND.search(text), f"{name}: {text}"
    for kind, text in blocks(page):
        for line in commands(text) if kind == "bash" and text.startswith(MARKS) else ():
            assert line.startswith((*SHELL, "mlxstacks ", "mlx_lm.")), f"{name}: {line}"
            for target in re.findall(r"\bmake ([a-z][a-z-]*)", line):
                assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), line
        if kind == "text":
            continue
        room = 120 if name == "README.md" else WIDEST_CODE
        assert max(map(len, text.splitlines())) <= room, f"{name}: {text}"


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/howto/")])
def test_a_page_that_needs_nano_says_how_to_begin(name: str) -> None:
    needs = r'--model model |--adapter-path adapters|--store-path store\b|load\("model"| store '
    page = PAGES[name].read_text()
    needed = any(re.search(needs, text) for kind, text in runnable(page))
    assert not needed or "`mlxstacks nano export practice --samples`" in page


def test_every_mark_is_explained() -> None:
    table = PAGES["docs/howto/index.md"].read_text()
    assert [mark for mark in MARKS if f"| `{mark.strip()}`" not in table] == []


def test_smoke_installs_what_the_pages_say() -> None:
    smoke = (ROOT / "Makefile").read_text().partition("\nsmoke: wheel")[2].partition("\nclean:")[0]
    assert "pip install" in smoke
    for command in ("mlxstacks --version", "fuse", "generate"):
        assert command.removeprefix("mlxstacks ") in smoke


def test_chats_that_are_shown_are_what_the_chat_says(
    work_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of time and speed aside."""
    page = PAGES["docs/howto/route.md"].read_text()
    (text,) = re.findall(r"^```text\n\$ mlxstacks (.*?)^```", page, re.S | re.M)
    command, *lines = text.splitlines()
    asked = "".join(f"{line[2:]}\n" for line in lines if line.startswith("> "))
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    assert run(shlex.split(command)) == 0
    captured = capsys.readouterr()
    answers = "\n".join(line for line in lines if not line.startswith("> "))
    assert len(answers.splitlines()) == 4
    assert missing(answers, captured.out + captured.err) == []


RELATIVE = re.compile(r"(?<!!)\[[^\]\n]+\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


@pytest.mark.parametrize("name", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "kernels/README.md"])
def test_links_lead_somewhere_in_the_clone(name: str) -> None:
    """Anchors too: a page can be read where it lies, in an editor or on GitHub."""
    page = ROOT / name
    for target, anchor in RELATIVE.findall(page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in headings(path), f"{name}: {target}#{anchor}"


def test_links_lead_somewhere_in_the_site() -> None:
    """Every one of docs/ to a page; `make docs` checks the anchors."""
    from tools.docs.site import generated, with_pages

    pages = {name.removeprefix("docs/") for name in PAGES} | {*generated()}
    for name in pages & {name.removeprefix("docs/") for name in PAGES}:
        text = with_pages((ROOT / "docs" / name).read_text(), name) if name != "README.md" else ""
        for target, _ in RELATIVE.findall(text):
            path = (ROOT / "docs" / name).parent / target
            inside = path.resolve().relative_to(ROOT / "docs").as_posix() if target else name
            assert inside in pages, f"{name}: {target}"


def test_a_link_out_of_the_pages_is_led_or_named() -> None:
    from tools.docs.site import with_pages

    text = "[R](../../benchmarks/RESULTS.md#nano) and [a study](../../examples/coin_study.py)"
    assert with_pages(text, "howto/fuse.md") == (
        "[R](../results.md#nano) and a study (`examples/coin_study.py` in the clone)"
    )
    assert with_pages("[gone](../../no.py) [here](../measure.md)", "howto/fuse.md") == (
        "[gone](../../no.py) [here](../measure.md)"
    )


def test_pages_of_commands_have_their_settings() -> None:
    """`make docs` makes those of all commands."""
    from tools.docs.commands import names, page

    assert set(COMMANDS) < set(names())
    assert "| `--requant` | `auto` \\| `refit` \\|" in page("fuse")
    assert "| number, > 0, &lt; 1 | `0.98` |" in page("fuse")
    assert "| `stack.rank` | integer" in page("stack")
    assert "| `--dry-run`" not in page("stack")


def test_pages_of_commands_have_groups_examples_and_what_is_written() -> None:
    from mlxstacks.recipe.table import load
    from tools.docs.commands import GROUPS_OF_OPTIONS, WRITES, names, page

    fuse = page("fuse")
    assert "mlxstacks fuse --model model --adapter-path adapters --save-path fused\n" in fuse
    assert fuse.index("## Input") < fuse.index("## Options") < fuse.index("## Output")
    assert "**Writes** `--save-path`: a directory" in fuse
    assert "mlxstacks profile   # on nano" in page("profile")
    fields = {name for row in COMMANDS.values() for name in load(row.settings).model_fields}
    assert {name for of in GROUPS_OF_OPTIONS.values() for name in of.split()} <= fields
    assert set(WRITES) <= set(names())


def test_every_promise_has_its_test() -> None:
    assert "| promise | held by |" in laws.laws_page()


def test_a_promise_without_its_test_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"A fuse": {"It is right.": ("fuse/test_fuse_run.py::test_that_was_removed",)}}
    monkeypatch.setattr(laws, "LAWS", gone)
    with pytest.raises(LookupError, match="test_that_was_removed"):
        laws.laws_page()
