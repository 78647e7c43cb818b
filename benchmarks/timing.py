"""Run commands side by side and say what they cost: time, peak memory, bytes written.

Nothing is measured here that is not printed with its spread. Each run is a process of its own, so
that start-up counts and memory is that of the process.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """One run of a process."""

    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


# Starts the command from a process of a few megabytes: on Linux the peak of a process counts what
# its parent held when it forked, even after exec.
_LAUNCHER = """
import json, os, sys, time
started = time.perf_counter()
process = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
wall = time.perf_counter() - started
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps([os.waitstatus_to_exitcode(status), wall, cpu, usage.ru_maxrss]), file=sys.stderr)
"""


def run_process(command: Sequence[str]) -> Cost:
    """Run a command to its end. Raises RuntimeError with its output when it fails."""
    os.sync()  # what an earlier run left unwritten is not this run's work
    launched = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *command]
    done = subprocess.run(launched, capture_output=True, text=True, check=True)
    code, wall, cpu, peak = json.loads(done.stderr.splitlines()[-1])
    if code:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    # ru_maxrss counts KiB on Linux and bytes on macOS.
    return Cost(wall, cpu, peak * (1 if sys.platform == "darwin" else 1024))


def alternate(
    runs: Mapping[str, Callable[[], Cost]], rounds: int, say: Callable[[str], None]
) -> dict[str, list[Cost]]:
    """Costs by name, the runs taking turns so that a slow minute hits all of them.

    Each round begins with another one, so that none always runs in the wake of the same.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for index in range(rounds):
        names = list(runs)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            cost = runs[name]()
            costs[name].append(cost)
            say(
                f"round {index + 1}/{rounds} {name}: {cost.wall_seconds:.2f} s, "
                f"{cost.peak_bytes / 1e6:.0f} MB"
            )
    return costs


@dataclass(frozen=True)
class Spread:
    """Median with the 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def spread(values: Sequence[float]) -> Spread:
    """Median, p20 and p80 of a few values."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Spread(statistics.median(values), fifths[0], fifths[3])


def new_bytes(directory: Path, source: Path) -> int:
    """Bytes of files in `directory` that are not hard links to files of `source`."""
    known = {file.stat().st_ino for file in source.iterdir()}
    return sum(
        file.stat().st_size for file in directory.iterdir() if file.stat().st_ino not in known
    )


def machine() -> dict[str, str | int]:
    """What a number depends on: processor, cores, versions, BLAS, commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx", "mlx-lm", "numpy")},
        "blas": "OpenBLAS preloaded" if "blas" in os.environ.get("LD_PRELOAD", "") else "MLX's own",
        "commit": commit or "unknown",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"  # the kernels' benchmark needs no mlx-lm
