"""What the answers of the arms say: accuracies, differences, flips, subjects, decomposition.

Everything here is computed from answers alone; arms are compared item by item, in the same order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
from mlxstacks.study.answers import Answer
from mlxstacks.study.judge import paired

Answers = Mapping[str, Sequence[Answer]]


@dataclass(frozen=True)
class ArmResult:
    """rules: how often each extraction rule fired. picks: option position -> share of answers.

    unanswered: no rule found an option, or two tie; they count as wrong. by_position: what these
    picks would score in the mean, were they dealt to the items by chance: a preference for a
    position that is often right is no knowledge.
    """

    arm: str
    n: int
    correct: int
    interval: Interval
    rules: dict[str, int]
    picks: dict[str, float]
    unanswered: int
    by_position: float

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
    picks = Counter(one.pick for one in answers if one.pick is not None)
    golds = Counter(one.gold for one in answers)
    return ArmResult(
        arm, len(answers), correct, wilson_interval(correct, len(answers)),
        dict(Counter(one.rule for one in answers).most_common()),
        position_shares([one.pick for one in answers]),
        sum(one.pick is None for one in answers),
        sum(count * golds[place] for place, count in picks.items()) / len(answers) ** 2,
    )  # fmt: skip


def position_shares(places: Sequence[int | None]) -> dict[str, float]:
    """Letter of each option that occurs -> its share of all, those that are None among them."""
    counts = Counter(place for place in places if place is not None)
    return {chr(ord("A") + place): count / len(places) for place, count in sorted(counts.items())}


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
        pairs_of_items = paired(answers, arm, control)
        right = [answer.correct for answer, _ in pairs_of_items]
        right_control = [answer.correct for _, answer in pairs_of_items]
        n, count, control_count = len(right), sum(right), sum(right_control)
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


@dataclass(frozen=True)
class FormShift:
    """Whether an arm and its control answer in the same form: a box, or a likelihood without tie.

    n, right, control_right: of the items that both answered in form. p_value: McNemar's, of being
    in form. More letters found is more right answers without any knowledge.
    """

    in_form: int
    control_in_form: int
    p_value: float
    n: int
    right: int
    control_right: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def form_shift(answers: Answers, arm: str, control: str) -> FormShift:
    """Of two arms that answered the same items, as in `compare`."""
    pairs = paired(answers, arm, control)
    form = [one.in_form for one, _ in pairs]
    control_form = [two.in_form for _, two in pairs]
    both = [pair for pair, a, b in zip(pairs, form, control_form, strict=True) if a and b]
    return FormShift(
        sum(form), sum(control_form), mcnemar_of_pairs(control_form, form).p_value, len(both),
        sum(one.correct for one, _ in both), sum(two.correct for _, two in both),
    )  # fmt: skip


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
