"""From counted arms to a verdict: does rank move the number of live buffers?

Runs with the same trainer, checkpointing, lengths and order seed see the same rows, so they are
compared step by step. A difference of a run is the mean over its steps of count / count of the
lowest rank - 1; the order seeds of a condition give the values whose mean and interval are judged.

    equal      in every condition and for every rank, the 90% interval lies inside the margin
               (two one-sided tests at 5%)
    moves      somewhere the mean is at or beyond the margin, and the interval, at 95% shared out
               over all comparisons (Bonferroni), excludes 0
    undecided  anything else
    invalid    the positive control fails: row length, which must move the count, does not
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, linear_regression
from typing import Any, Literal

from mlxstacks.stats import MeanInterval, mean_interval
from mlxstacks.studies.buffers.arms import ArmRecord
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table

Outcome = Literal["equal", "moves", "undecided", "invalid"]
Condition = tuple[str, str, str]
EQUIVALENCE_CONFIDENCE, FAMILY_CONFIDENCE = 0.90, 0.95
# Lines at which an imagined limit is crossed, as a share of the highest count of a condition.
CROSSING_SHARE = 0.9


@dataclass(frozen=True)
class Comparison:
    """A rank against the lowest one in a condition. equivalence, difference: of the mean relative
    difference, at 90% and at the family's confidence. largest: the largest of any step, signed.
    """

    condition: Condition
    rank: int
    equivalence: MeanInterval
    difference: MeanInterval
    largest: float


@dataclass(frozen=True)
class Row:
    """A rank in a condition. peaks: lowest and highest count of a compared step; growth: buffers a
    step that stay, the largest slope of any seed; crossings: by order seed, the first step whose
    count reaches `CROSSING_SHARE` of the highest of the condition, of whatever rank; None: none.
    """

    condition: Condition
    rank: int
    peaks: tuple[int, int]
    peak_bytes: int
    growth_per_step: float
    crossings: dict[int, int | None]


@dataclass(frozen=True)
class Analysis:
    """controls: by trainer and checkpointing, what row length does to the count."""

    outcome: Outcome
    verdict: str
    comparisons: list[Comparison]
    rows: list[Row]
    controls: dict[str, float]
    largest_growth_per_step: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def analyse(settings: BufferSettings, records: Sequence[ArmRecord]) -> Analysis:
    """Judge complete records by the rules above, and tell growth and crossings beside them."""
    conditions = list(dict.fromkeys(record.arm.condition for record in records))
    lowest, others = min(settings.ranks), sorted(settings.ranks)[1:]
    family = 1 - (1 - FAMILY_CONFIDENCE) / (len(conditions) * len(others))
    comparisons = [
        _compare(settings, records, condition, lowest, rank, family)
        for condition in conditions
        for rank in others
    ]
    rows = [_row(settings, records, c, rank) for c in conditions for rank in sorted(settings.ranks)]
    controls = _controls(settings, records)
    growth = max((row.growth_per_step for row in rows), key=abs)
    outcome = _outcome(settings, comparisons, controls)
    verdict = _verdict(settings, outcome, comparisons, controls, rows, growth)
    return Analysis(outcome, verdict, comparisons, rows, controls, growth)


def _of(records: Sequence[ArmRecord], condition: Condition, rank: int) -> dict[int, ArmRecord]:
    """Order seed -> record."""
    return {
        r.arm.order_seed: r for r in records if r.arm.condition == condition and r.arm.rank == rank
    }


def _compare(
    settings: BufferSettings,
    records: Sequence[ArmRecord],
    condition: Condition,
    lowest: int,
    rank: int,
    family: float,
) -> Comparison:
    base, other = _of(records, condition, lowest), _of(records, condition, rank)
    by_seed, largest = [], 0.0
    for seed in settings.order_seeds:
        if base[seed].tokens != other[seed].tokens:
            raise ValueError(f"{condition}, seed {seed}: ranks {lowest} and {rank} saw other rows")
        pairs = zip(base[seed].peaks, other[seed].peaks, strict=True)
        relative = [b / a - 1 for a, b in list(pairs)[settings.warmup_steps :]]
        by_seed.append(fmean(relative))
        largest = max([largest, *relative], key=abs)
    equivalence = mean_interval(by_seed, EQUIVALENCE_CONFIDENCE)
    return Comparison(condition, rank, equivalence, mean_interval(by_seed, family), largest)


def _row(
    settings: BufferSettings, records: Sequence[ArmRecord], condition: Condition, rank: int
) -> Row:
    own = _of(records, condition, rank)
    kept = [r.peaks[settings.warmup_steps :] for r in own.values()]
    line = CROSSING_SHARE * max(max(r.peaks) for r in records if r.arm.condition == condition)
    crossings = {
        seed: next((step for step, peak in enumerate(r.peaks, 1) if peak >= line), None)
        for seed, r in own.items()
    }
    after = [r.after[settings.warmup_steps :] for r in own.values()]
    slopes = [linear_regression(range(len(counts)), counts).slope for counts in after]
    return Row(
        condition, rank, (min(map(min, kept)), max(map(max, kept))),
        max(max(r.peak_bytes) for r in own.values()), max(slopes, key=abs), crossings,
    )  # fmt: skip


def _controls(settings: BufferSettings, records: Sequence[ArmRecord]) -> dict[str, float]:
    """Count of the longest rows over that of the shortest, less 1, where lengths vary."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record.arm.length_mode != "variable":
            continue
        pairs = list(zip(record.tokens, record.peaks, strict=True))[settings.warmup_steps :]
        shortest = fmean(p for t, p in pairs if t == min(pairs)[0])
        longest = fmean(p for t, p in pairs if t == max(pairs)[0])
        name = f"{record.arm.trainer}, checkpointing {record.arm.checkpointing}"
        found.setdefault(name, []).append(longest / shortest - 1)
    return {name: fmean(values) for name, values in found.items()}


