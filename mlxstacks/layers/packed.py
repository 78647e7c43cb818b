"""Frozen stacks of one projection, packed side by side along the rank axis.

Stacks of one shape (form, experts, rank, top-k, scale) are one segment, and a segment is two
products (and a thin one for the routers) for any number of stacks:

    form             a_all           b_all           routers
    linear, shared   (S*E*R, K)      (N, S*E*R)      (S*E, K)     order (stack, expert, rank)
    per_expert       (M, S*E*R, K)   (M, N, S*E*R)   (S*E, K)

Where routers have the dtype of a_all, as they do once widened for a CPU, they are its last rows in
memory, and few rows go through their chosen experts alone; see packed_rows.py.

Letters: S stacks, E experts, R ranks, K input dims, N output dims, M base experts; l replaces K and
N of latent stacks. There are no noise weights here: a frozen stack draws nothing, whatever the
model's training flag. Gradients pass through to x, by way of the routers too.

These are plain objects, not modules: no cast, unfreeze or optimizer step of a model reaches them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxstacks.layers.gates import router_logits, top_k_softmax
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.moe_lora import Form, Rows, packed_b
from mlxstacks.layers.packed_rows import FEW_ROWS, RowViews, add_few, many_delta, row_views
from mlxstacks.layers.selection import Selection, StackId
from mlxstacks.ops.expert_delta import expert_delta
from mlxstacks.ops.low_rank_kernels import products_on_cpu
from mlxstacks.ops.stack_sum import stack_sum


@dataclass(frozen=True)
class StackShape:
    """What stacks must share to be packed into one segment (`latent`: the very same pair)."""

    form: Form
    num_experts: int
    rank: int
    top_k: int
    scale: float
    latent: LatentPair | None = None

    @property
    def ranks(self) -> int:
        return self.num_experts * self.rank


@dataclass(frozen=True, eq=False)
class FrozenStack:
    """One stack at one projection, in the layout of `MoELoRADelta`.

    lora_a, lora_b: see moe_lora.py, at storage dtype. router: (E, K) float32, None with one expert.
    """

    id: StackId
    shape: StackShape
    lora_a: mx.array
    lora_b: mx.array
    router: mx.array | None

    def tensors(self) -> dict[str, mx.array]:
        """Name -> array, as a file holds them."""
        named = {"lora_a": self.lora_a, "lora_b": self.lora_b, "router": self.router}
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Segment:
    """Stacks of one shape side by side; ids[j] names the j-th. Shapes in the module docstring.

    weights: (S,) or (B, S) float32, or None for ones. factor, column: the same for all rows, as
    few operations use it: factor times column (S, 1), from the last stack to the first, or times
        nothing where it is None.
    views: what packed_rows.py needs, where it applies. buffers: the arrays with memory of their
        own, of which the others are views. All these are set by `pack` and `_weigh`.
    answers: (B, 1) bool, the sequences that these stacks answer, or None for all. What others are
        given does not depend on them, not even where they are Inf or NaN.
    chosen: (B, 1) uint32, (S, K, R), (S, R, N): each sequence has one of S plain stacks of this
        shape in place of the stack here; or None. Per expert (S*M, R, K) and (S*M, N, R).
    """

    shape: StackShape
    ids: tuple[StackId, ...]
    a_all: mx.array
    b_all: mx.array
    routers: mx.array | None
    weights: mx.array | None = None
    factor: float = 1.0
    column: mx.array | None = None
    views: RowViews | None = None
    buffers: tuple[mx.array, ...] = ()
    answers: mx.array | None = None
    chosen: tuple[mx.array, mx.array, mx.array] | None = None

    @property
    def nbytes(self) -> int:
        routers = 0 if self.routers is None else self.routers.nbytes
        return self.a_all.nbytes + self.b_all.nbytes + routers

    @property
    def is_plain(self) -> bool:
        """Whether it is as LoRA: no router, and a pair of its own for each base expert."""
        alone = self.routers is None and self.shape.latent is None
        return alone and self.a_all.shape[:-2] == self.b_all.shape[:-2]

    def stack(self, index: int) -> FrozenStack:
        """The index-th stack, taken out. Law: packing it again gives the same bytes."""
        shape = self.shape
        ranks = slice(index * shape.ranks, (index + 1) * shape.ranks)
        experts = slice(index * shape.num_experts, (index + 1) * shape.num_experts)
        router = None if self.routers is None else self.routers[experts]
        if shape.form == "per_expert":
            a, b = self.a_all[:, ranks], self.b_all[:, :, ranks]
        else:
            a = self.a_all[ranks].reshape(shape.num_experts, shape.rank, -1)
            b = mx.unflatten(self.b_all[:, ranks], -1, (shape.num_experts, shape.rank))
            b = b.swapaxes(0, 1)  # (E, N, R)
        return FrozenStack(self.ids[index], shape, a, b, router)


def pack(
    stacks: Sequence[FrozenStack],
    weights: mx.array | None = None,
    dtype: mx.Dtype | None = None,
) -> Segment:
    """One segment of stacks of one shape, evaluated. dtype: widen them; exact."""
    segment = lazy_segment(stacks, dtype)
    views = [] if segment.views is None else list(vars(segment.views).values())
    mx.eval(segment.a_all, segment.b_all, segment.routers, views)
    return _weigh(segment, weights)


def lazy_segment(stacks: Sequence[FrozenStack], dtype: mx.Dtype | None = None) -> Segment:
    """`pack` without weights, and not evaluated."""
    shape, ids = stacks[0].shape, tuple(stack.id for stack in stacks)
    per_expert = shape.form == "per_expert"
    a = [_as(s.lora_a if per_expert else s.lora_a.flatten(0, 1), dtype) for s in stacks]
    routers = [_as(s.router, dtype) for s in stacks if s.router is not None]
    packed, views = None, None
    if mx.default_device().type == mx.DeviceType.gpu:
        b = [_as(s.lora_b if per_expert else packed_b(s.lora_b), dtype) for s in stacks]
        # one stack alone can be a view of many; a kernel would copy what has gaps at every call
        a = [mx.contiguous(one) for one in a]
        b_all = up = mx.contiguous(mx.concatenate(b, axis=-1))
    else:
        # There a row is multiplied faster by (R, N), and the ranks of an expert are one block.
        b = [_as(s.lora_b.swapaxes(-1, -2), dtype) for s in stacks]
        up = mx.concatenate(b if per_expert else [one.flatten(0, 1) for one in b], axis=-2)
        b_all = up.swapaxes(-1, -2)
        if routers and not per_expert and {x.dtype for x in (*a, *b, *routers)} == {mx.float32}:
            down = mx.concatenate([*a, *routers])
            a_all, packed = mx.split(down, [up.shape[0]])
            views = row_views(down, up, len(ids), shape.num_experts)
            owned = [down, up, views.routers, views.offsets]
    if views is None:
        a_all = mx.concatenate(a, axis=-2)
        packed = mx.concatenate(routers) if routers else None
        owned = [a_all, up] if packed is None else [a_all, up, packed]
    return Segment(shape, ids, a_all, b_all, packed, views=views, buffers=tuple(owned))


def _as(array: mx.array, dtype: mx.Dtype | None) -> mx.array:
    return array if dtype is None else array.astype(dtype)


def _weigh(segment: Segment, weights: mx.array | None) -> Segment:
    """Lay weights on a segment; arrays are shared."""
    factor, column = 1.0, None
    if weights is not None and (weights.ndim == 1 or weights.shape[0] == 1):
        values = weights.reshape(-1).tolist()
        if len(set(values)) == 1:
            factor = values[0]
        else:
            column = mx.contiguous(weights.reshape(-1, 1)[::-1])
            mx.eval(column)
    return replace(segment, weights=weights, factor=factor, column=column)


def pack_all(stacks: Sequence[FrozenStack], dtype: mx.Dtype | None = None) -> tuple[Segment, ...]:
    """Stacks of one projection, in order, as a segment for each shape; evaluated.

    dtype: widen them, where products of mixed dtypes are slow; exact.
    Raises: ValueError for two stacks of one name.
    """
    names = [stack.id.name for stack in stacks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two stacks named {', '.join(twice)}; names must differ")
    by_shape: dict[StackShape, list[FrozenStack]] = {}
    for stack in stacks:
        by_shape.setdefault(stack.shape, []).append(stack)
    return tuple(pack(same, dtype=dtype) for same in by_shape.values())


def weighted(segment: Segment, weights: Mapping[str, float]) -> Segment:
    """The same arrays, each stack multiplied by its weight (stack name -> number) for all rows.

    Law: where all weights are 1 there is no weights array, and nothing is multiplied.
    Raises: ValueError for a stack without a weight.
    """
    missing = [stack_id.name for stack_id in segment.ids if stack_id.name not in weights]
    if missing:
        raise ValueError(f"no weight for stack {', '.join(missing)}; give one for each stack")
    values = [float(weights[stack_id.name]) for stack_id in segment.ids]
    return _weigh(segment, None if set(values) == {1.0} else mx.array(values, mx.float32))


class PackedStacks:
    """All frozen stacks of one projection. Law: equals the sum of the stacks one by one."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._served: list[Segment] = []

    @property
    def ids(self) -> list[StackId]:
        """The stacks here, segment by segment."""
        return [stack_id for segment in self._segments for stack_id in segment.ids]

    @property
    def nbytes(self) -> int:
        """Bytes of all stacks, served or not."""
        return sum(segment.nbytes for segment in self._segments)

    def stacks(self) -> list[FrozenStack]:
        return [s.stack(index) for s in self._segments for index in range(len(s.ids))]

    def replace_all(self, stacks: Sequence[FrozenStack]) -> None:
        """Pack these stacks, in this order, in place of what was there; all served at weight 1.

        Raises: ValueError for two stacks of one name.
        """
        self._segments = list(pack_all(stacks))
        self.serve(Selection())

    def serve(self, selection: Selection, dtype: mx.Dtype | None = None) -> None:
        """Slice out the stacks of a selection now, so that a forward pass (or a compiled one) does
        not. Stacks that are left out cost nothing afterwards.

        dtype: widen the served copy, where products of mixed dtypes are slow; exact.
        """
        served = (_serve(segment, selection, dtype) for segment in self._segments)
        self._served = [segment for segment in served if segment is not None]

    def install(self, segments: Sequence[Segment]) -> None:
        """Serve exactly these from now on, until the next `serve`, `install` or `replace_all`.

        Nothing is copied: whoever packed them owns them. The stacks here stay as they are.
        """
        self._served = list(segments)

    def __call__(self, x: mx.array, rows: Rows) -> mx.array | None:
        """The summed delta (..., N) in the dtype of x (..., K); None when no stack is served."""
        total = None
        for segment in self._served:
            delta = _where_answered(segment, x, rows, _delta(segment, x, rows), mx.array(0.0))
            total = delta if total is None else total + delta
        return total

    def add_to(self, y: mx.array, x: mx.array, rows: Rows) -> mx.array:
        """y (..., N) plus the summed delta for x (..., K); cheaper than making that first."""
        for segment in self._served:
            y = _where_answered(segment, x, rows, _added(segment, y, x, rows), y)
        return y


