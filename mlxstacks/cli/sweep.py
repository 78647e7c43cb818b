"""Runs `mlxstacks sweep`, with nano's exports where the model is nano, and prints its result."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output
from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.stats import MeanInterval
    from mlxstacks.studies.buffers.run import BufferReport
    from mlxstacks.studies.sweep.report import PlannedCell, SweepReport
    from mlxstacks.studies.sweep.settings import SweepSettings
    from mlxstacks.studies.sweep.summary import MatrixRow

_MOST_ROWS, _MOST_POINTS = 40, 6
_RUN_COLUMNS = ("rank", "cells", "before", "after", "best", "seconds", "peak", "buffers")


def run(
    settings: "SweepSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "SweepReport":
    """The sweep. nano is exported at whatever widths are asked for; studies know no nano."""
    from mlxstacks.nano.exports import nano_paths
    from mlxstacks.studies.sweep import rank_sweep

    base_at = None
    # a model of one's own has {bits} in its name wherever there are bits
    if settings.bits and settings.model == str(nano_paths().model_path):
        base_at = _nano_at
    return rank_sweep.run(settings, base_at=base_at, dry_run=dry_run, progress=progress)


def _nano_at(bits: int | None) -> str:
    from mlxstacks.nano.exports import nano_paths

    return str(nano_paths(bits).model_path)


def render(console: "Console", report: "SweepReport") -> None:
    """The cells that are planned; or a line for each rank, the survival matrix, the verdict."""
    if report.status == "planned":
        _render_plan(console, report)
        return
    points = list(dict.fromkeys(row.point for row in report.rows))
    for point in points[:_MOST_POINTS]:
        rows = [row for row in report.rows if row.point == point]
        _render_point(console, rows, report.settings["policies"], len(points) > 1)
    if len(points) > _MOST_POINTS:
        console.print(f"... and {len(points) - _MOST_POINTS} more points; all in the report")
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    plots = f", plots {', '.join(report.plots)}" if report.plots else ""
    console.print(f"Wrote {report.save_path}: sweep_report.json, cells{plots}.", markup=False)
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _render_point(
    console: "Console", rows: list["MatrixRow"], policies: list[str], named: bool
) -> None:
    """Runs and survival of one point, a line for each rank."""
    from mlxstacks.studies.sweep.summary import point_name

    counted = any(row.mean("measured_buffers") is not None for row in rows)
    columns = [*_RUN_COLUMNS, *(["counted"] if counted else [])]
    title = point_name(rows[0].point) if named else None
    console.print(output.table(columns, [_run_row(row, counted) for row in rows], title=title))
    kept = [row for row in rows if any(row.survival.values())]
    if kept:
        columns = ["rank", "steps", *policies]
        intervals = [interval for row in kept for interval in row.correlation.values()]
        seeds = max((interval.n for interval in intervals if interval), default=0)
        title = (
            f"correlation of a fuse with the trained change (survival, <F,D>/<D,D>); means over "
            f"{seeds} seed{'s' if seeds != 1 else ''}, 95% intervals"
        )
        table = output.table(columns, [_survival_row(row, policies) for row in kept], title=title)
        console.print(table)


def _run_row(row: "MatrixRow", counted: bool) -> list[output.Cell]:
    peak, before = row.mean("peak_bytes"), row.mean("first_validation_loss")
    return [
        row.rank,
        ", ".join(f"{count} {status}" for status, count in row.cells.items()),
        None if before is None else f"{before:.3f}",
        _loss(row.means["last_validation_loss"]),
        _loss(row.means["best_validation_loss"]),
        row.mean("seconds"),
        None if peak is None else bytes_in_words(int(peak)),
        _count(row, "predicted_buffers"),
        *([_count(row, "measured_buffers")] if counted else []),
    ]


def _count(row: "MatrixRow", name: str) -> str | None:
    found = row.mean(name)
    return None if found is None else f"{found:,.0f}"


def _survival_row(row: "MatrixRow", policies: list[str]) -> list[output.Cell]:
    steps = row.mean("delta_over_step")
    cells: list[output.Cell] = [row.rank, None if steps is None else f"{steps:.3f}"]
    for policy in policies:
        survival, correlation = row.survival[policy], row.correlation[policy]
        if survival is None or correlation is None:
            cells.append(None)
            continue
        spread = ""
        if correlation.low is not None and correlation.high is not None:
            spread = f" +-{(correlation.high - correlation.low) / 2:.2f}"
        cells.append(f"{correlation.mean:.3f}{spread} ({100 * survival.mean:.0f}%)")
    return cells


def _loss(found: "MeanInterval | None") -> str | None:
    if found is None:
        return None
    if found.low is None or found.high is None:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} +-{(found.high - found.low) / 2:.3f}"


def _render_plan(console: "Console", report: "SweepReport") -> None:
    columns = ["cell", "status", "trained", "buffers", "bytes", "guard", "seconds"]
    rows = [_plan_row(cell) for cell in report.planned[:_MOST_ROWS]]
    console.print(output.table(columns, rows))
    hidden = len(report.planned) - _MOST_ROWS
    if hidden > 0:
        console.print(f"... and {hidden} more cells; all with --json")
    if any(cell.least_seconds is not None for cell in report.planned):
        console.print(
            "seconds: what the products alone take at this machine's speed; the finished cells of "
            "an interrupted sweep give better ones",
            style="dim",
        )
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    console.print(
        f"Planned only: {len(report.planned)} cells into {report.save_path}.", markup=False
    )


def _plan_row(cell: "PlannedCell") -> list[output.Cell]:
    seconds = cell.seconds if cell.seconds is not None else cell.least_seconds
    least = ">" if cell.seconds is None else ""
    return [
        cell.name,
        cell.status,
        cell.parameters,
        cell.predicted_buffers,
        output.bytes_text(cell.predicted_bytes),
        cell.outcome,
        None if seconds is None else f"{least}{seconds:,.1f}",
    ]


def render_buffers(console: "Console", report: "BufferReport") -> None:
    """The plan; then counts by condition and rank, differences, and the verdict."""
    facts: dict[str, Any] = {key: output.setting(value) for key, value in report.plan.items()}
    if report.analysis is None:
        console.print(output.details({**facts, "plan sha256": report.plan_sha256}))
        console.print(f"Planned only: {report.arms} runs into {report.save_path}.", markup=False)
        return
    found = report.analysis
    by_place = {(c.condition, c.rank): c for c in found.comparisons}
    rows: list[list[output.Cell]] = []
    for row in found.rows:
        compared = by_place.get((row.condition, row.rank))
        rows.append(
            [
                *row.condition,
                row.rank,
                f"{row.peaks[0]:,} to {row.peaks[1]:,}",
                None if compared is None else _difference(compared.equivalence),
                None if compared is None else f"{compared.largest:+.2%}",
                f"{row.growth_per_step:+.2f}",
            ]
        )
    columns = ["trainer", "checkpointing", "lengths", "rank", "live buffers at the peak",
               "mean difference (90%)", "largest", "growth a step"]  # fmt: skip
    console.print(output.table(columns, rows))
    for name, effect in found.controls.items():
        console.print(f"row length, shortest to longest: {effect:+.0%} ({name})", style="dim")
    console.print(f"Plan {report.plan_sha256[:16]}, {report.arms} runs: {report.save_path}")
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _difference(interval: "MeanInterval") -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.mean:+.3%}"
    return f"{interval.mean:+.3%} ({interval.low:+.3%} to {interval.high:+.3%})"
