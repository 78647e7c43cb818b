"""Live buffers counted in processes of their own, at the longest lead of evaluation.

    results = counted("tests.guard.count_worker", cases)

There, `Counter()` reads the counts of `mlxstacks.guard.counting`. Linux only, and only where a C++
compiler is. The library that makes counts the same in every run is built once, into the cache.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxstacks.guard import counting
from tests.warm import run_module

SOURCE = Path(__file__).with_name("longest_lead.cpp")


def available() -> bool:
    """Whether the library can be built: asked where tests are collected, which builds nothing."""
    return sys.platform == "linux" and counting.compiler() is not None


def library() -> Path:
    """The built library."""
    return counting.built(SOURCE, "longest-lead")


class Counter(counting.Counter):
    """Counts of this process; `longest_lead` wants it started with the library preloaded."""

    def __init__(self) -> None:
        super().__init__(counting.counter()._library)

    @contextmanager
    def longest_lead(self) -> Iterator[None]:
        """Evaluation runs as far ahead of computation as MLX lets it, however busy the machine."""
        process = ctypes.CDLL(None)
        process.lead(True)
        try:
            yield
        finally:
            process.lead(False)


def counted(module: str, cases: list[Any]) -> list[Any]:
    """Run `python -m module` with the library; JSON cases on stdin, a JSON result a line back."""
    preload = ":".join(filter(None, [str(library()), os.environ.get("LD_PRELOAD")]))
    code, told, complained = run_module(module, json.dumps(cases), preload)
    assert code == 0, complained
    results = [json.loads(line) for line in told.splitlines()]
    assert len(results) == len(cases), complained
    return results
