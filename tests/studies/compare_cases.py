"""Comparisons of a few seconds on the tiny hybrid model, their cells in this process.

A process of its own for each cell costs a second; test_command.py has real ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxstacks.studies.compare.run import run_one
from mlxstacks.studies.compare.settings import CompareSettings
from mlxstacks.study.run_directory import plain

RUN: dict[str, Any] = {
    "domains": ["alpha", "beta"], "validation_rows": 4, "rounds": 1, "iters": 2, "batch_size": 2,
    "learning_rate": 3e-3, "max_seq_length": 64, "steps_per_eval": 2, "steps_per_report": 1,
    "save_every": 1, "keys": ["q_proj"],
    "stack": {"rank": 2, "num_experts": 2, "experts_per_token": 1}, "null_space": None,
    "min_loss_delta": 0.0, "keep_plateau_stack": True, "patience": 100, "spike_threshold": 10.0,
    "guard": "off",
}  # fmt: skip
ARMS = (
    {"name": "free"},
    {"name": "kept-out", "change": {"null_space": {"directions": 4, "samples": 8}}},
)
ABORTED = -6


def compare_settings(
    places: tuple[Path, Path], save_path: Path, /, **changes: Any
) -> CompareSettings:
    """Two arms, two seeds. `run` may be given in part."""
    model, data = places
    values: dict[str, Any] = {
        "model": str(model), "data": str(data), "save_path": str(save_path), "arms": ARMS,
        "seeds": (0, 1), "primary": "ungated_earlier", "run": RUN | changes.pop("run", {}),
    }  # fmt: skip
    return CompareSettings.model_validate(values | changes)


class _Died(BaseException):
    pass


class Cells:
    """Stands in for `run_child`. fatal_seed: its runs die in their second domain."""

    def __init__(self, fatal_seed: int | None = None) -> None:
        self.fatal_seed = fatal_seed
        self.started: list[str] = []

    def __call__(
        self, module: str, specification: Any, log: Path, on_message: Callable[[Any], None]
    ) -> int:
        assert module == "mlxstacks.studies.compare.run"
        stack = specification["stack"]
        self.started.append(Path(stack["save_path"]).name)

        def send(message: Any) -> None:
            on_message(message)
            if stack["seed"] == self.fatal_seed and message["done"] > 1:
                raise _Died

        try:
            on_message(plain(run_one(specification, send)))
        except _Died:
            return ABORTED
        return 0


def stacks(target: Path) -> dict[str, bytes]:
    """Cell and file -> the bytes of every stack."""
    return {
        f"{path.parts[-3]}/{path.name}": path.read_bytes()
        for path in sorted((target / "cells").glob("*/stacks/*.safetensors"))
    }
