"""Move a delta into quantized weights: the policies of a fuse behind one signature.

A policy takes the groups of a tensor (or of a block of it) and the delta that is to be added, and
returns new groups. The target is `X = W + delta` in float32, with `W = scale * code + bias`.

    refit       what `mlx_lm.fuse` does on the CPU device, bit for bit: quantize W + delta again
    keep        scale and bias stay; a code moves by round(delta / scale), clipped to the grid
    nearest     per group keep or refit, whichever is closer to X in squared error
    promote     more bits: the old grid is a subset of the new one; or a fresh grid where closer
    stochastic  keep with unbiased rounding
    shift       codes and scales stay; a bias moves by the mean of its group's delta

Laws (tests/ops/test_policies.py): at zero delta keep, nearest, stochastic and shift return the very
groups they were given, and promote groups of the same values; nearest is in no group farther from
X than keep or refit; a second refit at zero delta of groups that mx.quantize made changes nothing
(bits <= 6, or 8 with F16 or F32).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mlxstacks.ops.affine import (
    Array,
    check_bits,
    clip_codes,
    dequantize,
    fit_grid,
    nearest_codes,
    quantize,
    round_to,
    row_extremes,
)

PROMOTED_BITS = (4, 5, 6, 8)
_SMALLEST_NORMAL = np.float32(2**-14)  # of F16; below it roundings are larger


@dataclass(frozen=True, slots=True)
class Groups:
    """Quantized groups of one tensor or block.

    Shapes: codes (G, group_size) uint8; scales, biases (G,) float32 holding values of `dtype`.
    """

    codes: Array
    scales: Array
    biases: Array
    bits: int
    dtype: str

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.codes.size

    def values(self) -> Array:
        """`scale * code + bias` in float32, (G, group_size): what a quantized matmul uses."""
        return dequantize(self.codes, self.scales, self.biases)


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be added to a block, and how.

    delta: (G, group_size) float32, the intended change.
    rounded_delta: the same product as mlx-lm's own fuse computes it, already cast to the scale
        dtype, held in float32; refit uses it. None means delta rounded to the scale dtype.
    bits: width of the new codes.
    uniform: (G, group_size) float32 in [0, 1), for stochastic rounding.
    """

    delta: Array
    rounded_delta: Array | None = None
    bits: int | None = None
    uniform: Array | None = None


def refit(groups: Groups, change: Change) -> Groups:
    """Quantize W + delta anew, each step in the scale dtype as `mlx_lm.fuse` does on the CPU."""
    return refit_and_control(groups, change, control=False)[0]


def refit_and_control(
    groups: Groups, change: Change, control: bool = True
) -> tuple[Groups, Groups | None]:
    """`refit` of the change and, with `control`, of a delta of zero: one dequantization for both.

    Law: both are the groups that `refit` gives on its own.
    """
    bits, dtype = change.bits or groups.bits, groups.dtype
    base = dequantize(groups.codes, groups.scales, groups.biases, dtype)
    at_zero = _refit_of_zeros(groups, base, bits) if control else None
    rounded = change.rounded_delta
    if rounded is None:
        rounded = round_to(change.delta.copy(), dtype)
    target = np.add(base, rounded, out=base)
    return Groups(*quantize(round_to(target, dtype), bits, dtype), bits, dtype), at_zero


