r"""What a generated answer is worth, by the task's rule (spec/evaluation.md section 4).

    with grading_tools(allow_code=False) as tools:
        grade(task, item, reply.text, tools)

How an answer was found and what decided are kept: a model that never boxes shows in `rule`, a
machine without math-verify in `how`. Two answers in LaTeX are the same by

    text        equal after `normalised`
    numeric     both are plain numbers, less than 0.001 apart, and near a small gold by 1% of it
    symbolic    math-verify says so, where it is installed

sympy can be asked for numbers that no memory holds (`9^{9^{9^9}}`) inside calls that no alarm
interrupts, and model-written text asks for anything. So one worker does the work with limits of its
own; a question that takes too long ends the worker, and the next one starts another.
"""

import ast
import json
import math
import os
import re
import resource
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlxstacks
from mlxstacks.sandbox import calls
from mlxstacks.sandbox.run import SandboxLimits, SandboxResult, run_untrusted
from mlxstacks.studies.benchmarks.tasks import BenchItem, Task
from mlxstacks.study import extract
from mlxstacks.study.child_process import LineWorker
from mlxstacks.study.extract import Extracted

NO_ANSWER = "no answer"
CODE_NOT_RUN = "not run: programs need allow_code"
LIMITS = SandboxLimits(wall_seconds=10.0, cpu_seconds=10)
Symbolic = Callable[[str, str], bool | None]
"""(gold, answer) -> equal or not; None where it could not be decided (no parse, out of time)."""


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
    if installed() is None:
        yield GradingTools(None, allow_code)
        return
    with closing(SymbolicChecker(seconds)) as checker:
        yield GradingTools(checker, allow_code)


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


