"""What keeps training on preferences from destroying a model: steps that are not taken, a way back
to the best weights, and a cap on the size of the change.

A published run without them reached a loss of 28 million and damaged all that was trained after it.
"""

import math
import statistics
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.adapted import adapted_layers
from mlxstacks.layers.moe_lora import MoELoRADelta
from mlxstacks.layers.stacked import StackedLayer
from mlxstacks.training.settings import SafeguardSettings

# Norms of so many of the last steps give the median that a step is compared with, from 5 on.
_NORMS, _LEAST_NORMS = 50, 5


def delta_norms(model: nn.Module) -> dict[str, float]:
    """Frobenius norm of scale * B @ A by path of the LoRA, or of the stack in training, over all
    experts of a mixture; computed from matrices of rank by rank.
    """
    squares = {}
    for path, layer in _trained(model).items():
        a, b = layer.lora_a, layer.lora_b
        if a.ndim == 2:  # (K, R), (R, N)
            product = (a.T @ a) * (b @ b.T)
        else:  # (M, R, K), (M, N, R)
            product = (a @ a.swapaxes(-1, -2)) * (b.swapaxes(-1, -2) @ b)
        scale = layer.settings.scale if isinstance(layer, MoELoRADelta) else layer.scale
        squares[path] = scale**2 * mx.sum(product)
    mx.eval(squares)
    return {path: math.sqrt(max(0.0, square.item())) for path, square in squares.items()}


def _trained(model: nn.Module) -> dict[str, Any]:
    """Path -> what has a lora_a and a lora_b that train."""
    of_path = {
        path: layer.active if isinstance(layer, StackedLayer) else layer
        for path, layer in adapted_layers(model)
    }
    return {path: layer for path, layer in of_path.items() if layer is not None}


class Safeguards:
    """The checks of a run. counts: plain numbers, all that a resumed run needs."""

    def __init__(
        self, settings: SafeguardSettings, model: nn.Module, counts: dict[str, Any] | None = None
    ) -> None:
        """model: at its starting weights, where counts is None."""
        self.settings = settings
        self.counts = counts or {
            "skipped": 0, "in_a_row": 0, "restored": 0, "capped": 0, "norms": [],
            "start_norms": {path: norm for path, norm in delta_norms(model).items() if norm},
        }  # fmt: skip

    @property
    def rate_factor(self) -> float:
        """Of the learning rate: halved each time the best weights were restored."""
        return float(0.5 ** self.counts["restored"])

    def refuses(self, loss: float, norm: float) -> bool:
        """Whether a step is not to be taken; counted."""
        norms: list[float] = self.counts["norms"]
        growth = self.settings.max_gradient_growth
        # Steps with hardly a gradient say nothing (groups of answers that earn the same), nor does
        # one wild step among the first few, which are taken unchecked.
        telling = [each for each in norms if each * growth >= sorted(norms)[-2:][0]]
        most = growth * statistics.median(telling) if telling else 0.0
        wild = len(norms) >= _LEAST_NORMS and norm > most > 0
        large = abs(loss) > self.settings.max_loss
        if math.isfinite(loss) and math.isfinite(norm) and not wild and not large:
            self.counts["in_a_row"] = 0
            self.counts["norms"] = [*norms, norm][-_NORMS:]
            return False
        self.counts["skipped"] += 1
        self.counts["in_a_row"] += 1
        return True

    def must_restore(self) -> bool:
        """Whether so many steps in a row were refused that the best weights have to come back."""
        if self.counts["in_a_row"] < self.settings.max_skipped:
            return False
        self.counts["in_a_row"] = 0
        self.counts["restored"] += 1
        return True

    @property
    def gives_up(self) -> bool:
        return bool(self.counts["restored"] >= self.settings.max_restored)

    def cap_deltas(self, model: nn.Module) -> None:
        """Scale down the B of each LoRA whose delta outgrew its size at the start."""
        starts: dict[str, float] = self.counts["start_norms"]
        if not starts:  # new adapters have no size yet
            return
        layers, norms = _trained(model), delta_norms(model)
        for path, start in starts.items():
            most = self.settings.max_delta_growth * start
            if norms[path] > most:
                layers[path].lora_b = layers[path].lora_b * (most / norms[path])
                self.counts["capped"] += 1
