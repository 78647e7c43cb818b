"""Each rule on texts made up here; what is not graded; programs that run in the sandbox.

Run: pytest tests/studies/benchmarks/test_grading.py
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstacks.grading import equivalence, programs
from mlxstacks.sandbox.run import SandboxError, SandboxLimits
from mlxstacks.studies.benchmarks import analysis
from mlxstacks.studies.benchmarks.analysis import Grade, GradingTools, grade, grading_tools
from mlxstacks.studies.benchmarks.tasks import READERS, TASKS, BenchItem, bench_item
from tests.studies.benchmarks.task_cases import ROWS

TOOLS = GradingTools()


def item_of(task: str) -> BenchItem:
    raw = READERS[task](next(iter(ROWS[task].values())))
    return bench_item(TASKS[task], raw, raw.item_id or "row")


def graded(task: str, text: str, tools: GradingTools = TOOLS) -> Grade:
    return grade(TASKS[task], item_of(task), text, tools)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 1,002 then 7\n#### 1002", Grade(True, "1002", "marker", "equal")),
        ("So $1,002.", Grade(True, "1002", "last number", "equal")),
        ("1002.009", Grade(True, "1002.009", "last number", "equal")),
        ("1002.02", Grade(False, "1002.02", "last number", "unequal")),
        ("-1002", Grade(False, "-1002", "last number", "unequal")),
        ("", Grade(False, None, "none", "no answer")),
    ],
)
def test_numbers(text: str, expected: Grade) -> None:
    assert graded("gsm8k", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{033}", Grade(True, "33", "boxed", "equal")),
        ("The answer is 33.", Grade(True, "33", "answer is", "equal")),
        ("perhaps 34", Grade(False, "34", "last integer", "unequal")),
        ("no idea", Grade(False, None, "none", "no answer")),
    ],
)
def test_integers(text: str, expected: Grade) -> None:
    assert graded("aime2024", text) == expected


def test_letters() -> None:
    item = item_of("gpqa_diamond")
    right = str(item.gold)
    wrong = next(letter for letter in "ABCD" if letter != right)
    assert graded("gpqa_diamond", f"Hm, {wrong}.\nANSWER: {right}") == Grade(
        True, right, "answer", "equal"
    )
    assert graded("gpqa_diamond", f"ANSWER: {wrong}") == Grade(False, wrong, "answer", "unequal")
    assert graded("gpqa_diamond", f"It must be ({right})").rule == "last letter"
    assert graded("gpqa_diamond", "ANSWER: E") == Grade(False, None, "none", "no answer")


@pytest.mark.parametrize(
    ("text", "tools", "expected"),
    [
        (r"\boxed{x = 2}", TOOLS, Grade(True, "x = 2", "boxed", "text")),
        (r"\boxed{\frac{4}{2}}", TOOLS, Grade(True, r"\frac{4}{2}", "boxed", "numeric")),
        (r"\boxed{3}", TOOLS, Grade(False, "3", "boxed", "unequal without algebra")),
        (r"\boxed{1+1}", TOOLS, Grade(False, "1+1", "boxed", "unequal without algebra")),
        (r"\boxed{1+1}", GradingTools(lambda gold, answer: True),
         Grade(True, "1+1", "boxed", "symbolic")),
        (r"\boxed{1+2}", GradingTools(lambda gold, answer: False),
         Grade(False, "1+2", "boxed", "unequal")),
        (r"\boxed{?}", GradingTools(lambda gold, answer: None),
         Grade(False, "?", "boxed", "undecided")),
    ],
)  # fmt: skip
def test_boxes(text: str, tools: GradingTools, expected: Grade) -> None:
    assert graded("math500", text, tools) == expected


def test_a_model_that_never_boxes_is_seen() -> None:
    """The right answer without a box is wrong, and the rule says why."""
    found = [graded("math500", text) for text in ("2", "The answer is 2.", r"\boxed{2")]
    assert {(one.correct, one.rule, one.how) for one in found} == {(False, "none", "no answer")}


def test_likelihood_has_no_text_to_grade() -> None:
    with pytest.raises(ValueError, match="mmlu is scored by likelihood"):
        graded("mmlu", "C")


@given(st.text(max_size=60), st.sampled_from([n for n in TASKS if TASKS[n].grader]))
@settings(max_examples=50)
def test_any_text_gets_a_grade(text: str, name: str) -> None:
    one = graded(name, text)
    assert graded(name, text) == one
    assert (one.correct is None) == (name == "humaneval")
    assert one.value is not None or not one.correct
    assert one.how


RIGHT = "```python\ndef double(n):\n    return 2 * n\n```"


def test_programs_are_not_run_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "run_untrusted", lambda *_, **__: pytest.fail("it ran"))
    for text in (RIGHT, "    return 2 * n", ""):
        one = graded("humaneval", text)
        assert one.correct is None
        assert one.how == "not run: programs need allow_code"
    assert graded("humaneval", RIGHT).rule == "fenced"
    assert graded("humaneval", "") == Grade(None, None, "none", analysis.CODE_NOT_RUN)


def test_programs_that_may_run_are_judged_by_the_sandbox() -> None:
    tools = GradingTools(allow_code=True, limits=SandboxLimits(wall_seconds=60, cpu_seconds=30))
    try:
        right = graded("humaneval", RIGHT, tools)
    except SandboxError as error:
        pytest.skip(str(error))
    assert (right.correct, right.rule, right.how) == (True, "fenced", "finished")
    wrong = graded("humaneval", "    return n", tools)
    assert (wrong.correct, wrong.rule, wrong.how) == (False, "raw", "failed")
    assert graded("humaneval", " ", tools) == Grade(False, None, "none", "no answer")


def test_the_tools_say_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with grading_tools() as tools:
        assert tools.as_json() == {
            "math_verify": equivalence.installed(), "symbolic_asked": 0, "symbolic_undecided": 0,
            "allow_code": False,
        }  # fmt: skip
    for module in (equivalence, analysis):
        monkeypatch.setattr(module, "installed", lambda: None)
    with grading_tools(allow_code=True) as tools:
        assert tools.symbolic is None
        assert tools.as_json()["math_verify"] is None
        assert tools.as_json()["allow_code"] is True
