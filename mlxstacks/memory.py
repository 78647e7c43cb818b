"""Device limits and byte counters, as plain numbers.

`resource_limit` is how many buffers Metal lets one process hold at once; a run that passes it dies
with `[metal::malloc] Resource limit exceeded`. MLX tells the number on a Metal device; elsewhere
the usual one is assumed and marked as such.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

# What Metal devices report; used where there is no device to ask.
USUAL_RESOURCE_LIMIT = 499_000


@dataclass(frozen=True, slots=True)
class Device:
    """MLX's default device.

    kind: "metal", "cuda" or "cpu".
    memory_bytes: of the device; of the machine where they are one, or on the CPU.
    working_set_bytes: what Metal recommends not to pass; None elsewhere.
    max_buffer_bytes: the largest single allocation on Metal; None elsewhere.
    resource_limit_known: False where `resource_limit` is the usual number, not an answer.
    """

    kind: str
    name: str
    architecture: str
    memory_bytes: int | None
    working_set_bytes: int | None
    max_buffer_bytes: int | None
    resource_limit: int
    resource_limit_known: bool


@dataclass(frozen=True, slots=True)
class Bytes:
    """What MLX's allocator says of itself."""

    active_bytes: int
    peak_bytes: int
    cache_bytes: int


def device() -> Device:
    """MLX's default device and its limits."""
    import mlx.core as mx

    kind = "cpu"
    if mx.default_device().type == mx.DeviceType.gpu:
        kind = "metal" if mx.metal.is_available() else "cuda"
    info: dict[str, Any] = dict(mx.device_info())
    memory = info.get("memory_size") or info.get("total_memory")
    limit = info.get("resource_limit")
    return Device(
        kind=kind,
        name=str(info.get("device_name", "unknown")),
        architecture=str(info.get("architecture", "unknown")),
        memory_bytes=int(memory) if memory else host_memory_bytes(),
        working_set_bytes=_whole(info.get("max_recommended_working_set_size")),
        max_buffer_bytes=_whole(info.get("max_buffer_length")),
        resource_limit=int(limit) if limit else USUAL_RESOURCE_LIMIT,
        resource_limit_known=bool(limit),
    )


def host_memory_bytes() -> int | None:
    """Main memory of this machine, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def counters() -> Bytes:
    """Bytes that MLX holds now, held at its peak, and keeps cached."""
    import mlx.core as mx

    return Bytes(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


def peak_resident_bytes() -> int:
    """The largest resident set of this process so far."""
    import resource

    # ru_maxrss counts KiB on Linux and bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _whole(value: Any) -> int | None:
    return int(value) if value else None


def bytes_in_words(count: int) -> str:
    """Bytes with a decimal unit and three digits: "41 MB", "1.28 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
