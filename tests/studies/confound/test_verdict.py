"""Statistics, kill criterion, controls, words.

Run: pytest tests/studies/confound/test_verdict.py
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.stats import holm
from mlxstacks.studies.confound.analysis import (
    Comparison,
    Flips,
    Null,
    PublishedRule,
    compare,
    flips,
    guess_rate,
    judged_together,
    null_of_pairs,
    second_choices,
)
from mlxstacks.studies.confound.plan import arms_of, parts_of
from mlxstacks.studies.confound.verdict import (
    Criterion,
    Findings,
    answer_notes,
    find,
    floor_in_words,
    fuse_notes,
    verdict,
)
from mlxstacks.study.answers import Answer
from mlxstacks.study.document import Standing
from mlxstacks.study.power import least_passing_count, passes
from tests.studies.confound_cases import CRITERION, POLICIES, SUBJECTS, answers_of, case


def one(count: int, control: int, n: int = 692, shift: int = 0) -> Comparison:
    arms = {"a1": answers_of(count, n, shift=shift), "a0": answers_of(control, n)}
    return compare(arms, "a1", "a0")


def null(name: str, count: int, control: int, n: int = 692) -> Null:
    pairs = zip(answers_of(count, n), answers_of(control, n), strict=True)
    return null_of_pairs(name, [*pairs])


def test_the_published_counts_give_the_published_p() -> None:
    """The Stacking Confound: 128 and 123 of 692."""
    found = one(128, 123)
    assert found.difference == pytest.approx(0.0072254, abs=1e-7)
    assert found.z == pytest.approx(0.349, abs=5e-4)
    assert found.p_value == pytest.approx(0.727, abs=5e-4)
    assert one(47, 39, n=200).p_value == pytest.approx(0.33, abs=5e-3)


def test_the_published_run_is_a_null_in_words() -> None:
    found = case(
        a1_refit=128, a0_refit=123, moved_refit=125, a1_promote=20, a1_unfused=20, right=692
    )
    assert found.judgements[0].outcome == "no gain"
    assert verdict(found).startswith(
        "Only jitter, no knowledge shown: fused by refit, the adapter (A1) answers "
        "18.50% (128 of 692) of what base and persona got wrong, its zero-delta control (A0) "
        "17.77% (123 of 692). Gain, A1 - A0: +0.72 points (95%: "
    )
    assert "McNemar p = 0.062, p (Holm) over all policies = 0.19; z-test" in verdict(found)
    assert "less than 5 points, with 95% confidence." in verdict(found)
    parts = found.decomposition["refit"]
    assert round(100 * parts.floor, 1) == 17.8
    assert round(100 * parts.gain, 1) == 0.7
    assert round(100 * parts.total, 1) == 18.5
    assert parts.floor_share == pytest.approx(0.96, abs=5e-3)
    assert parts.gain_share == pytest.approx(0.04, abs=5e-3)
    assert parts.published_floor_share == pytest.approx(123 / 128)


@pytest.mark.parametrize(
    ("count", "met"),
    # The 5-point arm binds: 153 is significant, 158 is the first that passes.
    [(100, False), (123, False), (152, False), (153, False), (157, False), (158, True)],
)
def test_the_published_kill_criterion(count: int, met: bool) -> None:
    assert passes(count, 123, 692, 0.05, 0.05) == met
    assert least_passing_count(123, 692, 0.05) == 158
    assert passes(153, 123, 692, 0.0, 0.05)  # 4.3 points, p = 0.044
    assert not passes(152, 123, 692, 0.0, 0.05)


@pytest.mark.parametrize(
    ("criterion", "count", "control", "n", "met"),
    [
        ((0.05, 0.05), 35, 0, 700, True),  # five points, though no float is
        ((0.05, 0.05), 34, 0, 700, False),
        ((0.05, 0.05), 20, 5, 60, True),
        ((0.05, 1e-5), 20, 5, 60, False),
        ((0.3, 0.05), 20, 5, 60, False),
        ((0.0, 0.05), 5, 20, 60, False),
        ((0.0, 0.05), 5, 5, 60, False),
    ],
)
def test_the_criterion_needs_both_of_its_parts(
    criterion: tuple[float, float], count: int, control: int, n: int, met: bool
) -> None:
    [alone] = judged_together({"refit": [null("zero delta", count, control, n)]})["refit"]
    assert Criterion(*criterion).passes(alone) == met


p_values = st.floats(0, 1) | st.just(0.0) | st.just(1.0)
nulls = st.builds(
    lambda p, up: Null("any", 10, 5, 5.0, 0.1 if up else -0.1, p), p_values, st.booleans()
)


@given(st.lists(st.lists(nulls, min_size=1, max_size=4), min_size=1, max_size=5))
def test_a_way_is_held_to_its_worst_null_and_all_ways_share_the_error(
    of_ways: list[list[Null]],
) -> None:
    judged = judged_together({str(place): nulls for place, nulls in enumerate(of_ways)})
    worst = [
        max(1.0 if null.difference <= 0 else null.p_value for null in nulls) for nulls in of_ways
    ]
    for p_value, after, before in zip(holm(worst), judged.values(), of_ways, strict=True):
        for alpha in (0.001, 0.05, 0.5):
            if abs(p_value - alpha) > 1e-9:
                assert all(null.rejected(alpha) for null in after) == (p_value < alpha)
        assert all(a.p_adjusted >= b.p_value for a, b in zip(after, before, strict=True))


def test_a_null_is_adjusted_though_another_of_its_way_is_not_beaten() -> None:
    """Holm's factor of a way is lost in its own p of 1; each null shows what it would be alone."""
    unbeaten = Null("any", 10, 5, 5.0, -0.1, 0.5)
    of_ways = {
        way: [Null("zero delta", 10, 5, 4.0, 0.1, p), unbeaten]
        for way, p in (("refit", 0.125), ("promote", 0.0625), ("unfused", 0.125))
    }
    first = {way: nulls[0].p_adjusted for way, nulls in judged_together(of_ways).items()}
    assert first == {"refit": 0.375, "promote": 0.1875, "unfused": 0.375}


