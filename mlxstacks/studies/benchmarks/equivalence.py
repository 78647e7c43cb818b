r"""Are two answers in LaTeX the same? Text, then number, then algebra (spec/evaluation.md 4).

    text        equal after `normalised`
    numeric     both are plain numbers, less than 0.001 apart, and near a small gold by 1% of it
    symbolic    math-verify says so, where it is installed

The rule that decided is kept. Without math-verify "unequal" may mean "not looked at", so every
result says whether the third rule was there.

sympy can be asked for numbers that no memory holds (`9^{9^{9^9}}`) inside calls that no alarm
interrupts, and model-written text asks for anything. So one worker does the work with limits of its
own; a question that takes too long ends the worker, and the next one starts another.
"""

import json
import math
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Literal

import mlxstacks
from mlxstacks.study.child_process import LineWorker

Rule = Literal["text", "numeric", "symbolic", "none"]
Symbolic = Callable[[str, str], bool | None]
"""(gold, answer) -> equal or not; None where it could not be decided (no parse, out of time)."""
NUMERIC_TOLERANCE = 1e-3
SMALL_GOLD = 0.1  # where the tolerance would be more than 1% of it


@dataclass(frozen=True, slots=True)
class Equivalence:
    """rule: what said "equal", "none" where nothing did. symbolic: whether algebra was asked, and
    could decide; None where it was not needed or is not installed.
    """

    equal: bool
    rule: Rule
    symbolic: Literal["decided", "undecided"] | None = None


def equivalent(gold: str, answer: str | None, symbolic: Symbolic | None = None) -> Equivalence:
    """Compare an answer with the gold one. An answer of None or of nothing is wrong.

    Law: an answer is equivalent to itself.
    """
    if answer is None or not (text := normalised(answer)):
        return Equivalence(False, "none")
    gold_text = normalised(gold)
    if text == gold_text:
        return Equivalence(True, "text")
    gold_number, number = as_number(gold_text), as_number(text)
    if gold_number is not None and number is not None:
        near = numbers_near(gold_number, number)
        return Equivalence(near, "numeric" if near else "none")
    if symbolic is None:
        return Equivalence(False, "none")
    same = symbolic(gold, answer)
    if same is None:
        return Equivalence(False, "none", "undecided")
    return Equivalence(same, "symbolic" if same else "none", "decided")


def numbers_near(gold: float, answer: float) -> bool:
    """The published tolerance alone would take 0 for the 0.0000672 that MATH-500 asks for."""
    difference = abs(gold - answer)
    if abs(gold) < SMALL_GOLD:
        return difference <= 0.01 * abs(gold)
    return difference < NUMERIC_TOLERANCE


# --- text -----------------------------------------------------------------------------------------

_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|rm|bf)\s*\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\d|\{[^{}]*\})\s*(\d|\{[^{}]*\})")
_SPACES = re.compile(r"(?:\\[,;:!> ]|\\q?quad\b|~|\s)+")
# Inside of a number TeX sets 10,\!080 and 10\,080.
_IN_NUMBER = re.compile(r"(?<=[\d,])\\!(?=\d)|(?<=\d)(?:\\[,:;>]|~)(?=\d{3}(?!\d))")
# A blank without which two numbers would be one: "1 1", "3. 5"; and "1, 234" where commas group.
_BETWEEN_NUMBERS = re.compile(r"(?<=[\d.]) (?=[\d.])")
_AFTER_COMMA = re.compile(r"(?<=\d,) (?=\d{3}(?!\d))")
_GROUPED = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d,])")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\degree\b")


def normalised(latex: str) -> str:
    r"""One spelling of what is written in many; for comparison only.

    Spaces, but for those between two numbers, dollar signs, `\left` and `\right`, `\text{}` and its
    kin go; `\dfrac` and `\tfrac` are `\frac`, `\frac12` is `\frac{1}{2}`, `1,234` is `1234`, `\{`
    is `{`, `\%` is `%`; `x=` before a value, a full stop and surplus closing braces at the end go.
    Law: normalised of it is itself.
    """
    text = latex.replace("\0", " ")
    for _ in range(20):  # each round only shortens or settles; nesting is shallow
        before = text
        text = _one_round(text)
        if text == before:
            break
    return text


