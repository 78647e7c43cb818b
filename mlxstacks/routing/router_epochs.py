"""The epochs of the meta-router's training: AdamW, a cosine by epoch, the best epoch by the
checkpoint score.

    L = BCE(logits, targets) + margin_weight * mean(relu(0.3 - |sigmoid(logits) - 0.5|))

The margin pushes scores out of 0.2 to 0.8, against soft targets too (spec/router.md, section 6), so
a calibration table comes with the metrics.
"""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlxstacks.routing.feature_table import FeatureTable
from mlxstacks.routing.router import MetaRouter
from mlxstacks.routing.router_examples import RouterRows
from mlxstacks.routing.router_metrics import EpochMetrics, epoch_metrics
from mlxstacks.routing.router_settings import RouterTrainSettings
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.step import clip_by_global_norm, random_key

MARGIN = 0.3


def router_loss(
    logits: mx.array,
    targets: mx.array,
    weights: mx.array | None = None,
    margin_weight: float = 0.05,
) -> mx.array:
    """logits, targets (B, n), weights (B,) or None for equal ones -> a scalar, in nats."""
    bce = nn.losses.binary_cross_entropy(logits, targets, with_logits=True, reduction="none")
    margin = nn.relu(MARGIN - mx.abs(mx.sigmoid(logits) - 0.5))
    each = mx.mean(bce + margin_weight * margin, axis=-1)  # (B,)
    return mx.mean(each) if weights is None else mx.sum(each * weights) / mx.sum(weights)


def epoch_learning_rate(settings: RouterTrainSettings, epoch: int) -> float:
    """Of epoch 0, 1, ...: a cosine from the first rate towards zero, one step an epoch."""
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs))


class RouterEpochs:
    """One training run. kept: rows of the domain queries that stay as they are; None: all train."""

    def __init__(
        self,
        network: MetaRouter,
        kept: int | None,
        table: FeatureTable,
        training: RouterRows,
        validation: RouterRows,
        settings: RouterTrainSettings,
    ) -> None:
        self.network, self.table, self.settings = network, table, settings
        self.training, self.validation = training, validation
        self._old = None if kept is None else network.domain_queries[:kept]
        self._weights = np.where(training.discovered, settings.discovered_weight, 1.0)
        self._step = mx.value_and_grad(self._loss_at)
        self._optimizer = optim.AdamW(
            settings.learning_rate, weight_decay=settings.weight_decay, bias_correction=True
        )

    def train(self, say: Callable[[int], None]) -> tuple[list[dict[str, Any]], int]:
        """(a record an epoch, the best epoch from 1); the network then has its weights."""
        history: list[dict[str, Any]] = []
        best, best_score, best_weights = 0, -math.inf, self._trained()
        for epoch in range(self.settings.epochs):
            rate = epoch_learning_rate(self.settings, epoch)
            loss = self._epoch(epoch, rate)
            found = self._measured()
            history.append({
                "epoch": epoch + 1, "learning_rate": rate, "train_loss": loss, **found.as_json()
            })  # fmt: skip
            if found.checkpoint_score > best_score:
                best, best_score = epoch + 1, found.checkpoint_score
                best_weights = self._trained()
            say(epoch + 1)
        self._put(best_weights)
        mx.eval(self.network.parameters())
        return history, best

    def logits(self, rows: RouterRows) -> np.ndarray:
        """(N, n) float32, without dropout."""
        size = self.settings.batch_size
        found = []
        for at in range(0, len(rows), size):
            x, mask = self.table.padded(rows.prompts[at : at + size])
            found.append(np.array(self.network(mx.array(x), mx.array(mask))))
        return np.concatenate(found)

    def _measured(self) -> EpochMetrics:
        rows = self.validation
        logits = self.logits(rows)
        if not np.isfinite(logits).all():
            raise NonFiniteError(
                "the router's logits of held-out prompts are NaN or Inf; lower learning_rate, or "
                "set normalise_features"
            )
        return epoch_metrics(
            logits, rows.targets, rows.of_kind("single"), rows.of_kind("mixed"),
            self.settings.batch_size,
        )  # fmt: skip

    def _epoch(self, epoch: int, rate: float) -> float:
        """The mean loss of its batches."""
        self._optimizer.learning_rate = rate
        size, rows = self.settings.batch_size, self.training
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(len(rows))
        losses = []
        for at in range(0, len(order), size):
            places = order[at : at + size]
            batch = rows.chosen(places.tolist())
            x, mask = self.table.padded(batch.prompts)
            losses.append(self._take_step(
                mx.array(x), mx.array(mask), mx.array(batch.targets),
                mx.array(self._weights[places].astype(np.float32)),
                random_key(f"{self.settings.seed}/{epoch}/{at}"),
            ))  # fmt: skip
        return float(np.mean(losses))

    def _take_step(self, *arrays: mx.array) -> float:
        weights = self._trained()
        try:
            loss, gradients = self._step(weights, *arrays)
        finally:
            self._put(weights)  # tracing left placeholders there
        gradients, norm = clip_by_global_norm(gradients, self.settings.clip_norm)
        self._put(self._optimizer.apply_gradients(gradients, weights))
        mx.eval(self.network.parameters(), self._optimizer.state, loss, norm)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"the router's loss is {loss.item()}, its gradient's norm {norm.item()}; lower "
                "learning_rate, or set normalise_features"
            )
        return float(loss.item())

    def _loss_at(
        self,
        weights: Any,
        x: mx.array,
        mask: mx.array,
        targets: mx.array,
        counts: mx.array,
        key: mx.array,
    ) -> mx.array:
        self._put(weights)
        logits = self.network(x, mask, key)
        return router_loss(logits, targets, counts, self.settings.margin_weight)

    def _trained(self) -> dict[str, Any]:
        """The parameters that are trained."""
        if self._old is None:
            return dict(self.network.trainable_parameters())
        return {"new_queries": self.network.domain_queries[len(self._old) :]}

    def _put(self, weights: dict[str, Any]) -> None:
        if self._old is None:
            self.network.update(weights)
        else:
            self.network.domain_queries = mx.concatenate([self._old, weights["new_queries"]])