def test_pairs_are_compared_item_by_item() -> None:
    """The same counts with other items: McNemar sees more change, the z-test does not."""
    near, far = one(160, 120), one(160, 120, shift=300)
    assert near.p_value == far.p_value
    assert (near.mcnemar.gained, near.mcnemar.lost) == (40, 0)
    assert (far.mcnemar.gained, far.mcnemar.lost) == (160, 120)
    assert near.mcnemar.p_value < 1e-9 < far.mcnemar.p_value
    assert near.interval.low > 0


def test_arms_of_other_items_are_no_pairs() -> None:
    arms = {"a1": answers_of(3, 10), "a0": answers_of(3, 11)}
    with pytest.raises(ValueError, match="answered different items"):
        compare(arms, "a1", "a0")


# --- verdicts -------------------------------------------------------------------------------------

GAIN: dict[str, Any] = {
    "a1_refit": 300,
    "a0_refit": 30,
    "moved_refit": 33,
    "a1_unfused": 300,
    "a1_promote": 300,
}


SUBSET = Standing.of(("a1_refit: a subset, 200 of 692 items",))


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        (GAIN, "knowledge", (
            "Knowledge, clearly above every control: fused by refit, the adapter (A1) ",
            "answers 43.35%",
            "As planned beforehand.",
        )),
        (GAIN | {"right": 0}, "refused", (
            "No claim, controls are missing: fused by refit",
            "no gain is claimed without every arm on items that both models got right",
        )),
        (GAIN | {"standing": SUBSET}, "exploratory", (
            "EXPLORATORY. No claim: ", "a subset, 200 of 692 items",
        )),
        (GAIN | {"moved_refit": 297}, "perturbation", (
            "No knowledge shown, not clearly above a random delta",
            "a random delta that moves as many answers scores 42.92%, too near",
        )),
        (GAIN | {"shuffled_refit": 297}, "shuffled", (
            "No knowledge shown, not clearly above shuffled answers: fused by refit",
            "an adapter trained alike on shuffled answers scores 42.92%, too near",
        )),
        (GAIN | {"persona_second": 297}, "second choice", (
            "No knowledge shown, not clearly above second choices: fused by refit",
            "second choices in place of what A1 moves score 42.92%, too near",
        )),
        # Items that were chosen for being wrong: any change leads back to 1 in 4.
        ({"n": 300, "options": 4, "a1_refit": 75, "a0_refit": 5, "moved_refit": 8}, "guessing", (
            "No knowledge shown, not clearly above guessing",
        )),
        ({"n": 300, "options": 4, "a1_refit": 150, "a0_refit": 5, "moved_refit": 8}, "knowledge", (
            "Knowledge, clearly above every control",
        )),
        ({"a1_refit": 128, "a0_refit": 123, "without": ["persona_again"]}, "no gain", (
            "Only jitter, no knowledge shown",
            "Controls that are missing: a rerun of the unfused persona",
        )),
        ({"a1_refit": 125, "a0_refit": 123, "a1_unfused": 300, "a1_promote": 300}, "no gain", (
            "Only jitter", "Fused by promote it adds knowledge.",
            "Unfused the adapter does add knowledge (+43.35 points): the fuse loses it.",
        )),
        # A gain that came without the fuse is no jitter.
        ({"a1_refit": 12, "a0_refit": 1}, "no gain", (
            "No knowledge shown, too small a gain over zeros: ",
        )),
        ({"a1_refit": 20, "a0_refit": 123}, "no gain", (
            "Harm, no knowledge: ", "McNemar's p, before it is adjusted, says that fewer are right",
        )),
        # 13 items that never change say little: up to 22.8 points are left.
        ({"n": 13, "a1_refit": 0, "a0_refit": 0}, "undecided", (
            "Undecided, too few items to say: ",
            "less than 5 points; 13 items leave room for 22.8 points",
        )),
        ({"a1_refit": 0, "a0_refit": 0}, "no gain", (
            "No knowledge shown, not one answer changes: ",
        )),
        ({"a1_refit": 20, "a0_refit": 19, "standing": SUBSET}, "no gain", (
            "EXPLORATORY. No claim: ", "a subset, 200 of 692 items",
        )),
    ],
)  # fmt: skip
def test_what_stands_against_a_gain_decides(
    changes: dict[str, Any], outcome: str, words: tuple[str, ...]
) -> None:
    findings = case(**changes)
    assert findings.outcome == outcome
    assert verdict(findings).startswith(words[0])
    assert all(sentence in verdict(findings) for sentence in words)


