"""What this machine offers, and what will be slow or fail on it, with the reason and the remedy."""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from mlxstacks import memory
from mlxstacks.settings import Settings

if TYPE_CHECKING:
    from mlxstacks.study.document import Cell
    from mlxstacks.study.result import Result

PACKAGES = (
    "mlxstacks", "mlx", "mlx-lm", "numpy", "transformers", "safetensors", "huggingface_hub",
    "datasets", "scipy",
)  # fmt: skip
# The extra that brings each optional package, and what needs it.
OPTIONAL = {
    "matplotlib": ("plots", "plots"),
    "lm_eval": ("eval", "benchmarks of lm-evaluation-harness"),
}
# Float32 matmul in GFLOP/s below which the reference BLAS is at work.
SLOW_GFLOPS = 15.0
LOW_DISK_BYTES = 20_000_000_000
# What shares an unchanged shard instead of copying it, in the words of files.clone_or_link.
SHARED = ("cloned", "linked")
_KINDS = {"problem": "problem", "slow": "slow part", "note": "note"}


class DoctorSettings(Settings):
    """What to look at."""

    directory: Path = Field(Path("."), description="Directory where results will be written.")
    measure: bool = Field(True, description="Measure the speed of a float32 matmul (0.3 s).")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know. kind: of `_KINDS`; a problem fails."""

    kind: str
    what: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Disk:
    """Free space where something is written or read, and how whole files are shared there."""

    path: str
    free_bytes: int
    sharing: str | None


@dataclass(frozen=True)
class Health:
    """Everything that was looked at."""

    system: dict[str, str]
    main_memory_bytes: int | None
    device: memory.Device
    matmul_gflops: float | None
    blas: str
    compiler: str | None
    versions: dict[str, str | None]
    disks: list[Disk]
    findings: list[Finding]


def doctor(settings: DoctorSettings) -> "Result":
    """Facts, then the findings, the worst of them first."""
    from mlxstacks.study.document import Table, Text, counted
    from mlxstacks.study.result import Result

    health = look(settings)
    disks = [(disk.path, disk.free_bytes, disk.sharing) for disk in health.disks]
    kinds = [finding.kind for finding in health.findings]
    found = [counted(kinds.count(kind), _KINDS[kind]) for kind in _KINDS if kind in kinds]
    return Result(
        kind="doctor",
        title="This machine",
        status="done",
        outcome=", ".join(found) or "nothing that will be slow or fail",
        settings=settings.model_dump(mode="json"),
        data=asdict(health),
        blocks=(
            Table.of_facts("machine", "Machine", _facts(health)),
            Table.of_facts("versions", "Versions", {
                name: version or "not installed" for name, version in health.versions.items()
            }),
            Table.of("disks", "Disks",
                     {"disk": "text", "free": "bytes", "unchanged shards": "text"}, disks),
            *(
                Text(title=f"{f.kind}: {f.what}", paragraphs=(f"because {f.why}", f.remedy))
                for f in sorted(health.findings, key=lambda f: [*_KINDS].index(f.kind))
            ),
        ),
    )  # fmt: skip


def _facts(health: Health) -> dict[str, "Cell"]:
    device, system, speed = health.device, health.system, health.matmul_gflops
    assumed = "" if device.resource_limit_known else " (assumed)"

    def size(count: int | None) -> str:
        return "unknown" if count is None else memory.bytes_in_words(count)

    working_set = {"working set": size(device.working_set_bytes)} if device.kind == "metal" else {}
    return {
        "device": f"{device.name} ({device.kind})",
        "device memory": size(device.memory_bytes),
        **working_set,
        "buffer limit": f"{device.resource_limit:,} buffers{assumed}",
        "system": f"{system['system']}, {system['machine']}, {system['cores']} cores",
        "main memory": size(health.main_memory_bytes),
        "BLAS": health.blas + ("" if speed is None else f", float32 matmul at {speed:.1f} GFLOP/s"),
        "C++ compiler": health.compiler or "none",
        "python": system["python"],
    }


def look(settings: DoctorSettings) -> Health:
    """Look at device, libraries and disk. Writes only two small files that it removes again."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub_cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    health = Health(
        system={
            "system": f"{platform.system()} {platform.release()}",
            "machine": platform.machine(),
            "python": platform.python_version(),
            "cores": str(os.cpu_count()),
        },
        main_memory_bytes=memory.host_memory_bytes(),
        device=memory.device(),
        matmul_gflops=matmul_gflops() if settings.measure else None,
        blas=blas_in_use(),
        compiler=shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"),
        versions={name: _version(name) for name in (*PACKAGES, *OPTIONAL)},
        disks=[_disk(settings.directory), _disk(hub_cache)],
        findings=[],
    )
    health.findings.extend(findings_of(health))
    return health


