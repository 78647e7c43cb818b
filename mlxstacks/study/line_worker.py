"""A process that answers questions, one JSON object a line each way, and can be ended over one.

For work that a text of a stranger or of a model can make endless, in calls that no alarm
interrupts. The process prints a line when it is ready, then one line for each it reads.
"""

import json
import os
import selectors
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_START_SECONDS = 120.0  # importing on a busy machine
# Libraries that were put in front for our own process take address space, which is limited there.
_PRELOADS = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")


class LineWorker:
    """Starts on its first question, and anew after one that it was ended over."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Its answer; None where it took more than these seconds of wall time, or died.

        Raises: RuntimeError for a process that does not start.
        """
        try:
            process = self._process or self._start()
            if not _told(process, question):
                # It died before this question, which is not to blame.
                self.close()
                process = self._start()
                _told(process, question)
            line = _line(process, seconds)
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
        if _line(self._process, _START_SECONDS) is None:
            self.close()
            raise RuntimeError(f"{' '.join(self.command)}: the process does not start")
        return self._process


def _told(process: "subprocess.Popen[bytes]", question: dict[str, Any]) -> bool:
    """Whether it was there to read the question."""
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return False
    return True


def _line(process: "subprocess.Popen[bytes]", seconds: float) -> bytes | None:
    """What it says next; None when it is silent for too long or has ended."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(seconds):
            return None
    line = process.stdout.readline()
    return line if line.endswith(b"\n") else None