def test_a_gain_that_hangs_on_one_wording_is_no_content() -> None:
    """A1 gains in the first form of the prompt, and in the second no more than the same adapter
    trained on shuffled answers.
    """
    gain = {"a1_refit": 300, "a0_refit": 30, "moved_refit": 33}
    both = case(**GAIN, second_form=gain)
    assert both.outcome == "knowledge"
    assert (
        "In the second form of the prompt A1 answers 43.35% (300 of 692) and A0 4.34% (30 of 692); "
        "A1 beats every control there too."
    ) in verdict(both)
    one = case(**GAIN, second_form=gain | {"shuffled_refit": 297})
    assert one.outcome == "wording"
    assert verdict(one).startswith(
        "No knowledge shown, the gain hangs on one wording: fused by refit"
    )
    assert "but not so in a second form of the prompt" in verdict(one)
    assert "A1 beats all but shuffled answers." in verdict(one)
    assert "A1 beats none of its controls." in verdict(case(**GAIN, second_form={}))
    assert "second form" not in verdict(case(**GAIN))
    # Both forms of a way are one claim: its p is the largest of either.
    assert both.judgements[1].outcome == "wording"  # promote gains in the first form alone
    assert len(both.second_nulls["refit"]) == len(both.nulls["refit"])


def test_the_control_that_stands_most_in_the_way_is_named() -> None:
    """A random delta comes near; shuffled answers score more than A1 does: these are named."""
    words = case(**GAIN | {"moved_refit": 297, "shuffled_refit": 310}).judgements[0].words
    assert "shuffled answers scores 44.80%, no less than A1 (p (Holm) = 1): training" in words
    assert words.endswith(" Not beaten either: 1 other control.")
    # Of equal p the one that scores most.
    both = case(**GAIN | {"moved_refit": 320, "shuffled_refit": 310, "persona_second": 305})
    assert "a random delta that moves as many answers scores 46.24%, no less" in verdict(both)
    assert "Not beaten either: 2 other controls." in verdict(both)


