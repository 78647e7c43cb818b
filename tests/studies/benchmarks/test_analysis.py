"""Scores, paired differences and their words, from outcomes made by hand.

Run: pytest tests/studies/benchmarks/test_analysis.py
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstacks.stats import mcnemar_exact_test, paired_interval, wilson_interval
from mlxstacks.studies.benchmarks.analysis import (
    Claim,
    Figures,
    Given,
    Outcome,
    arm_means,
    arm_score,
    compare,
    likelihood_outcomes,
    mean_differences,
    mean_of,
    pick,
)
from mlxstacks.studies.benchmarks.tasks import BenchItem, Scored
from tests.studies.eval_cases import outcome, outcomes_of

MARKS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)
CLAIM = (("routed", "base"),)


def compare_one(
    arms: dict[str, list[Outcome]], claims: Sequence[Claim] = CLAIM, task: str = "t"
) -> list[Figures]:
    """The claims of a single task."""
    return compare({task: arms}, {task: claims}, 0.05)


@given(MARKS, st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_order_of_items_changes_nothing(
    marks: list[tuple[bool, bool]], chance: random.Random
) -> None:
    arms = {
        "routed": outcomes_of([a for a, _ in marks]),
        "base": outcomes_of([b for _, b in marks]),
    }
    shuffled = {name: chance.sample(found, len(found)) for name, found in arms.items()}
    assert compare_one(arms) == compare_one(shuffled)
    for name in arms:
        assert arm_score(name, arms[name]) == arm_score(name, shuffled[name])


@given(MARKS)
@settings(max_examples=30)
def test_swapping_the_arms_turns_the_signs_and_keeps_p(marks: list[tuple[bool, bool]]) -> None:
    arms = {
        "routed": outcomes_of([a for a, _ in marks]),
        "base": outcomes_of([b for _, b in marks]),
    }
    one, two = compare_one(arms, (("routed", "base"), ("base", "routed")))
    assert one["difference"] == -two["difference"]
    assert one["mcnemar"]["p_value"] == two["mcnemar"]["p_value"]
    assert one["interval"]["low"] == pytest.approx(-two["interval"]["high"])
    assert one["interval"]["high"] == pytest.approx(-two["interval"]["low"])
    turned = {"better": "worse", "worse": "better"}
    assert turned.get(one["label"], one["label"]) == two["label"]


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
    assert (score["n"], score["score"]) == (200, 0.4)
    assert score["interval"] == wilson_interval(80, 200).as_json()
    assert score["seconds"] == pytest.approx(100)
    right = sum(one.correct is True for one in routed[::3])
    assert score["strata"]["alpha"] == {"n": 67, "right": right}
    (pair,) = compare_one({"base": base, "routed": routed})
    assert pair["mcnemar"] == asdict(mcnemar_exact_test(30, 6))
    assert pair["difference"] == pytest.approx(0.12)
    assert pair["label"] == "better"


def family(marks: list[bool], tasks: int, of: int = 60) -> list[Figures]:
    """The same answers on so many tasks: `marks` of routed, all wrong of base."""
    arms = {
        "base": outcomes_of([False] * of),
        "routed": outcomes_of(marks + [False] * (of - len(marks))),
    }
    names = [f"task {number}" for number in range(tasks)]
    return compare(dict.fromkeys(names, arms), dict.fromkeys(names, CLAIM), 0.05)


def test_holm_over_the_family_takes_back_what_one_test_alone_would_say() -> None:
    (alone,) = family([True] * 7, 1)
    assert (alone["label"], alone["in_words"]) == ("better", "better")
    pairs = family([True] * 7, 5)
    assert pairs[0]["mcnemar"]["p_value"] == 2 / 2**7
    assert {pair["p_adjusted"] for pair in pairs} == {5 * 2 / 2**7}
    assert {pair["label"] for pair in pairs} == {"no difference shown"}
    assert {pair["in_words"] for pair in pairs} == {"no difference shown (alone it would be)"}


def test_inside_the_interval_no_difference_is_shown() -> None:
    # The published MMLU: 0.450 and 0.435 of 200.
    base = outcomes_of([True] * 90 + [False] * 110)
    routed = outcomes_of([False] * 20 + [True] * 87 + [False] * 93)
    (pair,) = compare_one({"base": base, "routed": routed})
    assert pair["difference"] == pytest.approx(-0.015)
    assert pair["interval"]["low"] < 0 < pair["interval"]["high"]
    assert pair["in_words"] == "no difference shown"


def test_alone_is_said_of_the_p_and_of_no_interval() -> None:
    """6 gained, none lost: p is 0.031 alone; 5 gained: 0.063, though the interval is clear of 0."""
    two = family([True] * 6, 2)
    assert two[0]["mcnemar"]["p_value"] == 2 / 2**6
    assert {pair["in_words"] for pair in two} == {"no difference shown (alone it would be)"}
    (five,) = family([True] * 5, 1)
    assert five["mcnemar"]["p_value"] == 2 / 2**5
    assert five["interval"]["low"] > 0
    assert five["in_words"] == "no difference shown"


def test_arms_of_unequal_items_are_refused() -> None:
    arms = {"base": outcomes_of([True, False]), "routed": outcomes_of([True])}
    with pytest.raises(ValueError, match="t: routed and base answered different items"):
        compare_one(arms)
    with pytest.raises(ValueError, match="routed: no items to score"):
        arm_score("routed", [])


def test_what_was_not_graded_is_no_zero() -> None:
    score = arm_score("base", outcomes_of([None, None]))
    assert (score["score"], score["n"], "interval" in score) == (None, 2, False)
    arms = {"base": outcomes_of([None, None]), "routed": outcomes_of([None, None])}
    assert compare_one(arms) == []
    half = {"base": outcomes_of([None, True]), "routed": outcomes_of([True, True])}
    assert compare_one(half)[0]["n"] == 1


def test_counts_of_an_arm() -> None:
    found = arm_score("base", [
        outcome(0, False, tie=True, value=None, rule="tie"),
        outcome(1, False, value=None, rule="none", cut=True),
        outcome(2, True, rule="boxed", how="text", active_domains=2, truncated=True),
        outcome(3, True, rule="boxed", how="symbolic", letter=True),
    ])  # fmt: skip
    counts = ("ties", "unparsed", "cut_at_max_tokens", "prompts_truncated")
    assert [found[key] for key in counts] == [1, 1, 1, 1]
    assert (found["parse_failure_rate"], found["boxed_rate"]) == (0.25, 0.5)
    assert (found["mean_active_domains"], found["answered_without_domains"]) == (0.5, 3)
    assert found["rules"] == {"boxed": 2, "none": 1, "tie": 1}
    assert (found["letters"]["n"], found["letters"]["right"]) == (1, 1)


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
    def score(arm: str, right: int, of: int = 10) -> Figures:
        return arm_score(arm, outcomes_of([True] * right + [False] * (of - right)))

    scores = {
        "one": {"base": score("base", 2), "routed": score("routed", 4)},
        "two": {"base": score("base", 60, 100), "routed": score("routed", 80, 100)},
        "code": {"base": score("base", 9), "routed": arm_score("routed", outcomes_of([None] * 10))},
    }
    means = arm_means(scores)
    assert {name: (mean["tasks"], mean["mean"]) for name, mean in means.items()} == {
        "base": (2, pytest.approx(0.4)), "routed": (2, pytest.approx(0.6)),
    }  # fmt: skip
    assert means["base"]["interval"]["low"] < 0.4 < means["base"]["interval"]["high"]


def test_the_mean_of_equal_intervals_narrows_with_the_root_of_their_number() -> None:
    found = mean_of([0.5] * 4, [{"low": 0.3, "high": 0.6, "confidence": 0.95}] * 4)
    assert found is not None
    assert found["interval"] == pytest.approx({"low": 0.4, "high": 0.55, "confidence": 0.95})
    assert mean_of([], []) is None


def test_means_of_many_pairs_of_arms_are_judged_together() -> None:
    """A gain that one pair alone would show is none among ten; a larger one still is."""
    base = outcomes_of([False] * 100)

    def differences(right: int, pairs: int) -> list[Figures]:
        arm = outcomes_of([True] * right + [False] * (100 - right))
        arms = {"base": base} | {f"arm {number}": arm for number in range(pairs)}
        claims = [(name, "base") for name in arms if name != "base"]
        outcomes = {"a": arms, "b": arms}
        return mean_differences(compare(outcomes, dict.fromkeys("ab", claims), 0.05), 0.05)

    (alone,) = differences(3, 1)
    assert (alone["label"], alone["in_words"]) == ("better", "better")
    assert alone["judged_by_interval"] == alone["interval"]
    many = differences(3, 10)
    assert {mean["label"] for mean in many} == {"no difference shown"}
    assert {mean["in_words"] for mean in many} == {"no difference shown (alone it would be)"}
    assert (many[0]["mean"], many[0]["interval"]) == (alone["mean"], alone["interval"])
    assert many[0]["judged_by_interval"]["confidence"] == pytest.approx(0.995)
    assert {mean["label"] for mean in differences(10, 10)} == {"better"}


def test_mean_differences_turn_with_the_arms_and_name_the_tasks_that_count() -> None:
    right, wrong = outcomes_of([True] * 30 + [False] * 10), outcomes_of([False] * 40)
    claims = (("routed", "base"), ("base", "routed"))
    outcomes = {
        "gain": {"routed": right, "base": wrong}, "same": {"routed": right, "base": right},
    }  # fmt: skip
    pairs = compare(outcomes, dict.fromkeys(outcomes, claims), 0.05)
    one, two = mean_differences(pairs, 0.05)
    assert (one["better"], one["worse"]) == (["gain"], [])
    assert (two["better"], two["worse"]) == ([], ["gain"])
    assert one["mean"] == -two["mean"] == pytest.approx(0.375)
    assert math.isclose(one["interval"]["low"], -two["interval"]["high"])
    assert (one["label"], two["label"]) == ("better", "worse")
