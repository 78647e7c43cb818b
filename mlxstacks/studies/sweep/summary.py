"""From cells to a matrix by rank, differences with intervals, and a verdict in words."""

from collections.abc import Callable, Sequence
from typing import Any

from mlxstacks.memory import bytes_in_words
from mlxstacks.stats import mean_interval
from mlxstacks.studies.sweep.cells import Cell, CellResult
from mlxstacks.studies.sweep.settings import SweepSettings

Point = tuple[str, str, int | None]
Measure = Callable[[CellResult], float | None]
Figures = dict[str, Any]
_MOST_POINTS = 3


def _figure(name: str) -> Measure:
    return lambda result: result.figures.get(name)


def _fused(policy: str, name: str) -> Measure:
    return lambda result: result.survival.get(policy, {}).get(name)


# What is averaged over seeds, by name.
MEASURES: dict[str, Measure] = {
    "first_validation_loss": _figure("first_validation_loss"),
    "last_validation_loss": _figure("last_validation_loss"),
    "best_validation_loss": _figure("best_validation_loss"),
    "delta_over_step": lambda r: next(
        (figures.get("delta_over_step") for figures in r.survival.values()), None
    ),
    "seconds": _figure("seconds"),
    "peak_bytes": _figure("peak_bytes"),
    "predicted_buffers": lambda r: r.guard.get("buffers"),
    "measured_buffers": _figure("measured_buffers"),
}


def point_of(figures: Figures) -> Point:
    return figures["layers"], figures["projections"], figures["bits"]


def point_name(point: Point) -> str:
    layers, projections, bits = point
    return f"layers {layers}, {projections}{f', {bits} bits' if bits else ''}"


def mean_of(row: Figures, name: str) -> float | None:
    interval = row["means"][name]
    return None if interval is None else interval["mean"]


def matrix(settings: SweepSettings, results: Sequence[CellResult]) -> list[Figures]:
    """A row for every point (layers, projections, bits) and rank, in the order of the cells.

    cells: how many have which status. means: by measure, with Student's interval over the seeds of
    the trained cells, None where none has it. survival, correlation, extra_bytes: by policy.
    """
    rows = []
    for point, rank in dict.fromkeys((result.cell.point, result.cell.rank) for result in results):
        cells = [r for r in results if r.cell.point == point and r.cell.rank == rank]
        statuses = [result.status for result in cells]
        fused = {
            name: {policy: _mean(cells, _fused(policy, name)) for policy in settings.policies}
            for name in ("survival", "correlation", "extra_bytes")
        }
        extra_bytes = {p: grown and grown["mean"] for p, grown in fused.pop("extra_bytes").items()}
        layers, projections, bits = point
        rows.append({
            "rank": rank, "layers": layers, "projections": projections, "bits": bits,
            "cells": {status: statuses.count(status) for status in dict.fromkeys(statuses)},
            "means": {name: _mean(cells, measure) for name, measure in MEASURES.items()},
            **fused, "extra_bytes": extra_bytes,
        })  # fmt: skip
    return rows


def _mean(results: Sequence[CellResult], measure: Measure) -> Figures | None:
    values = [value for result in results if (value := measure(result)) is not None]
    return mean_interval(values).as_json() if values else None


def differences(settings: SweepSettings, results: Sequence[CellResult]) -> list[Figures]:
    """Loss, size of the delta and survival of the highest trained rank less the lowest, at each
    point, paired by seed. finding: shown, not shown (the interval holds 0), or not judged (one
    seed: no interval).
    """
    measures = {name: MEASURES[name] for name in ("last_validation_loss", "delta_over_step")}
    measures |= {f"survival {policy}": _fused(policy, "survival") for policy in settings.policies}
    trained = {r.cell: r for r in results if r.status == "trained"}
    found = []
    for point in dict.fromkeys(cell.point for cell in trained):
        ranks = sorted({cell.rank for cell in trained if cell.point == point})
        layers, projections, bits = point
        for what, measure in measures.items() if len(ranks) > 1 else ():
            pairs = _pairs(trained, point, ranks[0], ranks[-1], measure)
            if not pairs:
                continue
            difference = mean_interval([high - low for low, high in pairs])
            judged = "shown" if difference.excludes(0.0) else "not shown"
            found.append({
                "what": what, "layers": layers, "projections": projections, "bits": bits,
                "low_rank": ranks[0], "high_rank": ranks[-1], "difference": difference.as_json(),
                "finding": "not judged" if difference.low is None else judged,
            })  # fmt: skip
    return found


