"""Plots of a comparison, where matplotlib is installed (the extra `plots`)."""

from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.experiments.compare.measures import SUMMARY
from mlxstacks.experiments.compare.report import CompareReport
from mlxstacks.study.render.figures import write_figures

_NOT_LOSSES = ("parameters", "steps", "seconds", "balance_loss")


def write_plots(directory: Path, report: CompareReport) -> tuple[list[str], list[str]]:
    """curves and differences, each as PNG and SVG; (names of the files, notes)."""
    if not any(cell.status == "trained" for cell in report.cells):
        return [], ["No plots: no cell was trained."]
    drawings = [
        ("curves", partial(_draw_curves, report=report)),
        ("differences", partial(_draw_differences, report=report)),
    ]
    return write_figures(directory, drawings)


def _draw_curves(figure: Any, report: CompareReport) -> None:
    """Validation loss of each domain by step, a line a cell, coloured by arm."""
    trained = [cell for cell in report.cells if cell.status == "trained"]
    domains = list(trained[0].curves)
    arms = list(report.budgets)
    figure.set_size_inches(4 * len(domains), 3.5)
    for ax, domain in zip(figure.subplots(1, len(domains), squeeze=False)[0], domains, strict=True):
        labelled: set[str] = set()
        for cell in trained:
            steps, losses = zip(*cell.curves[domain], strict=True)
            label = None if cell.arm in labelled else cell.arm
            labelled.add(cell.arm)
            ax.plot(steps, losses, color=f"C{arms.index(cell.arm)}", label=label, marker=".")
        ax.set_title(domain, fontsize="small")
        ax.set_xlabel("step")
        ax.legend(fontsize="small")
    figure.axes[0].set_ylabel("validation loss, nats a token")


def _draw_differences(figure: Any, report: CompareReport) -> None:
    """Arm less control of every loss, with intervals; the margin shaded."""
    others = [result for result in report.results if result.differences]
    names = [
        name
        for name in SUMMARY
        if name not in _NOT_LOSSES and any(name in result.differences for result in others)
    ]
    figure.set_size_inches(7, 1.5 + 0.4 * len(names) * max(1, len(others)))
    ax = figure.subplots()
    margin = report.settings["margin"]
    ax.axvspan(-margin, margin, alpha=0.15, color="grey", label="within the margin: no difference")
    ax.axvline(0, color="black", linewidth=0.8)
    for place, result in enumerate(others):
        for row, name in enumerate(names):
            found = result.differences.get(name)
            if found is None:
                continue
            half = 0.0 if found.high is None else found.high - found.mean
            y = row + 0.2 * place
            label = result.arm if row == 0 else None
            ax.errorbar(found.mean, y, xerr=half, fmt="o", color=f"C{place + 1}", label=label,
                        capsize=3)  # fmt: skip
    ax.set_yticks(range(len(names)), [SUMMARY[name] for name in names])
    ax.invert_yaxis()
    ax.set_xlabel(f"less {report.plan['control']}, nats a token (below 0: better)")
    if others:
        ax.legend(fontsize="small")