def _serve(segment: Segment, selection: Selection, dtype: mx.Dtype | None) -> Segment | None:
    kept, weights = selection.of(segment.ids)
    if not kept:
        return None
    same_dtype = dtype is None or segment.a_all.dtype == segment.b_all.dtype == dtype
    if same_dtype and len(kept) == len(segment.ids):
        return _weigh(segment, weights)
    return pack([segment.stack(index) for index in kept], weights, dtype)


def _where_answered(
    segment: Segment, x: mx.array, rows: Rows, new: mx.array, old: mx.array
) -> mx.array:
    """`new` for the rows of x that the segment answers, `old` for the others."""
    if segment.answers is None:
        return new
    return mx.where(row_weights(segment.answers, x, rows), new, old)


def _added(segment: Segment, y: mx.array, x: mx.array, rows: Rows) -> mx.array:
    """y (..., N) plus the delta for x (..., K), for all rows."""
    shape, views = segment.shape, segment.views
    by_row = shape.latent is None and x.shape[:-1] == y.shape[:-1] and x.size > 0
    if by_row and segment.chosen is None and x.dtype == y.dtype == mx.float32:
        if views is not None and x.size <= FEW_ROWS * x.shape[-1]:
            return add_few(y, x, views, shape.top_k, *_factor_and_weights(segment, x, rows))
        if (
            segment.is_plain
            and segment.a_all.ndim == 2
            and segment.a_all.dtype == segment.b_all.dtype == mx.float32
        ):
            z = x @ segment.a_all.T  # (..., S*R)
            if segment.weights is not None and segment.factor == 1:
                by_stack = mx.unflatten(z, -1, (len(segment.ids), -1))
                z = (by_stack * row_weights(segment.weights, x, rows)[..., None]).reshape(z.shape)
            return mx.addmm(y, z, segment.b_all.T, alpha=shape.scale * segment.factor)
    return y + _delta(segment, x, rows).astype(y.dtype)


