"""The one owner of which stacks of a store are in memory, and of which a model answers with.

    resident = Resident(model, store, budget_bytes=2_000_000_000)
    with resident.lease({"code": 0.9, "math": 0.4}) as lease:
        ...                                     # the model answers with these

Everything goes by the name of the domain. What a lease needs and memory does not have is read, the
difference only; what it has is taken from the packed sets that are there. Each set is packed once.

What is held. A domain is in memory once for every packed set that contains it, and nowhere else:
the loose tensors of a file are dropped as they are packed, and a set that is needed again takes the
stacks out of the packs that hold them, bit for bit. So `{code}` next to `{code, math}` holds code
twice, which the budget counts; a budget of little more than one set makes memory least. Latent
pairs, which stacks share, are held once, are counted, and never dropped.

Memory stays within the budget, but for one projection of a set while it is packed. A set that a
lease holds is never dropped; after `close` it stays until its room is needed.

Not for several threads: a model answers with one lease at a time, and nothing here is locked.
"""

import ctypes
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.store import Store
from mlxstacks.layers.packed import FrozenStack, Segment, pack_all, weighted
from mlxstacks.layers.stack_files import attach_paths, places
from mlxstacks.routing.stack_reader import DomainParts, ResidentStats, StackReader

Key = tuple[str, ...]

# glibc alone has it: elsewhere large blocks go back by themselves.
_LIBC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


@dataclass(eq=False)
class PackedSet:
    """domains: in the store's order. segments: by path. leases: how many hold it. alike: see there;
    None: no other one is.
    """

    domains: Key
    segments: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    leases: int = 0
    alike: "Alike | None" = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.segments.values() for part in parts)

    def parts(self, domain: str) -> DomainParts:
        """The stacks of one domain, taken out. Law: packing them again gives the same bytes."""
        parts: DomainParts = {}
        for path, segments in self.segments.items():
            stacks = [
                segment.stack(index)
                for segment in segments
                for index, stack_id in enumerate(segment.ids)
                if stack_id.domain == domain
            ]
            if stacks:
                parts[path] = stacks
        return parts


@dataclass(eq=False)
class Alike:
    """Sets with one plain stack at each path, of the same shapes, so that one product takes each
    row through its own. pairs: by path, of all of them; theirs are views. See `Segment.chosen`.
    """

    sets: list[PackedSet]
    pairs: dict[str, tuple[mx.array, mx.array]] = field(default_factory=dict)

    @classmethod
    def join(cls, sets: list[PackedSet]) -> None:
        """Make the sets views of common arrays; path by path, so that one path is held twice."""
        alike = cls(sets)
        for path in sets[0].segments:
            own = [packed.segments[path][0] for packed in sets]
            a_all = mx.stack([segment.a_all for segment in own])  # (S, R, K) or (S, M, R, K)
            if mx.default_device().type == mx.DeviceType.gpu:  # as `lazy_segment` lays them
                b_all = mx.stack([segment.b_all for segment in own])  # (S, N, R) or (S, M, N, R)
            else:
                b_all = mx.stack([s.b_all.swapaxes(-1, -2) for s in own]).swapaxes(-1, -2)
            views = [
                replace(segment, a_all=a_all[i], b_all=b_all[i], buffers=())
                for i, segment in enumerate(own)
            ]
            if own[0].shape.form == "per_expert":
                alike.pairs[path] = a_all.flatten(0, 1), b_all.flatten(0, 1)
            else:
                alike.pairs[path] = a_all.swapaxes(-1, -2), b_all.swapaxes(-1, -2)
            mx.eval(alike.pairs[path], [(view.a_all, view.b_all) for view in views])
            for packed, view in zip(sets, views, strict=True):
                packed.segments[path], packed.alike = (view,), alike


