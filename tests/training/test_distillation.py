"""Distillation: the divergence against float64, what of it k tokens keep, pieces, the teacher.

Run: pytest tests/training/test_distillation.py
"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxstacks.data import Batch, Row, make_batch
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.training.distillation import (
    DistillationGradients,
    DistillationObjective,
    TaughtBatch,
    TopLogits,
    divergence,
    top_logits,
)
from tests.tiny_models import VOCAB_SIZE
from tests.training.tiny import hybrid_model, with_lora

TAU = 2.0
ROWS = [
    Row((3, 1, 4, 1, 5), (0.0, 0.0, 1.0, 1.0, 1.0)),
    Row((2, 7, 1, 8), (0.0, 0.0, 0.0, 1.0)),
]


def rows() -> Batch:
    return make_batch(ROWS, 6)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64)
    z = z - z.max(axis=-1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(axis=-1, keepdims=True)))


def whole_kl(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
    p, q = log_softmax(teacher), log_softmax(student)
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


def largest(logits: np.ndarray, k: int) -> tuple[mx.array, mx.array]:
    ids = np.argsort(-logits, axis=-1)[:, :k]
    log_p = np.take_along_axis(log_softmax(logits), ids, axis=-1)
    return mx.array(ids.astype(np.int32)), mx.array(log_p.astype(np.float32))


@given(st.integers(0, 10_000), st.floats(0.1, 6), st.integers(1, 31))
def test_k_tokens_give_at_most_the_whole_divergence(seed: int, spread: float, k: int) -> None:
    rng = np.random.default_rng(seed)
    teacher, student = (spread * rng.normal(size=(3, 32)) for _ in range(2))
    whole = whole_kl(teacher, student)
    some = np.array(divergence(mx.array(student.astype(np.float32)), *largest(teacher, k)))
    assert (some <= whole + 1e-4).all()
    assert (some >= -1e-4).all()
    every = np.array(divergence(mx.array(student.astype(np.float32)), *largest(teacher, 32)))
    np.testing.assert_allclose(every, whole, rtol=1e-3, atol=1e-4)


def test_a_student_that_answers_as_its_teacher_is_at_distance_0() -> None:
    logits = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32)
    found = divergence(mx.array(logits), *largest(logits, 5))
    np.testing.assert_allclose(np.array(found), 0, atol=1e-6)


@pytest.mark.parametrize("with_head", [True, False])
def test_top_logits_are_those_of_the_model_at_the_temperature(with_head: bool) -> None:
    model = hybrid_model()
    head = find_output_head(model)[0] if with_head else None
    batch = rows()
    logits = np.array(model(mx.array(batch.inputs)).astype(mx.float32)) / TAU
    for found, whole, weights in zip(
        top_logits(model, batch, head, TAU, 7), logits, batch.target_weights, strict=True
    ):
        own = whole[weights > 0]
        assert found.ids.shape == (len(own), 7)
        assert found.ids.dtype == np.int32
        expected = np.sort(log_softmax(own), axis=-1)[:, ::-1][:, :7]
        np.testing.assert_allclose(found.log_p, expected, atol=1e-4)
        of_ids = np.take_along_axis(log_softmax(own), found.ids, axis=-1)
        np.testing.assert_allclose(found.log_p, of_ids, atol=1e-4)


def test_more_tokens_than_there_are_are_all_of_them() -> None:
    found = top_logits(hybrid_model(), rows(), None, TAU, 10 * VOCAB_SIZE)
    assert {top.ids.shape[1] for top in found} == {VOCAB_SIZE}
    np.testing.assert_allclose(np.exp(found[0].log_p).sum(axis=-1), 1, atol=1e-5)


def taught(part: slice = slice(None)) -> TaughtBatch:
    """Distributions of another model, at TAU."""
    batch = make_batch(ROWS[part], 6)
    tops = top_logits(hybrid_model(seed=5), batch, None, TAU, 9)
    return TaughtBatch(batch, TopLogits(*(np.concatenate(c) for c in zip(*tops, strict=True))))


@pytest.mark.parametrize("with_head", [True, False])
def test_loss_is_cross_entropy_and_tau_squared_divergence(with_head: bool) -> None:
    model = with_lora(hybrid_model())
    head = find_output_head(model)[0] if with_head else None
    step = DistillationGradients(model, DistillationObjective(TAU), head)([taught()], 0, 0)
    batch = taught()
    logits = np.array(model(mx.array(batch.rows.inputs)).astype(mx.float32))
    places = batch.rows.target_weights > 0
    own, targets = logits[places], batch.rows.targets[places]
    nll = -np.take_along_axis(log_softmax(own), targets[:, None].astype(int), axis=-1).mean()
    teacher = batch.teacher
    q = np.take_along_axis(log_softmax(own / TAU), teacher.ids, axis=-1)
    p = teacher.log_p.astype(np.float64)
    rest_p, rest_q = 1 - np.exp(p).sum(axis=-1), 1 - np.exp(q).sum(axis=-1)
    apart = (np.exp(p) * (p - q)).sum(axis=-1) + rest_p * np.log(rest_p / rest_q)
    assert step.loss.item() == pytest.approx(nll + TAU**2 * apart.mean(), abs=2e-4)
    assert step.parts["cross_entropy"].item() == pytest.approx(nll, abs=1e-4)
    assert step.parts["divergence"].item() == pytest.approx(apart.mean(), abs=1e-4)


def test_gradients_do_not_depend_on_head_or_on_the_cut_into_batches() -> None:
    model = with_lora(hybrid_model())
    head, _ = find_output_head(model)
    objective = DistillationObjective(TAU)
    one = DistillationGradients(model, objective, head)([taught()], 0, 0)
    parts = [taught(slice(0, 1)), taught(slice(1, 2))]
    two = DistillationGradients(model, objective, head)(parts, 0, 0)
    whole = DistillationGradients(model, objective, None)([taught()], 0, 0)
    for other in (two, whole):
        assert other.loss.item() == pytest.approx(one.loss.item(), abs=1e-4)
        pairs = zip(tree_flatten(one.gradients), tree_flatten(other.gradients), strict=True)
        for (name, mine), (_, its) in pairs:
            np.testing.assert_allclose(np.array(mine), np.array(its), atol=2e-4, err_msg=name)
