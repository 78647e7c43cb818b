"""Losses of the trainer core: each gives one process's part of the loss of one step.

The loss is an argument of the loop. It sees a `MicroBatch` whose weights are already divided by
those of the whole step, so parts add up to the token-weighted mean over all batches that are
accumulated and all processes.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.adapted import begin_step

Forward = Callable[[nn.Module, mx.array], tuple[mx.array, mx.array | None]]
"""(model, tokens (B, T)) -> logits (B, T, V) and a scalar loss to add, such as an expert balance
loss, or None.
"""


class MicroBatch(NamedTuple):
    """Rows that go through the model at once.

    inputs, targets: (B, T) int32. weights: (B, T) float32, of each target, as a share of the whole
    step's. share: scalar, the rows here as a share of the step's. key: for what is random in this
    batch; a function of seed, step and place, so a resumed run draws the same.
    """

    inputs: mx.array
    targets: mx.array
    weights: mx.array
    share: mx.array
    key: mx.array


Loss = Callable[[nn.Module, MicroBatch], tuple[mx.array, dict[str, mx.array]]]
"""(model, batch) -> the scalar to differentiate, and scalars to report beside it, by name. Both are
added up over the batches and processes of a step.
"""


def weighted_cross_entropy_sum(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Sum of weight * -log p(target): logits (B, T, V), targets (B, T) int, weights (B, T)."""
    return mx.sum(nn.losses.cross_entropy(logits.astype(mx.float32), targets) * weights)


def call_model(model: nn.Module, tokens: mx.array) -> tuple[mx.array, None]:
    """The model's own forward pass, with nothing added."""
    return model(tokens), None


def cross_entropy_loss(forward: Forward = call_model, extra_weight: float = 0.0) -> Loss:
    """Token-weighted cross-entropy in nats, plus `extra_weight` times what `forward` adds.

    Where it adds something, both parts are reported: `task_loss` and `extra_loss`.
    """

    def loss(model: nn.Module, batch: MicroBatch) -> tuple[mx.array, dict[str, mx.array]]:
        begin_step(model, batch.key)
        logits, extra = forward(model, batch.inputs)
        task = weighted_cross_entropy_sum(logits, batch.targets, batch.weights)
        if extra is None:
            return task, {}
        total = task + extra_weight * extra * batch.share
        return total, {"task_loss": task, "extra_loss": extra * batch.share}

    return loss
