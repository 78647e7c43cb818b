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
from mlxstacks.study.document import Block, Cell, Column, Plot, Series, Table
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
    rows = tuple(
        (
            cell["name"], cell["status"], cell["parameters"], cell["predicted_buffers"],
            cell["predicted_bytes"], cell["outcome"], cell["seconds"], cell["least_seconds"],
        )
        for cell in cells
    )  # fmt: skip
    return Table(
        id="cells", title="Cells", rows=rows,
        columns=(
            Column(name="cell"), Column(name="status"), Column(name="trained", kind="count"),
            Column(name="buffers", kind="count"), Column(name="bytes", kind="bytes"),
            Column(name="guard"), Column(name="seconds", kind="number"),
            Column(name="at least", kind="number"),
        ),
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
    names = ("cell", "status", "why")
    return (
        _runs(rows, labels), *_fused(settings, rows, labels), *_differences(found, several),
        *(plots if trained else ()),
        Table(
            id="cells", title="Cells", columns=tuple(Column(name=name) for name in names),
            rows=tuple((cell["name"], cell["status"], cell["reason"]) for cell in cells),
            folded=True,
        ),
    )  # fmt: skip


def _estimate(interval: Mapping[str, Any] | None) -> Cell:
    if interval is None or interval["low"] is None:
        return None if interval is None else interval["mean"]
    return interval["mean"], interval["low"], interval["high"]


def _runs(rows: Sequence[Figures], labels: Sequence[str]) -> Table:
    counted = any(mean_of(row, "measured_buffers") is not None for row in rows)
    numbers = ("before", "after", "best", "steps")
    cells = tuple(
        (
            label, ", ".join(f"{count} {status}" for status, count in row["cells"].items()),
            mean_of(row, "first_validation_loss"), _estimate(row["means"]["last_validation_loss"]),
            _estimate(row["means"]["best_validation_loss"]), mean_of(row, "delta_over_step"),
            mean_of(row, "seconds"), mean_of(row, "peak_bytes"),
            mean_of(row, "predicted_buffers"),
            *([mean_of(row, "measured_buffers")] if counted else []),
        )
        for label, row in zip(labels, rows, strict=True)
    )  # fmt: skip
    return Table(
        id="runs", title="Runs, means over seeds", rows=cells,
        columns=(
            Column(name="rank"), Column(name="cells"),
            *(Column(name=name, kind="number", digits=3) for name in numbers),
            Column(name="seconds", kind="number"), Column(name="peak", kind="bytes"),
            Column(name="buffers", kind="count"),
            *([Column(name="counted", kind="count")] if counted else []),
        ),
        caption="Before, after, best: validation loss, nats a token, with 95% intervals. Steps: "
        "size of the delta in quantization steps. Buffers: predicted by the guard.",
    )  # fmt: skip


def _fused(
    settings: SweepSettings, rows: Sequence[Figures], labels: Sequence[str]
) -> Iterator[Table]:
    cells = tuple(
        (
            label, policy, _estimate(row["correlation"][policy]),
            _estimate(row["survival"][policy]), row["extra_bytes"][policy],
        )
        for label, row in zip(labels, rows, strict=True)
        for policy in settings.policies
        if row["survival"][policy] is not None
    )  # fmt: skip
    if cells:
        counts = [kept["n"] for row in rows for kept in row["correlation"].values() if kept]
        seeds = max(counts, default=0)
        yield Table(
            id="fused", title="Correlation and survival of a fuse", rows=cells,
            columns=(
                Column(name="rank"), Column(name="policy"),
                Column(name="correlation", kind="number", digits=3),
                Column(name="survival", kind="share"), Column(name="more bytes", kind="bytes"),
            ),
            caption=f"Means over {seeds} seed{'s' if seeds != 1 else ''}, 95% intervals. "
            "Correlation of a fuse with the trained change; survival: <F,D>/<D,D>.",
        )  # fmt: skip


def _differences(found: Sequence[Figures], several: bool) -> Iterator[Table]:
    rows = tuple(
        (
            d["what"], *([point_name(point_of(d))] if several else []), d["low_rank"],
            d["high_rank"], _estimate(d["difference"]), d["finding"],
        )
        for d in found
    )  # fmt: skip
    if rows:
        yield Table(
            id="differences", title="Highest rank less lowest, seed by seed", rows=rows,
            columns=(
                Column(name="measure"), *([Column(name="at")] if several else []),
                Column(name="low rank", kind="count"), Column(name="high rank", kind="count"),
                Column(name="high less low", kind="change", digits=4),
                Column(name="an effect is"),
            ),
        )  # fmt: skip


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
