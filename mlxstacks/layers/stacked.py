"""StackedLayer: a projection, its frozen stacks and the stack in training.

    y = base(x) + sum_j weight_j * frozen_j(x) + active(x)

The base is never trained and never changed. The gradient with respect to x flows through the base
and the frozen stacks (and their routers), so earlier layers learn against what is really computed.
Deltas are cast to the dtype of the base's output before they are added.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Self

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.adapted import AdaptedLayer, adapted_layers
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.moe_lora import MoELoRADelta, Rows
from mlxstacks.layers.packed import FrozenStack, PackedStacks, Segment
from mlxstacks.layers.selection import Selection, check_names, ungated
from mlxstacks.layers.settings import StackSettings

Recorder = Callable[[mx.array], None]


class StackedLayer(AdaptedLayer):
    """One projection with stacks; called as its base is.

    linear: the base. stacks: frozen ones, in evaluation and in training. active: the one in
    training, or None.
    """

    def __init__(self, base: nn.Module):
        super().__init__(base)
        base.freeze()
        self.stacks = PackedStacks()
        self.active: MoELoRADelta | None = None
        self._selection = ungated()
        self._dtype: mx.Dtype | None = None
        self._order: mx.array | None = None
        self._recorder: Recorder | None = None

    def __call__(
        self, x: mx.array, indices: mx.array | None = None, sorted_indices: bool = False
    ) -> mx.array:
        if self._dims.base_experts is None:
            y = self.linear(x)
        else:
            y = self.linear(x, indices, sorted_indices=sorted_indices)
        rows = Rows(indices, sorted_indices, self._order)
        if self._recorder is None:
            y = self.stacks.add_to(y, x, rows)
        else:
            frozen = self.stacks(x, rows)
            if frozen is not None:
                self._recorder(frozen)
                y = y + frozen.astype(y.dtype)
        if self.active is None or not self._selection.active:
            return y
        step = self._step
        delta, step.balance = self.active(
            x, rows, step.key, counted=step.counted, slopes=step.in_parts
        )
        return y + delta.astype(y.dtype)

    @classmethod
    def from_base(cls, linear: nn.Module) -> Self:
        """A place for stacks, without any; it computes what its base does."""
        return cls(linear)

    def fuse(self, dequantize: bool = False) -> nn.Module:
        """The base, where no stack is (dequantize is of no use then).

        Raises: ValueError where one is: its router looks at every token, and no weights do that.
        """
        if self.stacks.ids or self.active is not None:
            raise ValueError(
                "stacks cannot be fused: their routers weigh them for every token; `mlxstacks "
                "stacks export` writes a stack of one expert as an adapter, which can be"
            )
        return self.linear

    def add_active(
        self, settings: StackSettings, key: mx.array, latent: LatentPair | None = None
    ) -> MoELoRADelta:
        """A new stack to train; it gives exactly zero. Raises: ValueError when there is one."""
        if self.active is not None:
            raise ValueError("a stack is in training here; freeze it or drop it first")
        self.active = MoELoRADelta(self._dims, settings, key, latent)
        self.active.train(self.training)
        return self.active

    def drop_active(self) -> None:
        """Forget the stack in training."""
        self.active = None

    def set_stacks(self, stacks: Sequence[FrozenStack]) -> None:
        """Serve these frozen stacks, in this order, in place of the present ones."""
        self.stacks.replace_all(stacks)
        self.select(*self.mode)

    @property
    def mode(self) -> tuple[Selection, mx.Dtype | None]:
        """What it was last told to select."""
        return self._selection, self._dtype

    def select(self, selection: Selection, dtype: mx.Dtype | None = None) -> None:
        """Take a mode; see selection.py, and `PackedStacks.serve` for dtype."""
        self._selection, self._dtype = selection, dtype
        self.stacks.serve(selection, dtype)

    def install(self, segments: Sequence[Segment]) -> None:
        """Serve exactly these packed stacks, none for an empty list; see `PackedStacks.install`.

        `select` (and so `set_mode`) goes back to the stacks of the layer itself.
        """
        self.stacks.install(segments)

    def tell_order(self, order: mx.array | None) -> None:
        """Of rows sorted by expert: where each was before (n,), for the calls that follow.

        Told by the switch layer around this projection; see row_order.py.
        """
        self._order = order

    def record(self, recorder: Recorder | None) -> None:
        """Hand the frozen delta (..., N) of every call to `recorder`; None stops it."""
        self._recorder = recorder


def stacked_layers(model: nn.Module) -> Iterator[tuple[str, StackedLayer]]:
    """(path, layer) of every projection with stacks, by path."""
    for path, layer in adapted_layers(model):
        if isinstance(layer, StackedLayer):
            yield path, layer


def set_mode(model: nn.Module, selection: Selection, dtype: mx.Dtype | None = None) -> None:
    """Put every projection of a model into a mode.

    Raises: ValueError for a stack or domain that the model does not have; the mode then is as
        before.
    """
    layers = [layer for _, layer in stacked_layers(model)]
    check_names(selection, {stack_id for layer in layers for stack_id in layer.stacks.ids})
    for layer in layers:
        layer.select(selection, dtype)
