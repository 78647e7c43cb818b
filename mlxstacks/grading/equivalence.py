r"""Whether two answers in LaTeX are the same (Brainstacks):

    text        equal after `normalised`
    numeric     both are plain numbers, less than 0.001 apart, and near a small gold by 1% of it
    symbolic    math-verify says so, where it is installed

sympy can be asked for numbers that no memory holds (`9^{9^{9^9}}`) inside calls that no alarm
interrupts, and model-written text asks for anything. So one worker does the work with limits of its
own; a question that takes too long ends the worker, and the next one starts another.
"""

import json
import math
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlxstacks
from mlxstacks.study.child_process import LineWorker

Symbolic = Callable[[str, str], bool | None]
"""(gold, answer) -> equal or not; None where it could not be decided (no parse, out of time)."""


def equivalent(gold: str, answer: str, symbolic: Symbolic | None = None) -> tuple[bool, str]:
    """(whether they are equal, what decided). An answer of nothing is wrong.

    What decided: "text", "numeric", "symbolic", "unequal", "undecided" (algebra was asked and could
    not tell) or "unequal without algebra", which may mean "not looked at".
    Law: an answer is equivalent to itself.
    """
    unequal = "unequal" if symbolic else "unequal without algebra"
    text, gold_text = normalised(answer), normalised(gold)
    if not text:
        return False, unequal
    if text == gold_text:
        return True, "text"
    gold_number, number = as_number(gold_text), as_number(text)
    if gold_number is not None and number is not None:
        near = numbers_near(gold_number, number)
        return near, "numeric" if near else unequal
    if symbolic is None:
        return False, unequal
    same = symbolic(gold, answer)
    if same is None:
        return False, "undecided"
    return same, "symbolic" if same else unequal


def numbers_near(gold: float, answer: float) -> bool:
    """The published tolerance of 0.001 alone would take 0 for the 0.0000672 that MATH-500 asks for:
    of a small gold, 1% of it is near.
    """
    if abs(gold) < 0.1:
        return abs(gold - answer) <= 0.01 * abs(gold)
    return abs(gold - answer) < 1e-3


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
    text = _SHORT_FRACTION.sub(
        lambda match: "\\frac" + "".join(f"{{{part.strip('{}')}}}" for part in match.groups()), text
    )
    if commas_group:
        text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    text = re.sub(r"^[A-Za-z]=(?=.)", "", text).rstrip(".")
    while text.endswith("}") and text.count("}") > text.count("{"):
        text = text[:-1]
    return re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", text)


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


_MEMORY_BYTES = 2 << 30
MOST_CHARACTERS = 400


def installed() -> str | None:
    """math-verify's version; None where it is not installed (extra `eval`)."""
    try:
        return version("math-verify")
    except PackageNotFoundError:
        return None


class SymbolicChecker:
    """`equal = SymbolicChecker(); equal(gold, answer)`; its worker starts on the first question.

    asked, undecided: for the report.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.asked = self.undecided = 0
        package = str(Path(mlxstacks.__file__).parents[1])
        code = f"import sys; sys.path.insert(0, sys.argv[1]); from {__name__} import work; work()"
        self._worker = LineWorker([sys.executable, "-P", "-c", code, package])

    def __call__(self, gold: str, answer: str) -> bool | None:
        """Whether they are equal; None: no parse, too long, out of time or memory."""
        self.asked += 1
        reply = None
        if max(len(gold), len(answer)) <= MOST_CHARACTERS:
            reply = self._worker.ask({"gold": gold, "answer": answer}, self.seconds)
        equal: bool | None = reply["equal"] if reply else None
        self.undecided += equal is None
        return equal

    def close(self) -> None:
        """End the worker; a further question starts a new one."""
        self._worker.close()


@contextmanager
def symbolic_checker(seconds: float = 10.0) -> Iterator[SymbolicChecker | None]:
    """None where math-verify is not installed. seconds: for one question."""
    if installed() is None:
        yield None
        return
    with closing(SymbolicChecker(seconds)) as checker:
        yield checker


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
    if any(all(isinstance(p, str) for p in parts) for parts in (parsed_gold, parsed_answer)):
        return None
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=None))