def test_that_a_run_is_not_as_planned_is_said_once() -> None:
    assert verdict(case(**GAIN | {"standing": SUBSET})).count("not what was planned") == 1


@pytest.mark.parametrize(
    "name", [n for n in arms_of(POLICIES) if n not in ("a1_refit", "a0_refit")]
)
def test_no_gain_without_every_control(name: str) -> None:
    found = case(**GAIN, without=[name])
    assert found.judgements[0].outcome == "refused"
    assert verdict(found).startswith("No claim, controls are missing: fused by refit")
    assert found.missing_controls


def test_a_random_delta_that_moves_too_few_answers_is_no_control() -> None:
    """A1 moves 300 of 692. A random delta that moves none says nothing about moving, unless no
    scale moves more: then A1 is no random disturbance.
    """
    found = case(**GAIN)
    assert found.moved["a1_refit"].changed == 300
    moves_none = {
        "a1_refit": answers_of(300, 692), "a0_refit": answers_of(30, 692),
        "moved_refit": answers_of(0, 692),
    }  # fmt: skip
    still = judged(moves_none)
    assert still.outcome == "unmatched"
    moves = "0.00% (0 of 692) of the answers and A1 43.35%"
    assert verdict(still).startswith("Undecided, the random delta moves too few answers")
    assert f"but the random delta moves {moves}" in verdict(still)
    saturated = judged(moves_none, saturated=["refit"])
    assert saturated.outcome == "knowledge"
    assert f"No random delta moves as many answers: at most {moves}" in verdict(saturated)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=30))
def test_second_choices_stand_where_an_answer_moved(picks: list[tuple[int, int, int]]) -> None:
    persona, second, trained = (
        [Answer(str(n), "alpha", 0, row[place], "boxed", 4) for n, row in enumerate(picks)]
        for place in range(3)
    )
    chosen = second_choices(persona, second, trained)
    for before, other, after, answer in zip(persona, second, trained, chosen, strict=True):
        assert answer.pick == (before.pick if after.pick == before.pick else other.pick)


def test_the_published_rule_is_printed_beside_ours() -> None:
    met = case(a1_refit=158, a0_refit=123, shuffled_refit=157)
    p_value = met.claims["refit"].p_value
    assert met.published_rule == PublishedRule(692, 158, 123, p_value, 158, True)
    assert met.outcome == "shuffled"
    words = "policy, n = 692) is met: 158 against 123, the least count that passes is 158"
    assert words in verdict(met)
    small = case(n=60, a1_refit=2, a0_refit=1)
    assert "n = 692, here 60) is not met: 2 against 1, the least count" in verdict(small)


def test_a_gain_of_one_subject_is_told() -> None:
    """All that A1 gains is of one subject of three."""
    a1 = [
        replace(answer, pick=answer.gold if answer.subject == "alpha" else answer.pick)
        for answer in answers_of(0, 690)
    ]
    found = judged({"a1_refit": a1})
    assert found.claims["refit"].clustered.clusters == 3
    assert found.outcome == "knowledge"
    assert "By errors clustered over 3 subjects it may be chance (p = 0.42)" in verdict(found)


def test_what_both_models_got_right_and_a1_loses_is_told() -> None:
    assert "Of 200 items that both models got right A1 loses 0, A0 0." in verdict(case(**GAIN))


def test_no_claim_without_the_deciding_pair() -> None:
    with pytest.raises(ValueError, match="no answers of A1 and A0 by refit"):
        case(**GAIN, without=["a0_refit"])


# --- form, positions, words -----------------------------------------------------------------------


def with_rules(answers: list[Answer], boxed: Sequence[bool]) -> list[Answer]:
    """Answers that are not boxed have no letter."""
    return [
        one if form else replace(one, rule="none", pick=None)
        for one, form in zip(answers, boxed, strict=True)
    ]


