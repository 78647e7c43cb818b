"""Frozen stacks of one projection, packed side by side along the rank axis.

Stacks of one shape (form, experts, rank, top-k, scale) are one segment, and a segment is two
products (and a thin one for the routers) for any number of stacks:

    form             a_all           b_all           routers
    linear, shared   (S*E*R, K)      (N, S*E*R)      (S*E, K)     order (stack, expert, rank)
    per_expert       (M, S*E*R, K)   (M, N, S*E*R)   (S*E, K)

Letters: S stacks, E experts, R ranks, K input dims, N output dims, M base experts; l replaces K and
N of latent stacks. There are no noise weights here: a frozen stack draws nothing, whatever the
model's training flag. Gradients pass through to x, by way of the routers too.

These are plain objects, not modules: no cast, unfreeze or optimizer step of a model reaches them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxstacks.layers.gates import router_logits, top_k_softmax
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.moe_lora import Form, Rows, packed_b
from mlxstacks.layers.selection import Selection, StackId
from mlxstacks.ops.expert_delta import expert_delta
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
    """Stacks of one shape side by side; ids[j] names the j-th, weights (S,) or (B, S) or None for
    ones. Shapes in the module docstring.
    """

    shape: StackShape
    ids: tuple[StackId, ...]
    a_all: mx.array
    b_all: mx.array
    routers: mx.array | None
    weights: mx.array | None = None

    @property
    def nbytes(self) -> int:
        routers = 0 if self.routers is None else self.routers.nbytes
        return self.a_all.nbytes + self.b_all.nbytes + routers

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
            b = self.b_all[:, ranks].reshape(-1, shape.num_experts, shape.rank).swapaxes(0, 1)
        return FrozenStack(self.ids[index], shape, a, b, router)


def pack(stacks: Sequence[FrozenStack], weights: mx.array | None = None) -> Segment:
    """One segment of stacks of one shape."""
    if stacks[0].shape.form == "per_expert":
        a_all = mx.concatenate([s.lora_a for s in stacks], axis=1)
        b_all = mx.concatenate([s.lora_b for s in stacks], axis=2)
    else:
        a_all = mx.concatenate([s.lora_a.flatten(0, 1) for s in stacks])
        b_all = mx.concatenate([packed_b(s.lora_b) for s in stacks], axis=1)
    routers = [s.router for s in stacks if s.router is not None]
    packed = mx.concatenate(routers) if routers else None
    ids = tuple(stack.id for stack in stacks)
    mx.eval(a_all, b_all, packed)
    return Segment(stacks[0].shape, ids, a_all, b_all, packed, weights)


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
        names = [stack.id.name for stack in stacks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two stacks named {', '.join(twice)}; names must differ")
        by_shape: dict[StackShape, list[FrozenStack]] = {}
        for stack in stacks:
            by_shape.setdefault(stack.shape, []).append(stack)
        self._segments = [pack(same) for same in by_shape.values()]
        self.serve(Selection())

    def serve(self, selection: Selection, dtype: mx.Dtype | None = None) -> None:
        """Slice out the stacks of a selection now, so that a forward pass (or a compiled one) does
        not. Stacks that are left out cost nothing afterwards.

        dtype: widen the served copy, where products of mixed dtypes are slow; exact.
        """
        served = (_serve(segment, selection) for segment in self._segments)
        self._served = [_cast(s, dtype) for s in served if s is not None]

    def __call__(self, x: mx.array, rows: Rows) -> mx.array | None:
        """The summed delta (..., N) in the dtype of x (..., K); None when no stack is served."""
        total = None
        for segment in self._served:
            delta = _segment_delta(segment, x, rows)
            total = delta if total is None else total + delta
        return total


def _serve(segment: Segment, selection: Selection) -> Segment | None:
    kept, weights = selection.of(segment.ids)
    if not kept:
        return None
    if len(kept) < len(segment.ids):
        return pack([segment.stack(index) for index in kept], weights)
    return replace(segment, weights=weights)


def _cast(segment: Segment, dtype: mx.Dtype | None) -> Segment:
    if dtype is None:
        return segment
    a_all, b_all = segment.a_all.astype(dtype), segment.b_all.astype(dtype)
    routers = None if segment.routers is None else segment.routers.astype(dtype)
    mx.eval(a_all, b_all, routers)
    return replace(segment, a_all=a_all, b_all=b_all, routers=routers)


def _segment_delta(segment: Segment, x: mx.array, rows: Rows) -> mx.array:
    shape, dtype = segment.shape, x.dtype
    weights = None if segment.weights is None else row_weights(segment.weights, x, rows)
    if shape.latent is not None:
        x = x.astype(mx.float32) @ shape.latent.d_in.T  # (..., l)
    gates = _gates(segment, x, weights)  # (..., S, E)
    if shape.form == "per_expert":
        assert rows.indices is not None
        return expert_delta(
            x, segment.a_all, segment.b_all, rows.indices, gates.flatten(-2), shape.scale,
            rows.sorted_indices,
        )  # fmt: skip
    delta = stack_sum(x, segment.a_all, segment.b_all, gates, shape.scale)
    return delta if shape.latent is None else (delta @ shape.latent.d_out.T).astype(dtype)


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
        if rows.sequence is None:
            raise ValueError(
                "weights per sequence: rows sorted by expert do not say their sequence here; "
                "attach stacks through attach_stacks, or route one sequence at a time"
            )
        return weights[rows.sequence][:, None]  # (n, 1, S)
    if x.shape[0] != weights.shape[0]:
        raise ValueError(
            f"weights for {weights.shape[0]} sequences, but the batch has shape {x.shape}; give "
            "one row of weights a sequence"
        )
    return weights.reshape(weights.shape[0], *[1] * (x.ndim - 2), weights.shape[1])
