"""Sweeps of a few seconds on the tiny hybrid model, cells in the process of a test, and a worker
that dies on demand.

    python -m tests.studies.sweep_cases < specification

stands in for the process of a cell where a test wants one to crash.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.sweep.worker import work
from mlxstacks.study.child_process import as_child, run_child
from mlxstacks.study.run_directory import plain
from mlxstacks.training.settings import TrainSettings

RUN: dict[str, Any] = {
    "iters": 6, "batch_size": 2, "learning_rate": 1e-2, "scale": 8.0, "steps_per_eval": 3,
    "save_every": 2, "steps_per_report": 1, "keep": "last",
}  # fmt: skip
FATAL_RANK = 4


def sweep_settings(model: Path, data: Path, save_path: Path, /, **changes: Any) -> SweepSettings:
    """Ranks 2 and 4 on the routed experts of both layers. `train` may be given in part."""
    run = TrainSettings.model_validate(RUN | changes.pop("train", {}))
    values: dict[str, Any] = {
        "model": str(model), "data": str(data), "save_path": str(save_path), "ranks": (2, 4),
        "layers": ("all",), "projections": ("switch_mlp.down_proj",), "train": run,
    }  # fmt: skip
    return SweepSettings.model_validate(values | changes)


class Cells:
    """Stands in for `run_child`: cells in this process, where a process is not the point.

    A process of its own costs seconds of imports. alone: (rank, seed) of cells that get one.
    """

    def __init__(self, *alone: tuple[int, int]) -> None:
        self.alone = alone
        self.started: list[tuple[int, int]] = []

    def __call__(
        self, module: str, specification: Any, log: Path, on_message: Callable[[Any], None]
    ) -> int:
        assert module == "mlxstacks.studies.sweep.worker"
        self.started.append((specification["train"]["rank"], specification["train"]["seed"]))
        if self.started[-1] in self.alone:
            return run_child(module, specification, log, on_message)
        on_message(plain(work(specification, on_message)))
        return 0


def adapters(target: Path) -> dict[str, bytes]:
    """Cell -> the bytes of its adapter."""
    return {
        path.parent.name: path.read_bytes()
        for path in sorted((target / "cells").glob("*/adapters.safetensors"))
    }


def main() -> None:
    specification, send = as_child()

    def sending(message: dict[str, Any]) -> None:
        send(message)
        if specification["train"]["rank"] == FATAL_RANK and message["done"] == 5:
            os.kill(os.getpid(), signal.SIGABRT)

    send(plain(work(specification, sending)))


if __name__ == "__main__":
    main()
