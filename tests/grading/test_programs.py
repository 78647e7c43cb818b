"""From generated text to a program: fences, repeated signatures, docstrings, what follows; verdicts
that the program cannot forge.

Run: pytest tests/grading/test_programs.py
"""

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.grading.extract import Extracted
from mlxstacks.grading.programs import (
    CodeVerdict,
    body_of,
    code_of,
    passes,
    programs,
)
from mlxstacks.sandbox import calls
from mlxstacks.sandbox.calls import decode, encode
from mlxstacks.sandbox.run import SandboxError, SandboxLimits, run_untrusted

HUMAN_EVAL = Path(__file__).parents[3] / "shared" / "data" / "bench_humaneval.jsonl"
PROMPT = 'def double(n: int) -> int:\n    """Twice n."""\n'
TEST = "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n"
SLOW = SandboxLimits(wall_seconds=60, cpu_seconds=30)

RIGHT = {
    "body": "    return n + n\n",
    "body without its first indentation": "return n + n\n",
    "first line without": "result = n\n    result += n\n    return result\n",
    "flush left": "if n:\n    return n + n\nreturn 0\n",
    "fenced": "Here it is:\n```python\n    return n + n\n```\nDone. def is a word",
    "fence not closed": "```python\n    return n + n\n",
    "signature": "```\ndef double(n: int) -> int:\n    return n + n\n```",
    "signature and docstring": f"```python\n{PROMPT}    return n + n\n```",
    "docstring of lines": 'def double(n):\n    """Twice\n\n    n.\n    """\n    return n + n\n',
    "signature over lines": "def double(\n    n: int,\n) -> int:\n    return n + n\n",
    "one line": "def double(n): return n + n\n",
    "more after it": "    return n + n\n\n\ndef main():\n    raise SystemExit\n\nmain()\n",
    "calls after it": "    return n + n\n\nprint(double(int(input())))\n",
    "imports above": "import math\n\ndef double(n):\n    return math.prod([2, n])\n",
    "two spaces": "def double(n):\n  import math\n  return 2 * n\n",
    "ends of lines of another system": "    m = n\r\n    return m + n\r\n",
    "separators in a text": "def double(n):\n    return n * len('\x85\u2028')\n",
    "one line, not ASCII": "def double(n: 'é') -> 'é': return n + n\n",
    "helper inside": "    def add(a, b):\n        return a + b\n    return add(n, n)\n",
}


def across(calls: ModuleType, sources: Iterable[str]) -> None:
    """Both programs in this process; arguments and answers cross as in `passes`. Raises: what the
    tests raise.
    """
    functions: list[Callable[..., object]] = []

    def candidate(*arguments: object) -> object:
        passed = calls.decode(calls.encode(arguments))
        return calls.decode(calls.encode(functions[0](*passed)))

    calls.serve, calls.Candidate = functions.append, lambda: candidate  # type: ignore[attr-defined]
    for source in sources:
        exec(compile(source, "source", "exec"), {})


def check(text: str) -> None:
    """Of our own texts, which may run here."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("serve", "Candidate"):
            patch.setattr(calls, name, None)
        across(calls, programs(PROMPT, text, TEST, "double") or ())


@pytest.mark.parametrize("name", RIGHT)
def test_right_completions_are_right_programs(name: str) -> None:
    check(RIGHT[name])
    sources = programs(PROMPT, RIGHT[name], TEST, "double")
    assert sources is not None
    assert sources[0].count("def double") == 1


def test_wrong_ones_stay_wrong() -> None:
    with pytest.raises(AssertionError):
        check("    return n * n")
    assert programs(PROMPT, " \n ", TEST, "double") is None
    assert code_of("```\n```") == Extracted(None, "none")
    assert code_of("a\n```py\nb\n```\n```\nc\n```") == Extracted("b", "fenced")
    assert body_of("def double(n:\n    return", "double") == "    return"  # no Python, but kept


@pytest.mark.parametrize("deep", ["-" * 9000 + "n", "n" + "[0]" * 5000, "'\0'", "'\ud800'"])
def test_what_the_parser_cannot_take_is_wrong_and_ends_nothing(deep: str) -> None:
    """A model that repeats itself nests deeper than Python goes."""
    sources = programs(PROMPT, f"def double(n):\n    return {deep}\n", TEST, "double")
    assert sources is not None
    assert f"    return {deep}" in sources[0]


def verdict(text: str, test: str = TEST, limits: SandboxLimits = SLOW) -> CodeVerdict:
    """Skips where there is no sandbox."""
    try:
        return passes(PROMPT, text, test, "double", allowed=True, limits=limits)
    except SandboxError as error:
        pytest.skip(str(error))


def test_a_completion_is_run_in_the_sandbox_and_only_when_allowed() -> None:
    with pytest.raises(SandboxError, match="not run unasked"):
        passes(PROMPT, RIGHT["body"], TEST, "double")
    assert not passes(PROMPT, "", TEST, "double").passed
    right = verdict(RIGHT["fenced"])
    assert right.passed


# Wrong completions that passed when the tests ran in their process. Frames lead from the function
# through the tests to the code that reports their end.
REPORT = """
    def report(*arguments, **named):
        import os, sys
        frame = sys._getframe()
        while "token" not in frame.f_locals or "self" not in frame.f_locals:
            frame = frame.f_back
        os.write(frame.f_locals["self"].token, frame.f_locals["token"])
        os._exit(0)
