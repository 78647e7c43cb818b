"""Best weights and early stops, on scripted losses.

Run: pytest tests/training/test_snapshot.py
"""

import math
from collections.abc import Iterator

import pytest

from mlxstacks.training.loop import TrainingState, Validation, restore_best, train
from mlxstacks.training.settings import OptimizerSettings, SnapshotSettings
from mlxstacks.training.step import cross_entropy_loss
from tests.training.tiny import TinyModel, batches_at, weights_of

SETTINGS = OptimizerSettings(steps=10, learning_rate=1e-2)
NAN = math.nan


def scripted(
    losses: list[float], settings: SnapshotSettings, every: int = 2
) -> tuple[TinyModel, TrainingState, list[dict[str, bytes]]]:
    """A run whose evaluations give these values; the weights at each of them."""
    values: Iterator[float] = iter(losses)
    seen: list[dict[str, bytes]] = []

    def loss_of(model: object) -> float:
        assert isinstance(model, TinyModel)
        seen.append(weights_of(model))
        return next(values)

    model = TinyModel()
    validation = Validation(loss_of, every, settings)
    state = train(model, cross_entropy_loss(), batches_at, SETTINGS, validation=validation)
    return model, state, seen


@pytest.mark.parametrize(
    ("losses", "spike", "patience", "stop_step", "best_step", "reason"),
    [
        ([1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 0.1, 4, 10, 10, None),
        ([1.02, 2.64], 0.1, 4, 2, 0, "above its best"),
        ([1.0, 0.8, 0.95], 0.1, 4, 4, 2, "above its best"),
        ([1.0, 0.8, 0.85, 0.82, 0.81, 0.8], 0.1, 4, 10, 2, "4 evaluations in a row"),
        ([1.0, 0.8, 0.85, 0.82], 0.1, 2, 6, 2, "2 evaluations in a row"),
        ([1.0, 1.1, 1.2, 0.9, 1.0, 1.1], None, None, 10, 6, None),
        ([1.0, 0.9, NAN], None, None, 4, 2, "validation loss is nan"),
        ([NAN, 5.0, 6.0, 6.0, 6.0, 6.0], None, None, 10, 2, None),
    ],
)
def test_stop_step_reason_and_restored_weights(
    losses: list[float],
    spike: float | None,
    patience: int | None,
    stop_step: int,
    best_step: int,
    reason: str | None,
) -> None:
    settings = SnapshotSettings(spike_threshold=spike, patience=patience)
    model, state, seen = scripted(losses, settings)
    assert state.step == stop_step
    assert len(seen) == len(losses)
    assert (state.stopped is None) == (reason is None)
    assert reason is None or reason in (state.stopped or "")
    assert state.best is not None
    assert state.best.step == best_step
    restore_best(model, state)
    assert weights_of(model) == seen[best_step // 2]


def test_the_first_evaluation_comes_before_the_first_step() -> None:
    model, state, seen = scripted([1.0, 2.0, 2.0, 2.0, 2.0, 2.0], SnapshotSettings())
    assert seen[0] == weights_of(TinyModel())
    assert [record["step"] for record in state.validation] == [0, 2, 4, 6, 8, 10]
    restore_best(model, state)
    assert weights_of(model) == weights_of(TinyModel())


def test_the_last_step_is_evaluated_whatever_the_interval() -> None:
    _, state, _ = scripted([1.0, 0.9, 0.8], SnapshotSettings(), every=7)
    assert [record["step"] for record in state.validation] == [0, 7, 10]
