"""The low-rank update of a switch layer: for every row the A and B of its chosen base expert.

    delta[row] = scale * B[e] @ (gate * (A[e] @ x[row])),  e = indices[row]

Letters: M base experts, K input dims, N output dims, R ranks in all, E gates; a gate belongs to R/E
neighbouring ranks (the experts of a stack, or of several stacks packed along the rank axis).

Layouts, those of mlx-lm's switch layers:

    unsorted  x (..., 1, 1, K) for all choices of a token, or (..., k, 1, K) with one x a choice;
              indices (..., k)
    sorted    x (n, 1, K), indices (n,) in ascending order, sorted_indices=True

The result is (*indices.shape, 1, N) in the dtype of x.
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

# Without `use_kernel` the kernel takes fewer rows than this. It is where mlx-lm's SwitchGLU begins
# to sort: below, mx.gather_mm multiplies row by row as the kernel does, but in two launches, with z
# through memory and dropped gates included; from here on it takes the rows of an expert together.
MANY_ROWS = 64
GROUPS = 8  # SIMD groups of a threadgroup
THREADS = GROUPS * kernels.LANES
RANKS_AT_ONCE = 4  # of a SIMD group; EACH in the kernel
_MOST_ROWS = (1 << 31) // THREADS - 1  # MLX counts the threads of a grid in 31 bits


def expert_delta_reference(
    x: mx.array,
    a: mx.array,
    b: mx.array,
    indices: mx.array,
    gates: mx.array | None,
    scale: float,
    sorted_indices: bool,
) -> mx.array:
    """`expert_delta` in MLX operations: two gathered products.

    Shapes as in `expert_delta`. With gates=None these are the operations of mlx-lm's
    LoRASwitchLinear.
    """
    shared_a, shared_b = len(a) < len(b), len(b) < len(a)
    z = _shared(x, a) if shared_a else _gather(x, a, indices, sorted_indices)  # (..., 1, R)
    if gates is not None:
        weights = gates.astype(mx.float32)[..., None]  # (..., 1, E, 1)
        by_gate = mx.unflatten(z, -1, (gates.shape[-1], -1))  # (..., 1, E, R/E)
        z = mx.flatten(by_gate * weights, -2).astype(z.dtype)  # (..., 1, R)
    y = _shared(z, b) if shared_b else _gather(z, b, indices, sorted_indices)
    return (scale * y).astype(x.dtype)


def _shared(x: mx.array, w: mx.array) -> mx.array:
    """x (..., 1, K) times the one w (1, N, K) of all experts, (..., 1, N)."""
    x, w = products_on_cpu(x, w)
    return x @ w[0].T


def _gather(x: mx.array, w: mx.array, indices: mx.array, sorted_indices: bool) -> mx.array:
    """x (..., 1, K) times w (M, N, K) of each row's expert, (..., 1, N)."""
    x, w = products_on_cpu(x, w)
    return mx.gather_mm(x, w.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)


def expert_delta_kernel(
    x: mx.array,
    a: mx.array,
    b: mx.array,
    indices: mx.array,
    gates: mx.array | None,
    scale: float,
    sorted_indices: bool,
) -> mx.array:
    """`expert_delta` in one launch of kernels/expert_delta.metal; no checks, no gradient."""
    ranks, input_dims = a.shape[1:]
    output_dims = b.shape[1]
    shape = (*indices.shape, 1, output_dims)
    rows = indices.size
    if rows == 0:
        return mx.zeros(shape, x.dtype)
    factor = mx.array([scale], mx.float32)
    weights = factor if gates is None else gates.astype(mx.float32)
    per_gate_row = 1 if gates is None else rows * gates.shape[-1] // gates.size
    run = kernels.kernel(
        "expert_delta", ("hidden", "down_all", "up_all", "chosen", "gates", "factor"), ("result",)
    )
    (result,) = run(
        inputs=[x, a, b, indices.astype(mx.uint32), weights, factor],
        template=[
            ("XT", x.dtype),
            ("WT", a.dtype),
            ("INPUTS", input_dims),
            ("OUTPUTS", output_dims),
            ("RANKS", ranks),
            ("EXPERTS", 1 if gates is None else gates.shape[-1]),
            ("GATED", int(gates is not None)),
            ("HIDDEN_SHARE", rows * input_dims // x.size),
            ("GATE_SHARE", per_gate_row),
            ("SLICES", _slices(ranks)),
            ("SPAN", lanes_for(ranks)),
        ],
        grid=(THREADS * rows, _parts(input_dims, output_dims), 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, output_dims)],
        output_dtypes=[x.dtype],
    )
    return result.reshape(shape)


def _slices(ranks: int) -> int:
    """SIMD groups that share a rank, so that few ranks, too, give work to all of them."""
    slices = GROUPS
    while slices > 1 and slices * ranks > GROUPS * RANKS_AT_ONCE:
        slices //= 2
    return slices


