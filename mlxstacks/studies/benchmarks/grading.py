r"""What a generated answer is worth, by the task's rule (spec/evaluation.md section 4).

    with grading_tools(allow_code=False) as tools:
        grade(task, item, reply.text, tools)

How an answer was found and what decided are kept: a model that never boxes shows in `rule`, a
machine without math-verify in `how`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlxstacks.grading import extract
from mlxstacks.grading.equivalence import Symbolic, equivalent, installed, symbolic_checker
from mlxstacks.grading.programs import LIMITS, code_of, passes
from mlxstacks.sandbox.run import SandboxLimits
from mlxstacks.studies.benchmarks.tasks import BenchItem, Task

NO_ANSWER = "no answer"
CODE_NOT_RUN = "not run: programs need allow_code"


@dataclass(frozen=True, slots=True)
class GradingTools:
    """symbolic: algebra on two answers, None where it is not installed. allow_code: consent to run
    programs that a model wrote, in the sandbox, within `limits`.
    """

    symbolic: Symbolic | None = None
    allow_code: bool = False
    limits: SandboxLimits = LIMITS

    def as_json(self) -> dict[str, Any]:
        """For the report: what there was, and how often algebra was asked so far."""
        return {
            "math_verify": installed() if self.symbolic else None,
            "symbolic_asked": getattr(self.symbolic, "asked", 0),
            "symbolic_undecided": getattr(self.symbolic, "undecided", 0),
            "allow_code": self.allow_code,
        }


@dataclass(frozen=True, slots=True)
class Grade:
    """correct: None where the answer was not graded. value: what was taken out of the text, None
    where no rule found anything, which is wrong; rule: the one that found it.

    how: what decided. "no answer"; of numbers, integers, letters "equal" or "unequal"; of boxes as
    `equivalent`; of programs the sandbox's word ("finished", "failed", "out of time", ...) or why
    it was not run.
    """

    correct: bool | None
    value: str | None
    rule: str
    how: str


@contextmanager
def grading_tools(allow_code: bool = False, seconds: float = 10.0) -> Iterator[GradingTools]:
    """The tools there are on this machine. seconds: for one question of algebra."""
    with symbolic_checker(seconds) as symbolic:
        yield GradingTools(symbolic, allow_code)


def grade(task: Task, item: BenchItem, text: str, tools: GradingTools) -> Grade:
    """Law: grading the same text twice gives the same grade.

    Raises: ValueError for a task whose answers are not generated; SandboxError where a program may
        be run and the sandbox is not to be had.
    """
    gold = str(item.gold)
    match task.grader:
        case "number":
            extracted = extract.number(text)
            equal = extract.numbers_agree(extracted.value, gold)
        case "integer":
            extracted = extract.integer(text)
            equal = extracted.value == gold
        case "letter":
            letters = "".join(letter.strip() for letter in item.letters)
            extracted = extract.final_letter(text, letters)
            equal = extracted.value == gold
        case "boxed":
            extracted = extract.boxed(text)
            if extracted.value is not None:
                equal, how = equivalent(gold, extracted.value, tools.symbolic)
                return Grade(equal, extracted.value, extracted.rule, how)
            equal = False
        case "code":
            extracted = code_of(text)
            if not tools.allow_code:
                return Grade(None, extracted.value, extracted.rule, CODE_NOT_RUN)
            verdict = passes(
                item.extra["prompt"], text, item.extra["test"], item.extra["entry_point"],
                allowed=True, limits=tools.limits,
            )  # fmt: skip
            how = NO_ANSWER if verdict.result is None else verdict.result.status
            return Grade(verdict.passed, extracted.value, extracted.rule, how)
        case None:
            raise ValueError(f"{task.name} is scored by likelihood; there is no text to grade")
    how = NO_ANSWER if extracted.value is None else "equal" if equal else "unequal"
    return Grade(equal, extracted.value, extracted.rule, how)
