"""The trainer core: a loss, batches by step number, AdamW; for full training and adapters.

Nothing depends on the clock: step s always sees `batches_at(s)`, the learning rate of s and random
keys of s, so a run that was stopped and resumed from its state ends with the same bytes as one that
was not. That holds where sums are added up in the same order: on one machine, with one version of
MLX and one BLAS and as many threads of it. Elsewhere a resumed run is right but for rounding.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from mlxstacks.data import Batch
from mlxstacks.training.losses import Loss
from mlxstacks.training.settings import OptimizerSettings, SnapshotSettings
from mlxstacks.training.snapshot import BestSnapshot
from mlxstacks.training.step import GradientStep, StepGradients, clip_by_global_norm

Record = dict[str, float]


class NonFiniteError(FloatingPointError):
    """A step that cannot be taken: its loss or its gradients hold NaN or Inf."""


@dataclass
class TrainingState:
    """What a run needs to go on; the weights live in the model.

    step: steps done. history: a record every `log_every` steps. validation: one an evaluation.
    stopped: why training ended before its last step, or None.
    """

    optimizer: optim.Optimizer
    step: int = 0
    history: list[Record] = field(default_factory=list)
    validation: list[Record] = field(default_factory=list)
    best: BestSnapshot | None = None
    stopped: str | None = None


@dataclass(frozen=True)
class Validation:
    """loss_of: validation loss of a model, in nats a token. every: steps between evaluations; one
    before the first step and one after the last are made too.
    """

    loss_of: Callable[[nn.Module], float]
    every: int
    settings: SnapshotSettings


def new_state(settings: OptimizerSettings) -> TrainingState:
    betas = [settings.beta1, settings.beta2]
    optimizer = optim.AdamW(
        learning_rate=settings.learning_rate, betas=betas, weight_decay=settings.weight_decay,
        bias_correction=True,
    )  # fmt: skip
    return TrainingState(optimizer)


def trainable_weights(model: nn.Module) -> dict[str, mx.array]:
    """Name -> array of the parameters that training changes."""
    return dict(tree_flatten(model.trainable_parameters()))


def train(
    model: nn.Module,
    loss: Loss,
    batches_at: Callable[[int], Sequence[Batch]],
    settings: OptimizerSettings,
    state: TrainingState | None = None,
    *,
    validation: Validation | None = None,
    group: mx.distributed.Group | None = None,
    compiled: bool = False,
    seed: int = 0,
    on_validation: Callable[[TrainingState, Record], None] | None = None,
    on_step: Callable[[TrainingState, Record], None] | None = None,
) -> TrainingState:
    """Run `settings.steps` steps, less those in `state`, on the trainable parameters.

    batches_at: the batches of step 0, 1, ...; several add up to the step of one large batch.
    on_step: called after each step, and its evaluation, with the step's `loss`, what the loss
        reports beside it, `grad_norm`, `learning_rate`, `tokens` and `seconds`; it may save.
    With a `group` every process calls this with the same arguments and ends with the same weights.
    The model ends with its last weights; `restore_best` puts the best ones there.

    Raises:
        NonFiniteError: naming the step. It was not taken: model and state are as before it.
    """
    state = state or new_state(settings)
    gradients = GradientStep(model, loss, group, compiled)
    if validation is not None and state.best is None:
        _validate(model, validation, state, on_validation)
    while state.step < settings.steps and state.stopped is None:
        start = time.perf_counter()
        batches = batches_at(state.step)
        record = _take_step(model, gradients(batches, seed, state.step), settings, state)
        record["tokens"] = float(sum(batch.tokens.size for batch in batches))
        record["seconds"] = time.perf_counter() - start
        last = state.step == settings.steps
        if state.step % settings.log_every == 0 or last:
            state.history.append({"step": state.step, **record})
        if validation is not None and (state.step % validation.every == 0 or last):
            _validate(model, validation, state, on_validation)
        if on_step is not None:
            on_step(state, record)
    return state


def _take_step(
    model: nn.Module, found: StepGradients, settings: OptimizerSettings, state: TrainingState
) -> Record:
    """Clip, check, update; what happened, as plain numbers."""
    clipped, norm = clip_by_global_norm(found.gradients, settings.clip_norm)
    record = {"loss": found.loss.item(), "grad_norm": norm.item()}
    for what, value in record.items():
        if not math.isfinite(value):
            raise NonFiniteError(
                f"step {state.step + 1}: the {what.replace('_', ' ')} is {value}; the step was not "
                "taken. Lower the learning rate, or look for a broken row in the data"
            )
    rate = settings.learning_rate_at(state.step)
    state.optimizer.learning_rate = rate
    state.optimizer.update(model, clipped)
    mx.eval(model.trainable_parameters(), state.optimizer.state)
    if mx.default_device().type == mx.DeviceType.gpu:
        # Cached buffers count against Metal's limit too. mlx-lm's trainer does the same.
        mx.clear_cache()
    state.step += 1
    parts = {name: value.item() for name, value in found.parts.items()}
    return {**record, **parts, "learning_rate": rate}


def _validate(
    model: nn.Module,
    validation: Validation,
    state: TrainingState,
    on_validation: Callable[[TrainingState, Record], None] | None,
) -> None:
    start = time.perf_counter()
    loss = validation.loss_of(model)
    weights = trainable_weights(model)
    if state.best is None:
        state.best = BestSnapshot(loss if math.isfinite(loss) else math.inf, state.step, weights)
    else:
        state.stopped = state.best.observe(loss, state.step, weights, validation.settings)
    record = {"step": state.step, "validation_loss": loss, "seconds": time.perf_counter() - start}
    state.validation.append(record)
    if on_validation is not None:
        on_validation(state, record)


def restore_best(model: nn.Module, state: TrainingState) -> None:
    """Put the weights of the best evaluation into the model; nothing where there was none."""
    if state.best is not None:
        model.update(tree_unflatten(list(state.best.weights.items())))