def _parts(input_dims: int, output_dims: int) -> int:
    """Threadgroups of a row. Each works out z anew: it pays only where B is the larger matrix."""
    return max(1, min(8, output_dims // input_dims))


def _refusal(a: mx.array, b: mx.array, gates: mx.array | None, rows: int) -> str | None:
    """Why the kernel cannot take these (valid) arguments."""
    if len(a) != len(b):
        return f"a and b have {len(a)} and {len(b)} experts; the kernel takes all of both"
    if rows > _MOST_ROWS:
        return f"there are {rows} rows; the kernel takes {_MOST_ROWS}"
    if a.dtype != b.dtype:
        return f"a is {a.dtype} and b is {b.dtype}; the kernel takes both in one dtype"
    ranks = a.shape[1]
    experts = 1 if gates is None else gates.shape[-1]
    return shared_memory_refusal(ranks, 4 * (experts + ranks * (2 + _slices(ranks))))


def _problems(
    x: mx.array,
    a: mx.array,
    b: mx.array,
    indices: mx.array,
    gates: mx.array | None,
    scale: object,
) -> list[str]:
    """All that does not fit, one line each."""
    problems = wrong_floats(x=x, a=a, b=b, **({} if gates is None else {"gates": gates}))
    problems += wrong_scale(scale)
    if not mx.issubdtype(indices.dtype, mx.integer) or indices.ndim == 0:
        problems.append(
            f"indices: got {indices.dtype} of shape {indices.shape}, allowed is an integer type "
            "(uint32) of shape (..., k) or (n,)"
        )
    wrong = wrong_matrices(3, a=(a, "(M, R, K)"), b=(b, "(M, N, R)"))
    if wrong:
        return problems + wrong
    experts, ranks, input_dims = a.shape
    if b.shape[2] != ranks or (b.shape[0] != experts and 1 not in (b.shape[0], experts)):
        problems.append(
            f"b: got shape {b.shape}, allowed is ({experts}, N, {ranks}) beside a {a.shape}; "
            "swap its last two axes if they are (R, N)"
        )
    per_row = tuple(indices.shape)
    leads = {per_row, (*per_row[:-1], 1)}  # one x (or gate) for each row, or for all choices
    if x.ndim < 2 or x.shape[-2:] != (1, input_dims) or x.shape[:-2] not in leads:
        allowed = _either({(*lead, 1, input_dims) for lead in leads})
        problems.append(
            f"x: got shape {x.shape}, allowed is {allowed} beside indices {indices.shape} and a "
            f"{a.shape}; insert the missing axes of 1"
        )
    if gates is None:
        return problems
    count = gates.shape[-1] if gates.ndim and gates.shape[-1] else 0
    if count == 0 or ranks % count:
        problems.append(
            f"gates: got {count} at the end of {gates.shape}, allowed is a number that divides "
            f"R = {ranks}; give one gate for each expert of each packed stack"
        )
    if gates.ndim < 2 or gates.shape[-2] != 1 or gates.shape[:-2] not in leads:
        allowed = _either({(*lead, 1, count) for lead in leads})
        problems.append(
            f"gates: got shape {gates.shape}, allowed is {allowed} beside indices {indices.shape}; "
            "compute them from x in its own layout"
        )
    return problems


def _either(shapes: set[tuple[int, ...]]) -> str:
    return " or ".join(str(shape) for shape in sorted(shapes, reverse=True))


def expert_delta(
    x: mx.array,
    a: mx.array,
    b: mx.array,
    indices: mx.array,
    gates: mx.array | None,
    scale: float,
    sorted_indices: bool,
    use_kernel: bool | None = None,
) -> mx.array:
    """The low-rank change of a switch layer's output, (*indices.shape, 1, N) in the dtype of x.

    x: (*L, 1, 1, K) with indices (*L, k); or (*L, k, 1, K); sorted: (n, 1, K). Float.
    a: (M, R, K), b: (M, N, R), float; of either M may be 1, one for all experts.
    indices: integers from 0 to M-1; not checked, as mx.gather_mm does not.
    gates: (*L, 1, 1, E) or (*L, k, 1, E), sorted: (n, 1, E); float, E divides R; or None for ones.
    scale: the factor of the whole change, a number; its gradient is not worked out.
    use_kernel: None takes the kernel where it runs, for fewer rows than MANY_ROWS.

    Laws: sorted and unsorted agree; a gate of zero is the same as a slice of a and b without those
    ranks, if those are finite (the kernel does not read them, MLX's operations multiply by zero);
    with gates=None the result is what mlx-lm's LoRASwitchLinear adds; E=1 with a gate of 1 changes
    nothing; an a or b for all experts is, to rounding, as many equal ones, and its gradient the sum
    of theirs. Sums are float32 on the CPU and in the kernel. Gradients to x, a, b and gates are
    those of the reference in either case, none flows to what chose the indices; no jvp.

    Raises: ValueError listing all shapes and dtypes that do not fit; ValueError with the reason for
    `use_kernel=True` where the kernel cannot run.
    """
    raise_problems("expert_delta", _problems(x, a, b, indices, gates, scale))
    # gather_mm refuses gradients to its indices, which a router computes from floats.
    indices = mx.stop_gradient(indices)
    if use_kernel is None and indices.size >= MANY_ROWS:
        use_kernel = False
    if not kernels.use_kernel(use_kernel, "expert_delta", _refusal(a, b, gates, indices.size)):
        return expert_delta_reference(x, a, b, indices, gates, scale, sorted_indices)

    def with_constants(function: Function) -> Function:
        def call(x: mx.array, a: mx.array, b: mx.array, *gate: mx.array) -> mx.array:
            return function(x, a, b, indices, gate[0] if gate else None, scale, sorted_indices)

        return call

    return call_with_gradient(
        with_constants(expert_delta_kernel),
        with_constants(expert_delta_reference),
        [x, a, b] if gates is None else [x, a, b, gates],
    )
