"""The one owner of which stacks of a store are in memory, and of which a model answers with.

    resident = Resident(model, store, budget_bytes=2_000_000_000)
    with resident.lease({"code": 0.9, "math": 0.4}) as lease:
        ...                                     # the model answers with these
        lease.missing                           # domains that could not be read, and why

Everything goes by the name of the domain. What a lease needs and memory does not have is read, the
difference only; what it has is taken from the packed sets that are there. Each set is packed once.

What is held. A domain is in memory once for every packed set that contains it, and nowhere else:
the loose tensors of a file are dropped as they are packed, and a set that is needed anew takes the
stacks out of the packs that hold them, bit for bit. So `{code}` beside `{code, math}` holds code
twice, which the budget counts; a budget of little more than one set makes memory least. Latent
pairs, which stacks share, are held once, are counted, and never dropped.

Memory stays within the budget, but for one projection of a set while it is packed. A set that a
lease holds is never dropped; after `close` it stays until its room is needed.

Not for several threads: a model answers with one lease at a time, and nothing here is locked.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from types import TracebackType

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.store import Store
from mlxstacks.layers.packed import Segment, weighted
from mlxstacks.layers.stack_files import attach_paths, places
from mlxstacks.routing.packed_sets import (
    Key,
    PackedSet,
    PackedSets,
    let_go,
    pack_domains,
    release_memory,
)
from mlxstacks.routing.stack_reader import DomainParts, ResidentStats, StackReader


class Resident:
    """Places for a store's enabled stacks on a model, and what of them is in memory.

    budget_bytes: the most that packed stacks (and latent pairs) may take; None for no limit.
    dtype: widen packed stacks, where products of mixed dtypes are slow; exact. They take that much
        more memory.
    The model answers as its base until a lease is activated. `set_mode` on the model replaces what
    a lease installed: activate it again afterwards.

    Raises: StoreError: the model lacks a stack's place, or has it in other dims. A file that cannot
        be read is no error here: leases name it.
    """

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        *,
        budget_bytes: int | None = None,
        dtype: mx.Dtype | None = None,
    ) -> None:
        self._model = model
        self._path = store.path
        self._dtype = dtype
        self._stats = ResidentStats(budget_bytes=budget_bytes)
        self._reader = StackReader(store, self._stats)
        self._sets = PackedSets(budget_bytes, self._stats)
        self._open: set[Lease] = set()
        self._active: Lease | None = None
        self._attached: set[str] = set()
        self._paired: set[str] = set()  # domains whose latent pairs are held
        for name in self.domains:
            self._attach(name, strict=False)
        self._places = places(model)
        self._install({})

    @property
    def domains(self) -> tuple[str, ...]:
        """Enabled domains with stacks, in the store's order."""
        return self._reader.domains

    @property
    def loaded(self) -> tuple[str, ...]:
        """The domains in memory, in the store's order."""
        there = self._sets.domains
        return tuple(name for name in self.domains if name in there)

    @property
    def stats(self) -> ResidentStats:
        """The counts until now; a copy."""
        return replace(self._stats, resident_bytes=self._sets.nbytes)

    def lease(self, weights: Mapping[str, float]) -> "Lease":
        """The right to answer with these domains, each multiplied by its weight; {}: the base.

        A weight of 0 leaves its domain out. Domains that cannot be read are named in `missing`.
        Raises: InputError: a domain that is not served here, a weight that is negative or no finite
            number; or more than fits into the budget, in bytes. Nothing is changed then.
        """
        started = time.perf_counter()
        wanted = self._checked(weights)
        before = set(self.loaded)
        lease = Lease(self)
        packed = self._packed(wanted, lease)
        lease.weights = {name: float(weights[name]) for name in packed.domains}
        stack_weights = {
            stack.name: lease.weights[name]
            for name in packed.domains
            for stack in self._reader.records(name)
        }
        try:
            lease._hold(packed, stack_weights)
            self._open.add(lease)
            gone = before - set(self.loaded)
            lease.unloaded = tuple(name for name in self.domains if name in gone)
            self._stats.unloads += len(gone)
            lease.seconds = time.perf_counter() - started
        except BaseException:  # an interrupt: a lease that nobody has would hold its set for good
            lease.close()
            raise
        return lease

    def _checked(self, weights: Mapping[str, float]) -> Key:
        """The domains with a weight, in the store's order."""
        strange = [name for name in weights if name not in self.domains]
        if strange:
            there = ", ".join(self.domains) or "none"
            raise InputError(
                f"{self._path}: no domain {', '.join(map(ascii, strange))} is served (served: "
                f"{there})"
            )
        bad = [f"{n}: {w}" for n, w in weights.items() if not (isfinite(w) and w >= 0)]
        if bad:
            raise InputError(f"weights are finite numbers from 0 on, got {'; '.join(bad)}")
        return tuple(name for name in self.domains if weights.get(name, 0) > 0)

    def _packed(self, wanted: Key, lease: "Lease") -> PackedSet:
        """The set of these domains without those that cannot be read; fills in what the lease says
        of loading.
        """
        there = self._sets.domains
        fresh: dict[str, DomainParts] = {}
        lease.hits = tuple(name for name in wanted if name in there)
        readable = tuple(n for n in wanted if n in there or self._readable(n, lease))
        packed = self._sets.get(readable) if readable else PackedSet(())
        if packed is None:
            nbytes = sum(self._reader.nbytes(name, self._dtype) for name in readable)
            paired = self._paired | {*readable}
            reserved_bytes = self._reader.shared_bytes(paired)
            taken = {n: self._taken(n) for n in readable if n in there}
            self._sets.make_room(nbytes, reserved_bytes, f"the set {', '.join(readable)}")
            self._paired = paired
            if len(taken) < len(readable):
                # more is read before anything is packed
                for name in taken.keys() - self._sets.domains:
                    let_go(taken[name])
            fresh = {n: parts for n in readable if n not in there for parts in self._read(n, lease)}
            readable = tuple(n for n in readable if n in taken or n in fresh)
            # less may have been read than was asked for
            packed = self._sets.get(readable) if readable else PackedSet(())
            if packed is None:
                packed = pack_domains(readable, {**taken, **fresh}, self._dtype)
                self._stats.packed_built += 1
                self._sets.add(packed)
                if self._sets.budget_bytes is not None:
                    release_memory()
        elif readable:
            self._stats.packed_hits += 1
        lease.loaded = tuple(fresh)
        self._stats.hits += len(lease.hits)
        self._stats.misses += len(wanted) - len(lease.hits)
        self._stats.failures += len(lease.missing)
        return packed

    def _taken(self, domain: str) -> DomainParts:
        holder = self._sets.holding(domain)
        assert holder is not None
        return holder.parts(domain)

    def _readable(self, domain: str, lease: "Lease") -> bool:
        """Whether a domain's headers can be read; says why not in the lease."""
        try:
            self._attach(domain, strict=True)
        except StoreError as error:
            lease.missing[domain] = str(error)
            return False
        return True

    def _read(self, domain: str, lease: "Lease") -> list[DomainParts]:
        """A domain's parts in a list of one; an empty list where it cannot be read."""
        try:
            parts, nbytes = self._reader.read(domain)
        except StoreError as error:
            lease.missing[domain] = str(error)
            return []
        lease.bytes_read += nbytes
        return [parts]

    def _attach(self, domain: str, *, strict: bool) -> None:
        """Make places for a domain's stacks, from the headers alone.

        strict: raise for a file that cannot be read; else leave it to the lease that needs it.
        """
        if domain in self._attached:
            return
        try:
            headers = self._reader.headers(domain)
        except StoreError:
            if strict:
                raise
            return
        paths = {path for header in headers for path in header.projections}
        found = places(self._model)
        if paths - found.keys():
            try:
                attach_paths(self._model, paths)
            except ValueError as error:
                raise StoreError(f"{self._path}: {error}") from error
            self._places = found = places(self._model)
        self._reader.check_dims(domain, {path: layer.dims for path, layer in found.items()})
        self._attached.add(domain)

    def _install(self, segments: Mapping[str, tuple[Segment, ...]]) -> None:
        for path, layer in self._places.items():
            layer.install(segments.get(path, ()))

    def _activate(self, lease: "Lease", segments: Mapping[str, tuple[Segment, ...]]) -> None:
        self._install(segments)
        self._active = lease

    def _close(self, lease: "Lease") -> None:
        self._open.discard(lease)
        if self._active is lease:
            # the model must not keep a set alive that may be dropped from now on
            self._activate_base()

    def _activate_base(self) -> None:
        self._active = None
        self._install({})

    def close(self) -> None:
        """Close every lease and drop all that is in memory."""
        for lease in list(self._open):
            lease.close()
        self._activate_base()
        self._sets = PackedSets(self._stats.budget_bytes, self._stats)
        self._paired = set()
        self._reader.forget_pairs()
        release_memory()


