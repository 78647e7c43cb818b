"""What the outcomes say of one task: scores with intervals, paired differences (means.py: of all).

Everything here is computed from outcomes alone. Arms are compared item by item, on the items that
both were graded on.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mlxstacks.stats import Interval, McNemarTest, holm, mcnemar_exact_test, wilson_interval
from mlxstacks.studies.benchmarks.outcomes import Outcome
from mlxstacks.studies.benchmarks.settings import NORMALISATIONS

Label = Literal["better", "worse", "not distinguishable"]
Outcomes = Mapping[str, Sequence[Outcome]]
"""Arm -> its outcomes, in the order of the items."""


@dataclass(frozen=True)
class Rate:
    """`right` of `n`, with Wilson's 95% interval."""

    n: int
    right: int
    interval: Interval

    @property
    def score(self) -> float:
        return self.right / self.n

    def as_json(self) -> dict[str, Any]:
        return {
            "n": self.n, "right": self.right, "score": self.score,
            "interval": self.interval.as_json(),
        }  # fmt: skip


def rate(marks: Sequence[bool]) -> Rate | None:
    """None for no marks: nothing was graded, which is not a score of 0."""
    right = sum(marks)
    return Rate(len(marks), right, wilson_interval(right, len(marks))) if marks else None


@dataclass(frozen=True)
class ArmScore:
    """One arm on one task. primary: None where nothing could be graded.

    ties count as wrong. unparsed: replies in which no rule found an answer, wrong as well. rules,
    how: how often each rule found the answer, and each decided that it is right. cut: replies that
    ended at max_tokens. without_domains: items that no domain was active for. strata: subject ->
    (items, right).
    """

    arm: str
    n: int
    primary: Rate | None
    normalisations: dict[str, Rate]
    letters: Rate | None
    reference: Rate | None
    ties: int
    unparsed: int
    rules: dict[str, int]
    how: dict[str, int]
    truncated: int
    cut: int
    mean_active_domains: float
    without_domains: int
    seconds: float
    strata: dict[str, tuple[int, int]]

    @property
    def parse_failure_rate(self) -> float:
        return self.unparsed / self.n

    @property
    def boxed_rate(self) -> float:
        return self.rules.get("boxed", 0) / self.n

    def as_json(self) -> dict[str, Any]:
        return {
            **(self.primary.as_json() if self.primary else {"n": self.n, "score": None}),
            "items": self.n,
            "normalisations": {name: one.as_json() for name, one in self.normalisations.items()},
            "letters": self.letters.as_json() if self.letters else None,
            "reference_offset": self.reference.as_json() if self.reference else None,
            "ties": self.ties,
            "unparsed": self.unparsed,
            "parse_failure_rate": self.parse_failure_rate,
            "boxed_rate": self.boxed_rate,
            "rules": self.rules,
            "how": self.how,
            "prompts_truncated": self.truncated,
            "cut_at_max_tokens": self.cut,
            "mean_active_domains": self.mean_active_domains,
            "answered_without_domains": self.without_domains,
            "seconds": round(self.seconds, 3),
            "strata": {k: {"n": n, "right": right} for k, (n, right) in self.strata.items()},
        }


def arm_score(arm: str, outcomes: Sequence[Outcome]) -> ArmScore:
    """Law: the order of the outcomes changes nothing. Raises: ValueError for no outcomes."""
    if not outcomes:
        raise ValueError(f"{arm}: no items to score")
    by: dict[str, Rate] = {
        name: found
        for name in NORMALISATIONS
        if (found := rate([one.by[name] for one in outcomes if name in one.by]))
    }
    return ArmScore(
        arm, len(outcomes), rate([one.correct for one in outcomes if one.correct is not None]), by,
        rate([one.letter for one in outcomes if one.letter is not None]),
        rate([one.reference for one in outcomes if one.reference is not None]),
        sum(one.tie for one in outcomes),
        sum(one.value is None and not one.tie for one in outcomes),
        _counts(one.rule for one in outcomes), _counts(one.how for one in outcomes if one.how),
        sum(one.truncated for one in outcomes), sum(one.cut for one in outcomes),
        sum(one.active_domains for one in outcomes) / len(outcomes),
        sum(not one.active_domains for one in outcomes),
        math.fsum(one.seconds for one in outcomes), _strata(outcomes),
    )  # fmt: skip


def _counts(names: Iterable[str]) -> dict[str, int]:
    """The most frequent first, equal ones by name."""
    return dict(sorted(Counter(names).items(), key=lambda pair: (-pair[1], pair[0])))


