"""What is kept of each cell of a comparison."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import write_json
from mlxstacks.files.strict_json import read_object
from mlxstacks.studies.compare.analysis import CellValues

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
