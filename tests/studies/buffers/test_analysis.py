"""The rules that judge counted buffers, on records made up for the purpose.

Run: pytest tests/studies/buffers/test_analysis.py
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlxstacks.studies.buffers.arms import Arm, ArmRecord, arms_of, row_lengths
from mlxstacks.studies.buffers.run import Analysis, analyse, blocks
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.study.document import Plot, Table

SETTINGS = BufferSettings(steps=10, order_seeds=(0, 1, 2, 3))
Count = Callable[[Arm, int, int], int]


def judged(count: Count, settings: BufferSettings = SETTINGS, leak: int = 0) -> Analysis:
    """The analysis of arms whose peak at (arm, step, tokens) is `count`."""
    records = []
    for arm in (arm for together in arms_of(settings) for arm in together):
        tokens = row_lengths(settings, arm.length_mode, arm.order_seed)
        peaks = [count(arm, step, t) for step, t in enumerate(tokens)]
        after = [300 + leak * step for step in range(len(tokens))]
        records.append(ArmRecord(arm, 300, tokens, peaks, after, [1000] * len(tokens), 0.1))
    return analyse(settings, records)


def jitter(arm: Arm, step: int, tokens: int) -> int:
    """A count by row length, a few buffers more or less."""
    return 500 + 30 * tokens + (7 * step + 3 * arm.rank + 5 * arm.order_seed) % 5


def test_a_count_that_ignores_rank_is_equal() -> None:
    found = judged(jitter)
    assert found.outcome == "equal"
    assert found.verdict.startswith("Rank does not move the count here: ranks 2, 4, 8")
    assert len(found.comparisons) == 2 * 2 * 2 * 2
    assert all(abs(c.largest) < 0.01 for c in found.comparisons)
    assert found.largest_growth_per_step == 0


def test_the_blocks_have_every_rank_and_both_controls() -> None:
    found = judged(lambda arm, step, t: (1000 + 30 * t) * (101 if arm.rank == 4 else 100))
    ranks, controls, plot = blocks(found, SETTINGS.margin)
    assert isinstance(ranks, Table)
    assert isinstance(controls, Table)
    assert isinstance(plot, Plot)
    assert [column.name for column in ranks.columns] == [
        "trainer", "checkpointing", "lengths", "rank", "live buffers", "mean difference (90%), %",
        "family's interval, %", "largest, %", "growth a step",
    ]  # fmt: skip
    assert ranks.rows[0][:5] == ("mlx-lm", "off", "fixed", 2, "388,000 to 388,000")
    assert ranks.rows[0][5:8] == (None, None, None)
    assert ranks.rows[1][5] == pytest.approx((1.0, 1.0, 1.0))
    assert len(ranks.rows) == 3 * 8
    assert len(controls.rows) == 4
    assert plot.series[0].y[:2] == pytest.approx((1.0, 0.0))
    assert plot.references["margin above"] == 1.0


def test_a_rank_that_moves_the_count_is_found() -> None:
    found = judged(lambda arm, step, t: jitter(arm, step, t) + 100 * arm.rank)
    assert found.outcome == "moves"
    assert "rank 8 against 2 by +" in found.verdict
    assert not found.verdict.startswith("Rank does not")


def test_one_condition_is_enough_to_move() -> None:
    def only_checkpointed(arm: Arm, step: int, tokens: int) -> int:
        more = arm.rank == 8 and arm.checkpointing == "on" and arm.trainer == "mlxstacks"
        return round(jitter(arm, step, tokens) * (1.05 if more else 1))

    found = judged(only_checkpointed)
    assert found.outcome == "moves"
    assert "2 of 16 comparisons" in found.verdict


def test_noise_beyond_the_margin_is_undecided() -> None:
    """Orders that disagree about the sign: no equality shown, and no difference."""

    def noisy(arm: Arm, step: int, tokens: int) -> int:
        sign = 1 if arm.order_seed % 2 else -1
        return round(jitter(arm, step, tokens) * (1 + (0.1 * sign if arm.rank == 8 else 0)))

    found = judged(noisy)
    assert found.outcome == "undecided"
    assert found.verdict.startswith("Undecided")


def test_one_seed_decides_nothing() -> None:
    assert judged(jitter, BufferSettings(order_seeds=(0,))).outcome == "undecided"


def test_without_an_effect_of_length_nothing_follows() -> None:
    found = judged(lambda arm, step, tokens: 700)
    assert found.outcome == "invalid"
    assert "positive control" in found.verdict


def test_our_recurrence_need_not_answer_to_length() -> None:
    """Rows within one chunk cost the same buffers; the control is mlx-lm's loop."""
    found = judged(lambda arm, s, t: jitter(arm, s, t) if arm.trainer == "mlx-lm" else 700)
    assert found.outcome == "equal"


def test_growth_is_told() -> None:
    found = judged(jitter, leak=4)
    assert found.largest_growth_per_step == pytest.approx(4)
    assert "a run grows: +4.00 buffers a step" in found.verdict


def test_crossings_follow_the_order_of_rows() -> None:
    found = judged(jitter)
    by_rank = {
        row.rank: row.crossings for row in found.rows
        if row.condition == ("mlx-lm", "off", "variable")
    }  # fmt: skip
    for seed in SETTINGS.order_seeds:
        tokens = row_lengths(SETTINGS, "variable", seed)
        first = 1 + tokens.index(max(tokens))
        assert [crossings[seed] for crossings in by_rank.values()] == [first] * 3
    assert "depends on the order of its rows and not on rank" in found.verdict


def test_a_constant_difference_is_measured_exactly() -> None:
    found = judged(lambda arm, step, t: (1000 + 30 * t) * (101 if arm.rank == 4 else 100))
    for comparison in found.comparisons:
        expected = 0.01 if comparison.rank == 4 else 0.0
        assert comparison.difference.mean == pytest.approx(expected)


@given(st.integers(0, 10_000), st.integers(5, 40))
def test_orders_have_the_same_rows(seed: int, steps: int) -> None:
    settings = BufferSettings(steps=steps)
    for mode in ("fixed", "variable"):
        lengths = row_lengths(settings, mode, seed)
        assert sorted(lengths) == sorted(row_lengths(settings, mode, 0))
        assert len(lengths) == steps
    assert set(row_lengths(settings, "variable", seed)) == {32, 64, 96, 128}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": (2,)}, "a comparison needs two"),
        ({"ranks": (0, 2)}, "all positive"),
        ({"order_seeds": ()}, "order_seeds is"),
        ({"order_seeds": (1, 1)}, "each once"),
        ({"steps": 4, "warmup_steps": 2}, "leaves less than 3 of 4 steps"),
        ({"margin": 0}, "greater than 0"),
    ],
)
def test_impossible_plans_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BufferSettings.model_validate(values)
