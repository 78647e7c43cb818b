"""Memory for a launch: buffers far apart in pages that must not be touched, poison around them."""

import ctypes
import mmap
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # of a float4; buffers of a GPU are aligned to a page

# Between two pieces of memory and at both ends. An index of 32 bits, with a sign or wrapped around,
# cannot carry four-byte elements over the first of these; the others are for where address space
# is scarce. Pages that nobody may touch cost address space and no memory.
GAPS = (16 << 30, 1 << 30, 64 << 20, 1 << 20, PAGE)
_LARGEST_SHARE = 8  # an area takes at most this part of a limit on address space

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

# Python's mmap module does not have these everywhere.
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x40 if sys.platform == "darwin" else 0x4000
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NOTHING = 0


def _map(size: int, protection: int, flags: int = 0, at: int | None = None) -> int | None:
    """The address of `size` new bytes, or None when the system has no room for them."""
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANON
    address = _libc.mmap(at, size, protection, flags, -1, 0)
    return None if address in (None, ctypes.c_void_p(-1).value) else int(address)


def _protect(address: int, size: int, protection: int) -> None:
    if _libc.mprotect(address, size, protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")


def bytes_at(address: int, size: int) -> np.ndarray:
    """The bytes there, not a copy of them."""
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _whole_pages(size: int) -> int:
    return max(1, -(-size // PAGE)) * PAGE


class Area:
    """Pieces of whole pages in a row, `gap` bytes that nobody may touch around each of them.

    starts: the addresses of the pieces. The gap is the largest of GAPS that there is room for.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """Raises: MemoryError."""
        total = sum(sizes)
        self.address, self.gap, self.size = self._reserve(total, len(sizes) + 1)
        self.starts: list[int] = []
        start = self.address + self.gap
        for size in sizes:
            # Mapped anew: only what is not reserved without limit is refused when it is too much.
            if _map(size, _READ_WRITE, _MAP_FIXED, start) is None:
                self.close()
                raise MemoryError(f"the emulator cannot have {total} bytes")
            self.starts.append(start)
            start += size + self.gap

    @staticmethod
    def _reserve(total: int, gaps: int) -> tuple[int, int, int]:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        for gap in GAPS:
            size = total + gaps * gap
            scarce = limit != resource.RLIM_INFINITY and size * _LARGEST_SHARE > limit
            if scarce and gap != GAPS[-1]:
                continue
            address = _map(size, _NOTHING, _MAP_NORESERVE)
            if address is not None:
                return address, gap, size
        raise MemoryError(f"the emulator cannot have {total} bytes")

    def __contains__(self, address: int) -> bool:
        return self.address <= address < self.address + self.size

    def close(self) -> None:
        _libc.munmap(self.address, self.size)


@dataclass(frozen=True)
class Buffer:
    """`size` bytes at `address` in pages from `low` to `high`, with a gap on both sides."""

    name: str
    address: int
    size: int
    low: int
    high: int

    @property
    def bytes(self) -> np.ndarray:
        return bytes_at(self.address, self.size)

    def padding(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of its pages in front of it and behind it."""
        end = self.address + self.size
        return (
            bytes_at(self.low, self.address - self.low),
            bytes_at(end, self.high - end),
        )

    def distance(self, address: int) -> int:
        """From its pages to `address`, in bytes."""
        return max(self.low - address, address - self.high, 0)

    def place(self, address: int) -> str:
        """Where `address` is, seen from this buffer."""
        if address < self.address:
            return f"{self.address - address} bytes before the start of {self.name}"
        offset = address - self.address
        if offset >= self.size:
            return f"{offset - self.size} bytes past the end of {self.name} ({self.size} bytes)"
        return f"byte {offset} of {self.name}, which is read-only"


class Buffers:
    """Buffers for one launch, in a `with` block."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], guard: str, poison: int) -> None:
        """guard: "end" or "start", the side that touches the gap; poison: a byte.

        Raises: MemoryError.
        """
        self.poison = poison
        lengths = [_whole_pages(size) for size in sizes]
        self._area = Area(lengths)
        self.buffers: list[Buffer] = []
        for name, size, length, low in zip(names, sizes, lengths, self._area.starts, strict=True):
            padded = -(-size // _ALIGNMENT) * _ALIGNMENT
            start = low + length - padded if guard == "end" else low
            ctypes.memset(low, poison, length)
            self.buffers.append(Buffer(name, start, size, low, low + length))

    def freeze(self, buffer: Buffer) -> None:
        """Writing to it is a fault from now on."""
        _protect(buffer.low, buffer.high - buffer.low, mmap.PROT_READ)

    def spilled(self, buffer: Buffer) -> str | None:
        """What was written beside an output, or None."""
        before, after = buffer.padding()
        wrong = np.flatnonzero(before != self.poison)
        if wrong.size:
            return f"{before.size - wrong[-1]} bytes before the start of {buffer.name}"
        wrong = np.flatnonzero(after != self.poison)
        return f"{wrong[0]} bytes past the end of {buffer.name}" if wrong.size else None

    def place(self, address: int) -> str:
        if self.buffers and address in self._area:
            return min(self.buffers, key=lambda b: b.distance(address)).place(address)
        return pools().place(address)

    def __enter__(self) -> "Buffers":
        return self

    def __exit__(self, *_: object) -> None:
        self._area.close()


class Pools:
    """What every launch uses again: stacks of threads, threadgroup memory, a stack for faults.

    Stacks are neighbours, with one page that must not be touched between two of them: a thread
    can write far outside its local variables into those of another one, but not elsewhere.
    """

    threads = 1024
    stack_bytes = 64 * 1024  # the lowest page of it is a guard page
    arrays = 16
    array_bytes = -(-32768 // PAGE) * PAGE
    signal_stack_bytes = 64 * 1024

    def __init__(self) -> None:
        self._stacks = Area([self.threads * self.stack_bytes])
        self.stacks = self._stacks.starts[0]
        for i in range(self.threads):
            _protect(self.stacks + i * self.stack_bytes, PAGE, _NOTHING)
        self._arrays = Area([self.array_bytes] * self.arrays)
        self.shared, self.shared_gap = self._arrays.starts[0], self._arrays.gap
        self.signal_stack = Area([self.signal_stack_bytes]).starts[0]

    def place(self, address: int) -> str:
        if address in self._arrays:
            return "beside a threadgroup array"
        if address in self._stacks:
            return f"outside the thread's stack of {self.stack_bytes} bytes"
        return f"address {address:#x}, near no buffer"


@cache
def pools() -> Pools:
    return Pools()
