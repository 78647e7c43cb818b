"""The cells of a sweep: every combination of its axes, each one a run of `train`."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import write_json
from mlxstacks.studies.sweep.settings import USUAL, SweepSettings, scale_of
from mlxstacks.training.settings import TrainSettings

# refused: by the guard, before it began. failed: training said so (NaN, no memory). crashed: its
# process died. started: none of these yet.
Status = Literal["started", "trained", "refused", "failed", "crashed"]
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Cell:
    """Values of the axes. bits: None for the model as it is."""

    rank: int
    seed: int
    layers: str
    projections: str
    bits: int | None

    @property
    def point(self) -> tuple[str, str, int | None]:
        """All but rank and seed: cells of one point are compared."""
        return (self.layers, self.projections, self.bits)

    @property
    def name(self) -> str:
        """A directory name that tells the values and does not depend on what else is swept."""
        parts = [f"rank-{self.rank}", f"seed-{self.seed}", f"layers-{self.layers}"]
        parts += [self.projections, *([f"{self.bits}bit"] if self.bits else [])]
        name = re.sub(r"[^\w.,+-]+", "-", "_".join(parts))
        if len(name) <= _LONGEST_NAME:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        return f"{name[: _LONGEST_NAME - 9]}-{digest}"


def cells_of(settings: SweepSettings) -> list[Cell]:
    """Every combination: points in the order given, ranks from low to high, then seeds."""
    widths: tuple[int | None, ...] = settings.bits or (None,)
    points = itertools.product(settings.layers, settings.projections, widths)
    return [
        Cell(rank, seed, layers, projections, bits)
        for layers, projections, bits in points
        for rank in sorted(settings.ranks)
        for seed in settings.seeds
    ]


def train_settings(
    settings: SweepSettings, cell: Cell, model: Path, save_path: Path, change: Mapping[str, Any]
) -> TrainSettings:
    """The run of a cell. change: settings of `train` that the guard asked for."""
    names = () if cell.projections == USUAL else tuple(cell.projections.split("+"))
    values = settings.train.model_dump() | {
        "model": str(model),
        "data": settings.data,
        "save_path": str(save_path),
        "layers": cell.layers,
        "keys": tuple(name.strip() for name in names),
        "rank": cell.rank,
        "seed": cell.seed,
        "scale": scale_of(settings, cell.rank),
        "thinking": settings.thinking,
        "allow_special": settings.allow_special,
        "guard": "off",  # the sweep has asked it
    }
    return TrainSettings.model_validate(values | dict(change))


@dataclass(frozen=True)
class CellResult:
    """What is kept of a cell, in `NAME.json` next to its directory.

    identity: all that its weights depend on. guard: the prediction, and what it led to. figures:
    losses, time, bytes and buffers of the run. survival: by policy, see `measure_survival`.
    """

    cell: Cell
    status: Status
    identity: dict[str, Any]
    guard: dict[str, Any]
    reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    survival: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"name": self.cell.name, **asdict(self)}


def write_result(directory: Path, result: CellResult) -> None:
    write_json(directory / f"{result.cell.name}.json", result.as_json())


def read_result(path: Path) -> CellResult:
    """Raises: InputError for a file that is not a cell's result."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        document.pop("name")
        result = TypeAdapter(CellResult).validate_json(json.dumps(document), strict=True)
        if result.cell.name != path.stem:
            raise ValueError(f"it is of {result.cell.name}")
        return result
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        words = " ".join(str(error).split())[:300]
        raise InputError(
            f"{path}: not a result of a sweep ({type(error).__name__}: {words}); move it away"
        ) from None


def read_results(directory: Path) -> dict[Cell, CellResult]:
    """Every result in a directory of cells; none where there is no directory."""
    results = [read_result(path) for path in sorted(directory.glob("*.json"))]
    return {result.cell: result for result in results}
