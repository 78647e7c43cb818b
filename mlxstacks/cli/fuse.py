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

_MOST_ROWS = 16
_COLUMNS = ("module", "policy", "steps", "correlation", "survival", "noise", "artifact")
_LEGEND = (
    "steps: size of the trained change D in quantization steps; correlation: of the fused change F "
    "with D; survival: <F,D>/<D,D>; noise: in sizes of D; artifact: change at zero delta, in sizes "
    "of the weights"
)


def render(console: "Console", report: FuseReport) -> None:
    """One table a stage (of many modules the worst), then files, notes and the verdict."""
    for number, stage in enumerate(report.stages, 1):
        title = f"stage {number}: {stage.adapter}" if len(report.stages) > 1 else None
        console.print(_stage_table(stage, title))
        hidden = len(stage.modules) - _MOST_ROWS
        if hidden > 0:
            rest = "changed less"
            if any(m.figures and m.figures.correlation is not None for m in stage.modules):
                rest = "have a correlation at least as high"
            console.print(f"{hidden} more modules {rest}; --json has all of them")
    if len(report.stages) > 1 and report.total is not None:
        row: list[output.Cell] = ["sum of the adapters", "", *_cells(report.total)]
        console.print(output.table(_COLUMNS, [row], title="all stages together"))
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


def _worst_first(module: ModuleReport) -> tuple[float, float]:
    """By correlation; where there is none, as at zero delta, by what the fuse itself changed."""
    figures = module.figures
    if figures is None or figures.correlation is None:
        return 2.0, -(figures.artifact or 0.0) if figures else 0.0
    return figures.correlation, 0.0


def _stage_table(stage: StageReport, title: str | None) -> output.Table:
    shown = sorted(stage.modules, key=_worst_first)[:_MOST_ROWS]
    names = _short_names(stage)
    rows = [_row(names[module.path], module) for module in shown]
    many = "module" if len(stage.modules) == 1 else "modules"
    total = [f"total of {len(stage.modules)} {many}", "", *_cells(stage.total)]
    footer = total if stage.total else None
    heading = f"{title}, worst modules first" if title else "worst modules first"
    return output.table(_COLUMNS, rows, title=heading, footer=footer)


def _row(name: str, module: ModuleReport) -> list[output.Cell]:
    return [name, module.policy, *_cells(module.figures)]


def _short_names(stage: StageReport) -> dict[str, str]:
    """Layer and last name of each module path, "3 down_proj"; with more names where that is not
    one module's alone.
    """
    paths = [module.path for module in stage.modules]
    for names in range(1, max((path.count(".") for path in paths), default=0) + 1):
        short = {path: _ending(path, names) for path in paths}
        if len(set(short.values())) == len(paths):
            return short
    return {path: path for path in paths}


def _ending(path: str, names: int) -> str:
    layer = re.search(r"layers\.(\d+)\.(.+)$", path)
    ending = ".".join((layer[2] if layer else path).split(".")[-names:])
    return f"{layer[1]} {ending}" if layer else ending


def _cells(found: Fidelity | None) -> list[output.Cell]:
    if found is None:
        return [None] * 5
    return [
        _number(found.delta_over_step),
        _number(found.correlation),
        None if found.survival is None else f"{100 * found.survival:.1f}%",
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
    if links := [f"{file.name} ({file.link})" for file in report.side_files if file.link]:
        parts.append(f"behind links that leave the directory: {_listed(links)}")
    if left:
        parts.append(f"left out: {_listed([f'{file.name} ({file.reason})' for file in left])}")
    return "; ".join(parts) + "."


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
