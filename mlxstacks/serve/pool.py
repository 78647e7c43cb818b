"""Stacks and adapters in memory, each by itself, for rows of one batch that differ in what they
are answered with.

`routing.resident` packs the stacks of one answer together. Here every domain is packed alone, so
that rows of any routes share what is in memory; a batch adds up the domains that its rows name.

A store may change while it is served. What a domain is made of names its version, `math@3fa2...`:
rows under way keep the version they began with, new ones get the new one. An adapter is a stack of
one expert, has a version too, and never leaves memory. Capability blocks stay as they were when
the pool was made, each held by an empty pack.

Not for several threads.
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.errors import AdapterError, InputError, ResourceLimitError, StoreError
from mlxstacks.files.adapters import load_any_adapter, match_adapter
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.lora_modules import Adapter
from mlxstacks.files.manifest import check_name
from mlxstacks.files.peft_layout import PeftLayout
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import MANIFEST
from mlxstacks.layers.packed import FrozenStack, Segment, StackShape
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.stack_files import attach_paths, places
from mlxstacks.memory import bytes_in_words
from mlxstacks.ops.affine import from_storage
from mlxstacks.routing.blocks import ResidentBlocks
from mlxstacks.routing.resident import (
    Alike,
    PackedSet,
    PackedSets,
    pack_domains,
    release_memory,
)
from mlxstacks.routing.stack_reader import DomainParts, ResidentStats, StackReader
from mlxstacks.serve.naming import RESERVED

# Live buffers of a segment in memory, and of its products while a step is under way: no fewer than
# were counted.
_AT_REST, _UNDER_WAY = 8, 6
_STORED = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True, eq=False)
class Held:
    """What one row is answered with, held in memory until `StackPool.release`.

    parts: each pack with the weight of its stacks. key: equal for rows of equal weights. weights:
    by name. loaded: read for this row; resident: those that were there.
    """

    parts: tuple[tuple[PackedSet, float], ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    resident: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def key(self) -> tuple[tuple[str, float], ...]:
        return tuple((packed.domains[0], weight) for packed, weight in self.parts)


def adapter_parts(adapter: Adapter, name: str, dtype: mx.Dtype | None) -> DomainParts:
    """An adapter as stacks of one expert by path, its numbers as they are stored.

    dtype: that products are computed in; None: the stored one.
    """
    parts: DomainParts = {}
    for path, module in adapter.modules.items():
        stored = _STORED[module.dtype] if dtype is None else dtype
        a, b = (
            mx.array(from_storage(raw, module.dtype)).astype(stored)
            for raw in (module.lora_a, module.lora_b)
        )
        if module.is_switch:
            shape = StackShape("per_expert", 1, module.rank, 1, module.scale)
        else:  # (K, R), (R, N) -> (1, R, K), (1, N, R)
            shape = StackShape("linear", 1, module.rank, 1, module.scale)
            a, b = a.T[None], b.T[None]
        parts[path] = [FrozenStack(StackId(name, name), shape, a, b, None)]
    return parts


class StackPool:
    """The stacks of a store and some adapters, for a model that `RoutedRows` calls.

    dtype: widen them, as in `Resident`. budget_bytes: most that packs and `reserved_bytes`, of
    prompt caches, may take together; None for no limit. before_drop: called before a pack may
    leave memory, so that nobody else keeps its arrays alive. notes: what is worth saying; it grows.
    config: of the base, whose layers blocks have in shape.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store | None,
        *,
        dtype: mx.Dtype | None = None,
        budget_bytes: int | None = None,
        before_drop: Callable[[], None] = lambda: None,
        notes: list[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._dtype, self._store = model, dtype, store
        self._before_drop = before_drop
        self.notes = [] if notes is None else notes
        self.stats = ResidentStats(budget_bytes=budget_bytes)
        self._sets = PackedSets(budget_bytes, self.stats)
        self.adapters: dict[str, PackedSet] = {}
        self._attached: set[str] = set()
        self._seen: object = None
        self.places = places(model)
        self._reader: StackReader | None = None
        self._versions: dict[str, str] = {}
        self.blocks: ResidentBlocks | None = None
        if store is not None and store.manifest.holds_blocks:
            self.blocks = ResidentBlocks(model, store, config or {}, budget_bytes)
            self.blocks.weigh([])
            for record in store.enabled_stacks():
                version = _version(record.domain, [record.file.sha256])
                self._versions[record.domain] = version
                self._sets.add(PackedSet((version,), leases=1))
        self.refresh()

    # --- what there is ---------------------------------------------------------------------------

    @property
    def store(self) -> Store | None:
        """As it was when it was last read."""
        return self._store

    @property
    def domains(self) -> tuple[str, ...]:
        """Enabled domains with stacks, in the store's order."""
        return tuple(self._versions)

    @property
    def names(self) -> tuple[str, ...]:
        """All that a request can name."""
        return (*self.adapters, *self._versions)

    @property
    def nbytes(self) -> int:
        """Of packs and blocks in memory."""
        blocks = 0 if self.blocks is None else self.blocks.nbytes
        return blocks + sum(packed.nbytes for packed in self._sets)

    @property
    def resident(self) -> dict[str, int]:
        """Name -> bytes of the adapters and domains in memory, all versions of a domain together;
        without blocks.
        """
        found: dict[str, int] = {}
        for packed in self._sets:
            name = packed.domains[0].rpartition("@")[0]
            if packed.nbytes:
                found[name] = found.get(name, 0) + packed.nbytes
        return dict(sorted(found.items()))

    @property
    def buffers(self) -> int:
        """Live buffers of packs in memory, and of products of those that rows hold; predicted."""
        return sum(map(_buffers, self._sets))

    @property
    def held_bytes(self) -> int:
        """Of packs that rows or adapters hold."""
        return sum(packed.nbytes for packed in self._sets if packed.leases)

    def add_adapter(
        self,
        path: str,
        checkpoint: Checkpoint,
        layout: PeftLayout | None,
        allow_base: bool,
        base_name: str = "base",
    ) -> str:
        """Take an adapter into memory for good; returns its name, that of its directory. base_name:
        what else requests call the base.

        Raises: InputError: the name is taken or none; AdapterError: as `match_adapter`, or modules
            that no stack can sit on; ResourceLimitError: it does not fit the budget.
        """
        if self.blocks is not None:
            raise InputError(f"{path}: no adapter is served next to a store of capability blocks")
        adapter = load_any_adapter(path, layout, checkpoint)
        match_adapter(adapter, checkpoint, allow_base=allow_base)
        try:
            name = check_name(adapter.directory.resolve().name.removesuffix(".gguf"), "adapter")
        except ValueError as error:
            raise InputError(f"{path}: {error}; rename it") from None
        taken = {
            **dict.fromkeys(self.names, "a domain of the store"),
            **dict.fromkeys(self.adapters, "another adapter"),
            base_name: "the base",
            **dict.fromkeys(RESERVED, "a mode"),
        }
        if name in taken:
            raise InputError(f"{path}: {taken[name]} is called {name} too; rename the directory")
        try:
            attach_paths(self._model, adapter.modules)
        except ValueError as error:
            raise AdapterError(f"{path}: {error}") from None
        self.places = places(self._model)
        packed = pack_domains((name,), {name: adapter_parts(adapter, name, self._dtype)}, None)
        hashes = [_sha256(part) for path in packed.segments for part in packed.segments[path]]
        packed.domains, packed.leases = (_version(name, hashes),), 1
        self._make_room(packed.nbytes, 0, f"adapter {name}")
        self._sets.add(packed)
        self.adapters[name] = packed
        return name

    def join_adapters(self) -> None:
        """Lay those of the same shapes side by side, once all are here."""
        groups: dict[Any, list[PackedSet]] = {}
        for packed in self.adapters.values():
            parts = [(path, part) for path in packed.segments for part in packed.segments[path]]
            if len(parts) == len(packed.segments) and all(part.is_plain for _, part in parts):
                shapes = tuple((path, part.shape, part.a_all.dtype) for path, part in parts)
                groups.setdefault(shapes, []).append(packed)
        for alike in groups.values():
            if len(alike) > 1:
                Alike.join(alike)

    def refresh(self) -> bool:
        """Look whether the store has changed, and go by what it is now; whether it had.

        One that cannot be read stays as it was.
        """
        if self._store is None or self.blocks is not None:
            return False
        mark = None
        with suppress(OSError):
            stat = os.stat(self._store.path / MANIFEST)
            mark = stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        if mark == self._seen:
            return False
        self._seen = mark
        try:
            store = Store.open(self._store.path)
            store.check_base(self._store.manifest.base_fingerprint)
        except (InputError, StoreError) as error:
            self.notes.append(f"The store is served as it was: {error}")
            return False
        reader = StackReader(store, self.stats)
        clash = sorted(set(reader.domains) & self.adapters.keys())
        if clash:
            self.notes.append(f"Adapters hide the domains of their names: {', '.join(clash)}")
        self._store, self._reader = store, reader
        self._versions = {
            name: _version(name, [stack.file.sha256 for stack in reader.records(name)])
            for name in reader.domains
            if name not in clash
        }
        self._drop_stale()
        return True

    # --- what rows hold --------------------------------------------------------------------------

    def hold(
        self,
        weights: Mapping[str, float],
        reserved_bytes: int = 0,
        most_buffers: int | None = None,
    ) -> Held:
        """What a row of these weights is answered with, in memory; {}: the base alone.

        most_buffers: that packs may take; None for no limit.

        Raises: InputError: a name that is not served. ResourceLimitError: it does not fit.
            StoreError: a stack cannot be read; an answer without it would be another's.
        """
        started = time.perf_counter()
        if strange := [name for name in weights if name not in self.names]:
            raise InputError(f"nothing named {', '.join(map(ascii, strange))} is served")
        active = [name for name in self.names if weights.get(name, 0) > 0]
        parts: list[tuple[PackedSet, float]] = []
        loaded: list[str] = []
        resident: list[str] = []
        try:
            for name in active:
                packed = self.adapters.get(name) or self._sets.get((self._versions[name],))
                (resident if packed else loaded).append(name)
                packed = packed or self._load(name, reserved_bytes, most_buffers)
                packed.leases += 1
                parts.append((packed, float(weights[name])))
            self._make_room(0, reserved_bytes, "the answer", 0, most_buffers)
        except BaseException:
            self.release(Held(tuple(parts)))
            raise
        self.stats.hits += len(resident)
        self.stats.misses += len(loaded)
        return Held(
            tuple(parts), {name: float(weights[name]) for name in active}, tuple(loaded),
            tuple(resident), time.perf_counter() - started,
        )  # fmt: skip

    def release(self, held: Held) -> None:
        """Give back what a row held."""
        for packed, _ in held.parts:
            packed.leases -= 1
        self._drop_stale()

    def _load(self, name: str, reserved_bytes: int, most_buffers: int | None) -> PackedSet:
        version = self._versions[name]
        assert self._reader is not None
        self._attach(name, version)
        needed = self._reader.nbytes(name, self._dtype)
        paths = {path for header in self._reader.headers(name) for path in header.projections}
        buffers = len(paths) * (_AT_REST + _UNDER_WAY)
        self._make_room(needed, reserved_bytes, f"domain {name}", buffers, most_buffers)
        parts, _ = self._reader.read(name)
        packed = replace(pack_domains((name,), {name: parts}, self._dtype), domains=(version,))
        self._sets.add(packed)
        self.stats.packed_built += 1
        if self.stats.budget_bytes is not None:
            release_memory()
        return packed

    def _attach(self, name: str, version: str) -> None:
        """Make places for a domain's stacks, from the headers alone. Raises: StoreError."""
        if version in self._attached:
            return
        assert self._reader is not None
        paths = {path for header in self._reader.headers(name) for path in header.projections}
        if paths - self.places.keys():
            self._before_drop()  # what is installed knows the places that there were
            try:
                attach_paths(self._model, paths)
            except ValueError as error:
                raise StoreError(f"domain {name}: {error}") from None
            self.places = places(self._model)
        self._reader.check_dims(name, {path: p.dims for path, p in self.places.items()})
        self._attached.add(version)

    def _make_room(
        self,
        needed_bytes: int,
        reserved_bytes: int,
        what: str,
        needed_buffers: int = 0,
        most_buffers: int | None = None,
    ) -> None:
        """Raises: ResourceLimitError saying what does not fit, and why."""
        if most_buffers is not None:
            taken = sum(_buffers(packed) for packed in self._sets if packed.leases)
            if taken + needed_buffers > most_buffers:
                raise ResourceLimitError(
                    f"{what} does not fit into Metal's limit on live buffers now: about "
                    f"{needed_buffers:,} to load, next to {taken:,} of stacks in use; model, "
                    f"prompts and answers leave {max(0, most_buffers):,}"
                )
            kept, taken = set(), taken + needed_buffers
            for packed in self._sets:
                taken += 0 if packed.leases else _buffers(packed)
                if taken <= most_buffers:
                    kept.add(packed.domains)
            self._before_drop()
            self._sets.drop_others(kept)
        budget = self.stats.budget_bytes
        if budget is None:
            return
        reserved_bytes += self._shared_bytes()
        held = self.held_bytes
        if reserved_bytes + held + needed_bytes > budget:
            words = [bytes_in_words(n) for n in (needed_bytes, held, reserved_bytes, budget)]
            raise ResourceLimitError(
                f"{what} does not fit into memory now: {words[0]} to load, next to {words[1]} of "
                f"stacks in use and {words[2]} predicted for prompts and answers; the budget is "
                f"{words[3]}"
            )
        self._before_drop()
        self._sets.make_room(needed_bytes, reserved_bytes, what)

    def _shared_bytes(self) -> int:
        """Of the latent pairs that stacks in memory share; of blocks."""
        if self._reader is None:
            return 0 if self.blocks is None else self.blocks.nbytes
        inside = {key.rpartition("@")[0] for key in self._sets.domains}
        return self._reader.shared_bytes(inside & self._versions.keys())

    def _drop_stale(self) -> None:
        """Versions that the store no longer has, where no row holds them."""
        current = {(version,) for version in self._versions.values()}
        if any(not p.leases and p.domains not in current for p in self._sets):
            self._before_drop()
            self._sets.drop_others(current)


def _buffers(packed: PackedSet) -> int:
    segments = sum(map(len, packed.segments.values()))
    return segments * (_AT_REST + (_UNDER_WAY if packed.leases else 0))


def _sha256(part: Segment) -> str:
    arrays = (mx.contiguous(array).view(mx.uint8) for array in (part.a_all, part.b_all))
    return hashlib.sha256(b"".join(map(bytes, arrays)) + repr(part.shape).encode()).hexdigest()


def _version(name: str, hashes: list[str]) -> str:
    return f"{name}@{hashlib.sha256(' '.join(hashes).encode()).hexdigest()[:16]}"
