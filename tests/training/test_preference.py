"""DPO and ORPO against their formulas in float64, and the gradients of pairs in any batches.

Run: pytest tests/training/test_preference.py
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxstacks.data import EncodedPairs, Row
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.training.preference import (
    PairBatch,
    PairGradients,
    PairScores,
    Reference,
    dpo_loss,
    log_odds_ratio,
    measured_scores,
    orpo_loss,
    pair_batch,
    pair_scores,
    rewards,
)
from tests.training.tiny import VOCAB, TinyModel

LOG_P = st.floats(-200, -1e-3)
COUNT = st.integers(1, 50)


def scores_of(*values: float) -> PairScores:
    return PairScores(*(mx.array([value], dtype=mx.float32) for value in values))


@given(LOG_P, LOG_P, LOG_P, LOG_P, st.floats(0.01, 2))
def test_dpo_is_the_published_formula(
    chosen: float, rejected: float, chosen_before: float, rejected_before: float, beta: float
) -> None:
    scores = scores_of(chosen, rejected, 3, 4)
    reference = Reference(mx.array([chosen_before]), mx.array([rejected_before]))
    margin = beta * ((chosen - chosen_before) - (rejected - rejected_before))
    assert rewards(scores, reference, beta).item() == pytest.approx(margin, rel=1e-4, abs=1e-4)
    found = dpo_loss(beta)(scores, reference).item()
    assert found == pytest.approx(np.logaddexp(0, -margin), rel=1e-4, abs=1e-4)


@given(LOG_P, LOG_P, COUNT, COUNT, st.floats(0.01, 2))
def test_orpo_is_the_published_formula(
    chosen: float, rejected: float, chosen_tokens: int, rejected_tokens: int, beta: float
) -> None:
    scores = scores_of(chosen, rejected, chosen_tokens, rejected_tokens)
    good, bad = chosen / chosen_tokens, rejected / rejected_tokens
    ratio = (good - np.log(-np.expm1(good))) - (bad - np.log(-np.expm1(bad)))
    assert log_odds_ratio(scores).item() == pytest.approx(ratio, rel=1e-3, abs=1e-3)
    loss = -good + beta * np.logaddexp(0, -ratio)
    assert orpo_loss(beta)(scores, None).item() == pytest.approx(loss, rel=1e-3, abs=1e-3)


def test_a_certain_answer_has_finite_odds_and_gradients() -> None:
    def loss(log_p: mx.array) -> mx.array:
        one = mx.array([1.0])
        return orpo_loss(0.1)(PairScores(log_p, mx.array([-1e4]), one, one), None).sum()

    for log_p in (0.0, -1e-9, -1e4):
        value, gradient = mx.value_and_grad(loss)(mx.array([log_p]))
        assert mx.isfinite(value).item()
        assert mx.isfinite(gradient).all().item()


def rows(count: int, seed: int) -> list[Row]:
    """Answers of 2 to 5 tokens below prompts of 2."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 6, count)
    return [
        Row(tuple(int(t) for t in rng.integers(0, VOCAB, 2 + n)), (0.0, 0.0, *(1.0,) * int(n)))
        for n in lengths
    ]


PAIRS = EncodedPairs(rows(6, 1), rows(6, 2), 0, 0)
KNOWN = np.linspace(-3, -1, 12, dtype=np.float32).reshape(2, 6)


def batch_of(start: int, stop: int) -> PairBatch:
    return pair_batch(PAIRS, range(start, stop))


def test_scores_in_pieces_are_those_of_all_logits() -> None:
    model = TinyModel()
    model.out.freeze()
    head, _ = find_output_head(model)
    assert head is not None
    batch = batch_of(0, 6)
    whole = pair_scores(model, batch, None)
    others = (
        pair_scores(model, batch, head),
        *(measured_scores(model, batch, h) for h in (None, head)),
    )
    for other in others:
        for one, same in zip(whole, other, strict=True):
            assert mx.allclose(one, same, atol=1e-5).item()


@pytest.mark.parametrize("loss", [dpo_loss(0.3), orpo_loss(0.3)])
@pytest.mark.parametrize("in_pieces", [True, False])
def test_pairs_in_parts_give_the_gradients_of_one_batch(loss: Any, in_pieces: bool) -> None:
    model = TinyModel()
    model.out.freeze()
    head = find_output_head(model)[0] if in_pieces else None
    assert (head is not None) == in_pieces
    whole = PairGradients(model, loss, None, known=KNOWN)([batch_of(0, 6)], 0, 0)
    in_two = [batch_of(0, 4), batch_of(4, 6)]
    parts = PairGradients(model, loss, head, known=KNOWN)(in_two, 0, 0)
    assert parts.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    for (name, one), (other_name, other) in zip(
        tree_flatten(whole.gradients), tree_flatten(parts.gradients), strict=True
    ):
        assert name == other_name
        assert mx.abs(one).max().item() > 0
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-6).item()
