"""Runs in real processes that begin with the imports done: to be killed, seconds cheaper.

    process = start("stack", settings.model_dump_json())
    process.kill(); assert ended(process) == -signal.SIGKILL

A server imports what a run needs and makes nothing; each process is forked from it. It has a pid
and an exit code of its own; what it prints is dropped.

`Child` stands in for `subprocess.Popen([python, "-m", module], ...)`: a process of the same kind,
with the streams and the environment that it is given. `run_module` waits for one.

Only Linux forks a process that has imported mlx: elsewhere Metal, Accelerate and libdispatch may
abort in the child. There the server imports nothing, and `Popen` is that of `subprocess`.
"""

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, BinaryIO

_IMPORTED = [
    "mlx_lm", "mlx_lm.models.qwen3_5_moe", "mlxstacks.cli", "mlxstacks.studies.stack.run",
    "mlxstacks.studies.sweep.worker", "mlxstacks.studies.sweep.rank_sweep",
    "mlxstacks.studies.buffers.arms", "mlxstacks.studies.train.run",
    "mlxstacks.fuse.run", "tests.warm",
]  # fmt: skip
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_IMPORTED if sys.platform == "linux" else [])
# What is preloaded before an interpreter starts -> the server that was started with it.
_OTHER_SERVERS: dict[str, forkserver.ForkServer] = {}


def start(command: str, settings_json: str) -> ForkServerProcess:
    """A run of `train`, `align`, `stack`, `grow` or `sweep` in a process of its own."""
    process = _CONTEXT.Process(target=_run, args=(command, settings_json), daemon=False)
    process.start()
    return process


def start_command_line(
    arguments: list[str], change: Callable[[], object] | None = None
) -> ForkServerProcess:
    """`mlxstacks` with these arguments in a process of its own. change: is called there first."""
    process = _CONTEXT.Process(target=_run_command_line, args=(arguments, change), daemon=False)
    process.start()
    return process


def ended(process: ForkServerProcess) -> int:
    """Wait for the end; the exit code, minus the signal that killed it."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def stop_servers() -> None:
    """Their time, and that of all that they forked, then counts as this process's children's."""
    for server in (forkserver._forkserver, *_OTHER_SERVERS.values()):
        server._stop()  # type: ignore[attr-defined]


def wait_for(path: Path, process: ForkServerProcess) -> None:
    """Until there is something at `path`, or the process has ended."""
    while not path.exists() and process.is_alive():
        time.sleep(0.005)


class Child:
    """`subprocess.Popen([python, "-m", module, ...], ...)` as this package and tests use it.

    The environment is the child's from its first line on; LD_PRELOAD, which is read before, chooses
    the server. Streams: PIPE, DEVNULL or an open file; None is that of this process.
    """

    def __init__(
        self, command: list[str], *, env: dict[str, str],
        stdin: Any = None, stdout: Any = None, stderr: Any = None,
    ) -> None:  # fmt: skip
        python, option, module, *arguments = command
        assert (python, option) == (sys.executable, "-m")
        self._command = command
        self.stdin: BinaryIO | None = None
        self.stdout: BinaryIO | None = None
        theirs = [stdin, stdout, stderr]
        ours = []  # closed once the child has them
        for number, one in enumerate(theirs):
            if one is None:
                theirs[number] = number
            elif one is subprocess.DEVNULL:
                theirs[number] = os.open(os.devnull, os.O_RDWR)
                ours.append(theirs[number])
        if stdin is subprocess.PIPE:
            theirs[0], mine = os.pipe()
            ours.append(theirs[0])
            self.stdin = os.fdopen(mine, "wb")
        if stdout is subprocess.PIPE:
            mine, theirs[1] = os.pipe()
            ours.append(theirs[1])
            self.stdout = os.fdopen(mine, "rb")
        fds = [one if isinstance(one, int) else one.fileno() for one in theirs]
        process = _CONTEXT.Process(
            target=_run_module, args=(module, arguments, env, [_Descriptor(fd) for fd in fds]),
            daemon=False,
        )  # fmt: skip
        _start(process, env.get("LD_PRELOAD", ""))
        self._process = process
        for fd in ours:
            os.close(fd)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._command, timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


Popen: Any = Child if sys.platform == "linux" else subprocess.Popen


class WarmSubprocess:
    """What `subprocess` is to a module that starts modules, with processes that are forked.

    monkeypatch.setattr(child_process, "subprocess", WarmSubprocess)
    """

    Popen = Popen
    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
    TimeoutExpired = subprocess.TimeoutExpired


def run_module(module: str, text: str, preload: str) -> tuple[int, str, str]:
    """`python -m module < text` with LD_PRELOAD; its exit code, stdout and stderr."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as told, \
            tempfile.TemporaryFile() as complained:  # fmt: skip
        given.write(text.encode())
        given.seek(0)
        environment = {**os.environ, "LD_PRELOAD": preload}
        command = [sys.executable, "-m", module]
        child = Popen(command, stdin=given, stdout=told, stderr=complained, env=environment)
        try:
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        told.seek(0)
        complained.seek(0)
        return code, told.read().decode(), complained.read().decode(errors="replace")


