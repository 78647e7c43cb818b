"""Round a matrix so that its outputs stay close, not its weights: GPTQ (Frantar et al., ICLR 2023).

With second moments H = E[x x^T] of a module's inputs, an error e in a row of its weight costs
e H e^T at that output. Columns are rounded one after the other, those with the largest inputs
first. What rounding column j leaves, err = (target - value) / U_jj, is taken off the columns that
are still to come, by err * U_j,: with U the upper Cholesky factor of H^-1; no other change of them
makes the output closer to what it would have been.

Laws (tests/ops/test_gptq.py): a target that is on the grid keeps its codes; with H = I each weight
goes to its nearest code; the codes are those of a loop that inverts H anew after each column.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlxstacks.ops.affine import Array, clip_codes
from mlxstacks.ops.policies import Groups

# Columns whose errors reach the rest of the matrix in one product.
_TOGETHER = 32


@dataclass(frozen=True, eq=False)
class Moments:
    """sums: (K, K) float32, sum(x x^T) of inputs x, one for all modules that are given the same."""

    sums: Array


@dataclass(frozen=True, slots=True, eq=False)
class InputStatistics:
    """What rounding needs of a module's K inputs.

    order: (K,) int, columns as they are rounded. carry: (K, K) float32, in that order: row j is
    U_j,: / U_jj, zero up to the diagonal. root: (K, K) float32, R with R R^T = H, in the order of
    the weight: the size of e @ R is that of what e does to the output.
    """

    order: Array
    carry: Array
    root: Array

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
        root = np.empty_like(v)
        root[order] = v
        return cls(order, carry.astype(np.float32), root.astype(np.float32))


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
