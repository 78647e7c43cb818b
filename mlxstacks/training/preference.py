"""Losses on pairs of answers, and the gradients of a step on them.

DPO: Rafailov et al. 2023, equation 7. ORPO: Hong et al. 2024, equations 6 and 7. Log-probabilities
are sums over the tokens of an answer, its end mark included, in nats; prompts do not count.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.data import Batch, EncodedPairs, make_batch
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.ops.token_loss import weighted_cross_entropy_sum
from mlxstacks.training.reference import StartingModel
from mlxstacks.training.step import StepGradients, added_up, answer_log_p, call_model


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
    numbers: which pairs they are.
    """

    rows: Batch
    numbers: Sequence[int]

    @property
    def tokens(self) -> np.ndarray:
        return self.rows.tokens

    @property
    def pairs(self) -> int:
        return len(self.numbers)


def pair_batch(pairs: EncodedPairs, numbers: Sequence[int]) -> PairBatch:
    """Those of the pairs, padded to the longest answer of them."""
    rows = [side[number] for side in (pairs.chosen, pairs.rejected) for number in numbers]
    return PairBatch(make_batch(rows, max(len(row.tokens) for row in rows)), numbers)


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
    return _of_sides(-mx.stack(sums), mx.sum(weights, axis=1))


def measured_scores(model: nn.Module, batch: PairBatch, head: OutputHead | None) -> PairScores:
    """`pair_scores` but for rounding, evaluated; half the work of the head is for gradients."""
    log_p = answer_log_p(model, batch.rows, head).sum(axis=1)
    return _of_sides(mx.array(log_p), mx.array(batch.rows.target_weights.sum(axis=1)))


def _of_sides(log_p: mx.array, tokens: mx.array) -> PairScores:
    return PairScores(*mx.split(log_p, 2), *mx.split(tokens, 2))


class PairGradients:
    """Loss and gradients of the mean over all pairs of several batches, which the processes of a
    group share. Law: the bytes of one process.

    start: what the reference is, or None for a loss without one. known: (2, n) float32, what it
        gives the chosen and the rejected answer of each pair; NaN where that was not needed yet,
        and filled in where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PairLoss,
        head: OutputHead | None,
        group: mx.distributed.Group | None = None,
        start: StartingModel | None = None,
        known: np.ndarray | None = None,
    ) -> None:
        self.model, self.loss, self.head, self.group = model, loss, head, group
        self.start, self.known = start, known

        def loss_of(batch: PairBatch, share: float, reference: Reference | None) -> mx.array:
            scores = pair_scores(model, batch, head)
            return share * mx.mean(self.loss(scores, reference))

        self._function = nn.value_and_grad(model, loss_of)

    def __call__(self, batches: Sequence[Any], seed: int, step: int) -> StepGradients:
        numbers = [number for batch in batches for number in batch.numbers]

        def of_batch(batch: PairBatch, end: int) -> Any:
            # of all pairs, since they are added up like gradients: 0 but for these
            found = np.zeros((2, len(numbers)), np.float32)
            own, reference = found[:, end - batch.pairs : end], None
            with nullcontext() if self.start is None else self.start.sharing():
                if self.known is not None:
                    own[:] = self._reference(batch)
                    reference = Reference(*map(mx.array, own))
                share = batch.pairs / len(numbers)
                loss, gradients = self._function(batch, share, reference)
            return loss, gradients, mx.array(found)

        ends = accumulate(batch.pairs for batch in batches)
        parts = list(zip(batches, ends, strict=True))
        key = f"{seed}/{step}"
        loss, gradients, found = added_up(self.model, of_batch, parts, key, self.group)
        if self.known is not None:
            self.known[:, numbers] = np.array(found)
        return StepGradients(loss, {}, gradients)

    def _reference(self, batch: PairBatch) -> np.ndarray:
        """(2, n) of its pairs."""
        assert self.known is not None
        known = self.known[:, batch.numbers]
        if self.start is not None and np.isnan(known).any():
            found = self.start.log_p(batch.rows).sum(axis=1).reshape(2, -1)
            known = np.where(np.isnan(known), found, known)
        return known
