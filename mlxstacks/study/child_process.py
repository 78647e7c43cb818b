"""Work in a process of its own: a specification in, JSON messages out, a log beside it.

A run that dies (of memory, of Metal's buffer limit) then ends alone, its peak of memory is its own,
and buffers that one run leaks are not counted against the next. A child whose parent is gone ends
itself: it watches its standard input, which closes with the parent.

A `LineWorker` answers questions, one JSON object a line each way, and can be ended over one: for
work that a text of a stranger or of a model can make endless, in calls that no alarm interrupts.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlxstacks
from mlxstacks.errors import InputError
from mlxstacks.processes import environment_alone

Message = dict[str, Any]
_LOG_CHARACTERS = 2000
_START_SECONDS = 120.0  # importing on a busy machine
# Libraries that were put in front for our own process take address space, which is limited there.
_PRELOADS = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")


def run_child(
    module: str,
    specification: Message,
    log: Path,
    on_message: Callable[[Message], None],
) -> int:
    """Run `python -m module` to its end; returns its exit code, minus the signal that killed it.

    log: gets what the child prints, appended. An exception in `on_message` ends the child.
    """
    # The same package for the child, wherever it is started from.
    package = str(Path(mlxstacks.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = environment_alone() | {"PYTHONPATH": os.pathsep.join(paths)}
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


def run_cell(
    module: str,
    specification: Message,
    log: Path,
    on_progress: Callable[[Message], None],
) -> Message:
    """Run one cell of a study in a process of its own, however it ends; returns its last word, with
    `status`: what the cell says, or "crashed" with a `reason`.

    Raises: InputError where the cell says "wrong"; RuntimeError for a mistake of ours.
    """
    last: Message = {}

    def on_message(message: Message) -> None:
        nonlocal last
        if "status" in message:
            last = message
        else:
            on_progress(message)

    code = run_child(module, specification, log, on_message)
    if last.get("status") == "wrong":
        raise InputError(f"{log.stem}: {last['reason']}")
    if "status" not in last and code >= 0:
        raise RuntimeError(f"{log.stem}: {how_it_ended(code, log)} (all of it in {log})")
    return last or {"status": "crashed", "reason": how_it_ended(code, log)}


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


class LineWorker:
    """A process that prints a line when it is ready, then one for each that it reads. It starts on
    its first question, and again after one that it was ended over.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Its answer; None where it took more than these seconds of wall time, or died.

        Raises: RuntimeError for a process that does not start.
        """
        try:
            process = self._process or self._start()
            if not _sent(process, question):
                # It died before this question, which is not to blame.
                self.close()
                process = self._start()
                _sent(process, question)
            line = _read_line(process, seconds)
            if line is None:
                self.close()
                return None
            answer: dict[str, Any] = json.loads(line)
            return answer
        except BaseException:
            # As of Ctrl-C: the answer still to come would be read as that to the next question.
            self.close()
            raise

    def close(self) -> None:
        """End the process; a further question starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = {name: v for name, v in os.environ.items() if name not in _PRELOADS}
        self._process = subprocess.Popen(
            self.command, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        if _read_line(self._process, _START_SECONDS) is None:
            self.close()
            raise RuntimeError(f"{' '.join(self.command)}: the process does not start")
        return self._process


def _sent(process: "subprocess.Popen[bytes]", question: dict[str, Any]) -> bool:
    """Whether it was there to read the question."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return True


def _read_line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes | None:
    """What it says next; None when it is silent for too long or has ended."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(seconds):
            return None
    line = process.stdout.readline()
    return line if line.endswith(b"\n") else None
