"""Plots of results with matplotlib, where it is installed (the extra `plots`), and files of them.

Colours are of Okabe and Ito's palette, which colour-blind eyes tell apart, and every series has a
marker or dash of its own besides. The same colours stand in the page's style, where they change
with light and dark; see html.py. A figure is about as wide as a phone, and grows with its rows
until no text lies over another.
"""

import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlxstacks.study.document import Plot, Series
from mlxstacks.study.render.words import short

INK, RULE, PAPER = "#1b1f24", "#c9ced6", "#fefefe"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))
STYLE: dict[str, Any] = {
    "font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10, "legend.fontsize": 9,
    "xtick.labelsize": 9, "ytick.labelsize": 9,
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "savefig.facecolor": PAPER,
    "legend.facecolor": PAPER, "legend.edgecolor": RULE, "legend.framealpha": 1.0,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.edgecolor": RULE, "grid.color": RULE, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    # A stranger's dollar sign is no formula; letters stay letters in the SVG.
    "text.parse_math": False, "svg.fonttype": "none",
}  # fmt: skip
WIDTH = 4.4
FORMATS = ("png", "svg")
# Longer names of ticks are cut, with three dots; tables have them whole.
LONGEST_TICK = 34
# Beyond so many a plot cannot be read, which it says; its table has all.
MOST_ROWS, MOST_LINES, MOST_COLUMNS = 40, 36, 512
_MOST_NUMBERS = 400
# Values this near to each other differ by rounding: colours would make a pattern of it.
_NOISE = 1e-9
# cividis is bright at its upper end.
_BRIGHT = 0.55
_LEAST_PANEL_INCHES = 1.3
_TURN_DEGREES = 40
_MOST_PASSES = 5


def write_figures(
    directory: Path, plots: Mapping[str, Plot], formats: Sequence[str] = FORMATS
) -> tuple[list[str], list[str]]:
    """Every plot in every format, by the name of its files; (names of the files, notes).

    Law: equal plots give equal bytes (of one version of matplotlib).
    """
    names = []
    try:
        with _style():
            for name, plot in plots.items():
                figure = figure_of(plot)
                for suffix in formats:
                    options = {"metadata": {"Date": None}} if suffix == "svg" else {"dpi": 150}
                    figure.savefig(directory / f"{name}.{suffix}", **options)
                    names.append(f"{name}.{suffix}")
    except ImportError:
        return [], ["No plots: matplotlib is not installed; pip install 'mlxstacks[plots]'."]
    return names, []


