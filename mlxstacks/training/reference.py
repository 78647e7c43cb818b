"""The model at its starting weights, beside the model that trains: the reference of DPO and GRPO.

There is no second copy: its few weights are put in for a pass, and taken out again. Layers below
the first trained one make the same of a batch for both, and within `sharing` they make it once.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxstacks.data import Batch
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.layers.working_as import working_as
from mlxstacks.training.loop import Weights, trainable_weights
from mlxstacks.training.modes import evaluating, lowest_trained_layer
from mlxstacks.training.step import answer_log_p


class StartingModel:
    """weights: the trained ones, as they were at the start. head: the model's."""

    def __init__(self, model: nn.Module, head: OutputHead | None, weights: Weights) -> None:
        self.model, self.head, self.weights = model, head, weights
        self.shared = shared_layers(model)

    def log_p(self, rows: Batch) -> np.ndarray:
        """As `answer_log_p`; without dropout or noise."""
        now = trainable_weights(self.model)
        self.model.update(tree_unflatten(list(self.weights.items())))
        try:
            with evaluating(self.model):
                return answer_log_p(self.model, rows, self.head)
        finally:
            self.model.update(tree_unflatten(list(now.items())))

    def sharing(self) -> AbstractContextManager[None]:
        """For calls of the model about one batch, this one's and others. Law: numbers keep every
        bit.
        """
        return called_once(self.shared)


def shared_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers below the first trained one. None of them where more of what they make
    goes on than what the last one returns, as found out by calling the model on four tokens.
    """
    layers = model.layers[: lowest_trained_layer(model)]
    tokens = mx.array([[0, 1, 2, 1]])
    with evaluating(model):
        whole = model(tokens)
        with called_once(layers):
            both = [model(tokens) for _ in range(2)]
    same = all(mx.array_equal(whole, one, equal_nan=True).item() for one in both)
    return layers if same else []


@contextmanager
def called_once(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the last of these layers, the first ones of a model, gives to each further call of
    the model what it made in the first, and the others hand it through; unless it is no array.
    """
    made: list[mx.array] = []

    def once(kind: type) -> type:
        def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if made:
                return made[0]
            output = kind.__call__(layer, *args, **kwargs)
            if layer is layers[-1] and isinstance(output, mx.array):
                made.append(output)
            return output

        return type(kind.__name__, (kind,), {"__call__": call})

    try:
        with working_as((layer, once(type(layer))) for layer in layers):
            yield
    finally:
        made.clear()  # the classes live until Python looks for circles