_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?:async\s+def|def|class|@|if __name__|print\(|assert |#|```)", re.M)
_IMPORT = re.compile(r"^(?:import|from)\s")


def code_of(text: str) -> Extracted:
    """The first fenced block, else the text as it is; trailing blanks cut, indentation kept."""
    text = text.replace("\r\n", "\n")
    block = _FENCE.search(text)
    value = (block[1] if block else text).rstrip()
    if not value.strip():
        return Extracted(None, extract.NONE)
    return Extracted(value, "fenced" if block else "raw")


def body_of(code: str, entry_point: str) -> str:
    """Of generated code the function's body, indented, ready to follow the prompt.

    A repeated signature and its docstring are dropped; the body ends at the next top-level
    definition. A body that starts flush left is indented as a whole.
    """
    signature = re.search(rf"^def\s+{re.escape(entry_point)}\b", code, re.MULTILINE)
    if signature is not None:
        return _body_of_definition(code, signature.start())
    # Not splitlines: what it takes for the end of a line besides may stand in a program's texts.
    lines = code.strip("\n").split("\n")
    first = lines[0] if lines else ""
    if first[:1].isspace():
        return _at_four(_until_top_level("\n".join(lines)))
    rest = [line for line in lines[1:] if line.strip()]
    # Models often leave out the indentation of the first line alone.
    if rest and all(line[:1].isspace() for line in rest) and not first.rstrip().endswith(":"):
        width = len(rest[0]) - len(rest[0].lstrip())
        return _at_four(_until_top_level("\n".join([" " * width + first, *lines[1:]])))
    flush = "\n".join(lines)
    end = re.search(r"^(?:def|class)\s", flush, re.MULTILINE)
    if end is not None and end.start() == 0:  # a helper under another name: nothing to cut off
        return textwrap.indent(flush, "    ")
    return textwrap.indent(flush[: end.start()] if end else flush, "    ").rstrip()


def _until_top_level(text: str) -> str:
    end = _TOP_LEVEL.search(text)
    return (text[: end.start()] if end else text).rstrip()


def _body_of_definition(code: str, start: int) -> str:
    """By its syntax tree where it parses, else by lines. Imports above it come first."""
    above = [line for line in code[:start].split("\n") if _IMPORT.match(line)]
    lines = code[start:].split("\n")
    kept = [lines[0]]
    for line in lines[1:]:
        # A signature may close its bracket at the left margin.
        if line.strip() and not line[:1].isspace() and not line.startswith(")"):
            break
        kept.append(line)
    source = "\n".join(kept).rstrip()
    try:
        definition = ast.parse(source).body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # No Python, no text (surrogates), or nested deeper than the parser goes.
        body = "\n".join(kept[1:]).rstrip()
    else:
        assert isinstance(definition, ast.FunctionDef)
        statements = definition.body
        if ast.get_docstring(definition, clean=False) is not None:
            statements = statements[1:] or statements
        first = statements[0]
        rest = source.split("\n")[first.lineno - 1 :]
        body = "\n".join(rest)
        if first.lineno == definition.lineno:  # all on one line; ast counts bytes
            body = "    " + rest[0].encode()[first.col_offset :].decode()
    return "\n".join([*(f"    {line}" for line in above), _at_four(body)])


def _at_four(body: str) -> str:
    """Indented by the four blanks of the prompt's docstring; texts of several lines in a body that
    is so already are left alone.
    """
    if re.match(r" {4}\S", body):
        return body
    return textwrap.indent(textwrap.dedent(body), "    ")


def programs(prompt: str, text: str, test: str, entry_point: str) -> tuple[str, str] | None:
    """Two sources: the function, which answers calls, and its tests, which make them; None where
    the text holds no code. The prompt's helpers (`poly` of HumanEval/32) are in both.
    """
    code = code_of(text)
    if code.value is None:
        return None
    head, module = prompt.rstrip(), calls.__name__
    body = body_of(code.value, entry_point)
    function = f"{head}\n{body}\n\nfrom {module} import serve\nserve({entry_point})\n"
    candidate = f"from {module} import Candidate\n{entry_point} = Candidate()\n"
    tests = f"{head}\n    pass\n\n{candidate}\n{test.strip()}\n\ncheck({entry_point})\n"
    return function, tests


@dataclass(frozen=True)
class CodeVerdict:
    """result: of the tests, or of the program where it did not live to the last of them; None where
    there was no code to run.
    """

    passed: bool
    result: SandboxResult | None


def passes(
    prompt: str, text: str, test: str, entry_point: str, *, allowed: bool = False,
    limits: SandboxLimits = LIMITS,
) -> CodeVerdict:  # fmt: skip
    """Run a completion in one sandbox, the tests of it in another.

    Law: a program cannot pass tests that its answers do not pass. It gets the arguments of the
    calls and nothing else, and its answers are plain data (calls.py). limits: of either.

    Raises: SandboxError where it may not or cannot be run.
    """
    sources = programs(prompt, text, test, entry_point)
    if sources is None:
        return CodeVerdict(False, None)
    return run_with_tests(*sources, allowed=allowed, limits=limits)


def run_with_tests(
    function: str, tests: str, *, allowed: bool = False, limits: SandboxLimits = LIMITS
) -> CodeVerdict:
    """Run two programs, each in a sandbox of its own: one serves a function, one calls it.

    Raises: SandboxError where they may not or cannot be run.
    """
    call, answer = os.pipe(), os.pipe()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_run_and_close, function, limits, (call[0], answer[1]), allowed)
        tested = _run_and_close(tests, limits, (answer[0], call[1]), allowed)
        ran = serving.result()
    passed = tested.status == ran.status == "finished"
    return CodeVerdict(passed, tested if ran.status == "finished" else ran)


def _run_and_close(
    source: str, limits: SandboxLimits, channel: tuple[int, int], allowed: bool
) -> SandboxResult:
    """Closes its end of the channel afterwards: the other side waits for that."""
    try:
        return run_untrusted(source, limits, allowed=allowed, channel=channel)
    finally:
        for descriptor in channel:
            os.close(descriptor)
