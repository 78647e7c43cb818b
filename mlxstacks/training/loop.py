"""The trainer core: a loss, batches by step number, AdamW; for full training and adapters.

Nothing depends on the clock: step s always sees `batches_at(s)`, the learning rate of s and random
keys of s, so a run that was stopped and resumed from its state ends with the same bytes as one that
was not. That holds where sums are added up in the same order: on one machine, with one version of
MLX and one BLAS and as many threads of it. Elsewhere a resumed run is right but for rounding.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxstacks.base_model import load_arrays, save_arrays
from mlxstacks.data import Batch
from mlxstacks.errors import InputError
from mlxstacks.files.disk import mlx_write_errors, sync_directory
from mlxstacks.training.safeguards import Safeguards
from mlxstacks.training.settings import OptimizerSettings, SnapshotSettings
from mlxstacks.training.step import GradientStep, Loss, StepGradients, clip_by_global_norm

Weights = dict[str, mx.array]
_NO_GAIN = "evaluations in a row without a new best"


@dataclass
class BestSnapshot:
    """loss: the lowest so far, nats per token; step: when; weights: of that moment; without_gain:
    evaluations since.
    """

    loss: float
    step: int
    weights: Weights
    without_gain: int = 0

    def observe(
        self, loss: float, step: int, weights: Weights, settings: SnapshotSettings
    ) -> str | None:
        """Take in an evaluation; a reason to stop, or None. Arrays are kept, not copied."""
        if loss < self.loss:
            self.loss, self.step, self.weights, self.without_gain = loss, step, dict(weights), 0
            return None
        self.without_gain += 1
        if not math.isfinite(loss):
            return f"the validation loss is {loss}"
        spike, patience = settings.spike_threshold, settings.patience
        if spike is not None and loss - self.loss > spike:
            return f"the validation loss {loss:.4f} is more than {spike} above its best"
        if patience is not None and self.without_gain >= patience:
            return f"{self.without_gain} {_NO_GAIN}"
        return None


def is_fault(ended: str | None) -> bool:
    """Whether the reason for which training ended is a loss that rose or was no number."""
    return ended is not None and not ended.endswith(_NO_GAIN)


Record = dict[str, float]


class NonFiniteError(FloatingPointError):
    """A step that cannot be taken: its loss or its gradients hold NaN or Inf."""


@dataclass
class TrainingState:
    """What a run needs to go on; the weights live in the model.

    step: steps done. history: a record every `log_every` steps. unreported: name -> its values in
    the steps since the last of them. validation: one an evaluation. stopped: why training ended
    before its last step, or None. safeguards: `Safeguards.counts`. reference: arrays by name, of
    what the starting weights gave.
    """

    optimizer: optim.Optimizer
    step: int = 0
    history: list[Record] = field(default_factory=list)
    unreported: dict[str, list[float]] = field(default_factory=dict)
    validation: list[Record] = field(default_factory=list)
    best: BestSnapshot | None = None
    stopped: str | None = None
    safeguards: dict[str, Any] | None = None
    reference: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Validation:
    """loss_of: validation loss of a model, in nats per token. every: steps between evaluations; one
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
    gradients: Callable[[Sequence[Any], int, int], StepGradients] | None = None,
    safeguards: Safeguards | None = None,
) -> TrainingState:
    """Run `settings.steps` steps, less those in `state`, on the trainable parameters.

    batches_at: the batches of step 0, 1, ...; several add up to the step of one large batch.
    gradients: (batches, seed, step) -> the step's, in place of those of `loss`.
    safeguards: steps that they refuse are skipped, and the best weights restored after several.
    on_step: called after each step, and its evaluation, with `loss`, what the loss reports with it
        and `grad_norm` as means since the last record, `tokens` and `seconds` as sums, and the
        step's `learning_rate`; it may save.
    With a `group` every process calls this with the same arguments and ends with the same weights.
    The model ends with its last weights; `restore_best` puts the best ones there.

    Raises:
        NonFiniteError: naming the step. It was not taken: model and state are as before it.
    """
    state = state or new_state(settings)
    gradients = gradients or GradientStep(model, loss, group, compiled)
    state.safeguards = None if safeguards is None else safeguards.counts
    if validation is not None and state.best is None:
        _validate(model, validation, state, on_validation)
    while state.step < settings.steps and state.stopped is None:
        start = time.perf_counter()
        batches = batches_at(state.step)
        # No name for the gradients: they would live through the next step.
        record = _take_step(
            model, gradients(batches, seed, state.step), settings, state, safeguards
        )
        record["tokens"] = float(sum(batch.tokens.size for batch in batches))
        record["seconds"] = time.perf_counter() - start
        record = _since_last_record(state, record)
        last = state.step == settings.steps
        if state.step % settings.log_every == 0 or last:
            state.history.append({"step": state.step, **record})
            state.unreported.clear()
        if validation is not None and (state.step % validation.every == 0 or last):
            _validate(model, validation, state, on_validation)
        if on_step is not None:
            on_step(state, record)
    return state


