"""The programs in an answer: found, made whole, and run with their tests in the sandbox."""

import ast
import os
import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mlxstacks.grading import extract
from mlxstacks.grading.extract import Extracted
from mlxstacks.sandbox import calls
from mlxstacks.sandbox.run import SandboxLimits, SandboxResult, run_untrusted

LIMITS = SandboxLimits(wall_seconds=10.0, cpu_seconds=10)

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