class PackedSets:
    """The sets in memory and the budget they share.

    reserved_bytes: of the budget, held by what is never dropped. Leased sets are never dropped.
    """

    def __init__(self, budget_bytes: int | None, stats: ResidentStats) -> None:
        self.budget_bytes = budget_bytes
        self.reserved_bytes = 0
        self._stats = stats
        self._sets: OrderedDict[Key, PackedSet] = OrderedDict()

    def __iter__(self) -> Iterator[PackedSet]:
        """Most recently used first."""
        return iter(list(reversed(self._sets.values())))

    @property
    def nbytes(self) -> int:
        return self.reserved_bytes + sum(s.nbytes for s in self._sets.values())

    @property
    def domains(self) -> set[str]:
        return {name for key in self._sets for name in key}

    def get(self, key: Key) -> PackedSet | None:
        """A set, from now on the most recently used one."""
        if key not in self._sets:
            return None
        self._sets.move_to_end(key)
        return self._sets[key]

    def holding(self, domain: str) -> PackedSet:
        """A set with a domain that is in memory: one that is leased, so that it stays, else the
        most recently used one, which `make_room` drops last.
        """
        holders = [packed for packed in self if domain in packed.domains]
        return next((packed for packed in holders if packed.leases), holders[0])

    def add(self, packed: PackedSet) -> None:
        self._sets[packed.domains] = packed

    def drop_others(self, keys: Collection[Key]) -> None:
        """Drop every set that nobody holds and that is none of these."""
        for key in [k for k, packed in self._sets.items() if not packed.leases and k not in keys]:
            del self._sets[key]

    def make_room(self, needed_bytes: int, reserved_bytes: int, what: str) -> None:
        """Drop sets that nobody holds until `needed_bytes` more fit next to `reserved_bytes`.

        Raises: InputError where they can never fit, or cannot while other leases are open; nothing
            is dropped then.
        """
        if self.budget_bytes is None:
            self.reserved_bytes = reserved_bytes
            return
        held = sum(s.nbytes for s in self._sets.values() if s.leases)
        least = reserved_bytes + needed_bytes
        if least > self.budget_bytes:
            raise InputError(
                f"{what} takes {least} bytes packed, the budget is {self.budget_bytes}; raise the "
                "budget, or ask for fewer domains"
            )
        if least + held > self.budget_bytes:
            raise InputError(
                f"{what} takes {needed_bytes} bytes packed and {held} are in use by other answers, "
                f"the budget is {self.budget_bytes}; end one of those first, or raise the budget"
            )
        self.reserved_bytes = reserved_bytes
        for key in [key for key, packed in self._sets.items() if not packed.leases]:
            if self.nbytes + needed_bytes <= self.budget_bytes:
                break
            del self._sets[key]
            self._stats.evictions += 1


def release_memory() -> None:
    """Give back to the system what was dropped, read and packed.

    MLX keeps freed buffers for arrays of the same sizes, and glibc keeps freed memory between what
    is in use; both grow past the budget, as the sets to come are of other sizes.
    """
    mx.synchronize()  # until then a stream may hold what it worked on last
    mx.clear_cache()
    if _LIBC_TRIM is not None:
        _LIBC_TRIM(0)


def pack_domains(
    domains: Key, loose: Mapping[str, DomainParts], dtype: mx.Dtype | None
) -> PackedSet:
    """Pack the stacks of domains, in order. What `loose` holds is taken out path by path, so that
    loose and packed stacks are not in memory together for more than one projection.
    """
    packed = PackedSet(domains)
    for path in sorted({path for name in domains for path in loose[name]}):
        stacks = [stack for name in domains for stack in loose[name].pop(path, [])]
        # Stacks that are alone in their shape are not copied by packing: as a view of a larger
        # pack one would keep all of that in memory.
        count = Counter(stack.shape for stack in stacks)
        stacks = [_own_copy(s) if count[s.shape] == 1 else s for s in stacks]
        packed.segments[path] = pack_all(stacks, dtype)
    return packed


def let_go(parts: DomainParts) -> None:
    """Copy parts out of the pack that they are views of, projection by projection: it may have been
    dropped, and would stay in memory whole until the last of them is packed. A function, so that
    no variable of its caller keeps one of them.
    """
    for path, stacks in parts.items():
        parts[path] = [_own_copy(stack) for stack in stacks]


def _own_copy(stack: FrozenStack) -> FrozenStack:
    # transposed, lora_b lies in memory as packs hold it on a CPU: the copy is one of blocks
    b = mx.contiguous(stack.lora_b.swapaxes(-1, -2)).swapaxes(-1, -2)
    router = None if stack.router is None else mx.contiguous(stack.router)
    a = mx.contiguous(stack.lora_a)
    mx.eval(a, b, router)
    return replace(stack, lora_a=a, lora_b=b, router=router)


