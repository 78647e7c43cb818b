"""A model in parts on several processes, with its adapters and stacks.

mlx-lm splits the base (`shard`): of a projection each process has a part of the outputs, or of the
inputs, and the parts are added up. What stands beside a projection stays whole on each process: it
reads the whole input and its output is cut, so every form of it works as in one process.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers import distributed
from mlx.utils import tree_unflatten

from mlxstacks import base_model
from mlxstacks.errors import InputError


@dataclass(frozen=True, eq=False)
class Split:
    """How a projection is split. outputs: of the whole projection those that are here, int (N',),
    or a slice where they lie side by side; None: the inputs are split. is_summed: the projection
    itself adds up the parts, not the module around.
    """

    group: mx.distributed.Group
    dims: int
    outputs: mx.array | slice | None
    is_summed: bool

    @cached_property
    def _places(self) -> mx.array:
        """Of every output where it is among those that are here; one past them: it is not."""
        assert isinstance(self.outputs, mx.array)
        places = mx.full(self.dims, self.outputs.size)
        places[self.outputs] = mx.arange(self.outputs.size)
        mx.eval(places)
        return places

    def whole(self, x: mx.array) -> mx.array:
        """x (..., K') of a process -> (..., K) of all."""
        if self.outputs is not None:
            return x
        parts = mx.distributed.all_gather(x[None], group=self.group)
        return mx.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], -1)  # (..., K)

    def part(self, x: mx.array) -> mx.array:
        """The inverse of `whole`."""
        if self.outputs is not None:
            return x
        each = x.shape[-1] // self.group.size()
        start = self.group.rank() * each
        return x[..., start : start + each]

    def widened(self, y: mx.array) -> mx.array:
        """What a process has of the output (..., N') -> (..., N), so that a delta can be added."""
        if self.outputs is not None:
            beside = [(0, 0)] * (y.ndim - 1)
            if isinstance(self.outputs, slice):
                return mx.pad(y, [*beside, (self.outputs.start, self.dims - self.outputs.stop)])
            return mx.take(mx.pad(y, [*beside, (0, 1)]), self._places, axis=-1)
        return y if self.is_summed else y * self.group.size()

    def cut(self, y: mx.array) -> mx.array:
        """The inverse of `widened`."""
        if self.outputs is not None:
            return y[..., self.outputs]
        return y if self.is_summed else y / self.group.size()


class Part(nn.Module):
    """A process's part of a projection, with input and output as of the whole."""

    def __init__(self, base: nn.Module, split: Split) -> None:
        super().__init__()
        self.base, self._split = base, split

    def __call__(self, x: mx.array, *indices: mx.array, **more: Any) -> mx.array:
        return self._split.widened(self.base(self._split.part(x), *indices, **more))


def shard(model: nn.Module, group: mx.distributed.Group) -> None:
    """Keep of a model the part of this process, which then takes part in every forward pass; no
    weight is read before it is used.

    Law: the logits of one process, but for rounding.
    Raises: InputError: mlx-lm cannot split such a model, or not in so many parts; an adapter that
        needs whole weights (DoRA).
    """
    split_base: Callable[..., None] | None = getattr(model, "shard", None)
    if split_base is None:
        raise InputError(
            f"mlx-lm cannot split a {getattr(model, 'model_type', 'model')} over processes; it can "
            f"these: {', '.join(base_model.types_that_shard())}. Answer in one process"
        )
    outer = dict(_outermost(model))
    bases = {path: _base(module) for path, module in outer.items()}
    if dora := [path for path, module in outer.items() if "m" in module]:
        raise InputError(f"{dora[0]}: DoRA needs whole weights; fuse it, or answer in one process")
    _put(model, bases)
    # MLX changes some modules, and makes others; the arrays themselves tell which is which.
    weights = {path: base["weight"] for path, base in bases.items()}
    paths = {id(weight): path for path, weight in weights.items()}
    cuts: dict[str, tuple[int, Any]] = {}
    with _recorded(lambda weight, cut: cuts.__setitem__(paths.get(id(weight), ""), cut)):
        try:
            split_base(group)
            base_model.check_forward(model)
        except (ValueError, AssertionError, IndexError) as error:
            raise InputError(
                f"the model cannot be split over {group.size()} processes ({error}); try another "
                "number: one that divides its heads and dims"
            ) from None
    modules = dict(model.named_modules())
    for path, module in outer.items():
        part, shape = modules[path], weights[path].shape
        if part["weight"].shape != shape:
            module._split = _split(part, shape, cuts.get(path), group)
            module.__class__ = as_kind(module, type(module))
            _innermost(module)["linear"] = Part(part, module._split)
    _put(model, outer)


def _outermost(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of what stands on a projection, the outermost of several."""
    inside = ""
    for path, module in sorted(model.named_modules()):
        if isinstance(module.get("linear"), nn.Module) and not (inside and path.startswith(inside)):
            inside = f"{path}."
            yield path, module


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(module["linear"].get("linear"), nn.Module):
        module = module["linear"]
    return module


def _base(module: nn.Module) -> nn.Module:
    base: nn.Module = _innermost(module)["linear"]
    return base


def _put(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    model.update_modules(tree_unflatten(list(modules.items())))


@contextmanager
def _recorded(record: Callable[[mx.array, tuple[int, Any]], None]) -> Iterator[None]:
    """Tell `record` the axis and segments by which MLX splits a weight."""
    split = distributed._shard

    def recording(parameters: dict[str, Any], predicate: Any, group: Any = None) -> Any:
        if (weight := parameters.get("weight")) is not None:
            cut = predicate("weight", weight)
            record(weight, cut if isinstance(cut, tuple) else (cut, 1))
        return split(parameters, predicate, group)

    distributed._shard = recording
    try:
        yield
    finally:
        distributed._shard = split


def _split(
    part: nn.Module, shape: Sequence[int], cut: tuple[int, Any] | None, group: mx.distributed.Group
) -> Split:
    dims = shape[-2]
    if cut is None:  # fewer heads than processes: several have the same one
        each = part["weight"].shape[0]
        head = group.rank() * (dims // each) // group.size()
        return Split(group, dims, slice(each * head, each * (head + 1)), False)
    axis, segments = cut
    is_summed = isinstance(part, nn.ShardedToAllLinear | nn.QuantizedShardedToAllLinear)
    if axis in (-1, len(shape) - 1):
        return Split(group, dims, None, is_summed)
    parts = np.split(np.arange(dims), segments)
    own = np.concatenate([np.split(part, group.size())[group.rank()] for part in parts])
    first, last = int(own[0]), int(own[-1])
    outputs = slice(first, last + 1) if len(own) == last + 1 - first else mx.array(own)
    return Split(group, dims, outputs, is_summed)


_CUTTING: dict[type, type] = {}


def as_kind(layer: nn.Module, kind: type) -> type:
    """The class by which a layer works as one of `kind`, whose projection may be split."""
    if not hasattr(layer, "_split"):
        return kind
    if kind not in _CUTTING:

        def call(self: Any, x: mx.array, *indices: mx.array, **more: Any) -> mx.array:
            return self._split.cut(kind.__call__(self, self._split.whole(x), *indices, **more))

        _CUTTING[kind] = type(kind.__name__, (kind,), {"__call__": call})
    return _CUTTING[kind]
