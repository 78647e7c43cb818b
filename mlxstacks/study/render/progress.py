"""Progress of a run: a bar in a notebook and on a terminal, a line now and then elsewhere."""

import math
import sys
import time
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import Any, Protocol, Self

# Work shorter than this shows no bar; a log gets its first line later, then one this often.
QUIET_SECONDS, LOG_QUIET_SECONDS, LOG_SECONDS = 0.5, 2.0, 15.0
_LEAST_SECONDS = 0.2  # between two drawings


class _Draw(Protocol):
    """share: None removes the bar; 0 says what is done before anything can be counted."""

    def __call__(self, share: float | None, text: str) -> None: ...


class ProgressBar:
    """A callable `bar(done, total)` or `bar(done, total, what)`; leaving it as a context manager
    removes the bar.

    One bar for a whole run; it never goes back. What is done while `done` is 0 is shown at once.
    The time left counts from the first call with more than 0, so that neither loading nor the first
    step, which compiles, is taken for the pace; it is shown from the second such call on.
    logs: whether lines are written where there is neither.
    """

    def __init__(
        self, label: str, clock: Callable[[], float] = time.monotonic, *, logs: bool = True
    ) -> None:
        self._label, self._clock = label, clock
        self._started = clock()
        self._drawn = -math.inf
        self._share, self._what = 0.0, ""
        self._first: tuple[float, float] | None = None  # share and time of the first that was done
        drawing = _in_notebook() or _on_terminal()
        self._draw: _Draw = drawing or (_into_log if logs else _nowhere)
        self._quiet, self._every = QUIET_SECONDS, _LEAST_SECONDS
        if drawing is None:
            self._quiet, self._every = LOG_QUIET_SECONDS, LOG_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._draw(None, f"{self._label}: {'done' if error is None else 'stopped'}")

    def __call__(self, done: float, total: float, what: str = "") -> None:
        now = self._clock()
        share = done / total if total and math.isfinite(total) else 0.0
        self._share = max(self._share, min(share, 1.0))
        if self._share == 0:
            if what and what != self._what:
                self._draw(0.0, f"{self._label}: {what}")
            self._what = what
            return
        left = self._left(now)
        if now - self._started >= self._quiet and now - self._drawn >= self._every:
            self._drawn = now
            parts = [f"{self._share:.0%}", what, duration(now - self._started)]
            parts += [] if left is None else [f"about {duration(left)} left"]
            self._draw(self._share, f"{self._label}: " + ", ".join(filter(None, parts)))

    def _left(self, now: float) -> float | None:
        """Seconds, at the pace since the first call with something done; None before the second."""
        if self._first is None:
            self._first = (self._share, now)
        share, since = self._first
        if self._share <= share:
            return None
        return (now - since) * (1 - self._share) / (self._share - share)


def duration(seconds: float) -> str:
    """`48 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _nowhere(share: float | None, text: str) -> None:
    pass


def _into_log(share: float | None, text: str) -> None:
    from mlxstacks.study.render.console import write

    if share is not None:
        write(text, error=True)


def _in_notebook() -> _Draw | None:
    """Draws into the cell that runs; None outside of Jupyter."""
    kernel = sys.modules.get("ipykernel.zmqshell") or sys.modules.get("google.colab._shell")
    if kernel is None:
        return None
    from IPython.display import HTML, display

    handle: Any = None

    def draw(share: float | None, text: str) -> None:
        nonlocal handle
        if share is None:
            if handle is not None:
                handle.update(HTML(escape(text)))
            return
        value = f' value="{share:.3f}"' if share else ""
        bar = HTML(f'<progress max="1"{value}></progress> {escape(text)}')
        if handle is None:
            handle = display(bar, display_id=True)
        else:
            handle.update(bar)

    return draw


def _on_terminal() -> _Draw | None:
    """Draws on stderr; None where that is a file."""
    if not sys.stderr.isatty():
        return None
    from rich.progress import BarColumn, Progress, TextColumn

    from mlxstacks.study.render.console import console

    where = console(stderr=True)
    width = min(20, where.width // 6)  # the words matter more
    columns = (BarColumn(bar_width=width), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=where, transient=True)
    task = bar.add_task("", total=None)

    def draw(share: float | None, text: str) -> None:
        if share is None:
            bar.stop()
        else:
            bar.start()
            bar.update(task, total=1.0 if share else None, completed=share, description=text)

    return draw
