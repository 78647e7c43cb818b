"""Per-layer checkpointing: activations of a layer are computed again when its gradient is due.

`mx.checkpoint` ties the second computation to the layer's outputs, which exist early, so MLX may
run it during the forward pass and hold the results until the backward pass: little is saved. Here
it is tied to the cotangents, which exist only once the gradient has come down to the layer
(`mx.depends`), and the gradient of the input is tied to those of the weights, so that a layer is
done before the one below begins. Same operations on same numbers: gradients are equal to the bit.

Balance losses that adapters leave next to a layer's call go through its checkpoint as outputs: read
from inside, they would keep what the layer computed alive, and nothing would be saved.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxstacks.layers.adapted import pop_balances, put_balances

# Functions of mx.random that draw from MLX's global state unless they are given a key.
_DRAWS = (
    "bernoulli", "categorical", "gumbel", "laplace", "multivariate_normal", "normal",
    "permutation", "randint", "truncated_normal", "uniform",
)  # fmt: skip

# Where an array was among a layer's arguments, or in what it returned.
_ARRAY = object()


class Checkpointing:
    """What `checkpoint_layers` did. As a context manager it is undone at the end of the block."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = [
            layer for layer in layers if not getattr(type(layer), "_is_checkpointed", False)
        ]
        for layer in self._layers:
            layer.__class__ = _checkpointed(type(layer))

    def undo(self) -> None:
        """Give every layer its own class back; a second call does nothing."""
        for layer in self._layers:
            layer.__class__ = type(layer).__bases__[0]
        self._layers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def checkpoint_layers(model: nn.Module, layers: Iterable[int] | None = None) -> Checkpointing:
    """Checkpoint decoder layers of `model` (all, or those with the given numbers) in place.

    Laws: losses and gradients keep every bit, also with random draws inside a layer; parameters,
    their names and `isinstance` stay as they are; `undo` restores everything. Layers in eval mode,
    and calls with a cache, run as if nothing had been done.

    Raises: ValueError when the model has no `layers`, or not that many.
    """
    model_layers = getattr(model, "layers", None)
    if not isinstance(model_layers, list | tuple):
        raise ValueError(f"{type(model).__name__} has no list `layers` to checkpoint")
    wanted = range(len(model_layers)) if layers is None else list(layers)
    wrong = [index for index in wanted if not 0 <= index < len(model_layers)]
    if wrong:
        raise ValueError(f"got layers {wrong}; the model has layers 0 to {len(model_layers) - 1}")
    return Checkpointing([model_layers[index] for index in wanted])


def checkpoint(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """`function(module, *args, **kwargs)`, to be computed again for its gradient.

    Differentiated are the trainable parameters of `module` and the floating-point arrays among the
    arguments; everything else is kept as it is.
    """
    call = _Call(function, module, args, kwargs)
    run = mx.custom_function(call.forward)
    run.vjp(call.backward)
    given = [a for _, a in tree_flatten([list(args), kwargs]) if _is_differentiable(a)]
    array = iter(_listed(run(*given, *call.weights)))
    return tree_map(lambda a: next(array) if a is _ARRAY else a, call.outputs)


class _Call:
    """One call as a function of a flat list of arrays: arguments, then weights."""

    def __init__(
        self, function: Callable[..., Any], module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self.function, self.module = function, module
        weights = tree_flatten(module.trainable_parameters())
        self.names = [name for name, _ in weights]
        self.weights = [value for _, value in weights]
        # The arguments themselves are not kept: a compiled step keeps this object, and with them
        # all that they were made of.
        given = [list(args), kwargs]
        self.given = tree_map(lambda a: _ARRAY if _is_differentiable(a) else a, given)
        self.count = sum(1 for _, a in tree_flatten(given) if _is_differentiable(a))
        self.outputs: Any = None  # what the function returned, but for the arrays
        self.states: list[mx.array] = []

    def run(self, inputs: Sequence[mx.array]) -> list[mx.array]:
        """The outputs that are arrays; the module has its own weights again afterwards."""
        array = iter(inputs)
        args, kwargs = tree_map(lambda a: next(array) if a is _ARRAY else a, self.given)
        self._set_weights(inputs[self.count :])
        try:
            outputs = self.function(self.module, *args, **kwargs)
        finally:
            self._set_weights(self.weights)
        self.outputs = tree_map(lambda a: _ARRAY if isinstance(a, mx.array) else a, outputs)
        return [a for _, a in tree_flatten(outputs) if isinstance(a, mx.array)]

    def _set_weights(self, values: Sequence[mx.array]) -> None:
        if self.names:
            self.module.update(tree_unflatten(list(zip(self.names, values, strict=True))))

    def forward(self, *inputs: mx.array) -> list[mx.array]:
        self.states.clear()
        with _drawing(record=self.states):
            return self.run(inputs)

    def backward(self, primals: Any, cotangents: Any, outputs: Any) -> Any:
        """Gradients of the inputs, with everything computed again."""
        given, cots = _listed(primals), _listed(cotangents)
        given = mx.depends(given, cots)
        with _drawing(replay=self.states):
            _, gradients = mx.vjp(lambda *inputs: self.run(inputs), given, cots)
        of_arguments, of_weights = gradients[: self.count], gradients[self.count :]
        if of_arguments and of_weights:
            of_arguments = mx.depends(of_arguments, of_weights)
        found = [*of_arguments, *of_weights]
        return found[0] if isinstance(primals, mx.array) else tuple(found)


def _listed(arrays: Any) -> list[mx.array]:
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating)


def _is_plain(value: Any) -> bool:
    """Whether an argument is the same in both computations: no cache that a call would change."""
    if isinstance(value, dict):
        return all(_is_plain(part) for part in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(part) for part in value)
    return isinstance(value, mx.array | str | int | float | None)


def _checkpointed(layer_class: type) -> type:
    """A class for one layer: its own, with calls in training checkpointed."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = self.trainable_parameters() or any(map(_is_differentiable, args))
        if not self.training or not inputs or not _is_plain([args, kwargs]):
            return layer_class.__call__(self, *args, **kwargs)
        outputs, balances = checkpoint(with_balances, self, *args, **kwargs)
        put_balances(self, balances)
        return outputs

    def with_balances(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return layer_class.__call__(module, *args, **kwargs), pop_balances(module)

    members = {"__call__": call, "__module__": layer_class.__module__, "_is_checkpointed": True}
    return type(layer_class.__name__, (layer_class,), members)


@contextmanager
def _drawing(
    record: list[mx.array] | None = None, replay: Sequence[mx.array] = ()
) -> Iterator[None]:
    """Note MLX's random state before each draw without a key, or draw again from noted states.

    A draw without a key takes the second half of a split of the state; given as a key, that half
    makes the same numbers and leaves the state alone.
    """
    states = iter(replay)
    real = {name: getattr(mx.random, name) for name in _DRAWS}

    def drawing(name: str) -> Callable[..., mx.array]:
        def draw(*args: Any, key: mx.array | None = None, **kwargs: Any) -> mx.array:
            if key is None and record is not None:
                record.append(mx.random.state[0])
            elif key is None:
                key = mx.random.split(next(states))[1]
            return real[name](*args, key=key, **kwargs)

        return draw

    for name in _DRAWS:
        setattr(mx.random, name, drawing(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(mx.random, name, function)
