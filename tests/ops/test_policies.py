"""Laws of the policies, in every width, group and dtype. Run: pytest tests/ops/test_policies.py"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.ops import affine, policies
from mlxstacks.ops.policies import (
    POLICIES,
    PROMOTED_BITS,
    Change,
    Groups,
    refit_and_control,
    requantize,
    shift,
)
from tests.cases import GRIDS, MX_DTYPES, Grid

grids = st.sampled_from(GRIDS)
seeds = st.integers(0, 2**32 - 1)
# Size of the delta in steps, from far below one to several.
sizes = st.sampled_from([0.02, 0.1, 0.25, 1.0, 4.0])


def random_groups(grid: Grid, seed: int, count: int = 12) -> Groups:
    """Groups as mx.quantize makes them, and some that no quantizer would make."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((count, grid.group_size)).astype(np.float32) * 0.02
    values[0] = -np.abs(values[0])
    values[1] = 0.5
    values[2] = 0.0
    values[3] *= 1e-4
    codes, scales, biases = affine.quantize(
        affine.round_to(values, grid.dtype), grid.bits, grid.dtype
    )
    codes[-2:] = random.integers(0, 1 << grid.bits, codes[-2:].shape)
    codes[-1, :] = random.integers(0, 1 << grid.bits)
    return Groups(codes, scales, biases, grid.bits, grid.dtype)


def random_delta(groups: Groups, size: float, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed + 1)
    steps = np.abs(groups.scales)[:, None] * np.float32(size)
    return random.standard_normal(groups.codes.shape).astype(np.float32) * steps


def uniform(groups: Groups, seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 2).random(groups.codes.shape, dtype=np.float32)


def squared_error(groups: Groups, target: np.ndarray) -> np.ndarray:
    return ((groups.values().astype(np.float64) - target) ** 2).sum(axis=1)


def assert_same_groups(first: Groups, second: Groups) -> None:
    np.testing.assert_array_equal(first.codes, second.codes)
    np.testing.assert_array_equal(first.scales, second.scales)
    np.testing.assert_array_equal(first.biases, second.biases)
    assert first.bits == second.bits


@given(grids, seeds)
def test_zero_delta_keeps_every_byte(grid: Grid, seed: int) -> None:
    groups = random_groups(grid, seed)
    change = Change(np.zeros(groups.codes.shape, np.float32), uniform=uniform(groups, seed))
    for policy in ("keep", "nearest", "stochastic"):
        assert_same_groups(requantize(groups, change, policy), groups)


@given(grids, seeds)
def test_promote_keeps_every_value_at_zero_delta(grid: Grid, seed: int) -> None:
    groups = random_groups(grid, seed)
    zeros = np.zeros(groups.codes.shape, np.float32)
    for bits in PROMOTED_BITS:
        if bits > grid.bits:
            promoted = requantize(groups, Change(zeros, bits=bits), "promote")
            assert promoted.bits == bits
            np.testing.assert_array_equal(promoted.values(), groups.values())
            stored = affine.from_storage(affine.to_storage(promoted.scales, grid.dtype), grid.dtype)
            np.testing.assert_array_equal(stored, promoted.scales)


