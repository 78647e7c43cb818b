"""Figures as files, where matplotlib is installed (the extra `plots`), no text over another."""

import io
import math
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxstacks.study.document import Plot, Series
from mlxstacks.study.render.drawings import (
    MOST_ROWS,
    STYLE,
    Dot,
    draw_curves,
    draw_heat_map,
    draw_intervals,
    draw_series,
)

FORMATS = ("png", "svg")
# Longer names of ticks are cut, with three dots; tables have them whole.
LONGEST_TICK = 34
_LEAST_PANEL_INCHES = 1.3
_TURN_DEGREES = 40
_MOST_PASSES = 5
_MOST_COLUMNS = 512
Drawing = tuple[str, Callable[[Any], None]]
"""(name of the file, what draws on an empty figure)"""


def write_figures(
    directory: Path,
    drawings: Iterable[Drawing],
    formats: Sequence[str] = FORMATS,
    *,
    dpi: int = 150,
    style: Mapping[str, Any] | None = None,
) -> tuple[list[str], list[str]]:
    """Every drawing in every format; (names of the files, notes).

    style: settings of matplotlib, in place of ours.
    Law: equal drawings give equal bytes (of one version of matplotlib).
    """
    try:
        import matplotlib as library
    except ImportError:
        return [], ["No plots: matplotlib is not installed; pip install 'mlxstacks[plots]'."]
    # No window, no date, fixed ids in the SVG.
    settings: dict[Any, Any] = {
        "backend": "Agg",
        "svg.hashsalt": "mlxstacks",
        **(STYLE if style is None else style),
    }
    names = []
    with library.rc_context(settings), warnings.catch_warnings():
        # Texts that leave no room for a plot, as a hostile file may hold, are drawn all the same.
        warnings.filterwarnings("ignore", message=".*axes sizes collapsed to zero")
        from matplotlib.figure import Figure

        for name, draw in drawings:
            figure = Figure(layout="constrained")
            draw(figure)
            fit(figure)
            for suffix in formats:
                options = {"metadata": {"Date": None}} if suffix == "svg" else {"dpi": dpi}
                figure.savefig(directory / f"{name}.{suffix}", **options)
                names.append(f"{name}.{suffix}")
    return names, []


def fit(figure: Any) -> None:
    """Cut, wrap and turn labels and make room until none lies over another or leaves the figure.

    Long names end in three dots, titles and labels of axes are wrapped to what they belong to,
    names below a plot are turned, and the figure grows where that is not enough.
    """
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            _shorten(axis)
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes)]
    for text in [text for legend in legends if legend for text in legend.get_texts()]:
        text.set_text(_cut(text.get_text()))
    for _ in range(_MOST_PASSES):
        figure.draw_without_rendering()
        wide, high = _wanted_inches(figure)
        changed = [_wrap(*each) for each in _texts(figure)]
        changed += [_turn(ax.xaxis) for ax in figure.axes]
        changed += [_stack(figure, legend) for legend in [*figure.legends]]
        if (wide, high) != tuple(figure.get_size_inches()):
            figure.set_size_inches(wide, high)
        elif not any(changed):
            break


def _shorten(axis: Any) -> None:
    """Names given to ticks; numbers are never long."""
    names = [text.get_text() for text in axis.get_ticklabels()]
    if any(len(name) > LONGEST_TICK for name in names):
        axis.set_ticklabels([_cut(name) for name in names])


def _cut(name: str) -> str:
    return name if len(name) <= LONGEST_TICK else f"{name[: LONGEST_TICK - 1]}\u2026"


def tick_texts(axis: Any) -> list[Any]:
    """The drawn names of the ticks within the axis' view, in their order on it."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    texts = [tick.label1 for tick in ticks if tick.label1.get_visible() and tick.label1.get_text()]
    place = 0 if axis.axis_name == "x" else 1
    return sorted(texts, key=lambda text: float(text.get_window_extent().get_points()[0][place]))


def crowding(axis: Any) -> float:
    """How much more room the names of the ticks need than they have; at most 1 where they fit."""
    texts = tick_texts(axis)
    place = 0 if axis.axis_name == "x" else 1
    worst = 0.0
    for first, second in pairwise(texts):
        one, two = (text.get_window_extent() for text in (first, second))
        size = (one.width + two.width, one.height + two.height)[place] / 2
        middles = [(box.x0 + box.x1, box.y0 + box.y1)[place] / 2 for box in (one, two)]
        if first.get_rotation() % 90:
            # Turned by the same angle, lines of text are as far apart as that angle leaves them.
            line = first.get_fontsize() * first.figure.dpi / 72
            size = (
                line
                * len(first.get_text().split("\n"))
                / math.sin(math.radians(first.get_rotation()))
            )
            middles = [box.x1 for box in (one, two)]
        worst = max(worst, size / max(1.0, abs(middles[1] - middles[0])))
    return worst


def _turn(axis: Any) -> bool:
    """Names below a plot that lie over each other stand aslant."""
    texts = tick_texts(axis)
    if crowding(axis) <= 1 or not texts or texts[0].get_rotation():
        return False
    for tick in axis.get_major_ticks():
        tick.label1.set(rotation=_TURN_DEGREES, ha="right", rotation_mode="anchor")
    return True


def _wanted_inches(figure: Any) -> tuple[float, float]:
    """The figure's size with room for names of ticks and for panels themselves."""
    wide, high = figure.get_size_inches()
    more_wide, more_high = 1.0, 1.0
    for ax in figure.axes:
        box = ax.get_window_extent()
        texts = tick_texts(ax.xaxis)
        if texts and texts[0].get_rotation():
            more_wide = max(more_wide, crowding(ax.xaxis))
        more_high = max(more_high, crowding(ax.yaxis))
        if hasattr(ax, "_colorbar"):
            continue
        lacking = _LEAST_PANEL_INCHES - box.width / figure.dpi
        if lacking > 0.01:
            columns = max(1, round(wide * figure.dpi / max(box.width, wide * figure.dpi / 3)))
            more_wide = max(more_wide, 1 + columns * lacking / wide)
        lacking = _LEAST_PANEL_INCHES / 2 - box.height / figure.dpi
        if lacking > 0.01 and len(tick_texts(ax.yaxis)) > 1:
            more_high = max(more_high, 1 + lacking / high)
    return float(wide * min(2.0, more_wide)), float(high * min(2.0, more_high))


