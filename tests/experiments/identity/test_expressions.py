"""Regular expressions within limits. Run: pytest tests/experiments/identity/test_expressions.py"""

import os
import re
import resource
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.experiments import line_worker
from mlxstacks.experiments.identity import expressions
from mlxstacks.experiments.identity.expressions import fits
from mlxstacks.experiments.identity.suite import SuitePrompt, suite_of
from mlxstacks.experiments.line_worker import LineWorker

LONG = "a" * 60 + "!"
ENDLESS = (r"(a+)+$", r"(a*)*\1b$")


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A worker of its own that allows as little CPU time as can be told."""
    code = (
        "import runpy, sys; names = runpy.run_path(sys.argv[1]); "
        "names['_work'].__globals__['CPU_SECONDS'] = 0; names['_work']()"
    )
    worker = LineWorker([sys.executable, "-I", "-S", "-c", code, expressions.__file__])
    monkeypatch.setattr(expressions, "_worker", lambda process_id: worker)
    fits.cache_clear()
    yield
    fits.cache_clear()
    worker.close()


@given(
    st.text("ab.*+?()[]{}|\\^$1,we ", max_size=8), st.text("ab1 {}e\u0301\u00e9\u00b2", max_size=8)
)
def test_it_is_what_python_s_own_engine_says(expression: str, text: str) -> None:
    """Among them what the package `regex` reads otherwise: `a{e}`, and letters with accents."""
    try:
        expected = re.search(expression, text, re.IGNORECASE) is not None
    except re.error as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            fits(expression, text)
    else:
        assert fits(expression, text) is expected


@pytest.mark.parametrize("expression", ENDLESS)
@pytest.mark.usefixtures("one_second")
def test_an_endless_expression_is_ended_and_the_next_one_is_answered(expression: str) -> None:
    used = time.process_time()
    with pytest.raises(TimeoutError, match=re.escape(repr(expression))):
        fits(expression, LONG)
    assert time.process_time() - used < 1  # not in this process
    assert fits("a", LONG)


@pytest.mark.usefixtures("one_second")
def test_the_prompt_and_the_pattern_are_named() -> None:
    prompt = SuitePrompt("07", "self", "Who?", (f"re:{ENDLESS[0]}",), ())
    with pytest.raises(InputError, match=r"prompt 07: '\(a\+\)\+\$' took more than .* of 61 char"):
        prompt.verdict(LONG)
    assert prompt.verdict("aaa").passed


@pytest.mark.usefixtures("one_second")
def test_an_expression_of_all_memory_is_refused_when_the_suite_is_read() -> None:
    """`regex` with a timeout of half a second took 17 s and 2.9 GB for this one."""
    row = {"category": "self", "prompt": "Who?", "required": ["re:(?:(?=|a)){2000000000}"]}
    with pytest.raises(InputError, match=r"prompt 1: required: .* took more than .* on an empty"):
        suite_of([row], "suite")


@pytest.mark.usefixtures("one_second")
def test_a_worker_that_ends_by_itself_is_replaced() -> None:
    assert fits("b", "abc")
    worker = expressions._worker(os.getpid())
    assert worker._process is not None
    worker._process.kill()
    worker._process.wait()
    assert fits("c", "abc"), "the question is not to blame"
    assert fits("a", "abc")


def test_an_interrupted_question_s_answer_is_not_the_next_one_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "print(flush=True)\nwhile True: print(input(), flush=True)"
    worker = LineWorker([sys.executable, "-c", code])
    own, calls = line_worker._line, iter(range(9))

    def interrupted(process: Any, seconds: float) -> bytes | None:
        if next(calls) == 1:  # the first is the word that it is ready
            raise KeyboardInterrupt
        return own(process, seconds)

    monkeypatch.setattr(line_worker, "_line", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            worker.ask({"number": 1}, 60)
        assert worker.ask({"number": 2}, 60) == {"number": 2}
    finally:
        worker.close()


@pytest.mark.parametrize("hardest", [resource.RLIM_INFINITY, 1 << 40, 3 << 29, 1 << 29])
def test_the_memory_that_is_told_is_the_limit_that_is_set(
    monkeypatch: pytest.MonkeyPatch, hardest: int
) -> None:
    """No more than a lower hard limit of ours, which nobody could go above; none but on Linux."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (hardest, hardest))
    monkeypatch.setattr(sys, "platform", "linux")
    half = hardest == 1 << 29
    assert expressions._memory_limit() == (1 << 29 if half else 1 << 30)
    silent = SimpleNamespace(ask=lambda question, seconds: None)
    monkeypatch.setattr(expressions, "_worker", lambda process_id: silent)
    with pytest.raises(TimeoutError, match=rf"seconds or {'0.5' if half else '1'} GiB$"):
        fits(f"of {hardest}", "text")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TimeoutError, match=r"seconds$"):
        fits(f"of {hardest}", "text")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
def test_a_lower_hard_limit_does_not_stop_it() -> None:
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29)); "
        "runpy.run_path(sys.argv[1])['_work']()"
    )
    worker = LineWorker([sys.executable, "-I", "-S", "-c", code, expressions.__file__])
    try:
        assert worker.ask({"expression": "b", "text": "abc"}, 60) == {"fits": True}
    finally:
        worker.close()


def test_a_process_that_does_not_start_is_told() -> None:
    worker = LineWorker([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match="does not start"):
        worker.ask({}, 1)
