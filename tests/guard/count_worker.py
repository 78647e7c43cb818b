"""Runs training steps for real under the counting allocator (see tests/counting_allocator.py)."""

import gc
import json
import sys

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.guard.step import Step, training_state
from tests.counting_allocator import Counter
from tests.guard.cases import Case, real_weights

# The first step makes the state that later ones find; the peak of the last is taken. A compiled
# step is traced once more with that state.
STEPS, STEPS_COMPILED = 2, 3


def run(step: Step, counter: Counter) -> dict[str, int]:
    """Train a few steps as a trainer would."""

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
