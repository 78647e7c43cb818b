"""Time and peak memory of MLX calls on the default device, fair to kernels of a few microseconds.

MLX runs behind the caller, so every clock reading follows a synchronisation. One timing holds many
calls, which take turns over enough different arrays that no cache could serve them; what a single
call costs with its launch and its wait is reported apart.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from benchmarks.timing import Spread, spread

Call = Callable[[], Sequence[mx.array]]

# Arrays that calls take turns over are larger than any last-level cache: an M3 Ultra has 96 MB, an
# H200 50 MB, servers up to some 300 MB.
CACHE_BYTES = 400_000_000
# Results that may wait unevaluated before they are handed to the device.
PENDING_BYTES, PENDING_CALLS = 64_000_000, 64
# Seconds that one timing should last at least: long against the clock and one synchronisation.
TIMING_SECONDS = 0.02
MOST_CALLS = 2000


@dataclass(frozen=True)
class Measured:
    """Seconds a call in a long row of calls, seconds of one call alone, bytes beyond its inputs."""

    seconds: Spread
    alone_seconds: Spread
    calls: int
    extra_bytes: int


def measure(runs: Mapping[str, Sequence[Call]], rounds: int) -> dict[str, Measured]:
    """Measure some implementations of one operation, taking turns.

    runs: by name the calls of one implementation, one for each set of inputs.
    rounds: timings of each; every round begins with another implementation.
    """
    peaks = {name: peak_bytes(calls[0]) for name, calls in runs.items()}
    counts = {name: _calls_for(calls) for name, calls in runs.items()}
    rows: dict[str, list[float]] = {name: [] for name in runs}
    alone: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        names = list(runs)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            seconds = seconds_of(runs[name], counts[name], start=index * counts[name])
            rows[name].append(seconds / counts[name])
            alone[name].append(seconds_of(runs[name], 1, start=index))
    return {
        name: Measured(spread(rows[name]), spread(alone[name]), counts[name], peaks[name])
        for name in runs
    }


def seconds_of(calls: Sequence[Call], count: int, start: int = 0) -> float:
    """Wall time of `count` calls in a row, beginning with `start` and going round."""
    mx.synchronize()
    began = time.perf_counter()
    pending: list[mx.array] = []
    waiting = 0
    for index in range(start, start + count):
        results = calls[index % len(calls)]()
        pending += results
        waiting += sum(result.nbytes for result in results)
        if waiting >= PENDING_BYTES or len(pending) >= PENDING_CALLS:
            mx.async_eval(pending)
            pending, waiting = [], 0
    mx.eval(pending)
    mx.synchronize()
    return time.perf_counter() - began


def peak_bytes(call: Call) -> int:
    """The most that MLX held during a call, results included, beyond what it held before."""
    mx.eval(call())  # the first one also makes constants that stay
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    results = call()
    mx.eval(results)
    mx.synchronize()
    return mx.get_peak_memory() - before


def _calls_for(calls: Sequence[Call]) -> int:
    """How many calls one timing holds. Warms up: the first calls compile and allocate."""
    seconds_of(calls, 2)
    single = seconds_of(calls, 3) / 3
    count = int(TIMING_SECONDS / max(single, 1e-6)) + 1
    # Once more with many: a single call is mostly launch and wait.
    single = seconds_of(calls, min(count, MOST_CALLS)) / min(count, MOST_CALLS)
    return max(3, min(MOST_CALLS, int(TIMING_SECONDS / max(single, 1e-6)) + 1))


def copy_bytes_per_second(size: int, rounds: int) -> Spread:
    """Bytes read and written per second by the faster of two ways to copy `size` bytes.

    Two ways, since it depends on the device which one its back-end does well: a concatenation,
    which only copies, and an elementwise operation that reads and writes the same amounts.
    """
    source = mx.random.randint(0, 256, (size // 4 * 4,), mx.uint8).view(mx.uint32)
    mx.eval(source)
    left, right = source[: size // 8], source[size // 8 :]
    ways: dict[str, list[Call]] = {
        "concatenate": [lambda: [mx.concatenate([left, right])]],
        "invert": [lambda: [mx.bitwise_invert(source)]],
    }
    measured = measure(ways, rounds)
    fastest = min((m.seconds for m in measured.values()), key=lambda seconds: seconds.median)
    moved = 2 * source.nbytes
    return Spread(moved / fastest.median, moved / fastest.p80, moved / fastest.p20)
