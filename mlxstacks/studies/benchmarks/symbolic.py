r"""Algebra on two LaTeX answers by math-verify, in a process that can be ended.

sympy can be asked for numbers that no memory holds (`9^{9^{9^9}}`) inside calls that no alarm
interrupts, and model-written text asks for anything. So one worker does the work with limits of its
own; a question that takes too long ends the worker, and the next one starts another.
"""

import json
import resource
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

import mlxstacks
from mlxstacks.study.line_worker import LineWorker

_MODULE = "mlxstacks.studies.benchmarks.symbolic"
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
        found: bool | None = None
        if max(len(gold), len(answer)) <= MOST_CHARACTERS:
            found = self._ask({"gold": gold, "answer": answer})
        self.undecided += found is None
        return found

    def close(self) -> None:
        """End the worker; a further question starts a new one."""
        self._worker.close()

    def _ask(self, question: dict[str, str]) -> bool | None:
        if installed() is None:
            raise RuntimeError("math-verify is not installed: pip install 'mlxstacks[eval]'")
        found = self._worker.ask(question, self.seconds)
        return None if found is None else found["equal"]


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
            found = equal_of(question["gold"], question["answer"])
        except (MemoryError, RecursionError):
            found = None
        answers.write(json.dumps({"equal": found}) + "\n")
        answers.flush()


def equal_of(gold: str, answer: str) -> bool | None:
    """math-verify's word on two answers without dollar signs; None where one has no parse."""
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    wanted, found = (
        # The caller's clock ends what takes too long, so no alarms.
        parse(f"${text.strip().strip('$')}$", [LatexExtractionConfig()], parsing_timeout=None)
        for text in (gold, answer)
    )
    # A list of the parsed expression and its text; the text alone is no parse.
    if not any(not isinstance(one, str) for one in wanted) or not any(
        not isinstance(one, str) for one in found
    ):
        return None
    return bool(verify(wanted, found, timeout_seconds=None))
