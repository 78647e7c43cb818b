"""What a sweep over ranks found: losses, what each fuse would keep, live buffers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxstacks.studies.sweep.cells import CellResult
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.sweep.summary import (
    Figures,
    differences,
    matrix,
    mean_of,
    point_name,
    point_of,
    verdict,
)
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table
from mlxstacks.study.result import Result

ABOUT = {
    "kind": "sweep",
    "title": "Sweep",
    "question": "What does rank do to the loss, and what of it survives a fuse?",
}


def concluded(settings: SweepSettings, results: Sequence[CellResult]) -> Result:
    """The result of finished cells."""
    rows, found = matrix(settings, results), differences(settings, results)
    cells = [result.as_json() for result in results]
    refused = [result for result in results if result.status == "refused"]
    failed_gate = None
    if len(refused) == len(results):
        failed_gate = f"every cell was refused by the guard: {refused[0].reason}"
    findings = [d["finding"] for d in found if d["what"] == "last_validation_loss"]
    findings = list(dict.fromkeys(findings))
    outcome = f"effect of rank on loss: {', '.join(findings)}"
    return Result(
        **ABOUT, status="done", verdict=verdict(settings, rows, found), failed_gate=failed_gate,
        outcome=outcome if findings else "no two ranks to compare", notes=_notes(results),
        data={"matrix": rows, "differences": found, "cells": cells},
        blocks=blocks(settings, rows, found, cells),
    )  # fmt: skip


def _notes(results: Sequence[CellResult]) -> tuple[str, ...]:
    """Cells without an adapter: why, how far they came, which checkpoints they left; and what is
    not like for like.
    """
    notes = []
    for result in results:
        if not result.reason:
            continue
        words = f"{result.cell.name}: {result.status}: {result.reason}"
        if result.status != "refused":
            saved = ", ".join(map(str, result.figures.get("saved_steps", []))) or "none"
            step = result.figures.get("step", 0)
            words += f" (after step {step}; states saved at: {saved})"
        notes.append(words)
    notes += [
        f"{r.cell.name}: the guard warns: {r.guard['verdict']}."
        for r in results
        if r.guard["outcome"] != "fits" and r.status != "refused"
    ]
    notes += [
        f"{r.cell.name}: reshaped by the guard, {r.guard['change']}; not like for like."
        for r in results
        if r.guard.get("change")
    ]
    resumed = [r.cell.name for r in results if r.figures.get("resumed_from_step")]
    if resumed:
        notes.append(f"Seconds are of the last part of a resumed run: {', '.join(resumed)}.")
    return tuple(dict.fromkeys(notes))


def plan_table(cells: Sequence[Figures]) -> Table:
    """The cells of --dry-run."""
    columns: Columns = {
        "cell": "text", "status": "text", "trained": "count", "buffers": "count", "bytes": "bytes",
        "guard": "text", "seconds": "number", "at least": "number",
    }  # fmt: skip
    keys = ("name", "status", "parameters", "predicted_buffers", "predicted_bytes", "outcome",
            "seconds", "least_seconds")  # fmt: skip
    return Table.of(
        "cells", "Cells", columns, [[cell[key] for key in keys] for cell in cells],
        caption="Seconds: as the finished cells of an interrupted sweep took; at least: what the "
        "products alone take at this machine's speed.",
    )  # fmt: skip


def blocks(
    settings: SweepSettings,
    rows: Sequence[Figures],
    found: Sequence[Figures],
    cells: Sequence[Mapping[str, Any]],
) -> tuple[Block, ...]:
    """Runs, what a fuse keeps, differences; every cell last, folded."""
    several = len(set(map(point_of, rows))) > 1
    labels = [
        f"rank {row['rank']}, {point_name(point_of(row))}" if several else f"rank {row['rank']}"
        for row in rows
    ]
    trained = any(mean_of(row, "peak_bytes") is not None for row in rows)
    plots = (_survival_plot(settings, rows, labels), *_loss_plot(cells, several))
    columns: Columns = {"cell": "text", "status": "text", "why": "text"}
    statuses = [(cell["name"], cell["status"], cell["reason"]) for cell in cells]
    return (
        _runs(rows, labels), *_fused(settings, rows, labels), *_differences(found, several),
        *(plots if trained else ()), Table.of("cells", "Cells", columns, statuses, folded=True),
    )  # fmt: skip


def _estimate(interval: Mapping[str, Any] | None) -> Cell:
    if interval is None or interval["low"] is None:
        return None if interval is None else interval["mean"]
    return interval["mean"], interval["low"], interval["high"]


def _runs(rows: Sequence[Figures], labels: Sequence[str]) -> Table:
    columns: Columns = {
        "rank": "text", "cells": "text", "before": ("number", 3), "after": ("number", 3),
        "best": ("number", 3), "steps": ("number", 3), "seconds": "number", "peak": "bytes",
        "buffers": "count", "counted": "count",
    }  # fmt: skip
    keys = ["delta_over_step", "seconds", "peak_bytes", "predicted_buffers", "measured_buffers"]
    if all(mean_of(row, keys[-1]) is None for row in rows):
        columns, keys = dict(list(columns.items())[:-1]), keys[:-1]
    cells = [
        (
            label, ", ".join(f"{count} {status}" for status, count in row["cells"].items()),
            mean_of(row, "first_validation_loss"), _estimate(row["means"]["last_validation_loss"]),
            _estimate(row["means"]["best_validation_loss"]), *(mean_of(row, key) for key in keys),
        )
        for label, row in zip(labels, rows, strict=True)
    ]  # fmt: skip
    return Table.of(
        "runs", "Runs, means over seeds", columns, cells,
        caption="Before, after, best: validation loss, nats a token, with 95% intervals. Steps: "
        "size of the delta in quantization steps. Buffers: predicted by the guard.",
    )  # fmt: skip


def _fused(
    settings: SweepSettings, rows: Sequence[Figures], labels: Sequence[str]
) -> Iterator[Table]:
    columns: Columns = {
        "rank": "text", "policy": "text", "correlation": ("number", 3), "survival": "share",
        "more bytes": "bytes",
    }  # fmt: skip
    cells = [
        (
            label, policy, _estimate(row["correlation"][policy]),
            _estimate(row["survival"][policy]), row["extra_bytes"][policy],
        )
        for label, row in zip(labels, rows, strict=True)
        for policy in settings.policies
        if row["survival"][policy] is not None
    ]  # fmt: skip
    if cells:
        counts = [kept["n"] for row in rows for kept in row["correlation"].values() if kept]
        seeds = max(counts, default=0)
        yield Table.of(
            "fused", "Correlation and survival of a fuse", columns, cells,
            caption=f"Means over {seeds} seed{'s' if seeds != 1 else ''}, 95% intervals. "
            "Correlation of a fuse with the trained change; survival: <F,D>/<D,D>.",
        )  # fmt: skip


def _differences(found: Sequence[Figures], several: bool) -> Iterator[Table]:
    columns: Columns = {
        "measure": "text", **({"at": "text"} if several else {}), "low rank": "count",
        "high rank": "count", "high less low": ("change", 4), "an effect is": "text",
    }  # fmt: skip
    rows = [
        (
            d["what"], *([point_name(point_of(d))] if several else []), d["low_rank"],
            d["high_rank"], _estimate(d["difference"]), d["finding"],
        )
        for d in found
    ]  # fmt: skip
    if rows:
        yield Table.of("differences", "Highest rank less lowest, seed by seed", columns, rows)


def _survival_plot(settings: SweepSettings, rows: Sequence[Figures], labels: Sequence[str]) -> Plot:
    series = tuple(
        Series(
            label=label,
            y=tuple(100 * kept["mean"] if (kept := row["survival"][policy]) else None
                    for policy in settings.policies),
        )
        for label, row in zip(labels, rows, strict=True)
    )  # fmt: skip
    values = [y for line in series for y in line.y if y is not None]
    span = f"{min(values):.0f} to {max(values):.0f}%" if values else "nothing measured"
    title = "Survival of the adapter in a fuse, <F,D>/<D,D>"
    return Plot(
        id="survival", title=title, kind="heat map", series=series, categories=settings.policies,
        x_label="policy of the fuse", unit="survival, %", form="{:.0f}", limits=(0.0, 100.0),
        alt=f"{title}. Rows: {', '.join(labels)}; columns: {', '.join(settings.policies)}; {span}.",
    )  # fmt: skip


def _loss_plot(cells: Sequence[Mapping[str, Any]], several: bool) -> Iterator[Plot]:
    """Validation loss by step, a line a cell."""
    series = []
    for cell in cells:
        curve = cell["figures"].get("validation") or []
        about = cell["cell"]
        label = cell["name"] if several else f"rank {about['rank']}, seed {about['seed']}"
        if curve:
            steps = tuple(record["step"] for record in curve)
            losses = tuple(record["validation_loss"] for record in curve)
            series.append(Series(label=label, x=steps, y=losses))
    if series:
        title = "Validation loss of the cells"
        ends = ", ".join(f"{s.label} {s.y[-1]:.3g}" for s in series if s.y[-1] is not None)
        yield Plot(
            id="losses", title=title, kind="lines", series=tuple(series), x_label="step",
            y_label="nats a token", alt=f"{title}; at the end {ends}.",
        )  # fmt: skip
