"""The C++ compiler: which one, with which options, and objects cached by all that makes them.

clang models Metal: `#pragma clang fp contract`, fused operations where contraction is on, calls
that keep their number. With g++ contraction `on` means `off`.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

from tests.emulator.cache import (
    cache_dir,
    content_hash,
    digest,
    objects_dir,
    prune,
    state_of,
    write_whole,
)

_HERE = Path(__file__).parent
_MACHINES = {"x86_64", "amd64", "arm64", "aarch64"}

# The language: C++17, no standard library, `1.0` is a float, pointers may be cast.
_COMMON = (
    "-std=gnu++17",
    "-fPIC",
    "-w",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-fno-math-errno",
    # The scheduler tells calls apart by the return addresses on the stack.
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",
    # A large frame touches every page, so that it cannot step over a guard page.
    "-fstack-clash-protection",
)
_CLANG = (
    "-Xclang",
    "-cl-single-precision-constant",
    "-fdeclspec",
    "-fconvergent-functions",
    # Equal calls in two branches stay two.
    *("-mllvm", "-sink-common-insts=false"),
    *("-mllvm", "-hoist-common-insts=false"),
    *("-mllvm", "-enable-tail-merge=false"),
)
_GCC = ("-fsingle-precision-constant",)
_CHECKS = (
    "signed-integer-overflow,shift,float-cast-overflow,alignment,bounds,"
    "integer-divide-by-zero,bool,unreachable,return,vla-bound"
)
# Contraction and traps of the variants that there are.
_PRECOMPILED = ((True, False), (False, True))
_LOADED = "runtime.so"  # shows that objects can be linked, and run from the cache folder
_SYSTEM_HEADERS = ("pthread.h", "setjmp.h", "signal.h", "stdint.h", "string.h", "sys/time.h")


class CompileError(RuntimeError):
    """The C++ compiler refused a kernel; the message holds what it said."""


@dataclass(frozen=True)
class Compiler:
    """path: the program; version: what it says of itself; fused: the processor has an fma."""

    path: str
    version: str
    fused: bool

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version

    @property
    def models_contraction(self) -> bool:
        """Whether `contraction=True` makes a difference."""
        return self.is_clang and self.fused

    def flags(self, contraction: bool, traps: bool) -> list[str]:
        flags = [*_COMMON, "-O1", *(_CLANG if self.is_clang else _GCC)]
        if self.fused and platform.machine().lower() in ("x86_64", "amd64"):
            flags.append("-mfma")
        # g++ would fuse across statements and does not know the pragma: never there.
        flags.append(f"-ffp-contract={'on' if contraction and self.is_clang else 'off'}")
        if traps:
            flags += [f"-fsanitize={_CHECKS}", "-ftrivial-auto-var-init=pattern"]
            trap = "-fsanitize-trap=all" if self.is_clang else "-fsanitize-undefined-trap-on-error"
            flags.append(trap)
        return flags


@cache
def find() -> Compiler | None:
    """clang++ where there is one, else g++, else None."""
    for name in ("clang++", "g++", "c++"):
        path = shutil.which(name)
        if path:
            told = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if told.returncode == 0:
                return Compiler(path, told.stdout.strip(), _has_fma())
    return None


def _has_fma() -> bool:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False  # not Linux: take the code that runs everywhere


@cache
def unavailable() -> str | None:
    """Why kernels cannot be run here, or None.

    Raises: CompileError when the compiler works and refuses the emulator's own text.
    """
    if platform.machine().lower() not in _MACHINES or os.name != "posix":
        return f"the Metal emulator has no context switch for {platform.machine()} {os.name}"
    found = find()
    if found is None:
        return "the Metal emulator needs a C++ compiler (clang++, else g++): none was found"
    try:
        with tempfile.TemporaryFile(dir=objects_dir()):
            ctypes.CDLL(str(tools().folder / _LOADED))
            return None
    except CompileError as error:
        if _works(found):
            raise
        return f"the Metal emulator cannot use {found.path}: {error}"
    except OSError as error:
        return f"the Metal emulator cannot use its cache folder: {error}"


def _works(found: Compiler) -> bool:
    """Whether a text of a few lines becomes an object, with all headers and options there are."""
    text = "".join(f"#include <{name}>\n" for name in _SYSTEM_HEADERS)
    try:
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix="build-") as work:
            source, output = Path(work) / "little.cpp", Path(work) / "little.so"
            source.write_text(text)
            for flavour in _PRECOMPILED:
                options = [*found.flags(*flavour), "-shared", str(source), "-o", str(output)]
                run([found.path, *options, "-lm"])
    except (CompileError, OSError):
        return False
    return True


@dataclass(frozen=True)
class Tools:
    """A folder with the headers, the scheduler as an object, and one prefix for each flavour."""

    folder: Path
    compiler: Compiler
    key: str

    def prefix(self, contraction: bool, traps: bool) -> list[str]:
        """Options that put metal_stdlib.h in front of a unit."""
        if self.compiler.is_clang:
            return ["-include-pch", str(self.folder / _pch_name(contraction, traps))]
        return ["-include", str(self.folder / "metal_stdlib.h")]


def _pch_name(contraction: bool, traps: bool) -> str:
    return f"metal_{int(contraction)}{int(traps)}.pch"


@cache
def tools() -> Tools:
    """Builds the folder once; other processes wait for the one that builds it."""
    compiler = find()
    if compiler is None:
        raise CompileError("no C++ compiler")
    sources = sorted([*_HERE.glob("metal_*.h"), *_HERE.glob("runtime*")])
    flags = [compiler.flags(c, t) for c in (False, True) for t in (False, True)]
    parts: list[str] = [compiler.path, compiler.version, repr(flags)]
    parts += [path.name + "\n" + path.read_text() for path in sources]
    key = digest(parts)
    folder = cache_dir() / f"tools-{key}"
    folder.mkdir(exist_ok=True)
    done = folder / "complete"
    with FileLock(folder / "lock"):
        # Something may have cleaned the folder of old files, or copied it without their times.
        names = [*(path.name for path in sources), "runtime.o", _LOADED]
        if compiler.is_clang:
            names += [_pch_name(*flavour) for flavour in _PRECOMPILED]
        files = [folder / name for name in names]
        state = state_of(files)
        if state is None or not done.exists() or done.read_text(errors="replace") != state:
            for path in sources:
                shutil.copyfile(path, folder / path.name)
            _build_tools(folder, compiler)
            write_whole(done, state_of(files) or "")
        os.utime(folder)
    prune()
    return Tools(folder, compiler, key)


def _build_tools(folder: Path, compiler: Compiler) -> None:
    source = str(folder / "runtime.cpp")
    options = ["-std=gnu++17", "-O2", "-fPIC", "-fno-omit-frame-pointer", "-fvisibility=hidden"]
    run([compiler.path, *options, "-c", source, "-o", str(folder / "runtime.o")])
    # Moved into its place: another process may have the old one loaded.
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        loaded = Path(work) / _LOADED
        run([compiler.path, "-shared", str(folder / "runtime.o"), "-o", str(loaded), "-lm"])
        os.replace(loaded, folder / _LOADED)
    if not compiler.is_clang:
        return
    header = ["-x", "c++-header", str(folder / "metal_stdlib.h")]
    for contraction, traps in _PRECOMPILED:
        output = str(folder / _pch_name(contraction, traps))
        run([compiler.path, *compiler.flags(contraction, traps), *header, "-o", output])


def build(text: str, folder: Path, contraction: bool, traps: bool) -> Path:
    """Compiles a unit into a shared object in `folder`, named by the hash of what is in it.

    Raises: CompileError with the compiler's words.
    """
    made = tools()
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as work:
        source, result = Path(work) / "unit.cpp", Path(work) / "unit.so"
        source.write_text(text)
        run(
            [
                made.compiler.path,
                *made.compiler.flags(contraction, traps),
                "-shared",
                *made.prefix(contraction, traps),
                "-x",
                "c++",
                str(source),
                "-x",
                "none",
                str(made.folder / "runtime.o"),
                "-o",
                str(result),
                "-lm",
            ]
        )
        output = folder / f"{content_hash(result)}.so"
        os.replace(result, output)
    return output


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise CompileError(said if len(said) < 6000 else said[:6000] + " ...")