def _pairs(
    trained: dict[Cell, CellResult], point: Point, low: int, high: int, measure: Measure
) -> list[tuple[float, float]]:
    """Values of both ranks, seed by seed, where both have one."""
    pairs = []
    for cell, result in trained.items():
        other = trained.get(Cell(high, cell.seed, *point))
        if cell.point == point and cell.rank == low and other is not None:
            values = measure(result), measure(other)
            if values[0] is not None and values[1] is not None:
                pairs.append((values[0], values[1]))
    return pairs


# --- in words -------------------------------------------------------------------------------------


def verdict(settings: SweepSettings, rows: Sequence[Figures], found: Sequence[Figures]) -> str:
    """What happened to the cells; then, at each point, what rank did to loss and delta."""
    points = list(dict.fromkeys(map(point_of, rows)))
    sentences = [_cells_sentence(settings, rows)]
    for point in points[:_MOST_POINTS]:
        opening = f"[{point_name(point)}] " if len(points) > 1 else ""
        trained = [
            row for row in rows
            if point_of(row) == point and mean_of(row, "peak_bytes") is not None
        ]  # fmt: skip
        if trained:
            here = [difference for difference in found if point_of(difference) == point]
            sentences += _point_sentences(opening, settings, trained, here)
    if len(points) > _MOST_POINTS:
        sentences.append(f"{len(points) - _MOST_POINTS} more points are in the report.")
    return " ".join(sentences)


def _cells_sentence(settings: SweepSettings, rows: Sequence[Figures]) -> str:
    total: dict[str, int] = {}
    for row in rows:
        for status, count in row["cells"].items():
            total[status] = total.get(status, 0) + count
    ranks = ", ".join(map(str, sorted({row["rank"] for row in rows})))
    seeds, count = len(settings.seeds), sum(total.values())
    opening = f"Ranks {ranks}, {seeds} seed{'s' if seeds > 1 else ''}: "
    if set(total) == {"trained"}:
        return f"{opening}{'all ' if count > 1 else ''}{count} cells trained."
    parts = ", ".join(f"{n} {status}" for status, n in total.items())
    lost = sorted({row["rank"] for row in rows if set(row["cells"]) - {"trained"}})
    return f"{opening}{parts} (not all of rank {', '.join(map(str, lost))})."


def _point_sentences(
    opening: str, settings: SweepSettings, rows: Sequence[Figures], found: Sequence[Figures]
) -> list[str]:
    loss = next((d for d in found if d["what"] == "last_validation_loss"), None)
    words = [opening + _loss_sentence(rows, loss)] if loss else []
    steps = [size for row in rows if (size := mean_of(row, "delta_over_step")) is not None]
    if steps:
        span = _span([f"{size:.3f}" for size in steps])
        words.append(f"From low to high rank the delta is {span} of a quantization step.")
    fused = []
    for policy in settings.policies:
        survival = [kept["mean"] for row in rows if (kept := row["survival"][policy])]
        if survival:
            grown = max(row["extra_bytes"][policy] or 0.0 for row in rows)
            cost = f" (for up to {bytes_in_words(int(grown))} more)" if grown else ""
            along = [kept["mean"] for row in rows if (kept := row["correlation"][policy])]
            shares = _span([f"{100 * share:.0f}%" for share in survival])
            close = f"correlation {_span([f'{r:.2f}' for r in along])}, " if along else ""
            fused.append(f"{policy}: {close}survival {shares}{cost}")
    if fused:
        words.append(f"Fused by {'; '.join(fused)}.")
    predicted = [int(b) for row in rows if (b := mean_of(row, "predicted_buffers")) is not None]
    if predicted:
        same = min(predicted) == max(predicted)
        span = f"{predicted[0]:,}" if same else f"{min(predicted):,} to {max(predicted):,}"
        word = "the same for every rank" if same else "by rank"
        words.append(f"Predicted live buffers: {span}, {word}.")
    return words


def _loss_sentence(rows: Sequence[Figures], loss: Figures) -> str:
    by_rank = {row["rank"]: mean_of(row, "last_validation_loss") for row in rows}
    low_rank, high_rank, difference = loss["low_rank"], loss["high_rank"], loss["difference"]
    text = (
        f"Validation loss {by_rank[low_rank]:.3f} at rank {low_rank}, {by_rank[high_rank]:.3f} at "
        f"rank {high_rank}; difference {difference['mean']:+.3f}"
    )
    if difference["low"] is None:
        return f"{text}, one seed, so nothing follows from it."
    interval = f"({difference['low']:+.3f} to {difference['high']:+.3f}, {difference['n']} seeds)"
    shown = loss["finding"] == "shown"
    return f"{text} {interval}: {'rank matters here' if shown else 'no effect of rank is shown'}."


def _span(values: Sequence[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
