"""Learning from a teacher's distributions: its likeliest tokens, and what is left of probability.

Hinton, Vinyals and Dean 2015, with both losses on the same tokens:

    loss = mean_t [-log q(target) + tau^2 KL(p_tau || q_tau)],  p_tau = softmax(z_teacher / tau)

Of the teacher's distribution at temperature tau the k largest probabilities are kept, and their
rest as one more outcome. By the log-sum inequality the divergence of these k + 1 outcomes is at
most the whole one, and it is the whole one where k is the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.data import Batch
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.ops.token_loss import pieces
from mlxstacks.training.step import StepGradients, added_up, call_model, sums_at

# Below it a rest is rounding: k probabilities of float32 do not add up to exactly 1.
_LEAST_REST = 1e-6


class TopLogits(NamedTuple):
    """Of N tokens. ids: (N, k) int32. log_p: (N, k) float32, at the temperature, largest first."""

    ids: np.ndarray
    log_p: np.ndarray


def top_logits(
    model: nn.Module,
    rows: Batch,
    head: OutputHead | None,
    temperature: float,
    k: int,
    vocabulary: int | None = None,
) -> list[TopLogits]:
    """What the model gives each row's tokens that have weight; k at most the vocabulary.

    vocabulary: tokens from this number on are padding of the model's and do not count.
    """
    inputs = mx.array(rows.inputs)
    if head is None:
        states, _ = call_model(model, inputs)
        most = 1 << 30
    else:
        states, _ = head.hidden_states(call_model, model, inputs)
        most = head.piece_tokens
    found = []
    for row, counted in zip(states, rows.target_weights > 0, strict=True):
        own = row[mx.array(np.flatnonzero(counted))]
        parts = []
        for part in pieces(len(own), most):
            some = own[part] if head is None else head(own[part])
            parts.append(_largest(some[:, :vocabulary].astype(mx.float32) / temperature, k))
            mx.eval(parts[-1])
        ids, log_p = (np.concatenate([np.array(p[i]) for p in parts]) for i in (0, 1))
        found.append(TopLogits(ids, log_p))
    return found


def _largest(logits: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """(N, V) -> ids (N, k) int32 and their log-probabilities (N, k), largest first."""
    k = min(k, logits.shape[-1])
    ids = mx.argpartition(-logits, kth=k - 1, axis=-1)[:, :k]
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids, values = (mx.take_along_axis(a, order, axis=-1) for a in (ids, values))
    return ids.astype(mx.int32), values - mx.logsumexp(logits, axis=-1, keepdims=True)


def divergence(logits: mx.array, ids: mx.array, log_p: mx.array) -> mx.array:
    """KL of k + 1 outcomes from logits (N, V) at the temperature to the teacher's, (N,) nats.

    ids, log_p: (N, k), see `TopLogits`.
    """
    log_q = mx.take_along_axis(logits, ids, axis=-1)
    log_q = log_q - mx.logsumexp(logits, axis=-1, keepdims=True)
    p = mx.exp(log_p)
    rest_p = 1 - mx.sum(p, axis=-1)
    rest_q = mx.maximum(1 - mx.sum(mx.exp(log_q), axis=-1), _LEAST_REST)
    has_rest = rest_p > _LEAST_REST
    of_rest = mx.where(has_rest, rest_p, 1.0) * mx.log(mx.where(has_rest, rest_p, 1.0) / rest_q)
    return mx.sum(p * (log_p - log_q), axis=-1) + mx.where(has_rest, of_rest, 0.0)


class DistillationObjective:
    """What is summed over tokens; see the formula above."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(
        self,
        logits: mx.array,
        targets: mx.array,
        weights: mx.array,
        ids: mx.array,
        log_p: mx.array,
    ) -> mx.array:
        """(3,): loss, cross-entropy and divergence, each the sum of weight times the token's.

        Logits (N, V), targets and weights (N,), ids and log_p (N, k).
        """
        logits, tau = logits.astype(mx.float32), self.temperature
        nll = mx.sum(weights * nn.losses.cross_entropy(logits, targets))
        apart = mx.sum(weights * divergence(logits / tau, ids, log_p))
        return mx.stack([nll + tau**2 * apart, mx.stop_gradient(nll), mx.stop_gradient(apart)])


@dataclass(frozen=True, slots=True)
class TaughtBatch:
    """rows: weight on answers. teacher: of the tokens that have weight, row by row."""

    rows: Batch
    teacher: TopLogits

    @property
    def tokens(self) -> np.ndarray:
        return self.rows.tokens


class DistillationGradients:
    """Loss and gradients of the mean over the answer tokens of several batches; see `GradientStep`.
    Reports `cross_entropy` and `divergence`, nats per token.
    """

    def __init__(
        self, model: nn.Module, objective: DistillationObjective, head: OutputHead | None
    ) -> None:
        self.model, self.objective, self.head = model, objective, head

        def loss_of(batch: TaughtBatch, total: float) -> tuple[mx.array, mx.array]:
            counted = np.flatnonzero(batch.rows.target_weights)
            targets = batch.rows.targets.reshape(-1)[counted]
            weights = (batch.rows.target_weights.reshape(-1)[counted] / total).astype(np.float32)
            arrays = [mx.array(a) for a in (targets, weights, *batch.teacher)]
            sums = sums_at(model, objective, batch.rows, head, arrays)
            return sums[0], sums

        self._function = nn.value_and_grad(model, loss_of)

    def __call__(self, batches: Sequence[TaughtBatch], seed: int, step: int) -> StepGradients:
        weight = float(sum(batch.rows.target_weights.sum(dtype=np.float64) for batch in batches))
        parts = [(batch, weight) for batch in batches]
        (_, sums), gradients = added_up(self.model, self._function, parts, f"{seed}/{step}")
        return StepGradients(sums[0], {"cross_entropy": sums[1], "divergence": sums[2]}, gradients)