def _strata(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for one in outcomes:
        if one.stratum and one.correct is not None:
            n, right = found.get(one.stratum, (0, 0))
            found[one.stratum] = (n + 1, right + one.correct)
    return dict(sorted(found.items()))


# --- pairs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """An arm less its control on a task. p_adjusted: by Holm over all tests of the run. both: items
    that both have right. alpha: what p is held against.
    """

    task: str
    arm: str
    control: str
    n: int
    both: int
    difference: float
    interval: Interval
    mcnemar: McNemarTest
    p_adjusted: float
    label: Label
    alpha: float

    @property
    def in_words(self) -> str:
        """The label, and where the test alone would have said more than the family allows."""
        return f"{self.label} (alone it would be)" if self.only_alone else self.label

    @property
    def only_alone(self) -> bool:
        """Whether the p of this test is below alpha before Holm's adjustment, and not after it."""
        return self.label == "not distinguishable" and self.mcnemar.p_value < self.alpha

    def interval_at(self, confidence: float) -> Interval:
        """Of the difference, with another confidence."""
        gained, lost = self.mcnemar.gained, self.mcnemar.lost
        return paired_interval(self.both, gained, lost, self.n, confidence)

    def as_json(self) -> dict[str, Any]:
        return {
            "task": self.task, "arm": self.arm, "control": self.control, "n": self.n,
            "both_right": self.both, "difference": self.difference,
            "interval": self.interval.as_json(),
            "mcnemar": asdict(self.mcnemar), "p_adjusted": self.p_adjusted, "label": self.label,
            "in_words": self.in_words,
        }  # fmt: skip


def compare(
    task: str, outcomes: Outcomes, claims: Sequence[tuple[str, str]], alpha: float
) -> list[Comparison]:
    """Each (arm, control) of a task, McNemar's exact test; p is not yet adjusted (`adjusted`).

    Claims of which an arm has nothing graded are left out. Laws: the order of the items changes
    nothing; swapping arm and control turns the sign of difference and interval and keeps p.
    Raises: ValueError for arms that answered different items: such pairs are no pairs.
    """
    found = []
    for arm, control in claims:
        pairs = _pairs(task, outcomes, arm, control)
        if pairs:
            both = sum(one and two for one, two in pairs)
            gained = sum(one and not two for one, two in pairs)
            lost = sum(two and not one for one, two in pairs)
            test = mcnemar_exact_test(gained, lost)
            difference = (gained - lost) / len(pairs)
            found.append(
                Comparison(
                    task, arm, control, len(pairs), both, difference,
                    paired_interval(both, gained, lost, len(pairs)), test, test.p_value,
                    _label(difference, test.p_value, alpha), alpha,
                )
            )  # fmt: skip
    return found


def adjusted(comparisons: Sequence[Comparison], alpha: float) -> list[Comparison]:
    """The comparisons of a whole run as one family: p by Holm's rule, and the label by it."""
    p_values = holm([one.mcnemar.p_value for one in comparisons])
    return [
        replace(one, p_adjusted=p, label=_label(one.difference, p, alpha), alpha=alpha)
        for one, p in zip(comparisons, p_values, strict=True)
    ]


def _pairs(task: str, outcomes: Outcomes, arm: str, control: str) -> list[tuple[bool, bool]]:
    if arm not in outcomes or control not in outcomes:
        return []
    one, two = ({o.item_id: o.correct for o in outcomes[name]} for name in (arm, control))
    if one.keys() != two.keys():
        raise ValueError(f"{task}: {arm} and {control} answered different items")
    return [
        (mine, other)
        for item_id, mine in one.items()
        if mine is not None and (other := two[item_id]) is not None
    ]


def _label(difference: float, p_value: float, alpha: float) -> Label:
    if p_value >= alpha or difference == 0:
        return "not distinguishable"
    return "better" if difference > 0 else "worse"


def paired_interval(
    both: int, gained: int, lost: int, n: int, confidence: float = 0.95
) -> Interval:
    """Interval of (gained - lost) / n, for the rates of two arms on the same n items.

    Newcombe (1998), Statistics in Medicine 17, 2635, method 10: Wilson's intervals of both rates
    and the correlation of the pairs, corrected for continuity. Unlike a bootstrap it has a width
    where no pair differs. Laws: it holds the difference; swapping gained and lost mirrors it.
    Raises: ValueError for counts that are negative or more than n.
    """
    neither = n - both - gained - lost
    if min(both, gained, lost, neither) < 0 or n < 1:
        raise ValueError(f"got {both} both, {gained} gained, {lost} lost of {n}")
    one, two = both + gained, both + lost
    first, second = (wilson_interval(count, n, confidence) for count in (one, two))
    product = one * (n - one) * two * (n - two)
    agreement = float(both * neither - gained * lost)
    if agreement > 0:
        agreement = max(agreement - n / 2, 0.0)
    phi = agreement / math.sqrt(product) if product else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    difference = (gained - lost) / n
    down = reach(one / n - first.low, second.high - two / n)
    up = reach(first.high - one / n, two / n - second.low)
    return Interval(max(-1.0, difference - down), min(1.0, difference + up), confidence)
