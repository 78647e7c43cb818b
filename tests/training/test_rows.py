"""Rows of a batch do not see each other, in a model with a recurrence, a convolution, attention and
experts; nor does padding count. Run: pytest tests/training/test_rows.py
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.data import Batch, Row, make_batch, pack_rows
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.training.modes import evaluating, set_training_modes
from mlxstacks.training.step import GradientStep, cross_entropy_loss
from tests.training.tiny import hybrid_model, random_tokens, with_lora

LOSS = cross_entropy_loss()


@pytest.fixture(scope="module")
def model():
    remove = base_model.install_gated_delta()
    made = with_lora(hybrid_model())
    set_training_modes(made)
    yield made
    remove()


def rows_of(lengths: tuple[int, ...], seed: int = 0) -> list[Row]:
    tokens = random_tokens(len(lengths), max(lengths), seed)
    return [
        Row(tuple(int(t) for t in row[:n]), (0.0, *[1.0] * (n - 1)))
        for row, n in zip(tokens, lengths, strict=True)
    ]


def gradients_of(model: nn.Module, batches: list[Batch]) -> tuple[float, dict[str, np.ndarray]]:
    found = GradientStep(model, LOSS)(batches, seed=0, step=0)
    flat = {name: np.array(value) for name, value in tree_flatten(found.gradients)}
    return found.loss.item(), flat


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, value in one.items():
        scale = np.abs(value).max() + 1e-6
        assert np.abs(value - other[name]).max() <= 2e-4 * scale, name


def test_a_batch_is_its_rows_one_by_one(model: nn.Module) -> None:
    """Loss and gradients of padded rows together equal those of the bare rows apart."""
    rows = rows_of((40, 23, 9, 33))
    together = gradients_of(model, [make_batch(rows, 65)])
    apart = gradients_of(model, [make_batch([row]) for row in rows])
    assert together[0] == pytest.approx(apart[0], abs=1e-5)
    assert_close(together[1], apart[1])


def test_what_stands_in_the_padding_and_in_other_rows_changes_nothing(model: nn.Module) -> None:
    rows = rows_of((30, 17))
    batch = make_batch(rows, 49)
    tokens = batch.tokens.copy()
    tokens[1, 17:] = random_tokens(1, 32, seed=7)[0]
    other = Batch(tokens, batch.weights)
    assert gradients_of(model, [batch])[0] == pytest.approx(
        gradients_of(model, [other])[0], abs=1e-6
    )
    first = batch.weights.copy()
    first[1] = 0
    swapped = make_batch([rows[0], rows_of((17,), seed=9)[0]], 49)
    alone = gradients_of(model, [Batch(batch.tokens, first)])
    beside_another = gradients_of(model, [Batch(swapped.tokens, first)])
    assert alone[0] == pytest.approx(beside_another[0], abs=1e-6)
    assert_close(alone[1], beside_another[1])


def test_rows_packed_end_to_end_would_leak(model: nn.Module) -> None:
    """Why they are not: behind another row the same tokens have another loss."""
    rows = rows_of((30, 17))
    (packed,) = pack_rows(rows, 47)
    weights = (*[0.0] * 31, *[1.0] * 16)
    behind = gradients_of(model, [make_batch([Row(packed.tokens, weights)])])[0]
    alone = gradients_of(model, [make_batch([rows[1]])])[0]
    assert abs(behind - alone) > 1e-3


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_evaluator_and_the_trainer_agree_on_the_loss(model: nn.Module, batch_size: int) -> None:
    rows = rows_of((40, 23, 9, 33), seed=3)
    rows[1] = Row(rows[1].tokens, (0.0,) * 12 + (1.0,) * 11)
    trained = gradients_of(model, [make_batch(rows)])[0]
    with evaluating(model):
        evaluated = evaluate_mean_loss(model, rows, batch_size, widths=(33, 65))
    assert evaluated == pytest.approx(trained, abs=1e-5)


def test_dropout_acts_in_training_and_not_in_evaluation() -> None:
    model = with_lora(hybrid_model(), dropout=0.5, std=0.5)
    rows = rows_of((12, 12))
    batch = [make_batch(rows)]
    with base_model.gated_delta_installed():
        set_training_modes(model)
        step = GradientStep(model, LOSS)
        losses = [step(batch, seed, 0).loss.item() for seed in (0, 1, 0)]
        with evaluating(model):
            evaluated = [evaluate_mean_loss(model, rows) for _ in range(2)]
    assert losses[0] == losses[2]
    assert abs(losses[0] - losses[1]) > 1e-4
    assert evaluated[0] == evaluated[1]
    assert mx.isfinite(mx.array(losses)).all().item()