def judged(arms: dict[str, list[Answer]], saturated: Sequence[str] = ()) -> Findings:
    n = len(next(iter(arms.values())))
    every = {
        name: answers_of(0, n, step=2 if name.startswith("moved") else 1)
        for name in arms_of(POLICIES)
    } | arms
    right = {name: answers_of(9, 9) for name in parts_of(POLICIES)["right"]}
    return find(
        every, right, answers_of(0, n), ways=POLICIES.ways, criterion=CRITERION,
        standing=Standing(), saturated=saturated,
    )  # fmt: skip


def test_a_gain_of_boxes_is_no_content() -> None:
    """A1 boxes all, A0 half; among those that both box they are right equally often."""
    answers = answers_of(345, 690)
    a0 = with_rules(answers, [index % 2 == 0 for index in range(690)])
    found = judged({"a1_refit": answers, "a0_refit": a0})
    assert CRITERION.passes(found.nulls["refit"][0])
    assert found.judgements[0].outcome == "format"
    assert verdict(found).startswith("No knowledge shown, a change of form: ")
    assert "A0 50.00% (345 of 690)" in verdict(found)
    assert "among the 345 items that both answer so the gain is +0.00 points" in verdict(found)
    # None of A0's answers is in form: nothing is left to compare.
    silent = judged({"a1_refit": answers, "a0_refit": with_rules(a0, [False] * 690)})
    assert silent.judgements[0].outcome == "format"
    assert "no item is answered so by both" in verdict(silent)


def test_content_among_boxed_answers_stands_though_more_are_boxed() -> None:
    a0 = with_rules(answers_of(30, 690), [index % 10 > 0 for index in range(690)])
    found = judged({"a1_refit": answers_of(400, 690), "a0_refit": a0})
    form = found.forms["refit"]
    assert (form.in_form, form.control_in_form, form.n) == (690, 621, 621)
    assert form.p_value < 1e-9
    assert found.judgements[0].outcome == "knowledge"


def test_a_preferred_position_is_no_content() -> None:
    """Half of the right options stand at A: an arm that always says A is right half the time."""
    items = [(str(n), 0 if n % 2 else 1 + n % 9) for n in range(600)]

    def saying(pick: int | None) -> list[Answer]:
        return [
            Answer(name, SUBJECTS[int(name) % 3], gold, (gold + 1) % 10 if pick is None else pick,
                   "boxed", 10)
            for name, gold in items
        ]  # fmt: skip

    every = {name: saying(None) for name in arms_of(POLICIES)} | {"a1_refit": saying(0)}
    every["moved_refit"] = saying(4)
    right = {name: answers_of(9, 9) for name in parts_of(POLICIES)["right"]}
    found = find(
        every, right, saying(None), ways=POLICIES.ways, criterion=CRITERION, standing=Standing(),
    )  # fmt: skip
    arm = found.arms["a1_refit"]
    assert (arm.accuracy, arm.by_position, arm.picks) == (0.5, 0.5, {"A": 1.0})
    assert found.right_positions["A"] == 0.5
    assert sum(found.right_positions.values()) == pytest.approx(1.0)
    assert found.judgements[0].outcome == "guessing"
    assert "or its own choice of places, scores 50.00%, no less than A1" in verdict(found)


def test_the_p_value_that_is_judged_stands_beside_the_plain_one() -> None:
    """A1 and A0 differ in 80 items and 45; only one of three policies shows anything."""
    arms = {"a1_refit": answers_of(158, 692, shift=45), "a0_refit": answers_of(123, 692)}
    found = judged(arms)
    claim, zero = found.claims["refit"], found.nulls["refit"][0]
    assert (claim.mcnemar.gained, claim.mcnemar.lost) == (80, 45)
    assert zero.p_adjusted == pytest.approx(3 * zero.p_value)
    p_values = f"McNemar p = {zero.p_value:.2g}, p (Holm) over all policies = {zero.p_adjusted:.2g}"
    assert p_values in verdict(found)
    assert found.judgements[0].outcome == "knowledge"


def test_arms_that_never_box_are_named() -> None:
    arms = case(n=12).arms
    assert answer_notes(arms) == []
    fallen = {name: replace(arm, rules={"last letter": 5, "none": 7}) for name, arm in arms.items()}
    [note] = answer_notes(fallen)
    assert note.startswith("NO ARM BOXES A SINGLE ANSWER")
    assert f"last letter {5 * len(arms)}, none {7 * len(arms)}" in note
    [note] = answer_notes(arms | {"persona": fallen["persona"]})
    assert note.startswith("Never box an answer: persona.")


