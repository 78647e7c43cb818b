"""The best weights so far by validation loss, and when to stop looking for better ones.

The first value is that of the untrained weights: a run that only makes things worse ends with them.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from mlxstacks.training.settings import SnapshotSettings

Weights = dict[str, mx.array]


@dataclass
class BestSnapshot:
    """loss: the lowest so far, in nats a token; step: when; weights: of that moment; without_gain:
    evaluations since.
    """

    loss: float
    step: int
    weights: Weights
    without_gain: int = 0

    def observe(
        self, loss: float, step: int, weights: Weights, settings: SnapshotSettings
    ) -> str | None:
        """Take in an evaluation; a reason to stop, or None. Arrays are kept, not copied."""
        if loss < self.loss:
            self.loss, self.step, self.weights, self.without_gain = loss, step, dict(weights), 0
            return None
        self.without_gain += 1
        if not math.isfinite(loss):
            return f"the validation loss is {loss}"
        spike, patience = settings.spike_threshold, settings.patience
        if spike is not None and loss - self.loss > spike:
            return f"the validation loss {loss:.4f} is more than {spike} above its best"
        if patience is not None and self.without_gain >= patience:
            return f"{self.without_gain} evaluations in a row without a new best"
        return None
