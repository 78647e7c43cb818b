"""Batches: rows padded to one width, and which rows a training step sees.

NumPy is imported where a batch is made: settings of data are read without it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxstacks.data.rows import Row

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` (B, T) int32, `weights` (B, T) float32; padding, on the right, has weight 0."""

    tokens: np.ndarray
    weights: np.ndarray

    @property
    def inputs(self) -> np.ndarray:
        return self.tokens[:, :-1]

    @property
    def targets(self) -> np.ndarray:
        return self.tokens[:, 1:]

    @property
    def target_weights(self) -> np.ndarray:
        return self.weights[:, 1:]


def make_batch(rows: Sequence[Row], length: int | None = None, pad_token: int = 0) -> Batch:
    """Rows padded on the right to the longest of them, or to `length` (longer rows are cut)."""
    import numpy as np

    longest = length or max(len(row.tokens) for row in rows)
    tokens = np.full((len(rows), longest), pad_token, dtype=np.int32)
    weights = np.zeros((len(rows), longest), dtype=np.float32)
    for index, row in enumerate(rows):
        kept = min(len(row.tokens), longest)
        tokens[index, :kept] = row.tokens[:kept]
        weights[index, :kept] = row.weights[:kept]
    return Batch(tokens, weights)


def batch_at(
    rows: Sequence[Row], step: int, batch_size: int, seed: int, length: int | None = None
) -> Batch:
    """The batch of a training step: a function of its arguments alone.

    Every epoch is a fresh permutation of all rows; a batch may span two epochs.
    """
    chosen = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, len(rows))
        chosen.append(rows[_permutation(len(rows), seed, epoch)[offset]])
    return make_batch(chosen, length)


_last_permutation: dict[tuple[int, int, int], list[int]] = {}


def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    key = (count, seed, epoch)
    if key not in _last_permutation:
        if len(_last_permutation) > 8:
            _last_permutation.clear()
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        _last_permutation[key] = order
    return _last_permutation[key]
