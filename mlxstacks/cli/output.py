"""What every command prints with: consoles, tables, one JSON document, remarks on stderr."""

import contextlib
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlxstacks.study.render.console import (
    Cell,
    Details,
    Table,
    console,
    details,
    holds_command,
    print_result,
    safe,
    setting,
    table,
    write,
)

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.study.result import Result

_silent = False

__all__ = ["Cell", "Details", "Table", "console", "details", "safe", "setting", "table", "write"]


def print_guard(console: "Console", result: "Result") -> None:
    """What `guard` predicts; with --apply only the settings that fit, as a recipe."""
    if not result.settings["apply"]:
        print_result(console, result)
        return
    if result.failed_gate:  # nothing fits
        return
    console.print("command: guard", markup=False)
    for key, value in result.data["apply"].items():
        if value is not None:
            # JSON is a part of YAML
            text = json.dumps(value, ensure_ascii=False)
            console.print(f"{key}: {text}", markup=False, soft_wrap=True)


def print_nothing(console: "Console", report: Any) -> None:
    """Of chats and answers, which were printed as they came."""


def print_json(document: Any) -> None:
    """One JSON document on stdout. Raises ValueError for NaN, which JSON has no word for."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
        plain = text == safe(text)
    except UnicodeEncodeError:  # an ASCII terminal, or a path that is not UTF-8
        plain = False
    if not plain:
        text = json.dumps(document, indent=2, allow_nan=False, default=str)
        text = text.replace("\x7f", "\\u007f")
    write(text)


def emit(result: Any, as_json: bool, render: Callable[["Console", Any], None]) -> None:
    """Print a result: with --json its `as_json()` (of a report, its fields) and the directory that
    was written, which is no part of the document; else what `render(console, result)` prints.
    """
    if as_json:
        document = result.as_json() if hasattr(result, "as_json") else asdict(result)
        directory = getattr(result, "directory", None)
        print_json(document | ({"directory": directory} if directory else {}))
    else:
        render(console(), result)


@contextlib.contextmanager
def quiet_stdout(active: bool) -> Iterator[None]:
    """With --json, what a library prints while it works goes to stderr, not beside the result."""
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def silence() -> None:
    """For the rest of this process, which is not the first of a group: errors alone are shown."""
    global _silent
    _silent = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def is_silent() -> bool:
    return _silent


def is_quiet() -> bool:
    """Whether `quiet_stdout` is active: the result will be one JSON document."""
    return sys.stdout is sys.stderr


def note(text: str) -> None:
    """A remark on stderr, where it does not mix with the result; made `safe`."""
    if not _silent:
        write(wrapped_on_terminal(safe(text)), error=True)


def wrapped_on_terminal(text: str, label: str = "") -> str:
    """Text for stderr, below a label. On a terminal lines break between words, but those that hold
    a command; in a log they stay whole.
    """
    if not sys.stderr.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = [
        line
        if holds_command(line)
        else textwrap.fill(
            line, width, break_long_words=False, break_on_hyphens=False,
            subsequent_indent=" " * (len(line) - len(line.lstrip(" "))),
        )
        for line in f"{label}{text}".split("\n")
    ]  # fmt: skip
    return "\n".join(lines).removeprefix(label)
