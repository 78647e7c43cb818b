"""From cells to a matrix by rank, differences with intervals, and a verdict in words."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxstacks.memory import bytes_in_words
from mlxstacks.stats import MeanInterval, mean_interval
from mlxstacks.studies.sweep.cells import Cell, CellResult
from mlxstacks.studies.sweep.settings import SweepSettings

Point = tuple[str, str, int | None]
Measure = Callable[[CellResult], float | None]

# What is averaged over seeds, by name.
MEASURES: dict[str, Measure] = {
    "first_validation_loss": lambda r: r.figure("first_validation_loss"),
    "last_validation_loss": lambda r: r.figure("last_validation_loss"),
    "best_validation_loss": lambda r: r.figure("best_validation_loss"),
    "delta_over_step": lambda r: next(
        (found.get("delta_over_step") for found in r.survival.values()), None
    ),
    "seconds": lambda r: r.figure("seconds"),
    "peak_bytes": lambda r: r.figure("peak_bytes"),
    "predicted_buffers": lambda r: r.guard.get("buffers"),
    "measured_buffers": lambda r: r.figure("measured_buffers"),
}


@dataclass(frozen=True)
class MatrixRow:
    """A rank at a point (layers, projections, bits), over its seeds.

    cells: how many have which status. means: by measure, over the trained cells; None where none
    has it. survival, correlation: by policy.
    """

    point: Point
    rank: int
    cells: dict[str, int]
    means: dict[str, MeanInterval | None]
    survival: dict[str, MeanInterval | None]
    correlation: dict[str, MeanInterval | None]
    extra_bytes: dict[str, float | None]

    def mean(self, name: str) -> float | None:
        found = self.means.get(name)
        return None if found is None else found.mean

    def as_json(self) -> dict[str, Any]:
        layers, projections, bits = self.point
        document = asdict(self) | {"layers": layers, "projections": projections, "bits": bits}
        del document["point"]
        return document


@dataclass(frozen=True)
class Difference:
    """Highest rank less lowest rank at a point, paired by seed."""

    point: Point
    what: str
    low_rank: int
    high_rank: int
    difference: MeanInterval

    @property
    def finding(self) -> str:
        """shown, not shown (the interval holds 0), or not judged (one seed: no interval)."""
        if self.difference.low is None:
            return "not judged"
        return "shown" if self.difference.excludes(0.0) else "not shown"

    def as_json(self) -> dict[str, Any]:
        layers, projections, bits = self.point
        document = asdict(self) | {"layers": layers, "projections": projections, "bits": bits}
        del document["point"]
        return document | {"finding": self.finding}


def matrix(settings: SweepSettings, results: Sequence[CellResult]) -> list[MatrixRow]:
    """A row for every point and rank, in the order of the cells."""
    places = dict.fromkeys((result.cell.point, result.cell.rank) for result in results)
    return [_row(settings, results, point, rank) for point, rank in places]


def _row(
    settings: SweepSettings, results: Sequence[CellResult], point: Point, rank: int
) -> MatrixRow:
    own = [r for r in results if r.cell.point == point and r.cell.rank == rank]
    statuses = [result.status for result in own]
    return MatrixRow(
        point,
        rank,
        {status: statuses.count(status) for status in dict.fromkeys(statuses)},
        {name: _mean(own, measure) for name, measure in MEASURES.items()},
        {p: _mean(own, _fused(p, "survival")) for p in settings.policies},
        {p: _mean(own, _fused(p, "correlation")) for p in settings.policies},
        {p: getattr(_mean(own, _fused(p, "extra_bytes")), "mean", None) for p in settings.policies},
    )


def _fused(policy: str, name: str) -> Measure:
    return lambda result: result.survived(policy, name)


def _mean(results: Sequence[CellResult], measure: Measure) -> MeanInterval | None:
    found = [value for result in results if (value := measure(result)) is not None]
    return mean_interval(found) if found else None


def differences(settings: SweepSettings, results: Sequence[CellResult]) -> list[Difference]:
    """Loss, size of the delta and survival of the highest trained rank against the lowest."""
    measures = {name: MEASURES[name] for name in ("last_validation_loss", "delta_over_step")}
    for policy in settings.policies:
        measures[f"survival {policy}"] = _fused(policy, "survival")
    trained = {r.cell: r for r in results if r.status == "trained"}
    found = []
    for point in dict.fromkeys(cell.point for cell in trained):
        ranks = sorted({cell.rank for cell in trained if cell.point == point})
        if len(ranks) < 2:
            continue
        for what, measure in measures.items():
            pairs = _pairs(trained, point, ranks[0], ranks[-1], measure)
            if pairs:
                interval = mean_interval([high - low for low, high in pairs])
                found.append(Difference(point, what, ranks[0], ranks[-1], interval))
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


def verdict(settings: SweepSettings, rows: Sequence[MatrixRow], found: Sequence[Difference]) -> str:
    """What happened to the cells; then, at each point, what rank did to loss and delta."""
    points = list(dict.fromkeys(row.point for row in rows))
    sentences = [_cells_sentence(settings, rows)]
    for point in points[:_MOST_POINTS]:
        opening = f"[{point_name(point)}] " if len(points) > 1 else ""
        own = [row for row in rows if row.point == point and row.mean("peak_bytes") is not None]
        if own:
            sentences += _point_sentences(
                opening, settings, own, [d for d in found if d.point == point]
            )
    if len(points) > _MOST_POINTS:
        sentences.append(f"{len(points) - _MOST_POINTS} more points are in the report.")
    return " ".join(sentences)


_MOST_POINTS = 3


def point_name(point: Point) -> str:
    layers, projections, bits = point
    width = f", {bits} bits" if bits else ""
    return f"layers {layers}, {projections}{width}"


def _cells_sentence(settings: SweepSettings, rows: Sequence[MatrixRow]) -> str:
    total: dict[str, int] = {}
    for row in rows:
        for status, count in row.cells.items():
            total[status] = total.get(status, 0) + count
    ranks = ", ".join(map(str, sorted({row.rank for row in rows})))
    seeds = len(settings.seeds)
    count = sum(total.values())
    opening = f"Ranks {ranks}, {seeds} seed{'s' if seeds > 1 else ''}: "
    if set(total) == {"trained"}:
        return f"{opening}{'all ' if count > 1 else ''}{count} cells trained."
    parts = ", ".join(f"{n} {status}" for status, n in total.items())
    lost = sorted({row.rank for row in rows if set(row.cells) - {"trained"}})
    return f"{opening}{parts} (not all of rank {', '.join(map(str, lost))})."


def _point_sentences(
    opening: str,
    settings: SweepSettings,
    rows: Sequence[MatrixRow],
    found: Sequence[Difference],
) -> list[str]:
    loss = next((d for d in found if d.what == "last_validation_loss"), None)
    words = [opening + _loss_sentence(rows, loss)] if loss else []
    steps = [s for row in rows if (s := row.mean("delta_over_step")) is not None]
    if steps:
        size = _span([f"{value:.3f}" for value in steps])
        words.append(f"From low to high rank the delta is {size} of a quantization step.")
    fused = []
    for policy in settings.policies:
        values = [i.mean for row in rows if (i := row.survival[policy]) is not None]
        if values:
            grown = max(row.extra_bytes[policy] or 0.0 for row in rows)
            cost = f" (for up to {bytes_in_words(int(grown))} more)" if grown else ""
            along = [i.mean for row in rows if (i := row.correlation[policy]) is not None]
            shares = _span([f"{100 * value:.0f}%" for value in values])
            close = f"correlation {_span([f'{r:.2f}' for r in along])}, " if along else ""
            fused.append(f"{policy}: {close}survival {shares}{cost}")
    if fused:
        words.append(f"Fused by {'; '.join(fused)}.")
    predicted = [int(b) for row in rows if (b := row.mean("predicted_buffers")) is not None]
    if predicted:
        same = min(predicted) == max(predicted)
        span = f"{predicted[0]:,}" if same else f"{min(predicted):,} to {max(predicted):,}"
        word = "the same for every rank" if same else "by rank"
        words.append(f"Predicted live buffers: {span}, {word}.")
    return words


def _loss_sentence(rows: Sequence[MatrixRow], loss: Difference) -> str:
    by_rank = {row.rank: row.mean("last_validation_loss") for row in rows}
    low, high = by_rank[loss.low_rank], by_rank[loss.high_rank]
    found = loss.difference
    text = (
        f"Validation loss {low:.3f} at rank {loss.low_rank}, {high:.3f} at rank {loss.high_rank}; "
        f"difference {found.mean:+.3f}"
    )
    if found.low is None:
        return f"{text}, one seed, so nothing follows from it."
    interval = f"{text} ({found.low:+.3f} to {found.high:+.3f}, {found.n} seeds)"
    if loss.finding == "shown":
        return f"{interval}: rank matters here."
    return f"{interval}: no effect of rank is shown."


def _span(values: Sequence[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