def _factor_and_weights(segment: Segment, x: mx.array, rows: Rows) -> tuple[float, mx.array | None]:
    """The scale with what all rows share of the weights, and the rest of them: None, (S, 1), or
    (X, S, 1) for the X rows of x; from the last stack to the first.
    """
    scale = segment.shape.scale * segment.factor
    if segment.weights is None or segment.weights.ndim == 1 or segment.weights.shape[0] == 1:
        return scale, segment.column
    own = row_weights(segment.weights, x, rows)
    own = mx.broadcast_to(own, (*x.shape[:-1], own.shape[-1]))
    return scale, own.reshape(-1, own.shape[-1], 1)[:, ::-1]


def _delta(segment: Segment, x: mx.array, rows: Rows) -> mx.array:
    shape, dtype = segment.shape, x.dtype
    weights = None if segment.weights is None else row_weights(segment.weights, x, rows)
    if segment.chosen is not None:
        own = row_weights(segment.chosen[0], x, rows)[..., 0, 0]  # (B, ...), one for each matrix
        x, down, up = products_on_cpu(x, *segment.chosen[1:])
        if shape.form == "per_expert":
            assert rows.indices is not None
            own = own * segment.a_all.shape[0] + rows.indices
            delta = expert_delta(x, down, up, own, None, shape.scale, False)
        else:
            z = mx.gather_mm(x, down, rhs_indices=own)
            delta = shape.scale * mx.gather_mm(z, up, rhs_indices=own)
        return (delta if weights is None else delta * weights).astype(dtype)
    if shape.latent is not None:
        x = x.astype(mx.float32) @ shape.latent.d_in.T  # (..., l)
    if segment.views is not None and x.dtype == mx.float32:
        column = None if weights is None else weights[..., None]
        delta = many_delta(x, segment.views, shape.top_k, shape.scale, column)
    else:
        delta = _gated_delta(segment, x, weights, rows)
    return delta if shape.latent is None else (delta @ shape.latent.d_out.T).astype(dtype)