def _one_round(text: str) -> str:
    text = text.replace("\u2212", "-").replace("\\$", "").replace("$", "")
    text = re.sub(r"\\[dt]frac\b|\\[dt]frac(?=\d)", r"\\frac", text)
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])\.?", "", text)
    text = _WRAPPED.sub(r" \1 ", text)
    text = _DEGREES.sub("", text)
    text = _SPACES.sub(" ", _IN_NUMBER.sub("", text)).replace(" ,", ",")
    text = text.replace("\\%", "%").replace("\\{", "{").replace("\\}", "}")
    # Only the blank that ends a command's name before a letter is needed: \pi x is not \pix.
    text = re.sub(r"(\\[A-Za-z]+) (?=[A-Za-z])", "\\1\0", text)
    text = _BETWEEN_NUMBERS.sub("\0", text)
    commas_group = not re.search(r"[(\[]|(?<!\\frac)\{", text)
    if commas_group:
        text = _AFTER_COMMA.sub("\0", text)
    text = text.replace(" ", "").replace("\0", " ")
    text = _SHORT_FRACTION.sub(_full_fraction, text)
    if commas_group:
        text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"^[A-Za-z]=(?=.)", "", text).rstrip(".")
    while text.endswith("}") and text.count("}") > text.count("{"):
        text = text[:-1]
    return re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", text)


def _full_fraction(match: re.Match[str]) -> str:
    above, below = (part if part.startswith("{") else f"{{{part}}}" for part in match.groups())
    return f"\\frac{above}{below}"


# --- numbers --------------------------------------------------------------------------------------

_DECIMAL = r"\d+(?:\.\d+)?"
_NUMBER = re.compile(rf"([-+]?)({_DECIMAL})%?", re.ASCII)
_QUOTIENT = re.compile(
    rf"([-+]?)(?:\\frac\{{(-?{_DECIMAL})\}}\{{({_DECIMAL})\}}|({_DECIMAL})/({_DECIMAL}))", re.ASCII
)


def as_number(text: str) -> float | None:
    r"""The value of a normalised decimal, `a/b` or `\frac{a}{b}`; None for anything else.

    `50%` is 50: answers in percent are given with or without the sign.
    """
    sign, value = "", math.nan
    if match := _NUMBER.fullmatch(text):
        sign, value = match[1], float(match[2])
    elif match := _QUOTIENT.fullmatch(text):
        sign, above, below = match[1], match[2] or match[4], match[3] or match[5]
        value = float(above) / float(below) if float(below) else math.nan
    if not math.isfinite(value):
        return None
    return -value if sign == "-" else value


# --- algebra --------------------------------------------------------------------------------------


_MODULE = "mlxstacks.studies.benchmarks.equivalence"
_MEMORY_BYTES = 2 << 30
MOST_CHARACTERS = 400


def installed() -> str | None:
    """math-verify's version; None where it is not installed (extra `eval`)."""
    if find_spec("math_verify") is None:
        return None
    try:
        return version("math-verify")
    except PackageNotFoundError:
        return None


class SymbolicChecker:
    """`with SymbolicChecker() as equal: equal(gold, answer)`; starts on its first question.

    asked, undecided: for the report. Raises: RuntimeError on use where math-verify is missing.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.asked = self.undecided = 0
        package = str(Path(mlxstacks.__file__).parents[1])
        code = f"import sys; sys.path.insert(0, sys.argv[1]); from {_MODULE} import work; work()"
        self._worker = LineWorker([sys.executable, "-P", "-c", code, package])

    def __enter__(self) -> "SymbolicChecker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def __call__(self, gold: str, answer: str) -> bool | None:
        """Whether they are equal; None: no parse, too long, out of time or memory."""
        self.asked += 1
        equal: bool | None = None
        if max(len(gold), len(answer)) <= MOST_CHARACTERS:
            equal = self._ask({"gold": gold, "answer": answer})
        self.undecided += equal is None
        return equal

    def close(self) -> None:
        """End the worker; a further question starts a new one."""
        self._worker.close()

    def _ask(self, question: dict[str, str]) -> bool | None:
        if installed() is None:
            raise RuntimeError("math-verify is not installed: pip install 'mlxstacks[eval]'")
        reply = self._worker.ask(question, self.seconds)
        return None if reply is None else reply["equal"]


def work() -> None:
    """The worker: a question a line in, `{"equal": true | false | null}` a line out."""
    if sys.platform == "linux":  # macOS does not hold it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    equal_of("1", "1")
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        question = json.loads(line)
        try:
            equal = equal_of(question["gold"], question["answer"])
        except (MemoryError, RecursionError):
            equal = None
        answers.write(json.dumps({"equal": equal}) + "\n")
        answers.flush()


def equal_of(gold: str, answer: str) -> bool | None:
    """math-verify's word on two answers without dollar signs; None where one has no parse."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    parsed_gold, parsed_answer = (
        # The caller's clock ends what takes too long, so no alarms.
        parse(f"${text.strip().strip('$')}$", [LatexExtractionConfig()], parsing_timeout=None)
        for text in (gold, answer)
    )
    # A list of the parsed expression and its text; the text alone is no parse.
    if not any(not isinstance(part, str) for part in parsed_gold) or not any(
        not isinstance(part, str) for part in parsed_answer
    ):
        return None
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))
