"""Calls that are traced apart: decoder layers and custom functions, and what stands in for them.

`mx.export_function` cannot trace a custom function, and forty equal layers take forty times as long
as one. While a `Recorder` is active such calls are not made; a stand-in of the same shapes is, and
the call is noted. `trace.py` then traces what the call really does.

What adapters have next to a layer's call, random keys and balance losses (`layers.adapted`), goes
through it as inputs and outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxstacks.base_model import change
from mlxstacks.layers.adapted import adapted_layers, pop_balances, put_balances
from mlxstacks.layers.working_as import working_as

Named = list[tuple[str, mx.array]]
Body = Callable[[list[mx.array]], Named]
"""Array inputs -> array outputs with their places in what the call returns."""
Backward = Callable[[list[mx.array], list[mx.array], list[mx.array]], list[mx.array]]
"""(inputs, cotangents, outputs) -> gradients of the inputs."""
Shape = tuple[str, tuple[int, ...], mx.Dtype]


@dataclass(slots=True)
class Site:
    """A call as it was noted: its inputs and outputs are arrays of the trace around it.

    backward: a custom function's own gradient; None where MLX takes it. key: equal for calls that
    do the same; None: never taken for equal.
    """

    body: Body
    backward: Backward | None
    inputs: list[mx.array]
    outputs: list[mx.array]
    key: str | None


class Recorder:
    """Notes the calls of one trace.

    shapes: what calls with equal keys return; filled here.
    probes: zeros added to the inputs and outputs of the calls, in order. Their gradients are the
        calls' gradients and cotangents. Without them only shapes are noted, in `probe_shapes`.
    """

    def __init__(
        self, shapes: dict[str, list[Shape]], probes: Sequence[mx.array] | None = None
    ) -> None:
        self.sites: list[Site] = []
        self.probes = None if probes is None else iter(probes)
        self.probe_shapes: list[tuple[tuple[int, ...], mx.Dtype]] = []
        self.shapes = shapes

    def call(
        self, body: Body, backward: Backward | None, inputs: list[mx.array], key: str | None = None
    ) -> Any:
        """What the call returns, without making it."""
        shapes = self.shapes.get(key) if key is not None else None
        if shapes is None:  # learned from fresh inputs outside of any trace
            fresh = [mx.zeros(array.shape, array.dtype) for array in inputs]
            with recording(None):
                shapes = [(path, array.shape, array.dtype) for path, array in body(fresh)]
        if key is not None:
            self.shapes[key] = shapes
        if self.probes is None:
            outputs = [mx.zeros(shape, dtype) for _, shape, dtype in shapes]
            self.probe_shapes += [(a.shape, a.dtype) for a in [*floating(inputs), *outputs]]
        else:
            total = mx.array(0.0)
            for array in floating(inputs):
                # A sine, so that the gradient of each input is an operation of its own.
                total = total + mx.mean(mx.sin(array + next(self.probes)))
            outputs = [
                mx.broadcast_to(total, shape).astype(dtype) + next(self.probes)
                for _, shape, dtype in shapes
            ]
        self.sites.append(Site(body, backward, inputs, outputs, key))
        return tree_unflatten([(s[0], a) for s, a in zip(shapes, outputs, strict=True)])


def floating(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Those that have a gradient."""
    return [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]