def matmul_gflops(size: int = 768) -> float:
    """Speed of one (size, size) x (size, size) float32 matmul on the default device, best of 3."""
    import mlx.core as mx

    left = mx.full((size, size), 0.5, dtype=mx.float32)
    mx.eval(left @ left)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        mx.eval(left @ left)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best / 1e9


def blas_in_use() -> str:
    """The BLAS that this process has loaded for MLX: "accelerate", "openblas" or "reference"."""
    if platform.system() == "Darwin":
        return "accelerate"
    try:
        loaded = Path("/proc/self/maps").read_text()
    except OSError:
        return "unknown"
    # numpy and scipy bring an OpenBLAS of their own, which MLX does not see.
    foreign = ("numpy.libs", "scipy.libs")
    lines = [line for line in loaded.splitlines() if not any(name in line for name in foreign)]
    return "openblas" if any("openblas" in line for line in lines) else "reference"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _disk(path: Path) -> Disk:
    """Free space at a path or its nearest existing parent, and how a shard is shared there."""
    place = path.expanduser().resolve()
    while not place.is_dir():
        place = place.parent
    return Disk(str(path.expanduser()), shutil.disk_usage(place).free, _sharing(place))


def _sharing(directory: Path) -> str | None:
    """How an unchanged file is taken over in a directory, tried; None where nothing is writable."""
    from mlxstacks.files.side_files import clone_or_link

    try:
        with tempfile.TemporaryDirectory(prefix=".mlxstacks-doctor-", dir=directory) as scratch:
            source = Path(scratch) / "source"
            source.write_bytes(bytes(4096))
            return clone_or_link(source, Path(scratch) / "copy")
    except OSError:
        return None


def findings_of(health: Health) -> Iterator[Finding]:
    """What the facts mean for whoever works here."""
    on_cpu, speed = health.device.kind == "cpu", health.matmul_gflops
    if platform.system() == "Darwin" and health.system["machine"] != "arm64":
        yield Finding(
            "problem",
            "this Python runs under Rosetta",
            f"it was built for {health.system['machine']}, MLX needs arm64",
            "install an arm64 Python and make a new environment with it",
        )
    if on_cpu:
        yield Finding(
            "slow",
            "no GPU: everything runs on the CPU",
            "MLX finds neither a Metal nor a CUDA device",
            "fusing is fine here; train and chat with large models on a Mac",
        )
    cuda = [name for name in ("mlx-cuda-12", "mlx-cuda-13") if _version(name)]
    if _version("mlx-cpu") and cuda:
        yield Finding(
            "problem" if on_cpu else "note",
            f"mlx-cpu and {cuda[0]} are both installed",
            "they bring a library of the same name; the one unpacked last wins",
            f"pip uninstall -y mlx-cpu && pip install --force-reinstall --no-deps {cuda[0]}",
        )
    if on_cpu and health.blas == "openblas":
        measured = "" if speed is None else f" ({speed:.1f} GFLOP/s now)"
        yield Finding(
            "note",
            f"float32 matmul is fast{measured}; bfloat16, float16 and quantized ones are not",
            "MLX's CPU backend calls OpenBLAS for float32 alone",
            "compute in float32: `train` and all that answers do by default here (base: auto)",
        )
    elif on_cpu and speed is not None and speed < SLOW_GFLOPS:
        library = Path(f"/usr/lib/{platform.machine()}-linux-gnu/openblas-pthread/libblas.so.3")
        install = "" if library.exists() else "apt-get install libopenblas0-pthread; "
        yield Finding(
            "slow",
            f"float32 matmul at {speed:.1f} GFLOP/s",
            f"MLX uses the {health.blas} BLAS",
            f"{install}make targets preload it, elsewhere export LD_PRELOAD={library}",
        )
    if on_cpu and health.compiler is None:
        yield Finding(
            "problem",
            "no C++ compiler",
            "mx.compile builds its CPU kernels with one while it runs",
            "apt-get install g++, or on a Mac xcode-select --install",
        )
    for disk in health.disks:
        if disk.free_bytes < LOW_DISK_BYTES:
            yield Finding(
                "note",
                f"{disk.free_bytes / 1e9:.1f} GB free at {disk.path}",
                "a 3-bit Qwen3.5-35B-A3B has 15 GB, its source in bfloat16 70 GB",
                "write to another disk, or remove models that you no longer need",
            )
    here = health.disks[0]
    if here.sharing is None:
        yield Finding(
            "problem",
            f"{here.path} cannot be written",
            "results go to ./mlxstacks-out unless you name another place",
            "go to another directory, or give --save-path",
        )
    elif here.sharing not in SHARED:
        yield Finding(
            "slow",
            f"unchanged shards are {here.sharing} at {here.path}",
            "the file system can neither clone nor hard-link",
            "write to the disk that holds the model, best APFS, btrfs or xfs",
        )
    for name, (extra, use) in OPTIONAL.items():
        if health.versions[name] is None:
            yield Finding(
                "note",
                f"{name} is not installed",
                f"needed only for {use}",
                f"pip install 'mlxstacks[{extra}]'",
            )
