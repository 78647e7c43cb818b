"""How many buffers MLX really holds: its allocator wrapped by a small preloaded library.

    results = counted("tests.guard.count_worker", cases)     # in a process of its own

There, `Counter()` reads the counts. Linux only, and only where a C++ compiler is; `library()` is
None elsewhere. The library is built once into the cache of the tests.
"""

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.warm import run_module

SOURCE = Path(__file__).with_suffix(".cpp")


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def available() -> bool:
    """Whether `library()` can be built: asked where tests are collected, which builds nothing."""
    return sys.platform == "linux" and _compiler() is not None


def library() -> Path | None:
    """The built library, or None where it cannot be."""
    compiler = _compiler()
    if not available() or compiler is None:
        return None
    key = hashlib.sha256(SOURCE.read_bytes() + version("mlx").encode()).hexdigest()[:16]
    target = _cache() / f"counting-allocator-{key}.so"
    if not target.is_file():
        _build(compiler, target)
    return target


def _cache() -> Path:
    home = os.environ.get("MLXSTACKS_CACHE") or Path.home() / ".cache" / "mlxstacks"
    Path(home).mkdir(parents=True, exist_ok=True)
    return Path(home)


def _build(compiler: str, target: Path) -> None:
    """Compile under another name, then rename: two processes may come at once."""
    import mlx.core as mx

    include = Path(mx.__file__).parent / "include"
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include}"]
        subprocess.run([*command, str(SOURCE), "-o", str(made), "-ldl"], check=True)
        made.rename(target)


class Counter:
    """Counts of this process, which was started with the library preloaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        for name in ("live", "peak", "peak_bytes"):
            getattr(self._library, f"counted_{name}").restype = ctypes.c_int64

    def reset(self) -> None:
        """Begin a new peak with what is alive now."""
        self._library.counted_reset()

    @contextmanager
    def longest_lead(self) -> Iterator[None]:
        """Evaluation runs as far ahead of computation as MLX lets it, however busy the machine."""
        self._library.counted_lead(True)
        try:
            yield
        finally:
            self._library.counted_lead(False)

    @property
    def live(self) -> int:
        return int(self._library.counted_live())

    @property
    def peak(self) -> int:
        return int(self._library.counted_peak())

    @property
    def peak_bytes(self) -> int:
        return int(self._library.counted_peak_bytes())


def counted(module: str, cases: list[Any]) -> list[Any]:
    """Run `python -m module` with the library; JSON cases on stdin, a JSON result a line back."""
    built = library()
    assert built is not None
    before = os.environ.get("LD_PRELOAD")
    preload = str(built) if not before else f"{built}:{before}"
    code, told, complained = run_module(module, json.dumps(cases), preload)
    assert code == 0, complained
    results = [json.loads(line) for line in told.splitlines()]
    assert len(results) == len(cases), complained
    return results


if __name__ == "__main__":
    print(library() or "no counting allocator here: it needs Linux and a C++ compiler")
