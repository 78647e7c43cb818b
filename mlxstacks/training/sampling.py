"""Several answers to one prompt, drawn together.

The prompt goes through the model once; its cache is then repeated for each answer, so no row is
padded and every kind of cache of mlx-lm will do. A row that has ended goes along until half of the
rows have; then the rest go on without them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlxstacks import base_model
from mlxstacks.errors import NonFiniteModelError

# Of a prompt so many tokens at a time.
PREFILL_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: with the end mark, where `ended`; else the answer was cut at its longest."""

    tokens: tuple[int, ...]
    ended: bool


def sample_answers(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    max_tokens: int,
    end_tokens: Collection[int],
    key: mx.array,
    *,
    on_token: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """`count` answers of at most `max_tokens` tokens, each token drawn from the model's own
    distribution (temperature 1).

    prompt: token ids, at least one. key: of mx.random; the answers follow from it and the weights.
        on_token: called before each step of all rows.
    Law: the distribution of an answer is that of one drawn alone, whatever the others are.
    Raises: NonFiniteModelError.
    """
    cache = base_model.make_prompt_cache(model)
    for start in range(0, len(prompt) - 1, PREFILL_TOKENS):
        piece = prompt[start : min(start + PREFILL_TOKENS, len(prompt) - 1)]
        model(mx.array([piece]), cache=cache)
        mx.eval([entry.state for entry in cache])
    if len(prompt) > 1:
        _take_rows(cache, [0] * count)
    drawn: list[list[int]] = [[] for _ in range(count)]
    ended = [False] * count
    rows = list(range(count))  # the answer of each row of the cache
    last = mx.full((count, 1), prompt[-1], mx.int32)
    ends = frozenset(end_tokens)
    for number in range(max_tokens):
        on_token()
        logits = model(last, cache=cache)[:, -1].astype(mx.float32)
        # Keys of all answers, in use or not: a row draws the same whether others go on or not.
        keys = mx.random.split(mx.random.split(key, max_tokens)[number], count)
        noise = mx.stack([mx.random.gumbel(logits.shape[1:], key=keys[row]) for row in rows])
        tokens = mx.argmax(logits + noise, axis=-1)
        bad = mx.any(mx.isnan(logits))
        mx.eval(tokens, bad)
        if bad.item():
            raise NonFiniteModelError(f"a logit of token {number + 1} of a sampled answer")
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not ended[row]:
                drawn[row].append(token)
                ended[row] = token in ends
        going = [place for place, row in enumerate(rows) if not ended[row]]
        if not going:
            break
        last = tokens[:, None].astype(mx.int32)
        if len(going) <= len(rows) // 2:
            _take_rows(cache, going)
            last, rows = last[mx.array(going)], [rows[place] for place in going]
    return [Answer(tuple(one), end) for one, end in zip(drawn, ended, strict=True)]


def _take_rows(cache: Sequence[Any], rows: Sequence[int]) -> None:
    """Leave these rows in each entry of a cache, in this order; a row may be taken many times."""
    places = mx.array(rows)

    def taken(value: Any) -> Any:
        return value[places] if isinstance(value, mx.array) and value.ndim else value

    for entry in cache:
        entry.state = tree_map(taken, entry.state)
    mx.eval([entry.state for entry in cache])
