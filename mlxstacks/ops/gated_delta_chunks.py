"""A segment of chunks of the gated delta rule, forward and backward (`gated_delta.py` derives it).

What does not need the state is computed for all chunks of the segment at once; the scans over the
chunks keep three matrix products a step. States are held transposed, (B, Hk, G, Dk, Dv), so that
the products run along rows in memory. Letters and leading axes: see `gated_delta_pairs.py`.
"""

from typing import NamedTuple

import mlx.core as mx

from mlxstacks.ops.gated_delta_pairs import (
    Decays,
    Pairs,
    Rows,
    scalar_decays,
    scalar_pairs,
    scalar_pairs_gradient,
    sum_after,
    sum_before,
    transposed,
    unit_lower_inverse,
    vector_decays,
    vector_pairs,
    vector_pairs_gradient,
)


class _Parts(NamedTuple):
    """What the chunks need besides the state.

    whole: decay over a chunk, (N, B, Hk, G, 1 or Dk, 1). solve: (I + beta kk)^-1, (..., C, C).
    q_in, k_in: rows that read the start state, (..., C, Dk). k_out: rows that write the end state.
    """

    decays: Decays
    whole: mx.array
    pairs: Pairs
    solve: mx.array
    q_in: mx.array
    k_in: mx.array
    k_out: mx.array


class _Scan(NamedTuple):
    """Over all chunks: start states (N, B, Hk, G, Dk, Dv), errors and writes (N, ..., C, Dv).

    error: v minus what the start state holds for k. write: what a token adds along its key.
    """

    states: mx.array
    errors: mx.array
    writes: mx.array
    end: mx.array


class Gradients(NamedTuple):
    """Gradients of the fields of Rows, with their shapes, and of the start state."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_gates: mx.array
    beta: mx.array
    state: mx.array


def _parts(rows: Rows) -> _Parts:
    vector = rows.has_vector_gates
    decays = vector_decays(rows) if vector else scalar_decays(rows)
    pairs = vector_pairs(rows) if vector else scalar_pairs(rows)
    solve = unit_lower_inverse(rows.beta * pairs.kk)
    q_in, k_in = rows.q * decays.arrive, rows.k * decays.arrive
    k_out = rows.kept(rows.k) * decays.leave
    return _Parts(decays, transposed(decays.whole), pairs, solve, q_in, k_in, k_out)


def _each_chunk(*stacked: mx.array) -> list[tuple[mx.array, ...]]:
    """Arrays (N, ...) as N tuples of views; slices for the reasons of `_split_pairs`."""
    return [tuple(x[n : n + 1].squeeze(0) for x in stacked) for n in range(stacked[0].shape[0])]


def _scan(rows: Rows, parts: _Parts, state: mx.array) -> _Scan:
    states, errors, writes = [], [], []
    chunks = _each_chunk(rows.v, rows.beta, parts.k_in, parts.solve, parts.whole, parts.k_out)
    for v, beta, k_in, solve, whole, k_out in chunks:
        states.append(state)
        errors.append(v - k_in @ state)
        writes.append(solve @ (beta * errors[-1]))
        state = whole * state + transposed(k_out) @ writes[-1]
    return _Scan(mx.stack(states), mx.stack(errors), mx.stack(writes), state)


def segment_forward(rows: Rows, state: mx.array) -> tuple[mx.array, mx.array]:
    """Outputs (N, B, Hk, G, C, Dv) and end state of a segment that starts in `state`."""
    parts = _parts(rows)
    scan = _scan(rows, parts, state)
    return parts.q_in @ scan.states + parts.pairs.qk @ scan.writes, scan.end


def segment_backward(rows: Rows, state: mx.array, dy: mx.array, dend: mx.array) -> Gradients:
    """Gradients of a segment from those of its outputs, `dy`, and of its end state, `dend`.

    Whatever the forward pass computed is computed again.
    """
    parts = _parts(rows)
    scan = _scan(rows, parts, state)
    dsolved, dends, dstate = _scan_back(rows, parts, dy, dend)

    dv = rows.beta * dsolved
    dq_in, dk_in = dy @ transposed(scan.states), -(dv @ transposed(scan.states))
    dk_out = scan.writes @ transposed(dends)
    dqk, dlower = dy @ transposed(scan.writes), -(dsolved @ transposed(scan.writes))
    dbeta = (dsolved * scan.errors).sum(axis=-1, keepdims=True)
    dbeta = dbeta + (dlower * parts.pairs.kk).sum(axis=-1, keepdims=True)
    pull = vector_pairs_gradient if rows.has_vector_gates else scalar_pairs_gradient
    pairs = pull(rows, parts.pairs, rows.beta * dlower, dqk)

    dq = pairs.q + (dq_in * parts.decays.arrive).sum(axis=3, keepdims=True)
    dk = dk_in * parts.decays.arrive + rows.kept(dk_out * parts.decays.leave)
    dk = pairs.k + dk.sum(axis=3, keepdims=True)
    arrive, leave = dq_in * parts.q_in + dk_in * parts.k_in, dk_out * parts.k_out
    whole = transposed((scan.states * parts.whole * dends).sum(axis=-1, keepdims=True))
    dlog = pairs.log_gates + _gate_gradient(rows, arrive, leave, whole)
    return Gradients(dq, dk, dv, dlog, dbeta, dstate)


def _scan_back(
    rows: Rows, parts: _Parts, dy: mx.array, dend: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Gradients of `beta * error` and the end states, over all chunks, and of the first state."""
    from_outputs = transposed(parts.pairs.qk) @ dy
    from_reads = transposed(parts.q_in) @ dy
    dsolved, dends = [], []
    chunks = _each_chunk(
        rows.beta, from_outputs, from_reads, parts.k_in, parts.solve, parts.whole, parts.k_out
    )
    for beta, outputs, reads, k_in, solve, whole, k_out in reversed(chunks):
        dends.append(dend)
        dsolved.append(transposed(solve) @ (outputs + k_out @ dend))
        dend = whole * dend + reads - transposed(k_in) @ (beta * dsolved[-1])
    return mx.stack(dsolved[::-1]), mx.stack(dends[::-1]), dend


def _gate_gradient(rows: Rows, arrive: mx.array, leave: mx.array, whole: mx.array) -> mx.array:
    """Gradient of the log gates through the decays to and from the ends of a chunk.

    Takes the gradients of the three exponents by key dimension: (..., C, Dk), and (..., 1, Dk).
    """
    if not rows.has_vector_gates:
        arrive, leave, whole = (x.sum(axis=-1, keepdims=True) for x in (arrive, leave, whole))
    return arrive + rows.kept(sum_after(arrive) + sum_before(leave) + whole)
