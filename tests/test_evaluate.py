"""The likelihood scorer and the mean loss, on a stub with known logits and on nano's architecture.

Run: pytest tests/test_evaluate.py
"""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.data import Row
from mlxstacks.errors import NonFiniteModelError
from mlxstacks.evaluate import ChoiceItem, choose, evaluate_mean_loss
from tools.nano.choices import ChoiceResult, score_continuations

VOCAB = 7


def table_model(tokens: mx.array) -> mx.array:
    """Next-token logits that depend on the last token alone."""
    table = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    return mx.array(table)[tokens]


def running_model(tokens: mx.array) -> mx.array:
    """Causal logits that depend on the whole past."""
    table = np.random.default_rng(4).normal(size=(VOCAB, VOCAB)).astype(np.float32)
    return mx.cumsum(mx.array(table)[tokens], axis=1) * 0.3


def uniform_model(tokens: mx.array) -> mx.array:
    return mx.zeros((*tokens.shape, VOCAB))


def log_p(model, context: tuple[int, ...], continuation: tuple[int, ...]) -> float:
    """Independent: one forward pass a prefix, log-softmax in NumPy."""
    total, past = 0.0, list(context)
    for token in continuation:
        logits = np.array(model(mx.array([past])))[0, -1].astype(np.float64)
        total += logits[token] - math.log(np.exp(logits).sum())
        past.append(token)
    return total


def item(context, *continuations, answer=0, characters=None) -> ChoiceItem:
    return ChoiceItem(
        context, continuations, characters or tuple(len(c) for c in continuations), answer
    )


ITEMS = [
    item((1, 2, 3), (4,), (5, 6), (0, 1, 2, 3)),
    item((2,), (1, 1), (3,), answer=1),
    item((6, 5, 4, 3, 2, 1), (0, 0, 0), (2, 4, 6)),
]


@pytest.mark.parametrize("model", [table_model, running_model])
@pytest.mark.parametrize("batch_size", [1, 2, 5, 64])
def test_every_continuation_token_counts_whatever_the_batch(model, batch_size: int) -> None:
    scores = score_continuations(model, ITEMS, batch_size)
    for one, values in zip(ITEMS, scores, strict=True):
        expected = [log_p(model, one.context, c) for c in one.continuations]
        assert values == pytest.approx(expected, abs=1e-5)


def test_nan_is_no_score() -> None:
    with pytest.raises(NonFiniteModelError, match="log probability of an answer is not finite"):
        score_continuations(lambda tokens: table_model(tokens) * mx.nan, ITEMS)


def test_ties_count_as_wrong_and_are_counted() -> None:
    items = [item((1,), (2,), (3,)), item((1,), (2, 2), (3,), answer=1)]
    result = ChoiceResult.of(items, score_continuations(uniform_model, items), "sum")
    assert result.picks == (None, 1)
    assert (result.correct, result.as_json()["ties"], result.n) == (1, 1, 2)
    # Per token both candidates of both items have the same probability.
    assert choose(items, [[-2.0, -2.0], [-4.0, -2.0]], "token") == [None, None]


def test_the_three_normalisations_can_disagree() -> None:
    one = item((1,), (2, 2), (3,), (4, 4, 4), characters=(10, 2, 3))
    scores = [[-6.0, -4.0, -9.0]]
    picks = [choose([one], scores, by) for by in ("sum", "token", "character")]
    assert picks == [[1], [None], [0]]


def test_mean_loss_is_weighted_by_token_not_by_row() -> None:
    rows = [Row((1, 2, 3, 4), (0.0, 1.0, 1.0, 0.5)), Row((5, 6), (0.0, 1.0))]
    nll = [
        -log_p(table_model, r.tokens[:i], (r.tokens[i],))
        for r in rows
        for i in range(1, len(r.tokens))
    ]
    expected = (nll[0] + nll[1] + 0.5 * nll[2] + nll[3]) / 3.5
    for batch_size in (1, 2):
        assert evaluate_mean_loss(table_model, rows, batch_size) == pytest.approx(
            expected, abs=1e-6
        )
    assert evaluate_mean_loss(uniform_model, rows) == pytest.approx(math.log(VOCAB), abs=1e-6)


@pytest.mark.parametrize("widths", [(), (2,), (4, 9), (3, 5, 8)])
def test_mean_loss_does_not_depend_on_the_width_of_batches(widths: tuple[int, ...]) -> None:
    shapes: list[tuple[int, ...]] = []

    def model(tokens: mx.array) -> mx.array:
        shapes.append(tokens.shape)
        return running_model(tokens)

    rows = [Row((1, 2, 3, 4), (0.0, 1.0, 1.0, 0.5)), Row((5, 6), (0.0, 1.0))]
    expected = evaluate_mean_loss(running_model, rows, 1)
    assert evaluate_mean_loss(model, rows, 1, widths) == pytest.approx(expected, abs=1e-6)
    wanted = {2: min([w for w in widths if w >= 2], default=2)}
    wanted[4] = min([w for w in widths if w >= 4], default=4)
    assert sorted(shapes) == sorted([(1, wanted[2] - 1), (1, wanted[4] - 1)])


def test_rows_without_loss_weight_are_refused() -> None:
    with pytest.raises(ValueError, match="loss weight"):
        evaluate_mean_loss(uniform_model, [Row((1, 2), (0.0, 0.0))])


def test_malformed_items_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        item((1,), (2,), ())
    with pytest.raises(ValueError, match="answer 2"):
        item((1,), (2,), (3,), answer=2)
