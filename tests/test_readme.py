"""What README and docs say to type can be typed, and what they point to is there.

Run: pytest tests/test_readme.py
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

import mlxstacks
from mlxstacks.cli import make_group, run
from mlxstacks.cli.group import make_command
from mlxstacks.recipe.file import load_recipe, recipe_names
from mlxstacks.recipe.table import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = {path: path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = "\n".join([README, *DOCS.values()])
MOST_LINES = 160


def blocks(page: str, language: str = r"\w*") -> list[str]:
    """What stands between fences."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.S | re.M)


def typed() -> Iterator[str]:
    """Every command line of ours in a block of code, without its comment, and those of a line of
    text that have an option.
    """
    for block in blocks(PAGES):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if match := re.match(r"(?:\$ )?(mlxstacks [a-z].*?)(?:  +#.*)?$", line):
                yield match[1]
    yield from re.findall(r"`(mlxstacks [^`]*--[^`]*)`", PAGES)


def check(line: str) -> None:
    """Raises: AssertionError naming what the command line does not have."""
    command: click.Command = make_group()
    context = click.Context(command)
    words = shlex.split(line)[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words.pop(0))
        assert found is not None, line
        command = found
    params = command.get_params(context)
    if command.name == "run":  # its recipe's command, or any where a page says RECIPE
        known = words[0] in recipe_names()
        commands = [load_recipe(words[0]).command] if known else COMMANDS
        params += [param for name in commands for param in make_command(name).params]
    options = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in options, f"{line}: {word}"


@pytest.mark.parametrize("line", list(typed()))
def test_command_lines_can_be_typed(line: str) -> None:
    check(line)


@pytest.mark.parametrize(
    "line",
    [
        "mlxstacks fuze",
        "mlxstacks fuse --zero",
        "mlxstacks stacks lst",
        "mlxstacks run identity-nano --zero-delta",
    ],
)
def test_what_is_no_command_line_is_found(line: str) -> None:
    with pytest.raises((AssertionError, click.UsageError)):
        check(line)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_named(command: str) -> None:
    """`stacks list, verify, remove` stands for three."""
    group, _, name = command.rpartition(" ")
    in_group = rf"`mlxstacks {group} [^`]*\b{name}\b" if group else r"(?!)"
    assert re.search(rf"`(mlxstacks )?{command}\b|{in_group}", README)


def test_readme_can_be_read_at_once() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_commands_that_need_arguments_are_named(work_dir: Path) -> None:
    """Each of them ends with 2 and a message; that the others run is for their own tests."""
    page = (ROOT / "docs/reference/index.md").read_text()
    (sentence,) = re.findall(r"wrote\. (`run`.*?) need arguments", page, re.S)
    first, _, rest = sentence.partition("`stacks ")
    names = [f"stacks {name}" for name in re.findall(r"(\w+)`", rest)]
    names += re.findall(r"`([\w ]+)`", first)
    assert len(names) == 9
    for name in names:
        assert run(name.split()) == 2, name
    assert list(work_dir.iterdir()) == []


def test_python_of_the_readme_is_five_lines() -> None:
    """`test_docs.py` runs them."""
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) == 5


def test_every_folder_has_a_line() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    tree = page[page.index("## Folders") :]
    folders = {path.parent.name for path in (ROOT / "mlxstacks").glob("*/__init__.py")}
    assert {folder for folder in folders if f"`mlxstacks/{folder}/`" not in tree} == set()
    named = re.findall(r"`([a-z_/]+/)`", tree.split("\n## ")[0])
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_dir()] == []


def test_the_two_commands_stand_at_the_top() -> None:
    top = "\n".join(README.splitlines()[:55])
    assert "make demo" in top
    assert "make test" in top


def test_files_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./*]+/[\w./*]*)`", text)
    named = [path for path in named if "NAME" not in path and "..." not in path]
    assert len(named) > 15
    assert [path for path in named if not [*ROOT.glob(path)]] == []


def test_version_and_papers_stand_where_they_are_cited() -> None:
    versions = re.findall(r"^## .*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert versions[0] == mlxstacks.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    papers = README[README.index("## The papers") :].split("\n## ")[0]
    assert {f"*{paper['title']}*" for paper in citation["references"]} <= set(
        re.findall(r"\*[^*|]+\*", papers)
    )


def headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}
