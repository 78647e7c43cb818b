"""Log probabilities of continuations behind contexts, each under its own weights of domains.

The sum counts **all** tokens of a continuation: the first one is predicted by the logits at the
last token of the context. The published script left it out (spec/evaluation.md section 4), and
gave 0 to a continuation of one token, which no other can beat; `reference_sums` does that too, to
show both side by side.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.evaluate import LogitsOf
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.layers.selection import Selection, base, routed
from mlxstacks.routing.candidate_losses import Weights
from mlxstacks.studies.benchmarks.row_scoring import Row, row_log_p
from mlxstacks.studies.benchmarks.shared_context import (
    CachedModel,
    continuation_log_p,
    sharing_pays,
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens of a context and of what follows it, at least one each; weights: () for the base."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    weights: Weights = ()


@dataclass(frozen=True)
class PairScorer:
    """Scores pairs in batches: of equal weights first, of like length. A long context of several
    pairs goes in once, where the model can go on from its cache.

    logits_of: (B, T) -> (B, T, V). select: puts the model into a mode. head: of the model; logits
    are then made for the continuations' tokens alone. batch_size: most pairs at once; batch_tokens:
    most tokens, unless one pair alone has more. cached: the same model as `logits_of`, None where
    every pair goes in whole. kept: log p by the pairs asked for together.
    Law: batches, padding and sharing change a sum by rounding alone.
    """

    logits_of: LogitsOf
    select: Callable[[Selection], None]
    head: OutputHead | None
    batch_size: int
    batch_tokens: int
    cached: CachedModel | None = None
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
            made = self._log_p(distinct)
            for pair, values in zip(distinct, made, strict=True):
                _check_finite(pair, values)
            self.kept[key] = made
        found = dict(zip(distinct, self.kept[key], strict=True))
        return [found[pair] for pair in pairs]

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Whether each token of a continuation is the likeliest one (or one of equal ones)."""
        found = self._of_likeliest()._log_p(pairs)
        return [all(math.isfinite(value) for value in values) for values in found]

    def _of_likeliest(self) -> "PairScorer":
        """A scorer of the same model whose log p is finite for likeliest tokens alone."""
        if self.head is not None:
            head = _LikeliestHead(self.head.module, self.head.path, self.head.tied)
            return replace(self, head=head)
        cached = self.cached
        if cached is not None:
            own = cached.logits_of
            cached = replace(
                cached, logits_of=lambda tokens, entries: _likeliest(own(tokens, entries))
            )
        logits_of = self.logits_of
        return replace(self, logits_of=lambda t: _likeliest(logits_of(t)), cached=cached)

    def _log_p(self, pairs: Sequence[Pair]) -> list[tuple[float, ...]]:
        """log p of each token of each continuation. What is shared depends on the pairs alone."""
        shared, whole = self._apart(pairs)
        rows = [
            Row(p.context + p.continuation[:-1], p.continuation, p.weights)
            for p in (pairs[number] for number in whole)
        ]
        made = row_log_p(rows, self._prepare, self.head, self.batch_size, self.batch_tokens)
        found = dict(zip(whole, made, strict=True))
        before: Weights | None = None
        for numbers in shared:
            context, weights = pairs[numbers[0]].context, pairs[numbers[0]].weights
            if weights != before:  # packing stacks anew takes its time
                self.select(selection_of([weights]))
            before = weights
            assert self.cached is not None
            made = continuation_log_p(
                self.cached, context, [pairs[number].continuation for number in numbers],
                self.head, self.batch_size, self.batch_tokens,
            )  # fmt: skip
            found |= zip(numbers, made, strict=True)
        return [found[number] for number in range(len(pairs))]

    def _prepare(self, weights: Sequence[Weights], shape: tuple[int, int]) -> LogitsOf:
        self.select(selection_of(weights))
        return self.logits_of

    def _apart(self, pairs: Sequence[Pair]) -> tuple[list[list[int]], list[int]]:
        """(numbers of the pairs of each context that goes in once, by weights; of the others)."""
        groups: dict[tuple[Weights, tuple[int, ...]], list[int]] = {}
        for number, pair in enumerate(pairs):
            groups.setdefault((pair.weights, pair.context), []).append(number)
        shared = {
            key
            for key, numbers in groups.items()
            if self.cached and sharing_pays(len(key[1]), [pairs[n].continuation for n in numbers])
        }
        whole = [n for n, pair in enumerate(pairs) if (pair.weights, pair.context) not in shared]
        return [groups[key] for key in sorted(shared)], whole


def selection_of(rows: Sequence[Weights]) -> Selection:
    """The mode in which each sequence of a batch has its own weights."""
    names = list(dict.fromkeys(name for weights in rows for name, _ in weights))
    if not names:
        return base()
    table = np.array([[dict(row).get(name, 0.0) for name in names] for row in rows], np.float32)
    return routed(names, table[0] if len(set(rows)) == 1 else table)


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
