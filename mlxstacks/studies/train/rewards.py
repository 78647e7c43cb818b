r"""What an answer is worth, from 0 to 1, by a rule that has no chance in it.

    math       1 for the reference's number or box; else up to 0.2 for the intermediate equalities
               (12 + 5 = 17) that hold
    exact      1 for the reference's words, whatever the spaces between them
    code       0.1 for Python that parses, 0.1 for a fenced block, 0.8 times the share of the row's
               `tests` that pass in the sandbox
    rubric     the share of the row's `must` phrases that the answer holds; 0 with one of `must_not`
    pattern=R  1 where the whole answer matches the regular expression R (RE2)
    f.py:name  `name(answer, row)` of a file of one's own

The papers give no numbers; these are ours. A rubric counts words; it says nothing about whether
advice is sound.
"""

import ast
import hashlib
import importlib.util
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.expressions import compile_expression
from mlxstacks.grading import extract
from mlxstacks.grading.equivalence import Symbolic, equivalent, symbolic_checker
from mlxstacks.grading.programs import code_of, run_with_tests
from mlxstacks.sandbox import calls
from mlxstacks.sandbox.run import SandboxLimits

Reward = Callable[[str, Mapping[str, Any]], float]
"""(answer, row) -> 0 to 1. row: the columns of the row, with the `messages` before the answer and
the `reference` answer, or None.
"""

RULES = ("math", "exact", "code", "rubric", "pattern=REGEX", "FILE.py:FUNCTION")
STEP_SHARE = 0.2
CODE_LIMITS = SandboxLimits(wall_seconds=5.0, cpu_seconds=5)
MOST_TESTS = 20


@contextmanager
def open_rewards(names: Sequence[str], *, allow_code: bool = False) -> Iterator[Reward]:
    """The mean of the named rewards.

    Raises: InputError: a name that is none, a file that cannot be used, or `code` without
        allow_code. The reward raises InputError naming the row where a function raises, or gives
        what is no number from 0 to 1.
    """
    with symbolic_checker() as symbolic:
        found = [(name, _reward(name, symbolic, allow_code)) for name in names]

        def mean(answer: str, row: Mapping[str, Any]) -> float:
            return sum(_checked(name, each, answer, row) for name, each in found) / len(found)

        yield mean


def rewards_sha256(names: Sequence[str]) -> list[str]:
    """Of the files of functions, in order. Raises: InputError."""
    files = [own for own in map(own_function, names) if own]
    return [hashlib.sha256(_source(file)).hexdigest() for file, _ in files]


def _reward(name: str, symbolic: Symbolic | None, allow_code: bool) -> Reward:
    if own := own_function(name):
        return load_function(*own, "reward")
    if name.startswith("pattern="):
        try:
            expression = compile_expression(name.removeprefix("pattern="))
        except ValueError as error:
            raise InputError(f"reward {name}: {error}") from error
        return lambda answer, row: float(expression.fullmatch(answer.strip()) is not None)
    if name == "code":
        if not allow_code:
            raise InputError(
                "reward code runs programs that the model wrote, in a sandbox: give --allow-code "
                "to allow it"
            )
        return _code
    if name == "math":
        return lambda answer, row: _math(answer, _reference(row, name), symbolic)
    rules: dict[str, Reward] = {"exact": _exact, "rubric": _rubric}
    if name not in rules:
        raise InputError(f"reward {name!r} is none of {', '.join(RULES)}")
    return rules[name]


def _checked(name: str, reward: Reward, answer: str, row: Mapping[str, Any]) -> float:
    where = f"reward {name} of row {_short(row)}"
    try:
        value = reward(answer, row)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:
        raise InputError(
            f"{where} raises {type(error).__name__}: {error}; the answer is {answer[:80]!r}"
        ) from error
    if isinstance(value, bool):
        value = float(value)
    if not isinstance(value, int | float) or not 0 <= value <= 1:  # NaN is not between
        raise InputError(
            f"{where} is {value!r}, must be a number from 0 to 1; the answer is {answer[:80]!r}"
        )
    return float(value)


def _short(row: Mapping[str, Any]) -> str:
    messages = row.get("messages") or [{"content": ""}]
    return repr(str(messages[-1].get("content"))[:60])


def _reference(row: Mapping[str, Any], name: str) -> str:
    reference = row.get("reference")
    if not isinstance(reference, str) or not reference.strip():
        raise InputError(f"has no reference answer, which {name} compares with")
    return reference


def _exact(answer: str, row: Mapping[str, Any]) -> float:
    return float(_words(answer) == _words(_reference(row, "exact")))


def _words(text: str) -> list[str]:
    return unicodedata.normalize("NFC", text).split()


# --- math -----------------------------------------------------------------------------------------

_OPERAND = r"-?\$?\d[\d,]*(?:\.\d+)?%?"
_EQUALITY = re.compile(rf"({_OPERAND}(?:\s*[-+*/x×÷]\s*{_OPERAND})+)\s*=\s*({_OPERAND})")