@given(st.sampled_from([2, 3, 4, 5, 6]), seeds)
def test_promote_is_exact_among_subnormal_f16_scales(bits: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    scales = random.integers(1, 4096, 8).astype(np.uint16).view(np.float16).astype(np.float32)
    codes = random.integers(0, 1 << bits, (8, 64), dtype=np.uint8)
    groups = Groups(codes, scales, np.zeros(8, np.float32), bits, "F16")
    change = Change(np.zeros(codes.shape, np.float32), bits=8)
    promoted = requantize(groups, change, "promote")
    np.testing.assert_array_equal(promoted.values(), groups.values())
    np.testing.assert_array_equal(
        promoted.scales.astype(np.float16).astype(np.float32), promoted.scales
    )


@given(grids, seeds, sizes)
def test_nearest_is_never_farther_than_keep_or_refit(grid: Grid, seed: int, size: float) -> None:
    groups = random_groups(grid, seed)
    delta = random_delta(groups, size, seed)
    target = (groups.values() + delta).astype(np.float64)
    change = Change(delta)
    error = {
        p: squared_error(requantize(groups, change, p), target)
        for p in POLICIES
        if p in ("keep", "refit", "nearest")
    }
    best = np.minimum(error["keep"], error["refit"])
    # The choice is made with float32 sums: equal to within their rounding.
    assert (error["nearest"] <= best * (1 + 1e-5) + 1e-30).all()


@given(grids, seeds, sizes)
def test_nearest_takes_exact_bytes_of_keep_or_refit(grid: Grid, seed: int, size: float) -> None:
    groups = random_groups(grid, seed)
    change = Change(random_delta(groups, size, seed))
    kept, refitted = requantize(groups, change, "keep"), requantize(groups, change, "refit")
    chosen = requantize(groups, change, "nearest")
    for index in range(len(groups.scales)):
        same = [
            np.array_equal(chosen.codes[index], source.codes[index])
            and chosen.scales[index] == source.scales[index]
            and chosen.biases[index] == source.biases[index]
            for source in (kept, refitted)
        ]
        assert any(same)


@given(grids, seeds, sizes)
def test_refit_is_mlx_quantize_to_the_bit(grid: Grid, seed: int, size: float) -> None:
    groups = random_groups(grid, seed)
    delta = random_delta(groups, size, seed)
    dtype = MX_DTYPES[grid.dtype]
    packed = mx.array(affine.pack(groups.codes, grid.bits))
    scales = mx.array(groups.scales).reshape(-1, 1).astype(dtype)
    biases = mx.array(groups.biases).reshape(-1, 1).astype(dtype)
    weight = mx.dequantize(packed, scales, biases, grid.group_size, grid.bits, stream=mx.cpu)
    fused = mx.add(weight, mx.array(delta).astype(dtype), stream=mx.cpu)
    expected = mx.quantize(fused, grid.group_size, grid.bits, stream=mx.cpu)
    ours = requantize(groups, Change(delta), "refit")
    np.testing.assert_array_equal(affine.pack(ours.codes, grid.bits), np.array(expected[0]))
    for mine, theirs in ((ours.scales, expected[1]), (ours.biases, expected[2])):
        np.testing.assert_array_equal(mine, np.array(theirs.astype(mx.float32)).ravel())


@given(grids, seeds, sizes)
def test_refit_and_its_control_are_two_refits(grid: Grid, seed: int, size: float) -> None:
    groups = random_groups(grid, seed)
    delta = random_delta(groups, size, seed)
    fused, at_zero = refit_and_control(groups, Change(delta))
    assert at_zero is not None
    assert_same_groups(fused, requantize(groups, Change(delta), "refit"))
    assert_same_groups(at_zero, requantize(groups, Change(np.zeros_like(delta)), "refit"))


@given(grids, seeds)
def test_second_refit_at_zero_delta_changes_nothing(grid: Grid, seed: int) -> None:
    if grid.bits == 8 and grid.dtype == "BF16":
        return  # 256 levels are finer than bf16 can tell apart: known to move again
    groups = random_groups(grid, seed)
    stable = np.full(len(groups.scales), True)
    if grid.dtype == "F16":
        stable[3] = False  # among F16's subnormal numbers nothing is stable
    stable[-2:] = False  # the law is about groups that mx.quantize made, not about random codes
    parts = (groups.codes[stable], groups.scales[stable], groups.biases[stable])
    groups = Groups(*parts, grid.bits, grid.dtype)
    change = Change(np.zeros(groups.codes.shape, np.float32))
    once = requantize(groups, change, "refit")
    assert_same_groups(requantize(once, change, "refit"), once)


@given(grids, seeds, sizes)
def test_keep_is_rounding_from_the_code(grid: Grid, seed: int, size: float) -> None:
    groups = random_groups(grid, seed)
    delta = random_delta(groups, size, seed)
    moved = groups.codes + np.rint(delta / groups.scales[:, None])
    expected = np.clip(moved, 0, (1 << grid.bits) - 1)
    np.testing.assert_array_equal(requantize(groups, Change(delta), "keep").codes, expected)


@given(grids, seeds, sizes)
def test_squared_errors_are_summed_in_a_fixed_order(grid: Grid, seed: int, size: float) -> None:
    groups = random_groups(grid, seed)
    target = groups.values() + random_delta(groups, size, seed)
    found = policies._squared_error(groups, target)
    for index, row in enumerate((groups.values() - target).tolist()):
        terms = [np.float32(x) * np.float32(x) for x in row]
        while len(terms) > 1:
            terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
        assert found[index] == terms[0]


@given(st.sampled_from([g for g in GRIDS if g.bits in (3, 4)]), seeds, sizes)
def test_more_bits_are_never_farther(grid: Grid, seed: int, size: float) -> None:
    groups = random_groups(grid, seed, count=64)
    delta = random_delta(groups, size, seed)
    target = (groups.values() + delta).astype(np.float64)
    errors = [squared_error(requantize(groups, Change(delta), "nearest"), target).sum()]
    for bits in PROMOTED_BITS:
        if bits > grid.bits:
            fused = requantize(groups, Change(delta, bits=bits), "promote")
            errors.append(squared_error(fused, target).sum())
    assert errors[-1] <= errors[0]


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean of 4,000 draws of a delta of 0.3 steps is 0.3 steps, within 4 standard errors."""
    codes = np.full((4000, 64), 7, dtype=np.uint8)
    groups = Groups(codes, np.full(4000, 0.01, np.float32), np.zeros(4000, np.float32), 4, "F32")
    delta = np.full(codes.shape, 0.003, np.float32)
    fused = requantize(groups, Change(delta, uniform=uniform(groups, 0)), "stochastic")
    moved = fused.codes.astype(float) - 7
    assert abs(moved.mean() - 0.3) < 4 * np.sqrt(0.21 / moved.size)


@pytest.mark.parametrize(
    ("bits", "lowest", "highest"), [(2, 0.0, 0.0), (3, 0.030, 0.042), (4, 0.12, 0.14)]
)
def test_zero_delta_refit_changes_the_published_share(
    bits: int, lowest: float, highest: float
) -> None:
    """0%, 3.6% and 12.9% of Gaussian weights at 2, 3 and 4 bits, as by MLX."""
    random = np.random.default_rng(0)
    values = random.standard_normal((16384, 64)).astype(np.float32) * np.float32(0.02)
    made = affine.quantize(affine.round_to(values, "BF16"), bits, "BF16")
    groups = Groups(*made, bits, "BF16")
    change = Change(np.zeros(values.shape, np.float32))
    again = requantize(groups, change, "refit")
    before = affine.dequantize(groups.codes, groups.scales, groups.biases, "BF16")
    after = affine.dequantize(again.codes, again.scales, again.biases, "BF16")
    assert lowest <= (before != after).mean() <= highest


def test_impossible_requests_are_refused() -> None:
    groups = random_groups(GRIDS[0], 0)
    delta = np.zeros(groups.codes.shape, np.float32)
    with pytest.raises(ValueError, match="stays at 2 bits"):
        requantize(groups, Change(delta, bits=4), "keep")
    with pytest.raises(ValueError, match="more than 2 bits, got 2"):
        requantize(groups, Change(delta, bits=2), "promote")
    with pytest.raises(ValueError, match="uniform"):
        requantize(groups, Change(delta), "stochastic")
    with pytest.raises(ValueError, match="allowed are"):
        requantize(groups, Change(delta), "round")


@given(grids, sizes, seeds)
def test_shift_is_off_by_the_rounding_of_a_bias_at_most(grid: Grid, size: float, seed: int) -> None:
    """A delta that is the same for all of a group; codes and scales are the very ones."""
    groups = random_groups(grid, seed)
    delta = np.repeat(random_delta(groups, size, seed)[:, :1], grid.group_size, axis=1)
    after = shift(groups, Change(delta))
    np.testing.assert_array_equal(after.codes, groups.codes)
    np.testing.assert_array_equal(after.scales, groups.scales)
    wanted = groups.biases.astype(np.float64) + delta[:, 0]
    ulp = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-24}[grid.dtype]
    assert np.all(np.abs(after.biases - wanted) <= ulp * np.abs(wanted) * 1.001 + 2.0**-25)
    assert_same_groups(shift(groups, Change(np.zeros_like(delta))), groups)
