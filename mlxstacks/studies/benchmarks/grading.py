"""What a generated answer is worth, by the task's rule (spec/evaluation.md section 4).

    with grading_tools(allow_code=False) as tools:
        grade(task, item, reply.text, tools)

How an answer was found and what decided are kept: a model that never boxes shows in `rule`, a
machine without math-verify in `how`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlxstacks.sandbox.run import SandboxLimits
from mlxstacks.studies.benchmarks import human_eval
from mlxstacks.studies.benchmarks.equivalence import (
    Symbolic,
    SymbolicChecker,
    equivalent,
    installed,
)
from mlxstacks.studies.benchmarks.tasks import BenchItem, Grader, Task
from mlxstacks.study import extract

NO_ANSWER = "no answer"
CODE_NOT_RUN = "not run: programs need allow_code"


@dataclass(frozen=True, slots=True)
class GradingTools:
    """symbolic: algebra on two answers, None where it is not installed. allow_code: consent to run
    programs that a model wrote, in the sandbox, within `limits`.
    """

    symbolic: Symbolic | None = None
    allow_code: bool = False
    limits: SandboxLimits = human_eval.LIMITS

    def as_json(self) -> dict[str, Any]:
        """For the report: what there was, and how often algebra was asked so far."""
        checker = self.symbolic if isinstance(self.symbolic, SymbolicChecker) else None
        return {
            "math_verify": installed() if self.symbolic else None,
            "symbolic_asked": checker.asked if checker else 0,
            "symbolic_undecided": checker.undecided if checker else 0,
            "allow_code": self.allow_code,
        }


@dataclass(frozen=True, slots=True)
class Grade:
    """correct: None where the answer was not graded. value: what was taken out of the text, None
    where no rule found anything, which is wrong; rule: the one that found it.

    how: what decided. "no answer"; of numbers, integers, letters "equal" or "unequal"; of boxes
    "text", "numeric", "symbolic", "unequal", "undecided" (algebra was asked and could not tell) or
    "unequal without algebra"; of programs the sandbox's word ("finished", "failed", "out of time",
    ...) or why it was not run.
    """

    correct: bool | None
    value: str | None
    rule: str
    how: str


@contextmanager
def grading_tools(allow_code: bool = False, seconds: float = 10.0) -> Iterator[GradingTools]:
    """The tools there are on this machine. seconds: for one question of algebra."""
    if installed() is None:
        yield GradingTools(None, allow_code)
        return
    with SymbolicChecker(seconds) as checker:
        yield GradingTools(checker, allow_code)


def grade(task: Task, item: BenchItem, text: str, tools: GradingTools) -> Grade:
    """Law: grading the same text twice gives the same grade.

    Raises: ValueError for a task whose answers are not generated; SandboxError where a program may
        be run and the sandbox is not to be had.
    """
    if task.grader is None:
        raise ValueError(f"{task.name} is scored by likelihood; there is no text to grade")
    return _GRADERS[task.grader](item, text, tools)


def _number(item: BenchItem, text: str, tools: GradingTools) -> Grade:
    extracted = extract.number(text)
    return _compared(extracted, extract.numbers_agree(extracted.value, str(item.gold)))


def _integer(item: BenchItem, text: str, tools: GradingTools) -> Grade:
    extracted = extract.integer(text)
    return _compared(extracted, extracted.value == item.gold)


def _letter(item: BenchItem, text: str, tools: GradingTools) -> Grade:
    letters = "".join(letter.strip() for letter in item.letters)
    extracted = extract.final_letter(text, letters)
    return _compared(extracted, extracted.value == item.gold)


def _compared(extracted: extract.Extracted, equal: bool) -> Grade:
    how = NO_ANSWER if extracted.value is None else "equal" if equal else "unequal"
    return Grade(equal, extracted.value, extracted.rule, how)


def _boxed(item: BenchItem, text: str, tools: GradingTools) -> Grade:
    extracted = extract.boxed(text)
    if extracted.value is None:
        return _compared(extracted, False)
    same = equivalent(str(item.gold), extracted.value, tools.symbolic)
    how: str = same.rule
    if not same.equal:
        how = "undecided" if same.symbolic == "undecided" else "unequal"
        if tools.symbolic is None:
            how = "unequal without algebra"
    return Grade(same.equal, extracted.value, extracted.rule, how)


def _code(item: BenchItem, text: str, tools: GradingTools) -> Grade:
    code = human_eval.code_of(text)
    if not tools.allow_code:
        return Grade(None, code.value, code.rule, CODE_NOT_RUN)
    verdict = human_eval.passes(
        item.extra["prompt"], text, item.extra["test"], item.extra["entry_point"],
        allowed=True, limits=tools.limits,
    )  # fmt: skip
    how = NO_ANSWER if verdict.result is None else verdict.result.status
    return Grade(verdict.passed, code.value, code.rule, how)


_GRADERS: Mapping[Grader, Callable[[BenchItem, str, GradingTools], Grade]] = {
    "number": _number,
    "boxed": _boxed,
    "integer": _integer,
    "letter": _letter,
    "code": _code,
}
