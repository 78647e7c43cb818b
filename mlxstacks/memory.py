"""Device limits and byte counters, as plain numbers, and a guard for runs that meet them.

`resource_limit` is how many buffers Metal lets one process hold at once; a run that passes it dies
with `[metal::malloc] Resource limit exceeded`. MLX tells the number on a Metal device; elsewhere
the usual one is assumed and marked as such.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mlxstacks.errors import ResourceLimitError

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


def resource_report() -> dict[str, Any]:
    """Limits and counters of this process, now, as JSON values. MLX keeps to itself how many
    buffers it holds (0.32.4); `train --count-buffers` counts them.
    """
    default = device()
    return {
        "device": default.kind,
        "resource_limit": default.resource_limit,
        "resource_limit_known": default.resource_limit_known,
        **asdict(counters()),
        "resident_bytes": peak_resident_bytes(),
        "working_set_bytes": default.working_set_bytes,
    }


class ResourceGuard:
    """Refuses a batch before it is launched when its predicted buffers come too near the limit.

    predicted_buffers: tokens of the longest row -> live buffers of a step, as
        `guard.predict.Prediction.buffers_at`; `limit`: None asks the device.
    refuse_share: of the limit; a batch at or above it raises. force: only notes it.
    Law: what `check` lets through is below the line; `largest` is the most that it was asked about.
    """

    def __init__(
        self,
        predicted_buffers: Callable[[int], int],
        limit: int | None = None,
        refuse_share: float = 0.9,
        force: bool = False,
    ) -> None:
        if not 0 < refuse_share <= 1:
            raise ValueError(f"refuse_share is {refuse_share}; it is a share above 0, at most 1")
        self.limit = limit or device().resource_limit
        self.refuse_share, self.force = refuse_share, force
        self.largest = self.refused = 0
        self._predicted = predicted_buffers

    def check(self, tokens: int) -> int:
        """The predicted buffers of a batch whose rows have `tokens` tokens.

        Raises: ResourceLimitError at or above the line, unless forced.
        """
        buffers = self._predicted(tokens)
        self.largest = max(self.largest, buffers)
        if buffers >= self.refuse_share * self.limit:
            self.refused += 1
            if not self.force:
                raise ResourceLimitError(
                    f"a batch of rows of {tokens:,} tokens needs about {buffers:,} buffers, "
                    f"{buffers / self.limit:.0%} of the limit of {self.limit:,}; "
                    "shorten the rows, or see what `mlxstacks guard` suggests"
                )
        return buffers

    def report(self) -> dict[str, Any]:
        """Counters of the process, and what was predicted for it."""
        line = int(self.refuse_share * self.limit)
        predicted = {"largest_predicted_buffers": self.largest, "refused_batches": self.refused}
        return resource_report() | predicted | {"refused_from_buffers": line}


def _whole(value: Any) -> int | None:
    return int(value) if value else None


def bytes_in_words(count: int) -> str:
    """Bytes with a decimal unit, to three digits or to one: "41 MB", "1.28 GB", "21,104 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            value = count / size
            return f"{value:{',.0f' if abs(value) >= 999.5 else '.3g'}} {unit}"
    return f"{count} bytes"
