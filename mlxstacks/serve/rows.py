"""One forward pass for rows of different routes.

mlx-lm's `BatchGenerator` merges, splits, filters and extends batches of rows as answers come and
go, and calls the model with the batch's tokens and caches. So each row carries its route as one
more entry of its cache, `RowRoutes`: whatever mlx-lm does with rows, it does with their routes.
`RoutedRows` stands for the model, takes that entry off, and makes the stacks answer each row with
its own weights. A batch with a row without a route raises.

Law: what a row is answered is what it is answered alone, to rounding.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.guard.cache_bytes import leaves
from mlxstacks.layers.packed import Segment, weighted
from mlxstacks.routing.generation import CHUNKED_FROM
from mlxstacks.routing.resident import Alike, PackedSet
from mlxstacks.serve.pool import Held, StackPool
from mlxstacks.training.modes import evaluating

Segments = Mapping[str, tuple[Segment, ...]]
# Batches that take turns: rows that write, and rows that are read.
_REMEMBERED = 8


class RowRoutes:
    """The routes of a batch's rows, in order, as an entry of mlx-lm's caches; its protocol."""

    state: tuple[()] = ()
    nbytes = 0

    def __init__(self, routes: Sequence[Held]) -> None:
        self.routes = list(routes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.routes)

    def merge(self, entries: "Sequence[RowRoutes]") -> Self:
        return type(self)([route for entry in entries for route in entry.routes])

    def extend(self, other: "RowRoutes") -> None:
        self.routes += other.routes

    def filter(self, keep: Sequence[int]) -> None:
        self.routes = [self.routes[row] for row in keep]

    def extract(self, row: int) -> Self:
        return type(self)([self.routes[row]])

    def prepare(self, **padding: Any) -> None:
        """Rows stay where they are."""

    def finalize(self) -> None:
        """As `prepare`."""


class RoutedRows:
    """A model whose rows are answered each by its own route; called as mlx-lm calls models."""

    def __init__(self, model: nn.Module, pool: StackPool) -> None:
        self._model, self._pool = model, pool
        self._installed: tuple[Held, ...] | None = None
        self._known: dict[tuple[Held, ...], Segments] = {}

    def __call__(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """tokens (B, T) -> logits (B, T, V) float32. cache: the model's entries, and a `RowRoutes`.

        Raises: RuntimeError where a row has no route of its own.
        """
        *entries, rows = cache
        if not isinstance(rows, RowRoutes):
            raise RuntimeError("a batch without routes: its rows would be answered as others'")
        if len(rows.routes) != tokens.shape[0] or not all(
            isinstance(route, Held) for route in rows.routes
        ):
            raise RuntimeError(
                f"{len(rows.routes)} routes for {tokens.shape[0]} rows; each needs its own"
            )
        self._activate(tuple(rows.routes))
        if tokens.shape[1] < CHUNKED_FROM:
            logits = self._model(tokens, cache=entries)
        else:
            with evaluating(self._model), base_model.gated_delta_installed():
                logits = self._model(tokens, cache=entries)
        # mlx-lm's caches of recurrent layers count tokens anew for every token, out of the counts
        # before, and need those of the first layer alone: all others would never be computed, and
        # grow by a buffer a token.
        counts = [
            getattr(leaf, name, None) for leaf in leaves(entries)
            for name in ("lengths", "left_padding")
        ]  # fmt: skip
        mx.async_eval([count for count in counts if isinstance(count, mx.array)])
        return logits.astype(mx.float32)  # log probabilities of half floats would be coarse

    def base(self) -> None:
        """The model answers as its base, and keeps no stack alive."""
        self._known.clear()
        if self._installed != ():
            self._install((), {})

    def _activate(self, routes: tuple[Held, ...]) -> None:
        if routes == self._installed:
            return
        segments = self._known.get(routes)
        if segments is None:
            segments = batch_segments(routes)
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[routes] = segments
        self._install(routes, segments)

    def _install(self, routes: tuple[Held, ...], segments: Segments) -> None:
        for path, layer in self._pool.places.items():
            layer.install(segments.get(path, ()))
        if self._pool.blocks is not None:
            self._pool.blocks.weigh([route.weights for route in routes])
        self._installed = routes


def batch_segments(routes: Sequence[Held]) -> dict[str, tuple[Segment, ...]]:
    """Path -> segments of every pack that a row names, weighed row by row; arrays are shared.

    Packs that are alike become one, in which each row has its own, unless a row has two of them.
    """
    used = {packed for route in routes for packed, _ in route.parts}
    joined = _several(used)
    for route in routes:
        joined -= _several(packed for packed, _ in route.parts)
    packs: dict[PackedSet, list[float]] = {}
    places: dict[PackedSet, list[int]] = {}
    for row, route in enumerate(routes):
        for packed, weight in route.parts:
            first = packed
            if (alike := packed.alike) is not None and alike in joined:
                first = alike.sets[0]
                places.setdefault(first, [0] * len(routes))[row] = alike.sets.index(packed)
            packs.setdefault(first, [0.0] * len(routes))[row] = weight
    segments: dict[str, list[Segment]] = {}
    for packed, column in packs.items():
        weights = mx.array(column, mx.float32)[:, None]  # (B, 1), of all stacks of a pack
        answers = None if all(column) else weights != 0
        values = {weight for weight in column if weight}
        for path, parts in packed.segments.items():
            chosen = None
            if packed in places and packed.alike is not None:
                own = mx.array(places[packed], mx.uint32)[:, None]
                chosen = own, *packed.alike.pairs[path]
            for part in parts:
                if len(values) == 1:
                    (weight,) = values
                    weighed = weighted(part, {stack.name: weight for stack in part.ids})
                else:
                    all_of_them = mx.broadcast_to(weights, (len(column), len(part.ids)))
                    weighed = replace(part, weights=all_of_them, factor=1.0, column=None)
                weighed = replace(weighed, answers=answers, chosen=chosen, in_product=True)
                segments.setdefault(path, []).append(weighed)
    return {path: tuple(parts) for path, parts in segments.items()}


def _several(sets: Iterable[PackedSet]) -> set[Alike]:
    """The kinds of which there are two sets or more."""
    counts = Counter(packed.alike for packed in sets if packed.alike is not None)
    return {alike for alike, count in counts.items() if count > 1}
