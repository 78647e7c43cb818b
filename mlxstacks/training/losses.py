"""Losses of the trainer core: each gives one process's part of the loss of one step.

The loss is an argument of the loop. It sees a `MicroBatch` whose weights are already divided by
those of the whole step, so parts add up to the token-weighted mean over all batches that are
accumulated and all processes. The balance of experts is no mean: its sums are added up, and the
loss follows from those of the whole step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from mlxstacks.layers.adapted import Balance, begin_step
from mlxstacks.layers.gates import balance_gradient
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.ops.token_loss import weighted_cross_entropy_sum

Forward = Callable[[nn.Module, mx.array], tuple[mx.array, mx.array | Balance | None]]
"""(model, tokens (B, T)) -> logits (B, T, V) and what to add to the loss: the balance of experts, a
scalar that is a mean over rows, or None.
"""


class MicroBatch(NamedTuple):
    """Rows that go through the model at once.

    inputs, targets: (B, T) int32. weights: (B, T) float32, of each target, as a share of the whole
    step's. share: scalar, the rows here as a share of the step's. key: for what is random in this
    batch; a function of seed, step and place, so a resumed run draws the same. in_parts: the step
    has other batches. counted: (N,) int32, places among the B * T targets, all those with weight
    among them; None: not asked for, or all.
    """

    inputs: mx.array
    targets: mx.array
    weights: mx.array
    share: mx.array
    key: mx.array
    in_parts: bool = False
    counted: mx.array | None = None


Loss = Callable[[nn.Module, MicroBatch], tuple[mx.array, dict[str, Any]]]
"""(model, batch) -> the scalar to differentiate, and scalars to report beside it, by name. Both are
added up over the batches and processes of a step, and so is a tree of arrays named `balance`.
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

    def __call__(self, model: nn.Module, batch: MicroBatch) -> tuple[mx.array, dict[str, Any]]:
        begin_step(model, batch.key, tokens_that_count(batch.weights), batch.in_parts)
        task, extra = self._task(model, batch)
        if isinstance(extra, Balance):
            if batch.in_parts and extra.sums:
                return task, {"task_loss": task, "balance": extra.sums}
            extra = extra.total if extra.sums else None
        if extra is None:
            return task, {}
        total = task + self.extra_weight * extra * batch.share
        return total, {"task_loss": task, "extra_loss": extra * batch.share}

    def with_balance(self, found: dict[str, Any]) -> dict[str, Any]:
        """Loss, parts and gradients, added up over a step in parts, with the balance of it all."""
        parts = dict(found.get("parts", {}))
        sums: dict[str, dict[str, mx.array]] = {}
        for name, array in tree_flatten(parts.pop("balance", {})):
            path, _, what = name.rpartition(".")
            sums.setdefault(path, {})[what] = array
        if not sums:
            return found
        balance = Balance(sums).total
        gradients = {
            f"{path}.active.{name}": self.extra_weight * gradient
            for path, of_path in sums.items()
            for name, gradient in balance_gradient(of_path).items()
        }
        return {
            "loss": found["loss"] + self.extra_weight * balance,
            "parts": {**parts, "extra_loss": balance},
            "gradients": tree_map_with_path(
                lambda name, task: task + gradients.get(name, 0), found["gradients"]
            ),
        }

    def _task(
        self, model: nn.Module, batch: MicroBatch
    ) -> tuple[mx.array, mx.array | Balance | None]:
        if self.head is None:
            logits, extra = self.forward(model, batch.inputs)
            return weighted_cross_entropy_sum(logits, batch.targets, batch.weights), extra
        hidden, extra = self.head.hidden_states(self.forward, model, batch.inputs)
        scored = self.head.cross_entropy_sum(hidden, batch.targets, batch.weights, batch.counted)
        return scored, extra


def tokens_that_count(weights: mx.array) -> mx.array:
    """weights (B, T) of the targets -> (B, T) float32: 1 for inputs up to a row's last target with
    weight, 0 for those after it: padding, and whatever else no counted target can see.
    """
    return (mx.cumsum(weights, axis=1, reverse=True) > 0).astype(mx.float32)


def cross_entropy_loss(
    forward: Forward = call_model, extra_weight: float = 0.0, head: OutputHead | None = None
) -> Loss:
    """Token-weighted cross-entropy in nats, plus `extra_weight` times what `forward` adds.

    Where it adds something, both parts are reported: `task_loss` and `extra_loss`.
    head: the model's (`layers.output_head.find_output_head`); its logits are then made for a few
        tokens at a time, and only for tokens that have weight. Same numbers but for rounding.
    """
    return CrossEntropyLoss(forward, extra_weight, head)