def _take_step(
    model: nn.Module,
    found: StepGradients,
    settings: OptimizerSettings,
    state: TrainingState,
    safeguards: Safeguards | None,
) -> Record:
    """Clip, check, update; what happened, as plain numbers."""
    clipped, norm = clip_by_global_norm(found.gradients, settings.clip_norm)
    record = {"loss": found.loss.item(), "grad_norm": norm.item()}
    if safeguards is not None and safeguards.refuses(record["loss"], record["grad_norm"]):
        if safeguards.must_restore():
            restore_best(model, state)
        if safeguards.gives_up:
            raise NonFiniteError(
                f"step {state.step + 1}: the safeguards restored the best weights "
                f"{safeguards.counts['restored']} times; the last loss is {record['loss']:g}. "
                "Lower the learning rate or beta, or look for broken pairs in the data"
            )
        state.step += 1
        return {**record, "skipped": 1.0, "learning_rate": 0.0}
    for what, value in record.items():
        if not math.isfinite(value):
            raise NonFiniteError(
                f"step {state.step + 1}: the {what.replace('_', ' ')} is {value}; the step was not "
                "taken. Lower the learning rate, or look for a broken row in the data"
            )
    rate = settings.learning_rate_at(state.step)
    rate *= 1.0 if safeguards is None else safeguards.rate_factor
    state.optimizer.learning_rate = rate
    state.optimizer.update(model, clipped)
    if safeguards is not None:
        safeguards.cap_deltas(model)
    mx.eval(model.trainable_parameters(), state.optimizer.state)
    if mx.default_device().type == mx.DeviceType.gpu:
        # Cached buffers count against Metal's limit too. mlx-lm's trainer does the same.
        mx.clear_cache()
    state.step += 1
    parts = {name: value.item() for name, value in found.parts.items()}
    return {**record, **parts, "learning_rate": rate}


def _since_last_record(state: TrainingState, record: Record) -> Record:
    """See `on_step` of `train`. What a skipped step has of NaN or Inf is left out of a mean."""
    reported = dict(record)
    for name in record.keys() - {"learning_rate", "skipped"}:
        values = state.unreported.setdefault(name, [])
        values.append(record[name])
        if name in ("tokens", "seconds"):
            reported[name] = math.fsum(values)
        else:
            reported[name] = fmean([v for v in values if math.isfinite(v)] or values)
    return reported


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


_START_AGAIN = "remove it, or give --no-resume, to start again"


