"""Runs in real processes that begin with the imports done: to be killed, seconds cheaper.

    process = start("stack", settings.model_dump_json())
    process.kill(); assert ended(process) == -signal.SIGKILL

A server imports what a run needs and makes nothing; each process is forked from it. It has a pid
and an exit code of its own; what it prints is dropped.
"""

import multiprocessing
import os
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "mlx_lm", "mlx_lm.models.qwen3_5_moe", "mlxstacks.cli", "mlxstacks.experiments.stack.run",
    "mlxstacks.experiments.sweep.rank_sweep", "mlxstacks.experiments.train.run",
    "mlxstacks.fuse.run", "tests.warm",
])  # fmt: skip


def start(command: str, settings_json: str) -> ForkServerProcess:
    """A run of `train`, `stack` or `sweep` in a process of its own."""
    process = _CONTEXT.Process(target=_run, args=(command, settings_json), daemon=False)
    process.start()
    return process


def start_command_line(arguments: list[str]) -> ForkServerProcess:
    """`mlxstacks` with these arguments in a process of its own."""
    process = _CONTEXT.Process(target=_run_command_line, args=(arguments,), daemon=False)
    process.start()
    return process


def ended(process: ForkServerProcess) -> int:
    """Wait for the end; the exit code, minus the signal that killed it."""
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def wait_for(path: Path, process: ForkServerProcess) -> None:
    """Until there is something at `path`, or the process has ended."""
    while not path.exists() and process.is_alive():
        time.sleep(0.005)


def _silent() -> None:
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


def _run(command: str, settings_json: str) -> None:
    _silent()
    if command == "train":
        from mlxstacks.experiments.train.run import run as run_train
        from mlxstacks.training.settings import TrainSettings

        run_train(TrainSettings.model_validate_json(settings_json))
    elif command == "stack":
        from mlxstacks.experiments.stack.run import run as run_stack
        from mlxstacks.training.stack_settings import StackRunSettings

        run_stack(StackRunSettings.model_validate_json(settings_json))
    else:
        assert command == "sweep"
        from mlxstacks.experiments.sweep.rank_sweep import run as run_sweep
        from mlxstacks.experiments.sweep.settings import SweepSettings

        run_sweep(SweepSettings.model_validate_json(settings_json))


def _run_command_line(arguments: list[str]) -> None:
    _silent()
    from mlxstacks.cli import run

    raise SystemExit(run(arguments))
