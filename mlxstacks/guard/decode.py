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


class _GrowingCache:
    """Keys and values of one attention layer, for models that leave the choice to mlx-lm."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """keys, values: (B, heads, T, D), joined to what is there along T."""
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        self.offset = keys.shape[2]
        return keys, values

    @property
    def state(self) -> list[mx.array | None]:
        return [self.keys, self.values]


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
        first, counting = _one_step(model, batch)
    finally:
        model.train(training)
    leaked = max(0, counting - 1) if batched else 0
    return DecodePrediction(tokens, first, leaked)


def _one_step(model: nn.Module, batch: int) -> tuple[int, int]:
    """Buffers at the peak of one step, and how many caches count padding.

    mlx-lm builds a step while the one before still runs. So two are gone through, and the peak of
    the second is taken: what the first left in flight is there.
    """
    caches = _caches(model)
    token = mx.argmax(model(mx.zeros((batch, _PROMPT_TOKENS), mx.int32), cache=caches)[:, -1], -1)
    old = [token, *_states(caches)]
    steps = []
    for _ in range(2):
        logits = model(token[:, None], cache=caches)[:, -1, :]
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = mx.argmax(scores, axis=-1)
        steps.append([token, scores, *_states(caches)])
    kept = [a for _, a in tree_flatten(model.parameters())]
    graph, numbers = export_graph([*kept, *old, *steps[0], *steps[1]])
    ends = [len(kept), len(kept) + len(old), len(kept) + len(old) + len(steps[0])]
    held, existing = numbers[: ends[0]], numbers[ends[0] : ends[1]]
    first, second = numbers[ends[1] : ends[2]], numbers[ends[2] :]
    graph.cut_at([*held, *existing])
    order = evaluation_order(graph, first)
    start = len(order)
    producers = list(graph.producer)
    graph.cut_at(first)
    order += evaluation_order(graph, second)
    graph.producer[:] = producers
    peak = simulate(graph, order, held, existing, [*first[:2], *second], measured_from=start)
    return peak.buffers, sum(1 for cache in caches if hasattr(cache, "advance"))


def _caches(model: nn.Module) -> list[Any]:
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    return [_GrowingCache() for _ in getattr(model, "layers", [])]


def _states(caches: list[Any]) -> list[mx.array]:
    """The arrays that caches hold."""
    return [a for _, a in tree_flatten([c.state for c in caches]) if isinstance(a, mx.array)]
