"""The result of a comparison: plan, budgets, arms, differences, verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.experiments.compare.analysis import ArmResult, CellValues
from mlxstacks.experiments.compare.budget import ArmBudget, as_json
from mlxstacks.files.outputs import write_json
from mlxstacks.files.strict_json import read_object

# failed: training said so (NaN, no memory). crashed: its process died.
Status = Literal["trained", "failed", "crashed"]


@dataclass(frozen=True)
class CellRecord:
    """What is kept of a cell, in `ARM_seed-S.json` beside its store. values: see compare_measures;
    curves: domain -> validation losses by step, of all rounds, steps counted on.
    """

    arm: str
    seed: int
    status: Status
    reason: str | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    matrix: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.arm}_seed-{self.seed}"

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    def figures(self) -> CellValues:
        return CellValues(self.arm, self.seed, self.values, self.matrix)


def write_record(directory: Path, record: CellRecord) -> None:
    write_json(directory / f"{record.name}.json", record.as_json())


def read_record(path: Path) -> CellRecord:
    """Raises: InputError for a file that is not a cell's result."""
    try:
        document = read_object(path.read_bytes())
        document.pop("name")
        return CellRecord(**document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: not a result of a comparison ({type(error).__name__}: {error}); move it away"
        ) from None


@dataclass(frozen=True)
class CompareReport:
    """The plan and, unless `status` is "planned", what came of it."""

    status: str
    save_path: str
    settings: dict[str, Any]
    plan: dict[str, Any]
    plan_sha256: str
    budgets: Mapping[str, ArmBudget]
    results: Sequence[ArmResult] = ()
    cells: Sequence[CellRecord] = ()
    verdict: str = "planned only; nothing was run."
    seconds: float = 0.0
    plots: Sequence[str] = ()
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        device = memory.device()
        return {
            "kind": "stack compare",
            "status": self.status,
            "save_path": self.save_path,
            "settings": self.settings,
            "plan": self.plan,
            "plan_sha256": self.plan_sha256,
            "budgets": as_json(self.budgets),
            "arms": [result.as_json() for result in self.results],
            "cells": [cell.as_json() for cell in self.cells],
            "plots": list(self.plots),
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
            "device": f"{device.name} ({device.kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
            "verdict": self.verdict,
        }
