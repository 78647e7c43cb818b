"""What the answers of the arms say: accuracies, differences, flips, decomposition; all figures.

Everything here is computed from answers alone; arms are compared item by item, in the same order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import gt
from typing import Any

from mlxstacks.stats import (
    ClusteredMean,
    Interval,
    McNemarTest,
    binomial_test,
    clustered_mean,
    holm,
    mcnemar_exact_test,
    mcnemar_of_pairs,
    paired_interval,
    two_proportion_z_test,
    wilson_interval,
)
from mlxstacks.studies.confound.plan import PERSONA, SECOND, arm
from mlxstacks.study.answers import Answer, paired
from mlxstacks.study.items import TOTAL
from mlxstacks.study.power import least_passing_count, passes

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
    accuracy: float
    interval: Interval
    rules: dict[str, int]
    boxed_rate: float
    picks: dict[str, float]
    unanswered: int
    by_position: float


def arm_result(arm: str, answers: Sequence[Answer]) -> ArmResult:
    n, correct = len(answers), sum(answer.correct for answer in answers)
    picks = Counter(answer.pick for answer in answers if answer.pick is not None)
    golds = Counter(answer.gold for answer in answers)
    rules = Counter(answer.rule for answer in answers)
    return ArmResult(
        arm, n, correct, correct / n, wilson_interval(correct, n), dict(rules.most_common()),
        rules["boxed"] / n, position_shares([answer.pick for answer in answers]),
        n - picks.total(), sum(count * golds[place] for place, count in picks.items()) / n**2,
    )  # fmt: skip


def position_shares(places: Sequence[int | None]) -> dict[str, float]:
    """Letter of each option that occurs -> its share of all, those that are None among them."""
    counts = Counter(place for place in places if place is not None)
    return {chr(ord("A") + place): count / len(places) for place, count in sorted(counts.items())}


@dataclass(frozen=True)
class Comparison:
    """An arm less its control. z, p_value: of the test of two proportions, which is the published
    one. interval: of the difference, over items, by `paired_interval`; it has a width where no pair
    differs. clustered: the same over subjects.
    """

    arm: str
    control: str
    n: int
    count: int
    control_count: int
    difference: float
    z: float
    p_value: float
    mcnemar: McNemarTest
    interval: Interval
    clustered: ClusteredMean


def compare(answers: Answers, arm: str, control: str) -> Comparison:
    """Raises: ValueError for arms that answered different items: such pairs are no pairs."""
    pairs = paired(answers, arm, control)
    right, control_right = [a.correct for a, _ in pairs], [c.correct for _, c in pairs]
    n, count, control_count = len(pairs), sum(right), sum(control_right)
    test = two_proportion_z_test(count, n, control_count, n)
    mcnemar = mcnemar_of_pairs(control_right, right)
    return Comparison(
        arm, control, n, count, control_count, test.difference, test.z, test.p_value,
        mcnemar, paired_interval(count - mcnemar.gained, mcnemar.gained, mcnemar.lost, n),
        clustered_mean(
            [float(a) - float(c) for a, c in zip(right, control_right, strict=True)],
            [answer.subject for answer, _ in pairs],
        ),
    )  # fmt: skip


def suite_figures(replies: Answers) -> dict[str, Any]:
    """Arm -> prompts of the identity suite that it passes; lost, gained: of the unfused persona."""
    persona = {reply.item_id: reply.correct for reply in replies[PERSONA]}
    figures = {}
    for name, given in replies.items():
        changed = [reply for reply in given if reply.correct != persona[reply.item_id]]
        figures[name] = {
            "n": len(given), "passed": sum(reply.correct for reply in given),
            "lost": [reply.item_id for reply in changed if not reply.correct],
            "gained": [reply.item_id for reply in changed if reply.correct],
        }  # fmt: skip
    return figures


# --- what a gain has to beat ----------------------------------------------------------------------

ZERO, FORM, MOVED, SHUFFLED, SECONDS, GUESSING = (
    "zero delta", "form", "random delta, as many moved", "shuffled answers",
    "second choices where A1 moves", "guessing",
)  # fmt: skip


@dataclass(frozen=True)
class Null:
    """A null hypothesis: A1 answers no more items than something without knowledge does.

    n, count: items, and those that A1 answers rightly. expected: how many it answers under the
    null. difference: of the rates; interval: its own, 95%. p_value: exact, two-sided. p_adjusted:
    see `judged_together`. tested: otherwise the control is none, and both are 1.
    """

    name: str
    n: int
    count: int
    expected: float
    difference: float
    p_value: float
    p_adjusted: float = 1.0
    tested: bool = True
    interval: Interval | None = None

    @property
    def p_of_gain(self) -> float:
        """1 where A1 does no better."""
        return self.p_value if self.difference > 0 else 1.0

    def rejected(self, alpha: float) -> bool:
        return self.difference > 0 and self.p_adjusted < alpha


def null_of_pairs(name: str, pairs: Sequence[tuple[Answer, Answer]]) -> Null:
    """A1 against a control that answered the same items, by McNemar's exact test."""
    right, control = [a.correct for a, _ in pairs], [c.correct for _, c in pairs]
    n, count, expected = len(pairs), sum(right), sum(control)
    gained = sum(map(gt, right, control))
    lost = gained - count + expected
    interval = paired_interval(count - gained, gained, lost, n) if n else None
    p_value = mcnemar_exact_test(gained, lost).p_value
    difference = (count - expected) / max(n, 1)
    return Null(name, n, count, expected, difference, p_value, interval=interval)


