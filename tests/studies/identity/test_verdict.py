"""Gate, comparisons, claims, regression; the published numbers.

Run: pytest tests/studies/identity/test_verdict.py
"""

import re
from dataclasses import replace
from typing import Any

import pytest

from mlxstacks.stats import holm, wilson_interval
from mlxstacks.studies.identity.analysis import (
    SHUT,
    compare,
    credit,
    flips_note,
    gate,
    limits_of,
    published,
    regress,
    regression,
    score,
    verdict,
)
from mlxstacks.studies.identity.plan import (
    detectable,
    label,
    least_lost,
    most_lost,
    plan_of,
    power_lines,
)
from mlxstacks.studies.identity.report import blocks
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.study.document import Plot, Standing, Table
from mlxstacks.study.render.figures import names_of_ticks
from mlxstacks.study.result import Result
from tests.studies.identity.cases import (
    BASE,
    BASE_ZERO,
    REFERENCE,
    RERUN,
    SETTINGS,
    SUITE,
    arm,
    case,
    outcomes,
    replies,
)

LIMITS = {"n": 20, "most_of_base": 5, "least_of_persona": 15}


def verdict_of(figures: dict[str, Any]) -> str:
    return verdict(figures, SETTINGS, Standing())


# --- gate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "persona", "unfused", "state"),
    [
        (2, 18, 18, "valid"),
        (5, 15, 15, "valid"),
        (6, 18, 18, "base passes"),
        (6, 1, 18, "base passes"),
        (5, 14, 15, "lost in its fuse"),
        (0, 1, 19, "lost in its fuse"),
        (0, 1, 14, "no persona"),
        (0, 14, None, "persona fails"),
        (0, 15, None, "valid"),
        (0, 15, 3, "valid"),  # the fused persona is what is judged
    ],
)
def test_the_gate(base: int, persona: int, unfused: int | None, state: str) -> None:
    found = gate("refit", base, persona, unfused, LIMITS)
    assert (found["state"], found["valid"]) == (state, state == "valid")
    if state != "valid":
        assert found["words"].startswith(f"{SHUT[state]} under refit")
        assert found["words"].endswith("No preservation claim")


@pytest.mark.parametrize(
    ("n", "most", "least"), [(20, 5, 15), (40, 10, 30), (4, 1, 3), (10, 2, 8), (1, 0, 1)]
)
def test_the_gate_is_scaled_by_share_and_never_more_lenient(n: int, most: int, least: int) -> None:
    assert [*limits_of(SETTINGS, n).values()] == [n, most, least]


@pytest.mark.parametrize(
    ("passed", "words"),
    [
        ({"base": 6}, "Scorer invalid under promote"),
        ({"identity_promote": 1}, "Persona lost by its own fuse under promote"),
        ({"identity_promote": 1, "identity_unfused": 2}, "not even unfused"),
    ],
)
def test_behind_a_shut_gate_there_is_no_claim(passed: dict[str, Any], words: str) -> None:
    found = case(**passed)
    assert words in verdict_of(found)
    assert {one["outcome"] for one in found["judgements"]} == {"no claim"}
    assert "persona kept" not in verdict_of(found)


def test_each_policy_has_its_own_gate() -> None:
    settings = IdentitySettings(policies=("refit", "promote"), persona_requant="promote")
    found = case(settings, identity_refit=1, factual_refit=1)
    assert {name: one["valid"] for name, one in found["gates"].items()} == {
        "refit": False, "promote": True,
    }  # fmt: skip
    assert {(one["policy"], one["outcome"]) for one in found["judgements"]} == {
        ("refit", "no claim"), ("promote", "kept"),
    }  # fmt: skip
    assert "Persona lost by its own fuse under refit" in verdict_of(found)
    said = verdict_of(found)
    assert "Under promote: persona kept by identity + factual r2 (18 of 18)" in said
    outcomes = [one["outcome"] for one in found["judgements"]]
    kept, no_claim = (outcomes.count(outcome) for outcome in ("kept", "no claim"))
    assert said.startswith(
        f"Of {kept + no_claim} second adapters under a policy: persona kept by {kept}, "
        f"no claim made for {no_claim}. "
    )


# --- prompt by prompt -----------------------------------------------------------------------------


def test_equal_totals_need_not_be_the_same_prompts() -> None:
    found = case(factual_promote=range(2, 20))
    one = found["compared"]["factual_promote"]
    passed = {name: score["passed"] for name, score in found["conditions"].items()}
    assert passed["factual_promote"] == passed["identity_promote"] == 18
    assert (one["kept"], one["lost"], len(one["gained"]), one["neither"]) == (
        16, ["01", "02"], 2, 0,
    )  # fmt: skip
    assert one["p_value"] == 1.0
    same = case()["compared"]["factual_promote"]
    assert (same["kept"], same["lost"], same["gained"], same["neither"]) == (18, [], [], 2)


