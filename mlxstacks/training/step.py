"""Loss and gradients of one optimizer step, over several batches and several processes."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map, tree_reduce

from mlxstacks.data import Batch
from mlxstacks.layers.adapted import begin_step
from mlxstacks.training.group import size_and_rank, sum_over_group
from mlxstacks.training.losses import CrossEntropyLoss, Loss, MicroBatch


@dataclass(frozen=True, eq=False)
class StepGradients:
    """Evaluated: loss and parts to report (scalars), gradients by parameter."""

    loss: mx.array
    parts: dict[str, mx.array]
    gradients: Any


class GradientStep:
    """Loss and gradients by the trainable parameters of `model`; the model itself stays as it is.

    compiled: trace the computation once for each shape of a batch (`mx.compile`). Weights that are
        frozen then become constants: do not change them while this object is in use.
    Law: the same rows with any padding, in one batch or in several, on one process or on several,
        give the same loss and gradients but for rounding, the balance of experts included. Noise
        and dropout are drawn by batch and place, so they differ.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        group: mx.distributed.Group | None = None,
        compiled: bool = False,
    ) -> None:
        self.model, self.loss, self.group = model, loss, group
        # A compiled step is traced, and kept, for each shape that it meets: it takes all places.
        in_pieces = isinstance(loss, CrossEntropyLoss) and loss.head is not None
        self._asks_counted = in_pieces and not compiled
        function = mx.value_and_grad(self._loss_at)
        self._function: Callable[..., Any] = mx.compile(function) if compiled else function

    def _loss_at(self, weights: Any, *micro: Any) -> tuple[mx.array, dict[str, Any]]:
        self.model.update(weights)
        return self.loss(self.model, MicroBatch(*micro))

    def __call__(self, batches: Sequence[Batch], seed: int, step: int) -> StepGradients:
        """Gradients of the mean loss over all loss weight in `batches`.

        Raises: ValueError where there is no loss weight at all.
        """
        total_weight = sum(float(batch.target_weights.sum()) for batch in batches)
        if total_weight <= 0:
            raise ValueError("a batch has no loss weight: every token is masked")
        count = sum(len(batch.tokens) for batch in batches)
        in_parts = len(batches) > 1 or size_and_rank(self.group)[0] > 1
        found: Any = None
        for place, batch in enumerate(batches):
            micro = self._own_rows(batch, total_weight, count, f"{seed}/{step}/{place}")
            micro = micro._replace(in_parts=in_parts)
            made = self._run(micro)
            found = made if found is None else tree_map(mx.add, found, made)
            mx.eval(found)
        found = sum_over_group(found, self.group)
        if in_parts and isinstance(self.loss, CrossEntropyLoss):
            found = self.loss.with_balance(found)
        mx.eval(found)
        # A tree without leaves does not come back from a sum.
        return StepGradients(found["loss"], found.get("parts", {}), found["gradients"])

    def _run(self, micro: MicroBatch) -> dict[str, Any]:
        weights = self.model.trainable_parameters()
        try:
            given = [part for part in micro if part is not None]
            (loss, parts), gradients = self._function(weights, *given)
        finally:
            self.model.update(weights)  # tracing put placeholders in their place
            begin_step(self.model, None)  # and in the layers' keys; padding is that of this batch
        return {"loss": loss, "parts": parts, "gradients": gradients}

    def _own_rows(self, batch: Batch, total_weight: float, count: int, place: str) -> MicroBatch:
        """The rows of this process. Where there are too few, one row without weight takes part:
        everybody has to join in the sums.
        """
        size, rank = size_and_rank(self.group)
        rows = np.array_split(np.arange(len(batch.tokens)), size)[rank]
        weights = batch.target_weights[rows] / total_weight
        share = len(rows) / count
        if not len(rows):
            rows, weights = np.arange(1), np.zeros_like(batch.target_weights[:1])
        places = counted_places(weights) if self._asks_counted else None
        some = places is not None and len(places) < weights.size
        counted = mx.array(places) if some else None
        return MicroBatch(
            mx.array(batch.inputs[rows]), mx.array(batch.targets[rows]), mx.array(weights),
            mx.array(share, dtype=mx.float32), random_key(f"{place}/{rank}"), counted=counted,
        )  # fmt: skip


def counted_places(weights: np.ndarray) -> np.ndarray:
    """Places, rising, of all non-zero weights in (B, T), flattened; int32.

    Filled up with other places to a multiple of an eighth of them all: buffers of few sizes are
    used again, those of many sizes pile up in the cache.
    """
    flat = weights.reshape(-1)
    eighth = -(-flat.size // 8)
    most = max(1, -(-int(np.count_nonzero(flat)) // eighth)) * eighth
    return np.sort(np.argsort(flat == 0, kind="stable")[:most]).astype(np.int32)


def random_key(text: str) -> mx.array:
    """A key of mx.random that is a function of a text."""
    return mx.random.key(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))


def clip_by_global_norm(gradients: Any, largest: float) -> tuple[Any, mx.array]:
    """Gradients scaled so that their joint norm is at most `largest`, and the norm before."""
    squares = tree_reduce(lambda total, g: total + mx.sum(g * g), gradients, mx.array(0.0))
    norm = mx.sqrt(squares)
    factor = mx.minimum(largest / (norm + 1e-6), 1.0)
    return tree_map(lambda g: g * factor, gradients), norm
