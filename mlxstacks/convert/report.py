"""What a conversion reports: tensors by kind, files, notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlxstacks.convert.conversion import Conversion


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one kind in the source that became the same thing. nbytes: as written."""

    kind: str
    stored: str
    tensors: int
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "stored": self.stored,
            "tensors": self.tensors,
            "bytes": self.nbytes,
        }


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """Result of a conversion or, with `status` "planned", of its dry run."""

    status: str
    model: str
    save_path: str
    model_type: str
    settings: dict[str, Any]
    groups: list[TensorGroup]
    files: list[dict[str, Any]]
    written_bytes: int
    seconds: float
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "model": self.model,
            "save_path": self.save_path,
            "model_type": self.model_type,
            "settings": self.settings,
            "tensors": [group.as_json() for group in self.groups],
            "files": self.files,
            "written_bytes": self.written_bytes,
            "seconds": round(self.seconds, 3),
            "notes": self.notes,
        }


def tensor_groups(conversion: Conversion) -> list[TensorGroup]:
    """Parts of a conversion, counted by what they are and what they become."""
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for part in conversion.parts:
        tensors, nbytes = counts.get((part.kind, part.stored), (0, 0))
        counts[part.kind, part.stored] = tensors + 1, nbytes + part.nbytes
    return [TensorGroup(*key, *value) for key, value in counts.items()]
