r"""Regular expressions of strangers, tried in a process with limits that can be ended.

An expression can be written to take for ever (`(a|a)*$`) or all memory (`(?:(?=a)){2000000000}`).
Python's `re` has no limit of its own. The package `regex` has a timeout, but does not look at it in
every loop: the second one took 17 s and 2.9 GB under `timeout=0.5`, until there was no more; and it
reads some patterns of `re` as something else (`a{e}`, `\w` of accents). So `re` itself does the
work, elsewhere. This file is also the program that runs there, so it imports nothing of ours above.

Time is limited everywhere, memory on Linux alone: macOS takes such a limit and does not hold it. An
expression can have there what it fills within CPU_SECONDS.
"""

import atexit
import functools
import json
import os
import re
import resource
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlxstacks.experiments.line_worker import LineWorker

CPU_SECONDS = 5
"""For one expression and one text; an ordinary one takes microseconds."""
# CPU time decides, so that a busy machine changes no verdict; this is for what waits instead.
_WALL_SECONDS = 120.0
_MEMORY_BYTES = 1 << 30


@functools.lru_cache(maxsize=4096)
def fits(expression: str, text: str) -> bool:
    """Whether `re.search(expression, text, re.IGNORECASE)` finds something.

    Raises: ValueError for what is no expression; TimeoutError where it took more than CPU_SECONDS
        or, on Linux, the memory that is allowed.
    """
    found = _worker(os.getpid()).ask({"expression": expression, "text": text}, _WALL_SECONDS)
    if found is None:
        memory = _memory_limit()
        more = "" if memory is None else f" or {memory / 2**30:.3g} GiB"
        raise TimeoutError(f"{expression!r:.200} took more than {CPU_SECONDS} seconds{more}")
    if "error" in found:
        raise ValueError(found["error"])
    return bool(found["fits"])


# By process: a fork must not read its parent's answers.
@functools.cache
def _worker(process_id: int) -> "LineWorker":
    from mlxstacks.experiments.line_worker import LineWorker

    worker = LineWorker([sys.executable, "-I", "-S", __file__])
    atexit.register(worker.close)
    return worker


def _memory_limit() -> int | None:
    """Bytes of address space of the process, which inherits ours; None where that is not held."""
    if sys.platform != "linux":
        return None
    hardest = resource.getrlimit(resource.RLIMIT_AS)[1]
    return _MEMORY_BYTES if hardest == resource.RLIM_INFINITY else min(_MEMORY_BYTES, hardest)


def _work() -> None:
    """A question a line in, `{"fits": true | false}` or `{"error": text}` a line out."""
    memory = _memory_limit()
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hardest = resource.getrlimit(resource.RLIMIT_CPU)[1]
    _say({})
    for line in sys.stdin:
        question = json.loads(line)
        # The system ends the process that goes beyond; counted from its start.
        limit = int(time.process_time()) + 1 + CPU_SECONDS
        if hardest != resource.RLIM_INFINITY:
            limit = min(limit, hardest)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hardest))
        _say(_answer(question["expression"], question["text"]))


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _answer(expression: str, text: str) -> dict[str, object]:
    """Out of memory the process dies of it, which its caller sees."""
    try:
        return {"fits": re.search(expression, text, re.IGNORECASE) is not None}
    except (re.error, RecursionError, OverflowError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    _work()
