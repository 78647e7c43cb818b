"""What a training reports: its figures, its plan and the document of its result."""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.data.formats import FORMATS
from mlxstacks.files.outputs import PLACES
from mlxstacks.memory import bytes_in_words
from mlxstacks.studies.train.setup import GuardedRun, trained_parameters
from mlxstacks.study.document import (
    Block,
    Columns,
    Environment,
    Plot,
    Series,
    Table,
    counted,
)
from mlxstacks.study.render.words import listed, number
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.study.write import environment
from mlxstacks.training.loop import Record
from mlxstacks.training.settings import TrainSettings


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

    @property
    def wrote_the_start(self) -> bool:
        """Whether no step was better: what was written is not trained."""
        return self.kept == "best" and self.best_step == 0

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


def other_versions(log: Path) -> list[str]:
    """A note when the run began with other versions of what computes."""
    before: dict[str, str] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        before = json.loads(line).get("versions") or before
    changed = [
        f"{name} {before[name]}, now {now}"
        for name, now in versions().items()
        if before.get(name, now) != now
    ]
    if not changed:
        return []
    return [f"The run began with {'; '.join(changed)}: its bytes may be other ones."]


def planned(settings: TrainSettings, guarded_run: GuardedRun, target: Path) -> TrainReport:
    """What a run would do. settings: as they were asked for, without a change of the guard's."""
    setup, plan = guarded_run.setup, guarded_run.setup.plan
    trained_bytes = 4 * setup.parameters
    store = None if setup.active is None else setup.active.plan()
    # as stored: a pooled A is repeated over its groups
    adapter_bytes = 4 * trained_parameters(setup.targets, setup.lora.rank)
    details = {
        "base_fingerprint": setup.base_fingerprint,
        "base_in_float32": setup.float32_base,
        "projections": dict(sorted(Counter(t.name for t in setup.targets).items())),
        "modules": len(setup.targets),
        "layers": sorted({target.layer for target in setup.targets}),
        "trained_parameters": setup.parameters,
        **({"adapter_bytes": adapter_bytes} if store is None else {"store": store}),
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
        "iters": setup.optimizer.steps * settings.grad_accumulation_steps,
        "steps": setup.optimizer.steps,
        "guard": guarded_run.as_json(),
        "writes": [str(target), *([] if store is None else [store["store_path"]])],
    }
    shown = settings.model_dump(mode="json", exclude=PLACES)
    return TrainReport("planned", str(target), shown, details, setup.notes)


def result_of(report: TrainReport) -> Result:
    """The document of a training; what it was made from is added where it is written."""
    return document_of(report, plan_table(report))


def document_of(report: TrainReport, table: Table) -> Result:
    """`result_of` with another table of the run."""
    is_planned = report.status == "planned"
    chat = command_line(
        "mlxstacks chat", model=report.settings["model"], adapter_path=report.save_path
    )
    about = Environment()
    if not is_planned:  # the peak is MLX's, which is what a training needs
        about = environment(report.figures.get("loading_seconds", 0.0) + report.figures["seconds"])
        about = about.model_copy(update={"peak_bytes": report.figures["peak_bytes"]})
    blocks: list[Block] = [] if (plot := loss_plot(report)) is None else [plot]
    blocks.append(table)
    if report.validation:
        columns: Columns = {"step": "count", "validation loss": ("number", 4), "": "text"}
        rows = [
            (
                r["step"],
                plain(r["validation_loss"]),
                "best" if r["step"] == report.best_step else "",
            )
            for r in report.validation
        ]
        blocks.append(Table.of("validation", "Validation", columns, rows))
    if report.history:
        columns = {"step": "count", "training loss": ("number", 4)}
        losses = [(r["step"], plain(r["loss"])) for r in report.history]
        folded = bool(report.validation)
        blocks.append(Table.of("training", "Training", columns, losses, folded=folded))
    return Result(
        kind="train",
        title="Training",
        question="How far does an adapter of these settings lower the validation loss?",
        status="planned" if is_planned else "done",
        outcome=_outcome(report),
        verdict=_verdict(report),
        settings=report.settings,
        environment=about,
        data=plain(report.as_json()),
        blocks=tuple(blocks),
        notes=tuple(report.notes),
        directory=report.save_path,
        next_steps={} if is_planned or report.wrote_the_start else {"Try it": chat},
    )


