"""Memory for a launch: every buffer beside a page that must not be touched, poison around it."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

PAGE = mmap.PAGESIZE
_ALIGNMENT = 16  # of a float4; buffers of a GPU are aligned to a page

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_LARGEST_FRAME = 1 << 20  # how far below the stacks an address still tells of them

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_NOTHING = 0


def _map(size: int) -> int:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANON
    address = _libc.mmap(None, size, _READ_WRITE, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"the emulator cannot have {size} bytes")
    return int(address)


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


@dataclass(frozen=True)
class Buffer:
    """`size` bytes at `address` in pages from `low` to `high`, with guard pages outside."""

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

    def place(self, address: int) -> str | None:
        """Where `address` is, when it is next to this buffer."""
        if not self.low - PAGE <= address < self.high + PAGE:
            return None
        if address < self.address:
            return f"{self.address - address} bytes before the start of {self.name}"
        offset = address - self.address
        if offset >= self.size:
            return f"{offset - self.size} bytes past the end of {self.name} ({self.size} bytes)"
        return f"byte {offset} of {self.name}, which is read-only"


class Buffers:
    """Buffers for one launch, in a `with` block."""

    def __init__(self, names: Sequence[str], sizes: Sequence[int], guard: str, poison: int) -> None:
        """guard: "end" or "start", the side that touches the guard page; poison: a byte."""
        self.poison = poison
        self._size = PAGE + sum(_whole_pages(size) + PAGE for size in sizes)
        self._address = _map(self._size)
        self.buffers: list[Buffer] = []
        low = self._address + PAGE
        _protect(self._address, PAGE, _NOTHING)
        for name, size in zip(names, sizes, strict=True):
            high = low + _whole_pages(size)
            padded = -(-size // _ALIGNMENT) * _ALIGNMENT
            start = high - padded if guard == "end" else low
            ctypes.memset(low, poison, high - low)
            _protect(high, PAGE, _NOTHING)
            self.buffers.append(Buffer(name, start, size, low, high))
            low = high + PAGE

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
        for buffer in self.buffers:
            found = buffer.place(address)
            if found:
                return found
        return pools().place(address)

    def __enter__(self) -> "Buffers":
        return self

    def __exit__(self, *_: object) -> None:
        _libc.munmap(self._address, self._size)


class Pools:
    """What every launch uses again: stacks of threads, threadgroup memory, a stack for faults."""

    threads = 1024
    stack_bytes = 64 * 1024  # the lowest page of it is a guard page
    arrays = 16
    array_bytes = -(-32768 // PAGE) * PAGE
    signal_stack_bytes = 64 * 1024

    def __init__(self) -> None:
        self.stacks = _map(self.threads * self.stack_bytes)
        for i in range(self.threads):
            _protect(self.stacks + i * self.stack_bytes, PAGE, _NOTHING)
        piece = self.array_bytes + PAGE
        whole = _map(PAGE + self.arrays * piece)
        self.shared = whole + PAGE
        _protect(whole, PAGE, _NOTHING)
        for i in range(self.arrays):
            _protect(self.shared + i * piece + self.array_bytes, PAGE, _NOTHING)
        self.signal_stack = _map(self.signal_stack_bytes)

    def place(self, address: int) -> str:
        piece = self.array_bytes + PAGE
        if self.shared - PAGE <= address < self.shared + self.arrays * piece:
            return "beside a threadgroup array"
        if -_LARGEST_FRAME <= address - self.stacks < self.threads * self.stack_bytes:
            return f"outside the thread's stack of {self.stack_bytes} bytes"
        return f"address {address:#x}, near no buffer"


@cache
def pools() -> Pools:
    return Pools()