def test_arms_that_answer_in_no_form_allow_no_claim() -> None:
    silent = with_rules(answers_of(0, 90), [False] * 90)
    found = judged({"a1_refit": silent, "a0_refit": silent})
    assert verdict(found).startswith("No claim, neither arm gives one answer in the form that was ")


def test_a_fixed_point_is_told_from_plain_weights() -> None:
    def figures(artifacts: list[float], bits: int | None) -> dict[str, Any]:
        paths = [f"layers.{index}" for index in range(len(artifacts))]
        by_module = {p: {"artifact": a} for p, a in zip(paths, artifacts, strict=True)}
        return {"refit": {"a0": {"by_module": by_module, "bits": dict.fromkeys(paths, bits)}}}

    [note] = fuse_notes(figures([0.0, 0.0], 3), 0.98)
    assert "at the fixed point of refit" in note
    assert "floor is 0 by construction" in note
    [part] = fuse_notes(figures([0.0, 0.04, 0.03], 3), 0.98)
    assert part.startswith("A0 by refit changed 2 of 3 modules")
    assert fuse_notes(figures([0.02, 0.04], 3), 0.98) == []
    assert fuse_notes(figures([0.0], None), 0.98) == []


# --- tables ---------------------------------------------------------------------------------------


def test_flips_count_changes_of_answers_and_of_outcomes() -> None:
    found = flips(answers_of(5, 10), answers_of(5, 10, shift=2))
    assert (found.n, found.fixed, found.broken) == (10, 2, 2)
    assert found.changed >= 4
    assert flips(answers_of(5, 10), answers_of(5, 10)) == Flips(10, 0, 0, 0)
    assert flips(answers_of(5, 10), answers_of(5, 8)).n == 8


def test_floors_are_told_apart() -> None:
    none = floor_in_words(Flips(13, 0, 0, 0), Flips(692, 0, 0, 0), 0.05)
    assert "no answer at all and no outcome: it fixes 0 of 13 (at most 22.8%, 95%)" in none
    assert "breaks 0 of 692 (at most 0.6%)" in none
    one_sided = floor_in_words(Flips(692, 130, 123, 0), Flips(692, 5, 0, 3), 0.05)
    assert "one-sided" in one_sided
    # Broken right answers are no sign of a selection of wrong ones.
    damage = floor_in_words(Flips(692, 5, 1, 0), Flips(692, 200, 0, 200), 0.05)
    assert "more broken than fixed" in damage
    assert "selection" not in damage
    symmetric = floor_in_words(Flips(692, 60, 20, 0), Flips(692, 60, 0, 22), 0.05)
    assert "no asymmetry shown (Fisher, p = 0.88)" in symmetric
    assert "no outcome" in floor_in_words(Flips(692, 9, 0, 0), Flips(692, 0, 0, 0), 0.05)
    assert "not tried" in floor_in_words(Flips(692, 0, 0, 0), Flips(0, 0, 0, 0), 0.05)


def test_subjects_add_up_and_guessing_is_by_options() -> None:
    found = case(n=90, a1_refit=40)
    assert list(found.subjects) == [*SUBJECTS, "all"]
    assert found.subjects["all"]["n"] == 90
    assert found.subjects["all"]["a1_refit"] == 40
    assert sum(found.subjects[name]["a1_refit"] for name in SUBJECTS) == 40
    assert guess_rate(answers_of(1, 10, options=4)) == 0.25
    arm = found.arms["a1_refit"]
    assert arm.boxed_rate == 1.0
    assert sum(arm.picks.values()) == pytest.approx(1.0)


def test_a_promotion_that_does_not_keep_the_delta_is_said() -> None:
    fuses = {way: {"a1": {"total": {"correlation": 0.06}}} for way in ("promote", "keep")}
    (note,) = fuse_notes(fuses, 0.98)
    assert note.startswith(
        "Fused by promote, A1 misses the target correlation of 0.98: it has 0.060"
    )
    assert fuse_notes({"promote": {"a1": {"total": {"correlation": 0.99}}}}, 0.98) == []
