"""Log probabilities of continuations behind contexts, each under its own weights of domains.

The sum counts **all** tokens of a continuation: the first one is predicted by the logits at the
last token of the context. The published script left it out (Brainstacks), and
gave 0 to a continuation of one token, which no other can beat; `reference_sums` does that too, to
show both side by side.

Of several continuations of one long context, the context goes through the model once, into a prompt
cache; the continuations follow as a batch, behind that cache repeated for each of them. A causal
model computes the very same numbers either way, to rounding. Only where each entry of the cache is
of a kind whose arrays are known to lead with the batch: keys and values, also in a sliding window,
and the states of recurrent layers. The pairs of any other model go in whole, as do short ones.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.evaluate import LogitsOf, log_probabilities_at
from mlxstacks.layers.output_head import OutputHead, find_output_head
from mlxstacks.layers.selection import Selection, base, routed
from mlxstacks.routing.candidate_losses import (
    Candidate,
    Weights,
    choose_batch_tokens,
    plan_batches,
)

Tokens = tuple[int, ...]
Prepare = Callable[[Sequence[Weights], tuple[int, int]], LogitsOf]
"""(weights of each row of a batch, its shape (B, T)) -> the model, ready for that batch."""


class Row(NamedTuple):
    """tokens: at least one. targets: predicted by the last so many of them, the last one by the
    last.
    """

    tokens: Tokens
    targets: Tokens
    weights: Weights = ()


def row_log_p(
    rows: Sequence[Row],
    prepare: Prepare,
    head: OutputHead | None,
    batch_size: int,
    batch_tokens: int,
    behind: int = 0,
) -> list[tuple[float, ...]]:
    """log p of each target of each row.

    head: of the model; logits are then made for the targets alone. batch_size: most rows at once;
    batch_tokens: most tokens, padding too, unless one row alone has more. behind: tokens before
    each row that are in a cache and count as the row's own.
    Rows of the same tokens and weights go in once: what a letter is after a context, one forward
    pass says of all letters.
    """
    same: dict[tuple[Tokens, Weights], list[int]] = {}
    for number, row in enumerate(rows):
        same.setdefault((row.tokens, row.weights), []).append(number)
    every = list(same)
    candidates = [Candidate(number, weights) for number, (_, weights) in enumerate(every)]
    lengths = [behind + len(tokens) for tokens, _ in every]
    log_p: list[tuple[float, ...]] = [()] * len(rows)
    for batch in plan_batches(candidates, lengths, batch_tokens) if rows else ():
        for start in range(0, len(batch), batch_size):
            part = [every[number] for number in batch[start : start + batch_size]]
            tokens = np.zeros((len(part), max(len(row) for row, _ in part)), np.int32)  # (B, T)
            for line, (row_tokens, _) in enumerate(part):
                tokens[line, : len(row_tokens)] = row_tokens
            lines = [(line, n) for line, key in enumerate(part) for n in same[key]]
            places = [
                line * tokens.shape[1] + place
                for line, n in lines
                for place in range(len(rows[n].tokens) - len(rows[n].targets), len(rows[n].tokens))
            ]
            targets = [token for _, n in lines for token in rows[n].targets]
            logits_of = prepare([weights for _, weights in part], tokens.shape)
            values = iter(
                log_probabilities_at(
                    logits_of, tokens, np.array(places), np.array(targets), head
                ).tolist()
            )
            for _, n in lines:
                log_p[n] = tuple(next(values) for _ in rows[n].targets)
    return log_p


# mlx-lm's kinds of cache that one offset and arrays (B, ...) are all of -> where the arrays are.
_HELD = {
    "mlx_lm.models.cache.KVCache": ("keys", "values"),
    "mlx_lm.models.cache.RotatingKVCache": ("keys", "values"),
    "mlx_lm.models.cache.ArraysCache": ("cache", "left_padding", "lengths"),
}
# Sharing takes two passes over few tokens where many pairs would have shared one. Without this rule
# nano, of width 128, broke even on a CPU between 144 and 192 saved tokens; SmolLM2, of width 576,
# takes 0.56 of the time where 100 to 150 are saved; a GPU was not measured. The work a token goes
# with the square of the width. And a share of the tokens still computed must be saved.
LEAST_SAVED, LEAST_SHARE = 256, 0.25
_WIDTH = 128


@dataclass(frozen=True, eq=False)
class CachedModel:
    """A model that goes on from a cache.

    logits_of: (tokens (B, T), entries) -> (B, T, V); the entries then hold these tokens too.
    make: empty entries. width: of the hidden state.
    """

    logits_of: Callable[[mx.array, list[Any]], mx.array]
    make: Callable[[], list[Any]]
    width: int = _WIDTH


def find_cached_model(model: nn.Module, width: int = _WIDTH) -> CachedModel | None:
    """`model` with its cache, or None where that cannot be repeated. Nothing is evaluated."""

    def make() -> list[Any]:
        return base_model.make_prompt_cache(model)

    entries = make()
    if not all(_kind(entry) in _HELD for entry in entries):
        return None
    rows = 2
    model(mx.zeros((rows, 4), mx.int32), cache=entries)
    for _, value in tree_flatten([entry.state for entry in entries]):
        if isinstance(value, mx.array) and value.shape[:1] != (rows,):
            return None
    return CachedModel(lambda tokens, held: model(tokens, cache=held), make, width)


def sharing_pays(context: int, continuations: Sequence[Tokens], width: int = _WIDTH) -> bool:
    """Whether a context of so many tokens should go in once.

    Whole, each distinct input has all of them; so n inputs save n - 1 times the context.
    """
    inputs = {tokens[:-1] for tokens in continuations}
    saved = (len(inputs) - 1) * context
    least = LEAST_SAVED * min(1.0, (_WIDTH / width) ** 2)
    return saved >= max(least, LEAST_SHARE * (context + sum(map(len, inputs))))


def continuation_log_p(
    model: CachedModel,
    context: Tokens,
    continuations: Sequence[Tokens],
    head: OutputHead | None,
    batch_size: int,
    batch_tokens: int,
) -> list[tuple[float, ...]]:
    """log p of each token of each continuation; continuations are of at least one token each.

    head, batch_size: as in `row_log_p`. batch_tokens: most tokens in caches at once, that of the
    context and its copies, unless one copy alone has more.
    """
    entries = model.make()
    first = row_log_p(
        [Row(context, tokens[:1]) for tokens in continuations],
        lambda *_: lambda ids: model.logits_of(ids, entries), head, batch_size, batch_tokens,
    )  # fmt: skip
    # What the context's logits did not need, such as the last state of each recurrent layer.
    mx.eval([entry.state for entry in entries])

    def behind_context(_: Sequence[Weights], shape: tuple[int, int]) -> LogitsOf:
        held = [_repeated(entry, *shape) for entry in entries]
        return lambda ids: model.logits_of(ids, held)

    longer = [tokens for tokens in continuations if len(tokens) > 1]
    rest = iter(
        row_log_p(
            [Row(tokens[:-1], tokens[1:]) for tokens in longer], behind_context, head, batch_size,
            batch_tokens - len(context), len(context),
        )
    )  # fmt: skip
    return [
        values + next(rest) if len(tokens) > 1 else values
        for tokens, values in zip(continuations, first, strict=True)
    ]


def _repeated(entry: Any, times: int, more: int) -> Any:
    """An entry of one sequence for so many, with room for so many more tokens. The entry itself
    stays as it is: no array is shared with it.
    """
    copied = copy.copy(entry)
    # By attributes, which mlx-lm keeps: what a `state` holds beside the arrays changed between its
    # versions. `copy` brings the rest, such as the offset.
    arrays: dict[str, Any] = {name: getattr(entry, name, None) for name in _HELD[_kind(entry)]}
    if _kind(entry).endswith(".KVCache"):
        # Exactly what is needed: mlx-lm would add room for 256 tokens to each copy.
        room = [(0, 0), (0, 0), (0, more), (0, 0)]
        arrays = {
            name: mx.pad(array[..., : entry.offset, :], room) for name, array in arrays.items()
        }
    for name, value in arrays.items():
        copies = tree_map(
            lambda part: mx.repeat(part, times, axis=0) if isinstance(part, mx.array) else part,
            value,
        )
        setattr(copied, name, copies)
    return copied


def _kind(entry: Any) -> str:
    return f"{type(entry).__module__}.{type(entry).__name__}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens of a context and of what follows it, at least one each; weights: () for the base."""

    context: Tokens
    continuation: Tokens
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
            log_p = self._log_p(distinct)
            for pair, values in zip(distinct, log_p, strict=True):
                if not all(map(math.isfinite, values)):
                    on = " + ".join(name for name, _ in pair.weights) or "the base alone"
                    raise InputError(
                        f"with {on} a log probability is {math.fsum(values)}: look at the weights, "
                        "or try base: float32 (half floats overflow)"
                    )
            self.kept[key] = log_p
        by_pair = dict(zip(distinct, self.kept[key], strict=True))
        return [by_pair[pair] for pair in pairs]

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Whether each token of a continuation is the likeliest one (or one of equal ones)."""
        # Of the same model a scorer whose log p is finite for likeliest tokens alone.
        if self.head is not None:
            head = _LikeliestHead(self.head.module, self.head.path, self.head.tied)
            likeliest = replace(self, head=head)
        else:
            cached, logits_of = self.cached, self.logits_of
            if cached is not None:
                whole = cached.logits_of
                cached = replace(cached, logits_of=lambda t, held: _likeliest(whole(t, held)))
            likeliest = replace(self, logits_of=lambda t: _likeliest(logits_of(t)), cached=cached)
        return [all(map(math.isfinite, values)) for values in likeliest._log_p(pairs)]

    def _log_p(self, pairs: Sequence[Pair]) -> list[tuple[float, ...]]:
        """log p of each token of each continuation. What is shared depends on the pairs alone."""
        groups: dict[tuple[Weights, Tokens], list[int]] = {}
        for number, pair in enumerate(pairs):
            groups.setdefault((pair.weights, pair.context), []).append(number)
        # Numbers of the pairs of each context that goes in once, by weights; and of the others.
        shared = {
            key: numbers
            for key, numbers in sorted(groups.items())
            if self.cached
            and sharing_pays(
                len(key[1]), [pairs[n].continuation for n in numbers], self.cached.width
            )
        }
        whole = [n for n, pair in enumerate(pairs) if (pair.weights, pair.context) not in shared]

        def prepare(weights: Sequence[Weights], shape: tuple[int, int]) -> LogitsOf:
            self.select(selection_of(weights))
            return self.logits_of

        rows = [
            Row(p.context + p.continuation[:-1], p.continuation, p.weights)
            for p in (pairs[number] for number in whole)
        ]
        log_p = row_log_p(rows, prepare, self.head, self.batch_size, self.batch_tokens)
        by_number = dict(zip(whole, log_p, strict=True))
        selected: Weights | None = None
        for (weights, context), numbers in shared.items():
            if weights != selected:  # packing stacks again takes its time
                self.select(selection_of([weights]))
            selected = weights
            assert self.cached is not None
            log_p = continuation_log_p(
                self.cached, context, [pairs[number].continuation for number in numbers],
                self.head, self.batch_size, self.batch_tokens,
            )  # fmt: skip
            by_number |= zip(numbers, log_p, strict=True)
        return [by_number[number] for number in range(len(pairs))]


def pair_scorer(
    model: nn.Module,
    config: Mapping[str, Any],
    batch_size: int,
    select: Callable[[Selection], None] = lambda selection: None,
) -> PairScorer:
    """Of the model as it is now: a head is looked for again after modules were replaced.

    config: the model's config.json. select, batch_size: as in `PairScorer`.
    """
    model.freeze()  # what trains is no head that could be left out
    text = config.get("text_config") or config
    width = int(text.get("hidden_size") or text.get("n_embd") or 1)
    return PairScorer(
        model, select, find_output_head(model)[0], batch_size, choose_batch_tokens(width),
        find_cached_model(model, width),
    )  # fmt: skip


def selection_of(rows: Sequence[Weights]) -> Selection:
    """The mode in which each sequence of a batch has its own weights."""
    names = list(dict.fromkeys(name for weights in rows for name, _ in weights))
    if not names:
        return base()
    table = np.array([[dict(row).get(name, 0.0) for name in names] for row in rows], np.float32)
    return routed(names, table[0] if len(set(rows)) == 1 else table)


def _likeliest(logits: mx.array) -> mx.array:
    """0 where a logit is the largest, -inf elsewhere: log p is finite for the likeliest alone."""
    return mx.where(logits == mx.max(logits, axis=-1, keepdims=True), 0.0, -mx.inf)


class _LikeliestHead(OutputHead):
    def __call__(self, hidden: mx.array) -> mx.array:
        return _likeliest(super().__call__(hidden))
