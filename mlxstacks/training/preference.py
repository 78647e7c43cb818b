"""Losses on pairs of answers, and the gradients of a step on them.

DPO: Rafailov et al. 2023, equation 7. ORPO: Hong et al. 2024, equations 6 and 7. Log-probabilities
are sums over the tokens of an answer, its end mark included, in nats; prompts do not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.data import Batch, Row, make_batch
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.ops.token_loss import weighted_cross_entropy_sum
from mlxstacks.training.step import StepGradients, added_up, call_model


class PairScores(NamedTuple):
    """Of n pairs, (n,) float32 each: log-probabilities of the answers, and their tokens."""

    chosen: mx.array
    rejected: mx.array
    chosen_tokens: mx.array
    rejected_tokens: mx.array


class Reference(NamedTuple):
    """Log-probabilities under the model at its starting weights, (n,) float32 each."""

    chosen: mx.array
    rejected: mx.array


PairLoss = Callable[[PairScores, Reference | None], mx.array]
"""(scores, reference) -> the loss of each pair, (n,) float32."""


def rewards(scores: PairScores, reference: Reference, beta: float) -> mx.array:
    """What DPO trains: the reward of the chosen answer less that of the rejected one, (n,), where a
    reward is beta * (log p - log p of the reference).
    """
    gained = scores.chosen - reference.chosen
    return beta * (gained - (scores.rejected - reference.rejected))


def log_odds_ratio(scores: PairScores) -> mx.array:
    """What ORPO trains: log odds of the chosen answer less that of the rejected one, (n,), where p
    is the geometric mean over an answer's tokens.
    """

    def log_odds(log_p: mx.array) -> mx.array:
        # p = 1 to rounding has no odds; -1e-6 stands for it
        log_p = mx.minimum(log_p, -1e-6)
        return log_p - mx.log(-mx.expm1(log_p))

    good, bad = scores.chosen / scores.chosen_tokens, scores.rejected / scores.rejected_tokens
    return log_odds(good) - log_odds(bad)


def dpo_loss(beta: float) -> PairLoss:
    """-log sigmoid of `rewards`."""

    def loss(scores: PairScores, reference: Reference | None) -> mx.array:
        assert reference is not None
        return -nn.log_sigmoid(rewards(scores, reference, beta))

    return loss


def orpo_loss(beta: float) -> PairLoss:
    """Cross-entropy of the chosen answer, mean over its tokens, less beta * log sigmoid of
    `log_odds_ratio`. No reference.
    """

    def loss(scores: PairScores, reference: Reference | None) -> mx.array:
        nll = -scores.chosen / scores.chosen_tokens
        return nll - beta * nn.log_sigmoid(log_odds_ratio(scores))

    return loss


@dataclass(frozen=True, slots=True)
class PairBatch:
    """rows: the chosen answers, then the rejected ones in the same order, with weight 1 on answers.
    reference: (n, 2) float32 of chosen and rejected, or None.
    """

    rows: Batch
    reference: np.ndarray | None

    @property
    def tokens(self) -> np.ndarray:
        return self.rows.tokens

    @property
    def pairs(self) -> int:
        return len(self.rows.tokens) // 2


def pair_batch(
    chosen: Sequence[Row], rejected: Sequence[Row], width: int, reference: np.ndarray | None
) -> PairBatch:
    """Pairs of `data.encode_pairs`, padded to `width` tokens."""
    return PairBatch(make_batch([*chosen, *rejected], width), reference)


def pair_scores(model: nn.Module, batch: PairBatch, head: OutputHead | None) -> PairScores:
    """What the model gives the answers of a batch, differentiable.

    head: the model's; logits are then made for a few tokens of one answer at a time. Law: the same
        without a head, from all logits at once, but for rounding.
    """
    rows = batch.rows
    inputs, targets = mx.array(rows.inputs), mx.array(rows.targets)
    weights = mx.array(rows.target_weights)
    sums = []
    if head is None:
        logits, _ = call_model(model, inputs)
        sums = [
            weighted_cross_entropy_sum(logits[i], targets[i], weights[i])
            for i in range(len(rows.tokens))
        ]
    else:
        hidden, _ = head.hidden_states(call_model, model, inputs)
        for i, counted in enumerate(rows.target_weights > 0):
            places = np.flatnonzero(counted)
            part = slice(int(places[0]), int(places[-1]) + 1)
            sums.append(
                head.cross_entropy_sum(
                    hidden[i : i + 1, part], targets[i : i + 1, part], weights[i : i + 1, part]
                )
            )
    log_p, tokens = -mx.stack(sums), mx.sum(weights, axis=1)
    n = batch.pairs
    return PairScores(log_p[:n], log_p[n:], tokens[:n], tokens[n:])


def reference_of(batch: PairBatch) -> Reference | None:
    if batch.reference is None:
        return None
    return Reference(mx.array(batch.reference[:, 0]), mx.array(batch.reference[:, 1]))


class PairGradients:
    """Loss and gradients of the mean over all pairs of several batches, which the processes of a
    group share. Law: the bytes of one process.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PairLoss,
        head: OutputHead | None,
        group: mx.distributed.Group | None = None,
    ) -> None:
        self.model, self.loss, self.head, self.group = model, loss, head, group

        def loss_of(batch: PairBatch, share: float) -> mx.array:
            scores = pair_scores(model, batch, head)
            return share * mx.mean(self.loss(scores, reference_of(batch)))

        self._function = nn.value_and_grad(model, loss_of)

    def __call__(self, batches: Sequence[Any], seed: int, step: int) -> StepGradients:
        pairs = sum(batch.pairs for batch in batches)
        parts = [(batch, batch.pairs / pairs) for batch in batches]
        loss, gradients = added_up(self.model, self._function, parts, f"{seed}/{step}", self.group)
        return StepGradients(loss, {}, gradients)
