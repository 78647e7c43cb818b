"""Prints what `mlxstacks doctor` found."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.doctor import Health

if TYPE_CHECKING:
    from rich.console import Console

_MARKS = {"problem": "red", "slow": "yellow", "note": "dim"}


def render(console: "Console", health: Health) -> None:
    """Facts first, then the findings, the worst of them first."""
    from rich.padding import Padding
    from rich.text import Text

    device, system = health.device, health.system
    limit = f"{device.resource_limit:,} buffers"
    memory = health.main_memory_bytes
    facts = {
        "device": f"{device.name} ({device.kind})",
        "device memory": output.bytes_text(device.memory_bytes),
        "working set": output.bytes_text(device.working_set_bytes),
        "buffer limit": limit if device.resource_limit_known else f"{limit} (assumed)",
        "system": f"{system['system']}, {system['machine']}, {system['cores']} cores",
        "main memory": output.bytes_text(memory),
        "BLAS": health.blas + _speed(health.matmul_gflops),
        "C++ compiler": health.compiler,
        "python": system["python"],
        **{name: version or "not installed" for name, version in health.versions.items()},
    }
    if device.kind != "metal":
        del facts["working set"]
    console.print(output.details(facts))
    rows = [[disk.path, output.bytes_text(disk.free_bytes), disk.sharing] for disk in health.disks]
    console.print(output.table(["disk", "free", "unchanged shards"], rows))
    for finding in sorted(health.findings, key=lambda each: list(_MARKS).index(each.kind)):
        kind = (f"{finding.kind}: ", _MARKS[finding.kind])
        console.print(Text.assemble(kind, (finding.what, "bold")))
        for line in (f"because {finding.why}", finding.remedy):
            console.print(Padding(Text(line), (0, 0, 0, 2)))


def _speed(gflops: float | None) -> str:
    return "" if gflops is None else f", float32 matmul at {gflops:.1f} GFLOP/s"