"""
FORGERIES = {
    "equal to everything": """
    class Equal:
        def __eq__(self, other): return True
    return Equal()
""",
    "mock.ANY": "    from unittest import mock\n    return mock.ANY",
    "patched random": "    import random\n    random.randint = lambda a, b: 0\n    return 0",
    "expected value in a frame": "    import sys\n"
    "    return sys._getframe(1).f_locals.get('expected', 0)",
    "token in a frame": f"{REPORT}    report()",
    "patched traceback": f"{REPORT}    import traceback\n    traceback.print_exc = report",
    "patched stdout": f"{REPORT}    import sys\n    sys.stdout.flush = report",
    # and ways through calls alone
    "stops the tests' loop": "    if n == 0: return 0\n    raise StopIteration",
    "clears the arguments": "    try: n.clear()\n    except AttributeError: return 0",
}
THOROUGH = """
def check(candidate):
    import random
    assert candidate(0) == 0
    number = random.randint(1, 1000)
    expected = 2 * number
    assert candidate(number) == expected
"""
TESTS = {
    "stops the tests' loop": """
def check(candidate):
    for number, answer in zip([0, 1, 2], map(candidate, [0, 1, 2])):
        assert answer == 2 * number
""",
    "clears the arguments": """
def check(candidate):
    numbers = [1]
    assert candidate(0) == 0
    candidate(numbers)
    for number in numbers:
        assert candidate(number) == 2 * number
""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_answer_does_not_pass(name: str) -> None:
    test = TESTS.get(name, THOROUGH)
    assert not verdict(FORGERIES[name], test).passed


RAISES_EXIT = """
    import os, sys
    os.write(int(sys.argv[2]), b'["raised", "SystemExit", ""]\\n')
"""


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("    return (n for n in [6])", "TypeError: generator is no plain data"),
        ("    import os; os._exit(0)", ""),
        (RAISES_EXIT, "TypeError: SystemExit is no Exception"),
    ],
)
def test_no_answer_is_no_exception_that_tests_expect(text: str, output: str) -> None:
    expecting = "def check(candidate):\n    try: candidate(3)\n    except BaseException: pass\n"
    unanswered = verdict(text, expecting)
    assert not unanswered.passed
    assert unanswered.result is not None
    assert output in unanswered.result.output


def test_exceptions_reach_the_tests_as_the_nearest_built_in_one() -> None:
    text = "    class Odd(KeyError): pass\n    if n: raise Odd(n)\n    return n"
    test = """
def check(candidate):
    for number, error in (3, KeyError), (0, None):
        try: assert candidate(number) == number
        except LookupError as raised: assert type(raised) is error
        else: assert error is None
"""
    assert verdict(text, test).passed


def test_right_answers_of_a_program_that_does_not_come_to_its_end_do_not_pass() -> None:
    dying = verdict("    import os, sys\n    sys.stdout.flush = os.abort\n    return 2 * n")
    assert not dying.passed
    assert dying.result is not None
    assert dying.result.status == "killed"


def test_a_program_that_never_answers_is_out_of_time() -> None:
    endless = verdict("    while True: pass", limits=SandboxLimits(wall_seconds=0.5))
    assert not endless.passed
    assert endless.result is not None
    assert endless.result.status == "out of time"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary()
    | st.complex_numbers(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)  # fmt: skip


@given(plain)
def test_plain_data_comes_across_as_it_is(value: object) -> None:
    same = decode(json.loads(json.dumps(encode(value))))
    assert same == value
    assert repr(same) == repr(value)


def test_what_has_no_plain_form_is_refused_or_becomes_plain() -> None:
    nan = decode(encode(float("nan")))
    assert nan != nan
    assert type(decode(encode(Counter("aa")))) is dict
    assert type(decode(encode(os.terminal_size((3, 2))))) is tuple
    texts = ("\ud83d\ude00", "\ud83d" + "\ude00")
    exact: tuple[object, ...] = ({1, "a", (2.5, None)}, frozenset({b"b"}), set(), 10**5000, *texts)
    for value in exact:
        same = decode(encode(value))
        assert (type(same), same) == (type(value), value)
    for value in (object(), [range(3)], {"a": len}, mock.ANY):
        with pytest.raises(TypeError, match="is no plain data"):
            encode(value)


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="needs ../shared/data")
def test_all_reference_solutions_of_human_eval_pass() -> None:
    """As a body, and as a whole function in a fence; all in one sandbox."""
    rows = [json.loads(line) for line in HUMAN_EVAL.read_text().splitlines()]
    assert len(rows) == 164
    sources = []
    for row in rows:
        body, test, name = row["canonical_solution"], row["test"], row["entry_point"]
        for text in (body, f"Sure:\n```python\n{row['prompt']}{body}```\n"):
            sources.append((row["task_id"], programs(row["prompt"], text, test, name)))
    runner = (
        "from __future__ import annotations\n"
        f"from mlxstacks.sandbox import calls\n{inspect.getsource(across)}\n"
        f"for name, pair in {sources!r}:\n"
        "    try: across(calls, pair)\n"
        "    except Exception as error: print(name, type(error).__name__, error)\n"
    )
    limits = SandboxLimits(wall_seconds=400, cpu_seconds=200)
    try:
        result = run_untrusted(runner, limits, allowed=True)
    except SandboxError as error:
        pytest.skip(str(error))
    assert (result.status, result.output) == ("finished", "")
