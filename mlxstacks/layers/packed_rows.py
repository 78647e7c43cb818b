"""Packed stacks on a CPU in float32: few rows through the chosen experts alone, many in one pass.

Decoding has one row, and a row times a matrix costs as much as there are weights. So a row's router
is asked first, and only the experts it chose are multiplied: half of a stack of four with top 2.

    logits = x router^T,  chosen = its k largest,  gates = softmax of those
    y + scale * sum over chosen e of gates[e] * (x a[e]^T) b[e]

The sum over experts, the gates, the scale and the addition to the base's output are one product.
Beyond FEW_ROWS a pass over all experts is cheaper, as it uses each weight for every row at once.

Letters: X rows, S stacks, E experts each, k of them chosen, r ranks, R = S*E*r, K input dims, N
output dims.
"""

from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlxstacks.layers.gates import top_k_softmax

# Rows that are taken through their chosen experts.
FEW_ROWS = 4


@dataclass(frozen=True, eq=False)
class RowViews:
    """Views of packed stacks, made once: a view that is made anew costs as much as a small product.

    For few rows, stacks and experts counted from the last to the first: a (S*E, K, r),
    b (S*E, r, N), routers (1, K, S*E), offsets (S, 1) uint32, where the experts of a stack begin.
    For many rows, in order: down (K, R + S*E), the ranks and then the routers, and up (R, N).
    All float32; but for routers and offsets they share the memory of a_all and b_all.
    """

    a: mx.array
    b: mx.array
    routers: mx.array
    down: mx.array
    up: mx.array
    offsets: mx.array


def row_views(down: mx.array, up: mx.array, stacks: int, experts: int) -> RowViews:
    """down (R + S*E, K): ranks, then routers; up (R, N). Nothing is evaluated."""
    count = stacks * experts
    ranks, rank = up.shape[0], up.shape[0] // count
    return RowViews(
        a=down[:ranks].reshape(count, rank, -1)[::-1].swapaxes(-1, -2),
        b=up.reshape(count, rank, -1)[::-1],
        routers=mx.contiguous(down[ranks:][::-1])[None].swapaxes(-1, -2),
        down=down.T,
        up=up,
        offsets=(experts * mx.arange(stacks, dtype=mx.uint32))[:, None],
    )


def add_few(
    y: mx.array, x: mx.array, views: RowViews, top_k: int, scale: float, weights: mx.array | None
) -> mx.array:
    """y (..., N) plus the stacks' delta for x (..., K), row by row through its chosen experts.

    weights: (S, 1) or (X, S, 1), or None for ones, from the last stack to the first. scale: of the
    whole delta.
    """
    stacks = views.offsets.shape[0]
    rows = x.size // x.shape[-1]
    left = _shaped(x, (rows, 1, x.shape[-1]))
    logits = left @ views.routers  # (X, 1, S*E)
    if stacks > 1:
        logits = logits.reshape(rows, stacks, -1)
    chosen, gates = top_k_from_last(logits, top_k)  # (X, S, k)
    if stacks > 1:
        chosen = chosen + views.offsets
    if weights is not None:
        gates = gates * weights
    own, each = _left_indices(rows, stacks, top_k)
    z = mx.gather_mm(left, views.a, own, chosen)  # (X, S, k, 1, r)
    outputs = mx.gather_mm(z, views.b, each, chosen)  # (X, S, k, 1, N)
    used = stacks * top_k
    total = mx.addmm(
        _shaped(y, (rows, 1, y.shape[-1])),
        _shaped(gates, (rows, 1, used)),
        outputs.reshape(rows, used, -1),
        alpha=scale,
    )
    return _shaped(total, y.shape)


def top_k_from_last(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest logits (..., E) of each row: indices (..., k) uint32, and gates (..., k).

    Law: the gates of `top_k_softmax`; but of equal logits the last ones are kept, which are the
    first experts where these are counted from the last.
    """
    # Sorting in MLX is stable on a CPU, so the last of equals stays the last.
    chosen = mx.stop_gradient(mx.argsort(logits, axis=-1)[..., -k:])
    return chosen, mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1)


@lru_cache(maxsize=64)
def _left_indices(rows: int, stacks: int, top_k: int) -> tuple[mx.array, mx.array]:
    """Which row, and which of the rows' ranks, goes to each of (X, S, k) products."""
    shape = (rows, stacks, top_k)
    own = np.broadcast_to(np.arange(rows, dtype=np.uint32)[:, None, None], shape)
    # From NumPy: constants that need no evaluation, which a traced function forbids.
    return mx.array(own), mx.array(np.arange(own.size, dtype=np.uint32).reshape(shape))


def _shaped(array: mx.array, shape: tuple[int, ...]) -> mx.array:
    return array if array.shape == shape else array.reshape(shape)


def many_delta(
    x: mx.array, views: RowViews, top_k: int, scale: float, weights: mx.array | None
) -> mx.array:
    """The stacks' delta (..., N) for x (..., K), in two products whatever the number of stacks.

    weights: broadcasts to (..., S, 1), or None for ones.
    """
    stacks, ranks = views.offsets.shape[0], views.up.shape[0]
    z, logits = mx.split(x @ views.down, [ranks], axis=-1)
    logits = mx.unflatten(logits, -1, (stacks, -1))  # (..., S, E)
    gates = scale * top_k_softmax(logits, top_k).gates
    if weights is not None:
        gates = gates * weights
    z = mx.unflatten(z, -1, (*gates.shape[-2:], -1)) * gates[..., None]  # (..., S, E, r)
    return mx.flatten(z, -3) @ views.up
