"""Plots of a sweep, where matplotlib is installed (the extra `plots`)."""

from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.stats import MeanInterval
from mlxstacks.studies.sweep.cells import CellResult
from mlxstacks.studies.sweep.report import SweepReport
from mlxstacks.studies.sweep.summary import MatrixRow, Point, point_name
from mlxstacks.study.render.figures import write_figures

_BRIGHT = 0.6


def write_plots(directory: Path, report: SweepReport) -> tuple[list[str], list[str]]:
    """survival and losses, each as PNG and SVG; (names of the files, notes)."""
    if not any(row.mean("peak_bytes") is not None for row in report.rows):
        return [], ["No plots: no cell was trained."]
    drawings = [
        ("survival", partial(_draw_survival, report=report)),
        ("losses", partial(_draw_losses, report=report)),
    ]
    return write_figures(directory, drawings)


def _points(report: SweepReport) -> list[Point]:
    return list(dict.fromkeys(row.point for row in report.rows))


def _draw_survival(figure: Any, report: SweepReport) -> None:
    """A matrix of rank by policy for each point: survival of the adapter in a fuse."""
    points = _points(report)
    policies = list(report.settings["policies"])
    figure.set_size_inches(1.5 + 1.1 * len(policies) * len(points), 1.5 + 0.5 * len(report.rows))
    axes = figure.subplots(1, len(points), squeeze=False)[0]
    for ax, point in zip(axes, points, strict=True):
        rows = [row for row in report.rows if row.point == point]
        values = [[_share(row.survival[policy]) for policy in policies] for row in rows]
        image = ax.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis")
        ax.set_xticks(range(len(policies)), policies)
        ax.set_yticks(range(len(rows)), [f"rank {row.rank}" for row in rows])
        ax.set_title(point_name(point), fontsize="small")
        for y, row in enumerate(rows):
            for x, policy in enumerate(policies):
                # viridis is bright at its upper end
                colour = "black" if _share(row.survival[policy]) > _BRIGHT else "white"
                ax.text(x, y, _cell_text(row, policy), ha="center", va="center", color=colour)
    figure.colorbar(image, ax=list(axes), label="survival, <F,D>/<D,D> (brighter: more)")


def _share(found: MeanInterval | None) -> float:
    return float("nan") if found is None else found.mean


def _cell_text(row: MatrixRow, policy: str) -> str:
    found = row.survival[policy]
    return "-" if found is None else f"{100 * found.mean:.0f}%"


def _draw_losses(figure: Any, report: SweepReport) -> None:
    """Validation loss by step, a line a cell, coloured by rank."""
    points = _points(report)
    figure.set_size_inches(5 * len(points), 4)
    axes = figure.subplots(1, len(points), squeeze=False, sharey=True)[0]
    ranks = sorted({row.rank for row in report.rows})
    for ax, point in zip(axes, points, strict=True):
        for result in report.results:
            if result.cell.point == point:
                _draw_curve(ax, result, ranks)
        ax.set_xlabel("step")
        ax.set_title(point_name(point), fontsize="small")
        if ax.get_lines():
            ax.legend(fontsize="small")
    axes[0].set_ylabel("validation loss, nats a token")


def _draw_curve(ax: Any, result: CellResult, ranks: list[int]) -> None:
    curve = result.figures.get("validation") or []
    steps = [record["step"] for record in curve]
    losses = [record["validation_loss"] for record in curve]
    if steps:
        colour = f"C{ranks.index(result.cell.rank)}"
        # one entry of the legend for all seeds of a rank
        known = {line.get_color() for line in ax.get_lines()}
        label = None if colour in known else f"rank {result.cell.rank}"
        ax.plot(steps, losses, color=colour, label=label, marker=".")