def _texts(figure: Any) -> Iterable[tuple[Any, float, int]]:
    """(title or label, pixels that it may take, along which side of the page it is written)."""
    if figure._suptitle is not None:
        yield figure._suptitle, 0.98 * figure.bbox.width, 0
    for ax in figure.axes:
        box = ax.get_window_extent()
        room = box.width
        beside = any(legend.get_window_extent().x0 >= box.x1 for legend in figure.legends)
        if len(figure.axes) == 1 and not beside:
            middle = (box.x0 + box.x1) / 2
            room = 2 * min(middle, figure.bbox.width - middle)  # both are centred on the plot
        yield ax.title, room, 0
        yield ax._left_title, max(box.width, room / 2), 0
        yield ax.xaxis.label, room, 0
        yield ax.yaxis.label, box.height, 1


def _wrap(text: Any, room: float, side: int) -> bool:
    """Break a text that is longer than its room; whether it was."""
    box = text.get_window_extent()
    length = (box.width, box.height)[side]
    words = text.get_text()
    if not words or length <= max(room, 20.0):
        return False
    longest = max(map(len, words.split("\n")))
    wrapped = textwrap.fill(" ".join(words.split()), max(10, int(longest * room / length)))
    if wrapped == words:
        return False
    text.set_text(wrapped)
    return True


def _stack(figure: Any, legend: Any) -> bool:
    """A legend that is wider than its figure gets fewer columns; of one, a wider figure."""
    width = legend.get_window_extent().width
    if width <= figure.bbox.width:
        return False
    if legend._ncols > 1:
        labels = [text.get_text() for text in legend.get_texts()]
        legend.remove()
        figure.legend(
            legend.legend_handles, labels, loc="outside lower center",
            ncols=max(1, int(legend._ncols * figure.bbox.width / width)),
            title=legend.get_title().get_text() or None,
        )  # fmt: skip
    else:
        figure.set_size_inches(1.02 * width / figure.dpi, figure.get_size_inches()[1])
    return True


def draw_plot(plot: Plot) -> Callable[[Any], None]:
    """What draws a plot of a result on an empty figure."""
    names = [series.label for series in plot.series]
    values = [series.y for series in plot.series]
    if plot.kind == "heat map":
        return partial(
            draw_heat_map, rows=names[:MOST_ROWS], columns=plot.categories[:_MOST_COLUMNS],
            values=[row[:_MOST_COLUMNS] for row in values[:MOST_ROWS]], title=plot.title,
            xlabel=plot.x_label, ylabel=plot.y_label, unit=plot.unit, form=plot.form,
            limits=plot.limits,
        )  # fmt: skip
    if plot.kind in ("lines", "points"):
        curves = {series.label: list(_points(series)) for series in plot.series}
        return partial(
            draw_curves, curves=curves, xlabel=plot.x_label, ylabel=plot.y_label, title=plot.title,
            joined=plot.kind == "lines",
        )  # fmt: skip
    if plot.kind == "series":
        return partial(
            draw_series, labels=plot.categories, series=dict(zip(names, values, strict=True)),
            xlabel=plot.x_label, title=plot.title, references=plot.references,
        )  # fmt: skip
    low, high = plot.limits
    return partial(
        draw_intervals, dots=list(_dots(plot)), xlabel=plot.x_label, title=plot.title,
        references=plot.references, form=plot.form,
        limits=None if low is None or high is None else (low, high),
    )  # fmt: skip


def _points(series: Series) -> Iterator[tuple[float, float]]:
    for x, y in zip(series.x, series.y, strict=True):
        if y is not None:
            yield x, y


def _dots(plot: Plot) -> Iterator[Dot]:
    """All series of a category together, those that have a value where any has one."""
    for place, label in enumerate(plot.categories):
        measured = [series for series in plot.series if series.y[place] is not None]
        for series in measured or plot.series[:1]:
            ends = series.low or series.y, series.high or series.y
            low, high = (values[place] for values in ends)
            group = series.label if len(plot.series) > 1 else ""
            yield Dot(label, series.y[place], low, high, group)


def svg_of(plot: Plot) -> str:
    """A plot of a result as SVG. Raises: ImportError without matplotlib."""
    import matplotlib as library

    settings: dict[Any, Any] = {"svg.hashsalt": "mlxstacks", **STYLE}
    file = io.StringIO()
    with library.rc_context(settings):
        figure_of(plot).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def figure_of(plot: Plot) -> Any:
    """A plot of a result as a matplotlib figure."""
    import matplotlib as library
    from matplotlib.figure import Figure

    style: dict[Any, Any] = STYLE
    with library.rc_context(style):
        figure = Figure(layout="constrained")
        draw_plot(plot)(figure)
        fit(figure)
    return figure
