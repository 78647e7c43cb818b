"""A row: token ids with one loss weight per token; rows packed end to end, and in batches.

`weights[i]` is how much the loss counts the prediction **of** token i. The first token of a row is
never predicted, so its weight is always 0. NumPy is imported where a batch is made: settings of
data are read without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and the loss weight of each."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.weights):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.weights)} loss weights")
        if self.weights and self.weights[0] != 0:
            raise ValueError(
                "the first token of a row is never predicted: its loss weight must be 0"
            )


def row_of(tokens: Sequence[int], weights: Sequence[float]) -> Row:
    """A row of these tokens; the first loses its weight."""
    # One object for each number: hundreds of thousands of rows are held at once, and with an int of
    # its own a token takes 48 bytes, so 22 (rows of 300 tokens, ids up to 150,000).
    ids = tuple(_IDS.setdefault(token, token) for token in tokens)
    return Row(ids, (0.0, *weights[1:]) if tokens else ())


_IDS: dict[int, int] = {}


def pack_rows(rows: Iterable[Row], length: int) -> list[Row]:
    """Rows laid end to end in rows of at most `length` tokens; a longer one is cut.

    Law: every token that is kept keeps its weight, except that the first of a packed row gets 0.
    """
    packed: list[Row] = []
    tokens: list[int] = []
    weights: list[float] = []
    for row in rows:
        if tokens and len(tokens) + len(row.tokens) > length:
            packed.append(row_of(tokens, weights))
            tokens, weights = [], []
        tokens += row.tokens[: length - len(tokens)]
        weights += row.weights[: length - len(weights)]
    if tokens:
        packed.append(row_of(tokens, weights))
    return packed


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


@lru_cache(maxsize=8)
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
