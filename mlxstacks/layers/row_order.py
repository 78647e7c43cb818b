"""Where a row of a switch projection was before it was sorted.

mlx-lm's switch layers sort 64 and more (token, expert) rows by expert before the projections see
them, and the projections are not told from where a row came. Weights per sequence and the balance
loss, which leaves padding out, need it, so the layer around them works out the same order once more
and leaves it with its projections.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.stacked import StackedLayer

_TOLD: dict[type[nn.Module], type[nn.Module]] = {}


def _told(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a switch layer that tells its projections the order of sorted rows."""

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        layers = [m for m in self.children().values() if isinstance(m, StackedLayer)]
        order = expert_order(indices)
        for layer in layers:
            layer.tell_order(order)
        try:
            return kind.__call__(self, x, indices)
        finally:
            for layer in layers:
                layer.tell_order(None)

    body: dict[str, Any] = {"__call__": call, "__module__": kind.__module__, "_told_from": kind}
    return type(kind.__name__, (kind,), body)


def expert_order(indices: mx.array) -> mx.array:
    """indices (B, ..., k), the chosen experts -> (n,), where each row sorted by expert was.

    Law: the order is that of mlx-lm's sort: the same argsort of the same array.
    """
    return mx.argsort(mx.stop_gradient(indices).flatten())


def tell_order(switch: nn.Module) -> None:
    """Make a switch layer (SwitchGLU, SwitchMLP) tell its projections the order of their rows.

    Its class becomes a subclass of itself: paths and isinstance checks stay as they were.
    """
    if "_told_from" not in type(switch).__dict__:
        kind = type(switch)
        if kind not in _TOLD:
            _TOLD[kind] = _told(kind)
        switch.__class__ = _TOLD[kind]


def stop_telling(switch: nn.Module) -> None:
    """Undo `tell_order`."""
    kind = type(switch).__dict__.get("_told_from")
    if kind is not None:
        switch.__class__ = kind
