"""What a training run reports: its plan, and once it is done its losses, time and bytes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.guard.report import GuardReport
from mlxstacks.memory import bytes_in_words
from mlxstacks.studies.train.setup import TrainSetup
from mlxstacks.study.document import Block, Column, Environment, Plot, Series, Table
from mlxstacks.study.render.words import listed, number
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.study.write import environment
from mlxstacks.training.loop import Record
from mlxstacks.training.settings import TrainSettings

# Where a run writes and how it resumes, not what it makes.
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
        """The figures; settings and notes stand in the head of the result."""
        return {
            "status": self.status,
            "reason": self.reason,
            "save_path": self.save_path,
            **self.plan,
            "kept": self.kept,
            "step": self.step,
            "best_step": self.best_step,
            "first_validation_loss": self.first_validation_loss,
            "best_validation_loss": self.best_validation_loss,
            **self.figures,
            "validation": self.validation,
            "history": self.history,
        }


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


def result_of(report: TrainReport) -> Result:
    """The document of a training; what it was made from is added where it is written."""
    is_planned = report.status == "planned"
    chat = command_line(
        "mlxstacks chat", model=report.settings["model"], adapter_path=report.save_path
    )
    plots = [] if (plot := _loss_plot(report)) is None else [plot]
    validation = [_validation_table(report)] if report.validation else []
    blocks: tuple[Block, ...] = (*plots, _plan_table(report), *validation)
    return Result(
        kind="train",
        title="Training",
        question="How far does an adapter of these settings lower the validation loss?",
        status="planned" if is_planned else "done",
        outcome=_outcome(report),
        verdict=_verdict(report),
        settings=report.settings,
        environment=Environment() if is_planned else _environment(report.figures),
        data=plain(report.as_json()),
        blocks=blocks,
        notes=tuple(report.notes),
        directory=report.save_path,
        next_steps={} if is_planned else {"Try it": chat},
    )


def _environment(figures: Mapping[str, Any]) -> Environment:
    """peak_bytes: of MLX, which is what a training needs."""
    about = environment(figures["seconds"])
    return about.model_copy(update={"peak_bytes": figures["peak_bytes"]})


def _outcome(report: TrainReport) -> str:
    first, best = report.first_validation_loss, report.best_validation_loss
    if report.status == "planned":
        return "planned"
    if first is None or best is None:
        return "validation loss not measured"
    return f"validation loss {first:.3f} to {best:.3f}"


def _verdict(report: TrainReport) -> str:
    if report.status == "planned":
        return ""
    first, best = report.first_validation_loss, report.best_validation_loss
    ended = "stopped early" if report.status == "stopped" else "ended as planned"
    verdict = f"Training {ended} at step {report.step:,}"
    verdict += f": {report.reason}." if report.reason else "."
    if first is not None and best is not None:
        change = "fell" if best < first else "did not fall"
        verdict += f" Validation loss {change}: {first:.4f} before, {best:.4f} at step "
        verdict += f"{report.best_step:,}."
    return f"{verdict} The {report.kept} weights were written."


def _loss_plot(report: TrainReport) -> Plot | None:
    curves = {
        "validation": [(r["step"], r["validation_loss"]) for r in report.validation],
        "training": [(r["step"], r["loss"]) for r in report.history],
    }
    series = [
        Series(label=label, x=tuple(step for step, _ in points), y=plain([y for _, y in points]))
        for label, points in curves.items()
        if points
    ]
    if not series:
        return None
    spans = listed(f"{s.label} from {number(s.y[0])} to {number(s.y[-1])}" for s in series)
    return Plot(
        id="losses", title="Loss in training", kind="lines", series=tuple(series), x_label="step",
        y_label="loss, nats a token", alt=f"Loss in training by step, nats a token: {spans}.",
    )  # fmt: skip


def _plan_table(report: TrainReport) -> Table:
    plan, layers = report.plan, report.plan["layers"]
    projections = ", ".join(
        f"{name} x{count}" if count > 1 else name for name, count in plan["projections"].items()
    )
    many = len(layers) > 8
    where = f"{len(layers)} layers" if many else f"layers {', '.join(map(str, layers))}"
    rows = {
        "projections": f"{plan['modules']} in {where}: {projections}",
        "trained": f"{plan['trained_parameters']:,} parameters; adapter "
        f"{bytes_in_words(plan['adapter_bytes'])}, optimizer "
        f"{bytes_in_words(plan['optimizer_bytes'])}",
        "rows": f"{plan['train_rows']:,} to train, {plan['validation_rows']:,} to validate",
        "widths": f"{', '.join(map(str, plan['widths_tokens']))} tokens; "
        f"{plan['padding_percent']}% padding",
        "batches": f"{plan['iters']:,} in {plan['steps']:,} optimizer steps",
        "guard": "not asked" if plan["guard"] is None else plan["guard"]["verdict"],
    }
    columns = (Column(name="what"), Column(name="value"))
    return Table(id="plan", title="The run", columns=columns, rows=tuple(rows.items()))


def _validation_table(report: TrainReport) -> Table:
    rows = tuple(
        (
            record["step"], plain(record["validation_loss"]),
            "best" if record["step"] == report.best_step else "",
        )
        for record in report.validation
    )  # fmt: skip
    columns = (
        Column(name="step", kind="count"), Column(name="validation loss", kind="number", digits=4),
        Column(name=""),
    )  # fmt: skip
    return Table(id="validation", title="Validation", columns=columns, rows=rows)