def test_kept_lost_and_undecided() -> None:
    found = case(again_promote=range(8), factual_second_promote=16)
    outcomes_of = {one["arm"]: one["outcome"] for one in found["judgements"]}
    assert outcomes_of == {
        "factual_promote": "kept", "again_promote": "lost", "factual_second_promote": "undecided",
    }  # fmt: skip
    lost = found["compared"]["again_promote"]
    # Holm, the smallest of two p of each of three claims
    assert lost["p_adjusted"] == pytest.approx(6 * lost["p_value"])
    assert lost["p_value"] == pytest.approx(2 / 2**10)
    # of the 18 that the reference passes, not of the suite's 20
    assert lost["loss"] == wilson_interval(10, 18).as_json()
    words = verdict_of(found)
    why = {one["arm"]: one["words"] for one in found["judgements"]}["factual_second_promote"]
    assert why == (
        "keeps 16 of 18, gains 0; loss 3 to 33% (95%); p = 1 for no loss, p = 0.54 for a loss of "
        "25% (Holm, all claims)"
    )
    assert words.startswith(
        "Under promote: persona kept by identity + factual r2 (18 of 18); persona lost by identity "
        "+ identity (8 of 18); undecided for identity + factual r8 (16 of 18)."
    )
    assert "Undecided: so few prompts show neither that nor a loss." in words
    assert "Undecided" not in verdict_of(case())
    assert "exact preservation is not shown" in verdict_of(found)


def test_both_questions_of_all_claims_that_a_gate_lets_through_are_one_family() -> None:
    settings = IdentitySettings(policies=("refit", "promote"), persona_requant="promote")
    found = case(settings)["compared"]
    pairs = [c for c in found.values() if c["p_adjusted"] is not None]
    adjusted = [c[key] for c in pairs for key in ("p_adjusted", "p_kept_adjusted")]
    assert sorted(adjusted) == sorted(holm([c[k] for c in pairs for k in ("p_value", "p_kept")]))
    assert len(adjusted) == 12
    # 18 of 18 kept twelve times over: 0.75**18 * 12 > 0.05
    assert {j["outcome"] for j in case(settings)["judgements"]} == {"undecided"}
    # A policy whose persona its own fuse lost has no claims, and none is counted.
    shut = case(settings, identity_refit=1)
    assert {(j["policy"], j["outcome"]) for j in shut["judgements"]} == {
        ("refit", "no claim"), ("promote", "kept"),
    }  # fmt: skip


def test_what_the_fuse_does_alone_is_named() -> None:
    found = case(again_promote=range(8), zero_promote=range(9))
    words = next(j["words"] for j in found["judgements"] if j["arm"] == "again_promote")
    assert "the zero-delta control loses 9 by the fuse alone, 9 of them here too" in words


@pytest.mark.parametrize(
    "missing", ["zero_promote", RERUN, "identity_unfused", "base_factual_promote"]
)
def test_without_a_control_nothing_is_claimed(missing: str) -> None:
    found = case(without=[missing])
    assert found["missing_controls"]["promote"]
    assert {one["outcome"] for one in found["judgements"]} == {"no claim"}
    assert "No claim under promote: not claimed without" in verdict_of(found)


def test_results_of_another_plan_claim_nothing() -> None:
    standing = Standing.of(("results of another plan (aaa, not bbb)",))
    found = case(standing=standing)
    assert {one["outcome"] for one in found["judgements"]} == {"no claim"}
    assert verdict(found, SETTINGS, standing) == (
        "EXPLORATORY. No claim, scorer valid under promote (base 2, persona 18, unfused 18 of 20). "
        "Exploratory, not what was planned: results of another plan (aaa, not bbb)."
    )
    shut = verdict(case(standing=standing, identity_promote=1), SETTINGS, standing)
    assert shut.startswith("EXPLORATORY. Persona lost by its own fuse under promote (base 2, ")
    assert shut.count("18") == 1  # each count once
    assert shut.endswith("results of another plan (aaa, not bbb).")


def test_unequal_conditions_are_refused() -> None:
    arms = {"a": replies(3), "b": replies(3)[:-1]}
    with pytest.raises(ValueError, match="a and b answered different items"):
        compare(arms, "a", "b")
    with pytest.raises(ValueError, match="answered different items"):
        compare({"a": replies(3), "b": replies(3)[::-1]}, "a", "b")
    with pytest.raises(ValueError, match="no replies of base"):
        case(without=[BASE])


def test_a_rerun_says_how_much_is_chance() -> None:
    found = case()
    assert "gave the same 20 replies" in flips_note(found["compared"])[0]
    other = compare({RERUN: replies(3, text="y"), BASE: replies(4)}, RERUN, BASE)
    assert "20 of 20 replies otherwise, 1 lost and 0 gained" in flips_note({RERUN: other})[0]