def _refit_of_zeros(groups: Groups, base: Array, bits: int) -> Groups:
    """`refit` of a delta of zero. base: (G, group_size) float32, `groups` in their dtype.

    Only groups that may change are quantized. Most get the grid that they have; there, a value in
    BF16, of which each rounding moves a number by 1/256 of itself at most, has its own code again
    while those three parts of a step are less than a half together.
    """
    low, high = _extremes(groups)
    scales, biases = fit_grid(base, bits, (low, high))
    new_scales, new_biases = (round_to(ends.copy(), groups.dtype) for ends in (scales, biases))
    steps, largest = np.abs(groups.scales), np.maximum(np.abs(low), np.abs(high))
    stays = (new_scales == groups.scales) & (new_biases == groups.biases) & (bits == groups.bits)
    stays &= (2 << bits) * steps + np.abs(groups.biases) + largest <= 120 * steps
    stays &= steps > _SMALLEST_NORMAL
    # Taking rows apart costs more than it saves where most of them are taken.
    rows = np.flatnonzero(~stays) if 2 * stays.sum() > stays.size else slice(None)
    codes = groups.codes.copy()
    codes[rows] = nearest_codes(base[rows], scales[rows], biases[rows], bits)
    return Groups(codes, new_scales, new_biases, bits, groups.dtype)


def _extremes(groups: Groups) -> tuple[Array, Array]:
    """Smallest and largest dequantized value of each group, (G,) float32.

    Dequantizing never changes the order of codes (rounding is monotone), so the outermost codes
    tell; looking through bytes takes a quarter of the time of looking through floats.
    """
    ends = np.stack(row_extremes(groups.codes), axis=1)  # (G, 2)
    values = dequantize(ends, groups.scales, groups.biases, groups.dtype)
    first, last = values[:, 0], values[:, 1]  # a negative scale swaps them
    return np.minimum(first, last), np.maximum(first, last)


def keep(groups: Groups, change: Change) -> Groups:
    """Move codes by round(delta / scale) from where they are; scale and bias stay."""
    _same_bits(groups, change, "keep")
    codes = _moved(groups.codes.astype(np.float32), groups.scales, change.delta, groups.bits)
    return _with_codes(groups, codes)


def stochastic(groups: Groups, change: Change) -> Groups:
    """Keep with unbiased rounding: delta / scale is rounded up with its fraction's probability."""
    _same_bits(groups, change, "stochastic")
    if change.uniform is None:
        raise ValueError("stochastic rounding needs uniform numbers, one per weight")
    steps = _steps(change.delta, groups.scales)
    np.add(steps, change.uniform, out=steps)
    np.floor(steps, out=steps)
    np.add(steps, groups.codes, out=steps)
    return _with_codes(groups, clip_codes(steps, groups.bits))


def nearest(groups: Groups, change: Change) -> Groups:
    """Per group keep or refit, whichever is closer to W + delta; keep where they are equal."""
    _same_bits(groups, change, "nearest")
    target = _target(groups, change.delta)
    return _closer(keep(groups, change), refit(groups, change), target)


def promote(groups: Groups, change: Change) -> Groups:
    """Codes of `change.bits` bits on a grid that holds every old value exactly.

    A group's codes become `code << shift` and its scale `scale / 2**shift`, then move as in keep.
    Where a fresh grid fitted to W + delta is closer, the group takes that one.
    """
    bits = check_bits(change.bits or 0)
    if bits <= groups.bits:
        raise ValueError(f"promote goes to more than {groups.bits} bits, got {bits}")
    shifts = _exact_shifts(groups, bits - groups.bits)
    scales = np.ldexp(groups.scales, -shifts)
    codes = np.ldexp(groups.codes.astype(np.float32), shifts[:, None])
    codes = _moved(codes, scales, change.delta, bits)
    finer = Groups(codes.astype(np.uint8), scales, groups.biases, bits, groups.dtype)
    target = _target(groups, change.delta)
    return _closer(finer, _fresh_grid(target, bits, groups.dtype), target)


def shift(groups: Groups, change: Change) -> Groups:
    """Codes and scales stay; a group's bias moves by the mean of its delta. Not in `POLICIES`: it
    is for deltas that are the same for all of a group.

    Law: for those, every value is off W + delta by the rounding of its bias at most.
    """
    _same_bits(groups, change, "shift")
    means = change.delta.mean(axis=1, dtype=np.float64)
    moved = np.where(means == 0, groups.biases, groups.biases + means)  # -0.0 + 0.0 is 0.0
    biases = round_to(moved.astype(np.float32), groups.dtype)
    return Groups(groups.codes, groups.scales, biases, groups.bits, groups.dtype)


