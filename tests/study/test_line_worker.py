"""A process that answers questions and can be ended.

Run: pytest tests/study/test_line_worker.py
"""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mlxstacks.study import child_process
from mlxstacks.study.child_process import LineWorker

# Answers each question with itself; never {"number": 0}, and {"number": 9} by ending.
ECHO = """print(flush=True)
while (line := input()) != '{"number": 9}':
    while line == '{"number": 0}':
        pass
    print(line, flush=True)"""


@pytest.fixture
def worker() -> Iterator[LineWorker]:
    echo = LineWorker([sys.executable, "-I", "-S", "-c", ECHO])
    yield echo
    echo.close()


@pytest.mark.parametrize(("number", "seconds"), [(0, 0.1), (9, 60)])
def test_a_question_without_an_answer_ends_it_and_the_next_one_is_answered(
    worker: LineWorker, number: int, seconds: float
) -> None:
    assert worker.ask({"number": number}, seconds) is None
    assert worker.ask({"number": 2}, 60) == {"number": 2}


def test_a_worker_that_ends_by_itself_is_replaced(worker: LineWorker) -> None:
    assert worker.ask({"number": 1}, 60) == {"number": 1}
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    assert worker.ask({"number": 2}, 60) == {"number": 2}, "the question is not to blame"


def test_an_interrupted_question_s_answer_is_not_the_next_one_s(
    worker: LineWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = child_process._read_line, iter(range(9))

    def interrupted(process: Any, seconds: float) -> bytes | None:
        if next(calls) == 1:  # the first is the word that it is ready
            raise KeyboardInterrupt
        return own(process, seconds)

    monkeypatch.setattr(child_process, "_read_line", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.ask({"number": 1}, 60)
    assert worker.ask({"number": 2}, 60) == {"number": 2}


def test_a_process_that_does_not_start_is_told() -> None:
    worker = LineWorker([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="does not start"):
        worker.ask({}, 1)
