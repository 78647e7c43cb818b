"""What README says to type can be typed, and what it points to is there.

Run: pytest tests/test_readme.py
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from mlxstacks.cli import make_group
from mlxstacks.recipe.table import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def typed() -> Iterator[str]:
    """Every command line of ours in a block of code, without its comment."""
    for block in re.findall(r"^```\w*\n(.*?)^```", README, re.S | re.M):
        for line in block.splitlines():
            if match := re.match(r"(?:\$ )?(mlxstacks [a-z].*?)(?:  +#.*)?$", line):
                yield match[1]


def check(line: str) -> None:
    """Raises: AssertionError naming what the command line does not have."""
    command: click.Command = make_group()
    context = click.Context(command)
    words = shlex.split(line)[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(context, words.pop(0))
        assert found is not None, line
        command = found
    options = {name for param in command.get_params(context) for name in param.opts}
    options |= {name for param in command.get_params(context) for name in param.secondary_opts}
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in options, f"{line}: {word}"


@pytest.mark.parametrize("line", list(typed()))
def test_command_lines_can_be_typed(line: str) -> None:
    check(line)


@pytest.mark.parametrize(
    "line", ["mlxstacks fuze", "mlxstacks fuse --zero", "mlxstacks stacks lst"]
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


def test_every_folder_has_a_line() -> None:
    tree = README[README.index("## Files") :]
    folders = {path.parent.name for path in (ROOT / "mlxstacks").glob("*/__init__.py")}
    assert {folder for folder in folders if f"  {folder}/" not in tree} == set()


def test_the_two_commands_stand_at_the_top() -> None:
    top = README[: README.index("##")]
    assert "make demo" in top
    assert "make test" in top


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