class _Descriptor:
    """An open file that goes along to a process; there it is a number."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (reduction.DupFd(self._fd),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _start(process: ForkServerProcess, preload: str) -> None:
    """Start the process from the server that was started with this LD_PRELOAD."""
    ours = os.environ.get("LD_PRELOAD", "")
    if preload == ours:
        process.start()
        return
    server = _OTHER_SERVERS.get(preload)
    if server is None:
        server = _OTHER_SERVERS[preload] = forkserver.ForkServer()
        server.set_forkserver_preload(_IMPORTED)
        os.environ["LD_PRELOAD"] = preload
        try:
            server.ensure_running()
        finally:
            os.environ["LD_PRELOAD"] = ours
            if not ours:
                del os.environ["LD_PRELOAD"]
    # multiprocessing knows one server; it is asked by this name for each process.
    usual = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        process.start()
    finally:
        forkserver.connect_to_new_process = usual


def _run_module(
    module: str, arguments: list[str], environment: dict[str, str], streams: list[int]
) -> None:
    for wanted, fd in enumerate(streams):
        os.dup2(fd, wanted)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (multiprocessing has closed the other)
    sys.argv = [module, *arguments]
    importlib.import_module(module).main()


def _silent() -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def _run(command: str, settings_json: str) -> None:
    _silent()
    if command == "train":
        from mlxstacks.studies.train.run import run as run_train
        from mlxstacks.training.settings import TrainSettings

        run_train(TrainSettings.model_validate_json(settings_json))
    elif command == "align":
        from mlxstacks.studies.stack.align import run as run_align
        from mlxstacks.training.settings import AlignSettings

        run_align(AlignSettings.model_validate_json(settings_json))
    elif command == "grow":
        from mlxstacks.grow.run import run as run_grow
        from mlxstacks.grow.settings import GrowSettings

        run_grow(GrowSettings.model_validate_json(settings_json))
    elif command == "stack":
        from mlxstacks.studies.stack.run import run as run_stack
        from mlxstacks.training.settings import StackRunSettings

        run_stack(StackRunSettings.model_validate_json(settings_json))
    else:
        assert command == "sweep"
        from mlxstacks.studies.sweep.rank_sweep import run as run_sweep
        from mlxstacks.studies.sweep.settings import SweepSettings
        from mlxstacks.study import child_process

        # Its cells come from the server that forked it, which it need not look for.
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
        child_process.subprocess = WarmSubprocess  # type: ignore[assignment]
        run_sweep(SweepSettings.model_validate_json(settings_json))


def _run_command_line(arguments: list[str], change: Callable[[], object] | None) -> None:
    _silent()
    if change is not None:
        change()
    from mlxstacks.cli import run

    raise SystemExit(run(arguments))
