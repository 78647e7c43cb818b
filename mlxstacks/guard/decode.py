"""Live buffers of generating text."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxstacks.guard.graph import export_graph
from mlxstacks.guard.live import simulate
from mlxstacks.guard.order import evaluation_order

# Tokens in the cache when a step is simulated; caches grow in place, so the count is that of any.
_PROMPT_TOKENS = 4
_ROOM_TOKENS = 256


@dataclass(frozen=True)
class DecodePrediction:
    """Buffers of generating `tokens` tokens.

    first_buffers: at the peak of the first step; leaked_per_token: what each step leaves behind.
    """

    tokens: int
    first_buffers: int
    leaked_per_token: int

    def buffers_at(self, tokens: int) -> int:
        return self.first_buffers + self.leaked_per_token * tokens

    @property
    def buffers(self) -> int:
        return self.buffers_at(self.tokens)

    def tokens_until(self, buffers: int) -> int | None:
        """Tokens after which `buffers` are alive; None where that never happens."""
        if self.leaked_per_token == 0:
            return None
        return max(0, buffers - self.first_buffers) // self.leaked_per_token


class _KeyValueCache:
    """Keys and values of one attention layer, written into a buffer with room for more: what
    mlx-lm's KVCache does, and with `batch` its BatchKVCache, which knows each row's padding.
    """

    def __init__(self, batch: int | None) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.used = 0
        zeros = None if batch is None else [0] * batch
        self.left_padding = None if zeros is None else mx.array(zeros)
        self.offset: int | mx.array = 0 if zeros is None else mx.array(zeros)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """keys, values: (B, heads, T, D), joined to what is there along T."""
        if self.keys is None or self.values is None:
            self.keys, self.values = _room_for(keys), _room_for(values)
        start, self.used = self.used, self.used + keys.shape[2]
        self.offset = self.offset + keys.shape[2]
        self.keys[..., start : self.used, :] = keys
        self.values[..., start : self.used, :] = values
        return self.keys[..., : self.used, :], self.values[..., : self.used, :]

    def make_mask(self, count: int, **_: Any) -> mx.array | str | None:
        """For `count` new tokens: (B, 1, count, all tokens), or a word, or nothing."""
        if self.left_padding is None:
            return None if count == 1 else "causal"
        there = mx.arange(self.used + count)[None]
        new = mx.arange(self.used, self.used + count)[:, None]
        return (new >= there) & (mx.expand_dims(self.left_padding, (1, 2, 3)) <= there)

    @property
    def state(self) -> list[mx.array | int | None]:
        return [self.keys, self.values, self.offset, self.left_padding]


def _room_for(rows: mx.array) -> mx.array:
    return mx.zeros((*rows.shape[:2], _ROOM_TOKENS, rows.shape[3]), rows.dtype)


def predict_decode(model: nn.Module, tokens: int, batch: int, batched: bool) -> DecodePrediction:
    """Buffers of generating `tokens` tokens with mlx-lm.

    batched: with its BatchGenerator, which in 0.32.2 counts padding in one array a linear-attention
        layer and reads only the first: of the others one operation a token is never run, and its
        constant stays. (It stops counting where prompts of unequal length were padded; what is
        given here is the worse case.) `stream_generate` has no padding to count.
    """
    training = model.training
    model.eval()
    try:
        first, counting = _one_step(model, batch, batched)
    finally:
        model.train(training)
    leaked = max(0, counting - 1) if batched else 0
    return DecodePrediction(tokens, first, leaked)


def _one_step(model: nn.Module, batch: int, batched: bool) -> tuple[int, int]:
    """Buffers at the peak of one step, and how many caches count padding.

    mlx-lm builds a step while the one before still runs. So two are gone through, and the peak of
    the second is taken: what the first left in flight is there.
    """
    caches = _caches(model, batch if batched else None)
    token = mx.argmax(model(mx.zeros((batch, _PROMPT_TOKENS), mx.int32), cache=caches)[:, -1], -1)
    kept = [a for _, a in tree_flatten(model.parameters())]
    moments = [_noted([token, *_states(caches)])]
    for _ in range(2):
        logits = model(token[:, None], cache=caches)[:, -1, :]
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = mx.argmax(scores, axis=-1)
        moments.append(_noted([token, scores, *_states(caches)]))
    graph, numbers = export_graph([*kept, *moments])
    held = numbers[: len(kept)]
    # Behind the zero that each of these passes on.
    noted = [graph.inputs[graph.producer[number]][1:] for number in numbers[len(kept) :]]
    existing, first, second = noted
    graph.cut_at([*held, *existing])
    order = evaluation_order(graph, first)
    start = len(order)
    producers = graph.producer.copy()
    graph.cut_at(first)
    order += evaluation_order(graph, second)
    graph.producer[:] = producers
    results = [*first[:2], *second]
    peak = simulate(graph, order, held, existing, results, measured_from=start)
    return peak.buffers, sum(1 for cache in caches if hasattr(cache, "advance"))


def _noted(arrays: list[mx.array]) -> mx.array:
    """A mark in the graph that has `arrays` as they are now: caches write into theirs."""
    return mx.depends([mx.array(0)], arrays)[0]


def _caches(model: nn.Module, batch: int | None) -> list[Any]:
    """One a layer; batch: rows of a BatchGenerator, None for a single text."""
    if not hasattr(model, "make_cache"):
        return [_KeyValueCache(batch) for _ in getattr(model, "layers", [])]
    caches = list(model.make_cache())
    if batch is None:
        return caches
    return [_KeyValueCache(batch) if type(c).__name__ == "KVCache" else c for c in caches]


def _states(caches: list[Any]) -> list[mx.array]:
    """The arrays that caches hold."""
    return [a for _, a in tree_flatten([c.state for c in caches]) if isinstance(a, mx.array)]
