"""The trainer core: a loss, batches by step number, AdamW; for full training and adapters.

Nothing depends on the clock: step s always sees `batch_at(s)` and the learning rate of s, so a run
that was stopped and resumed from its state ends with the same bytes as one that was not.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_reduce, tree_unflatten

from mlxstacks.data import Batch
from mlxstacks.training.settings import OptimizerSettings

Forward = Callable[[nn.Module, mx.array], tuple[mx.array, mx.array]]
"""(model, tokens (B, T)) -> logits (B, T, V) and a scalar loss to add, such as an expert balance
loss.
"""


@dataclass
class TrainingState:
    """What a run needs to go on: the next step and the optimizer; the weights live in the model."""

    optimizer: optim.Optimizer
    step: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def weighted_cross_entropy_sum(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Sum of weight * -log p(target): logits (B, T, V), targets (B, T) int, weights (B, T)."""
    return mx.sum(nn.losses.cross_entropy(logits.astype(mx.float32), targets) * weights)


def new_state(settings: OptimizerSettings) -> TrainingState:
    betas = [settings.beta1, settings.beta2]
    optimizer = optim.AdamW(
        learning_rate=settings.learning_rate, betas=betas, weight_decay=settings.weight_decay,
        bias_correction=True,
    )  # fmt: skip
    return TrainingState(optimizer)


def train(
    model: nn.Module,
    forward: Forward,
    batch_at: Callable[[int], Batch],
    settings: OptimizerSettings,
    state: TrainingState | None = None,
    extra_weight: float = 0.0,
    group: mx.distributed.Group | None = None,
    on_step: Callable[[TrainingState, dict[str, float]], None] | None = None,
) -> TrainingState:
    """Run `settings.steps` steps, less those in `state`, on the trainable parameters.

    `on_step` is called after each step with its `loss`, `grad_norm`, `tokens` and `seconds`; it may
    save. With a `group` every process calls this with the same arguments and ends with the same
    weights.
    """
    state = state or new_state(settings)
    gradient = nn.value_and_grad(model, _loss_of(forward, extra_weight))
    while state.step < settings.steps:
        start = time.perf_counter()
        batch = batch_at(state.step)
        loss, gradients = _gradients(model, gradient, batch, group)
        gradients, norm = clip_by_global_norm(gradients, settings.clip_norm)
        state.optimizer.learning_rate = settings.learning_rate_at(state.step)
        state.optimizer.update(model, gradients)
        mx.eval(model.parameters(), state.optimizer.state, loss, norm)
        state.step += 1
        record = {"loss": loss.item(), "grad_norm": norm.item(), "tokens": float(batch.tokens.size),
                  "seconds": time.perf_counter() - start}  # fmt: skip
        if not np.isfinite(record["loss"]):
            raise FloatingPointError(
                f"step {state.step}: the loss is {record['loss']}; lower the learning rate"
            )
        if state.step % settings.log_every == 0 or state.step == settings.steps:
            state.history.append({"step": state.step, **record})
        if on_step is not None:
            on_step(state, record)
    return state


def _loss_of(forward: Forward, extra_weight: float) -> Callable[..., mx.array]:
    def loss(
        model: nn.Module, inputs: mx.array, targets: mx.array, weights: mx.array, share: Any
    ) -> mx.array:
        logits, extra = forward(model, inputs)
        return weighted_cross_entropy_sum(logits, targets, weights) + extra_weight * extra * share

    return loss


def _gradients(
    model: nn.Module, gradient: Callable[..., Any], batch: Batch, group: mx.distributed.Group | None
) -> tuple[mx.array, Any]:
    """Loss and gradients of a whole batch; each process computes its share of the rows."""
    total_weight = float(batch.target_weights.sum())
    if total_weight <= 0:
        raise ValueError("a batch has no loss weight: every token is masked")
    count = batch.tokens.shape[0]
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    rows = np.array_split(np.arange(count), size)[rank]
    loss, gradients = gradient(
        model, mx.array(batch.inputs[rows]), mx.array(batch.targets[rows]),
        mx.array(batch.target_weights[rows] / total_weight), len(rows) / count,
    )  # fmt: skip
    if size == 1:
        return loss, gradients
    return mx.distributed.all_sum(loss, group=group), _sum_over_group(gradients, group)


def _sum_over_group(gradients: Any, group: mx.distributed.Group | None) -> Any:
    """Gradients added over the processes, sent as one flat message."""
    flat = tree_flatten(gradients)
    message = mx.concatenate([g.reshape(-1) for _, g in flat])
    message = mx.distributed.all_sum(message, group=group)
    ends = list(np.cumsum([g.size for _, g in flat]))
    parts = mx.split(message, [int(end) for end in ends[:-1]])
    return tree_unflatten([(k, p.reshape(g.shape)) for (k, g), p in zip(flat, parts, strict=True)])


def clip_by_global_norm(gradients: Any, largest: float) -> tuple[Any, mx.array]:
    """Gradients scaled so that their joint norm is at most `largest`, and the norm before."""
    squares = tree_reduce(lambda total, g: total + mx.sum(g * g), gradients, mx.array(0.0))
    norm = mx.sqrt(squares)
    factor = mx.minimum(largest / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor, gradients), norm


def trainable_weights(model: nn.Module) -> dict[str, mx.array]:
    """Name -> array of the parameters that training changes."""
    return dict(tree_flatten(model.trainable_parameters()))
