"""The gated delta recurrence in chunks, with a gradient: mlx-lm's `gated_delta_update`, to train.

A head keeps a state S (Dv, Dk). With gate g_t, strength beta_t, key k_t, value v_t, query q_t:

    S_t = S_{t-1} diag(g_t) + u_t k_t^T,   u_t = beta_t (v_t - S_{t-1} diag(g_t) k_t),
    y_t = S_t q_t

mlx-lm trains this as a loop over tokens, whose gradient keeps states for every token. Instead,
take C tokens that start in a state S. Unrolling the first equation inside the chunk gives

    S_t = S diag(G_t) + sum_{i<=t} u_i (D_ti k_i)^T,   D_ti = g_{i+1} ... g_t,  G_t = g_1 ... g_t

(products by key dimension; with a scalar gate all decay alike). Put into the second equation:

    u_t + beta_t sum_{i<t} (k_t . D_ti k_i) u_i = beta_t (v_t - S (G_t k_t))

With the u_t as rows of U this is one system, (I + diag(beta) A) U = diag(beta) (V - K_in S^T), A
strictly lower triangular and free of the state. So all tokens of a chunk come from one triangular
solve, Y = Q_in S^T + P U with P the same products for queries, and S moves on by U^T K_out, keys
decayed to the end of the chunk. Only S passes from chunk to chunk. A product of factors
I - beta k k^T written as I minus a sum of outer products is the WY form of Householder products;
that its factor is a triangular inverse, the UT transform. Without gates this is the chunkwise form
of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (Yang et al. 2024),
with a scalar gate of "Gated Delta Networks: Improving Mamba2 with Delta Rule" (Yang, Kautz,
Hatamizadeh 2024), with a gate for every key dimension of "Kimi Linear" (Kimi Team 2025). Inverting
by blocks, and decays that are made stretch by stretch, keep it accurate for gates at 0 and at 1 and
for beta up to 2 (`gated_delta_pairs.py`).

Backward: diag(beta) A gets minus (I + diag(beta) A)^-T dU times U^T, and the state's gradient runs
back through the transposed scan. Nothing is kept from the forward pass but the arguments and the
states between segments of SEGMENT tokens; each segment is computed again when its gradient is due.
`mx.depends` puts that work in order, for MLX is free to do it early and finish it late: it waits
for the cotangents, and what a segment computes is complete before anything goes on from it.

Padding (mask 0) leaves the state alone; its own output is what mlx-lm's loop gives, the token tried
out and taken back. Everything inside is float32, log gates too, whatever the dtype of q.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from mlxstacks.ops.gated_delta_chunks import segment_backward, segment_forward
from mlxstacks.ops.gated_delta_pairs import Rows

CHUNK = 32
SEGMENT = 512

# exp of anything below is 0 in float32, and sums of a chunk of these stay exact enough.
_LOWEST_LOG_GATE = -1e3


class _Form(NamedTuple):
    """What decides the computation besides arrays."""

    lower_bound: float | None
    allow_neg_eigval: bool
    chunk: int
    segment: int


def _sigmoid(x: mx.array) -> mx.array:
    """With a gradient that holds where it saturates; mx.sigmoid's takes 1 - sigmoid in float32."""
    return mx.exp(-mx.logaddexp(-x, 0.0))


def log_gates(
    a: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None = None
) -> mx.array:
    """Logarithms of the gates, float32, of the shape of `a`: (B, T, Hv), or (B, T, Hv, Dk).

    -exp(A_log) * softplus(a + dt_bias), or with a lower bound L < 0,
    L * sigmoid(exp(A_log) * (a + dt_bias)).
    A_log: (Hv,), or (Hv, 1); dt_bias: (Hv,), or (Hv, Dk).
    """
    rate = mx.exp(A_log.astype(mx.float32))
    raised = a.astype(mx.float32) + dt_bias.astype(mx.float32)
    if lower_bound is None:
        gates = -rate * mx.logaddexp(raised, 0.0)
    else:
        gates = lower_bound * _sigmoid(rate * raised)
    return mx.maximum(gates, _LOWEST_LOG_GATE)


