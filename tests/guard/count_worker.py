"""Runs training steps for real under the counting allocator (see tests/counting.py)."""

import gc
import json
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.data import Batch
from mlxstacks.guard.step import Step, training_state
from mlxstacks.training.loop import TrainingState, Validation, train
from mlxstacks.training.settings import OptimizerSettings, SnapshotSettings
from mlxstacks.training.step import Loss
from tests.counting import Counter
from tests.guard.cases import Case, real_weights

# The first step makes the state that later ones find; the peak of the last is taken. A compiled
# step is traced once more with that state.
STEPS, STEPS_COMPILED, STEPS_CLIPPED = 2, 3, 2


def run(step: Step, counter: Counter) -> dict[str, int]:
    """Train a few steps as a trainer would."""
    if step.clip_norm is not None:
        with step.checkpointed(step.model):
            return train_counted(
                counter, step.model, lambda model, micro: step.loss(model, *micro[:5]),
                [whole_batch(*step.batch[0].shape)], TrainingState(step.optimizer),
            )  # fmt: skip

    def once(*batch: mx.array) -> mx.array:
        value, gradients = nn.value_and_grad(step.model, step.loss)(step.model, *batch)
        step.optimizer.update(step.model, gradients)
        return value[0]

    if step.compiled:
        state = [step.model.state, step.optimizer.state, mx.random.state]
        once = mx.compile(once, inputs=state, outputs=state)
    with step.checkpointed(step.model):
        for _ in range(STEPS_COMPILED if step.compiled else STEPS):
            mx.synchronize()
            counter.reset()
            start = counter.live
            with counter.longest_lead():
                loss = once(*step.batch)
                mx.eval(training_state(step), loss)
            del loss
    return {"start": start, "buffers": counter.peak, "bytes": counter.peak_bytes}


def whole_batch(batch_size: int, tokens: int) -> Batch:
    """Random tokens, all of them scored."""
    rows = np.random.default_rng(0).integers(0, 256, (batch_size, tokens + 1), np.int32)
    return Batch(rows, np.ones(rows.shape, np.float32))


def train_counted(
    counter: Counter,
    model: nn.Module,
    loss: Loss,
    batches: list[Batch],
    state: TrainingState | None = None,
    validation: Validation | None = None,
) -> dict[str, int]:
    """By the package's trainer: the peak of the last step."""

    def batches_at(step: int) -> list[Batch]:
        if step == STEPS_CLIPPED - 1:
            gc.collect()
            mx.synchronize()
            counter.reset()
        return batches

    settings = OptimizerSettings(steps=STEPS_CLIPPED, learning_rate=1e-3)
    with counter.longest_lead():
        train(model, loss, batches_at, settings, state, validation=validation)
    return {"buffers": counter.peak, "bytes": counter.peak_bytes}


def best_at_first() -> Validation:
    """The best weights so far are those of the beginning."""
    return Validation(lambda model: 0.0, 100, SnapshotSettings())


def main() -> None:
    counter = Counter()
    for fields in json.load(sys.stdin):
        gc.collect()
        before = counter.live
        with Case(**fields).step() as step:
            real_weights(step)
            result = run(step, counter)
        print(json.dumps(result | {"before": before}), flush=True)
        del step


if __name__ == "__main__":
    main()