class Resident:
    """Places for a store's enabled stacks on a model, and what of them is in memory.

    budget_bytes: the most that packed stacks (and latent pairs) may take; None for no limit.
    dtype: widen packed stacks, where products of mixed dtypes are slow; exact. They take that much
        more memory.
    The model answers as its base until a lease is activated. `set_mode` on the model replaces what
    a lease installed: activate it again afterwards.

    Raises: StoreError: the model lacks a stack's place, or has it in other dims. A file that cannot
        be read is no error here, but of the lease that needs it.
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
        self._places = places(model)
        for name in self.domains:
            try:
                self._reader.headers(name)
            except StoreError:
                continue  # the lease that needs it says so
            self._attach(name)
        self._install({})

    @property
    def domains(self) -> tuple[str, ...]:
        """Enabled domains with stacks, in the store's order."""
        return self._reader.domains

    @property
    def loaded(self) -> tuple[str, ...]:
        """The domains in memory, in the store's order."""
        return tuple(name for name in self.domains if name in self._sets.domains)

    @property
    def stats(self) -> ResidentStats:
        """The counts until now; a copy."""
        return replace(self._stats, resident_bytes=self._sets.nbytes)

    def lease(self, weights: Mapping[str, float]) -> "Lease":
        """The right to answer with these domains, each multiplied by its weight; {}: the base.

        A weight of 0 leaves its domain out.
        Raises: InputError: a domain that is not served here, a weight that is negative or no finite
            number; or more than fits into the budget, in bytes. Nothing is changed then.
            StoreError: domains that cannot be read; an answer without them would be another's.
        """
        started = time.perf_counter()
        if strange := [name for name in weights if name not in self.domains]:
            raise InputError(
                f"{self._path}: no domain {', '.join(map(ascii, strange))} is served (served: "
                f"{', '.join(self.domains) or 'none'})"
            )
        if bad := [f"{n}: {w}" for n, w in weights.items() if not (isfinite(w) and w >= 0)]:
            raise InputError(f"weights are finite numbers from 0 on, got {'; '.join(bad)}")
        before = set(self.loaded)
        lease = Lease(self)
        packed = self._packed(tuple(n for n in self.domains if weights.get(n, 0) > 0), lease)
        lease.weights = {name: float(weights[name]) for name in packed.domains}
        try:
            lease._hold(packed, {
                stack.name: lease.weights[name]
                for name in packed.domains
                for stack in self._reader.records(name)
            })  # fmt: skip
            self._open.add(lease)
            gone = before - set(self.loaded)
            lease.unloaded = tuple(name for name in self.domains if name in gone)
            self._stats.unloads += len(gone)
            lease.seconds = time.perf_counter() - started
        except BaseException:  # an interrupt: a lease that nobody has would hold its set for good
            lease.close()
            raise
        return lease

    def _packed(self, wanted: Key, lease: "Lease") -> PackedSet:
        """The set of these domains; fills in what the lease says of loading."""
        loaded, fresh = self._sets.domains, dict[str, DomainParts]()
        lease.hits = tuple(name for name in wanted if name in loaded)
        new = tuple(name for name in wanted if name not in loaded)
        self._stats.hits += len(lease.hits)
        self._stats.misses += len(new)
        self._for_each(new, self._attach)
        packed = self._sets.get(wanted) if wanted else PackedSet(())
        if packed is not None:
            self._stats.packed_hits += bool(wanted)
            return packed
        nbytes = sum(self._reader.nbytes(name, self._dtype) for name in wanted)
        paired = self._paired | {*wanted}
        reserved_bytes = self._reader.shared_bytes(paired)
        taken = {name: self._sets.holding(name).parts(name) for name in lease.hits}
        self._sets.make_room(nbytes, reserved_bytes, f"the set {', '.join(wanted)}")
        self._paired = paired
        if new:  # more is read before anything is packed
            for name in taken.keys() - self._sets.domains:
                let_go(taken[name])

        def read(name: str) -> None:
            fresh[name], nbytes = self._reader.read(name)
            lease.bytes_read += nbytes

        self._for_each(new, read)
        packed = pack_domains(wanted, {**taken, **fresh}, self._dtype)
        self._stats.packed_built += 1
        self._sets.add(packed)
        if self._sets.budget_bytes is not None:
            release_memory()
        lease.loaded = new
        return packed

    def _for_each(self, domains: Key, action: Callable[[str], None]) -> None:
        """Raises: StoreError saying of all domains that fail, why."""
        errors = []
        for name in domains:
            try:
                action(name)
            except StoreError as error:
                errors.append(str(error))
        self._stats.failures += len(errors)
        if errors:
            raise StoreError("\n".join(errors))

    def _attach(self, domain: str) -> None:
        """Make places for a domain's stacks, from the headers alone.

        Raises: StoreError: a file of it cannot be read, or does not fit the model.
        """
        if domain in self._attached:
            return
        headers = self._reader.headers(domain)
        paths = {path for header in headers for path in header.projections}
        if paths - self._places.keys():
            try:
                attach_paths(self._model, paths)
            except ValueError as error:
                raise StoreError(f"{self._path}: {error}") from error
            self._places = places(self._model)
        self._reader.check_dims(domain, {path: p.dims for path, p in self._places.items()})
        self._attached.add(domain)

    def _install(
        self, segments: Mapping[str, tuple[Segment, ...]], lease: "Lease | None" = None
    ) -> None:
        """The model answers with these from now on."""
        for path, layer in self._places.items():
            layer.install(segments.get(path, ()))
        self._active = lease

    def _close(self, lease: "Lease") -> None:
        self._open.discard(lease)
        if self._active is lease:
            # the model must not keep a set alive that may be dropped from now on
            self._install({})

    def close(self) -> None:
        """Close every lease and drop all that is in memory."""
        for lease in list(self._open):
            lease.close()
        self._install({})
        self._sets = PackedSets(self._stats.budget_bytes, self._stats)
        self._paired = set()
        self._reader.forget_pairs()
        release_memory()


@dataclass(eq=False, repr=False)
class Lease:
    """What one answer holds.

    weights: of the domains it answers with. loaded: domains that were read for it; hits: those
    that were in memory; unloaded: those that left it. seconds: what making it took. bytes_read: of
    files.
    """

    _owner: Resident
    weights: dict[str, float] = field(default_factory=dict)
    loaded: tuple[str, ...] = ()
    hits: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    seconds: float = 0.0
    bytes_read: int = 0
    _packed: PackedSet | None = None
    _segments: dict[str, tuple[Segment, ...]] = field(default_factory=dict)

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
        self._owner._install(self._segments, self)

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

    def __exit__(self, *_: object) -> None:
        self.close()
