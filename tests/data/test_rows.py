"""Rows, packing, batches. Run: pytest tests/data/test_rows.py"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.data import (
    Row,
    batch_at,
    make_batch,
    pack_rows,
)

rows_strategy = st.lists(
    st.lists(st.integers(1, 99), min_size=1, max_size=12).map(
        lambda tokens: Row(tuple(tokens), (0.0, *[1.0] * (len(tokens) - 1)))
    ),
    min_size=1,
    max_size=20,
)


@given(rows_strategy, st.integers(12, 40))
def test_packing_keeps_every_token_and_weight_in_order(rows: list[Row], length: int) -> None:
    packed = pack_rows(rows, length)
    assert all(len(row.tokens) <= length for row in packed)
    assert [t for row in packed for t in row.tokens] == [t for row in rows for t in row.tokens]
    assert [w for row in packed for w in row.weights] == [w for row in rows for w in row.weights]


def test_rows_longer_than_the_length_are_cut() -> None:
    long_row = Row(tuple(range(10)), (0.0, *[1.0] * 9))
    assert [len(row.tokens) for row in pack_rows([long_row, long_row], 6)] == [6, 6]


def test_padding_lies_on_the_right_without_weight() -> None:
    batch = make_batch([Row((1, 2, 3), (0.0, 1.0, 1.0)), Row((4,), (0.0,))], pad_token=9)
    assert batch.tokens.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.inputs.tolist() == [[1, 2], [4, 9]]
    assert batch.targets.tolist() == [[2, 3], [9, 9]]
    assert batch.target_weights.tolist() == [[1, 1], [0, 0]]


def test_batches_are_a_function_of_the_step_and_cover_every_epoch() -> None:
    rows = [Row((i, i), (0.0, 1.0)) for i in range(10)]
    steps = [batch_at(rows, step, 4, seed=1).tokens[:, 0] for step in range(5)]
    order = np.concatenate(steps)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10].tolist() != order[10:].tolist()
    assert np.array_equal(steps[3], batch_at(rows, 3, 4, seed=1).tokens[:, 0])
    assert not np.array_equal(order[:4], batch_at(rows, 0, 4, seed=2).tokens[:, 0])


def test_malformed_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1"):
        Row((1, 2), (0.0,))
    with pytest.raises(ValueError, match="never predicted"):
        Row((1, 2), (1.0, 1.0))
