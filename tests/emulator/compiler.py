"""The C++ compiler: which one, with which options, and objects cached by all that makes them.

clang models Metal: `#pragma clang fp contract`, fused operations where contraction is on, calls
that keep their number. With g++ contraction `on` means `off`.
"""

import hashlib
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
    """Why kernels cannot be run here, or None."""
    if platform.machine().lower() not in _MACHINES or os.name != "posix":
        return f"the Metal emulator has no context switch for {platform.machine()} {os.name}"
    if find() is None:
        return "the Metal emulator needs a C++ compiler (clang++, else g++): none was found"
    try:
        tools()
    except CompileError as error:
        return f"the Metal emulator cannot build its runtime: {error}"
    return None


def cache_dir() -> Path:
    """$MLXSTACKS_TEST_CACHE, or a folder of this user's in the system's temporary folder."""
    chosen = os.environ.get("MLXSTACKS_TEST_CACHE")
    if chosen:
        return Path(chosen)
    folder = Path(tempfile.gettempdir()) / f"mlxstacks-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():  # objects in it are run
        raise CompileError(f"{folder} belongs to someone else; set MLXSTACKS_TEST_CACHE")
    return folder


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
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "complete"
    with FileLock(folder / "lock"):
        # Something may have cleaned the temporary folder of old files.
        whole = all((folder / path.name).exists() for path in [*sources, Path("runtime.o")])
        if not (done.exists() and whole):
            for path in sources:
                shutil.copyfile(path, folder / path.name)
            _build_tools(folder, compiler)
            done.touch()
    return Tools(folder, compiler, key)


def _build_tools(folder: Path, compiler: Compiler) -> None:
    source = str(folder / "runtime.cpp")
    options = ["-std=gnu++17", "-O2", "-fPIC", "-fno-omit-frame-pointer", "-fvisibility=hidden"]
    run([compiler.path, *options, "-c", source, "-o", str(folder / "runtime.o")])
    if not compiler.is_clang:
        return
    header = ["-x", "c++-header", str(folder / "metal_stdlib.h")]
    for contraction, traps in ((True, False), (False, True)):
        output = str(folder / _pch_name(contraction, traps))
        run([compiler.path, *compiler.flags(contraction, traps), *header, "-o", output])


def build(text: str, output: Path, contraction: bool, traps: bool) -> None:
    """Compiles a unit into a shared object at `output`, which appears complete or not at all.

    Raises: CompileError with the compiler's words.
    """
    made = tools()
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="build-") as work:
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
        os.replace(result, output)


def run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise CompileError(said if len(said) < 6000 else said[:6000] + " ...")


def digest(parts: Sequence[str]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(f"{len(part)}:".encode() + part.encode())
    return total.hexdigest()[:24]
