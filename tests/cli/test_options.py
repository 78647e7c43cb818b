"""Options are made from settings: kinds, names, defaults. Run: pytest tests/cli/test_options.py"""

import json
from typing import Any

import click
import pytest
from pydantic import BaseModel

from mlxstacks.cli.group import parameters
from mlxstacks.recipe.table import COMMANDS, load
from tests.cli.conftest import Run
from tests.cli.toy import ToySettings


def options() -> dict[str, click.Parameter]:
    return {p.name or "": p for p in parameters(ToySettings, {"source": "IN"})}


def test_every_field_but_nested_models_has_a_parameter() -> None:
    """One that is given by position has its option too."""
    assert set(options()) == ToySettings.model_fields.keys() - {"inner"} | {"also_source"}
    assert next(iter(options())) == "source"
    assert options()["also_source"].opts == ["--source"]


@pytest.mark.parametrize(
    ("field", "names", "secondary"),
    [
        ("save_path", ["--save-path"], []),
        ("copy_files", ["--copy"], []),
        ("force", ["--force"], []),
        ("resume", ["--resume"], ["--no-resume"]),
    ],
)
def test_names(field: str, names: list[str], secondary: list[str]) -> None:
    option = options()[field]
    assert (option.opts, option.secondary_opts) == (names, secondary)


def test_help_shows_defaults_as_sentences() -> None:
    kind = options()["kind"]
    assert isinstance(kind, click.Option)
    assert kind.help == "Which kind.  [default: plain]"


def test_defaults_are_shown_as_a_person_writes_them() -> None:
    class Several(BaseModel):
        formats: tuple[str, ...] = ("svg", "png")
        seeds: tuple[int, ...] = (0,)
        none: tuple[str, ...] = ()
        on: bool = True
        off: bool = False

    made = {p.name: p for p in parameters(Several, {})}
    shown = {name: p.help for name, p in made.items() if isinstance(p, click.Option)}
    assert shown == {
        "formats": "[default: svg, png]", "seeds": "[default: 0]", "none": "",
        "on": "[default: on]", "off": "",
    }  # fmt: skip


def test_no_help_shows_python() -> None:
    """Of every command and every option."""
    for row in COMMANDS.values():
        for option in parameters(load(row.settings), row.arguments):
            text = getattr(option, "help", None) or ""
            default = text.rpartition("[default: ")[2] if "[default: " in text else ""
            assert not {"(", "{", "'"} & set(default), (option.name, default)


def test_a_field_without_an_option_is_a_bug() -> None:
    class Odd(BaseModel):
        table: dict[str, int] = {}

    with pytest.raises(TypeError, match=r"Odd\.table: no option for dict"):
        parameters(Odd, {})


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        (["--kind", "fancy"], "kind", "fancy"),
        (["--bits", "3"], "bits", 3),
        (["--bits", "none"], "bits", None),
        (["--names", "a", "--names", "b"], "names", ["a", "b"]),
        (["--ratio", "0.25"], "ratio", 0.25),
        (["--no-resume"], "resume", False),
        (["--copy"], "copy_files", True),
        (["here"], "source", "here"),
        (["--set", "inner.steps=3"], "inner", {"steps": 3, "rate": 0.5}),
        (["--set", "names=x"], "names", ["x"]),
        (["--set", "inner.rate=1e-3"], "inner", {"steps": 10, "rate": 0.001}),
        (["--set", "kind=fancy", "--kind", "plain"], "kind", "plain"),
        ([], "count", 2),
    ],
)
def test_typed_values_reach_the_settings(
    toy: Any, command: Run, typed: list[str], key: str, value: object
) -> None:
    code, out, _ = command("toy", "--json", *typed)
    assert code == 0
    assert json.loads(out)["settings"][key] == value


@pytest.mark.parametrize("options", [["--bits", "none"], ["--set", "bits=none"]])
def test_none_is_no_number(command: Run, options: list[str]) -> None:
    code, out, _ = command("nano", "export", "--save-path", "out", "--dry-run", "--json", *options)
    assert code == 0
    assert json.loads(out)["settings"]["bits"] is None


def test_a_limit_may_be_none(command: Run) -> None:
    code, out, _ = command("eval", "--limit", "none", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["settings"]["limit"] is None
