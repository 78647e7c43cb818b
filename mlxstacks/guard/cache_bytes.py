"""What the caches of a batch will take, predicted from one token that is never computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxstacks import base_model

# mlx-lm's caches of keys and values grow by so many tokens.
STEP = 256
# Of what draws a row's tokens: a key, its tokens, log probabilities.
_ROW_BUFFERS = 4


@dataclass(frozen=True)
class CacheBytes:
    """fixed: of a row, whatever its length. growing: of a token, and the tokens after which a layer
    forgets the oldest; None: never. buffers: live ones of a row.
    """

    fixed: int
    growing: tuple[tuple[int, int | None], ...]
    buffers: int

    @classmethod
    def of(cls, model: nn.Module) -> "CacheBytes":
        """Shapes are all that is asked: nothing is evaluated."""
        entries = base_model.make_prompt_cache(model)
        model(mx.zeros((1, 1), mx.int32), cache=entries)
        fixed, growing = 0, []
        for entry in leaves(entries):
            if hasattr(entry, "keys"):
                tokens = entry.keys.shape[2]
                growing.append((-(-entry.nbytes // tokens), getattr(entry, "max_size", None)))
            else:
                fixed += entry.nbytes
        arrays = [a for _, a in tree_flatten([e.state for e in entries]) if isinstance(a, mx.array)]
        return cls(fixed, tuple(growing), len(arrays) + _ROW_BUFFERS)

    def of_batch(self, lengths: Sequence[int]) -> int:
        """Bytes of a batch whose rows may reach these lengths. Law: no less than it takes, as all
        rows are padded to the longest, and rounded up.
        """
        longest = max(lengths, default=0)
        padded = -(-longest // STEP) * STEP + STEP
        row = self.fixed + sum(
            each * (padded if most is None else min(padded, most + STEP))
            for each, most in self.growing
        )
        return row * len(lengths)


def leaves(entries: Sequence[Any]) -> list[Any]:
    """mlx-lm's caches, lists of caches taken apart."""
    return [leaf for e in entries for leaf in (leaves(e.caches) if hasattr(e, "caches") else [e])]
