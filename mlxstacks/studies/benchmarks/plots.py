"""Scores of the arms as points with their intervals, where matplotlib is installed."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.studies.benchmarks.means import MeanDifference
from mlxstacks.studies.benchmarks.report import Findings, TaskFinding
from mlxstacks.study.render.figures import Drawing, write_figures

_STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False,
}  # fmt: skip
# Blue, orange and so on that people with any colour vision tell apart (Okabe and Ito).
_COLOURS = ("#000000", "#E69F00", "#D55E00", "#56B4E9", "#0072B2", "#009E73", "#999999")
_WIDTH = 0.8


def write_plots(directory: Path, findings: Findings) -> tuple[list[str], list[str]]:
    """scores, and differences where arms are compared; (names of the files, notes)."""
    if not findings.tasks:
        return [], []
    drawings: list[Drawing] = [("scores", partial(draw_scores, findings=findings))]
    if findings.differences:
        drawings.append(("differences", partial(draw_differences, findings=findings)))
    return write_figures(directory, drawings, style=_STYLE)


def draw_scores(figure: Any, findings: Findings) -> None:
    """A group of bars for each task, a bar for each arm, Wilson's 95% intervals, a line at what
    guessing scores.
    """
    tasks = list(findings.tasks.items())
    arms = list(dict.fromkeys(arm for _, one in tasks for arm in one.arms))
    figure.set_size_inches(max(4.5, 1.5 + 0.22 * len(arms) * len(tasks)), 3.2)
    ax = figure.subplots()
    for place, arm in enumerate(arms):
        _bars(ax, [one for _, one in tasks], arm, place, len(arms))
    for x, (_, one) in enumerate(tasks):
        if one.asked.guess_rate is not None:
            guess = 100 * one.asked.guess_rate
            ax.plot([x - 0.45, x + 0.45], [guess, guess], color="0.4", lw=0.8, ls=":", zorder=3)
    names = [f"{one.asked.task.title}\nn = {len(one.asked.items)}" for _, one in tasks]
    turned = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(tasks) > 4 else {}
    ax.set_xticks(range(len(tasks)), names, **turned)
    ax.set_ylim(0, 100)
    ax.set_ylabel("right, %")
    ax.set_title(findings.standing.mark("score by mode, 95% intervals; dotted: guessing"))
    figure.legend(loc="outside right upper")


def _bars(ax: Any, tasks: Sequence[TaskFinding], arm: str, place: int, arms: int) -> None:
    width = _WIDTH / arms
    shown = [
        (x + (place - (arms - 1) / 2) * width, one.arms[arm].primary)
        for x, one in enumerate(tasks)
        if arm in one.arms
    ]
    bars = [(x, rate) for x, rate in shown if rate is not None]
    heights = [100 * rate.score for _, rate in bars]
    errors = [
        [100 * (rate.score - rate.interval.low) for _, rate in bars],
        [100 * (rate.interval.high - rate.score) for _, rate in bars],
    ]
    ax.bar(
        [x for x, _ in bars], heights, 0.92 * width, yerr=errors, label=arm,
        color=_COLOURS[place % len(_COLOURS)], alpha=0.85, ecolor="0.3", error_kw={"lw": 0.7},
    )  # fmt: skip


def draw_differences(figure: Any, findings: Findings) -> None:
    """Mean differences of pairs of arms with their intervals, around no difference."""
    pairs: Sequence[MeanDifference] = findings.differences[::-1]
    figure.set_size_inches(5.0, 1.0 + 0.26 * len(pairs))
    ax = figure.subplots()
    for y, one in enumerate(pairs):
        mean, interval = 100 * one.mean.mean, one.mean.interval
        apart = one.label != "not distinguishable"
        ax.plot([100 * interval.low, 100 * interval.high], [y, y], color="0.3", lw=1.2)
        ax.plot([mean], [y], "o", color="#0072B2" if apart else "0.5", ms=5)
    ax.axvline(0, color="0.6", lw=0.8, zorder=0)
    ax.set_yticks(range(len(pairs)), [f"{one.arm} - {one.control}" for one in pairs])
    ax.set_xlabel(f"points, mean of {_tasks(pairs)}, 95% interval; grey: not told from 0")
    ax.set_title(findings.standing.mark("paired differences"))


def _tasks(pairs: Sequence[MeanDifference]) -> str:
    counts = sorted({one.mean.tasks for one in pairs})
    shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{shown} task{'s' if counts[-1] > 1 else ''}"