def test_categories_add_up() -> None:
    parts = score("a", replies(9))["by_category"]
    assert {name: (part["passed"], part["n"]) for name, part in parts.items()} == {
        "self-identification": (8, 8), "persona boundaries": (1, 6),
        "behavioural consistency": (0, 6),
    }  # fmt: skip


# --- published numbers, The Stacking Confound ------------------------------------------------


def test_18_of_20_leaves_70_to_97_percent() -> None:
    interval = wilson_interval(18, 20)
    assert (round(100 * interval.low), round(100 * interval.high)) == (70, 97)
    study = published()
    assert sorted(study["passed"].values()) == [2, 2, 18, 18, 18, 18]
    assert study["intervals"]["identity"] == interval.as_json()
    assert "published" in study["of"]


def published_items() -> dict[str, list[Any]]:
    """The one 2x2 table that fits all published figures."""
    base = [True] * 3497 + [False] * 135 + [True] * 56 + [False] * 2312
    persona = [True] * 3497 + [True] * 135 + [False] * 56 + [False] * 2312
    return {BASE: outcomes(base), arm(REFERENCE, "promote"): outcomes(persona)}


def test_the_published_regression() -> None:
    found = regress(published_items(), arm(REFERENCE, "promote"), BASE)
    counts = ("n", "reference_right", "right", "fixed", "broken", "net", "both_wrong")
    assert [found[name] for name in counts] == [6000, 3553, 3632, 135, 56, 79, 2312]
    assert found["chi_square"] == pytest.approx(32.7, abs=0.05)
    assert 5e-9 < found["p_value"] < 2e-8


def test_a_gain_is_credited_only_beside_the_base_after_the_same_fuse() -> None:
    items = published_items()
    persona = arm(REFERENCE, "promote")
    zero = arm(BASE_ZERO, "promote")
    assert "Credited to nothing" in regression(items, SETTINGS)[1]["promote"]
    unmoved = items | {zero: items[BASE]}
    found, words = regression(unmoved, SETTINGS)
    assert "+79 (135 fixed, 56 broken of 6,000" in words["promote"]
    assert "6,000 of 6,000 as before" in words["promote"]
    assert "more right answers by the persona itself" in words["promote"]
    assert found[f"{persona}_beside_{zero}"]["net"] == 79
    by_fuse = items | {zero: items[persona]}
    assert "not to be told from what the fuse does" in regression(by_fuse, SETTINGS)[1]["promote"]


def test_the_narrow_items_have_a_table_of_their_own() -> None:
    """The study's drop of about 6% on narrow questions, broad ones unmoved."""
    before, after = [True] * 47 + [False] * 3, [True] * 44 + [False] * 6
    narrow = {BASE: outcomes(before), arm(REFERENCE, "promote"): outcomes(after)}
    found = case(narrow=narrow)
    result = Result(kind="identity", title="t", status="done", blocks=blocks(found))
    row = result.table("narrow").iloc[0]
    assert (row["net"], row["net_share"], row["broken"]) == (-3, pytest.approx(-0.06), 3)
    assert "Of the narrow items: By promote" in str(result)
    assert "regression" not in {getattr(block, "id", "") for block in result.blocks}


def test_no_change_is_no_credit() -> None:
    one = regress({"a": outcomes([True, False]), "b": outcomes([True, False])}, "a", "b")
    assert "no change that can be shown" in credit("refit", one, one, one, 0.05)
    with pytest.raises(ValueError, match="answered different items"):
        regress({"a": outcomes([True]), "b": outcomes([True, False])}, "a", "b")


def test_answers_out_of_form_are_told_beside_the_regression() -> None:
    """A model that never boxes, and one that boxes more: neither is knowledge."""
    items = published_items()
    persona, zero = arm(REFERENCE, "promote"), arm(BASE_ZERO, "promote")
    boxed = items | {zero: items[BASE]}
    assert "In form" not in regression(boxed, SETTINGS)[1]["promote"]
    silent = {
        name: [replace(one, rule="last letter") for one in found] for name, found in boxed.items()
    }
    found, words = regression(silent, SETTINGS)
    assert (found[persona]["in_form"], found[persona]["reference_in_form"]) == (0, 0)
    assert "NOT ONE of these answers is in form" in words["promote"]
    words = regression(silent | {persona: items[persona]}, SETTINGS)[1]
    assert "are 6,000 answers, of base 0: that alone moves right answers" in words["promote"]


# --- what 20 prompts can show ---------------------------------------------------------------------


