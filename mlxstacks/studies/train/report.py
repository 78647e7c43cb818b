"""What a training run reports: its plan, and once it is done its losses, time and bytes."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks import memory
from mlxstacks.guard.report import GuardReport
from mlxstacks.studies.train.setup import TrainSetup
from mlxstacks.training.loop import Record, TrainingState
from mlxstacks.training.settings import TrainSettings

# Where a run writes and how it goes on, not what it makes.
_NOT_OF_THE_RESULT = {"force", "save_path", "resume"}


@dataclass(frozen=True, slots=True)
class TrainReport:
    """Result of `train` or, with `status` "planned", of its dry run.

    status: "trained", or "stopped" with the `reason`, when validation ended it early.
    kept: "best" or "last": the weights that were written. best_step: the step of the best ones.
    """

    status: str
    save_path: str
    settings: dict[str, Any]
    plan: dict[str, Any]
    notes: list[str]
    reason: str | None = None
    kept: str | None = None
    step: int = 0
    best_step: int | None = None
    validation: list[Record] = field(default_factory=list)
    history: list[Record] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def first_validation_loss(self) -> float | None:
        return self.validation[0]["validation_loss"] if self.validation else None

    @property
    def best_validation_loss(self) -> float | None:
        losses = {record["step"]: record["validation_loss"] for record in self.validation}
        return None if self.best_step is None else losses[self.best_step]

    def as_json(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        return {
            "status": self.status,
            "reason": self.reason,
            "save_path": self.save_path,
            "settings": self.settings,
            "settings_sha256": digest,
            **self.plan,
            "kept": self.kept,
            "step": self.step,
            "best_step": self.best_step,
            "first_validation_loss": self.first_validation_loss,
            "best_validation_loss": self.best_validation_loss,
            **self.figures,
            "validation": self.validation,
            "history": self.history,
            "notes": self.notes,
        }

    def after(
        self,
        state: TrainingState,
        *,
        seconds: float,
        resumed_from: int,
        processes: int,
        resources: dict[str, Any] | None,
    ) -> "TrainReport":
        """The plan with what came of it."""
        best = state.best
        device = memory.device()
        figures = {
            "seconds": round(seconds, 3),
            "resumed_from_step": resumed_from,
            "processes": processes,
            "resources": resources,
            "peak_bytes": memory.counters().peak_bytes,
            "device": f"{device.name} ({device.kind})",
            "versions": versions(),
        }
        use_best = self.settings["keep"] == "best" and best is not None
        return replace(
            self,
            status="stopped" if state.stopped else "trained",
            reason=state.stopped,
            kept="best" if use_best else "last",
            step=state.step,
            best_step=best.step if best else None,
            validation=state.validation,
            history=state.history,
            figures=figures,
        )


def versions() -> dict[str, str]:
    """Of what the numbers come from."""
    return {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")}


def planned(
    settings: TrainSettings, setup: TrainSetup, target: Path, guard: dict[str, Any] | None = None
) -> TrainReport:
    """What a run with this setup would do. guard: its word (`guard_json`), where it was asked."""
    plan = setup.plan
    each = settings.grad_accumulation_steps
    trained_bytes = 4 * setup.parameters
    details = {
        "base_fingerprint": setup.base_fingerprint,
        "base_in_float32": setup.float32_base,
        "projections": setup.projections(),
        "modules": len(setup.targets),
        "layers": sorted({target.layer for target in setup.targets}),
        "trained_parameters": setup.parameters,
        "adapter_bytes": trained_bytes,
        # Adam keeps two numbers for each that is trained.
        "optimizer_bytes": 2 * trained_bytes,
        "train_rows": len(setup.train.rows),
        "train_rows_cut": setup.train.cut,
        "train_rows_empty": setup.train.empty,
        "validation_rows": len(setup.validation_rows),
        "data": setup.data,
        "widths_tokens": list(plan.widths),
        "padding_percent": round(100 * plan.padding_share(), 1),
        "batches_per_epoch": plan.batches_per_epoch,
        "iters": setup.optimizer.steps * each,
        "steps": setup.optimizer.steps,
        "guard": guard,
        "writes": [str(target)],
    }
    shown = settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)
    return TrainReport("planned", str(target), shown, details, setup.notes)


def guard_json(report: GuardReport, change: Mapping[str, Any]) -> dict[str, Any]:
    """What a report keeps of the guard's. change: the settings that it made other ones."""
    return {
        "outcome": report.outcome,
        "verdict": report.verdict,
        "buffers": report.buffers,
        "bytes": report.nbytes.total,
        "parts_bytes": asdict(report.nbytes),
        "limit_buffers": report.limit.buffers,
        "limit_known": report.limit.known,
        "advice": report.change.words if report.change else None,
        "change": dict(change),
    }


def write_recipe(directory: Path, settings: TrainSettings) -> None:
    """recipe.yaml: `mlxstacks run` on it makes the same run again."""
    import yaml

    values = settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT, exclude_none=True)
    text = yaml.safe_dump({"command": "train", **values}, sort_keys=False, allow_unicode=True)
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
