"""No label of a plot lies over another or leaves the figure, however long the names are.

Extents are those that matplotlib's renderer gives. Run: pytest tests/study/test_figures.py
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from mlxstacks.study.document import Plot, Series
from mlxstacks.study.render.figures import LONGEST_TICK, MOST_LINES, figure_of, fit, tick_texts

pytest.importorskip("matplotlib")

NAMES = [f"domain of mathematics and of physics, in its second round, number {n}" for n in range(5)]


def plot_of(kind: Any, series: Sequence[Series], **more: Any) -> Plot:
    return Plot(
        **{"id": "p", "title": "t", "kind": kind, "series": tuple(series), "alt": "x"} | more
    )


def plots() -> Mapping[str, Plot]:
    names, numbers = tuple(NAMES), tuple(map(float, range(len(NAMES))))
    each = [
        Series(label=name, y=tuple(n if i == k else None for k in range(5)))
        for i, (name, n) in enumerate(zip(names, numbers, strict=True))
    ]
    return {
        "legend": plot_of(
            "points", [Series(label=name, x=(0.0, 1.0), y=(2.0, 1.0)) for name in names],
            x_label="step", y_label="loss, nats a token",
        ),
        "ticks": plot_of(
            "heat map", [Series(label="base", y=(1.0,) * 5)], categories=names, x_label="x",
            unit="nats",
        ),
        "axis": plot_of(
            "intervals", each, categories=names, x_label="points, 95% " * 9, title="t " * 70
        ),
        "map": plot_of(
            "heat map", [Series(label=name, y=numbers) for name in names], categories=names,
            unit="nats",
        ),
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


def test_a_category_has_a_dot_of_each_series_with_a_value_there() -> None:
    series = (
        Series(label="better", y=(1.0, None, None)),
        Series(label="even", y=(None, 2.0, None)),
    )
    (ax,) = figure_of(plot_of("intervals", series, categories=("a", "b", "c"))).axes
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["a", "b", "c"]
    assert [text.get_text() for text in ax.texts] == ["1", "2", "not measured"]


@pytest.mark.parametrize("name", list(plots()))
def test_no_label_is_over_another_or_cut_off(name: str) -> None:
    assert problems(figure_of(plots()[name])) == []


def test_numbers_that_lie_over_each_other_get_room() -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    _many_numbers(figure)
    assert any(" is over " in problem for problem in problems(figure))
    fit(figure)
    assert problems(figure) == []


def test_every_line_is_drawn_apart_from_the_others_or_the_axis_says_so() -> None:
    lines = [Series(label=f"s{n}", x=(0.0, 1.0), y=(n, n + 1.0)) for n in range(MOST_LINES + 1)]
    (ax,) = figure_of(plot_of("lines", lines[:9], x_label="step")).axes
    assert len(ax.lines) == 9
    assert ax.get_xlabel() == "step"
    (ax,) = figure_of(plot_of("lines", lines, x_label="step")).axes
    assert len({(line.get_color(), line.get_marker()) for line in ax.lines}) == MOST_LINES
    assert f"the first {MOST_LINES} of {len(lines)}" in " ".join(ax.get_xlabel().split())


def test_rounding_makes_no_pattern() -> None:
    row = Series(label="a", y=(1e-16, 3e-13))
    ax, _ = figure_of(plot_of("heat map", [row], categories=("x", "y"))).axes
    assert len({patch.get_facecolor() for patch in ax.patches}) == 1


def test_names_that_are_too_long_end_in_dots_and_others_stay() -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    ax = figure.subplots()
    ax.set_yticks(range(2), [NAMES[0], "short"])
    fit(figure)
    first, second = (text.get_text() for text in ax.get_yticklabels())
    assert second == "short"
    assert first == f"{NAMES[0][: LONGEST_TICK - 1]}\u2026"