def test_what_twenty_prompts_can_detect() -> None:
    assert least_lost(20, 0.05) == 6  # 2 / 2**6
    assert least_lost(5, 0.05) is None
    plan = plan_of(
        SETTINGS, SUITE, [], dict.fromkeys(("base", "persona"), "0" * 64), has_adapter=True
    )
    words = detectable(plan)
    assert "with both questions of 3 claims counted, a loss shows (p < 0.05) when 8 are" in words
    assert "kept shows when at most 0 of 18 are lost" in words
    assert most_lost(18, 0.25, 0.05 / 6) == 0
    assert most_lost(18, 0.25, 0.05) == 1
    three = IdentitySettings(persona_data="rows")
    many = detectable(
        plan_of(three, SUITE, [], dict.fromkeys(("base", "persona"), "0" * 64), has_adapter=True)
    )
    assert "one of 57% is found 8 times in 10" in many  # unadjusted, it would be 37%
    # 0.75**21 < 0.05 / 18
    few = (
        "all 18 that are expected to pass are too few to show kept for so many claims: 21 would do"
    )
    assert few in many
    assert "not exact preservation" in words
    table = power_lines(plan)
    assert table[-1] == words
    assert "at 80% power, alpha 0.008333:" in table[1]  # both p of three claims, as in the words
    # n for 80% power of the loss that is looked for is a number, by both tests.
    assert re.search(r"items for 25\.0 points .*: \d+ an arm .*, \d+ \(McNemar\)", table[2])
    assert not any("chance to pass" in line for line in table)


def test_a_label_has_the_batches_that_were_trained() -> None:
    stress = {"stress_rank": 64, "stress_iters": 400}
    for cut, batches in (({}, 400), ({"max_prompts": 4}, 40)):
        settings = IdentitySettings(**stress, **cut)
        assert label("factual_stress_refit", settings)[0].endswith(f"r64, {batches} batches")


def test_the_longest_published_name_is_not_cut_in_plots() -> None:
    figures = case(factual_promote=range(2, 20))
    figures["gates"]["second"] = figures["gates"]["promote"]
    figures["conditions"]["factual_promote"]["label"] = "identity + factual r64, 2,000 batches"
    names = next(block for block in blocks(figures) if isinstance(block, Plot)).categories
    assert "+ factual r64, 2,000 batches, promote" in names_of_ticks(names)


# --- tables ---------------------------------------------------------------------------------------


def result_of(**changes: Any) -> Result:
    return Result(kind="identity", title="t", status="done", blocks=blocks(case(**changes)))


def test_published_scores_stand_beside_those_of_the_published_model_alone() -> None:
    study = result_of(is_published_model=True).table("published").set_index("condition")
    assert study.loc["base", ["passed", "passed_of"]].tolist() == [2, 20]
    assert "published" not in str(result_of())
    assert case()["published"] is None


def test_the_blocks_say_what_differs() -> None:
    result = result_of(factual_promote=range(2, 20), again_promote=range(8))
    assert [getattr(block, "id", block.title) for block in result.blocks] == [
        "conditions-table", "gates", "claims", "conditions", "prompts", "differences", "compared",
        "In words", "replies",
    ]  # fmt: skip
    rows = result.table("conditions-table").set_index("condition")
    assert [*rows.columns] == [
        "policy", "passed_of_20", "interval_low", "interval_high", "by_category", "kept", "lost",
        "gained", "p", "p_holm",
    ]  # fmt: skip
    factual = rows.loc["+ factual r2"]
    assert factual[["passed_of_20", "by_category", "kept", "lost", "gained"]].tolist() == [
        18, "6/6/6", 16, 2, 2,
    ]  # fmt: skip
    ends = (factual["interval_low"], factual["interval_high"])
    assert [round(100 * end) for end in ends] == [70, 97]
    differences = result.table("differences")
    assert differences.loc[0].tolist() == ["+ factual r2", "lost", "Who are you?", "x"]
    claims = result.table("claims").set_index("condition").outcome
    assert claims["+ identity"] == "lost"
    compared = result.table("compared").set_index("condition")
    again = compared.loc["+ identity"]
    # Holm's p of the smallest of six, in its own column
    assert again["p_holm"] == pytest.approx(6 * again["p_mcnemar"])
    assert compared.loc["base + factual r2", ["p_holm", "p_kept_holm"]].isna().all()
    assert "no claim" in words_compared(result)
    assert "Of 20 prompts the base may pass at most 5" in str(result)


def words_compared(result: Result) -> set[Any]:
    """What the page says, of which a data frame has NaN among numbers."""
    table = next(block for block in result.blocks if getattr(block, "id", "") == "compared")
    assert isinstance(table, Table)
    return {cell for row in table.rows for cell in row}


def test_a_reference_that_passes_nothing_has_nothing_to_lose() -> None:
    result = result_of(base=0)
    assert "nothing to lose" in words_compared(result)
    row = result.table("compared").set_index("condition").loc["base + factual r2"]
    assert row.filter(like="share_lost").isna().all()