def strengths(b: mx.array, allow_neg_eigval: bool = False) -> mx.array:
    """beta (B, T, Hv) in float32: sigmoid(b), doubled where eigenvalues may be negative."""
    beta = _sigmoid(b.astype(mx.float32))
    return 2.0 * beta if allow_neg_eigval else beta


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    chunk: int = CHUNK,
    segment: int = SEGMENT,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's function of that name, to rounding, in O(T / chunk) operations.

    Shapes: q, k (B, T, Hk, Dk), normalized by the caller; v (B, T, Hv, Dv), Hv a multiple of Hk;
        b (B, T, Hv); a, A_log, dt_bias as `log_gates` takes them; state (B, Hv, Dv, Dk) or None for
        zeros; mask (B, T), true for tokens, false for padding.
    use_kernel: may use MLX's own kernel where `native_fits` says so; False never does.
    chunk, segment: tokens, powers of two.
    Returns y (B, T, Hv, Dv) in the dtype of q and the end state (B, Hv, Dv, Dk) in float32.
    Law: splitting T anywhere and carrying the state changes nothing but rounding.

    Raises:
        ValueError: T is 0, heads do not divide, or a length is no power of two.
    """
    _check(q, v, chunk, segment)
    if state is None:
        state = mx.zeros((v.shape[0], v.shape[2], v.shape[3], q.shape[3]), dtype=mx.float32)
    if use_kernel and mask is None and native_fits(q, v, a):
        beta = strengths(b, allow_neg_eigval)
        return gated_delta_native(q, k, v, log_gates(a, A_log, dt_bias, lower_bound), beta, state)
    keep = () if mask is None else (mask.astype(mx.float32),)
    form = _Form(lower_bound, allow_neg_eigval, chunk, max(segment, chunk))
    y, end, *_ = _with_gradient(form)(q, k, v, a, b, A_log, dt_bias, state, *keep)
    return y, end


def _check(q: mx.array, v: mx.array, chunk: int, segment: int) -> None:
    if not q.shape[1]:
        raise ValueError("the recurrence needs at least one token, got T = 0")
    if v.shape[-2] % q.shape[-2]:
        raise ValueError(
            f"{v.shape[-2]} value heads do not divide among {q.shape[-2]} key heads; use a multiple"
        )
    for name, length in (("chunk", chunk), ("segment", segment)):
        if length < 1 or length & (length - 1):
            raise ValueError(f"{name} is {length}; it has to be a power of two")


# --- MLX's own kernel -----------------------------------------------------------------------------

# The shapes of mlx/backend/metal/gated_delta_update.cpp, MLX 0.32.4. With others or off Metal,
# `mx.fast.gated_delta_update` is a loop like mlx-lm's: 15,390 live buffers at T = 1024.
_NATIVE_DIMS = 128
_NATIVE_HEADS = {(16, 16), (16, 32), (16, 48), (16, 64), (24, 24), (32, 32)}


def native_fits(q: mx.array, v: mx.array, a: mx.array) -> bool:
    """Whether `mx.fast.gated_delta_update` is a kernel here: a Metal device, one of its shapes.

    Models in training do not ask (mlx-lm calls with use_kernel=False): its gradient keeps a state a
    token on GPUs before the M5, the very cost that chunks avoid.
    """
    on_metal = mx.metal.is_available() and mx.default_device() == mx.gpu
    heads, dims = (q.shape[-2], v.shape[-2]), {q.shape[-1], v.shape[-1]}
    return on_metal and a.ndim == 3 and dims == {_NATIVE_DIMS} and heads in _NATIVE_HEADS


def gated_delta_native(
    q: mx.array, k: mx.array, v: mx.array, gates: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """MLX's own recurrence from log gates (B, T, Hv) and beta; other shapes as above.

    In float32, because it rounds gates to the dtype of q: with slow gates in bf16 that cost 1.3% of
    y and 1.6% of the end state (benchmarks/bench_gated_delta.py); in float32 it is exact.
    """
    wide = (x.astype(mx.float32) for x in (q, k, v))
    y, end = mx.fast.gated_delta_update(*wide, mx.exp(gates), beta, state.astype(mx.float32))
    return y.astype(q.dtype), end


# --- the function and its gradient ----------------------------------------------------------------


@lru_cache
def _with_gradient(form: _Form) -> Callable[..., tuple[mx.array, ...]]:
    """f(q, k, v, a, b, A_log, dt_bias, state[, keep]) -> y, end state, states between segments."""

    @mx.custom_function
    def forward(*arguments: mx.array) -> tuple[mx.array, ...]:
        return _forward(form, arguments)

    @forward.vjp
    def backward(
        arguments: tuple[mx.array, ...],
        cotangents: tuple[mx.array, ...],
        outputs: tuple[mx.array, ...],
    ) -> tuple[mx.array, ...]:
        return _backward(form, arguments, cotangents[:2], outputs[2:])

    return forward


def _forward(form: _Form, arguments: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    q, k, v, a, b, A_log, dt_bias, first, *keep = arguments
    states, ys = [_inner_state(first, q.shape[2])], []
    for part in _segments(q.shape[1], form.segment):
        sliced = [x[:, part] for x in (q, k, v, a, b, *keep)]
        y, end = segment_forward(_rows(form, sliced, A_log, dt_bias), states[-1])
        ys.append(_from_chunks(y, sliced[0].shape[1]).astype(q.dtype))
        states.append(end)
    return mx.concatenate(ys, axis=1), _outer_state(states[-1]), *states[1:-1]


def _backward(
    form: _Form,
    arguments: tuple[mx.array, ...],
    cotangents: tuple[mx.array, ...],
    between: tuple[mx.array, ...],
) -> tuple[mx.array, ...]:
    q, k, v, a, b, A_log, dt_bias, first, *keep = arguments
    dy, dend = cotangents[0], _inner_state(cotangents[1], q.shape[2])
    starts = [_inner_state(first, q.shape[2]), *between]
    dA_log, ddt_bias = mx.zeros(A_log.shape), mx.zeros(dt_bias.shape)
    by_token = []
    for part, start in reversed(
        list(zip(_segments(q.shape[1], form.segment), starts, strict=True))
    ):
        sliced = [x[:, part] for x in (q, k, v, a, b, *keep)]
        dy_part, start, *sliced = mx.depends([dy[:, part], start, *sliced], [dy, dend])
        made = _segment_gradients(form, sliced, A_log, dt_bias, start, dy_part, dend)
        # None of them before all: or what the slow ones need is held while the rest goes on.
        *tokens, dA_part, ddt_part, dend = mx.depends(made, made)
        by_token.append(tokens)
        dA_log, ddt_bias = dA_log + dA_part, ddt_bias + ddt_part
    whole = [mx.concatenate(parts[::-1], axis=1) for parts in zip(*by_token, strict=True)]
    gradients = (*whole, dA_log, ddt_bias, _outer_state(dend), *map(mx.zeros_like, keep))
    return tuple(x.astype(like.dtype) for x, like in zip(gradients, arguments, strict=True))


def _segment_gradients(
    form: _Form,
    sliced: list[mx.array],
    A_log: mx.array,
    dt_bias: mx.array,
    start: mx.array,
    dy: mx.array,
    dend: mx.array,
) -> list[mx.array]:
    """Gradients of q, k, v, a, b (B, tokens, ...), A_log, dt_bias and of the start state."""
    q, _, _, a, b = sliced[:5]
    T, Hk = q.shape[1:3]
    rows = _rows(form, sliced, A_log, dt_bias)
    made = segment_backward(rows, start, _in_chunks(dy, rows.k.shape[-2], Hk), dend)
    dq, dk, dv, dlog, dbeta = (_from_chunks(x, T) for x in made[:5])

    def gates_and_strengths(*arrays: mx.array) -> list[mx.array]:
        a, b, A_log, dt_bias = arrays
        gates = log_gates(a, A_log, dt_bias, form.lower_bound)
        return [gates, strengths(b, form.allow_neg_eigval)]

    wide = [x.astype(mx.float32) for x in (a, b, A_log, dt_bias)]
    _, gated = mx.vjp(gates_and_strengths, wide, [dlog.reshape(a.shape), dbeta.squeeze(-1)])
    da, db, dA_log, ddt_bias = gated
    narrow = (x.astype(like.dtype) for x, like in zip((dq, dk, dv, da, db), sliced, strict=False))
    return [*narrow, dA_log, ddt_bias, made.state]


# --- layout ---------------------------------------------------------------------------------------


def _segments(T: int, segment: int) -> list[slice]:
    return [slice(start, min(start + segment, T)) for start in range(0, T, segment)]


def _rows(form: _Form, sliced: list[mx.array], A_log: mx.array, dt_bias: mx.array) -> Rows:
    """A segment's slices of q, k, v, a, b[, keep] as chunks; short ones get a short chunk."""
    q, k, v, a, b, *keep = sliced
    T, Hk = q.shape[1:3]
    C = min(form.chunk, 1 << (T - 1).bit_length())
    gates = log_gates(a, A_log, dt_bias, form.lower_bound)
    beta = strengths(b, form.allow_neg_eigval)[..., None]
    gates = gates[..., None] if gates.ndim == 3 else gates
    padding = _in_chunks(keep[0][..., None, None], C, 1) if keep else None
    q, k, v, gates, beta = (_in_chunks(x, C, Hk) for x in (q, k, v, gates, beta))
    return Rows(q, k, v, gates, beta, padding)


