"""No label of a plot lies over another or leaves the figure, however long the names are.

Extents are those that matplotlib's renderer gives. Run: pytest tests/study/test_figures.py
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from mlxstacks.study.document import Plot, Series
from mlxstacks.study.render.figures import (
    LONGEST_TICK,
    MOST_LINES,
    SERIES,
    figure_of,
    fit,
    names_of_ticks,
    svg_of,
    tick_texts,
)

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
            x_label="step", y_label="loss, nats per token",
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
        **many(),
    }  # fmt: skip


def many() -> Mapping[str, Plot]:
    """As large models make them: 200 modules, 10 layers of 200 experts, 40 cells of a sweep."""
    names = tuple(f"language_model.model.layers.{n // 5}.mlp.module_{n % 5}" for n in range(200))
    values = tuple(n / 200 for n in range(200))
    lines = [Series(label=f"{name}, seed 0", x=(0.0, 1.0), y=(n, 1.0))
             for n, name in enumerate(names[:40])]  # fmt: skip
    rows = [Series(label=f"layer {n}", y=values) for n in range(10)]
    points = Series(label="refit", x=(0.0,) * 20 + (1e6,) * 20, y=values[:40])
    intervals = Series(label="mean", y=values, low=values, high=values)
    return {
        "200 modules": plot_of("series", [intervals], categories=names, x_label="correlation"),
        "40 intervals": plot_of(
            "intervals",
            [Series(label=f"rows of {n}", y=values[:20], low=values[:20], high=values[20:40])
             for n in range(2)],
            categories=names[:20], x_label="share",
        ),
        "200 experts": plot_of("heat map", rows, categories=names, unit="percent"),
        "40 lines": plot_of("lines", lines, x_label="step", y_label="loss"),
        "40 points": plot_of("frontier", [points], categories=names[:40], unit="bytes"),
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
        texts.update({id(text): text for text in ax.texts if text.get_visible()})
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


def test_an_svg_has_the_label_beside_the_widest_ticks_within_it() -> None:
    losses = Series(label="validation", x=(0.0, 3.0), y=(5.539011859893799, 3.9202293078104655))
    other = Series(label="training", x=(3.0,), y=(5.391812801361084,))
    svg = svg_of(plot_of("lines", [losses, other], x_label="step", y_label="loss, nats per token"))
    assert float(svg.partition("rotate(-90 ")[2].split()[0]) > 10


def test_numbers_that_lie_over_each_other_get_room() -> None:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    _many_numbers(figure)
    assert any(" is over " in problem for problem in problems(figure))
    fit(figure)
    assert problems(figure) == []


def test_steps_and_counts_have_whole_ticks() -> None:
    line = Series(label="loss", x=(3.0, 5.0, 7.0), y=(2.0, 1.0, 0.5))
    row = Series(label="passed", y=(7.0, 3.0))
    for plot in (
        plot_of("lines", [line]), plot_of("intervals", [row], categories=("a", "b"), form="{:.0f}"),
    ):  # fmt: skip
        (ax,) = figure_of(plot).axes
        assert all(tick == int(tick) for tick in ax.get_xticks())


def test_every_line_is_drawn_apart_from_the_others_or_the_legend_says_so() -> None:
    lines = [Series(label=f"s{n}", x=(0.0, 1.0), y=(n, n + 1.0)) for n in range(MOST_LINES + 1)]
    (ax,) = figure_of(plot_of("lines", lines[:9], x_label="step")).axes
    assert len(ax.lines) == 9
    assert ax.get_xlabel() == "step"
    figure = figure_of(plot_of("lines", lines, x_label="step"))
    named = figure.axes[0].lines[:MOST_LINES]
    assert len({(line.get_color(), line.get_marker()) for line in named}) == MOST_LINES
    assert figure.legends[0].get_texts()[-1].get_text() == "1 other"


def test_a_line_breaks_off_where_a_value_is_missing() -> None:
    line = Series(label="s", x=(0.0, 1.0, 2.0), y=(1.0, None, 3.0))
    (ax,) = figure_of(plot_of("lines", [line])).axes
    assert np.isnan(ax.lines[0].get_ydata()).tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["intervals", "series"])
def test_rows_have_a_label_for_what_they_are(kind: str) -> None:
    rows = [Series(label="s", y=(1.0, 2.0))]
    figure = figure_of(plot_of(kind, rows, categories=("a", "b"), y_label="expert"))
    assert figure.axes[0].get_ylabel() == "expert"


def test_points_at_one_place_lie_within_each_other_at_their_values() -> None:
    series = [Series(label=f"policy {n}", x=(0.0, 0.0), y=(70.0, 90.0)) for n in range(3)]
    figure = figure_of(plot_of("frontier", series, categories=("rank 2", "rank 4"), unit="bytes"))
    assert problems(figure) == []
    marked = [line for line in figure.axes[0].get_lines() if line.get_marker() != "None"]
    assert all(list(line.get_xdata()) == [0.0, 0.0] for line in marked)
    assert all(line.get_transform() == figure.axes[0].transData for line in marked)
    sizes = [line.get_markersize() for line in marked]
    assert sizes == sorted(set(sizes), reverse=True)
    names = {text.get_text() for text in figure.axes[0].texts if text.get_visible()}
    assert names == {"rank 2", "rank 4"}
    shown = [(h.get_fillstyle(), h.get_linestyle()) for h in figure.legends[0].legend_handles]
    assert shown == [(line.get_fillstyle(), line.get_linestyle()) for line in marked]


def test_names_beside_points_keep_clear_of_lines() -> None:
    """As of a fuse: a line of estimates, what was measured above it, and close to the reference."""
    names = ("3 bits", "4 bits", "5 bits", "dequantize", "this fuse")
    estimated = Series(label="estimated", x=(0, 49, 98, 614, 0), y=(0.54, 0.85, 0.957, 1.0, None))
    measured = Series(label="measured", x=(0, 0, 0, 0, 147), y=(None,) * 4 + (0.988,))
    plot = plot_of("frontier", (estimated, measured), categories=names,
                   y_label="correlation with the trained change", references={"all of it": 1.0},
                   x_label="bytes that the fuse adds")  # fmt: skip
    figure = figure_of(plot)
    figure.draw_without_rendering()
    [ax] = figure.axes
    shown = [text for text in ax.texts if text.get_visible()]
    assert {text.get_text() for text in shown} == {*names}
    lines = [line.get_path().transformed(line.get_transform()) for line in ax.lines]
    boxes = [text.get_window_extent() for text in shown]
    assert not any(line.intersects_bbox(box, filled=False) for line in lines for box in boxes)


def test_names_are_told_apart_where_they_are_cut() -> None:
    names = names_of_ticks(["layers.0.mlp.down_proj", "layers.0.mlp.gate_proj"], 14)
    assert names == ["layers\u2026wn_proj", "layers\u2026te_proj"]
    assert names_of_ticks(["one", "two of a long name"], 8) == ["one", "two of \u2026"]


def test_a_series_has_its_colour_whatever_is_measured_first() -> None:
    series = (Series(label="better", y=(None, 1.0)), Series(label="worse", y=(2.0, None)))
    figure = figure_of(plot_of("intervals", series, categories=("a", "b")))
    legend = figure.legends[0]
    entries = zip(legend.get_texts(), legend.legend_handles, strict=True)
    colours = {text.get_text(): handle.get_color() for text, handle in entries}
    assert colours == {"better": SERIES[0], "worse": SERIES[1]}
    dots = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert [line.get_color() for line in dots] == [SERIES[1], SERIES[0]]
    assert [text.get_text() for text in figure.axes[0].texts] == ["2", "1"]
    values = (0.6, 0.518, 1.0, 0.2, 0.3, 0.4, 0.5)
    many = [Series(label=f"{v}", y=(v,)) for v in values]
    figure = figure_of(plot_of("intervals", many, categories=("a",)))
    assert [text.get_text() for text in figure.axes[0].texts] == [f"{v:.3f}" for v in values]
    handles = figure.legends[0].legend_handles
    assert len({(h.get_color(), h.get_marker()) for h in handles}) == len(values)


def test_limits_around_0_give_colours_of_two_sides_and_numbers_that_can_be_read() -> None:
    rows = [Series(label="a", y=(-1.0, 0.0, 1.0, None))]
    plot = plot_of(
        "heat map", rows, categories=("w", "x", "y", "z"), limits=(-1.0, 1.0), form="{:+.2f}"
    )
    ax, bar = figure_of(plot).axes
    assert [text.get_text() for text in ax.texts] == ["-1.00", "+0.00", "+1.00", "\u00d7"]
    assert [text.get_color() for text in ax.texts[:3]] == ["#ffffff", "#000000", "#ffffff"]
    low, middle, high, _ = (patch.get_facecolor() for patch in ax.patches)
    assert low[2] > low[0] and high[0] > high[2] and min(middle[:3]) > 0.9  # noqa: PT018
    assert "purple" in bar.get_ylabel()


def test_a_map_of_yes_and_no_has_two_shades() -> None:
    rows = [Series(label="a", y=(0.0, 1.0, 1.0))]
    plot = plot_of("heat map", rows, categories=("x", "y", "z"), limits=(0.0, 1.0), unit="1 passed")
    _, bar = figure_of(plot).axes
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "1"]
    assert bar.get_ylabel() == "1 passed"


def test_rounding_makes_no_pattern() -> None:
    row = Series(label="a", y=(1e-16, 3e-13))
    ax, _ = figure_of(plot_of("heat map", [row], categories=("x", "y"))).axes
    assert len({patch.get_facecolor() for patch in ax.patches}) == 1


def test_names_that_are_too_long_end_in_dots_and_others_stay() -> None:
    rows = [Series(label="a", y=(1.0, 2.0))]
    (ax,) = figure_of(plot_of("series", rows, categories=(NAMES[0], "short"))).axes
    first, second = (text.get_text() for text in ax.get_yticklabels())
    assert second == "short"
    assert first == f"{NAMES[0][: LONGEST_TICK - 1]}\u2026"


@pytest.mark.parametrize("kind", ["lines", "points", "series", "frontier", "intervals"])
def test_references_and_limits_are_drawn(kind: str) -> None:
    placed, named = kind in ("lines", "points", "frontier"), kind not in ("lines", "points")
    plot = plot_of(
        kind, [Series(label="a", x=(0.0, 1.0) if placed else (), y=(2.0, 1.0))],
        categories=("u", "v") if named else (), references={"chance": 1.5}, limits=(0.0, 4.0),
    )  # fmt: skip
    figure = figure_of(plot)
    (ax,) = figure.axes
    limits = ax.get_ylim() if placed else ax.get_xlim()
    assert limits == (0.0, 4.0)
    ends = [line.get_ydata() if placed else line.get_xdata() for line in ax.lines]
    assert any([*map(float, end)] == [1.5, 1.5] for end in ends)
    legends = [*figure.legends, *filter(None, [ax.get_legend()])]
    assert "chance" in [text.get_text() for legend in legends for text in legend.get_texts()]