_active: Recorder | None = None


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Calls made inside go to `recorder`; None: they are made for real."""
    global _active
    before, _active = _active, recorder
    try:
        yield
    finally:
        _active = before


def use_probes(probes: Sequence[mx.array]) -> None:
    """Inside a gradient: stand-ins add these arrays, by which it is taken."""
    if _active is not None and _active.probes is not None:
        _active.probes = iter(probes)


class _Function:
    """What `mx.custom_function` gives while calls are recorded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.own_gradient: Callable[..., Any] | None = None

    def vjp(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
        self.own_gradient = gradient
        return gradient

    def __call__(self, *inputs: mx.array) -> Any:
        if _active is None:
            return self.function(*inputs)
        outputs = _active.call(self._body, self._backward, list(inputs))
        return outputs if isinstance(outputs, mx.array) else tuple(outputs)

    def _body(self, inputs: list[mx.array]) -> Named:
        return tree_flatten(self.function(*inputs))

    def _backward(
        self, inputs: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> list[mx.array]:
        assert self.own_gradient is not None
        # MLX hands over a single array bare.
        given = [a[0] if len(a) == 1 else tuple(a) for a in (inputs, cotangents, outputs)]
        gradients = self.own_gradient(*given)
        return [gradients] if isinstance(gradients, mx.array) else list(gradients)


@contextmanager
def recorded_functions(
    modules: Sequence[Any] = (), replacement: Callable[..., Any] = _Function
) -> Iterator[None]:
    """Custom functions made inside can be recorded; `modules` forget those that they keep."""
    real = mx.custom_function
    mx.custom_function = replacement
    _forget(modules)
    try:
        yield
    finally:
        mx.custom_function = real
        _forget(modules)


@contextmanager
def last_gradients(modules: Sequence[Any] = ()) -> Iterator[list[mx.array]]:
    """What the last of the custom functions made inside gives as gradients, asked for or not.

    Those of the others that nobody asks for are gone before it is called.
    """
    real, noted = mx.custom_function, list[mx.array]()

    class Noting:
        def __init__(self, function: Callable[..., Any]) -> None:
            self.function = real(function)

        def vjp(self, gradient: Callable[..., Any]) -> Callable[..., Any]:
            def noting(*given: Any) -> Any:
                gradients = gradient(*given)
                noted[:] = [array for _, array in tree_flatten(gradients)]
                return gradients

            self.function.vjp(noting)
            return gradient

        def __call__(self, *inputs: mx.array) -> Any:
            return self.function(*inputs)

    with recorded_functions(modules, Noting):
        yield noted


@contextmanager
def equal_experts() -> Iterator[list[mx.array]]:
    """Grouped experts get equal numbers of rows; gives what a run evaluates to count them."""
    real, noted = change.rows_of_experts, list[mx.array]()

    def rows(indices: mx.array, num_experts: int) -> np.ndarray:
        noted.append(indices)
        return np.bincount(np.arange(indices.size) % num_experts, minlength=num_experts)

    change.rows_of_experts = rows
    try:
        yield noted
    finally:
        change.rows_of_experts = real


def _forget(modules: Sequence[Any]) -> None:
    for module in modules:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def recorded_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Calls of `layers` go to the active recorder."""
    with working_as((layer, _recorded(type(layer))) for layer in layers):
        yield


def _recorded(layer_class: type) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _active is None:
            return layer_class.__call__(self, *args, **kwargs)
        weights = tree_flatten(self.trainable_parameters())
        steps = [layer._step for _, layer in adapted_layers(self)]
        given = [list(args), kwargs, [[step.key, step.counted] for step in steps]]
        flat = tree_flatten(given)
        arguments = [value for _, value in flat if isinstance(value, mx.array)]

        def body(arrays: list[mx.array]) -> Named:
            array = iter(arrays)
            filled, named, states = tree_map(
                lambda a: next(array) if isinstance(a, mx.array) else a, given
            )
            changed = zip([name for name, _ in weights], array, strict=True)
            self.update(tree_unflatten(list(changed)))
            for step, (key, counted) in zip(steps, states, strict=True):
                step.key, step.counted = key, counted
            try:
                outputs = layer_class.__call__(self, *filled, **named)
                # by paths with dots, which are places in a tree too
                sums = [
                    (f"{path}.{name}", value)
                    for path, values in pop_balances(self).items()
                    for name, value in values.items()
                ]
                return tree_flatten([outputs, tree_unflatten(sums)])
            finally:
                self.update(tree_unflatten(weights))
                for step, (key, counted) in zip(steps, given[2], strict=True):
                    step.key, step.counted = key, counted

        inputs = [*arguments, *(array for _, array in weights)]
        outputs, *balances = _active.call(body, None, inputs, _key(self, flat))
        sums: dict[str, dict[str, mx.array]] = {}
        for name, value in tree_flatten(balances[0]) if balances else ():
            path, _, key = name.rpartition(".")
            sums.setdefault(path, {})[key] = value
        put_balances(self, sums)
        return outputs

    return type(layer_class.__name__, (layer_class,), {"__call__": call})


def _key(layer: nn.Module, flat: list[tuple[str, Any]]) -> str:
    """Equal for layers and arguments that make the same graph, whatever the numbers in them."""
    modules = [
        (
            path,
            type(module).__qualname__,
            sorted(
                (name, repr(value))
                for name, value in vars(module).items()
                if isinstance(value, str | int | float | bool | None)
            ),
        )
        for path, module in layer.named_modules()
    ]
    weights = [(path, _form(value)) for path, value in tree_flatten(layer.parameters())]
    trained = [path for path, _ in tree_flatten(layer.trainable_parameters())]
    return repr((modules, weights, trained, [(path, _form(value)) for path, value in flat]))


def _form(value: Any) -> str:
    return f"{value.shape} {value.dtype}" if isinstance(value, mx.array) else repr(value)
