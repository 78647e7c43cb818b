"""GPTQ's rounding beside a loop over the formula, and its laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.ops.affine import quantize, round_to
from mlxstacks.ops.gptq import InputStatistics, fit_scales, round_rows
from mlxstacks.ops.policies import Change, Groups, keep

GROUP = 32


def case(
    seed: int, rows: int, groups: int, bits: int, dtype: str = "F32"
) -> tuple[Groups, np.ndarray, np.ndarray]:
    """Groups of a weight, a small delta (N, K), moments (K, K) of inputs that hang together."""
    random = np.random.default_rng(seed)
    width = groups * GROUP
    weight = random.standard_normal((rows * groups, GROUP), np.float32)
    grid = Groups(*quantize(weight, bits, dtype), bits, dtype)
    step = np.abs(grid.scales).mean()
    delta = (0.3 * step * random.standard_normal((rows, width))).astype(np.float32)
    mixed = random.standard_normal((width, width)) * np.geomspace(1, 0.01, width)
    x = random.standard_normal((4 * width, width)) @ mixed
    return grid, delta, x.T @ x


def by_the_formula(target: np.ndarray, grid: Groups, moments: np.ndarray) -> np.ndarray:
    """Codes (N, K): the inverse of what is left of H is made anew for each column."""
    rows, width = target.shape
    h = moments / (np.trace(moments) / width) + 0.01 * np.eye(width)
    scales, biases = (
        np.repeat(x.reshape(rows, -1), GROUP, axis=1) for x in (grid.scales, grid.biases)
    )
    left, codes = target.astype(np.float64), np.zeros(target.shape, np.uint8)
    remaining = list(np.argsort(-np.diag(h), kind="stable"))
    while remaining:
        j = remaining[0]
        inverse = np.linalg.inv(h[np.ix_(remaining, remaining)])
        code = np.clip(np.rint((left[:, j] - biases[:, j]) / scales[:, j]), 0, 2**grid.bits - 1)
        error = left[:, j] - (code * scales[:, j] + biases[:, j])
        left[:, remaining] -= np.outer(error, inverse[0] / inverse[0, 0])
        codes[:, j] = code
        remaining = remaining[1:]
    return codes


def costs(groups: Groups, target: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """(N,), of each row."""
    error = groups.values().reshape(target.shape) - target.astype(np.float64)
    return np.einsum("ij,jk,ik->i", error, moments, error)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_codes_are_those_of_the_formula(bits: int) -> None:
    grid, delta, moments = case(bits, 5, 3, bits)
    target = grid.values().reshape(delta.shape) + delta
    made = round_rows(target, grid, InputStatistics.of(moments)).codes.reshape(delta.shape)
    wanted = by_the_formula(target, grid, moments)
    # float32 here, float64 there: a tie may go the other way, and what follows it then too
    assert np.mean(made != wanted) < 0.01
    assert np.abs(made.astype(int) - wanted.astype(int)).max() <= 1


@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 4, 6, 8]))
def test_what_is_on_the_grid_stays(seed: int, bits: int) -> None:
    grid, delta, moments = case(seed, 3, 2, bits)
    target = grid.values().reshape(delta.shape)
    inputs = InputStatistics.of(moments)
    assert np.array_equal(round_rows(target, grid, inputs).codes, grid.codes)
    made = fit_scales(target, grid, inputs)
    assert np.array_equal(made.scales, grid.scales)
    assert np.array_equal(made.biases, grid.biases)


def test_scales_are_those_of_least_squares() -> None:
    grid, delta, moments = case(3, 5, 3, 4)
    target = grid.values().reshape(delta.shape) + delta
    inputs = InputStatistics.of(moments)
    made, root = fit_scales(target, grid, inputs), np.linalg.cholesky(inputs.moments)
    groups = np.kron(np.eye(3), np.ones((GROUP, 1)))  # (K, groups)
    for row, codes in enumerate(grid.codes.reshape(5, -1)):
        design = np.hstack([codes[:, None] * groups, groups])
        wanted, *_ = np.linalg.lstsq(root.T @ design, root.T @ target[row])
        found = np.concatenate([x.reshape(5, -1)[row] for x in (made.scales, made.biases)])
        np.testing.assert_allclose(found, wanted, rtol=5e-3, atol=1e-4)  # a ridge of 1e-6 there


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([3, 4, 6]), st.sampled_from(["F32", "F16", "BF16"])
)
def test_no_row_is_farther_with_fitted_scales(seed: int, bits: int, dtype: str) -> None:
    grid, delta, moments = case(seed, 6, 2, bits, dtype)
    target = grid.values().reshape(delta.shape) + delta
    inputs = InputStatistics.of(moments)
    made = fit_scales(target, grid, inputs)
    for name in ("scales", "biases"):  # values that the dtype holds
        assert np.array_equal(round_to(getattr(made, name).copy(), dtype), getattr(made, name))
    before, after = (costs(x, target, inputs.moments) for x in (grid, made))
    assert (after <= before * (1 + 1e-4)).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 4, 6]))
def test_outputs_are_closer_than_by_nearest_codes(seed: int, bits: int) -> None:
    grid, delta, moments = case(seed, 8, 3, bits)
    target = grid.values().reshape(delta.shape) + delta
    plain = keep(grid, Change(delta.reshape(grid.codes.shape)))
    fed = round_rows(target, grid, InputStatistics.of(moments))
    assert costs(fed, target, moments).sum() < costs(plain, target, moments).sum()


def test_inputs_that_know_nothing_of_each_other_give_nearest_codes() -> None:
    grid, delta, _ = case(0, 6, 2, 4)
    target = grid.values().reshape(delta.shape) + delta
    made = round_rows(target, grid, InputStatistics.of(np.eye(2 * GROUP)))
    wanted = keep(grid, Change(delta.reshape(grid.codes.shape)))
    assert np.mean(made.codes != wanted.codes) < 0.01  # ties


@pytest.mark.parametrize("moments", [np.zeros((32, 32)), np.full((32, 32), np.nan)])
def test_moments_of_nothing_are_refused(moments: np.ndarray) -> None:
    with pytest.raises(ValueError, match="zero or not finite"):
        InputStatistics.of(moments)
