"""What every command prints with: consoles, tables, one JSON document, progress on stderr."""

import contextlib
import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from types import TracebackType
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
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    from mlxstacks.study.result import Result

__all__ = ["Cell", "Details", "Table", "console", "details", "safe", "setting", "table"]

# Work shorter than this shows no progress at all.
QUIET_SECONDS = 2.0
# Without a terminal a line is printed this often, so that a log shows that the run is alive.
LOG_SECONDS = 15.0


def print_guard(console: "Console", result: "Result") -> None:
    """What `guard` predicts; with --apply only the settings that fit, as a recipe."""
    if not result.settings["apply"]:
        print_result(console, result)
        return
    for key, value in result.data["apply"].items():
        if value is not None:
            # JSON is a part of YAML
            text = json.dumps(value, ensure_ascii=False)
            console.print(f"{key}: {text}", markup=False, soft_wrap=True)


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


def write(text: str, end: str = "\n", *, error: bool = False, label: str = "") -> None:
    """Text as it is, but `safe`, on stdout or stderr, at once. A stderr that takes no more (a log
    on a full disk) is given up; the work goes on. label: stands before it and may have colours.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        stream.write(label + safe(text) + end)
        stream.flush()
    except OSError:
        if not error:
            raise
        sys.stderr = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115


def emit(result: Any, as_json: bool, render: Callable[["Console", Any], None]) -> None:
    """Print a result: with --json its `as_json()` and the directory that was written, which is no
    part of the document; else what `render(console, result)` prints.
    """
    if as_json:
        directory = getattr(result, "directory", None)
        print_json(result.as_json() | ({"directory": directory} if directory else {}))
    else:
        render(console(), result)


@contextlib.contextmanager
def quiet_stdout(active: bool) -> Iterator[None]:
    """With --json, what a library prints while it works goes to stderr, not beside the result."""
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def note(text: str) -> None:
    """A remark on stderr, where it does not mix with the result; made `safe`.

    On a terminal lines break between words, but those that hold a command; in a log they stay
    whole.
    """
    text = safe(text)
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(
            line
            if holds_command(line)
            else textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            for line in text.split("\n")
        )
    write(text, error=True)


class Progress:
    """A callable `progress(done, total)` or `progress(done, total, what)` that draws on stderr.

    One bar for a whole run, with the time that is left; it never goes back. Nothing is shown during
    the first two seconds. Later calls move the bar on a terminal, or write a line now and then
    where stderr is a file. Use as a context manager: leaving removes the bar.
    """

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._clock = label, clock
        self._started = self._logged = clock()
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._wait = QUIET_SECONDS
        self._share = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, done: float, total: float, what: str = "") -> None:
        now = self._clock()
        share = done / total if total and math.isfinite(total) else 0.0
        self._share = max(self._share, min(share, 1.0))
        seconds = now - self._started
        if seconds < QUIET_SECONDS:
            return
        if sys.stderr.isatty():
            self._draw(what)
        elif now - self._logged >= self._wait:
            self._logged, self._wait = now, LOG_SECONDS
            text = f"{self._label} {what}".strip() + f": {self._share:.0%}, {seconds:.0f} s"
            if self._share > 0.01:
                text += f", about {seconds * (1 / self._share - 1):.0f} s left"
            note(text)

    def _draw(self, what: str) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                console=console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._label, total=1.0)
            self._bar.start()
        description = f"{self._label} {what}".strip()
        self._bar.update(self._task, completed=self._share, description=description)
