"""What the answers of the arms say: accuracies, differences, flips, subjects, decomposition.

Everything here is computed from answers alone; arms are compared item by item, in the same order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxstacks.experiments.confound.answers import Answer
from mlxstacks.stats import (
    Interval,
    McNemarTest,
    MeanInterval,
    bootstrap_difference,
    holm,
    mcnemar_of_pairs,
    two_proportion_z_test,
    wilson_interval,
)

Answers = Mapping[str, Sequence[Answer]]


@dataclass(frozen=True)
class ArmResult:
    """rules: how often each extraction rule fired. picks: option position -> share of answers.

    unanswered: no rule found an option, or two tie; they count as wrong.
    """

    arm: str
    n: int
    correct: int
    interval: Interval
    rules: dict[str, int]
    picks: dict[str, float]
    unanswered: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.n

    @property
    def boxed_rate(self) -> float:
        return self.rules.get("boxed", 0) / self.n

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "accuracy": self.accuracy, "boxed_rate": self.boxed_rate,
            "interval": self.interval.as_json(),
        }  # fmt: skip


def arm_result(arm: str, answers: Sequence[Answer]) -> ArmResult:
    correct = sum(one.correct for one in answers)
    picks = Counter(chr(ord("A") + one.pick) for one in answers if one.pick is not None)
    return ArmResult(
        arm, len(answers), correct, wilson_interval(correct, len(answers)),
        dict(Counter(one.rule for one in answers).most_common()),
        {letter: count / len(answers) for letter, count in sorted(picks.items())},
        sum(one.pick is None for one in answers),
    )  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """An arm less its control. p_adjusted: of the z-test, by Holm over the claims it is tested
    with (alone: p_value itself). bootstrap: of the difference, over items.
    """

    arm: str
    control: str
    n: int
    count: int
    control_count: int
    z: float
    p_value: float
    p_adjusted: float
    mcnemar: McNemarTest
    bootstrap: MeanInterval

    @property
    def difference(self) -> float:
        return (self.count - self.control_count) / self.n

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self), "difference": self.difference, "mcnemar": asdict(self.mcnemar),
            "bootstrap": self.bootstrap.as_json(),
        }  # fmt: skip


def compare(
    answers: Answers, pairs: Sequence[tuple[str, str]], seed: int, resamples: int = 10_000
) -> list[Comparison]:
    """Each (arm, control), tested together as one family.

    Raises: ValueError for arms that answered different items: such pairs are no pairs.
    """
    found = []
    for arm, control in pairs:
        one, two = answers[arm], answers[control]
        if [a.item_id for a in one] != [a.item_id for a in two]:
            raise ValueError(f"{arm} and {control} answered different items")
        right, right_control = [a.correct for a in one], [a.correct for a in two]
        n, count, control_count = len(one), sum(right), sum(right_control)
        test = two_proportion_z_test(count, n, control_count, n)
        found.append(
            Comparison(
                arm, control, n, count, control_count, test.z, test.p_value, test.p_value,
                mcnemar_of_pairs(right_control, right),
                bootstrap_difference(right_control, right, seed=seed, resamples=resamples),
            )
        )  # fmt: skip
    adjusted = holm([one.p_value for one in found])
    return [
        Comparison(**vars(one) | {"p_adjusted": p}) for one, p in zip(found, adjusted, strict=True)
    ]


def guess_rate(answers: Sequence[Answer]) -> float:
    """What a model that picks any option scores in the mean."""
    return sum(1 / one.options for one in answers) / len(answers)


@dataclass(frozen=True)
class Flips:
    """Items that two runs answer differently. fixed: wrong, then right; broken: the reverse."""

    n: int
    changed: int
    fixed: int
    broken: int

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def flips(before: Sequence[Answer], after: Sequence[Answer]) -> Flips:
    """By item id; items that only one of them answered are left out, `n` counts the others."""
    later = {one.item_id: one for one in after}
    pairs = [(one, later[one.item_id]) for one in before if one.item_id in later]
    return Flips(
        len(pairs),
        sum(one.pick != two.pick for one, two in pairs),
        sum(not one.correct and two.correct for one, two in pairs),
        sum(one.correct and not two.correct for one, two in pairs),
    )


@dataclass(frozen=True)
class Decomposition:
    """Where the score of A1 comes from, as differences of rates; they add up to `total`.

    floor: A0 less the persona, re-measured. content: A1 less A0. Shares are None where total is
    not positive. published_floor_share: the floor as the study counts it, A0 / A1, with the persona
    taken to be 0 "by construction".
    """

    way: str
    floor: float
    content: float
    total: float
    floor_share: float | None
    content_share: float | None
    published_floor_share: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def decompose(way: str, persona: ArmResult, a0: ArmResult, a1: ArmResult) -> Decomposition:
    floor, content = a0.accuracy - persona.accuracy, a1.accuracy - a0.accuracy
    total = a1.accuracy - persona.accuracy
    return Decomposition(
        way, floor, content, total,
        floor / total if total > 0 else None,
        content / total if total > 0 else None,
        a0.accuracy / a1.accuracy if a1.correct else None,
    )  # fmt: skip


def subject_table(answers: Answers) -> dict[str, dict[str, int]]:
    """Subject -> {"n": items, arm: right answers}; "all" is last."""
    table: dict[str, dict[str, int]] = {}
    for arm, found in answers.items():
        for one in found:
            for name in (one.subject, "all"):
                row = table.setdefault(name, {"n": 0, **dict.fromkeys(answers, 0)})
                row[arm] += one.correct
                row["n"] += arm == next(iter(answers))
    return {name: table[name] for name in sorted(table, key=lambda name: (name == "all", name))}