def _in_chunks(x: mx.array, C: int, Hk: int) -> mx.array:
    """(B, T, H, D) -> (N, B, Hk, H / Hk, C, D) in float32.

    Zeros fill the last chunk: a token with gate 1 (log 0) and beta 0 that changes nothing.
    """
    B, T, H, D = x.shape
    N = -(-T // C)
    x = mx.pad(x.astype(mx.float32), [(0, 0), (0, N * C - T), (0, 0), (0, 0)])
    x = x.reshape(B, N, C, Hk, H // Hk, D).transpose(1, 0, 3, 4, 2, 5)  # (N, B, Hk, G, C, D)
    return mx.contiguous(x)


def _from_chunks(x: mx.array, T: int) -> mx.array:
    """(N, B, Hk, G, C, D) -> (B, T, Hk * G, D)."""
    N, B, Hk, G, C, D = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(B, N * C, Hk * G, D)[:, :T]


def _inner_state(state: mx.array, Hk: int) -> mx.array:
    """(B, Hv, Dv, Dk) -> (B, Hk, G, Dk, Dv) in float32."""
    B, Hv, Dv, Dk = state.shape
    return state.astype(mx.float32).reshape(B, Hk, Hv // Hk, Dv, Dk).swapaxes(-1, -2)


def _outer_state(state: mx.array) -> mx.array:
    """The inverse of `_inner_state`."""
    B, Hk, G, Dk, Dv = state.shape
    return state.swapaxes(-1, -2).reshape(B, Hk * G, Dv, Dk)
