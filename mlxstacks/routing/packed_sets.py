"""Packed sets of domains, the least recently used one first to go.

A set is what one route needs: the stacks of its domains packed side by side at every projection,
without weights, so that routes that differ in weights alone share it.
"""

import ctypes
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from mlxstacks.errors import InputError
from mlxstacks.layers.packed import FrozenStack, Segment, pack_all
from mlxstacks.routing.stack_reader import DomainParts, ResidentStats

Key = tuple[str, ...]

# glibc alone has it: elsewhere large blocks go back by themselves.
_LIBC_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None


@dataclass(eq=False)
class PackedSet:
    """domains: in the store's order. segments: by path. leases: how many hold it."""

    domains: Key
    segments: dict[str, tuple[Segment, ...]] = field(default_factory=dict)
    leases: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in self.segments.values() for part in parts)

    def parts(self, domain: str) -> DomainParts:
        """The stacks of one domain, taken out. Law: packing them again gives the same bytes."""
        found: DomainParts = {}
        for path, segments in self.segments.items():
            stacks = [
                segment.stack(index)
                for segment in segments
                for index, stack_id in enumerate(segment.ids)
                if stack_id.domain == domain
            ]
            if stacks:
                found[path] = stacks
        return found


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

    def holding(self, domain: str) -> PackedSet | None:
        """A set with a domain: one that is leased, so that it stays, else the most recently used
        one, which `make_room` drops last.
        """
        found = [one for one in self if domain in one.domains]
        return next((one for one in found if one.leases), found[0] if found else None)

    def add(self, packed: PackedSet) -> None:
        self._sets[packed.domains] = packed

    def make_room(self, needed_bytes: int, reserved_bytes: int, what: str) -> None:
        """Drop sets that nobody holds until `needed_bytes` more fit beside `reserved_bytes`.

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
    domains: Key, found: Mapping[str, DomainParts], dtype: mx.Dtype | None
) -> PackedSet:
    """Pack the stacks of domains, in order. What `found` holds is taken out path by path, so that
    loose and packed stacks are not in memory together for more than one projection.
    """
    packed = PackedSet(domains)
    paths = dict.fromkeys(path for name in domains for path in found[name])
    for path in sorted(paths):
        stacks = [stack for name in domains for stack in found[name].pop(path, [])]
        packed.segments[path] = pack_all(_own_copies(stacks), dtype)
    return packed


def let_go(parts: DomainParts) -> None:
    """Copy parts out of the pack that they are views of, projection by projection: it may have been
    dropped, and would stay in memory whole until the last of them is packed.
    """
    for path, stacks in parts.items():
        parts[path] = [_own_copy(stack) for stack in stacks]


def _own_copies(stacks: Sequence[FrozenStack]) -> list[FrozenStack]:
    """Stacks that are alone in their shape are not copied by packing: as a view of a larger pack
    one would keep all of that in memory.
    """
    count = Counter(stack.shape for stack in stacks)
    return [_own_copy(s) if count[s.shape] == 1 else s for s in stacks]


def _own_copy(stack: FrozenStack) -> FrozenStack:
    # transposed, lora_b lies in memory as packs hold it on a CPU: the copy is one of blocks
    b = mx.contiguous(stack.lora_b.swapaxes(-1, -2)).swapaxes(-1, -2)
    router = None if stack.router is None else mx.contiguous(stack.router)
    a = mx.contiguous(stack.lora_a)
    mx.eval(a, b, router)
    return replace(stack, lora_a=a, lora_b=b, router=router)
