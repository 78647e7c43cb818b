"""A fuse as a result: what survived in each module, what other policies would give, the files."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from mlxstacks.command_line import command_line
from mlxstacks.fuse.fidelity import Fidelity
from mlxstacks.fuse.report import FuseReport, ModuleReport, StageReport
from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import Block, Cell, Column, Plot, Series, Table, Text
from mlxstacks.study.render.words import fixed, listed, number, percent
from mlxstacks.study.result import Result
from mlxstacks.study.write import environment

_FIGURES = (
    Column(name="steps", kind="number", digits=3),
    Column(name="correlation", kind="number", digits=3), Column(name="survival", kind="share"),
    Column(name="noise", kind="number", digits=3), Column(name="artifact", kind="share", digits=2),
)  # fmt: skip
_COLUMNS = (Column(name="module"), Column(name="policy"), *_FIGURES)
_LEGEND = (
    "steps: size of the trained change D in quantization steps; correlation: of the fused change F "
    "with D; survival: <F,D>/<D,D>; noise: in sizes of D; artifact: change at zero delta, in sizes "
    "of the weights"
)
_MOST_NAMED = 3


def result_of(report: FuseReport) -> Result:
    """The document of a fuse; what it was made from is added where it is written."""
    is_planned = report.status == "planned"
    estimated = f"Figures{' of the trained adapter' if report.zero_delta else ''} are estimates "
    return Result(
        kind="fuse",
        title="Fuse",
        question="How much of the adapter is in the fused weights, and what does the fuse do by "
        "itself?",
        status="planned" if is_planned else "done",
        outcome=_outcome(report),
        verdict=report.verdict,
        settings=report.settings,
        environment=environment(report.seconds),
        data=report.as_json(),
        blocks=_blocks(report),
        notes=(*report.notes, *([f"{estimated}from a sample of rows."] if is_planned else [])),
        failed_gate=report.failed_gate,
        directory=report.save_path,
        next_steps={} if is_planned else _next_steps(report),
    )


def _next_steps(report: FuseReport) -> dict[str, str]:
    steps = {"Try it": command_line("mlxstacks chat", model=report.save_path)}
    if report.settings["requant"] == "dequantize":
        steps["Other modules keep their bits; without"] = command_line(
            "mlx_lm.convert", hf_path=report.save_path, mlx_path=f"{report.save_path}-plain",
            dequantize=True,
        )  # fmt: skip
    return steps


def _outcome(report: FuseReport) -> str:
    total = report.total
    if total is None:
        return "planned" if report.status == "planned" else "not measured"
    if report.zero_delta or total.survival is None:
        if total.artifact is None:
            return "not measured"
        moved = f"the fuse alone moves weights by {percent(total.artifact)}"
        return moved if total.artifact else "no artifact"
    words = f"correlation {fixed(total.correlation)}, survival {percent(total.survival)}"
    words += f", noise {number(total.noise, 2)}"
    return f"{words}, artifact {percent(total.artifact)}" if total.artifact else words


def _blocks(report: FuseReport) -> tuple[Block, ...]:
    blocks: list[Block] = []
    if len(report.stages) > 1 and report.total is not None:
        row = ("sum of the adapters", "", *_cells(report.total))
        title = "Fidelity of all stages together"
        blocks.append(Table(id="together", title=title, columns=_COLUMNS, rows=(row,)))
    for place, stage in enumerate(report.stages, 1):
        which = f" (stage {place} of {len(report.stages)})" if len(report.stages) > 1 else ""
        blocks += _stage_blocks(stage, place, which, report.zero_delta)
    return (*blocks, _shards(report), Text(title="Files", paragraphs=_files(report)))


def _stage_blocks(stage: StageReport, place: int, which: str, zero: bool) -> list[Block]:
    modules = sorted(stage.modules, key=_worst_first)
    names = _short_names([module.path for module in modules])
    rows = [(names[m.path], m.policy, *_cells(m.figures)) for m in modules]
    if stage.total is not None:
        many = "module" if len(modules) == 1 else "modules"
        rows.insert(0, (f"total of {len(modules)} {many}", "", *_cells(stage.total)))
    estimates = tuple(
        (names[module.path], policy, *_cells(figures))
        for module in modules
        for policy, figures in module.tried.items()
    )
    plot = _plot(modules, names, zero, which, place)
    blocks: list[Block] = [] if plot is None else [plot]
    blocks.append(
        Table(
            id=f"fidelity-{place}", title=f"Fidelity by module{which}, worst modules first",
            columns=_COLUMNS, rows=tuple(rows), caption=f"Adapter: {stage.adapter}. {_LEGEND}.",
        )
    )  # fmt: skip
    blocks.append(_weights(modules, stage.total, which, place))
    if estimates:
        title = f"What other policies would give, estimated{which}"
        blocks.append(
            Table(id=f"estimates-{place}", title=title, columns=_COLUMNS, rows=estimates,
                  folded=True)
        )  # fmt: skip
    return blocks


def _worst_first(module: ModuleReport) -> tuple[float, float]:
    """By correlation; where there is none, as at zero delta, by what the fuse itself changed."""
    figures = module.figures
    if figures is None or figures.correlation is None:
        return 2.0, -(figures.artifact or 0.0) if figures else 0.0
    return figures.correlation, 0.0


def _cells(figures: Fidelity | None) -> tuple[Cell, ...]:
    if figures is None:
        return (None,) * len(_FIGURES)
    return (
        figures.delta_over_step, figures.correlation, figures.survival, figures.noise,
        figures.artifact,
    )  # fmt: skip


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Layer and last name of each module path, "3 down_proj"; with more names where that is not
    one module's alone.
    """
    for count in range(1, max((path.count(".") for path in paths), default=0) + 1):
        short = {path: _ending(path, count) for path in paths}
        if len(set(short.values())) == len(paths):
            return short
    return {path: path for path in paths}


