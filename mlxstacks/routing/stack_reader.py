"""Stacks of a store by domain, read for a model that is served meanwhile.

A file is hashed when this process reads it for the first time. Hashing costs more than reading, and
the files of a store are never changed, so a file of the same path, device, inode, size and times of
change is not hashed again; nor is its header parsed, which is a third of the work of reading it.
"""

import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.manifest import StackRecord
from mlxstacks.files.stack_file import StackFile, StackHeader, StackIndex
from mlxstacks.files.store import Store
from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.stack_files import SharedPairs, parts_of


@dataclass
class ResidentStats:
    """Counts since the model was opened.

    hits, misses: domains asked for that were in memory, or were not. failures: misses that could
    not be read. unloads: domains that left memory. evictions: packed sets that were dropped for the
    budget. packed_hits, packed_built: sets asked for that were packed already, or were packed then.
    bytes_read, read_seconds: of stack files, checks included. bytes_hashed: what of it was read the
    first time in this process, and hashed. resident_bytes: held now. budget_bytes: the most that
    may be, None for no limit.
    """

    hits: int = 0
    misses: int = 0
    failures: int = 0
    unloads: int = 0
    evictions: int = 0
    packed_hits: int = 0
    packed_built: int = 0
    bytes_read: int = 0
    bytes_hashed: int = 0
    read_seconds: float = 0.0
    resident_bytes: int = 0
    budget_bytes: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """Share of domains asked for that were in memory; None before the first."""
        wanted = self.hits + self.misses
        return self.hits / wanted if wanted else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": self.hit_rate}


# Module path -> the stacks of one domain there, in order.
DomainParts = dict[str, list[FrozenStack]]
# Path, SHA-256, device, inode, size, time of the contents, time of any change: no program sets the
# last one back.
FileMark = tuple[str, str, int, int, int, int, int]

# Of this process, not of one reader: several models may share a store.
_HASHED: set[FileMark] = set()


class StackReader:
    """Reads whole domains of a store, as its manifest was when the reader was made.

    Nothing is kept but headers and the latent pairs that stacks share.
    """

    def __init__(self, store: Store, stats: ResidentStats) -> None:
        # a store of its own: the caller may refresh theirs
        self._store = Store(store.path, store.manifest)
        self._manifest = store.manifest
        self._stats = stats
        self._pairs = SharedPairs(self._store)
        # by name; with what the file was when its header was read
        self._indexes: dict[str, tuple[FileMark | None, StackIndex]] = {}

    @property
    def domains(self) -> tuple[str, ...]:
        """Enabled domains with stacks, in the store's order."""
        return tuple(d.name for d in self._manifest.domains if d.enabled and d.stacks)

    def records(self, domain: str) -> tuple[StackRecord, ...]:
        record = self._manifest.domain_named(domain)
        assert record is not None
        return record.stacks

    def headers(self, domain: str) -> list[StackHeader]:
        """The headers of a domain's stacks. Raises: StoreError naming a file that is bad."""
        for record in self.records(domain):
            if record.name not in self._indexes:
                mark = self._mark(record)
                self._indexes[record.name] = mark, self._store.read_index(record)
        return [self._indexes[record.name][1].header for record in self.records(domain)]

    def nbytes(self, domain: str, dtype: mx.Dtype | None) -> int:
        """What a domain's stacks take in memory, widened to `dtype`. Raises: as `headers`."""
        sizes = {"F16": 2, "BF16": 2, "F32": 4}
        return sum(
            math.prod(shape) * (sizes[kind] if dtype is None else dtype.size)
            for header in self.headers(domain)
            for kind, shape in header.tensors().values()
        )

    def shared_bytes(self, domains: Iterable[str]) -> int:
        """What the latent pairs of these domains take. Raises: as `headers`."""
        wanted = {header.shared_sha256 for name in domains for header in self.headers(name)}
        return sum(record.nbytes for record in self._manifest.shared if record.sha256 in wanted)

    def read(self, domain: str) -> tuple[DomainParts, int]:
        """A domain's stacks in memory, and the bytes of their files.

        Raises: StoreError saying which file is bad and how, or that the domain was removed from the
            store meanwhile.
        """
        started = time.perf_counter()
        parts: DomainParts = {}
        nbytes = 0
        try:
            self.headers(domain)
            for record in self.records(domain):
                file = self._read_stack(record)
                for path, part in parts_of(file, self._pairs.of(file.header)).items():
                    parts.setdefault(path, []).append(part)
                nbytes += record.file.nbytes
                self._stats.bytes_read += record.file.nbytes
        except (StoreError, OSError) as error:
            raise StoreError(self._reason(domain, error)) from error
        finally:
            self._stats.read_seconds += time.perf_counter() - started
        return parts, nbytes

    def _read_stack(self, record: StackRecord) -> StackFile:
        """Hashed, unless it was before and did not change since."""
        known, index = self._indexes[record.name]
        mark = self._mark(record)
        if mark in _HASHED and mark == known:
            file = self._store.read_stack(record, known=index)
            if mark == self._mark(record):
                return file
        mark = self._mark(record)
        file = self._store.read_stack(record)
        self._stats.bytes_hashed += record.file.nbytes
        if file.header != index.header:
            raise StoreError(
                f"{index.shard.path}: its header is another one than when the store was opened; "
                "open it again"
            )
        # a file that changed while it was read is hashed again the next time
        if mark is not None and mark == self._mark(record):
            _HASHED.add(mark)
            self._indexes[record.name] = mark, index
        return file

    def _reason(self, domain: str, error: Exception) -> str:
        """The error in words; what another process did to the store says more than a lost file."""
        try:
            now = Store.open(self._store.path).manifest.domain_named(domain)
        except (InputError, StoreError):
            return str(error)
        if now is None:
            return f"{self._store.path}: {domain} was removed from the store while it was open"
        hashes = [[stack.file.sha256 for stack in s] for s in (now.stacks, self.records(domain))]
        if hashes[0] != hashes[1]:
            return (
                f"{self._store.path}: {domain} was trained again while the store was open; "
                "open it again to use the new stacks"
            )
        return str(error)

    def _mark(self, record: StackRecord) -> FileMark | None:
        path = self._store.path / record.file.file
        try:
            s = os.stat(path)
        except OSError:
            return None
        times = s.st_mtime_ns, s.st_ctime_ns
        return str(path), record.file.sha256, s.st_dev, s.st_ino, s.st_size, *times

    def forget_pairs(self) -> None:
        """Read latent pairs again when a stack needs them."""
        self._pairs = SharedPairs(self._store)

    def check_dims(self, domain: str, places: dict[str, Dims]) -> None:
        """Raises: StoreError where a stack is of other dims than the model's projections."""
        for header in self.headers(domain):
            for path, p in header.projections.items():
                stack = Dims(p.input_dims, p.output_dims, p.base_experts)
                if path in places and places[path] != stack:
                    raise StoreError(
                        f"{self._store.path}: stack {header.name} is for {path} of {stack}, the "
                        f"model has {places[path]}; use the store's base"
                    )
