"""A store of capability blocks beside its base: answers lease blocks as they lease stacks.

    blocks = ResidentBlocks(model, store, config)
    with blocks.lease({"code": 0.9, "math": 0.4}):
        ...                                     # the model answers with these

All enabled blocks are in memory from the beginning. A cache has entries of those that answered when
it was made; conversations make a new one for other weights.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.store import Store
from mlxstacks.layers.blocks import attach_blocks, load_block
from mlxstacks.routing.stack_reader import ResidentStats


@dataclass(frozen=True)
class PlainLease:
    """What an answer is given with that has nothing to load. hits: domains that answer."""

    weights: Mapping[str, float] = field(default_factory=dict)
    hits: tuple[str, ...] = ()
    activate: Callable[[], None] = lambda: None
    loaded: tuple[str, ...] = ()
    seconds: float = 0.0
    bytes_read: int = 0


class ResidentBlocks:
    """The enabled blocks of a store. The model answers as its base until a lease is activated.

    config: of the base. budget_bytes: the most that the blocks may take; None for no limit.
    domains: in the store's order.
    Raises: InputError: blocks above the budget. StoreError: a file that is bad, a block of another
        shape, a base that takes none.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        config: Mapping[str, Any],
        budget_bytes: int | None = None,
    ) -> None:
        began, records = time.perf_counter(), store.enabled_stacks()
        nbytes = sum(record.file.nbytes for record in records)
        if budget_bytes is not None and nbytes > budget_bytes:
            raise InputError(
                f"{store.path}: its blocks take {nbytes} bytes, the budget is {budget_bytes}; "
                "raise the budget, or disable domains (`mlxstacks stacks disable`)"
            )
        try:
            self._decoder = attach_blocks(model)
        except ValueError as error:
            raise StoreError(f"{store.path}: {error}") from None
        blocks = {r.domain: load_block(store.read_block(r), config) for r in records}
        self._decoder.blocks = blocks
        model.eval()
        self.domains = self.loaded = tuple(blocks)
        self.nbytes = sum(array.nbytes for _, array in tree_flatten(blocks))
        self._stats = ResidentStats(
            misses=len(records), bytes_read=nbytes, bytes_hashed=nbytes,
            read_seconds=time.perf_counter() - began, resident_bytes=self.nbytes,
            budget_bytes=budget_bytes,
        )  # fmt: skip

    @property
    def stats(self) -> ResidentStats:
        """The counts until now; a copy."""
        return replace(self._stats)

    @contextmanager
    def lease(self, weights: Mapping[str, float]) -> Iterator[PlainLease]:
        """The right to answer with these domains, each multiplied by its weight; {}: the base.

        Raises: ValueError: a domain that is not here.
        """
        active = {name: weights[name] for name in self.domains if weights.get(name)}
        self._stats.hits += len(active)
        lease = PlainLease(active, tuple(active), lambda: self._decoder.select(active))
        lease.activate()
        try:
            yield lease
        finally:
            self._decoder.select({})

    def weigh(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Answer each row of a batch with its own weights by domain; no rows: any, as the base.

        Every block reads every row, so that the caches of all rows can be put together.
        """
        self._decoder.select({
            name: mx.array([weights.get(name, 0.0) for weights in rows or [{}]])
            for name in self.domains
        })  # fmt: skip
