"""Prints what `mlxstacks fuse` did: a table a stage, the files, the verdict as the last line."""

import re
from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.command_line import command_line
from mlxstacks.fuse.fidelity import Fidelity
from mlxstacks.fuse.report import FuseReport, ModuleReport, StageReport
from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MOST_ROWS = 16
_COLUMNS = ("module", "how", "steps", "kept", "corr.", "noise", "artifact")
_LEGEND = (
    "steps: size of the delta in quantization steps; kept: share of the delta in the weights; "
    "corr.: realised with intended delta; noise: in sizes of the delta; "
    "artifact: change at zero delta, in sizes of the weights"
)


def render(console: "Console", report: FuseReport) -> None:
    """One table a stage (of many modules the worst), then files, notes and the verdict."""
    for number, stage in enumerate(report.stages, 1):
        title = f"stage {number}: {stage.adapter}" if len(report.stages) > 1 else None
        console.print(_stage_table(stage, title))
        hidden = len(stage.modules) - _MOST_ROWS
        if hidden > 0:
            console.print(f"... and {hidden} modules with a higher correlation; all in the report")
    if report.status == "planned":
        trained = " of the trained adapter" if report.zero_delta else ""
        console.print(f"figures{trained} are estimates from a sample of rows", style="dim")
    if report.total is None or report.total.survival is not None:
        console.print(_LEGEND, style="dim")
    console.print(_files_line(report), markup=False)
    console.print(_side_files_line(report), markup=False)
    for note in report.notes:
        console.print(note, markup=False)
    if report.status != "planned":
        output.next_step(console, "Try it", command_line("mlxstacks chat", model=report.save_path))
        if report.settings["requant"] == "dequantize":
            rest = command_line(
                "mlx_lm.convert", hf_path=report.save_path, mlx_path=f"{report.save_path}-plain",
                dequantize=True,
            )  # fmt: skip
            output.next_step(console, "Other modules keep their bits; without", rest)
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _stage_table(stage: StageReport, title: str | None) -> "Table":
    def correlation(module: ModuleReport) -> float:
        found = module.fidelity.correlation if module.fidelity else None
        return 2.0 if found is None else found

    shown = stage.modules
    if len(shown) > _MOST_ROWS:
        shown = sorted(shown, key=correlation)[:_MOST_ROWS]
    many = "module" if len(stage.modules) == 1 else "modules"
    total = [f"total of {len(stage.modules)} {many}", "", *_cells(stage.total)]
    footer = total if stage.total else None
    return output.table(_COLUMNS, [_row(m) for m in shown], title=title, footer=footer)


def _row(module: ModuleReport) -> list[output.Cell]:
    return [_short(module.path), module.policy, *_cells(module.fidelity or _estimate(module))]


def _short(path: str) -> str:
    """Layer and last two names of a module path: "3 switch_mlp.down_proj"."""
    found = re.search(r"layers\.(\d+)\.(.+)$", path)
    last = ".".join((found[2] if found else path).split(".")[-2:])
    return f"{found[1]} {last}" if found else last


def _estimate(module: ModuleReport) -> Fidelity | None:
    """The sample's figures for what was chosen: all that a dry run knows."""
    return module.tried.get(module.policy)


def _cells(found: Fidelity | None) -> list[output.Cell]:
    if found is None:
        return [None] * 5
    return [
        _number(found.delta_over_step),
        None if found.survival is None else f"{100 * found.survival:.1f}%",
        _number(found.correlation),
        _number(found.noise),
        None if found.artifact is None else f"{100 * found.artifact:.2g}%",
    ]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}" if abs(value) < 100 else f"{value:.3g}"


def _files_line(report: FuseReport) -> str:
    how: dict[str, int] = {}
    for file in report.files:
        how[str(file["how"])] = how.get(str(file["how"]), 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(how.items()))
    written = bytes_in_words(report.written_bytes)
    if report.status == "planned":
        return f"Would write {report.save_path}: shards {counts}; {written} of weights."
    return (
        f"Wrote {report.save_path} in {report.seconds:.1f} s: shards {counts}; "
        f"{written} of weights written."
    )


def _side_files_line(report: FuseReport) -> str:
    """What came along: how many files, which hold weights without the adapter, what did not."""
    names = [file.name for file in report.side_files if file.how is not None]
    weights = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    left = [f for f in report.side_files if f.reason not in (None, "hidden")]
    parts = [
        f"{'Would carry' if report.status == 'planned' else 'Carried'} {len(names)} side files"
    ]
    if weights:
        parts.append(f"unchanged weights: {_listed(weights)}")
    if left:
        parts.append(f"left out: {_listed([f'{file.name} ({file.reason})' for file in left])}")
    return "; ".join(parts) + "."


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
