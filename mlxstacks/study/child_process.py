"""Work in a process of its own: a specification in, JSON messages out, a log beside it.

A run that dies (of memory, of Metal's buffer limit) then ends alone, its peak of memory is its own,
and buffers that one run leaks are not counted against the next. A child whose parent is gone ends
itself: it watches its standard input, which closes with the parent.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlxstacks
from mlxstacks.study.buffer_counter import preload

Message = dict[str, Any]
_LOG_CHARACTERS = 2000


def run_child(
    module: str,
    specification: Message,
    log: Path,
    on_message: Callable[[Message], None],
    counting_library: str | None = None,
) -> int:
    """Run `python -m module` to its end; returns its exit code, minus the signal that killed it.

    log: gets what the child prints, appended. An exception in `on_message` ends the child.
    """
    # The same package for the child, wherever it is started from.
    package = str(Path(mlxstacks.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | preload(counting_library)
    with log.open("ab") as printed:
        child = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, env=environment,
        )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it died at once; its exit code says so
            child.stdin.write(json.dumps(specification).encode() + b"\n")
            child.stdin.flush()
        for line in child.stdout:
            # The last line of a killed child can be half a message.
            if line.endswith(b"\n"):
                on_message(json.loads(line))
        return child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        child.stdout.close()
        with suppress(BrokenPipeError):
            child.stdin.close()


def as_child() -> tuple[Message, Callable[[Message], None]]:
    """The other end: the specification, and the function that sends messages.

    What anything else prints goes to the log. Called once, first thing.
    """
    sending = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    specification = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def send(message: Message) -> None:
        sending.write(json.dumps(message) + "\n")
        sending.flush()

    return specification, send


def _end_with_parent() -> None:
    # os.read, not sys.stdin: a thread inside a buffered reader would hold its lock at exit.
    while os.read(0, 4096):
        pass
    os._exit(1)


def how_it_ended(code: int, log: Path) -> str:
    """An exit code in words, with the end of the log."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "; often the system, for want of memory" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    with suppress(OSError):
        lines = log.read_text(errors="replace")[-_LOG_CHARACTERS:].strip().splitlines()
        return f"exit code {code}: {lines[-1]}" if lines else f"exit code {code}"
    return f"exit code {code}"
