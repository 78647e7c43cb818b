"""Log probabilities of continuations behind contexts, each under its own weights of domains.

The sum counts **all** tokens of a continuation: the first one is predicted by the logits at the
last token of the context. The published script left it out (spec/evaluation.md section 4), and
gave 0 to a continuation of one token, which no other can beat; `reference_sums` does that too, to
show both side by side.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.evaluate import LogitsOf, log_probabilities_at
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
    most tokens, unless one pair alone has more. kept: log p by the pairs asked for together.
    Law: batches and padding change a sum by rounding alone.
    """

    logits_of: LogitsOf
    select: Callable[[Selection], None]
    head: OutputHead | None
    batch_size: int
    batch_tokens: int
    kept: dict[bytes, list[tuple[float, ...]]] = field(default_factory=dict, repr=False)

    def sums(self, pairs: Sequence[Pair]) -> list[float]:
        """Sum of log p over each continuation's tokens (nats). Raises: InputError: NaN or Inf."""
        return [math.fsum(values) for values in self._known(pairs)]

    def reference_sums(self, pairs: Sequence[Pair]) -> list[float]:
        """The published defect: the first token is left out, and one alone scores 0."""
        return [math.fsum(values[1:]) for values in self._known(pairs)]

    def _known(self, pairs: Sequence[Pair]) -> list[tuple[float, ...]]:
        """`_log_p`, kept by the set of pairs: the old rule asks for the very ones of the right one.

        By the whole set, in an order of its own: batches, and so the last bits, are then the same
        whether a run was interrupted in between or not.
        """
        distinct = sorted(set(pairs), key=lambda p: (p.context, p.continuation, p.weights))
        key = hashlib.sha256(repr(distinct).encode()).digest()
        if key not in self.kept:
            made = self._log_p(distinct, self.logits_of, self.head)
            for pair, values in zip(distinct, made, strict=True):
                _check_finite(pair, values)
            self.kept[key] = made
        found = dict(zip(distinct, self.kept[key], strict=True))
        return [found[pair] for pair in pairs]

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Whether each token of a continuation is the likeliest one (or one of equal ones)."""
        head = (
            None
            if self.head is None
            else _LikeliestHead(self.head.module, self.head.path, self.head.tied)
        )
        logits_of = self.logits_of if head else lambda tokens: _likeliest(self.logits_of(tokens))
        found = self._log_p(pairs, logits_of, head)
        return [all(math.isfinite(value) for value in values) for values in found]

    def _log_p(
        self, pairs: Sequence[Pair], logits_of: LogitsOf, head: OutputHead | None
    ) -> list[tuple[float, ...]]:
        """log p of each token of each continuation.

        Pairs whose inputs are the same go in once: what a letter is after a context, one forward
        pass says of all letters.
        """
        rows: dict[tuple[tuple[int, ...], Weights], list[int]] = {}
        for number, pair in enumerate(pairs):
            inputs = pair.context + pair.continuation[:-1]
            rows.setdefault((inputs, pair.weights), []).append(number)
        every = list(rows)
        asked = [Candidate(number, weights) for number, (_, weights) in enumerate(every)]
        lengths = [len(inputs) for inputs, _ in every]
        found: list[tuple[float, ...]] = [()] * len(pairs)
        for batch in plan_batches(asked, lengths, self.batch_tokens) if pairs else ():
            for start in range(0, len(batch), self.batch_size):
                part = [every[number] for number in batch[start : start + self.batch_size]]
                self.select(selection_of([weights for _, weights in part]))
                tokens = _padded([inputs for inputs, _ in part])
                numbers = [(line, n) for line, row in enumerate(part) for n in rows[row]]
                places = [
                    line * tokens.shape[1] + len(pairs[n].context) - 1 + step
                    for line, n in numbers
                    for step in range(len(pairs[n].continuation))
                ]
                targets = [token for _, n in numbers for token in pairs[n].continuation]
                values = iter(
                    log_probabilities_at(
                        logits_of, tokens, np.array(places), np.array(targets), head
                    ).tolist()
                )
                for _, n in numbers:
                    found[n] = tuple(next(values) for _ in pairs[n].continuation)
        return found


def selection_of(rows: Sequence[Weights]) -> Selection:
    """The mode in which each sequence of a batch has its own weights."""
    names = list(dict.fromkeys(name for weights in rows for name, _ in weights))
    if not names:
        return base()
    table = np.array([[dict(row).get(name, 0.0) for name in names] for row in rows], np.float32)
    return routed(names, table[0] if len(set(rows)) == 1 else table)


def _padded(rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    """(B, T) int32; padding on the right changes nothing for what stands before it."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for line, row in enumerate(rows):
        tokens[line, : len(row)] = row
    return tokens


def _check_finite(pair: Pair, values: Sequence[float]) -> None:
    """Raises: InputError: NaN or Inf."""
    if not all(map(math.isfinite, values)):
        on = " + ".join(name for name, _ in pair.weights) or "the base alone"
        raise InputError(
            f"with {on} a log probability is {math.fsum(values)}: look at the weights, or try "
            "base: float32 (half floats overflow)"
        )


def _likeliest(logits: mx.array) -> mx.array:
    """0 where a logit is the largest, -inf elsewhere: log p is finite for the likeliest alone."""
    return mx.where(logits == mx.max(logits, axis=-1, keepdims=True), 0.0, -mx.inf)


class _LikeliestHead(OutputHead):
    def __call__(self, hidden: mx.array) -> mx.array:
        return _likeliest(super().__call__(hidden))
