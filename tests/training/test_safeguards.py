"""Steps that are refused, the way back to the best weights, the cap on deltas.

Run: pytest tests/training/test_safeguards.py
"""

import json
import math
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.files.lora_modules import LoraModule, delta_norm
from mlxstacks.layers.adapted import adapted_layers
from mlxstacks.training.loop import NonFiniteError, Validation, new_state, train
from mlxstacks.training.safeguards import Safeguards, delta_norms
from mlxstacks.training.settings import OptimizerSettings, SafeguardSettings, SnapshotSettings
from mlxstacks.training.step import GradientStep, StepGradients, cross_entropy_loss
from tests.training.tiny import TinyModel, batches_at, hybrid_model, weights_of, with_lora

LIMITS = SafeguardSettings()
RUN = OptimizerSettings(steps=12, learning_rate=1e-2, schedule="constant")


def guarded(**changes: Any) -> Safeguards:
    return Safeguards(LIMITS.model_copy(update=changes), TinyModel())


@pytest.mark.parametrize("loss", [math.nan, math.inf, 101.0, -1e6])
def test_a_loss_that_is_no_number_or_too_large_is_refused(loss: float) -> None:
    safeguards = guarded()
    assert safeguards.refuses(loss, 1.0)
    assert not safeguards.refuses(100.0, 1.0)
    assert safeguards.counts["skipped"] == 1


def test_a_gradient_far_above_the_median_is_refused() -> None:
    safeguards = guarded()
    assert not any(safeguards.refuses(1.0, norm) for norm in (1, 2, 1, 90, 1))
    assert safeguards.refuses(1.0, 51.0)
    assert not safeguards.refuses(1.0, 49.0)
    assert safeguards.refuses(1.0, math.nan)


def test_three_in_a_row_bring_the_best_weights_back_and_halve_the_rate() -> None:
    safeguards = guarded()
    for restored in (1, 2, 3):
        assert [safeguards.refuses(math.nan, 1.0) and safeguards.must_restore()
                for _ in range(3)] == [False, False, True]  # fmt: skip
        assert safeguards.rate_factor == 0.5**restored
        assert safeguards.gives_up == (restored == 3)
    assert safeguards.refuses(math.nan, 1.0)
    assert not safeguards.refuses(1.0, 1.0)
    assert safeguards.counts["in_a_row"] == 0


def test_delta_norms_are_those_of_the_products() -> None:
    model = with_lora(hybrid_model())
    found = delta_norms(model)
    assert len(found) > 2
    for path, layer in adapted_layers(model):
        halves = (np.array(layer.lora_a), np.array(layer.lora_b))
        module = LoraModule(path, *halves, "F32", layer.scale)
        assert found[path] == pytest.approx(delta_norm(module), rel=1e-5)


def test_a_delta_may_grow_to_twice_its_start() -> None:
    model = with_lora(hybrid_model())
    start = delta_norms(model)
    safeguards = Safeguards(LIMITS, model)
    (first, layer), *_ = adapted_layers(model)
    layer.lora_b = 3 * layer.lora_b
    safeguards.cap_deltas(model)
    assert delta_norms(model)[first] == pytest.approx(2 * start[first], rel=1e-5)
    assert safeguards.counts["capped"] == 1
    others = {path: norm for path, norm in delta_norms(model).items() if path != first}
    assert others == {path: start[path] for path in others}


def run_with(bad_steps: set[int], steps: int = 12) -> tuple[TinyModel, Any, Safeguards]:
    """A training whose loss and gradients are a million times too large in some steps."""
    model = TinyModel()
    right, safeguards = GradientStep(model, cross_entropy_loss()), Safeguards(LIMITS, model)

    def gradients(batches: Any, seed: int, step: int) -> StepGradients:
        found = right(batches, seed, step)
        if step not in bad_steps:
            return found
        return StepGradients(
            found.loss * 1e6, {}, nn.utils.tree_map(lambda g: g * 1e6, found.gradients)
        )

    state = new_state(RUN)
    validation = Validation(
        lambda m: right(batches_at(99), 0, 0).loss.item(), 2, SnapshotSettings()
    )
    settings = RUN.model_copy(update={"steps": steps})
    train(
        model, cross_entropy_loss(), batches_at, settings, state, validation=validation,
        gradients=gradients, safeguards=safeguards,
    )  # fmt: skip
    return model, state, safeguards


def test_refused_steps_change_nothing() -> None:
    clean, _, _ = run_with(set(), steps=4)
    model, state, safeguards = run_with({4, 5}, steps=6)
    assert weights_of(model) == weights_of(clean)
    assert safeguards.counts["skipped"] == 2
    assert json.loads(json.dumps(state.safeguards)) == safeguards.counts
    assert [r["step"] for r in state.history] == [6]


def test_a_run_that_only_fails_gives_up_with_the_best_weights_in_the_model() -> None:
    best, _, _ = run_with(set(), steps=2)
    with pytest.raises(NonFiniteError, match=r"restored the best weights 3 times"):
        run_with({*range(2, 12)})
    model, state, _ = run_with({2, 3, 4}, steps=5)
    assert state.best.step == 2
    assert weights_of(model) == weights_of(best)
