"""Losses of the trainer core: each gives one process's part of the loss of one step.

The loss is an argument of the loop. It sees a `MicroBatch` whose weights are already divided by
those of the whole step, so parts add up to the token-weighted mean over all batches that are
accumulated and all processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.adapted import begin_step
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.ops.token_loss import weighted_cross_entropy_sum

Forward = Callable[[nn.Module, mx.array], tuple[mx.array, mx.array | None]]
"""(model, tokens (B, T)) -> logits (B, T, V) and a scalar loss to add, such as an expert balance
loss, or None.
"""


class MicroBatch(NamedTuple):
    """Rows that go through the model at once.

    inputs, targets: (B, T) int32. weights: (B, T) float32, of each target, as a share of the whole
    step's. share: scalar, the rows here as a share of the step's. key: for what is random in this
    batch; a function of seed, step and place, so a resumed run draws the same. counted: (N,) int32,
    places among the B * T targets, all those with weight among them; None: not asked for, or all.
    """

    inputs: mx.array
    targets: mx.array
    weights: mx.array
    share: mx.array
    key: mx.array
    counted: mx.array | None = None


Loss = Callable[[nn.Module, MicroBatch], tuple[mx.array, dict[str, mx.array]]]
"""(model, batch) -> the scalar to differentiate, and scalars to report beside it, by name. Both are
added up over the batches and processes of a step.
"""


def call_model(model: nn.Module, tokens: mx.array) -> tuple[mx.array, None]:
    """The model's own forward pass, with nothing added."""
    return model(tokens), None


@dataclass(frozen=True, eq=False)
class CrossEntropyLoss:
    """What `cross_entropy_loss` makes. head: None for all logits at once."""

    forward: Forward
    extra_weight: float
    head: OutputHead | None

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[mx.array, dict[str, mx.array]]:
        begin_step(model, batch.key)
        task, extra = self._task(model, batch)
        if extra is None:
            return task, {}
        total = task + self.extra_weight * extra * batch.share
        return total, {"task_loss": task, "extra_loss": extra * batch.share}

    def _task(self, model: nn.Module, batch: MicroBatch) -> tuple[mx.array, mx.array | None]:
        if self.head is None:
            logits, extra = self.forward(model, batch.inputs)
            return weighted_cross_entropy_sum(logits, batch.targets, batch.weights), extra
        hidden, extra = self.head.hidden_states(self.forward, model, batch.inputs)
        scored = self.head.cross_entropy_sum(hidden, batch.targets, batch.weights, batch.counted)
        return scored, extra


def cross_entropy_loss(
    forward: Forward = call_model, extra_weight: float = 0.0, head: OutputHead | None = None
) -> Loss:
    """Token-weighted cross-entropy in nats, plus `extra_weight` times what `forward` adds.

    Where it adds something, both parts are reported: `task_loss` and `extra_loss`.
    head: the model's (`layers.output_head.find_output_head`); its logits are then made for a few
        tokens at a time, and only for tokens that have weight. Same numbers but for rounding.
    """
    return CrossEntropyLoss(forward, extra_weight, head)
