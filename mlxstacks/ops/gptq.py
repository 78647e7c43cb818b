"""Round a matrix so that its outputs stay close, not its weights: GPTQ (Frantar et al., ICLR 2023).

With second moments H = E[x x^T] of a module's inputs, an error e in a row of its weight costs
e H e^T at that output. Columns are rounded one after the other, those with the largest inputs
first. What rounding column j leaves, err = (target - value) / U_jj, is taken off the columns that
are still to come, by err * U_j,: with U the upper Cholesky factor of H^-1; no other change of them
makes the output closer to what it would have been.

With the codes as they are, the scales and biases of a row that bring its output closest are a
least-squares problem of 2 K / group_size unknowns; they hold much of a change that is too small for
the codes.

Laws (tests/ops/test_gptq.py): a target that is on the grid keeps its codes, scales and biases; with
H = I each weight goes to its nearest code; the codes are those of a loop that inverts H anew after
each column; fitted scales leave no output of a row farther.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlxstacks.ops.affine import Array, clip_codes, round_to
from mlxstacks.ops.policies import Groups

# Columns whose errors reach the rest of the matrix in one product.
_TOGETHER = 32
# Numbers in the normal equations of the rows that are fitted at once.
_FITTED_AT_ONCE = 1 << 24
# Added to their diagonal, of it and of its mean: codes that are all alike leave scale or bias free.
_RIDGE = 1e-6


@dataclass(frozen=True, eq=False)
class Moments:
    """sums: (K, K) float32, sum(x x^T) of inputs x, one for all modules that are given the same."""

    sums: Array


@dataclass(frozen=True, slots=True, eq=False)
class InputStatistics:
    """What rounding needs of a module's K inputs.

    moments: (K, K) float32, H. order: (K,) int, columns as they are rounded. carry: (K, K) float32,
    in that order: row j is U_j,: / U_jj, zero up to the diagonal.
    """

    moments: Array
    order: Array
    carry: Array

    @classmethod
    def of(cls, moments: Array, damping: float = 0.01) -> "InputStatistics":
        """moments: (K, K), H up to a factor. damping: share of the mean of its diagonal that is
        added to it; it stands for inputs that were not seen.

        Raises: ValueError: moments that are not finite, or zero.
        """
        from scipy.linalg import cholesky, solve_triangular

        h = np.asarray(moments, np.float64)
        mean = np.trace(h) / len(h)
        if not np.isfinite(h).all() or mean <= 0:
            raise ValueError("the second moments of the inputs are zero or not finite")
        h = h / mean + damping * np.eye(len(h))
        order = np.argsort(-np.diag(h), kind="stable")
        # H = V V^T with V upper: Cholesky's factor of H read backwards. Then U is its inverse.
        backwards = h[np.ix_(order, order)][::-1, ::-1]
        v = cholesky(backwards, lower=True)[::-1, ::-1]
        u = solve_triangular(v, np.eye(len(h)), lower=False)
        carry = np.triu(u / np.diag(u)[:, None], 1)
        return cls(h.astype(np.float32), order, carry.astype(np.float32))


@lru_cache(maxsize=2)
def statistics_of(moments: Moments) -> InputStatistics:
    """Made once for modules one after the other that share their moments. Raises: as `of`."""
    return InputStatistics.of(moments.sums)


def round_rows(target: Array, grid: Groups, inputs: InputStatistics) -> Groups:
    """Codes on the grid of `grid` for rows of a weight.

    Shapes: target (N, K) float32; `grid` has the N * K / group_size groups of these rows, whose
    codes do not count.
    """
    rows, width = target.shape
    group_size = grid.codes.shape[1]
    scales, biases = (x.reshape(rows, -1).T.copy() for x in (grid.scales, grid.biases))
    divisors = np.where(scales == 0, np.float32(np.inf), scales)
    left = target.T[inputs.order]  # (K, N)
    codes = np.empty((width, rows), np.uint8)
    errors = np.empty((_TOGETHER, rows), np.float32)
    for first in range(0, width, _TOGETHER):
        last = min(first + _TOGETHER, width)
        for place in range(first, last):
            column = inputs.order[place]
            group = column // group_size
            code = np.subtract(left[place], biases[group])
            code = clip_codes(np.divide(code, divisors[group], out=code), grid.bits)
            codes[column] = code
            code *= scales[group]
            code += biases[group]
            error = np.subtract(left[place], code, out=errors[place - first])
            left[place + 1 : last] -= np.outer(inputs.carry[place, place + 1 : last], error)
        left[last:] -= inputs.carry[first:last, last:].T @ errors[: last - first]
    flat = np.ascontiguousarray(codes.T).reshape(-1, group_size)
    return Groups(flat, grid.scales, grid.biases, grid.bits, grid.dtype)


def fit_scales(target: Array, groups: Groups, inputs: InputStatistics) -> Groups:
    """The codes of `groups` with the scales and biases that bring the outputs closest to `target`.

    They are rounded to the dtype of `groups` from the last to the first, each making good what
    rounding those after it left. A row that would gain nothing keeps its own.

    Shapes: as in `round_rows`.
    """
    rows = len(target)
    codes = groups.codes.reshape(rows, -1, groups.codes.shape[1])
    count = codes.shape[1]
    fitted = np.hstack([x.reshape(rows, count) for x in (groups.scales, groups.biases)])
    of_ones = inputs.moments.reshape(len(inputs.moments), count, -1).sum(-1)
    at_once = max(1, _FITTED_AT_ONCE // (2 * count) ** 2)
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        fitted[part] = _fitted(
            target[part], codes[part], fitted[part], groups.dtype, inputs.moments, of_ones
        )
    scales, biases = (x.ravel() for x in np.split(fitted, 2, axis=1))
    return Groups(groups.codes, scales, biases, groups.bits, groups.dtype)


def _fitted(
    target: Array, codes: Array, now: Array, dtype: str, moments: Array, of_ones: Array
) -> Array:
    """Shapes: target (N, K), codes (N, C, group_size), now and the result (N, 2 C): C scales, then
    C biases. of_ones: (K, C), moments with ones in each group.
    """
    count, group_size = codes.shape[1:]
    codes = codes.astype(np.float32)
    of_groups = moments.reshape(count, group_size, -1)
    of_ones = of_ones.reshape(count, group_size, count)
    error = target - (codes * now[:, :count, None] + now[:, count:, None]).reshape(target.shape)
    pull = (error @ moments).reshape(codes.shape)
    right = np.hstack([_dot(pull, codes), pull.sum(-1)]).astype(np.float64)
    # The normal equations of a row; Cholesky reads the lower triangle only.
    equations = np.empty((len(codes), 2 * count, 2 * count))
    equations[:, count:, count:] = of_ones.sum(1)
    for group in range(count):
        of_later = of_groups[group, :, group * group_size :]
        pull = (codes[:, group] @ of_later).reshape(len(codes), -1, group_size)
        equations[:, group:count, group] = _dot(pull, codes[:, group:])
        equations[:, count:, group] = codes[:, group] @ of_ones[group]
    diagonal = np.einsum("nii->ni", equations)
    diagonal *= 1 + _RIDGE
    diagonal += _RIDGE * diagonal.mean(axis=1, keepdims=True)
    lower = np.linalg.cholesky(equations)
    left = np.linalg.solve(lower, right[:, :, None])[:, :, 0]
    new, before = np.empty_like(now), np.square(left).sum(axis=1)
    for place in reversed(range(2 * count)):
        best = now[:, place] + left[:, place] / lower[:, place, place]
        new[:, place] = round_to(best.astype(np.float32), dtype)
        change = new[:, place] - now[:, place]
        left[:, : place + 1] -= lower[:, place, : place + 1] * change[:, None]
    closer = np.square(left).sum(axis=1) < before  # not where one overflows
    return np.where(closer[:, None], new, now)


def _dot(x: Array, y: Array) -> Array:
    return np.einsum("ncg,ncg->nc", x, y)
