"""Scores and picks of candidates, for the figures of nano and its store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxstacks.data import Row
from mlxstacks.errors import NonFiniteModelError
from mlxstacks.evaluate import (
    ChoiceItem,
    LogitsOf,
    batches_of,
    choose,
    target_log_probabilities,
)
from mlxstacks.settings import Normalisation
from mlxstacks.stats import wilson_interval


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """Outcome under one normalisation. `picks` holds the chosen candidate, None for a tie."""

    normalisation: Normalisation
    picks: tuple[int | None, ...]
    answers: tuple[int, ...]

    @classmethod
    def of(
        cls, items: Sequence[ChoiceItem], scores: Sequence[Sequence[float]], by: Normalisation
    ) -> "ChoiceResult":
        return cls(by, tuple(choose(items, scores, by)), tuple(i.answer_index for i in items))

    @property
    def n(self) -> int:
        return len(self.picks)

    @property
    def correct(self) -> int:
        """A tie counts as wrong."""
        return sum(pick == answer for pick, answer in zip(self.picks, self.answers, strict=True))

    def flips_from(self, other: "ChoiceResult") -> int:
        """How many items get another pick than in `other`."""
        return sum(a != b for a, b in zip(self.picks, other.picks, strict=True))

    def as_json(self) -> dict[str, Any]:
        return {
            "normalisation": self.normalisation,
            "n": self.n,
            "correct": self.correct,
            "ties": self.picks.count(None),
            "accuracy": self.correct / self.n,
            "interval": wilson_interval(self.correct, self.n).as_json(),
        }


def score_continuations(
    logits_of: LogitsOf, items: Sequence[ChoiceItem], batch_size: int = 64
) -> list[list[float]]:
    """Per item and candidate the sum of log p of **all** its tokens, the first one included: it is
    predicted by the logits at the last context token. Raises: NonFiniteModelError: NaN.
    """
    rows = [
        Row(item.context + tokens, (0.0,) * len(item.context) + (1.0,) * len(tokens))
        for item in items
        for tokens in item.continuations
    ]
    sums = np.zeros(len(rows))
    for indices, batch in batches_of(rows, batch_size):
        log_p = target_log_probabilities(logits_of, batch)
        sums[indices] = (log_p * batch.target_weights).sum(axis=1, dtype=np.float64)
    if np.isnan(sums).any():
        raise NonFiniteModelError("the log probability of an answer")
    values = iter(sums.tolist())
    return [[next(values) for _ in item.continuations] for item in items]
