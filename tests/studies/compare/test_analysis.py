"""Verdicts follow the plan's rule and nothing else.

Run: pytest tests/studies/compare/test_analysis.py
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.studies.compare.analysis import (
    ArmResult,
    CellRecord,
    analyse,
    check_budgets,
    measures,
    steps_to_loss,
    verdict,
)
from mlxstacks.studies.compare.report import blocks
from mlxstacks.studies.compare.run import curve_of
from mlxstacks.studies.compare.settings import ArmSettings, CompareSettings
from mlxstacks.study.document import Plot, Table
from mlxstacks.study.render.words import format_cell

RULE = CompareSettings.model_validate({"arms": [{"name": "base"}, {"name": "own"}]})
LOSSES = st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6)
SHIFTS = st.floats(-1.0, 1.0)


def cells(arm: str, losses: Sequence[float], steps: float = 10.0) -> list[CellRecord]:
    return [
        CellRecord(
            arm, seed, "trained", None, {"task_loss": loss, "steps": steps},
            {"ungated": {"a": {"a": loss}}},
        )
        for seed, loss in enumerate(losses)
    ]  # fmt: skip


def analysed(*cells: CellRecord, seeds: int = 3, **changes: Any) -> list[ArmResult]:
    arms = tuple(ArmSettings(name=name) for name in dict.fromkeys(cell.arm for cell in cells))
    update = {"seeds": tuple(range(seeds)), "arms": arms, **changes}
    budgets = {arm.name: {"parameters": 8, "steps": 10, "tokens": 20} for arm in arms}
    return analyse(RULE.model_copy(update=update), budgets, cells)


def outcome(base: Sequence[float], own: Sequence[float]) -> str:
    return str(analysed(*cells("base", base), *cells("own", own), seeds=len(base))[1].outcome)


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ((-0.11, -0.10, -0.09), "better"),
        ((0.11, 0.10, 0.09), "worse"),
        ((0.001, -0.001, 0.0), "no difference shown"),
        # Away from 0, but not by what counts.
        ((0.010, 0.011, 0.012), "no difference shown"),
        # The interval holds 0 and reaches beyond the margin.
        ((-0.3, 0.1, 0.0), "undecided"),
        # Away from 0, the mean below the margin, the interval across it.
        ((0.010, 0.015, 0.020), "undecided"),
    ],
)
def test_the_rule(differences: Sequence[float], expected: str) -> None:
    base = (1.0, 1.2, 0.8)
    own = [a + d for a, d in zip(base, differences, strict=True)]
    assert outcome(base, own) == expected


@given(base=LOSSES, shift=SHIFTS, data=st.data())
def test_exchanging_arms_exchanges_better_and_worse(
    base: list[float], shift: float, data: st.DataObject
) -> None:
    size = len(base)
    noise = data.draw(st.lists(st.floats(-0.05, 0.05), min_size=size, max_size=size))
    own = [a + shift + n for a, n in zip(base, noise, strict=True)]
    mirror = {"better": "worse", "worse": "better"}
    first = outcome(base, own)
    assert outcome(own, base) == mirror.get(first, first)


@given(base=LOSSES, shift=st.floats(-0.5, 0.5))
def test_what_pairs_share_does_not_count(base: list[float], shift: float) -> None:
    """Seeds may differ by much: only the difference of a pair counts."""
    own = [loss + shift for loss in base]
    if abs(abs(shift) - RULE.margin) > 1e-6:
        wanted = "no difference shown" if abs(shift) < 0.02 else "worse" if shift > 0 else "better"
        assert outcome(base, own) == wanted


def test_intervals_are_those_of_the_paired_t_test() -> None:
    differences = [0.1, 0.3, 0.2]
    results = analysed(*cells("base", (1.0, 2.0, 3.0)), *cells("own", (1.1, 2.3, 3.2)))
    found = results[1].differences["task_loss"]
    half = 4.302652730 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(sum(differences) / 3)
    assert (found.low, found.high) == pytest.approx((0.2 - half, 0.2 + half))


def test_more_arms_need_more_to_be_judged() -> None:
    base, own = (1.0, 1.0, 1.0), (0.95, 0.94, 0.96)
    alone = analysed(*cells("base", base), *cells("own", own))
    both = analysed(*cells("base", base), *cells("own", own), *cells("other", base))
    assert alone[1].judged is not None
    assert both[1].judged is not None
    assert both[1].judged.confidence == pytest.approx(0.975)
    assert (both[1].judged.low or 0) < (alone[1].judged.low or 0)
    assert both[1].differences == alone[1].differences


def test_missing_cells_and_unequal_steps_decide_nothing() -> None:
    base, own = cells("base", (1.0, 1.0, 1.0)), cells("own", (0.5, 0.5, 0.5))
    crashed = replace(own[2], status="crashed")
    lacking = analysed(*base, *own[:2], crashed)[1]
    assert (lacking.outcome, lacking.reason) == (
        "undecided", "1 of 3 seeds have no pair of results",
    )  # fmt: skip
    short = analysed(*base, *cells("own", (0.5,) * 3, 8))[1]
    assert (short.outcome, short.reason) == (
        "undecided", "seed 0 did 8 of 10 steps, the control 10 of 10",
    )  # fmt: skip
    at_tolerance = analysed(*base, *cells("own", (0.5,) * 3, 8), tolerance=0.2)[1]
    assert at_tolerance.outcome == "better"
    loose = analysed(*base, *cells("own", (0.5,) * 3, 8), equal=("parameters",))[1]
    assert loose.outcome == "better"
    tokens = analysed(*base, *cells("own", (0.5,) * 3, 8), equal=("tokens",))[1]
    assert tokens.reason == short.reason
    one = analysed(base[0], own[0], seeds=1)[1]
    assert (one.outcome, one.reason) == ("undecided", "one seed has no interval")


def test_the_verdict_says_outcome_interval_and_what_counts() -> None:
    found = analysed(*cells("a", (1.0, 1.1)), *cells("b", (0.5, 0.6)), seeds=2)
    assert verdict(RULE, found) == (
        "task loss, b against a: better, -0.5000 (-0.5000 to -0.5000 at 0.95, n=2). What counts is "
        "0.02 nats per token."
    )
    three = analysed(*(cell for arm in "abc" for cell in cells(arm, (1.0, 1.1))), seeds=2)
    assert ". Task loss, c against a: " in verdict(RULE, three)


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c")])
def test_which_intervals_are_for_all_arms_together_is_said(names: tuple[str, ...]) -> None:
    of_all = [cell for place, name in enumerate(names) for cell in cells(name, (1.0, 1.1 + place))]
    settings = RULE.model_copy(
        update={"seeds": (0, 1), "arms": tuple(ArmSettings(name=name) for name in names)}
    )
    budgets = {name: {"parameters": 8, "steps": 10, "tokens": 20} for name in names}
    made = blocks(settings, budgets, analyse(settings, budgets, of_all), of_all)
    captions = [b.caption for b in made if isinstance(b, Table) and "paired by seed" in b.title]
    assert ["by itself" in caption for caption in captions] == [len(names) > 2] * (len(names) - 1)


@given(
    base=st.integers(1, 10**9), share=st.floats(-0.5, 0.5), tolerance=st.floats(0.0, 0.4),
)  # fmt: skip
def test_budgets_are_equal_within_the_tolerance_and_not_beyond(
    base: int, share: float, tolerance: float
) -> None:
    own = max(1, round(base * (1 + share)))
    rest = {"steps": 10, "tokens": 10}
    budgets = {"a": {"parameters": base, **rest}, "b": {"parameters": own, **rest}}
    unequal = abs(own - base) > tolerance * base
    with pytest.raises(InputError, match="parameters") if unequal else nullcontext():
        check_budgets(budgets, ["parameters", "steps"], tolerance)
    check_budgets(budgets, ["steps", "tokens"], 0.0)


def test_measures_of_one_domain_without_a_router() -> None:
    """No earlier domain, no balance loss: nothing, not zero."""
    history = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]
    domain = {
        "final_loss": 1.5, "parameters": 7, "steps": 2, "balance_loss_per_projection": None,
        "rounds": [{"history": history}],
    }  # fmt: skip
    found = measures({"domains": {"a": domain}, "matrix": {"prefix": {"a": {"a": 1.5}}}}, None)
    for name in ("later_task_loss", "ungated", "ungated_earlier", "balance_loss", "seconds"):
        assert found[name] is None, name
    assert (found["task_loss"], found["prefix"], found["train_loss"]) == (1.5, 1.5, 2.0)


def test_a_curve_counts_the_steps_of_earlier_rounds_on() -> None:
    rounds = [
        {"steps": 4, "validation": [{"step": 0, "validation_loss": 3.0},
                                    {"step": 4, "validation_loss": 2.0}]},
        {"steps": 2, "validation": [{"step": 0, "validation_loss": 2.0},
                                    {"step": 2, "validation_loss": 1.0}]},
    ]  # fmt: skip
    assert curve_of(rounds) == [(0, 3.0), (4, 2.0), (4, 2.0), (6, 1.0)]


def test_curves_are_means_over_seeds_at_the_steps_that_all_have() -> None:
    base, own = cells("base", (1.0, 2.0)), cells("own", (0.5, 0.7))
    curves = ([(0, 4.0), (5, 2.0)], [(0, 2.0), (5, 1.0), (9, 0.5)])
    both = [
        replace(cell, curves={"a": [(step, loss * scale) for step, loss in curve]})
        for of_arm, scale in ((base, 1.0), (own, 0.5))
        for cell, curve in zip(of_arm, curves, strict=True)
    ]
    settings = RULE.model_copy(update={"seeds": (0, 1)})
    budget = {"parameters": 8, "steps": 10, "tokens": 20}
    budgets = {"base": budget, "own": budget}
    made = blocks(settings, budgets, analyse(settings, budgets, both), both)
    [plot] = [block for block in made if getattr(block, "id", "") == "curves-1"]
    assert isinstance(plot, Plot)
    assert [(line.label, line.x, line.y) for line in plot.series] == [
        ("base", (0, 5), (3.0, 1.5)), ("own", (0, 5), (1.5, 0.75)),
    ]  # fmt: skip


CURVES = st.lists(st.floats(0.1, 5.0), min_size=2, max_size=6)


def curve(losses: Sequence[float]) -> dict[str, list[tuple[int, float]]]:
    return {"a": [(10 * place, loss) for place, loss in enumerate(losses)]}


@given(own=CURVES, base=CURVES)
def test_steps_to_a_loss_are_of_the_first_evaluation_there(
    own: list[float], base: list[float]
) -> None:
    one, two = (CellRecord("x", 0, "trained", curves=curve(losses)) for losses in (base, own))
    found = steps_to_loss([(one, two)], 0.95)["a"]
    there = [10 * place for place, loss in enumerate(own) if loss <= min(base)]
    assert (found.steps and found.steps.mean) == (min(there) if there else None)
    assert (found.reached, found.n) == (bool(there), 1)
    assert found.target_steps.mean == 10 * base.index(min(base))
    itself = steps_to_loss([(one, one)], 0.95)["a"].ratio
    is_told = base[0] != min(base) and len(base) > 2
    assert getattr(itself, "mean", None) == (1.0 if is_told else None)


def test_times_faster_is_a_geometric_mean_over_seeds() -> None:
    """As published: the loss after 250 steps is there after 100."""
    slow, fast = curve([3.0, 2.5, 2.2, 2.1, 2.05, 2.0]), curve([3.0, 2.4, 2.0, 1.9, 1.8, 1.7])
    base = [replace(c, curves=slow) for c in cells("base", (2.0, 2.0))]
    own = [replace(c, curves=fast) for c in cells("own", (1.7, 1.7))]
    arm = analysed(*base, *own, seeds=2)[1]
    assert getattr(arm.to_control["a"].ratio, "mean", None) == pytest.approx(2.5)
    assert (arm.to_arm["a"].reached, arm.to_arm["a"].steps, arm.to_arm["a"].ratio) == (
        0, None, None,
    )  # fmt: skip
    own[1] = replace(own[1], curves=slow)
    mixed = analysed(*base, *own, seeds=2)[1].to_control["a"].ratio
    assert mixed is not None
    assert mixed.mean == pytest.approx(2.5**0.5)


def tables_of(*results: ArmResult) -> list[Table]:
    """The tables of a comparison of two seeds."""
    arms = tuple(ArmSettings(name=result.arm) for result in results)
    settings = RULE.model_copy(update={"seeds": (0, 1), "arms": arms})
    budget = {"parameters": 8, "steps": 10, "tokens": 20}
    made = blocks(settings, {arm.name: budget for arm in arms}, results, [])
    return [block for block in made if isinstance(block, Table)]


def test_what_was_spent_has_a_unit_each_and_no_empty_column() -> None:
    spent = {"parameters": 1200.0, "seconds": 3.4}
    of_arms = [
        replace(cell, values=cell.values | spent | {"steps": 10.0 + cell.seed})
        for name in ("base", "own")
        for cell in cells(name, (1.0, 1.1))
    ]
    tables = {table.id: table for table in tables_of(*analysed(*of_arms, seeds=2))}
    shown = [
        format_cell(cell, column)
        for cell, column in zip(tables["spent"].rows[1], tables["spent"].columns, strict=True)
    ]
    assert shown == ["own", "1,200", "10.5 (4.1 to 16.9)", "3.4 s"]
    assert "why" not in {column.name for column in tables["arms"].columns}
    failed = analysed(*of_arms[:2], replace(of_arms[2], status="failed"), of_arms[3], seeds=2)
    [arms] = [table for table in tables_of(*failed) if table.id == "arms"]
    assert "1 of 2 seeds have no pair of results" in arms.rows[1]


def test_no_ratio_is_told_of_evaluations_at_start_and_end_alone() -> None:
    """It could be nothing else than 1, whatever the losses; runs of two lengths have one."""
    ends = [replace(c, curves={"a": [(0, 3.0), (6, 1.1)]}) for c in cells("base", (2.0, 2.0))]
    own = [replace(c, curves={"a": [(0, 3.0), (6, 0.9)]}) for c in cells("own", (1.7, 1.7))]
    [base, arm] = analysed(*ends, *own, seeds=2)
    found = arm.to_control["a"]
    assert (found.reached, found.ratio) == (2, None)
    assert found.why.endswith("set run.steps_per_eval")
    [table] = [table for table in tables_of(base, arm) if table.id == "steps-1"]
    assert found.why in table.caption
    assert {row[-1] for row in table.rows} == {None}
    longer = [replace(c, curves={"a": [(0, 3.0), (9, 0.9)]}) for c in own]
    found = analysed(*ends, *longer, seeds=2)[1].to_control["a"]
    assert (found.ratio and round(found.ratio.mean, 4), found.why) == (0.6667, "")


def test_an_arm_may_be_named_as_a_column_was() -> None:
    """Arms' names are columns of the matrix's table, beside its own."""
    losses = {"ungated": {"a": {"a": 1.0}, "b": {"a": 1.0, "b": 2.0}}}
    both = [
        replace(cell, matrix=losses)
        for arm in ("after", "domain")
        for cell in cells(arm, (1.0, 2.0))
    ]
    settings = RULE.model_copy(
        update={"seeds": (0, 1), "arms": tuple(ArmSettings(name=n) for n in ("after", "domain"))}
    )
    budget = {"parameters": 8, "steps": 10, "tokens": 20}
    budgets = {"after": budget, "domain": budget}
    made = blocks(settings, budgets, analyse(settings, budgets, both), both)
    [table] = [block for block in made if getattr(block, "id", "").startswith("matrix-")]
    assert isinstance(table, Table)
    assert len({column.name for column in table.columns}) == len(table.rows[0]) == 5
