"""Log probabilities of continuations behind contexts, each under its own weights of domains.

The sum counts **all** tokens of a continuation: the first one is predicted by the logits at the
last token of the context. The published script left it out (spec/evaluation.md section 4), and
gave 0 to a continuation of one token, which no other can beat; `reference_sums` does that too, to
show both side by side.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxstacks.data import Row, make_batch
from mlxstacks.errors import InputError
from mlxstacks.evaluate import LogitsOf, evaluate_row_losses
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.layers.selection import Selection, base, routed
from mlxstacks.routing.candidate_losses import Candidate, Weights, plan_batches


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens of a context and of what follows it, at least one each; weights: () for the base."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    weights: Weights = ()


@dataclass(frozen=True)
class PairScorer:
    """Scores pairs in batches: of equal weights first, of like length.

    logits_of: (B, T) -> (B, T, V). select: puts the model into a mode. head: of the model; logits
    are then made for the continuations' tokens alone. batch_size: most pairs at once; batch_tokens:
    most tokens, unless one pair alone has more.
    Law: batches and padding change a sum by rounding alone.
    """

    logits_of: LogitsOf
    select: Callable[[Selection], None]
    head: OutputHead | None
    batch_size: int
    batch_tokens: int

    def sums(self, pairs: Sequence[Pair]) -> list[float]:
        """Sum of log p over each continuation's tokens (nats). Raises: InputError: NaN or Inf."""
        found = self._over(pairs, self.logits_of, self.head)
        for pair, value in zip(pairs, found, strict=True):
            if not math.isfinite(value):
                on = " + ".join(name for name, _ in pair.weights) or "the base alone"
                raise InputError(
                    f"with {on} a log probability is {value}: look at the weights, or try base: "
                    "float32 (half floats overflow)"
                )
        return found

    def reference_sums(self, pairs: Sequence[Pair]) -> list[float]:
        """The published defect: the first token is left out, and one alone scores 0."""
        longer = [number for number, pair in enumerate(pairs) if len(pair.continuation) > 1]
        shifted = [
            Pair((*p.context, p.continuation[0]), p.continuation[1:], p.weights)
            for p in (pairs[number] for number in longer)
        ]
        sums = [0.0] * len(pairs)
        for number, value in zip(longer, self.sums(shifted), strict=True):
            sums[number] = value
        return sums

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Whether each token of a continuation is the likeliest one (or one of equal ones)."""
        head = (
            None
            if self.head is None
            else _LikeliestHead(self.head.module, self.head.path, self.head.tied)
        )
        logits_of = self.logits_of if head else lambda tokens: _likeliest(self.logits_of(tokens))
        return [math.isfinite(value) for value in self._over(pairs, logits_of, head)]

    def _over(
        self, pairs: Sequence[Pair], logits_of: LogitsOf, head: OutputHead | None
    ) -> list[float]:
        lengths = [len(pair.context) + len(pair.continuation) for pair in pairs]
        asked = [Candidate(number, pair.weights) for number, pair in enumerate(pairs)]
        found = [0.0] * len(pairs)
        for batch in plan_batches(asked, lengths, self.batch_tokens) if pairs else ():
            for start in range(0, len(batch), self.batch_size):
                part = batch[start : start + self.batch_size]
                self.select(selection_of([pairs[number].weights for number in part]))
                rows = make_batch([_row(pairs[number]) for number in part])
                means = evaluate_row_losses(logits_of, rows, head)
                for number, mean in zip(part, means.tolist(), strict=True):
                    found[number] = -mean * len(pairs[number].continuation)
        return found


def selection_of(rows: Sequence[Weights]) -> Selection:
    """The mode in which each sequence of a batch has its own weights."""
    names = list(dict.fromkeys(name for weights in rows for name, _ in weights))
    if not names:
        return base()
    table = np.array([[dict(row).get(name, 0.0) for name in names] for row in rows], np.float32)
    return routed(names, table[0] if len(set(rows)) == 1 else table)


def _row(pair: Pair) -> Row:
    weights = (0.0,) * len(pair.context) + (1.0,) * len(pair.continuation)
    return Row(pair.context + pair.continuation, weights)


def _likeliest(logits: mx.array) -> mx.array:
    """0 where a logit is the largest, -inf elsewhere: log p is finite for the likeliest alone."""
    return mx.where(logits == mx.max(logits, axis=-1, keepdims=True), 0.0, -mx.inf)


class _LikeliestHead(OutputHead):
    def __call__(self, hidden: mx.array) -> mx.array:
        return _likeliest(super().__call__(hidden))
