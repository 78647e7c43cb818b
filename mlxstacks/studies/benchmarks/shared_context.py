"""Several continuations of one context: the context goes through the model once, into a prompt
cache; the continuations follow as a batch, behind that cache repeated for each of them.

The first token of a continuation is predicted by the context's last logits, so one of a single
token needs no second pass. A causal model computes the very same numbers either way, to rounding.

Only where each entry of the cache is of a kind whose arrays are known to lead with the batch: keys
and values, also in a sliding window, and the states of recurrent layers. Any other model answers
None to `find_cached_model`, and its pairs go in whole, as do those that are too short to pay.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from mlxstacks import base_model
from mlxstacks.evaluate import LogitsOf
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.routing.candidate_losses import Weights
from mlxstacks.studies.benchmarks.arm_prompts import Tokens
from mlxstacks.studies.benchmarks.row_scoring import Row, row_log_p

# mlx-lm's kinds of cache that one offset and arrays (B, ...) are all of -> where the arrays are.
_HELD = {
    "mlx_lm.models.cache.KVCache": ("keys", "values"),
    "mlx_lm.models.cache.RotatingKVCache": ("keys", "values"),
    "mlx_lm.models.cache.ArraysCache": ("cache", "left_padding", "lengths"),
}
# Sharing takes two passes over few tokens where many pairs would have shared one. Without this rule
# nano on a CPU broke even between 144 and 192 saved tokens; a GPU was not measured. And a share of
# the tokens still computed must be saved.
LEAST_SAVED, LEAST_SHARE = 256, 0.25


@dataclass(frozen=True, eq=False)
class CachedModel:
    """A model that goes on from a cache.

    logits_of: (tokens (B, T), entries) -> (B, T, V); the entries then hold these tokens too.
    make: empty entries.
    """

    logits_of: Callable[[mx.array, list[Any]], mx.array]
    make: Callable[[], list[Any]]


def find_cached_model(model: nn.Module) -> CachedModel | None:
    """`model` with its cache, or None where that cannot be repeated. Nothing is evaluated."""

    def make() -> list[Any]:
        return base_model.make_prompt_cache(model)

    entries = make()
    if not all(_kind(entry) in _HELD for entry in entries):
        return None
    rows = 2
    model(mx.zeros((rows, 4), mx.int32), cache=entries)
    if any(array.shape[:1] != (rows,) for array in _arrays(entries)):
        return None
    return CachedModel(lambda tokens, held: model(tokens, cache=held), make)


def sharing_pays(context: int, continuations: Sequence[Tokens]) -> bool:
    """Whether a context of so many tokens should go in once.

    Whole, each distinct input has all of them; so n inputs save n - 1 times the context.
    """
    inputs = {tokens[:-1] for tokens in continuations}
    saved = (len(inputs) - 1) * context
    return saved >= max(LEAST_SAVED, LEAST_SHARE * (context + sum(map(len, inputs))))


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
    found = copy.copy(entry)
    # By attributes, which mlx-lm keeps: what a `state` holds beside the arrays changed between its
    # versions. `copy` brings the rest, such as the offset.
    held: dict[str, Any] = {name: getattr(entry, name, None) for name in _HELD[_kind(entry)]}
    if _kind(entry).endswith(".KVCache"):
        # Exactly what is needed: mlx-lm would add room for 256 tokens to each copy.
        room = [(0, 0), (0, 0), (0, more), (0, 0)]
        held = {name: mx.pad(array[..., : entry.offset, :], room) for name, array in held.items()}
    for name, value in held.items():
        setattr(found, name, tree_map(lambda part: _copies(part, times), value))
    return found


def _copies(part: Any, times: int) -> Any:
    return mx.repeat(part, times, axis=0) if isinstance(part, mx.array) else part


def _kind(entry: Any) -> str:
    return f"{type(entry).__module__}.{type(entry).__name__}"


def _arrays(entries: Sequence[Any]) -> list[mx.array]:
    found = tree_flatten([entry.state for entry in entries])
    return [value for _, value in found if isinstance(value, mx.array)]
