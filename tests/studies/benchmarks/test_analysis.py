"""Scores, paired differences and their words, from outcomes made by hand.

Run: pytest tests/studies/benchmarks/test_analysis.py
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.stats import Interval, mcnemar_exact_test, wilson_interval
from mlxstacks.studies.benchmarks.analysis import (
    adjusted,
    arm_score,
    compare,
    paired_interval,
)
from mlxstacks.studies.benchmarks.answers import Given
from mlxstacks.studies.benchmarks.means import (
    MeanDifference,
    arm_means,
    mean_differences,
    mean_of,
)
from mlxstacks.studies.benchmarks.outcomes import likelihood_outcomes, pick
from mlxstacks.studies.benchmarks.types import BenchItem, Scored
from tests.studies.eval_cases import outcome, outcomes_of

MARKS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
CLAIM = (("routed", "base"),)


@given(MARKS, st.randoms(use_true_random=False))
def test_the_order_of_items_changes_nothing(
    marks: list[tuple[bool, bool]], chance: random.Random
) -> None:
    arms = {
        "routed": outcomes_of([a for a, _ in marks]),
        "base": outcomes_of([b for _, b in marks]),
    }
    shuffled = {name: chance.sample(found, len(found)) for name, found in arms.items()}
    assert compare("t", arms, CLAIM, 0.05) == compare("t", shuffled, CLAIM, 0.05)
    for name in arms:
        assert arm_score(name, arms[name]) == arm_score(name, shuffled[name])


@given(MARKS)
def test_swapping_the_arms_turns_the_signs_and_keeps_p(marks: list[tuple[bool, bool]]) -> None:
    arms = {
        "routed": outcomes_of([a for a, _ in marks]),
        "base": outcomes_of([b for _, b in marks]),
    }
    one, two = compare("t", arms, (("routed", "base"), ("base", "routed")), 0.05)
    assert one.difference == -two.difference
    assert one.mcnemar.p_value == two.mcnemar.p_value
    assert one.interval.low == pytest.approx(-two.interval.high)
    assert one.interval.high == pytest.approx(-two.interval.low)
    turned = {"better": "worse", "worse": "better"}
    assert turned.get(one.label, one.label) == two.label


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_the_paired_interval_holds_the_difference_and_has_a_width(
    both: int, gained: int, lost: int, neither: int
) -> None:
    n = max(1, both + gained + lost + neither)
    found = paired_interval(both, gained, lost, n)
    assert -1 <= found.low <= (gained - lost) / n <= found.high <= 1
    assert found.low < found.high


def test_the_paired_interval_of_the_published_example() -> None:
    # Newcombe 1998, table III, method 10: 36 both, 12 and 2 change, 0 neither.
    found = paired_interval(36, 12, 2, 50)
    assert (found.low, found.high) == (
        pytest.approx(0.0569, abs=5e-5),
        pytest.approx(0.3404, abs=5e-5),
    )
    with pytest.raises(ValueError, match="got 3 both"):
        paired_interval(3, 1, 1, 4)


@pytest.mark.parametrize(
    ("both", "gained", "lost", "n", "low", "high"),
    [
        # Fagerland, Lydersen and Laake (2017), chapter 8, the data of Cavo et al. (2012) and of
        # Bentur et al. (2009): the correction takes part of the correlation, and all of it.
        (59, 6, 16, 161, -0.1186, -0.0046),
        (1, 1, 7, 21, -0.507, -0.026),
    ],
)
def test_pairs_that_agree_are_corrected_for_continuity(
    both: int, gained: int, lost: int, n: int, low: float, high: float
) -> None:
    found = paired_interval(both, gained, lost, n)
    digits = 5e-5 if n > 100 else 5e-4
    assert (found.low, found.high) == (
        pytest.approx(low, abs=digits), pytest.approx(high, abs=digits),
    )  # fmt: skip


def test_the_paired_interval_covers_what_it_should(campaign: Callable[[int], range]) -> None:
    chance, covered, trials = random.Random(0), 0, campaign(10_000)
    cells = ((0.5, True, True), (0.15, True, False), (0.08, False, True), (0.27, False, False))
    for _ in trials:
        drawn = chance.choices(cells, [share for share, _, _ in cells], k=120)
        both = sum(a and b for _, a, b in drawn)
        gained, lost = sum(a and not b for _, a, b in drawn), sum(b and not a for _, a, b in drawn)
        found = paired_interval(both, gained, lost, 120)
        covered += found.low <= 0.07 <= found.high
    assert 0.93 < covered / len(trials) < 0.985


def test_score_interval_and_test_are_those_of_the_counts() -> None:
    base = outcomes_of([True] * 56 + [False] * 144)
    routed = outcomes_of([False] * 6 + [True] * 80 + [False] * 114)
    score = arm_score("routed", routed)
    assert score.primary is not None
    assert score.primary.score == 0.4
    assert score.primary.interval == wilson_interval(80, 200)
    assert score.seconds == pytest.approx(100)
    assert score.strata["alpha"] == (67, sum(one.correct is True for one in routed[::3]))
    (found,) = compare("t", {"base": base, "routed": routed}, CLAIM, 0.05)
    assert found.mcnemar == mcnemar_exact_test(30, 6)
    assert found.difference == pytest.approx(0.12)
    assert found.label == "better"


def test_holm_over_the_family_takes_back_what_one_test_alone_would_say() -> None:
    base, better = [False] * 60, [True] * 7 + [False] * 53
    comparisons = [
        compare(
            f"task {number}",
            {"base": outcomes_of(base), "routed": outcomes_of(better)},
            CLAIM,
            0.05,
        )[0]
        for number in range(5)
    ]
    assert {one.label for one in comparisons} == {"better"}
    family = adjusted(comparisons, 0.05)
    assert family[0].mcnemar.p_value == 2 / 2**7
    assert {one.p_adjusted for one in family} == {5 * 2 / 2**7}
    assert {one.label for one in family} == {"not distinguishable"}
    assert {one.in_words for one in family} == {"not distinguishable (alone it would be)"}


def test_differences_inside_the_interval_are_not_distinguishable() -> None:
    # The published MMLU: 0.450 and 0.435 of 200.
    base = outcomes_of([True] * 90 + [False] * 110)
    routed = outcomes_of([False] * 20 + [True] * 87 + [False] * 93)
    (found,) = adjusted(compare("mmlu", {"base": base, "routed": routed}, CLAIM, 0.05), 0.05)
    assert found.difference == pytest.approx(-0.015)
    assert found.interval.low < 0 < found.interval.high
    assert found.in_words == "not distinguishable"


def test_alone_is_said_of_the_p_and_of_no_interval() -> None:
    """6 gained, none lost: p is 0.031 alone. The interval may say otherwise; it is not asked."""
    arms = {"base": outcomes_of([False] * 60), "routed": outcomes_of([True] * 6 + [False] * 54)}
    (found,) = compare("t", arms, CLAIM, 0.05)
    assert found.mcnemar.p_value == 2 / 2**6
    two = adjusted([found, found], 0.05)
    assert {one.label for one in two} == {"not distinguishable"}
    assert all(one.only_alone for one in two)
    arms["routed"] = outcomes_of([True] * 5 + [False] * 55)
    (five,) = adjusted(compare("t", arms, CLAIM, 0.05), 0.05)
    assert five.mcnemar.p_value == 2 / 2**5
    assert not five.only_alone
    clear = replace(five, interval=Interval(0.01, 0.2, 0.95))
    assert clear.in_words == "not distinguishable"


def test_arms_of_unequal_items_are_refused() -> None:
    arms = {"base": outcomes_of([True, False]), "routed": outcomes_of([True])}
    with pytest.raises(ValueError, match="t: routed and base answered different items"):
        compare("t", arms, CLAIM, 0.05)
    with pytest.raises(ValueError, match="routed: no items to score"):
        arm_score("routed", [])


def test_what_was_not_graded_is_no_zero() -> None:
    score = arm_score("base", outcomes_of([None, None]))
    assert score.primary is None
    assert score.as_json()["score"] is None
    arms = {"base": outcomes_of([None, None]), "routed": outcomes_of([None, None])}
    assert compare("t", arms, CLAIM, 0.05) == []
    half = {"base": outcomes_of([None, True]), "routed": outcomes_of([True, True])}
    assert compare("t", half, CLAIM, 0.05)[0].n == 1


def test_counts_of_an_arm() -> None:
    found = arm_score("base", [
        outcome(0, False, tie=True, value=None, rule="tie"),
        outcome(1, False, value=None, rule="none", cut=True),
        outcome(2, True, rule="boxed", how="text", active_domains=2, truncated=True),
        outcome(3, True, rule="boxed", how="symbolic", letter=True),
    ])  # fmt: skip
    assert (found.ties, found.unparsed, found.cut, found.truncated) == (1, 1, 1, 1)
    assert (found.parse_failure_rate, found.boxed_rate) == (0.25, 0.5)
    assert (found.mean_active_domains, found.without_domains) == (0.5, 3)
    assert found.rules == {"boxed": 2, "none": 1, "tie": 1}
    assert found.letters is not None
    assert (found.letters.n, found.letters.right) == (1, 1)


def test_three_normalisations_pick_differently_and_ties_pick_nothing() -> None:
    scored = Scored((-3.0, -4.0, -5.0), (1, 2, 2), (10, 10, 20))
    assert [pick(scored, name) for name in ("sum", "token", "character")] == [0, 1, 2]
    assert pick(Scored((-2.0, -2.0, -3.0), (1, 1, 1), (1, 1, 1)), "sum") is None
    # Equal texts at other places of a batch differ by rounding alone.
    assert pick(Scored((-2.0, -2.0 - 1e-7, -3.0), (1, 1, 1), (1, 1, 1)), "sum") is None


@given(st.lists(st.floats(-50, -0.001), min_size=2, max_size=6), st.floats(-5, 5), st.randoms())
def test_the_pick_moves_with_its_candidate(
    sums: list[float], shift: float, chance: random.Random
) -> None:
    sums = [round(value, 3) for value in sums]
    lengths = tuple(range(1, len(sums) + 1))
    scored = Scored(tuple(sums), lengths, lengths)
    moved = replace(scored, sums=tuple(value + round(shift, 2) for value in sums))
    assert pick(scored, "sum") == pick(moved, "sum")
    order = chance.sample(range(len(sums)), len(sums))
    for name in ("sum", "token", "character"):
        place = pick(scored, name)
        turned = Scored(
            tuple(sums[i] for i in order),
            tuple(lengths[i] for i in order),
            tuple(lengths[i] for i in order),
        )
        assert pick(turned, name) == (None if place is None else order.index(place))


def test_a_right_answer_that_is_there_twice_ties_whatever_the_last_bits_say() -> None:
    item = BenchItem("twins", "?", 1, (" a", " b", " b"))
    given = Given("twins", Scored((-9.0, -2.0, -2.1), (1, 1, 1), (1, 1, 1)), 0.0)
    (found,) = likelihood_outcomes([item], [given], {}, {}, "sum")
    assert (found.tie, found.correct, found.rule) == (True, False, "tie")
    assert not any(found.by.values())
    (clear,) = likelihood_outcomes(
        [replace(item, candidates=(" a", " b", " c"))], [given], {}, {}, "sum"
    )
    assert clear.correct is True


def test_means_are_over_tasks_and_only_over_those_that_all_arms_have() -> None:
    def score(arm: str, right: int, of: int = 10) -> object:
        return arm_score(arm, outcomes_of([True] * right + [False] * (of - right)))

    scores = {
        "one": {"base": score("base", 2), "routed": score("routed", 4)},
        "two": {"base": score("base", 60, 100), "routed": score("routed", 80, 100)},
        "code": {"base": score("base", 9), "routed": arm_score("routed", outcomes_of([None] * 10))},
    }
    means = arm_means(scores)  # type: ignore[arg-type]
    assert {name: (one.tasks, one.mean) for name, one in means.items()} == {
        "base": (2, pytest.approx(0.4)), "routed": (2, pytest.approx(0.6)),
    }  # fmt: skip
    assert means["base"].interval.low < 0.4 < means["base"].interval.high


def test_the_mean_of_equal_intervals_narrows_with_the_root_of_their_number() -> None:
    found = mean_of([0.5] * 4, [Interval(0.3, 0.6, 0.95)] * 4)
    assert found is not None
    assert found.interval.low == pytest.approx(0.4)
    assert found.interval.high == pytest.approx(0.55)
    assert mean_of([], []) is None


def test_means_of_many_pairs_of_arms_are_judged_together() -> None:
    """A gain that one pair alone would show is none among ten; a larger one still is."""
    base = outcomes_of([False] * 100)

    def differences(right: int, pairs: int) -> list[MeanDifference]:
        arm = outcomes_of([True] * right + [False] * (100 - right))
        arms = {f"arm {number}": arm for number in range(pairs)}
        claims = [(name, "base") for name in arms]
        found = [
            one
            for task in ("a", "b")
            for one in compare(task, {"base": base, **arms}, claims, 0.05)
        ]
        return mean_differences(found, 0.05)

    (alone,) = differences(3, 1)
    assert (alone.label, alone.in_words) == ("better", "better")
    assert alone.judged == alone.mean.interval
    many = differences(3, 10)
    assert {one.label for one in many} == {"not distinguishable"}
    assert {one.in_words for one in many} == {"not distinguishable (alone it would be)"}
    assert many[0].mean == alone.mean
    assert many[0].judged.confidence == pytest.approx(0.995)
    assert {one.label for one in differences(10, 10)} == {"better"}


def test_mean_differences_turn_with_the_arms_and_name_the_tasks_that_count() -> None:
    right, wrong = outcomes_of([True] * 30 + [False] * 10), outcomes_of([False] * 40)
    pairs = (("routed", "base"), ("base", "routed"))
    family = adjusted(
        [
            *compare("gain", {"routed": right, "base": wrong}, pairs, 0.05),
            *compare("same", {"routed": right, "base": right}, pairs, 0.05),
        ],
        0.05,
    )
    one, two = mean_differences(family, 0.05)
    assert (one.better, one.worse) == (("gain",), ())
    assert (two.better, two.worse) == ((), ("gain",))
    assert one.mean.mean == -two.mean.mean == pytest.approx(0.375)
    assert math.isclose(one.mean.interval.low, -two.mean.interval.high)
    assert one.label == "better"
    assert two.label == "worse"
