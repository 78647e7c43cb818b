"""The result of a sweep: cells, matrix, differences, verdict."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from mlxstacks import memory
from mlxstacks.studies.sweep.cells import CellResult
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.sweep.summary import (
    Difference,
    MatrixRow,
    differences,
    matrix,
    verdict,
)

# Where a sweep writes and how it goes on, not what it makes.
_NOT_OF_THE_RESULT = {"force", "save_path", "resume"}


@dataclass(frozen=True)
class PlannedCell:
    """A line of --dry-run. status: "planned", or that of a result that is there already.

    seconds: expected, after the finished cells of this sweep; least_seconds: what its arithmetic
    takes at the speed of this machine's matrix product, where nothing has run yet.
    """

    name: str
    rank: int
    seed: int
    point: tuple[str, str, int | None]
    status: str
    parameters: int
    predicted_buffers: int
    predicted_bytes: int | None
    outcome: str
    verdict: str
    seconds: float | None
    least_seconds: float | None

    def as_json(self) -> dict[str, Any]:
        layers, projections, bits = self.point
        values = {key: getattr(self, key) for key in self.__dataclass_fields__ if key != "point"}
        return values | {"layers": layers, "projections": projections, "bits": bits}


@dataclass(frozen=True)
class SweepReport:
    """status: "planned" or "done", which a sweep with refused or failed cells is too.

    failed_gate: why the command ends with 3, when no cell at all could run.
    """

    status: str
    save_path: str
    settings: dict[str, Any]
    planned: list[PlannedCell] = field(default_factory=list)
    results: list[CellResult] = field(default_factory=list)
    rows: list[MatrixRow] = field(default_factory=list)
    found: list[Difference] = field(default_factory=list)
    plots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: str = "planned only; nothing was run."
    seconds: float = 0.0
    failed_gate: str | None = None

    def as_json(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        device = memory.device()
        document: dict[str, Any] = {
            "kind": "sweep",
            "status": self.status,
            "save_path": self.save_path,
            "settings": self.settings,
            "settings_sha256": digest,
            "device": f"{device.name} ({device.kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
        }
        if self.status == "planned":
            document["cells"] = [cell.as_json() for cell in self.planned]
        else:
            document["matrix"] = [row.as_json() for row in self.rows]
            document["differences"] = [found.as_json() for found in self.found]
            document["cells"] = [result.as_json() for result in self.results]
            document["plots"] = self.plots
        return document | {
            "seconds": round(self.seconds, 1),
            "notes": self.notes,
            "verdict": self.verdict,
            "failed_gate": self.failed_gate,
        }


def shown_settings(settings: SweepSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)


def report_of(
    settings: SweepSettings,
    save_path: str,
    results: Sequence[CellResult],
    notes: Sequence[str],
    seconds: float,
) -> SweepReport:
    """The report of finished cells, without plots."""
    rows, found = matrix(settings, results), differences(settings, results)
    refused = [result for result in results if result.status == "refused"]
    failed = None
    if len(refused) == len(results):
        failed = f"every cell was refused by the guard: {refused[0].reason}"
    return SweepReport(
        "done",
        save_path,
        shown_settings(settings),
        results=list(results),
        rows=rows,
        found=found,
        notes=list(notes),
        verdict=verdict(settings, rows, found),
        seconds=seconds,
        failed_gate=failed,
    )
