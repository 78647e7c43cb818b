"""Counts of the buffers that MLX holds: what Metal limits, and MLX keeps to itself (0.32.4).

    buffers = counter()             # before a model is loaded: what is there already is not counted
    buffers.reset()
    mx.eval(step()); mx.synchronize()
    print(buffers.peak, buffers.live)

A small C++ library beside this file is put before the allocator of this process. It is compiled on
the first call, against the headers that MLX's wheel brings, and kept in the cache.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.files.disk import cache_directory

SOURCE = Path(__file__).with_name("count_buffers.cpp")


class Counter:
    """Buffers that MLX's allocator gave out in this process since counting began, all streams."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("live", "peak", "peak_bytes"):
            getattr(library, f"counted_{name}").restype = ctypes.c_int64

    def reset(self) -> None:
        """Begin new peaks at what is alive now."""
        self._library.counted_reset()

    @property
    def live(self) -> int:
        """Buffers alive now."""
        return int(self._library.counted_live())

    @property
    def peak(self) -> int:
        """The most buffers alive at once since `reset`."""
        return int(self._library.counted_peak())

    @property
    def peak_bytes(self) -> int:
        """The most bytes asked for and alive at once since `reset`."""
        return int(self._library.counted_peak_bytes())


def compiler() -> str | None:
    """The C++ compiler: `$CXX`, else the system's; None where there is none."""
    names = (os.environ.get("CXX"), "c++", "clang++", "g++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@functools.cache
def counter() -> Counter:
    """Count this process's buffers from now on; later calls return the same counter.

    Raises: InputError: no C++ compiler, an MLX that it does not fit, or CUDA, whose buffers do not
        all come from one allocator.
    """
    import mlx.core as mx

    if memory.device().kind == "cuda":
        raise InputError("live buffers cannot be counted on CUDA, and no limit is on them there")
    library = ctypes.CDLL(str(built(SOURCE, "count-buffers")))
    library.counted_install.restype = ctypes.c_char_p
    files = sorted((Path(mx.__file__).parent / "lib").glob("libmlx.[sd]*"))
    mlx_library = os.fsencode(files[0] if files else "libmlx")
    missing: bytes | None = library.counted_install(mlx_library)
    if missing:
        raise InputError(f"live buffers cannot be counted in MLX {version('mlx')}: "
                         + missing.decode())  # fmt: skip
    return Counter(library)


def built(source: Path, name: str) -> Path:
    """The library of a C++ source and this MLX, compiled where the cache has none.

    Raises: InputError: no C++ compiler, or an MLX that the source does not fit.
    """
    import mlx.core as mx

    key = hashlib.sha256(source.read_bytes() + version("mlx").encode()).hexdigest()[:16]
    target = cache_directory() / f"{name}-{key}.so"
    if target.is_file():
        return target
    program = compiler()
    if program is None:
        raise InputError(
            "counting live buffers takes a C++ compiler; on macOS `xcode-select --install` brings "
            "one, on Linux the package g++"
        )
    include = Path(mx.__file__).parent / "include"
    target.parent.mkdir(parents=True, exist_ok=True)
    # Under another name, then renamed: two processes may come at once.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        command = [program, "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{include}", str(source)]
        ended = subprocess.run(
            [*command, "-o", str(output), "-ldl"], capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise InputError(
                f"live buffers cannot be counted: {program} does not compile {source} for MLX "
                f"{version('mlx')}: {ended.stderr.strip()[:500]}"
            )
        output.rename(target)
    return target