def _gated_delta(segment: Segment, x: mx.array, weights: mx.array | None, rows: Rows) -> mx.array:
    shape = segment.shape
    gates = _gates(segment, x, weights)  # (..., S, E)
    if shape.form == "per_expert":
        assert rows.indices is not None
        return expert_delta(
            x, segment.a_all, segment.b_all, rows.indices, gates.flatten(-2), shape.scale,
            rows.sorted_indices,
        )  # fmt: skip
    return stack_sum(x, segment.a_all, segment.b_all, gates, shape.scale)


def _gates(segment: Segment, x: mx.array, weights: mx.array | None) -> mx.array:
    """Gates of every row, stack and expert (..., S, E) float32, stack weights multiplied in."""
    shape = segment.shape
    layout = (*x.shape[:-1], len(segment.ids), shape.num_experts)
    if segment.routers is None:
        gates = mx.ones(layout)
    else:
        gates = top_k_softmax(router_logits(x, segment.routers).reshape(layout), shape.top_k).gates
    return gates if weights is None else gates * weights[..., None]


def row_weights(weights: mx.array, x: mx.array, rows: Rows) -> mx.array:
    """Stack weights (S,) or (B, S) laid on the rows of x (..., K): broadcasts to (..., S).

    Raises: ValueError where the sequence of a row cannot be known.
    """
    if weights.ndim == 1 or weights.shape[0] == 1:
        return weights.reshape(-1)
    if rows.sorted_indices:
        return weights[rows.part(weights.shape[0], "sequence")][:, None]  # (n, 1, S)
    if x.shape[0] != weights.shape[0]:
        raise ValueError(
            f"weights for {weights.shape[0]} sequences, but the batch has shape {x.shape}; give "
            "one row of weights a sequence"
        )
    return weights.reshape(weights.shape[0], *[1] * (x.ndim - 2), weights.shape[1])