def _ending(path: str, count: int) -> str:
    layer = re.search(r"layers\.(\d+)\.(.+)$", path)
    ending = ".".join((layer[2] if layer else path).split(".")[-count:])
    return f"{layer[1]} {ending}" if layer else ending


def _plot(
    modules: Sequence[ModuleReport], names: Mapping[str, str], zero: bool, which: str, place: int
) -> Plot | None:
    """Correlation and survival, the worst module first; of a control what the fuse changed."""
    keys = {"correlation": "correlation with the delta", "survival": "survival, <F,D>/<D,D>"}
    if zero:
        keys = {
            "artifact": "artifact, |change| / |weights|",
            "codes_changed_at_zero": "codes changed",
        }
    series, spans = [], []
    for key, label in keys.items():
        values = tuple(getattr(module.figures, key, None) for module in modules)
        series.append(Series(label=label, y=values))
        if known := [value for value in values if value is not None]:
            spans.append(f"{label}: {number(min(known), 3)} to {number(max(known), 3)}")
    if not spans:
        return None
    title = f"{'Change at zero delta' if zero else 'Fidelity'} by module{which}"
    return Plot(
        id=f"fidelity-plot-{place}", title=title, kind="series", series=tuple(series),
        categories=tuple(names[module.path] for module in modules),
        x_label="share" if zero else "correlation or survival",
        references={} if zero else {"all of the delta": 1.0},
        alt=f"{title}: a dot for each of {len(modules)} modules. {'; '.join(spans)}.",
    )  # fmt: skip


def _weights(
    modules: Sequence[ModuleReport], total: Fidelity | None, which: str, place: int
) -> Table:
    columns = (
        Column(name="module"), Column(name="bits before", kind="count"),
        Column(name="bits after", kind="count"), Column(name="bytes before", kind="bytes"),
        Column(name="bytes after", kind="bytes"), Column(name="base"),
        Column(name="codes changed", kind="share"), Column(name="at zero delta", kind="share"),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            m.path, m.bits_before, m.bits_after, m.bytes_before, m.bytes_after, m.base,
            m.figures.codes_changed if m.figures else None,
            m.figures.codes_changed_at_zero if m.figures else None,
        )
        for m in modules
    ]  # fmt: skip
    if total is not None:
        sizes = (sum(m.bytes_before for m in modules), sum(m.bytes_after for m in modules))
        codes = (total.codes_changed, total.codes_changed_at_zero)
        rows.insert(0, ("total", None, None, *sizes, "", *codes))
    return Table(
        id=f"weights-{place}", title=f"Bits and codes by module{which}", columns=columns,
        rows=tuple(rows), folded=True,
        caption="Shares of all codes of a module; of no bits: its weights are plain floats.",
    )  # fmt: skip


def _shards(report: FuseReport) -> Table:
    rows = tuple((f["name"], f["how"], f["written_bytes"]) for f in report.files)
    columns = (Column(name="file"), Column(name="how"), Column(name="written", kind="bytes"))
    return Table(
        id="files", title="Files of the model", columns=columns, rows=rows, folded=True,
        caption=f"The model grows by {bytes_in_words(report.extra_bytes)}; "
        f"{bytes_in_words(report.written_bytes)} were written.",
    )  # fmt: skip


def _files(report: FuseReport) -> tuple[str, str]:
    """The shards by what became of them, and what came along: which files hold weights without the
    adapter, what did not come.
    """
    is_planned = report.status == "planned"
    counts = Counter(str(file["how"]) for file in report.files)
    shards = ", ".join(f"{count} {how}" for how, count in sorted(counts.items()))
    written = f"{bytes_in_words(report.written_bytes)} of weights"
    names = [file.name for file in report.side_files if file.how is not None]
    weights = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    links = [f"{file.name} ({file.link})" for file in report.side_files if file.link]
    left = [f for f in report.side_files if f.reason not in (None, "hidden")]
    parts = [f"{'Would carry' if is_planned else 'Carried'} {len(names)} side files"]
    if weights:
        parts.append(f"unchanged weights: {listed(weights, _MOST_NAMED)}")
    if links:
        parts.append(f"behind links that leave the directory: {listed(links, _MOST_NAMED)}")
    if left:
        reasons = listed([f"{file.name} ({file.reason})" for file in left], _MOST_NAMED)
        parts.append(f"left out: {reasons}")
    return (
        f"Shards: {shards}; {written}{' to write' if is_planned else ' written'}.",
        "; ".join(parts) + ".",
    )