def svg_of(plot: Plot) -> str:
    """A plot as SVG. Raises: ImportError without matplotlib."""
    file = io.StringIO()
    with _style():
        figure_of(plot).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def figure_of(plot: Plot) -> Any:
    """A plot as a matplotlib figure."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        _DRAW[plot.kind](figure, plot)
        # Of the figure, not of its axes: it may be as wide as all of it. `fit` wraps it:
        # matplotlib's own wrapping reads a dollar sign as a formula's, whatever text.parse_math
        # says.
        figure.suptitle(short(plot.title, 120), x=0.01, ha="left", fontsize=10)
        fit(figure)
    return figure


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib as library

    # Fixed ids in the SVG.
    settings: dict[Any, Any] = {"svg.hashsalt": "mlxstacks", **STYLE}
    with library.rc_context(settings), warnings.catch_warnings():
        # Texts that leave no room for a plot, as a hostile file may hold, are drawn all the same.
        warnings.filterwarnings("ignore", message=".*axes sizes collapsed to zero")
        yield


# --- drawing --------------------------------------------------------------------------------------


def _draw_intervals(figure: Any, plot: Plot) -> None:
    """A row a value, its interval as a whisker, its value as a number; references: dashed lines."""
    dots = list(_dots(plot))
    shown = dots[:MOST_ROWS]
    groups = list(dict.fromkeys(series.label for _, series, _ in shown))
    named = len(plot.series) > 1
    ax = _rows(figure, [label for label, _, _ in shown], groups if named else [], plot, 1.15, 0.27)
    for place, (_, series, index) in enumerate(shown):
        value = series.y[index]
        if value is None:
            ax.annotate("not measured", (0.01, place), xycoords=("axes fraction", "data"),
                        va="center", fontsize=9)  # fmt: skip
            continue
        style = groups.index(series.label) % len(SERIES)
        low, high = (series.low or series.y)[index], (series.high or series.y)[index]
        if low is not None and high is not None:
            ax.plot([low, high], [place, place], color=SERIES[style], linewidth=2.2, alpha=0.75)
        ax.plot([value], [place], marker=MARKERS[style], color=SERIES[style], markersize=6,
                linestyle="")  # fmt: skip
        ax.annotate(plot.form.format(value), (value, place), xytext=(0, 5), ha="center",
                    textcoords="offset points", va="bottom", fontsize=8)  # fmt: skip
    ax.set_ylim(len(shown) - 0.4, -0.75)
    ax.grid(axis="x")
    ax.set_xlabel(short(plot.x_label, 120) + _cut_note(len(shown), len(dots)))
    ax.margins(x=0.12)
    if None not in plot.limits:
        ax.set_xlim(*plot.limits)
    _legend(figure, groups if named else [], plot.references)


def _dots(plot: Plot) -> Iterator[tuple[str, Series, int]]:
    """(category, series, place) of all series of a category together: those that have a value
    where any has one.
    """
    for place, label in enumerate(plot.categories):
        measured = [series for series in plot.series if series.y[place] is not None]
        for series in measured or plot.series[:1]:
            yield label, series, place


def _draw_series(figure: Any, plot: Plot) -> None:
    """A row a category, in it a dot of each series."""
    labels = plot.categories[:MOST_ROWS]
    names = [series.label for series in plot.series]
    ax = _rows(figure, labels, names, plot, 1.2, 0.24)
    for number, series in enumerate(plot.series):
        # side by side, since equal values would hide each other
        off = 0.22 * (number - (len(names) - 1) / 2)
        dots = [(v, y + off) for y, v in enumerate(series.y[: len(labels)]) if v is not None]
        ax.plot([v for v, _ in dots], [y for _, y in dots], linestyle="", markersize=6,
                marker=MARKERS[number % len(MARKERS)], color=SERIES[number % len(SERIES)],
                alpha=0.9)  # fmt: skip
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid()
    ax.set_xlabel(short(plot.x_label, 120) + _cut_note(len(labels), len(plot.categories)))
    ax.margins(x=0.08)
    _legend(figure, names, plot.references, line="")


def _rows(
    figure: Any, labels: Sequence[str], groups: Sequence[str], plot: Plot, base: float, each: float
) -> Any:
    """Axes with a row a label and the plot's references. base, each: inches of height."""
    longest = max(map(len, labels), default=0)
    # long labels must not take the room of what they name
    width = WIDTH + 0.06 * max(0, min(LONGEST_TICK, longest) - 24)
    entries = len([name for name in (*groups, *plot.references) if name])
    figure.set_size_inches(width, base + each * len(labels) + 0.2 * ((entries + 1) // 2))
    ax = figure.subplots()
    for number, place in enumerate(plot.references.values()):
        ax.axvline(place, color=INK, linewidth=1.1, linestyle=DASHES[1 + number % 3], zorder=0.5)
    ax.set_yticks(range(len(labels)), [short(label, LONGEST_TICK) for label in labels])
    ax.set_axisbelow(True)
    return ax


def _legend(
    figure: Any, groups: Sequence[str], references: Mapping[str, float], line: Any = "-"
) -> None:
    """Below the plot, one entry for what each marker and line means."""
    from matplotlib.lines import Line2D

    entries: list[Any] = [
        Line2D([], [], color=SERIES[n % len(SERIES)], marker=MARKERS[n % len(MARKERS)],
               linestyle=line, label=short(name or "other", 40))
        for n, name in enumerate(groups)
    ]  # fmt: skip
    entries += [
        Line2D([], [], color=INK, linewidth=1.1, linestyle=DASHES[1 + n % 3], label=short(name, 40))
        for n, name in enumerate(references)
    ]
    _place_legend(figure, entries)


def _place_legend(figure: Any, entries: Sequence[Any]) -> None:
    """In two columns where their texts fit into the figure's width."""
    if entries:
        narrow = max(len(entry.get_label()) for entry in entries) <= 26
        figure.legend(handles=entries, loc="outside lower center", ncols=2 if narrow else 1)


def _draw_curves(figure: Any, plot: Plot) -> None:
    """A line a series, or its points alone. Colours come again with other dashes and markers."""
    shown, joined = plot.series[:MOST_LINES], plot.kind == "lines"
    figure.set_size_inches(WIDTH, 3.1 + 0.2 * ((len(shown) + 1) // 2))
    ax, entries = figure.subplots(), []
    for number, series in enumerate(shown):
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        mark = (number + number // len(SERIES)) % len(MARKERS)
        entries += ax.plot(
            [x for x, _ in points], [y for _, y in points], color=SERIES[number % len(SERIES)],
            linestyle=DASHES[mark] if joined else "", marker=MARKERS[mark], markersize=4,
            markevery=max(1, len(points) // 12) if joined else 1, label=short(series.label, 40),
        )  # fmt: skip
    ax.grid()
    ax.set_xlabel(short(plot.x_label, 120) + _cut_note(len(shown), len(plot.series)))
    ax.set_ylabel(short(plot.y_label, 120))
    if len(shown) > 1:
        _place_legend(figure, entries)


def _draw_heat_map(figure: Any, plot: Plot) -> None:
    """A cell a value, with its number where there is room; a crossed cell is not measured."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from matplotlib.patches import Rectangle

    columns, series = plot.categories[:MOST_COLUMNS], plot.series[:MOST_ROWS]
    rows = [row.y[:MOST_COLUMNS] for row in series]
    numbers = [v for row in rows for v in row if v is not None] or [0.0]
    low = min(numbers) if plot.limits[0] is None else plot.limits[0]
    high = max(numbers) if plot.limits[1] is None else plot.limits[1]
    if high - low < _NOISE:
        high = low
    colours = colormaps["cividis"]
    many = len(rows) * len(columns) > _MOST_NUMBERS
    cell = 0.16 if many else max(0.52, min(0.8, 2.6 / max(1, len(columns))))
    longest = min(LONGEST_TICK, max((len(row.label) for row in series), default=0))
    width = max(WIDTH - 1.0, 0.8 + 0.075 * longest + cell * len(columns))
    figure.set_size_inches(min(width, 16), max(2.1, 1.35 + (0.16 if many else 0.3) * len(rows)))
    ax = figure.subplots()
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            share = 0.0 if value is None or high <= low else (value - low) / (high - low)
            share = min(1.0, max(0.0, share))
            face = PAPER if value is None else to_hex(colours(share))
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor=PAPER,
                                   linewidth=0.5))  # fmt: skip
            if value is None:
                ax.text(x, y, "\u00d7", ha="center", va="center", fontsize=8)
            elif not many:
                ax.text(x, y, plot.form.format(value), ha="center", va="center", fontsize=8,
                        color="#000000" if share > _BRIGHT else "#ffffff")  # fmt: skip
    step = max(1, len(columns) // 24)
    turned = max((len(name) for name in columns), default=0) > 12 * cell
    ax.set_xticks(
        range(0, len(columns), step), [short(name, 16) for name in columns][::step],
        rotation=40 if turned else 0, ha="right" if turned else "center", rotation_mode="anchor",
    )  # fmt: skip
    ax.set_yticks(range(len(rows)), [short(row.label, LONGEST_TICK) for row in series])
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel(short(plot.x_label, 120) + _cut_note(len(rows), len(plot.series)))
    ax.set_ylabel(short(plot.y_label, 120))
    _scale(figure, ax, low, high, plot.unit)


def _scale(figure: Any, ax: Any, low: float, high: float, unit: str) -> None:
    """Nine shades from low to high beside the map."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm

    if high <= low:
        high = low + 1.0
    edges = [low + (high - low) * n / 9 for n in range(10)]
    norm = BoundaryNorm(edges, 256)
    label = f"{short(unit, 80)} (brighter: more)"
    bar = figure.colorbar(ScalarMappable(norm, "cividis"), ax=ax, label=label, ticks=edges[::3])
    bar.ax.set_yticklabels([f"{edge:.3g}" for edge in edges[::3]])
    bar.minorticks_off()
    bar.outline.set_visible(False)


def _cut_note(shown: int, count: int) -> str:
    """Below the axis, where a plot has not all rows or lines."""
    return "" if shown == count else f"\nthe first {shown} of {count}"


_DRAW = {
    "intervals": _draw_intervals,
    "series": _draw_series,
    "lines": _draw_curves,
    "points": _draw_curves,
    "heat map": _draw_heat_map,
}


# --- room for every text --------------------------------------------------------------------------


def fit(figure: Any) -> None:
    """Cut, wrap and turn labels and make room until none lies over another or leaves the figure.

    Long names end in three dots, titles and labels of axes are wrapped to what they belong to,
    names below a plot are turned, and the figure grows where that is not enough.
    """
    for axis in [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]:
        names = [text.get_text() for text in axis.get_ticklabels()]
        if any(len(name) > LONGEST_TICK for name in names):  # numbers are never long
            axis.set_ticklabels([_cut(name) for name in names])
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
        box, other = (text.get_window_extent() for text in (first, second))
        size = (box.width + other.width, box.height + other.height)[place] / 2
        middles = [(b.x0 + b.x1, b.y0 + b.y1)[place] / 2 for b in (box, other)]
        if first.get_rotation() % 90:
            # Turned by the same angle, lines of text are as far apart as that angle leaves them.
            line = first.get_fontsize() * first.figure.dpi / 72
            lines = len(first.get_text().split("\n"))
            size = line * lines / math.sin(math.radians(first.get_rotation()))
            middles = [box.x1, other.x1]
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