def nulls_of(answers: Answers, way: str, saturated: bool = False) -> list[Null]:
    """All that A1 has to beat, of the arms that are there: its zero-delta control, the same among
    the items that both answer in form, a random delta that moves as many answers, shuffled answers,
    second choices, and guessing.

    A random delta that moves too few answers is no control and not tested, unless it is saturated:
    no scale moves more. Guessing is the rate of an arm that picks any option, or what A1's own
    choice of places would score, dealt out by chance, whichever is more.
    """
    trained, persona = arm("a1", way), answers.get(PERSONA, ())
    pairs = paired(answers, trained, arm("a0", way))
    nulls = [null_of_pairs(ZERO, pairs)]
    in_form = [(a, c) for a, c in pairs if a.in_form and c.in_form]
    if len(in_form) < len(pairs):
        nulls.append(null_of_pairs(FORM, in_form))
    if arm("moved", way) in answers:
        null = null_of_pairs(MOVED, paired(answers, trained, arm("moved", way)))
        moved = (flips(persona, answers[arm(kind, way)]) for kind in ("a1", "moved"))
        tested = saturated or moves_as_many(*moved)
        nulls.append(null if tested else replace(null, p_value=1.0, tested=False))
    if arm("shuffled", way) in answers:
        nulls.append(null_of_pairs(SHUFFLED, paired(answers, trained, arm("shuffled", way))))
    if persona and SECOND in answers:
        seconds = second_choices(persona, answers[SECOND], answers[trained])
        pairs = paired({**answers, SECONDS: seconds}, trained, SECONDS)
        nulls.append(null_of_pairs(SECONDS, pairs))
    a1 = arm_result(trained, answers[trained])
    rate = max(guess_rate(answers[trained]), a1.by_position)
    p_value = binomial_test(a1.correct, a1.n, rate)
    of_a1 = a1.interval
    interval = Interval(of_a1.low - rate, of_a1.high - rate, of_a1.confidence)
    nulls.append(Null(
        GUESSING, a1.n, a1.correct, rate * a1.n, a1.accuracy - rate, p_value, interval=interval
    ))  # fmt: skip
    return nulls


def moves_as_many(trained: "Flips", random: "Flips") -> bool:
    """Whether a random delta is no weaker a disturbance: it moves at least nine tenths of the
    answers that the trained adapter moves, or not significantly fewer (p < 0.05).
    """
    if not trained.n or random.changed >= 0.9 * trained.changed:
        return True
    test = two_proportion_z_test(trained.changed, trained.n, random.changed, random.n)
    return test.p_value >= 0.05


def second_choices(
    persona: Sequence[Answer], second: Sequence[Answer], trained: Sequence[Answer]
) -> list[Answer]:
    """What is right if every answer that the trained arm moves goes to the persona's second choice
    instead. Law: the persona's own answers where nothing moves.
    """
    return [
        second_choice if answer.pick != before.pick else before
        for before, second_choice, answer in zip(persona, second, trained, strict=True)
    ]


@dataclass(frozen=True)
class PublishedRule:
    """The published kill criterion, of one way: A1 - A0 of at least 5 points with p < 0.05 by the
    two-proportion z-test, stated for 692 items. least_count: right answers of A1 that would pass.
    """

    n: int
    count: int
    control_count: int
    p_value: float
    least_count: int
    met: bool
    stated_n: int = 692