def _outcome(
    settings: BufferSettings, comparisons: Sequence[Comparison], controls: dict[str, float]
) -> Outcome:
    # mlx-lm's loop is what the claim is about, and what must answer to row length.
    needed = [value for name, value in controls.items() if name.startswith("mlx-lm")]
    if any(value < settings.least_effect for value in needed or controls.values()):
        return "invalid"
    if all(c.equivalence.within(settings.margin) for c in comparisons):
        return "equal"
    moved = [
        c for c in comparisons
        if c.difference.excludes(0.0) and abs(c.difference.mean) >= settings.margin
    ]  # fmt: skip
    return "moves" if moved else "undecided"


def _verdict(
    settings: BufferSettings,
    outcome: Outcome,
    comparisons: Sequence[Comparison],
    controls: dict[str, float],
    rows: Sequence[Row],
    growth: float,
) -> str:
    words = [_opening(settings, outcome, comparisons, controls)]
    if controls and outcome != "invalid":
        effects = [f"{effect:+.0%} ({name})" for name, effect in controls.items()]
        words.append(f"From the shortest to the longest rows it moves: {', '.join(effects)}.")
    variable = [row for row in rows if row.condition[2] == "variable"]
    steps = [step for row in variable for step in row.crossings.values() if step is not None]
    if steps and _crossings_ignore_rank(variable):
        words.append(
            f"When a run first meets its highest counts, step {min(steps)} to {max(steps)}, "
            "depends on the order of its rows and not on rank."
        )
    grows = abs(growth) >= settings.growth_margin
    words.append(
        f"Over the steps a run {'grows' if grows else 'does not grow'}: {growth:+.2f} buffers a "
        "step at most."
    )
    words.append("MLX's CPU backend, eager steps; Metal was not measured.")
    return " ".join(words)


def _opening(
    settings: BufferSettings,
    outcome: Outcome,
    comparisons: Sequence[Comparison],
    controls: dict[str, float],
) -> str:
    """The answer to the question, or why there is none."""
    ranks = ", ".join(map(str, sorted(settings.ranks)))
    seeds, margin = len(settings.order_seeds), f"{settings.margin:.1%}"
    worst = max(comparisons, key=lambda c: abs(c.largest))
    largest = max(comparisons, key=lambda c: abs(c.equivalence.mean))
    where = f"{_named(worst.condition)}, rank {worst.rank}"
    size = f"{worst.largest:+.3%} at most in any step ({where})"
    if outcome == "invalid":
        return (
            "Invalid: row length, the positive control, moves the count by only "
            f"{min(controls.values(), default=0.0):.0%}; nothing follows about rank."
        )
    if outcome == "moves":
        return f"Rank moves the count here: {_moving(settings, comparisons)}."
    if outcome == "equal":
        return (
            f"Rank does not move the count here: ranks {ranks} differ by {size}; every 90% "
            f"interval lies within {margin}, {seeds} order seeds a condition, and the largest "
            f"mean difference is {largest.equivalence.mean:+.3%}."
        )
    return (
        f"Undecided: ranks {ranks} differ by {size}; with {seeds} order seeds an interval reaches "
        f"beyond {margin}, and none shows a difference that large."
    )


