"""Counts of live buffers, where they can be had.

MLX shows no count of the buffers that its allocator holds (0.32.4). On Linux a small library that
is preloaded can put a counting allocator before MLX's own; `tests/counting_allocator.cpp` is one.
Where it is loaded, its functions are found in this process by name; elsewhere nothing is counted.
"""

import ctypes
import os
from pathlib import Path

from mlxstacks.errors import InputError


class Counter:
    """The counting allocator of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in _FUNCTIONS:
            getattr(library, name).restype = ctypes.c_int64

    def live(self) -> int:
        """Buffers alive now."""
        return int(self._library.counted_live())

    def peak(self) -> int:
        """The most buffers alive at once since `reset`."""
        return int(self._library.counted_peak())

    def peak_bytes(self) -> int:
        """The most bytes alive at once since `reset`."""
        return int(self._library.counted_peak_bytes())

    def reset(self) -> None:
        """Begin the peaks anew, at what is alive now."""
        self._library.counted_reset()


_FUNCTIONS = ("counted_live", "counted_peak", "counted_peak_bytes")


def counter() -> Counter | None:
    """The counter, or None in a process without a counting allocator."""
    library = ctypes.CDLL(None)
    return Counter(library) if hasattr(library, _FUNCTIONS[0]) else None


def preload(library: str | None) -> dict[str, str]:
    """Environment variables with which a new process loads the library first.

    Raises: InputError when there is no such file.
    """
    if library is None:
        return {}
    path = Path(library).expanduser().resolve()
    if not path.is_file():
        raise InputError(
            f"counting_library: {path} is no file; build it with `python -m "
            "tests.counting_allocator` in a clone, or leave the setting out"
        )
    if any(mark in str(path) for mark in " :"):
        raise InputError(f"counting_library: {path}: LD_PRELOAD takes no path with space or colon")
    others = [part for part in [os.environ.get("LD_PRELOAD")] if part]
    return {"LD_PRELOAD": ":".join([str(path), *others])}