class Lease:
    """What one answer holds.

    weights: of the domains it answers with. missing: domain -> why it answers without it. loaded:
    domains that were read for it; hits: those that were in memory; unloaded: those that left it.
    seconds: what making it took. bytes_read: of files.
    """

    def __init__(self, owner: Resident) -> None:
        self._owner = owner
        self._packed: PackedSet | None = None
        self._segments: dict[str, tuple[Segment, ...]] = {}
        self.weights: dict[str, float] = {}
        self.missing: dict[str, str] = {}
        self.loaded: tuple[str, ...] = ()
        self.hits: tuple[str, ...] = ()
        self.unloaded: tuple[str, ...] = ()
        self.seconds = 0.0
        self.bytes_read = 0

    def _hold(self, packed: PackedSet, stack_weights: Mapping[str, float]) -> None:
        packed.leases += 1
        self._packed = packed
        self._segments = {
            path: tuple(weighted(segment, stack_weights) for segment in segments)
            for path, segments in packed.segments.items()
        }

    def activate(self) -> None:
        """Make the model answer with this. Cheap: arrays are pointed at, none is touched.

        Raises: ValueError when it was closed.
        """
        if self._packed is None:
            raise ValueError("this lease was closed; take a new one")
        self._owner._activate(self, self._segments)

    def close(self) -> None:
        """Give the right back; if it is the active one, the model answers as its base. Once more
        does nothing.
        """
        if self._packed is None:
            return
        self._packed.leases -= 1
        self._packed, self._segments = None, {}
        self._owner._close(self)

    def __enter__(self) -> "Lease":
        self.activate()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
