"""Inside one chunk of the gated delta rule: decayed products of token pairs, and the solve.

For tokens i < t of a chunk the decay between them is the product of the gates after i up to and
including t. It is always made from just that stretch: the exponential of a sum of log gates, or a
product of gates. A difference of two running sums from the start of the chunk would cancel (behind
one gate of e^-700 its error is as large as a slow gate itself), and a quotient of running products
divides by what has underflowed. So do gradients: the gate of token j collects the pairs with
i < j <= t, and no others that would have to cancel.

Shapes: every array leads with (N, B, Hk, G): chunks, batch, key heads, value heads for each key
head. Arrays made of keys and queries alone have G = 1. C is the length of a chunk, a power of two.
"""

import math
from typing import NamedTuple

import mlx.core as mx

# Below e^-60 = 9e-27 a decay counts as zero. What it would add is far under float32 rounding, and
# its products are denormal numbers, which made the matrix products on a CPU twice as slow.
LOWEST_EXPONENT = -60.0


class Rows(NamedTuple):
    """The tokens of a segment in chunks, all float32.

    q, k: (N, B, Hk, 1, C, Dk). v: (N, B, Hk, G, C, Dv). beta: (N, B, Hk, G, C, 1).
    log_gates: (N, B, Hk, G, C, 1), or Dk last where every key dimension has a gate of its own.
    keep: (N, B, 1, 1, C, 1), 1 for tokens and 0 for padding; None where nothing is padding.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    log_gates: mx.array
    beta: mx.array
    keep: mx.array | None

    def kept(self, x: mx.array) -> mx.array:
        """`x` with zeros at the tokens that are padding."""
        return x if self.keep is None else x * self.keep

    @property
    def has_vector_gates(self) -> bool:
        return self.log_gates.shape[-1] > 1


class Decays(NamedTuple):
    """Decays between the tokens of a block and its ends.

    arrive: from the start to a token, (..., C, 1 or Dk). leave: from a token to the end, likewise.
    whole: over the block, (..., blocks, 1 or Dk). Padding decays nothing but its own output.
    """

    arrive: mx.array
    leave: mx.array
    whole: mx.array


class Pairs(NamedTuple):
    """Products of the tokens of a chunk, times the decay between them: (N, B, Hk, G, C, C).

    kk: k_t . k_i for i < t. qk: q_t . k_i for i <= t. Columns of padding are zero, but for its own
    output, which reads its own write. decay: of scalar gates, kept for the gradient.
    """

    kk: mx.array
    qk: mx.array
    decay: mx.array | None


class PairGradients(NamedTuple):
    """Gradients of q, k (G = 1) and log_gates."""

    q: mx.array
    k: mx.array
    log_gates: mx.array


def sum_before(x: mx.array) -> mx.array:
    """Sums over earlier tokens, without the token itself: (..., C, D) -> (..., C, D)."""
    return mx.cumsum(x, axis=-2, inclusive=False)


def sum_after(x: mx.array) -> mx.array:
    """Sums over later tokens, without the token itself: (..., C, D) -> (..., C, D)."""
    return mx.cumsum(x, axis=-2, reverse=True, inclusive=False)


def transposed(x: mx.array) -> mx.array:
    """The last two axes swapped."""
    return x.swapaxes(-1, -2)


def flushed_exp(exponent: mx.array) -> mx.array:
    """exp, and zero below LOWEST_EXPONENT."""
    return mx.exp(exponent) * (exponent > LOWEST_EXPONENT)


# --- one gate a head ------------------------------------------------------------------------------


def scalar_decays(rows: Rows) -> Decays:
    """Decays between the tokens of each chunk and its ends."""
    kept = rows.kept(rows.log_gates)
    arrive = flushed_exp(sum_before(kept) + rows.log_gates)
    whole = flushed_exp(kept.sum(axis=-2))
    return Decays(arrive, flushed_exp(sum_after(kept)), whole[..., None, :])


def _below(C: int) -> mx.array:
    return mx.tril(mx.ones((C, C)), -1)


def _pair_decay(rows: Rows) -> mx.array:
    """Decay from token i to token t, zero unless i < t and i is kept: (N, B, Hk, G, C, C)."""
    C = rows.k.shape[-2]
    stretch = sum_before(rows.kept(rows.log_gates) * _below(C)) + rows.log_gates
    # Cut before exp: what stands above the diagonal is no decay.
    decay = flushed_exp(stretch + mx.triu(mx.full((C, C), -mx.inf)))
    return decay if rows.keep is None else decay * transposed(rows.keep)


def scalar_pairs(rows: Rows) -> Pairs:
    """The pairs of heads with one gate."""
    decay = _pair_decay(rows)
    columns = transposed(rows.k)
    own = mx.eye(decay.shape[-1])
    return Pairs(decay * (rows.k @ columns), (decay + own) * (rows.q @ columns), decay)


def scalar_pairs_gradient(rows: Rows, pairs: Pairs, dkk: mx.array, dqk: mx.array) -> PairGradients:
    """Pull gradients of `kk` and `qk` back; what they hold above the diagonal is ignored."""
    C = rows.k.shape[-2]
    assert pairs.decay is not None
    weight = dkk * pairs.kk + dqk * pairs.qk
    # Gate j lies between i and t when i < j <= t. That of padding decays its own output alone.
    reach = mx.eye(C) + (_below(C) if rows.keep is None else _below(C) * transposed(rows.keep))
    crossing = mx.cumsum(weight, axis=-1, inclusive=False) * reach
    dlog = crossing.sum(axis=-2)[..., None]  # (N, B, Hk, G, C, 1)
    dkk = (dkk * pairs.decay).sum(axis=3, keepdims=True)
    dqk = (dqk * (pairs.decay + mx.eye(C))).sum(axis=3, keepdims=True)
    dk = transposed(dqk) @ rows.q + (dkk + transposed(dkk)) @ rows.k
    return PairGradients(dqk @ rows.k, dk, dlog)


# --- a gate for every key dimension ---------------------------------------------------------------
#
# The decay of a pair now stands inside the sum over key dimensions. It splits at any border between
# i and t, into decay to the border times decay from it, neither above 1. Neighbouring blocks of b
# tokens have such a border: their pairs are one matrix product, then they become one block of 2b.


def _gates(rows: Rows) -> Decays:
    """Decays of blocks of one token."""
    gates = flushed_exp(rows.log_gates)
    whole = gates if rows.keep is None else gates * rows.keep + (1.0 - rows.keep)
    return Decays(gates, mx.ones_like(gates), whole)


def _doubled(decays: Decays, b: int) -> Decays:
    """Decays of blocks of 2b tokens from those of blocks of b."""
    earlier, later = _halves(decays.whole, 1)  # (..., C / 2b, 1, Dk)
    (arrive_first, arrive), (leave, leave_last) = (
        _halves(decays.arrive, b),
        _halves(decays.leave, b),
    )
    flush = math.exp(LOWEST_EXPONENT)
    arrive, leave, whole = (
        x * (x > flush) for x in (arrive * earlier, leave * later, earlier * later)
    )
    return Decays(_whole(arrive_first, arrive), _whole(leave, leave_last), whole.squeeze(-2))


def vector_decays(rows: Rows) -> Decays:
    """Decays between the tokens of each chunk and its ends."""
    decays = _gates(rows)
    for b in _widths(rows.k.shape[-2]):
        decays = _doubled(decays, b)
    return decays


def _halves(x: mx.array, b: int) -> tuple[mx.array, mx.array]:
    """Earlier and later blocks: (..., C, D) -> two (..., C / 2b, b, D)."""
    return _split_pairs(x.reshape(*x.shape[:-2], -1, 2, b, x.shape[-1]))


def _whole(earlier: mx.array, later: mx.array) -> mx.array:
    """The inverse of `_halves`."""
    joined = mx.concatenate([earlier, later], axis=-2)  # (..., C / 2b, 2b, D)
    return joined.reshape(*joined.shape[:-3], -1, joined.shape[-1])


def vector_pairs(rows: Rows) -> Pairs:
    """The pairs of heads with a gate for every key dimension."""
    lead, C = rows.log_gates.shape[:-2], rows.k.shape[-2]
    own = (rows.q * rows.k).sum(axis=-1)[..., None, None]
    qk = mx.broadcast_to(own, (*lead, C, 1, 1))
    kk, decays = mx.zeros_like(qk), _gates(rows)
    for b in _widths(C):
        arrive, leave = _halves(decays.arrive, b)[1], _halves(decays.leave, b)[0]
        columns = transposed(_halves(rows.kept(rows.k), b)[0] * leave)
        kk = join_blocks(kk, (_halves(rows.k, b)[1] * arrive) @ columns)
        qk = join_blocks(qk, (_halves(rows.q, b)[1] * arrive) @ columns)
        decays = _doubled(decays, b)
    return Pairs(kk.squeeze(-3), qk.squeeze(-3), None)


def vector_pairs_gradient(rows: Rows, pairs: Pairs, dkk: mx.array, dqk: mx.array) -> PairGradients:
    """Pull gradients of `kk` and `qk` back; what they hold above the diagonal is ignored."""
    own = mx.diagonal(dqk, axis1=-2, axis2=-1)[..., None].sum(axis=3, keepdims=True)
    total = PairGradients(own * rows.k, own * rows.q, mx.zeros_like(rows.log_gates))
    decays = _gates(rows)
    for b in _widths(rows.k.shape[-2]):
        level = _level_gradient(rows, decays, lower_blocks(dkk, b), lower_blocks(dqk, b))
        total = PairGradients(*(x + y for x, y in zip(total, level, strict=True)))
        decays = _doubled(decays, b)
    return total


def _level_gradient(rows: Rows, decays: Decays, dkk: mx.array, dqk: mx.array) -> PairGradients:
    """The share of the pairs of neighbouring blocks; dkk, dqk (..., C / 2b, b, b)."""
    b = dkk.shape[-1]
    arrive, leave = _halves(decays.arrive, b)[1], _halves(decays.leave, b)[0]
    row_q, row_k = _halves(rows.q, b)[1] * arrive, _halves(rows.k, b)[1] * arrive
    column = _halves(rows.kept(rows.k), b)[0] * leave
    drow_q, drow_k = dqk @ column, dkk @ column
    dcolumn = transposed(dqk) @ row_q + transposed(dkk) @ row_k
    # Gates of the later block up to the row's token, and of the earlier one after the column's.
    from_rows, from_columns = drow_q * row_q + drow_k * row_k, dcolumn * column
    nothing = mx.zeros_like(from_rows)
    crossed = rows.kept(_whole(sum_before(from_columns), sum_after(from_rows)))
    dq = _whole(nothing, drow_q * arrive).sum(axis=3, keepdims=True)
    earlier, later = _whole(dcolumn * leave, nothing), _whole(nothing, drow_k * arrive)
    dk = (rows.kept(earlier) + later).sum(axis=3, keepdims=True)
    return PairGradients(dq, dk, crossed + _whole(nothing, from_rows))


# --- blocks of a lower triangular matrix ----------------------------------------------------------


def _widths(C: int) -> list[int]:
    """1, 2, 4 ... C / 2."""
    return [1 << power for power in range(C.bit_length() - 1)]


def _split_pairs(pairs: mx.array) -> tuple[mx.array, mx.array]:
    """(..., 2, m, n) -> two views (..., m, n)."""
    # Slices: an integer index is a gather, which copies; and with mx.split here, mx.compile of a
    # gradient failed (IndexError, MLX 0.32.4).
    return pairs[..., :1, :, :].squeeze(-3), pairs[..., 1:, :, :].squeeze(-3)


def lower_blocks(matrix: mx.array, b: int) -> mx.array:
    """The lower left b x b quarters of the 2b x 2b blocks on the diagonal.

    Shapes: (..., C, C) -> (..., C / 2b, b, b), a view.
    """
    C = matrix.shape[-1]
    count = C // (2 * b)
    shape, strides = (matrix.size // (C * C), count, b, b), (C * C, 2 * b * (C + 1), C, 1)
    blocks = mx.as_strided(matrix, shape, strides, b * C)
    return blocks.reshape(*matrix.shape[:-2], count, b, b)


def join_blocks(diagonal: mx.array, lower: mx.array) -> mx.array:
    """Two neighbouring blocks and the quarter below the first become one block.

    Shapes: diagonal (..., 2n, b, b), lower (..., n, b, b) -> (..., n, 2b, 2b).
    """
    earlier, later = _block_pairs(diagonal)
    top = mx.concatenate([earlier, mx.zeros_like(lower)], axis=-1)
    bottom = mx.concatenate([lower, later], axis=-1)
    return mx.concatenate([top, bottom], axis=-2)


def _block_pairs(blocks: mx.array) -> tuple[mx.array, mx.array]:
    """(..., 2n, b, b) -> the even and the odd blocks, (..., n, b, b)."""
    return _split_pairs(blocks.reshape(*blocks.shape[:-3], -1, 2, *blocks.shape[-2:]))


def unit_lower_inverse(lower: mx.array) -> mx.array:
    """(I + lower)^-1 of `lower` (..., C, C), which is zero on and above the diagonal.

    By blocks from 1 x 1 upwards: [[X, 0], [L, Y]]^-1 is [[X^-1, 0], [-Y^-1 L X^-1, Y^-1]]. The
    power series of -lower would cancel: its terms reach binomials (4e17 at C = 64 for equal keys
    and beta = 1). Here every block is itself a part of the result, which stays bounded.
    """
    inverse = mx.ones((*lower.shape[:-1], 1, 1))  # (..., C, 1, 1)
    for b in _widths(lower.shape[-1]):
        below = lower_blocks(lower, b)
        if b > 1:  # the inverse of a 1 x 1 block is 1
            earlier, later = _block_pairs(inverse)
            below = later @ below @ earlier
        inverse = join_blocks(inverse, -below)
    return inverse.squeeze(-3)
