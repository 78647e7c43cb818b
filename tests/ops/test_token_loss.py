"""Cross-entropy in pieces: the numbers of the whole form, and of NumPy in float64.

Float32 tolerance 1e-6 of the loss and of the gradient's norm: the same operations on each token,
sums in another order, and matrix products of another height. In bf16 a product may round to its
neighbour: 2^-8.
Run: pytest tests/ops/test_token_loss.py
"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.ops.token_loss import (
    PIECE_LOGITS,
    cross_entropy_sum,
    piece_tokens,
    pieces,
    weighted_cross_entropy_sum,
)


def drawn(N: int, D: int, V: int, seed: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """hidden (N, D), targets (N,), weights (N,) some of them 0, weight (V, D) of a head."""
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0, 1, N) * (rng.uniform(size=N) > 0.3)
    return [
        mx.array(rng.normal(size=(N, D)).astype(np.float32)).astype(dtype),
        mx.array(rng.integers(0, V, N).astype(np.int32)),
        mx.array(weights.astype(np.float32)),
        mx.array(rng.normal(size=(V, D)).astype(np.float32)).astype(dtype),
    ]


def difference(one: mx.array, other: mx.array) -> float:
    one, other = (x.astype(mx.float32) for x in (one, other))
    return float(mx.linalg.norm(one - other) / mx.maximum(mx.linalg.norm(other), 1e-6))


@given(
    N=st.integers(1, 40), D=st.integers(1, 9), V=st.integers(2, 50), most=st.integers(1, 45),
    seed=st.integers(0, 99), half=st.booleans(),
)  # fmt: skip
def test_pieces_are_the_whole(N: int, D: int, V: int, most: int, seed: int, half: bool) -> None:
    dtype = mx.bfloat16 if half else mx.float32
    hidden, targets, weights, matrix = drawn(N, D, V, seed, dtype)

    def head(x: mx.array) -> mx.array:
        return x @ matrix.T

    def whole(x: mx.array) -> mx.array:
        return weighted_cross_entropy_sum(head(x), targets, weights)

    def in_pieces(x: mx.array) -> mx.array:
        return 1.0 * cross_entropy_sum(head, x, targets, weights, most)

    expected, expected_gradient = mx.value_and_grad(whole)(hidden)
    found, gradient = mx.value_and_grad(in_pieces)(hidden)
    tolerance = 2**-8 if half else 1e-6
    assert found.dtype == mx.float32
    assert gradient.dtype == dtype
    assert abs(found.item() - expected.item()) <= tolerance * max(1, abs(expected.item()))
    assert difference(gradient, expected_gradient) <= tolerance


def test_numpy_agrees() -> None:
    """In float64: the gradient by a token is weight * (softmax - one-hot) times the head."""
    hidden, targets, weights, matrix = drawn(20, 6, 33, 3)
    x, t, w, m = (np.array(a, dtype=np.float64) for a in (hidden, targets, weights, matrix))
    logits = x @ m.T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, places = np.arange(20), t.astype(int)
    expected = -(w * log_p[rows, places]).sum()
    change = np.exp(log_p)
    change[rows, places] -= 1
    by_hidden = (w[:, None] * change) @ m
    found, gradient = mx.value_and_grad(
        lambda h: 3.0 * cross_entropy_sum(lambda y: y @ matrix.T, h, targets, weights, 7)
    )(hidden)
    assert found.item() == pytest.approx(3 * expected, rel=1e-5)
    assert np.allclose(np.array(gradient), 3 * by_hidden, rtol=1e-4, atol=1e-5)


def test_compiled_is_the_same() -> None:
    hidden, targets, weights, matrix = drawn(20, 6, 33, 4)

    def step(h: mx.array, t: mx.array, w: mx.array) -> tuple[mx.array, mx.array]:
        return mx.value_and_grad(lambda h: cross_entropy_sum(lambda y: y @ matrix.T, h, t, w, 8))(h)

    expected, expected_gradient = step(hidden, targets, weights)
    found, gradient = mx.compile(step)(hidden, targets, weights)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    assert difference(gradient, expected_gradient) <= 1e-6


def test_a_wide_vocabulary_has_few_tokens_a_piece() -> None:
    assert piece_tokens(248_320) == 64
    assert piece_tokens(10 * PIECE_LOGITS) == 1
    for vocabulary in (2, 320, 32_000, 151_936):
        count = piece_tokens(vocabulary)
        assert PIECE_LOGITS / 2 < count * vocabulary <= PIECE_LOGITS


@given(st.integers(0, 60), st.integers(1, 70))
def test_every_token_is_in_one_piece(tokens: int, most: int) -> None:
    parts = list(pieces(tokens, most))
    assert [t for part in parts for t in range(part.start, part.stop)] == list(range(tokens))
    assert all(part.stop - part.start == most for part in parts[:-1])


def test_the_peak_is_that_of_a_few_pieces() -> None:
    """Not one: MLX's CPU begins some 60 operations before it has finished the first."""
    hidden, targets, weights, matrix = drawn(256, 8, 1 << 15, 5)
    mx.eval(hidden, targets, weights, matrix)

    def head(x: mx.array) -> mx.array:
        return x @ matrix.T

    def peak_bytes(most: int) -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        step = mx.value_and_grad(lambda h: cross_entropy_sum(head, h, targets, weights, most))
        mx.eval(step(hidden))
        mx.synchronize()
        return mx.get_peak_memory() - before

    logits_bytes = 256 * (1 << 15) * 4
    assert peak_bytes(256) > 2 * logits_bytes
    assert peak_bytes(4) < 0.4 * logits_bytes