def _math(answer: str, reference: str, symbolic: Symbolic | None) -> float:
    if _same_result(answer, reference, symbolic):
        return 1.0
    equalities = _EQUALITY.findall(answer)
    if not equalities:
        return 0.0
    return STEP_SHARE * sum(_holds(left, right) for left, right in equalities) / len(equalities)


def _same_result(answer: str, reference: str, symbolic: Symbolic | None) -> bool:
    """By boxes where the reference has one, else by its last number, else by its words."""
    gold = extract.boxed(reference).value
    if gold is not None:
        boxed = extract.boxed(answer).value
        return boxed is not None and equivalent(gold, boxed, symbolic)[0]
    number = extract.number(reference).value
    if number is None:
        return _words(answer) == _words(reference)
    given = extract.boxed(answer).value
    return extract.numbers_agree(extract.number(given or answer).value, number)


def _holds(left: str, right: str) -> bool:
    """Whether an equality of plain numbers is true, to half a unit of its last digit."""
    text = re.sub(r"[$,%\s]", "", left).replace("x", "*").replace("×", "*").replace("÷", "/")
    result = re.sub(r"[$,%]", "", right)
    # Long numbers, and long chains of them, are no step that somebody would check.
    if len(text) > 60 or "**" in text or "//" in text:
        return False
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, ValueError, OverflowError):
        return False
    digits = len(result.partition(".")[2])
    return math.isclose(value, float(result), rel_tol=0, abs_tol=0.5 * 10.0**-digits + 1e-9)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            one, other = _value(left), _value(right)
            match operator:
                case ast.Add():
                    return one + other
                case ast.Sub():
                    return one - other
                case ast.Mult():
                    return one * other
                case ast.Div():
                    return one / other
    raise ValueError("not arithmetic")


# --- code -----------------------------------------------------------------------------------------


def _code(answer: str, row: Mapping[str, Any]) -> float:
    tests, entry_point = row.get("tests"), row.get("entry_point")
    if not isinstance(tests, list) or not tests or not all(isinstance(t, str) for t in tests):
        raise InputError("has no `tests`: a list of texts such as 'assert add(1, 2) == 3'")
    if not isinstance(entry_point, str) or not entry_point.isidentifier():
        raise InputError("has no `entry_point`: the name of the function that the tests call")
    found = code_of(answer)
    if found.value is None:
        return 0.0
    fenced = 0.1 * (found.rule == "fenced")
    try:
        ast.parse(found.value)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return fenced
    if entry_point not in found.value:
        return 0.1 + fenced
    function = f"{found.value}\n\nfrom {calls.__name__} import serve\nserve({entry_point})\n"
    candidate = f"from {calls.__name__} import Candidate\n{entry_point} = Candidate()\n"
    passed = [
        run_with_tests(function, f"{candidate}{test}\n", allowed=True, limits=CODE_LIMITS).passed
        for test in tests[:MOST_TESTS]
    ]
    return 0.1 + fenced + 0.8 * sum(passed) / len(passed)


# --- rubric ---------------------------------------------------------------------------------------


def _rubric(answer: str, row: Mapping[str, Any]) -> float:
    must, must_not = _phrases(row, "must"), _phrases(row, "must_not")
    if not must and not must_not:
        raise InputError("has neither `must` nor `must_not`: lists of phrases")
    if not answer.strip() or any(_holds_one(answer, phrase) for phrase in must_not):
        return 0.0
    return sum(_holds_one(answer, phrase) for phrase in must) / len(must) if must else 1.0


_WORD = re.compile(r"\w+")


def _phrases(row: Mapping[str, Any], key: str) -> list[str]:
    """Each a phrase, or several with | between them, of which one will do."""
    value = row.get(key) or []
    if not isinstance(value, list) or not all(isinstance(v, str) and v.strip() for v in value):
        raise InputError(f"{key} must be a list of phrases")
    return value


def _holds_one(answer: str, phrase: str) -> bool:
    """Whole words, whatever their case."""
    text, *choices = (" ".join(_WORD.findall(t.casefold())) for t in (answer, *phrase.split("|")))
    return any(f" {choice} " in f" {text} " for choice in choices if choice)


# --- functions of one's own -----------------------------------------------------------------------


def own_function(name: str) -> tuple[str, str] | None:
    """(file, function) of FILE.py:FUNCTION, or of MODULE:FUNCTION, a file in this directory."""
    if name.startswith("pattern="):
        return None
    file, colon, function = name.rpartition(":")
    if not colon:
        return None
    return (file if file.endswith(".py") else f"{file}.py"), function


def _source(file: str, what: str = "reward") -> bytes:
    try:
        return user_path(file).read_bytes()
    except OSError as error:
        raise InputError(f"{what}: {file} cannot be read: {error.strerror}") from None


def load_function(file: str, function: str, what: str) -> Callable[..., Any]:
    """A function of a user's file. what: the setting that named it.

    Raises: InputError: no such file or function; the file raises.
    """
    _source(file, what)
    spec = importlib.util.spec_from_file_location(f"mlxstacks_own_{what}", user_path(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{what}: {file} raises {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise InputError(f"{what}: {file} has no function {function}; it has {', '.join(names)}")
    return found
