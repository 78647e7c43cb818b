"""No label of a plot lies over another or leaves the figure, however long the names are.

Extents are those that matplotlib's renderer gives. Run: pytest tests/study/test_figures.py
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import pytest

from mlxstacks.study.render.drawings import Dot, draw_curves, draw_heat_map, draw_intervals
from mlxstacks.study.render.figures import LONGEST_TICK, fit, tick_texts

pytest.importorskip("matplotlib")

NAMES = [f"domain of mathematics and of physics, in its second round, number {n}" for n in range(5)]


def figures() -> Mapping[str, Callable[[Any], None]]:
    losses = [[1.0 for _ in NAMES]]
    dots = [Dot(name, n, n - 1, n + 1, name) for n, name in enumerate(NAMES)]
    cells = [[float(n) for n, _ in enumerate(NAMES)] for _ in NAMES]
    return {
        "legend": partial(
            draw_curves, curves={name: [(0.0, 2.0), (1.0, 1.0)] for name in NAMES}, xlabel="step",
            ylabel="loss, nats a token", title="t", joined=False,
        ),
        "ticks": partial(
            draw_heat_map, rows=["base"], columns=NAMES, values=losses, title="t", xlabel="x",
            ylabel="", unit="nats",
        ),
        "axis": partial(draw_intervals, dots=dots, xlabel="points, 95% " * 9, title="t " * 70),
        "map": partial(
            draw_heat_map, rows=NAMES, columns=NAMES, values=cells, title="t", xlabel="", ylabel="",
            unit="nats",
        ),
        "numbers": _many_numbers,
    }  # fmt: skip


def _many_numbers(figure: Any) -> None:
    figure.set_size_inches(3, 2)
    ax = figure.subplots()
    ax.set_xticks(range(30), [f"{1000 * n:,}" for n in range(30)])
    ax.set_yticks(range(30), [f"row {n}" for n in range(30)])
    ax.set_ylabel("a label that is longer than the side that it stands at")


def problems(figure: Any) -> list[str]:
    """Every text that is over another one, or not in the figure."""
    figure.draw_without_rendering()
    texts = {}
    found = []
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            ticks = tick_texts(axis)
            if ticks and ticks[0].get_rotation():
                found += [
                    f"{b.get_text()} at {a.get_text()}" for a, b in pairwise(ticks) if near(a, b)
                ]
                ticks = []
            texts.update({id(text): text for text in (*ticks, axis.label)})
        texts.update({id(text): text for text in (ax.title, ax._left_title)})
    for legend in figure.legends:
        texts.update({id(text): text for text in legend.get_texts()})
    shown = [text for text in texts.values() if text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    page = figure.bbox
    for name, box in boxes:
        if box.x0 < -3 or box.y0 < -3 or box.x1 > page.x1 + 3 or box.y1 > page.y1 + 3:
            found.append(f"{name} leaves the page")
    for (one, first), (two, second) in combinations(boxes, 2):
        wide = min(first.x1, second.x1) - max(first.x0, second.x0)
        high = min(first.y1, second.y1) - max(first.y0, second.y0)
        if wide > 2 and high > 2:
            found.append(f"{one} is over {two}")
    return found


def near(first: Any, second: Any) -> bool:
    """Whether two lines at the same angle are nearer to each other than a line is high."""
    distance = second.get_window_extent().x1 - first.get_window_extent().x1
    line = first.get_fontsize() * first.figure.dpi / 72
    return bool(abs(distance) * math.sin(math.radians(first.get_rotation())) < 0.9 * line)


@pytest.mark.parametrize("name", list(figures()))
def test_no_label_is_over_another_or_cut_off(name: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figures()[name](figure)
    fit(figure)
    assert problems(figure) == []


def test_the_check_sees_what_overlaps() -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    _many_numbers(figure)
    assert any(" is over " in problem for problem in problems(figure))


def test_names_that_are_too_long_end_in_dots_and_others_stay() -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    ax = figure.subplots()
    ax.set_yticks(range(2), [NAMES[0], "short"])
    fit(figure)
    first, second = (text.get_text() for text in ax.get_yticklabels())
    assert second == "short"
    assert first == f"{NAMES[0][: LONGEST_TICK - 1]}\u2026"