def _crossings_ignore_rank(variable: Sequence[Row]) -> bool:
    """Whether ranks cross at the same step for every order, and orders cross at different ones."""
    by_condition: dict[Condition, list[dict[int, int | None]]] = {}
    for row in variable:
        by_condition.setdefault(row.condition, []).append(row.crossings)
    same = all(found == of_ranks[0] for of_ranks in by_condition.values() for found in of_ranks)
    return same and any(len(set(row.crossings.values())) > 1 for row in variable)


def _moving(settings: BufferSettings, comparisons: Sequence[Comparison]) -> str:
    moved = [c for c in comparisons if abs(c.difference.mean) >= settings.margin]
    most = max(moved, key=lambda c: abs(c.difference.mean))
    low, high = most.difference.low, most.difference.high
    assert low is not None
    assert high is not None
    return (
        f"rank {most.rank} against {min(settings.ranks)} by {most.difference.mean:+.1%} "
        f"({low:+.1%} to {high:+.1%}) in {_named(most.condition)}, and in {len(moved)} of "
        f"{len(comparisons)} comparisons by at least {settings.margin:.1%}"
    )


def _named(condition: Condition) -> str:
    trainer, checkpointing, lengths = condition
    return f"{trainer}, checkpointing {checkpointing}, {lengths} lengths"


# --- for people -----------------------------------------------------------------------------------


def plan_table(plan: Mapping[str, Any], arms: int) -> Table:
    rows = [(name, _in_words(value)) for name, value in {"runs": arms, **plan}.items()]
    return Table.of("plan", "The plan", {"what": "text", "value": "text"}, rows)


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {part}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def blocks(figures: Mapping[str, Any], margin: float) -> tuple[Block, ...]:
    """Counts by condition and rank with their differences; controls. figures: of an `Analysis`."""
    compared = {(tuple(c["condition"]), c["rank"]): c for c in figures["comparisons"]}
    rows = []
    for row in figures["rows"]:
        comparison = compared.get((tuple(row["condition"]), row["rank"]))
        cells: tuple[Cell, ...] = (None,) * 3
        if comparison is not None:
            judged = (_percent(comparison[name]) for name in ("equivalence", "difference"))
            cells = (*judged, 100 * comparison["largest"])
        low, high = row["peaks"]
        peaks = f"{low:,} to {high:,}"
        rows.append((*row["condition"], row["rank"], peaks, *cells, row["growth_per_step"]))
    columns: Columns = {
        "trainer": "text", "checkpointing": "text", "lengths": "text", "rank": "count",
        "live buffers": "text", "mean difference (90%), %": ("change", 3),
        "family's interval, %": ("change", 3), "largest, %": ("change", 3),
        "growth a step": ("change", 2),
    }  # fmt: skip
    ranks = Table.of(
        "ranks", "Live buffers at the peak, by rank", columns, rows,
        caption="Differences: to the lowest rank of the condition.",
    )  # fmt: skip
    controls = Table.of(
        "controls", "Positive control: what row length does",
        {"runs": "text", "shortest to longest": ("share", 0)}, figures["controls"].items(),
    )  # fmt: skip
    return ranks, controls, _difference_plot(figures["comparisons"], margin)


def _percent(interval: Mapping[str, Any]) -> Cell:
    mean, low, high = interval["mean"], interval["low"], interval["high"]
    return 100 * mean if low is None else (100 * mean, 100 * low, 100 * high)


def _difference_plot(comparisons: Sequence[Mapping[str, Any]], margin: float) -> Plot:
    names = tuple(f"rank {c['rank']}, {', '.join(c['condition'])}" for c in comparisons)
    mean, low, high = (
        tuple(
            None if c["equivalence"][end] is None else 100 * c["equivalence"][end]
            for c in comparisons
        )
        for end in ("mean", "low", "high")
    )
    title = "Live buffers by rank"
    values = ", ".join(f"{name} {value:.3g}%" for name, value in zip(names, mean, strict=True))
    return Plot(
        id="buffers", title=title, kind="intervals", categories=names,
        series=(Series(label="equivalence", y=mean, low=low, high=high),),
        x_label="difference to the lowest rank, %", form="{:.2f}",
        references={
            "no difference": 0.0, "margin below": -100 * margin, "margin above": 100 * margin,
        },
        alt=f"{title}, less the lowest rank: {values}.",
    )  # fmt: skip
