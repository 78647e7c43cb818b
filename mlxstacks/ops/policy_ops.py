"""The policies of `ops/policies.py` as MLX operations: the reference of the requant kernel.

Everything is elementary operations, each rounded on its own, and float32.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlxstacks.ops import affine_ops as grid


@dataclass(frozen=True, slots=True)
class Groups:
    """codes (..., N, G, group_size), scales and biases (..., N, G), all float32."""

    codes: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    dtype: mx.Dtype

    def values(self) -> mx.array:
        return grid.values_of(self.codes, self.scales, self.biases)

    def with_codes(self, codes: mx.array) -> "Groups":
        return Groups(codes, self.scales, self.biases, self.bits, self.dtype)


def changed(
    old: Groups,
    policy: str,
    bits: int,
    change: mx.array,
    rounded: mx.array,
    uniform: mx.array | None,
) -> Groups:
    """What a policy makes of groups. change, rounded, uniform: (..., N, G, group_size) float32."""
    if policy == "stochastic":
        assert uniform is not None
        steps = mx.floor(_steps(change, old.scales) + uniform)
        return old.with_codes(grid.clip_codes(old.codes + steps, bits))
    if policy == "refit":
        return refit(old, rounded, bits)
    if policy == "promote":
        target = old.values() + change
        finer = _moved(_refined(old, bits), change)
        return _closer(finer, _fresh_grid(target, bits, old.dtype), target)
    moved = _moved(old, change)
    if policy == "nearest":
        return _closer(moved, refit(old, rounded, bits), old.values() + change)
    return moved


def _steps(change: mx.array, scales: mx.array) -> mx.array:
    """Change in units of the scale; zero where the scale is zero."""
    return change / mx.where(scales == 0, mx.array(mx.inf, mx.float32), scales)[..., None]


def _moved(groups: Groups, change: mx.array) -> Groups:
    steps = mx.round(_steps(change, groups.scales))
    return groups.with_codes(grid.clip_codes(groups.codes + steps, groups.bits))


def refit(groups: Groups, change: mx.array, bits: int) -> Groups:
    """`mx.quantize(W + change)` with every step in the storage dtype."""
    dtype = groups.dtype
    base = grid.stored_values_of(groups.codes, groups.scales, groups.biases, dtype)
    target = grid.round_to(base + change, dtype)
    scales, biases = grid.fit_grid(target, bits)
    codes = grid.nearest_codes(target, scales, biases, bits)
    return Groups(codes, grid.round_to(scales, dtype), grid.round_to(biases, dtype), bits, dtype)


def _refined(groups: Groups, bits: int) -> Groups:
    """The same values on a finer grid, as fine as its scales are exact in the storage dtype."""
    scales, factor = groups.scales, mx.ones_like(groups.scales)
    for shift in range(1, bits - groups.bits + 1):
        finer = groups.scales * 2.0**-shift
        exact = grid.round_to(finer, groups.dtype) == finer
        scales, factor = mx.where(exact, finer, scales), mx.where(exact, 2.0**shift, factor)
    return Groups(groups.codes * factor[..., None], scales, groups.biases, bits, groups.dtype)


def _fresh_grid(target: mx.array, bits: int, dtype: mx.Dtype) -> Groups:
    """A new grid for float32 values, its codes chosen for the scale and bias as stored."""
    scales, biases = (grid.round_to(x, dtype) for x in grid.fit_grid(target, bits))
    codes = grid.nearest_codes(target, scales, biases, bits)
    return Groups(codes, scales, biases, bits, dtype)


def _closer(first: Groups, second: Groups, target: mx.array) -> Groups:
    """Per group whichever is closer to the target; the first where they are equal."""
    errors = [grid.tree_sum(mx.square(g.values() - target)) for g in (first, second)]
    take = errors[1] < errors[0]
    codes = mx.where(take[..., None], second.codes, first.codes)
    scales = mx.where(take, second.scales, first.scales)
    return Groups(
        codes, scales, mx.where(take, second.biases, first.biases), first.bits, first.dtype
    )