def _outcome(report: TrainReport) -> str:
    first, best = report.first_validation_loss, report.best_validation_loss
    if report.status == "planned":
        return "planned"
    if first is None or best is None:
        last = f"training loss {report.history[-1]['loss']:.3f}, " if report.history else ""
        return f"{last}not validated"
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
        losses = [f"{first:.4f} before"]
        # the best and the last one
        for record in report.validation[1:]:
            if record["step"] in (report.best_step, report.validation[-1]["step"]):
                losses.append(f"{record['validation_loss']:.4f} at step {record['step']:,}")
        verdict += f" Validation loss {change}: {', '.join(losses)}."
    elif report.history:
        losses = [f"{r['loss']:.4f} at step {r['step']:,}" for r in report.history]
        verdict += f" Training loss {', '.join(dict.fromkeys((losses[0], losses[-1])))}."
    if report.wrote_the_start:
        return f"{verdict} No step was better than the start, whose weights were written."
    return f"{verdict} The {report.kept} weights were written."


def loss_plot(report: TrainReport) -> Plot | None:
    curves = {
        "validation": [(r["step"], r["validation_loss"]) for r in report.validation],
        "training": [(r["step"], r["loss"]) for r in report.history],
    }
    # steps that were refused may have none
    curves = {k: [(x, y) for x, y in points if math.isfinite(y)] for k, points in curves.items()}
    series = [
        Series(label=label, x=tuple(step for step, _ in points), y=plain([y for _, y in points]))
        for label, points in curves.items()
        if points
    ]
    if max(map(len, curves.values())) < 2:  # a point is no curve
        return None
    spans = listed(f"{s.label} from {number(s.y[0])} to {number(s.y[-1])}" for s in series)
    return Plot(
        id="losses", title="Loss in training", kind="lines", series=tuple(series), x_label="step",
        y_label="loss, nats per token", alt=f"Loss in training by step, nats per token: {spans}.",
    )  # fmt: skip


def plan_table(report: TrainReport) -> Table:
    plan, layers = report.plan, report.plan["layers"]
    projections = ", ".join(
        f"{name} x{count}" if count > 1 else name for name, count in plan["projections"].items()
    )
    many = len(layers) > 8
    where = f"{len(layers)} layers" if many else f"layers {', '.join(map(str, layers))}"
    if store := plan.get("store"):
        kept = f"stack {store['stack']} {bytes_in_words(store['stack_bytes'])}"
    else:
        kept = f"adapter {bytes_in_words(plan['adapter_bytes'])}"
    formats = dict.fromkeys(n for s in plan["data"]["sources"] for n in s.get("formats", ()))
    columns = "; ".join(
        f"{name} ({FORMATS[name].describe()})"
        if FORMATS[name].own
        else FORMATS[name].describe().replace(", ", " and ")
        for name in formats
    )
    rows = {
        "projections": f"{plan['modules']} in {where}: {projections}",
        "trained": f"{plan['trained_parameters']:,} parameters; {kept}, optimizer "
        f"{bytes_in_words(plan['optimizer_bytes'])}",
        "rows": f"{plan['train_rows']:,} to train, {plan['validation_rows']:,} to validate"
        + (f"; read as {columns}" if columns else ""),
        "widths": f"{', '.join(map(str, plan['widths_tokens']))} tokens; "
        f"{plan['padding_percent']}% padding",
        "batches": f"{plan['iters']:,} in {counted(plan['steps'], 'optimizer step')}",
        "guard": "not asked" if plan["guard"] is None else plan["guard"]["verdict"],
    }
    if drawing := (plan["guard"] or {}).get("drawing"):
        rows["guard"] += f"; answers are drawn with {drawing['buffers']:,} buffers and "
        rows["guard"] += bytes_in_words(drawing["nbytes"])
    return Table.of_facts("plan", "The run", rows | measured_facts(report))


def measured_facts(report: TrainReport) -> dict[str, str]:
    """Of a run that ended: its counted buffers, where asked for, and its time."""
    plan, rows = report.plan, dict[str, str]()
    if figures := report.figures:
        if (buffers := figures.get("counted_buffers")) is not None:
            rows["counted"] = f"at most {buffers:,} live buffers in a step"
            if plan["guard"] is not None:
                predicted = plan["guard"]["buffers"]
                rows["counted"] += f"; {predicted:,} predicted for the longest rows"
        since = ", since it was resumed" if figures.get("resumed_from_step") else ""
        loading = figures.get("loading_seconds", 0.0)  # results of 0.1 have none
        rows["time"] = f"{loading:.0f} s to load data and model, "
        rows["time"] += f"{figures['seconds']:.0f} s to train and validate{since}"
    return rows
