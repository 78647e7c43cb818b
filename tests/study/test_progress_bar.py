"""The bar of a run on a terminal, in a notebook, in a log. Costs no computing.

Run: python -m pytest tests/study/test_progress_bar.py
"""

import io
import sys
import types
from typing import Any

import pytest

from mlxstacks.study.render.progress import LOG_QUIET_SECONDS, ProgressBar, duration


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with ProgressBar("fuse", clock=lambda: now) as bar:
        for step in range(100):
            now = step * 0.5
            bar(step, 100)
            if now < LOG_QUIET_SECONDS:
                assert capsys.readouterr().err == ""
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fuse: 4%, 2 s, about 48 s left"
    assert len(lines) == 4


def test_what_comes_before_the_first_step_is_shown_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ProgressBar("train", clock=lambda: 0.0) as bar:
        bar(0, 10, "loading the model")
        bar(0, 10, "loading the model")
        assert capsys.readouterr().err == "train: loading the model\n"


def test_the_time_left_counts_neither_loading_nor_the_first_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ticks = iter([0.0, 100.0, 120.0, 140.0])
    with ProgressBar("train", clock=lambda: next(ticks)) as bar:
        for step in (1, 2, 3):
            bar(step, 10, f"loss {step}")
    # at the pace of the first one it would take 1,000 s
    assert capsys.readouterr().err.splitlines() == [
        "train: 10%, loss 1, 2 min",
        "train: 20%, loss 2, 2 min, about 3 min left",
        "train: 30%, loss 3, 2 min, about 2 min left",
    ]


def test_a_terminal_shows_one_bar_that_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now, stream = 0.0, Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    with ProgressBar("fuse", clock=lambda: now) as bar:
        bar(1, 4)
        now = 3.0
        bar(2, 4, "layer 3")
        now = 5.0
        bar(1, 1000, "layer 3")  # a part that counts again takes nothing back
    assert "fuse: 50%, layer 3, 5 s, about 10 s left" in stream.getvalue()


def test_a_notebook_draws_one_bar_and_says_that_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    shown: list[str] = []
    handle = types.SimpleNamespace(update=lambda html: shown.append(html.data))

    def display_first(html: Any, **_: Any) -> Any:
        shown.append(html.data)
        return handle

    monkeypatch.setattr(display, "display", display_first)
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", types.ModuleType("zmqshell"))
    ticks = iter([0.0, 0.1, 1.0, 1.1, 101.0])
    with ProgressBar("train", clock=lambda: next(ticks)) as bar:
        bar(0, 100, "loading <i>")
        for done, what in ((1, "loss 0.1"), (2, "loss 0.1"), (50, "")):
            bar(done, 100, what)
    assert shown == [
        '<progress max="1"></progress> train: loading &lt;i&gt;',
        '<progress max="1" value="0.010"></progress> train: 1%, loss 0.1, 1 s',
        '<progress max="1" value="0.500"></progress> train: 50%, 2 min, about 2 min left',
        "train: done",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (99.0, "99 s"), (720.0, "12 min"), (9_000.0, "2.5 h")]
)
def test_durations_have_one_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words
