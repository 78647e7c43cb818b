"""`mlxstacks sweep buffers`: does rank move the number of live buffers?

Live buffers are what Metal limits (499,000 a process). A published table has LoRA runs of rank 2, 4
and 8 meet that limit at different steps and in no order; whether rank has a part in it is tested
here by counting them in MLX's allocator. The plan (hypothesis, ranks, conditions, seeds,
margins, rules) is written and hashed before the first run; an interrupted experiment is resumed.

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

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, Literal

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import PLACES
from mlxstacks.guard.counting import counter
from mlxstacks.stats import MeanInterval, mean_interval
from mlxstacks.studies.buffers.arms import Arm, ArmRecord, adapted_model, arms_of
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.study.answer_log import whole_lines
from mlxstacks.study.child_process import how_it_ended, run_child
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Standing, Table
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.plan import PLAN
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import recorded_fingerprint, work_path

Outcome = Literal["equal", "moves", "undecided", "invalid"]
Condition = tuple[str, str, str]
EQUIVALENCE_CONFIDENCE, FAMILY_CONFIDENCE = 0.90, 0.95
# Lines at which an imagined limit is crossed, as a share of the highest count of a condition.
CROSSING_SHARE = 0.9
_MOST_RUNS = 10_000


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


def analyse(settings: BufferSettings, records: Sequence[ArmRecord]) -> Analysis:
    """Judge complete records by the rules above, with growth and crossings."""
    # condition -> rank -> order seed -> record
    arms: dict[Condition, dict[int, dict[int, ArmRecord]]] = {}
    for record in records:
        by_rank = arms.setdefault(record.arm.condition, {})
        by_rank.setdefault(record.arm.rank, {})[record.arm.order_seed] = record
    lowest, *others = sorted(settings.ranks)
    family = 1 - (1 - FAMILY_CONFIDENCE) / (len(arms) * len(others))
    comparisons, rows = [], []
    for condition, by_rank in arms.items():
        highest = max(max(r.peaks) for runs in by_rank.values() for r in runs.values())
        for rank in sorted(settings.ranks):
            row = _row(condition, rank, by_rank[rank], settings.warmup_steps, highest)
            rows.append(row)
            if rank != lowest:
                runs = by_rank[lowest], by_rank[rank]
                comparisons.append(_compare(condition, rank, *runs, settings, family))
    controls = _controls(settings, records)
    growth = max((row.growth_per_step for row in rows), key=abs)
    outcome = _outcome(settings, comparisons, controls)
    verdict = _answer(settings, outcome, comparisons, controls)
    verdict += _remarks(settings, outcome, controls, rows, growth)
    return Analysis(outcome, verdict, comparisons, rows, controls, growth)


def _compare(
    condition: Condition,
    rank: int,
    lowest: Mapping[int, ArmRecord],
    runs: Mapping[int, ArmRecord],
    settings: BufferSettings,
    family: float,
) -> Comparison:
    """lowest, runs: by order seed, of the lowest rank and of this one."""
    means, largest = [], 0.0
    for seed in settings.order_seeds:
        if lowest[seed].tokens != runs[seed].tokens:
            raise ValueError(
                f"{condition}, seed {seed}: rank {rank} saw other rows than the lowest"
            )
        pairs = list(zip(lowest[seed].peaks, runs[seed].peaks, strict=True))
        relative = [count / base - 1 for base, count in pairs[settings.warmup_steps :]]
        means.append(fmean(relative))
        largest = max([largest, *relative], key=abs)
    equivalence = mean_interval(means, EQUIVALENCE_CONFIDENCE)
    return Comparison(condition, rank, equivalence, mean_interval(means, family), largest)


def _row(
    condition: Condition, rank: int, runs: Mapping[int, ArmRecord], warmup: int, highest: int
) -> Row:
    peaks = [peak for record in runs.values() for peak in record.peaks[warmup:]]
    line = CROSSING_SHARE * highest
    crossings = {
        seed: next((step for step, peak in enumerate(record.peaks, 1) if peak >= line), None)
        for seed, record in runs.items()
    }
    left = [record.after[warmup:] for record in runs.values()]
    slopes = [linear_regression(range(len(counts)), counts).slope for counts in left]
    peak_bytes = max(max(record.peak_bytes) for record in runs.values())
    span = min(peaks), max(peaks)
    return Row(condition, rank, span, peak_bytes, max(slopes, key=abs), crossings)


def _controls(settings: BufferSettings, records: Sequence[ArmRecord]) -> dict[str, float]:
    """Count of the longest rows over that of the shortest, less 1, where lengths vary."""
    effects: dict[str, list[float]] = {}
    for record in records:
        if record.arm.length_mode != "variable":
            continue
        pairs = list(zip(record.tokens, record.peaks, strict=True))[settings.warmup_steps :]
        shortest = fmean(p for t, p in pairs if t == min(pairs)[0])
        longest = fmean(p for t, p in pairs if t == max(pairs)[0])
        name = f"{record.arm.trainer}, checkpointing {record.arm.checkpointing}"
        effects.setdefault(name, []).append(longest / shortest - 1)
    return {name: fmean(values) for name, values in effects.items()}


def _outcome(
    settings: BufferSettings, comparisons: Sequence[Comparison], controls: Mapping[str, float]
) -> Outcome:
    # mlx-lm's loop is what the claim is about, and what must answer to row length.
    needed = [value for name, value in controls.items() if name.startswith("mlx-lm")]
    if any(value < settings.least_effect for value in needed or controls.values()):
        return "invalid"
    if all(c.equivalence.within(settings.margin) for c in comparisons):
        return "equal"
    moves = (
        c.difference.excludes(0.0) and abs(c.difference.mean) >= settings.margin
        for c in comparisons
    )  # fmt: skip
    return "moves" if any(moves) else "undecided"


def _answer(
    settings: BufferSettings,
    outcome: Outcome,
    comparisons: Sequence[Comparison],
    controls: Mapping[str, float],
) -> str:
    """The answer to the question, or why there is none."""
    ranks, margin = ", ".join(map(str, sorted(settings.ranks))), f"{settings.margin:.1%}"
    worst = max(comparisons, key=lambda c: abs(c.largest))
    where = f"{_named(worst.condition)}, rank {worst.rank}"
    size = f"ranks {ranks} differ by {worst.largest:+.3%} at most in any step ({where})"
    seeds = f"{len(settings.order_seeds)} order seeds"
    if outcome == "invalid":
        return (
            "Invalid: row length, the positive control, moves the count by only "
            f"{min(controls.values(), default=0.0):.0%}; nothing follows about rank."
        )
    if outcome == "undecided":
        return (
            f"Undecided: {size}; with {seeds} an interval reaches beyond {margin}, and none shows "
            "a difference that large."
        )
    if outcome == "equal":
        mean = max((c.equivalence.mean for c in comparisons), key=abs)
        return (
            f"Rank does not move the count here: {size}; every 90% interval lies within {margin}, "
            f"{seeds} a condition, and the largest mean difference is {mean:+.3%}."
        )
    moved = [c for c in comparisons if abs(c.difference.mean) >= settings.margin]
    most = max(moved, key=lambda c: abs(c.difference.mean))
    low, high = most.difference.low, most.difference.high
    assert low is not None
    assert high is not None
    return (
        f"Rank moves the count here: rank {most.rank} against {min(settings.ranks)} by "
        f"{most.difference.mean:+.1%} ({low:+.1%} to {high:+.1%}) in {_named(most.condition)}, and "
        f"in {len(moved)} of {len(comparisons)} comparisons by at least {margin}."
    )


def _remarks(
    settings: BufferSettings,
    outcome: Outcome,
    controls: Mapping[str, float],
    rows: Sequence[Row],
    growth: float,
) -> str:
    """Sentences on row length, on when runs meet their highest counts, on growth."""
    words = ""
    if controls and outcome != "invalid":
        effects = [f"{effect:+.0%} ({name})" for name, effect in controls.items()]
        words += f" From the shortest to the longest rows it moves: {', '.join(effects)}."
    variable = [row for row in rows if row.condition[2] == "variable"]
    first = {row.condition: row.crossings for row in reversed(variable)}
    # Ranks cross at the same step for every order, and orders at different ones.
    same = all(row.crossings == first[row.condition] for row in variable)
    differs = any(len(set(row.crossings.values())) > 1 for row in variable)
    steps = [step for row in variable for step in row.crossings.values() if step is not None]
    if steps and same and differs:
        words += (
            f" When a run first meets its highest counts, step {min(steps)} to {max(steps)}, "
            "depends on the order of its rows and not on rank."
        )
    grows = "grows" if abs(growth) >= settings.growth_margin else "does not grow"
    words += f" Over the steps a run {grows}: {growth:+.2f} buffers a step at most."
    return words + " Steps were eager, not compiled."


def _named(condition: Condition) -> str:
    trainer, checkpointing, lengths = condition
    return f"{trainer}, checkpointing {checkpointing}, {lengths} lengths"


def plan_table(plan: Mapping[str, Any], arms: int) -> Table:
    def in_words(value: Any) -> str:
        if isinstance(value, Mapping):
            return "; ".join(f"{name}: {part}" for name, part in value.items())
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    facts = {name: in_words(value) for name, value in {"runs": arms, **plan}.items()}
    return Table.of_facts("plan", "The plan", facts)


def blocks(analysis: Analysis, margin: float) -> tuple[Block, ...]:
    """Counts by condition and rank with their differences; controls; the differences drawn."""
    compared = {(c.condition, c.rank): c for c in analysis.comparisons}
    rows = []
    for row in analysis.rows:
        cells: tuple[Cell, ...] = (None,) * 3
        if comparison := compared.get((row.condition, row.rank)):
            intervals = (comparison.equivalence, comparison.difference)
            cells = (*map(_percent, intervals), 100 * comparison.largest)
        low, high = row.peaks
        rows.append((*row.condition, row.rank, f"{low:,} to {high:,}", *cells, row.growth_per_step))
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
        {"runs": "text", "shortest to longest": ("share", 0)}, analysis.controls.items(),
    )  # fmt: skip
    return ranks, controls, _difference_plot(analysis.comparisons, margin)


def _percent(interval: MeanInterval) -> Cell:
    if interval.low is None or interval.high is None:
        return 100 * interval.mean
    return 100 * interval.mean, 100 * interval.low, 100 * interval.high


def _difference_plot(comparisons: Sequence[Comparison], margin: float) -> Plot:
    names = tuple(f"rank {c.rank}, {', '.join(c.condition)}" for c in comparisons)
    cells = (c.equivalence.cell for c in comparisons)
    series = Series.of_intervals("equivalence", cells, scale=100)
    title = "Live buffers by rank"
    values = ", ".join(f"{name} {value:.3g}%" for name, value in zip(names, series.y, strict=True))
    return Plot(
        id="buffers", title=title, kind="intervals", categories=names,
        series=(series,), x_label="difference to the lowest rank, %", form="{:.2f}",
        references={
            "no difference": 0.0, "margin below": -100 * margin, "margin above": 100 * margin,
        },
        alt=f"{title}, less the lowest rank: {values}.",
    )  # fmt: skip


ABOUT = {
    "kind": "sweep buffers",
    "title": "Live buffers",
    "question": "Does rank move the number of live buffers?",
}
RECORDS, LOG = "arms.jsonl", "log.txt"
HYPOTHESIS = (
    "The number of live buffers at the peak of a training step does not depend on the rank of the "
    "LoRA, whatever the row lengths, the order of rows, and checkpointing."
)
RULES = {
    "difference": "mean over compared steps of count / count of the lowest rank - 1, by order seed",
    "equal": f"every {EQUIVALENCE_CONFIDENCE:.0%} interval inside the margin, all conditions",
    "moves": "some mean beyond the margin whose interval excludes 0, family-wise "
    f"{FAMILY_CONFIDENCE:.0%} (Bonferroni)",
    "invalid": "row length moves mlx-lm's count by less than least_effect",
    "processes": "one for each trainer, checkpointing, rank and order seed",
}


def run(
    settings: BufferSettings,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> Result:
    """Write the plan, run what is missing, judge, write result and records to `save_path`.

    Raises:
        InputError: model, layers, projections or ranks cannot be used, buffers cannot be counted
            here, or the work directory holds an experiment with another plan.
        RuntimeError: a process failed; the arms that are done are kept.
    """
    if settings.model is None or settings.save_path is None:
        raise InputError("sweep buffers needs model and save_path")
    if not dry_run:
        counter()  # before a plan is written; the runs count in processes of their own
    return run_study(_Buffers(settings, progress), dry_run=dry_run, progress=progress)


class _Buffers(Study):
    artifacts = provenance = (RECORDS,)
    settings: BufferSettings

    def __init__(self, settings: BufferSettings, progress: Callable[..., None] | None) -> None:
        self.settings, self.progress = settings, progress
        self.inputs = (settings.model,)
        self.arms = [arm for together in arms_of(settings) for arm in together]

    def planned(self) -> Result:
        """All that is decided beforehand. Raises: InputError for what does not fit the model."""
        settings = self.settings
        checkpoint = open_checkpoint(user_path(str(settings.model)))
        recorded = recorded_fingerprint(
            work_path(self.work_target) / PLAN, "base_fingerprint", resume=settings.resume
        )
        try:
            adapted_model(settings, max(settings.ranks))
        except ValueError as error:
            raise InputError(str(error)) from None
        plan = {
            "hypothesis": HYPOTHESIS,
            "rules": RULES,
            "base_fingerprint": fingerprint(checkpoint, recorded),
            **settings.plan(),
        }
        return Result(
            **ABOUT, status="planned", standing=Standing(status="planned"), plan=plan,
            settings=settings.model_dump(mode="json", exclude=PLACES),
            data={"arms": len(self.arms)}, blocks=(plan_table(plan, len(self.arms)),),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        for together in arms_of(self.settings):
            yield Step(f"rank {together[0].rank}", partial(self._run_arms, together))

    def conclude(self, work: Path) -> Result:
        return concluded(self.settings, work)

    def _run_arms(self, together: list[Arm], work: Path) -> None:
        """One process for the arms of these that have no record yet."""
        records = _kept_records(work)
        missing = [vars(arm) for arm in together if arm not in records]
        if not missing:
            return

        if (work / RECORDS).is_file():  # without half a line, which a kill leaves
            lines = whole_lines((work / RECORDS).read_bytes())
            (work / RECORDS).write_bytes(b"".join(line + b"\n" for line in lines))

        def keep(message: dict[str, Any]) -> None:
            record = ArmRecord.of(message)
            with (work / RECORDS).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(message) + "\n")
            records[record.arm] = record
            if self.progress:
                self.progress(len(records), len(self.arms), f"rank {record.arm.rank}")

        specification = {"settings": self.settings.model_dump(mode="json"), "arms": missing}
        log = work / LOG
        code = run_child("mlxstacks.studies.buffers.arms", specification, log, keep)
        if code:
            raise RuntimeError(
                f"a counting process ended early, {how_it_ended(code, log)} (all of it in {log}); "
                f"{len(records)} of {len(self.arms)} runs are kept; the same command resumes"
            )


def concluded(settings: BufferSettings, directory: Path) -> Result:
    """The result of the records in `directory`. Raises: KeyError for an arm without one."""
    records = _kept_records(directory)
    arms = [arm for together in arms_of(settings) for arm in together]
    analysis = analyse(settings, [records[arm] for arm in arms])
    return Result(
        **ABOUT, status="done", outcome=analysis.outcome, verdict=analysis.verdict,
        data={"arms": len(arms), "analysis": asdict(analysis)},
        blocks=blocks(analysis, settings.margin),
    )  # fmt: skip


def conclude_again(result: Result, directory: Path) -> Result:
    """What follows from the records of a finished experiment. Raises: ValueError, KeyError."""
    settings = BufferSettings.model_validate(result.settings)
    if len(settings.ranks) * len(settings.order_seeds) > _MOST_RUNS:
        raise ValueError("more runs than any experiment has")
    return concluded(settings, directory)


def _kept_records(work: Path) -> dict[Arm, ArmRecord]:
    """What the processes wrote; a half-written last line does not count."""
    path = work / RECORDS
    lines = whole_lines(path.read_bytes()) if path.is_file() else []
    records = [ArmRecord.of(json.loads(line)) for line in lines]
    return {record.arm: record for record in records}
