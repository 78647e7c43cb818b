"""The weighted sum of packed frozen stacks: one pass over all of them for any number of stacks.

    y[t] = scale * sum over stacks s and experts e of gates[t, s, e] * B[s, e] @ (A[s, e] @ x[t])

Letters: S stacks of E experts with r ranks each, R = S*E*r ranks in all; K input dims, N output
dims. All stacks lie side by side along the rank axis, in the order (stack, expert, rank).
"""

import mlx.core as mx

from mlxstacks.ops import kernels
from mlxstacks.ops.low_rank_kernels import (
    Function,
    call_with_gradient,
    lanes_for,
    products_on_cpu,
    raise_problems,
    shared_memory_refusal,
    wrong_floats,
    wrong_matrices,
    wrong_scale,
)

# Tokens that share one pass over the weights. Without `use_kernel` the kernel takes up to so many:
# a decode step. Beyond it, some token of a tile uses nearly every expert, little can be skipped,
# and two matrix-matrix products use each weight for all tokens at once.
TILE = 8
DOWN, UP = 0, 1  # the two launches; the first gives (tokens, R), the second (tokens, N)
THREADS = {DOWN: 64, UP: 256}  # few rows in the first: small groups reach more cores


def stack_sum_reference(
    x: mx.array, a_all: mx.array, b_all: mx.array, gates: mx.array, scale: float
) -> mx.array:
    """`stack_sum` in MLX operations: two products, and gates multiplied in between."""
    experts = gates.shape[-2] * gates.shape[-1]
    left, a_all, b_all = products_on_cpu(x, a_all, b_all)
    z = left @ a_all.T  # (..., R)
    weights = (scale * gates.astype(mx.float32)).reshape(*gates.shape[:-2], experts, 1)
    by_expert = z.reshape(*z.shape[:-1], experts, a_all.shape[0] // experts)  # (..., S*E, r)
    z = (by_expert * weights).astype(z.dtype).reshape(z.shape)
    return (z @ b_all.T).astype(x.dtype)


def stack_sum_kernel(
    x: mx.array, a_all: mx.array, b_all: mx.array, gates: mx.array, scale: float
) -> mx.array:
    """`stack_sum` in two launches of kernels/stack_sum.metal; no checks, no gradient."""
    shape = (*x.shape[:-1], b_all.shape[0])
    tokens = x.size // x.shape[-1]
    if tokens == 0:
        return mx.zeros(shape, x.dtype)
    tile = min(tokens, TILE)
    missing = -tokens % tile
    flat, weights = x.reshape(tokens, -1), gates.astype(mx.float32).reshape(tokens, -1)
    if missing:
        # Tokens that fill up the last tile: their gates are zero, so no expert is read for them.
        flat, weights = (mx.pad(array, ((0, missing), (0, 0))) for array in (flat, weights))
    factor = mx.array([scale], mx.float32)
    z = _launch(DOWN, flat, a_all, weights, factor, mx.float32, tile)
    y = _launch(UP, z, b_all, weights, factor, x.dtype, tile)
    return y[:tokens].reshape(shape)


def _launch(
    phase: int,
    left: mx.array,
    right: mx.array,
    gates: mx.array,
    factor: mx.array,
    dtype: mx.Dtype,
    tile: int,
) -> mx.array:
    """left (tokens, C), right (rows, C), gates (tokens, S*E) -> (tokens, rows) of `dtype`."""
    rows, columns = right.shape
    tokens, experts = gates.shape
    span = lanes_for(columns)
    # In the first launch the rows of a lane belong to one expert, which is used or not.
    each = _rows_for(tile, rows // experts if phase == DOWN else rows)
    threads = THREADS[phase]
    in_group = threads // span * each  # rows of a threadgroup
    run = kernels.kernel("stack_sum", ("left", "right", "gates", "factor"), ("result",))
    (result,) = run(
        inputs=[left, right, gates, factor],
        template=[
            ("LT", left.dtype),
            ("WT", right.dtype),
            ("OT", dtype),
            ("PHASE", phase),
            ("ROWS", rows),
            ("COLUMNS", columns),
            ("EXPERTS", experts),
            ("TILE", tile),
            ("EACH", each),
            ("SPAN", span),
        ],
        grid=(threads * (tokens // tile), -(-rows // in_group), 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, rows)],
        output_dtypes=[dtype],
    )
    return result


def _rows_for(tile: int, divisible: int) -> int:
    """Rows of a lane, which share its loads of the left side: the more tokens, the more it pays.

    One token leaves one row to a lane: a stack has few ranks, and they should reach all cores.
    """
    for rows in (4, 2):
        if rows <= tile and divisible % rows == 0:
            return rows
    return 1


def _refusal(ranks: int, experts: int) -> str | None:
    """Why the kernel cannot take these (valid) arguments: lists of ranks and of used experts."""
    return shared_memory_refusal(ranks, 2 * ranks + 4 * experts)


def _problems(
    x: mx.array, a_all: mx.array, b_all: mx.array, gates: mx.array, scale: object
) -> list[str]:
    """All that does not fit, one line each."""
    problems = wrong_floats(x=x, a_all=a_all, b_all=b_all, gates=gates) + wrong_scale(scale)
    wrong = wrong_matrices(2, a_all=(a_all, "(S*E*r, K)"), b_all=(b_all, "(N, S*E*r)"))
    if wrong:
        return problems + wrong
    ranks, input_dims = a_all.shape
    if b_all.shape[1] != ranks:
        problems.append(
            f"b_all: got shape {b_all.shape}, allowed is (N, {ranks}) beside a_all {a_all.shape}; "
            "give it a column for every row of a_all, in the same order"
        )
    if x.ndim == 0 or x.shape[-1] != input_dims:
        problems.append(
            f"x: got shape {x.shape}, allowed is (..., {input_dims}) beside a_all {a_all.shape}"
        )
    if gates.ndim < 2 or gates.shape[:-2] != x.shape[:-1]:
        problems.append(
            f"gates: got shape {gates.shape}, allowed is (..., S, E) with the leading axes of x "
            f"{x.shape}; broadcast the weights of a sequence over its tokens"
        )
        return problems
    experts = gates.shape[-2] * gates.shape[-1]
    if experts == 0 or ranks % experts:
        problems.append(
            f"gates: got S*E = {experts} experts from {gates.shape}, allowed is a number that "
            f"divides the {ranks} rows of a_all; give one gate for each expert of each stack"
        )
    return problems


def stack_sum(
    x: mx.array,
    a_all: mx.array,
    b_all: mx.array,
    gates: mx.array,
    scale: float,
    use_kernel: bool | None = None,
) -> mx.array:
    """The change that all packed stacks make together, (..., N) in the dtype of x.

    x: (..., K), a_all: (S*E*r, K), b_all: (N, S*E*r), ranks in the order (stack, expert, rank); any
    of FLOATS each.
    gates: (..., S, E), per token, stack and expert, with the weights of domains multiplied in.
    scale: the factor of the whole change, a number; its gradient is not worked out.
    use_kernel: None takes the kernel where it runs, for up to TILE tokens.

    Laws: equals the sum over the stacks one by one; a gate of zero is the same as leaving that
    expert out of a_all and b_all, if it is finite (MLX's operations multiply by zero). The kernel
    does not read an expert whose gates are zero for every token of a tile of TILE. Gradients are
    those of the reference in either case, and true ones for all four arrays: routers need those of
    x and gates; frozen stacks ask for no others, and what is not asked for is not computed. No jvp.

    Raises: ValueError listing all shapes and dtypes that do not fit; ValueError with the reason for
    `use_kernel=True` where the kernel cannot run.
    """
    raise_problems("stack_sum", _problems(x, a_all, b_all, gates, scale))
    if use_kernel is None and x.size // x.shape[-1] > TILE:
        use_kernel = False
    refusal = _refusal(a_all.shape[0], gates.shape[-2] * gates.shape[-1])
    if not kernels.use_kernel(use_kernel, "stack_sum", refusal):
        return stack_sum_reference(x, a_all, b_all, gates, scale)

    def with_scale(function: Function) -> Function:
        return lambda *arrays: function(*arrays, scale)

    return call_with_gradient(
        with_scale(stack_sum_kernel), with_scale(stack_sum_reference), (x, a_all, b_all, gates)
    )