POLICIES: dict[str, Callable[[Groups, Change], Groups]] = {
    "refit": refit,
    "keep": keep,
    "nearest": nearest,
    "promote": promote,
    "stochastic": stochastic,
}


def requantize(groups: Groups, change: Change, policy: str) -> Groups:
    """New groups for `groups` with `change` in them, by the named policy."""
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}; allowed are {', '.join(POLICIES)}")
    return POLICIES[policy](groups, change)


def _same_bits(groups: Groups, change: Change, policy: str) -> None:
    if change.bits not in (None, groups.bits):
        raise ValueError(f"{policy} stays at {groups.bits} bits, got {change.bits}; use promote")


def _steps(delta: Array, scales: Array) -> Array:
    """Delta in units of the scale; zero where the scale is zero. (G, group_size) float32."""
    divisors = np.where(scales == 0, np.float32(np.inf), scales)
    return np.divide(delta, divisors[:, None])


def _moved(codes: Array, scales: Array, delta: Array, bits: int) -> Array:
    """Float32 codes moved by round(delta / scale), in place, clipped to the grid."""
    steps = _steps(delta, scales)
    np.rint(steps, out=steps)
    np.add(codes, steps, out=codes)
    return clip_codes(codes, bits)


def _with_codes(groups: Groups, codes: Array) -> Groups:
    return Groups(codes.astype(np.uint8), groups.scales, groups.biases, groups.bits, groups.dtype)


def _target(groups: Groups, delta: Array) -> Array:
    target = groups.values()
    return np.add(target, delta, out=target)


def _squared_error(groups: Groups, target: Array) -> Array:
    """Squared distance of each group from its target, (G,) float32.

    The order of the sum is part of the rule, so that a kernel can repeat it to the bit: squares
    rounded to float32 once each, then neighbours added until one number is left.
    """
    difference = groups.values()
    np.subtract(difference, target, out=difference)
    squares = np.multiply(difference, difference, out=difference).reshape(-1)
    while squares.size > len(groups.scales):
        squares = squares[0::2] + squares[1::2]
    return squares


def _closer(first: Groups, second: Groups, target: Array) -> Groups:
    """Per group whichever is closer to the target; the first where they are equal.

    Both have to be fresh: the codes of the first are overwritten.
    """
    take_second = _squared_error(second, target) < _squared_error(first, target)
    codes = first.codes
    codes[take_second] = second.codes[take_second]
    return Groups(
        codes,
        np.where(take_second, second.scales, first.scales),
        np.where(take_second, second.biases, first.biases),
        first.bits,
        first.dtype,
    )


def _fresh_grid(target: Array, bits: int, dtype: str) -> Groups:
    """A new grid for float32 values, its codes chosen for the scale and bias as stored."""
    scales, biases = fit_grid(target, bits)
    scales, biases = round_to(scales, dtype), round_to(biases, dtype)
    codes = nearest_codes(target, scales, biases, bits).astype(np.uint8)
    return Groups(codes, scales, biases, bits, dtype)


def _exact_shifts(groups: Groups, widest: int) -> Array:
    """Per group the largest shift up to `widest` at which scale / 2**shift is exact, (G,) int32.

    Below the normal numbers of F16 a halved scale loses bits; a smaller shift keeps values exact.
    """
    shifts = np.full(len(groups.scales), widest, dtype=np.int32)
    if groups.dtype == "F32":
        return shifts
    for shift in range(widest, 0, -1):
        halved = np.ldexp(groups.scales, -shifts)
        inexact = round_to(halved.copy(), groups.dtype) != halved
        if not inexact.any():
            break
        shifts[inexact] = shift - 1
    return shifts