def save_state(path: Path, model: nn.Module, state: TrainingState, run_id: str) -> None:
    """Write the state atomically. `run_id` names the settings it belongs to.

    Law: on the machine that wrote it (see above), a run resumed from it ends with the same bytes
    as one that never stopped; a state that the disk has changed is not loaded.
    """
    arrays = {f"model.{name}": value for name, value in trainable_weights(model).items()}
    arrays |= {f"optimizer.{name}": value for name, value in tree_flatten(state.optimizer.state)}
    arrays |= {f"reference.{name}": mx.array(value) for name, value in state.reference.items()}
    metadata = {"step": str(state.step), "run_id": run_id, "history": json.dumps(state.history)}
    metadata["unreported"] = json.dumps(state.unreported)
    metadata["validation"] = json.dumps(state.validation)
    metadata["stopped"] = json.dumps(state.stopped)
    if state.safeguards is not None:
        metadata["safeguards"] = json.dumps(state.safeguards)
    if state.best is not None:
        arrays |= {f"best.{name}": value for name, value in state.best.weights.items()}
        loss = state.best.loss if math.isfinite(state.best.loss) else None  # JSON has no infinity
        best = {"loss": loss, "step": state.best.step, "without_gain": state.best.without_gain}
        metadata["best"] = json.dumps(best)
    metadata["sha256"] = arrays_sha256(arrays, metadata)
    # mlx appends the suffix when it is missing, so the temporary name must end in it.
    temporary = path.with_name(f".{path.name}.tmp.safetensors")
    with mlx_write_errors(path):
        save_arrays(temporary, arrays, metadata)
    with temporary.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, path)
    sync_directory(path.parent)


def load_state(
    path: Path, model: nn.Module, settings: OptimizerSettings, run_id: str
) -> TrainingState:
    """Put the saved weights into `model` and return the state to go on from.

    Raises:
        InputError: the file is damaged, or belongs to a run with other settings or another model.
    """
    try:
        arrays, metadata = load_arrays(path)
        mx.eval(arrays)  # now, not when the file may have been replaced
    except (RuntimeError, ValueError) as error:  # cut off, or no safetensors any more
        raise InputError(f"{path}: damaged ({error}); {_START_AGAIN}") from None
    if metadata.get("run_id") != run_id:
        raise InputError(f"{path}: saved by a run with other settings; {_START_AGAIN}")
    # Before all else is used: a header that is still JSON may have lost a key.
    if metadata.pop("sha256", None) != arrays_sha256(arrays, metadata):
        raise InputError(
            f"{path}: damaged (its bytes are not those that were saved); {_START_AGAIN}"
        )
    weights = _part(arrays, "model")
    expected = {name: value.shape for name, value in trainable_weights(model).items()}
    if {name: value.shape for name, value in weights.items()} != expected:
        raise InputError(f"{path}: its weights are not those that this model trains")
    model.load_weights(list(weights.items()), strict=False)
    state = new_state(settings)
    state.optimizer.state = tree_unflatten(list(_part(arrays, "optimizer").items()))
    state.reference = {name: np.array(a) for name, a in _part(arrays, "reference").items()}
    state.step = int(metadata["step"])
    state.history = json.loads(metadata["history"])
    state.unreported = json.loads(metadata.get("unreported", "{}"))
    state.validation = json.loads(metadata["validation"])
    state.stopped = json.loads(metadata["stopped"])
    state.safeguards = json.loads(metadata.get("safeguards", "null"))
    if "best" in metadata:
        best: dict[str, Any] = json.loads(metadata["best"])
        loss = math.inf if best["loss"] is None else best["loss"]
        weights = _part(arrays, "best")
        state.best = BestSnapshot(loss, best["step"], weights, best["without_gain"])
    return state


def arrays_sha256(arrays: Mapping[str, mx.array], metadata: Mapping[str, str]) -> str:
    """SHA-256 of everything in a file; safetensors itself notices no changed byte of a tensor."""
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, value in sorted(arrays.items()):
        digest.update(f"{name} {value.dtype} {value.shape}".encode())
        digest.update(memoryview(value.reshape(-1).view(mx.uint8)))
    return digest.hexdigest()


def _part(arrays: dict[str, mx.array], name: str) -> dict[str, mx.array]:
    start = f"{name}."
    return {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
