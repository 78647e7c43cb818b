"""Widths with the least padding, and the order of batches.

Run: pytest tests/training/test_batches.py
"""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.training.batches import WIDTHS, BatchPlan, choose_widths

lengths_strategy = st.lists(st.integers(2, 200), min_size=1, max_size=40)


def padded(lengths: list[int], widths: tuple[int, ...]) -> int:
    return sum(next(width for width in widths if n <= width) for n in lengths)


@given(lengths_strategy, st.integers(1, 4))
def test_no_other_choice_pads_less(lengths: list[int], most: int) -> None:
    widths = choose_widths(lengths, 200, most, multiple=32)
    assert widths == tuple(sorted(set(widths)))
    assert len(widths) <= most
    assert widths[-1] >= max(lengths)
    candidates = sorted({min(200, 1 + 32 * -(-(n - 1) // 32)) for n in lengths})
    choices = [
        choice
        for count in range(1, most + 1)
        for choice in itertools.combinations(candidates, count)
        if choice[-1] == candidates[-1]
    ]
    assert padded(lengths, widths) == min(padded(lengths, choice) for choice in choices)


def test_at_most_eight_widths_one_above_multiples_of_32() -> None:
    widths = choose_widths(list(range(2, 2049)), 2048)
    assert len(widths) == WIDTHS == 8
    assert all(width % 32 == 1 for width in widths[:-1])
    assert widths[-1] == 2048


def test_many_different_lengths_are_no_endless_search() -> None:
    widths = choose_widths(list(range(2, 100_000, 7)), 131_072)
    assert len(widths) == 8
    assert widths[-1] >= 99_998


def plan_of(lengths: list[int], batch_size: int, seed: int = 0) -> BatchPlan:
    return BatchPlan(tuple(lengths), choose_widths(lengths, 200), batch_size, seed)


@given(lengths_strategy, st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_has_every_row_once_and_only_full_batches_but_one(
    lengths: list[int], batch_size: int, epoch: int
) -> None:
    plan = plan_of(lengths, batch_size)
    each = plan.batches_per_epoch
    batches = [plan.batch(epoch * each + place) for place in range(each)]
    assert sorted(row for rows, _ in batches for row in rows) == list(range(len(lengths)))
    assert all(max(lengths[row] for row in rows) <= width for rows, width in batches)
    assert all(width in plan.widths for _, width in batches)
    sizes = Counter(len(rows) for rows, _ in batches)
    rest = len(lengths) % batch_size
    assert sizes == Counter({batch_size: len(lengths) // batch_size}) + Counter({rest: rest > 0})


@given(lengths_strategy, st.integers(1, 7))
def test_the_first_batch_is_as_large_as_any(lengths: list[int], batch_size: int) -> None:
    plan = plan_of(lengths, batch_size)
    sizes = [len(rows) * width for rows, width in map(plan.batch, range(plan.batches_per_epoch))]
    assert sizes[0] == max(sizes)


def test_order_is_a_function_of_seed_and_number() -> None:
    lengths = [10 + 7 * (row % 9) for row in range(50)]
    plan, again, other = plan_of(lengths, 4), plan_of(lengths, 4), plan_of(lengths, 4, seed=1)
    backwards = [again.batch(number) for number in reversed(range(40))][::-1]
    assert [plan.batch(number) for number in range(40)] == backwards
    assert [plan.batch(number) for number in range(5)] != [other.batch(n) for n in range(5)]
    each = plan.batches_per_epoch
    assert [plan.batch(n) for n in range(each)] != [plan.batch(n) for n in range(each, 2 * each)]


def test_rows_that_do_not_fill_a_batch_go_with_wider_ones() -> None:
    plan = BatchPlan((10, 10, 10, 60, 60), (33, 65), batch_size=2, seed=0)
    batches = [plan.batch(number) for number in range(3)]
    assert sorted((len(rows), width) for rows, width in batches) == [(1, 65), (2, 33), (2, 65)]


def test_padding_share_counts_every_place() -> None:
    assert plan_of([33, 33, 33, 33], 2).padding_share() == 0
    assert BatchPlan((10, 10), (40,), 2, 0).padding_share() == pytest.approx(0.75)
