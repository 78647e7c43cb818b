"""From generated text to a program: fences, repeated signatures, docstrings, what follows.

Run: pytest tests/experiments/benchmarks/test_human_eval.py
"""

import json
from pathlib import Path

import pytest

from mlxstacks.experiments.benchmarks.extract import Extracted
from mlxstacks.experiments.benchmarks.human_eval import body_of, code_of, passes, program
from mlxstacks.experiments.sandbox import SandboxError, SandboxLimits, run_untrusted

HUMAN_EVAL = Path(__file__).parents[4] / "shared" / "data" / "bench_humaneval.jsonl"
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


@pytest.mark.parametrize("name", RIGHT)
def test_right_completions_are_right_programs(name: str) -> None:
    """They are ours, so they may run here."""
    source = program(PROMPT, RIGHT[name], TEST, "double")
    assert source is not None
    assert source.count("def double") == 1
    exec(compile(source, name, "exec"), {})


def test_wrong_ones_stay_wrong() -> None:
    source = program(PROMPT, "    return n * n", TEST, "double")
    with pytest.raises(AssertionError):
        exec(compile(source or "", "wrong", "exec"), {})
    assert program(PROMPT, " \n ", TEST, "double") is None
    assert code_of("```\n```") == Extracted(None, "none")
    assert code_of("a\n```py\nb\n```\n```\nc\n```") == Extracted("b", "fenced")
    assert body_of("def double(n:\n    return", "double") == "    return"  # no Python, but kept


@pytest.mark.parametrize("deep", ["-" * 9000 + "n", "n" + "[0]" * 5000, "'\0'", "'\ud800'"])
def test_what_the_parser_cannot_take_is_wrong_and_ends_nothing(deep: str) -> None:
    """A model that repeats itself nests deeper than Python goes."""
    source = program(PROMPT, f"def double(n):\n    return {deep}\n", TEST, "double")
    assert source is not None
    assert f"    return {deep}" in source


def test_a_completion_is_run_in_the_sandbox_and_only_when_allowed() -> None:
    with pytest.raises(SandboxError, match="not run unasked"):
        passes(PROMPT, RIGHT["body"], TEST, "double")
    assert not passes(PROMPT, "", TEST, "double").passed
    try:
        verdict = passes(PROMPT, RIGHT["fenced"], TEST, "double", allowed=True, limits=SLOW)
    except SandboxError as error:
        pytest.skip(str(error))
    assert (verdict.passed, verdict.rule) == (True, "fenced")
    # Leaving before the tests is no pass.
    early = passes(PROMPT, "    import os; os._exit(0)", TEST, "double", allowed=True, limits=SLOW)
    assert not early.passed
    assert early.result is not None
    assert early.result.exit_code == 0


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="needs ../shared/data")
def test_all_reference_solutions_of_human_eval_pass() -> None:
    """As a body, and as a whole function in a fence; all in one sandbox."""
    rows = [json.loads(line) for line in HUMAN_EVAL.read_text().splitlines()]
    assert len(rows) == 164
    sources = []
    for row in rows:
        body, test, name = row["canonical_solution"], row["test"], row["entry_point"]
        for text in (body, f"Sure:\n```python\n{row['prompt']}{body}```\n"):
            sources.append((row["task_id"], program(row["prompt"], text, test, name)))
    runner = (
        f"for name, source in {sources!r}:\n"
        "    try: exec(compile(source, name, 'exec'), {'__name__': name})\n"
        "    except Exception as error: print(name, type(error).__name__, error)\n"
    )
    limits = SandboxLimits(wall_seconds=400, cpu_seconds=200)
    try:
        result = run_untrusted(runner, limits, allowed=True)
    except SandboxError as error:
        pytest.skip(str(error))
    assert (result.status, result.output) == ("finished", "")
