"""The output head of a model, found without knowing its class, and left out for the length of a
call: the model then returns the hidden states that it would have given to its head.

A head is what makes the very array that the model returns: a linear layer, or an embedding used as
one. Where something comes after it (a softcap, a scale), where it trains, or where it is wrapped by
an adapter, there is no such module, and `find_output_head` says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxstacks.layers.working_as import working_as
from mlxstacks.ops import token_loss

_PLAIN = (nn.Linear, nn.QuantizedLinear)
# More than one, so that no model takes them for a step of generating.
_TOKENS = (0, 1, 2, 1)


@dataclass(frozen=True, eq=False)
class OutputHead:
    """The last projection of a model. tied: an embedding, whose `as_linear` makes the logits."""

    module: nn.Module
    path: str
    tied: bool

    @property
    def vocabulary_size(self) -> int:
        return int(self.module.weight.shape[0])

    def __call__(self, hidden: mx.array) -> mx.array:
        """Hidden states (..., D) -> logits (..., V)."""
        return self.module.as_linear(hidden) if self.tied else self.module(hidden)

    def hidden_states(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, which calls the model once, with hidden states in place of logits.

        What it returns is the array, or a tuple that begins with it. The model is itself again
        afterwards, also after an exception.

        Raises: ValueError where the model does not return what its head was given, as it did when
            the head was found.
        """
        with self._left_out() as given:
            made = function(*args)
        first = made[0] if isinstance(made, tuple) else made
        times, same = len(given), any(array is first for array in given)
        # The class that noted them lives until Python looks for circles: it must hold no arrays.
        given.clear()
        if times != 1 or not same:
            raise ValueError(
                f"the model does not return what {self.path} makes, or calls it {times} times; "
                "compute the loss over all tokens at once"
            )
        return made

    @contextmanager
    def _left_out(self) -> Iterator[list[mx.array]]:
        """The head gives back what it is given; all of that is noted."""
        given: list[mx.array] = []

        def passed_on(module: nn.Module, hidden: mx.array) -> mx.array:
            given.append(hidden)
            return hidden

        own = type(self.module)
        name = "as_linear" if self.tied else "__call__"
        with working_as([(self.module, type(own.__name__, (own,), {name: passed_on}))]):
            yield given

    def cross_entropy_sum(
        self,
        hidden: mx.array,
        targets: mx.array,
        weights: mx.array,
        counted: mx.array | None = None,
    ) -> mx.array:
        """Sum of weight * -log p(target), float32, by pieces of tokens (`ops.token_loss`).

        hidden (B, T, D), targets (B, T) int, weights (B, T) float32. counted: (N,) int32, places
        among the B * T tokens; the others have no weight and are left out.
        """
        flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), weights.reshape(-1)
        if counted is not None:
            flat = flat[0][counted], flat[1][counted], flat[2][counted]
        return token_loss.cross_entropy_sum(self, *flat, self.piece_tokens)

    def sum_by_pieces(
        self, sums: token_loss.PieceSums, hidden: mx.array, *arrays: mx.array
    ) -> mx.array:
        """`ops.token_loss.sum_by_pieces` of hidden (N, D) and arrays (N, ...)."""
        return token_loss.sum_by_pieces(self, sums, hidden, arrays, self.piece_tokens)

    @property
    def piece_tokens(self) -> int:
        return token_loss.piece_tokens(self.vocabulary_size)


def find_output_head(model: nn.Module, prove: bool = True) -> tuple[OutputHead | None, str]:
    """The head of `model`, or None and the reason why the loss needs all logits at once.

    prove: compare the head on the hidden states with the model's logits, to the bit, on four
        tokens. Otherwise nothing is evaluated, and structure alone decides.
    """
    tokens = mx.array([_TOKENS])
    with eval_mode(model):
        calls, logits = _recorded_call(model, tokens)
        head, reason = _head_among(calls, logits)
        calls.clear()  # see hidden_states
        if head is None:
            return None, f"The loss takes the logits of all tokens at once: {reason}."
        if prove and not _same_bits(logits, head(head.hidden_states(model, tokens))):
            return None, (
                "The loss takes the logits of all tokens at once: without its head the model gives "
                f"hidden states from which {head.path} makes other logits."
            )
    return head, ""


@dataclass(frozen=True, eq=False)
class _Call:
    module: nn.Module
    path: str
    tied: bool
    made: mx.array


def _head_among(calls: list[_Call], logits: Any) -> tuple[OutputHead | None, str]:
    if not isinstance(logits, mx.array):
        return None, f"the model returns a {type(logits).__name__}, not an array"
    if logits.shape[:-1] != (1, len(_TOKENS)):
        return None, f"the model returns logits of shape {logits.shape} for {len(_TOKENS)} tokens"
    makers = [call for call in calls if call.made is logits]
    if not makers:
        near = [call.path for call in calls if call.made.shape == logits.shape]
        if near:
            return None, f"what {near[-1]} makes is changed (a softcap, a scale, an adapter)"
        return None, "no plain projection makes them"
    maker = makers[0]
    times = sum(call.module is maker.module and call.tied == maker.tied for call in calls)
    if times != 1:
        return None, f"{maker.path} is called {times} times"
    if tree_flatten(maker.module.trainable_parameters()):
        return None, f"{maker.path} is trained"
    return OutputHead(maker.module, maker.path, maker.tied), ""


def _recorded_call(model: nn.Module, tokens: mx.array) -> tuple[list[_Call], Any]:
    """Calls of every projection in a forward pass, and what the model returns; not evaluated."""
    calls: list[_Call] = []
    found = {id(m): (path, m) for path, m in model.named_modules() if _could_be_head(m)}

    def noting(own: type, name: str, tied: bool) -> Callable[..., mx.array]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
            made = getattr(own, name)(module, *args, **kwargs)
            calls.append(_Call(module, found[id(module)][0], tied, made))
            return made

        return call

    def recorded(own: type) -> type:
        tied = hasattr(own, "as_linear")
        name = "as_linear" if tied else "__call__"
        return type(own.__name__, (own,), {name: noting(own, name, tied)})

    modules = [module for _, module in found.values()]
    classes = {own: recorded(own) for own in {*map(type, modules)}}
    with working_as((module, classes[type(module)]) for module in modules):
        return calls, model(tokens)


def _could_be_head(module: nn.Module) -> bool:
    """A projection that takes each token by itself, and nothing around one."""
    kind = isinstance(module, _PLAIN) or hasattr(module, "as_linear")
    return kind and "weight" in module and not module.children()


def _same_bits(one: mx.array, other: mx.array) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(mx.array_equal(one, other, equal_nan=True).item())


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block; afterwards every mode is as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        model.eval()
        for module in training:
            module._set_training_mode(True)
