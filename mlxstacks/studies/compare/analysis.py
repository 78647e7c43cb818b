"""From cells to differences between arms, seed by seed, and a verdict by the plan's rule.

Every arm is compared with the first one, the control. A difference is arm less control, paired by
seed, with Student's interval over seeds. Only the primary measure is judged:

    better, worse         the interval, its confidence shared out over the arms (Bonferroni), lies
                          on one side of 0, and the mean is at least the margin away from it
    no difference shown   the whole interval lies inside the margin
    undecided             anything else: too few seeds, a cell without a result, unequal steps
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mlxstacks.stats import MeanInterval, mean_interval
from mlxstacks.studies.compare.budget import spent_steps_differ
from mlxstacks.studies.compare.measures import SUMMARY

Outcome = Literal["better", "worse", "no difference shown", "undecided"]
Matrix = dict[str, dict[str, dict[str, MeanInterval]]]
RULES = {
    "difference": "arm less control (the first arm), paired by seed; Student's interval over seeds",
    "better": "the interval below 0 and the mean at least the margin below it",
    "worse": "the interval above 0 and the mean at least the margin above it",
    "no difference shown": "the whole interval inside the margin",
    "undecided": "anything else; also where a cell has no result, or arms that share the budget of "
    "steps did different numbers of steps",
    "family": "for the primary measure the confidence is shared out over the arms (Bonferroni); "
    "all other measures are told, not judged",
}


@dataclass(frozen=True)
class CellValues:
    """A cell that was trained. matrix: mode -> domain trained last -> domain measured -> loss."""

    arm: str
    seed: int
    values: Mapping[str, float | None]
    matrix: Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Rule:
    """Of the plan, what decides."""

    primary: str
    margin: float
    confidence: float
    tolerance: float
    equal_steps: bool


@dataclass(frozen=True)
class ArmResult:
    """An arm against the control; the control's own has means alone.

    means: of each measure over the seeds. differences: of each measure that both have. judged: the
    difference of the primary measure at the family's confidence. matrix: mean loss in each mode;
    matrix_differences: the same, arm less control.
    """

    arm: str
    means: dict[str, MeanInterval]
    differences: dict[str, MeanInterval] = field(default_factory=dict)
    judged: MeanInterval | None = None
    outcome: Outcome | None = None
    reason: str = ""
    matrix: Matrix = field(default_factory=dict)
    matrix_differences: Matrix = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def analyse(
    rule: Rule, arms: Sequence[str], seeds: Sequence[int], cells: Sequence[CellValues]
) -> list[ArmResult]:
    """One result an arm, the control's first. cells: those with a result, in any order."""
    by_arm = {arm: {c.seed: c for c in cells if c.arm == arm} for arm in arms}
    control, *others = arms
    results = [_alone(control, by_arm[control], rule.confidence)]
    for arm in others:
        result = _alone(arm, by_arm[arm], rule.confidence)
        pairs = [
            (by_arm[control][seed], by_arm[arm][seed])
            for seed in seeds
            if seed in by_arm[control] and seed in by_arm[arm]
        ]
        results.append(_against(rule, result, pairs, len(seeds), len(others)))
    return results


def _alone(arm: str, cells: Mapping[int, CellValues], confidence: float) -> ArmResult:
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell.values))
    means = {}
    for name in names:
        found = [v for cell in cells.values() if (v := cell.values.get(name)) is not None]
        if found:
            means[name] = mean_interval(found, confidence)
    matrices = [cell.matrix for cell in cells.values()]
    return ArmResult(arm, means, matrix=_matrix(matrices, confidence))


def _matrix(matrices: Sequence[Mapping[str, Any]], confidence: float) -> Matrix:
    """Each entry's mean over cells that all have it."""
    if not matrices:
        return {}
    return {
        mode: {
            row: {
                column: mean_interval([one[mode][row][column] for one in matrices], confidence)
                for column in columns
            }
            for row, columns in rows.items()
        }
        for mode, rows in matrices[0].items()
    }


def _against(
    rule: Rule, result: ArmResult, pairs: Sequence[tuple[CellValues, CellValues]], seeds: int,
    arms: int,
) -> ArmResult:  # fmt: skip
    differences = {}
    for name in result.means:
        found = paired(pairs, name)
        if found:
            differences[name] = mean_interval(found, rule.confidence)
    family = 1 - (1 - rule.confidence) / arms
    primary = paired(pairs, rule.primary)
    judged = mean_interval(primary, family) if primary else None
    outcome, reason = judge(rule, judged, seeds, pairs)
    return ArmResult(
        result.arm, result.means, differences, judged, outcome, reason, result.matrix,
        _matrix([_less(own.matrix, base.matrix) for base, own in pairs], rule.confidence),
    )  # fmt: skip


def paired(pairs: Sequence[tuple[CellValues, CellValues]], name: str) -> list[float]:
    """Arm less control of every pair; nothing where a pair lacks the measure."""
    found = []
    for base, own in pairs:
        low, high = base.values.get(name), own.values.get(name)
        if low is None or high is None:
            return []
        found.append(high - low)
    return found


def _less(own: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    return {
        mode: {
            row: {column: loss - base[mode][row][column] for column, loss in columns.items()}
            for row, columns in rows.items()
        }
        for mode, rows in own.items()
    }


def judge(
    rule: Rule,
    judged: MeanInterval | None,
    seeds: int,
    pairs: Sequence[tuple[CellValues, CellValues]],
) -> tuple[Outcome, str]:
    """The outcome by the plan's rule, and why it is undecided where it is."""
    if judged is None or len(pairs) < seeds:
        return "undecided", f"{seeds - len(pairs)} of {seeds} seeds have no pair of results"
    if judged.low is None or judged.high is None:
        return "undecided", "one seed has no interval"
    if rule.equal_steps:
        for base, own in pairs:
            steps = [base.values["steps"] or 0.0, own.values["steps"] or 0.0]
            if spent_steps_differ(steps, rule.tolerance):
                return "undecided", (
                    f"seed {own.seed} did {steps[1]:,.0f} steps, the control {steps[0]:,.0f}"
                )
    if judged.within(rule.margin):
        return "no difference shown", ""
    if judged.excludes(0.0) and abs(judged.mean) >= rule.margin:
        return ("better", "") if judged.mean < 0 else ("worse", "")
    if judged.excludes(0.0):
        return "undecided", "the difference may or may not be one that counts"
    return "undecided", "the interval holds 0 and reaches beyond what counts"


def verdict(rule: Rule, results: Sequence[ArmResult]) -> str:
    """The outcomes in words."""
    control, *others = results
    called = SUMMARY.get(rule.primary, rule.primary)
    sentences = []
    for result in others:
        words = f"{result.arm} against {control.arm}, {called}: {result.outcome}"
        if result.judged is not None:
            words += f", {in_words(result.judged)}"
        if result.reason:
            words += f" ({result.reason})"
        sentences.append(f"{words}.")
    return f"{' '.join(sentences)} What counts is {rule.margin:g} nats a token."


def in_words(found: MeanInterval, digits: int = 4) -> str:
    """A difference with its interval, n and confidence."""
    mean = f"{found.mean:+.{digits}f}"
    if found.low is None or found.high is None:
        return f"{mean} (n={found.n})"
    interval = f"{found.low:+.{digits}f} to {found.high:+.{digits}f}"
    return f"{mean} ({interval} at {found.confidence:.3g}, n={found.n})"
