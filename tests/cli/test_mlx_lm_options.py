"""Every option of mlx-lm's commands works here, or is answered by what to do instead.

Its parsers are read from its sources: importing `mlx_lm.evaluate` takes seconds.
Run: pytest tests/cli/test_mlx_lm_options.py
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from mlxstacks.cli import group, make_group
from mlxstacks.cli.mlx_lm_options import FLAGS, REFUSED, SPELLINGS
from mlxstacks.recipe.table import COMMANDS
from tests.cli.conftest import Run

OURS = {
    command: theirs
    for command, theirs in {
        "generate": "generate", "chat": "chat", "fuse": "fuse", "train": "lora", "eval": "evaluate",
        "convert": "convert",
    }.items()
    if command in COMMANDS
}  # fmt: skip


@cache
def options_of(module: str) -> dict[str, list[str]]:
    """Spelling -> what may follow it, from the `add_argument` calls of a module of mlx-lm."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / f"{module}.py").read_text()
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
            continue
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        several = keywords.get("nargs") == "'+'"
        values = [] if "action" in keywords else ["1", "2"] if several else ["1"]
        for spelling in [ast.literal_eval(argument) for argument in node.args]:
            found[spelling] = values
            if "BooleanOptionalAction" in keywords.get("action", ""):
                found[f"--no-{spelling.removeprefix('--')}"] = values
    assert len(found) > 5
    return found


def options_typed(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: str) -> dict[str, Any]:
    """The settings that a command line gives."""
    typed: dict[str, Any] = {}
    monkeypatch.setattr(group, "execute", lambda name, options, common: typed.update(options) or 0)
    make_group().main([command, *arguments], standalone_mode=False)
    return typed


@pytest.mark.parametrize("command", OURS)
def test_each_option_works_or_is_answered(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, unanswered = set(), {}
    for option, values in options_of(OURS[command]).items():
        message = ""
        try:
            options_typed(monkeypatch, command, option, *values)
        except click.BadParameter:  # the value is not one of ours, the option is
            pass
        except click.UsageError as error:
            message = error.message
        answered = [o for o in (option, option[:2]) if f"no option {o}: " in message]
        refused |= set(answered)
        if message and not answered:
            unanswered[option] = message
    assert not unanswered
    of_generate = set(options_of("generate")) if command == "chat" else set()
    stale = set(REFUSED.get(command, {})) - refused - of_generate - {"--verbose"}
    assert not stale, "mlx-lm has no such option, or it works here"


def test_no_table_names_a_setting_that_is_not_there() -> None:
    for command in OURS:
        theirs = options_of(OURS[command])
        for spellings in SPELLINGS.get(command, {}).values():
            assert set(spellings) <= set(theirs), command
        assert set(FLAGS.get(command, {})) <= set(theirs)


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("generate -p hello -m 3", {"prompt": "hello", "max_tokens": 3}),
        ("generate --prompt - --top_p 0.5", {"prompt": "-", "top_p": 0.5}),
        ("generate hello --prompt hello", {"prompt": "hello"}),
        ("chat -m 3 --adapter_path a", {"max_tokens": 3, "adapter_path": ["a"]}),
        ("fuse --dequantize", {"requant": "dequantize"}),
        ("train --adapter-path a", {"save_path": "a"}),
        ("eval --tasks a b --limit 3 --output-dir o",
         {"tasks": ["a", "b"], "limit": 3, "save_path": "o"}),
        ("eval --tasks a --tasks b", {"tasks": ["a", "b"]}),
        ("fuse --adapter_path a b --force", {"adapter_path": ["a", "b"], "force": True}),
        ("eval --confirm-run-unsafe-code", {"allow_code": True}),
    ],
)  # fmt: skip
def test_spellings_of_mlx_lm_give_our_settings(
    line: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_typed(monkeypatch, *line.split()) == settings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate a -p b", "prompt is given twice: 'a', and 'b' by --prompt"),
        ("fuse --dequantize --requant keep", "'dequantize' by --dequantize"),
        ("generate -p a --verbose False", "has no option --verbose False: the answer goes to"),
        ("chat --prompt hello", "chat has no option --prompt: prompts are typed"),
        ("chat -p hello", "`mlxstacks generate` answers one"),
        ("train --trust_remote_code", "code of a model is never run"),
        ("eval --tasks a --temp=1", "eval has no option --temp: answers are greedy"),
    ],
)
def test_what_differs_is_said(line: str, message: str, command: Run) -> None:
    code, out, err = command(*line.split())
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("words", [(), ("generate",), ("route", "train"), ("nano",)])
def test_h_is_help_everywhere(words: tuple[str, ...], command: Run) -> None:
    code, out, _ = command(*words, "-h")
    assert (code, out) == (0, command(*words, "--help")[1])
    assert out.startswith("Usage: ")