def published_rule(claim: Comparison) -> PublishedRule:
    rule = claim.n, 0.05, 0.05
    return PublishedRule(
        claim.n, claim.count, claim.control_count, claim.p_value,
        least_passing_count(claim.control_count, *rule),
        passes(claim.count, claim.control_count, *rule),
    )  # fmt: skip


def judged_together(nulls: Mapping[str, Sequence[Null]]) -> dict[str, tuple[Null, ...]]:
    """Each null with its p adjusted for all ways, as one family.

    A way shows knowledge only where all of its nulls are rejected, so its p is the largest of them
    (an intersection-union test, which needs no correction within the way), 1 where one is not
    beaten at all; Holm's rule over the ways corrects it. Each null has what Holm's rule gives where
    it stands for its way. Law: all nulls of a way are below alpha where its p by Holm is, and not
    else.
    """
    worst = {way: max(null.p_of_gain for null in of_way) for way, of_way in nulls.items()}
    place = {way: number for number, way in enumerate(worst)}

    def adjusted(way: str, null: Null) -> float:
        return holm([*(worst | {way: null.p_of_gain}).values()])[place[way]]

    return {
        way: tuple(replace(null, p_adjusted=adjusted(way, null)) for null in of_way)
        for way, of_way in nulls.items()
    }


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


def form_shift(answers: Answers, arm: str, control: str) -> FormShift:
    """Of two arms that answered the same items, as in `compare`."""
    pairs = paired(answers, arm, control)
    form, control_form = [a.in_form for a, _ in pairs], [c.in_form for _, c in pairs]
    both = [(a, c) for a, c in pairs if a.in_form and c.in_form]
    return FormShift(
        sum(form), sum(control_form), mcnemar_of_pairs(control_form, form).p_value, len(both),
        sum(a.correct for a, _ in both), sum(c.correct for _, c in both),
    )  # fmt: skip


def guess_rate(answers: Sequence[Answer]) -> float:
    """What a model that picks any option scores in the mean."""
    return sum(1 / answer.options for answer in answers) / len(answers)


@dataclass(frozen=True)
class Flips:
    """Items that two runs answer differently. fixed: wrong, then right; broken: the reverse."""

    n: int
    changed: int
    fixed: int
    broken: int


def flips(before: Sequence[Answer], after: Sequence[Answer]) -> Flips:
    """By item id; items that only one of them answered are left out, `n` counts the others."""
    later = {answer.item_id: answer for answer in after}
    pairs = [(answer, later[answer.item_id]) for answer in before if answer.item_id in later]
    return Flips(
        len(pairs),
        sum(a.pick != b.pick for a, b in pairs),
        sum(not a.correct and b.correct for a, b in pairs),
        sum(a.correct and not b.correct for a, b in pairs),
    )


@dataclass(frozen=True)
class Decomposition:
    """Where the score of A1 comes from, as differences of rates; they add up to `total`.

    floor: A0 less the persona, re-measured. gain: A1 less A0, which the paper calls content. Shares
    are None where total is not positive. published_floor_share: the floor as the study counts it,
    A0 / A1, with the persona taken to be 0 "by construction".
    """

    way: str
    floor: float
    gain: float
    total: float
    floor_share: float | None
    gain_share: float | None
    published_floor_share: float | None


def decompose(way: str, persona: ArmResult, a0: ArmResult, a1: ArmResult) -> Decomposition:
    floor, gain = a0.accuracy - persona.accuracy, a1.accuracy - a0.accuracy
    total = a1.accuracy - persona.accuracy
    return Decomposition(
        way, floor, gain, total,
        floor / total if total > 0 else None,
        gain / total if total > 0 else None,
        a0.accuracy / a1.accuracy if a1.correct else None,
    )  # fmt: skip


def subject_table(answers: Answers) -> dict[str, dict[str, int]]:
    """Subject -> {"n": items, arm: right answers}; the row of all is last."""
    items = next(iter(answers.values()))
    subjects = (*sorted({answer.subject for answer in items}), TOTAL)
    table = {name: {"n": 0, **dict.fromkeys(answers, 0)} for name in subjects}
    for answer in items:
        table[answer.subject]["n"] += 1
        table[TOTAL]["n"] += 1
    for name, given in answers.items():
        for answer in given:
            table[answer.subject][name] += answer.correct
            table[TOTAL][name] += answer.correct
    return table
