"""Progress of what Python calls: a bar in a notebook and on a terminal, nothing elsewhere."""

import sys
import time
from collections.abc import Callable
from html import escape
from types import TracebackType
from typing import Any, Self

# Work shorter than this shows no bar; a notebook is drawn this often at most.
_QUIET_SECONDS, _LEAST_SECONDS = 0.5, 0.2


class ProgressBar:
    """A callable `bar(done, total)` or `bar(done, total, what)`; leaving it as a context manager
    removes the bar.
    """

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._clock = label, clock
        self._started = self._drawn = clock()
        self._draw = _in_notebook() or _on_terminal()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._draw is not None:
            self._draw(None, "")

    def __call__(self, done: float, total: float, what: str = "") -> None:
        now = self._clock()
        if self._draw is None or now - self._started < _QUIET_SECONDS:
            return
        if now - self._drawn >= _LEAST_SECONDS and total:
            self._drawn = now
            share = min(1.0, done / total)
            seconds = (now - self._started) * (1 / share - 1) if share else 0.0
            minutes = f", {seconds / 60:.0f} min left" if seconds >= 90 else ""
            left = minutes or (f", {seconds:.0f} s left" if seconds else "")
            self._draw(share, f"{self._label} {what}".strip() + f": {share:.0%}{left}")


def _in_notebook() -> Callable[[float | None, str], None] | None:
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
                handle.update(HTML(""))
            return
        bar = HTML(f'<progress max="1" value="{share:.3f}"></progress> {escape(text)}')
        if handle is None:
            handle = display(bar, display_id=True)
        else:
            handle.update(bar)

    return draw


def _on_terminal() -> Callable[[float | None, str], None] | None:
    """Draws on stderr; None where that is a file."""
    if not sys.stderr.isatty():
        return None
    from rich.progress import BarColumn, Progress, TextColumn

    from mlxstacks.study.render.console import console

    columns = (BarColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=console(stderr=True), transient=True)
    task = bar.add_task("", total=1.0)

    def draw(share: float | None, text: str) -> None:
        if share is None:
            bar.stop()
        else:
            bar.start()
            bar.update(task, completed=share, description=text)

    return draw
