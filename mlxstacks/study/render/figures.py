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
from functools import cache
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
    "lines.color": INK, "axes.edgecolor": RULE, "grid.color": RULE, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left",
    # A stranger's dollar sign is no formula; letters stay letters in the SVG.
    "text.parse_math": False, "svg.fonttype": "none",
}  # fmt: skip
_GREY = "#7a828c"  # 3.9:1 on white, 4.3:1 on a dark page
_ON_ANY = {
    key: {INK: _GREY, RULE: "#88888888", PAPER: "none"}.get(value, value)
    for key, value in STYLE.items()
}
WIDTH = 4.4
FORMATS = ("png", "svg")
# Longer names of ticks are cut, with three dots; tables have them whole.
LONGEST_TICK = 40
# Rows that get their name and number each. More are drawn closer, and every so many is named;
# beyond the last limit a plot has the first ones alone, which it says. Lines beyond the first are
# grey.
MOST_ROWS, MOST_DENSE_ROWS, MOST_LINES, MOST_COLUMNS = 40, 400, 12, 512
_MOST_CELLS = 10_240  # 40 layers of 256 experts
_ROW_INCHES, _LEAST_TICK_INCHES = 0.2, 0.17
_MOST_INCHES = 10.5  # of rows, of which 61 are named then
# A plot of more rows is higher than a screen: its legend and its axis stand on top too.
_TALL_ROWS = 24
# A heat map is at most as wide as a page.
_WIDEST_INCHES = 9.0
# Values this near to each other differ by rounding: colours would make a pattern of it.
_NOISE = 1e-9
_SHADES = 9
# Around 0: purple, white, orange, which colour-blind eyes tell apart.
_ONE_SIDED, _TWO_SIDED = "cividis", "PuOr_r"
_MOST_NAMED_POINTS = 24
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
        return [], [f"No plots: {WITHOUT}."]
    return names, []


WITHOUT = "matplotlib is not installed; pip install 'mlxstacks[plots]'"


def svg_of(plot: Plot) -> str:
    """A plot as SVG. Raises: ImportError without matplotlib."""
    file = io.StringIO()
    with _style():
        figure_of(plot).savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def png_of(plot: Plot) -> bytes:
    """A plot as PNG, to be read on light and on dark. Raises: ImportError without matplotlib."""
    return bytes(figure_of(plot, _ON_ANY)._repr_png_()[0])


def figure_of(plot: Plot, style: Mapping[str, Any] = STYLE) -> Any:
    """A plot as a matplotlib figure."""
    with _style(style):
        figure = _figure_class()(layout="constrained")
        figure.alt = plot.alt
        _DRAW[plot.kind](figure, plot)
        # Of the figure, not of its axes: it may be as wide as all of it. `fit` wraps it:
        # matplotlib's own wrapping reads a dollar sign as a formula's, whatever text.parse_math
        # says.
        above = [legend for legend in figure.legends if legend._outside_loc == "upper"]
        if above:  # a title would lie over it
            above[0].set_title(short(plot.title, LONGEST_TICK), prop={"size": 10})
        else:
            figure.suptitle(short(plot.title, 120), x=0.01, ha="left", fontsize=10)
        fit(figure)
        if plot.kind == "frontier":
            _place_names(figure)
    return figure


@cache
def _figure_class() -> Any:
    from matplotlib.figure import Figure

    class NotebookFigure(Figure):
        """Shows itself in a notebook without pyplot, with its plot's `alt` for screen readers."""

        alt = ""

        def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100, facecolor=self.get_facecolor())
            return file.getvalue(), {"alt": self.alt}

    return NotebookFigure


@contextmanager
def _style(style: Mapping[str, Any] = STYLE) -> Iterator[None]:
    import matplotlib as library

    # Fixed ids in the SVG.
    settings: dict[Any, Any] = {"svg.hashsalt": "mlxstacks", **style}
    with library.rc_context(settings), warnings.catch_warnings():
        # Texts that leave no room for a plot, as a hostile file may hold, are drawn all the same.
        warnings.filterwarnings("ignore", message=".*axes sizes collapsed to zero")
        yield


# --- drawing --------------------------------------------------------------------------------------


def _draw_intervals(figure: Any, plot: Plot) -> None:
    """A row a value, its interval as a whisker, its value as a number at the right; references:
    dashed lines.
    """
    dots = list(_dots(plot))
    shown = dots[:MOST_DENSE_ROWS]
    dense = len(shown) > MOST_ROWS
    drawn = {place for *_, place in shown}
    groups = {n: series.label for n, series in enumerate(plot.series) if n in drawn}
    named = len(plot.series) > 1
    labels = [plot.categories[place] for place, _, _ in shown]
    first = [n == 0 or place != shown[n - 1][0] for n, (place, _, _) in enumerate(shown)]
    ax = _rows(figure, labels, [*groups.values()] if named else [], plot, len(dots), first=first)
    numbers = _numbers(plot, [series.y[place] for place, series, _ in shown])
    for row, (place, series, number_of_series) in enumerate(shown):
        if first[row] and row and not all(first):
            ax.axhline(row - 0.5, color=RULE, linewidth=0.6, zorder=0.4)
        value, style = series.y[place], number_of_series % len(SERIES)
        if not dense:
            number = "not measured" if value is None else numbers[value]
            ax.annotate(number, (1.02, row), xycoords=("axes fraction", "data"), va="center",
                        fontsize=8, annotation_clip=False)  # fmt: skip
        if value is None:
            continue
        low, high = (series.low or series.y)[place], (series.high or series.y)[place]
        if low is not None and high is not None:
            ax.plot([low, high], [row, row], color=SERIES[style], alpha=0.75,
                    linewidth=0.8 if dense else 2.2)  # fmt: skip
        ax.plot([value], [row], marker=MARKERS[_mark(number_of_series)], color=SERIES[style],
                linestyle="", markersize=2.5 if dense else 6)  # fmt: skip
    ax.set_ylim(len(shown) - 0.4, -0.6)
    ax.grid(axis="x")
    ax.margins(x=0.06)
    if None not in plot.limits:
        ax.set_xlim(*plot.limits)
    _legend(figure, groups if named else {}, plot.references, rows=len(shown))


def _mark(number: int) -> int:
    """Place of a series' marker and dash: colours that come again have others."""
    return (number + number // len(SERIES)) % len(MARKERS)


def _numbers(plot: Plot, values: Iterable[float | None]) -> dict[float, str]:
    """Value -> its number as the plot has it; {:.3g}, which drops zeros, with as many decimals."""
    texts = {value: plot.form.format(value) for value in values if value is not None}
    decimals = max((len(text.partition(".")[2]) for text in texts.values()), default=0)
    if plot.form != "{:.3g}" or decimals > 4 or any("e" in text for text in texts.values()):
        return texts
    return {value: f"{value:.{decimals}f}" for value in texts}


def _dots(plot: Plot) -> Iterator[tuple[int, Series, int]]:
    """(place of the category, series, place of the series) of all series of a category together:
    those that have a value where any has one.
    """
    for place in range(len(plot.categories)):
        measured = [
            (n, series) for n, series in enumerate(plot.series) if series.y[place] is not None
        ]
        for n, series in measured or list(enumerate(plot.series))[:1]:
            yield place, series, n


def _draw_series(figure: Any, plot: Plot) -> None:
    """A row a category, in it a dot of each series."""
    labels = plot.categories[:MOST_DENSE_ROWS]
    dense = len(labels) > MOST_ROWS
    names = [series.label for series in plot.series]
    ax = _rows(figure, labels, names, plot, len(plot.categories), thick=0.09 * len(names) + 0.06)
    for number, series in enumerate(plot.series):
        # one below the other, since equal values would hide each other
        off = 0 if dense else 0.8 / max(4, len(names)) * (number - (len(names) - 1) / 2)
        dots = [(v, y + off) for y, v in enumerate(series.y[: len(labels)]) if v is not None]
        ax.plot([v for v, _ in dots], [y for _, y in dots], linestyle="",
                markersize=2.5 if dense else 6, marker=MARKERS[_mark(number)],
                color=SERIES[number % len(SERIES)], alpha=0.9)  # fmt: skip
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid(axis="x" if dense else "both")
    ax.margins(x=0.06)
    ax.set_xlim(*plot.limits)
    _legend(figure, dict(enumerate(names)), plot.references, line="", rows=len(labels))


def _rows(
    figure: Any, labels: Sequence[str], groups: Sequence[str], plot: Plot, count: int, *,
    first: Sequence[bool] = (), thick: float = _ROW_INCHES,
) -> Any:  # fmt: skip
    """Axes with a row a label and the plot's references. first: the rows that are named, of several
    that have one name; thick: inches of a row that has room.
    """
    from matplotlib.ticker import MaxNLocator

    each, step = max(_ROW_INCHES, thick), 1
    if len(labels) > MOST_ROWS:
        each = max(0.02, min(_ROW_INCHES, _MOST_INCHES / len(labels)))
        step = math.ceil(_LEAST_TICK_INCHES / each)
    longest = max(map(len, labels), default=0)
    # long labels must not take the room of what they name
    width = WIDTH + 0.06 * max(0, min(LONGEST_TICK, longest) - 24)
    entries = len([name for name in (*groups, *plot.references) if name])
    figure.set_size_inches(width, 1.15 + each * len(labels) + 0.2 * ((entries + 1) // 2))
    ax = figure.subplots()
    for number, place in enumerate(plot.references.values()):
        ax.axvline(place, linewidth=1.1, linestyle=DASHES[1 + number % 3], zorder=0.5)
    shown = [n for n in range(0, len(labels), step) if step > 1 or not first or first[n]]
    ax.set_yticks(shown, names_of_ticks([labels[n] for n in shown]))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=plot.form == "{:.0f}"))
    ax.tick_params(top=len(labels) > _TALL_ROWS, labeltop=len(labels) > _TALL_ROWS)
    ax.set_axisbelow(True)
    note = f"\n{len(labels):,} rows, every {_ordinal(step)} named" if step > 1 else ""
    ax.set_xlabel(short(plot.x_label, 120) + note + _cut_note(len(labels), count))
    ax.set_ylabel(short(plot.y_label, 120))
    return ax


def names_of_ticks(labels: Sequence[str], longest: int = LONGEST_TICK) -> list[str]:
    """The names, cut at their end; in their middle where they could not be told apart then."""
    cut = [short(label, longest) for label in labels]
    if len(set(cut)) == len(set(labels)):
        return cut
    whole = [short(label, 10 * longest) for label in labels]
    half = longest // 2
    return [
        name if len(name) <= longest else f"{name[: longest - half - 1]}\u2026{name[-half:]}"
        for name in whole
    ]


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def _legend(
    figure: Any, groups: Mapping[int, str], references: Mapping[str, float], line: Any = "-",
    rows: int = 0, drawn: Iterable[Any] = (),
) -> None:  # fmt: skip
    """An entry for what each marker and line means; groups: by place of series, or what was drawn.
    Below the plot, or above one of many rows.
    """
    from matplotlib.lines import Line2D

    entries = [*drawn]
    entries += [
        Line2D([], [], color=SERIES[n % len(SERIES)], marker=MARKERS[_mark(n)],
               linestyle=line, label=short(name or "other", 40))
        for n, name in groups.items()
    ]  # fmt: skip
    entries += [
        Line2D([], [], linewidth=1.1, linestyle=DASHES[1 + n % 3], label=short(name, 40))
        for n, name in enumerate(references)
    ]
    _place_legend(figure, entries, "upper" if rows > _TALL_ROWS else "lower")


def _place_legend(figure: Any, entries: Sequence[Any], side: str = "lower") -> None:
    """In two columns where their texts fit into the figure's width."""
    if entries:
        narrow = max(len(entry.get_label()) for entry in entries) <= 26
        loc, columns = f"outside {side} center", 2 if narrow else 1
        figure.legend(handles=entries, loc=loc, ncols=columns, alignment="left")


def _draw_curves(figure: Any, plot: Plot) -> None:
    """A line a series with the band of its low and high, or its points alone. Colours come again
    with other dashes and markers; the lines beyond the first are grey and thin.
    """
    from matplotlib.ticker import MaxNLocator

    joined, others = plot.kind == "lines", len(plot.series) - MOST_LINES
    entries: list[Any] = []
    figure.set_size_inches(WIDTH, 3.1 + 0.2 * ((min(len(plot.series), MOST_LINES + 1) + 1) // 2))
    ax = figure.subplots()
    for number, series in enumerate(plot.series):
        x, y, low, high = (
            [math.nan if value is None else value for value in values]  # where a line breaks off
            for values in (series.x, series.y, series.low or series.y, series.high or series.y)
        )
        if number >= MOST_LINES:
            (line,) = ax.plot(
                x, y, color=RULE, linewidth=0.8, zorder=1, linestyle="-" if joined else "",
                marker="" if joined and len(x) > 1 else ".", markersize=3,
            )  # fmt: skip
            if number == MOST_LINES:
                line.set_label("1 other" if others == 1 else f"the {others} others")
                entries.append(line)
            continue
        mark = _mark(number)
        colour = SERIES[number % len(SERIES)]
        if series.low or series.high:
            ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        entries += ax.plot(
            x, y, color=colour, linestyle=DASHES[mark] if joined else "", marker=MARKERS[mark],
            markersize=4, markevery=max(1, len(x) // 12) if joined else 1,
            label=short(series.label, 40),
        )  # fmt: skip
    ax.grid()
    whole = all(x == int(x) for series in plot.series for x in series.x)  # steps, not 4.5 of them
    # matplotlib's own locators take other ticks once they are laid out
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=whole))
    ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.set_xlabel(short(plot.x_label, 120))
    ax.set_ylabel(short(plot.y_label, 120))
    entries += _draw_references(ax, plot)
    if len(entries) > 1:
        _place_legend(figure, entries)


def _draw_references(ax: Any, plot: Plot) -> list[Any]:
    """Across the axis of values, which ends at the plot's limits; those that have names."""
    dashes = (DASHES[1 + number % 3] for number in range(len(plot.references)))
    lines = [
        ax.axhline(place, linewidth=1.1, linestyle=dash, zorder=0.5, label=short(name, 40))
        for dash, (name, place) in zip(dashes, plot.references.items(), strict=True)
    ]
    low, high = plot.limits
    ax.set_ylim(bottom=low, top=high)
    return [line for line, name in zip(lines, plot.references, strict=True) if name]


# Of a point's name: points on paper from it, and how the text lies there.
_BESIDE = (
    ((9, 0), "left", "center"), ((-9, 0), "right", "center"),
    ((0, 9), "center", "bottom"), ((0, -9), "center", "top"),
    ((7, 7), "left", "bottom"), ((7, -7), "left", "top"),
    ((-7, 7), "right", "bottom"), ((-7, -7), "right", "top"),
)  # fmt: skip


def _draw_frontier(figure: Any, plot: Plot) -> None:
    """Points that have names (the categories), those of a series joined in their order along x.
    Markers are open, the first series' the largest: points at one place lie within each other.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure.set_size_inches(WIDTH, 3.3 + 0.2 * ((len(plot.series) + 1) // 2))
    ax, drawn = figure.subplots(), list[Any]()
    for number, series in enumerate(plot.series):
        colour, mark = SERIES[number % len(SERIES)], _mark(number)
        order = sorted(range(len(series.x)), key=lambda n, x=series.x: x[n])  # type: ignore[misc]
        order = [n for n in order if series.y[n] is not None]
        for n in order:
            low, high = (series.low or series.y)[n], (series.high or series.y)[n]
            if low is not None and high is not None:
                ax.plot([series.x[n]] * 2, [low, high], color=colour, alpha=0.6, linewidth=1.6)
        drawn += ax.plot(
            [series.x[n] for n in order], [series.y[n] for n in order], color=colour,
            marker=MARKERS[mark], linestyle=DASHES[mark] if len(order) > 1 else "",
            markerfacecolor="none", markeredgewidth=1.4, label=short(series.label or "other", 40),
            markersize=max(5, 5 + 3 * (min(len(plot.series), 4) - 1 - number)),
        )  # fmt: skip
        for n in order if len(ax.texts) < _MOST_NAMED_POINTS else ():
            name = ax.annotate(
                short(plot.categories[n], 22), (series.x[n], series.y[n]), fontsize=8, zorder=3,
                xytext=(0, 0), textcoords="offset points",
                bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "pad": 0.5},
            )  # fmt: skip
            name.set_in_layout(False)  # its place follows from the layout
    ax.grid()
    ax.margins(x=0.16, y=0.14)
    _draw_references(ax, plot)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(5))
    if plot.unit == "bytes":
        from mlxstacks.memory import bytes_in_words

        def words(value: float, _: int) -> str:
            return bytes_in_words(int(value)) if value >= 0 else f"-{bytes_in_words(int(-value))}"

        ax.xaxis.set_major_formatter(FuncFormatter(words))
    ax.set_xlabel(short(plot.x_label, 120))
    ax.set_ylabel(short(plot.y_label, 120))
    _legend(figure, {}, plot.references, drawn=drawn if len(drawn) > 1 else ())


def _place_names(figure: Any) -> None:
    """Of a frontier that is laid out: each name beside its point, where it crosses the fewest
    lines. One without room is left out.
    """
    from matplotlib.transforms import Bbox

    [ax] = figure.axes
    figure.draw_without_rendering()
    half = 4 * figure.dpi / 72
    shown: list[Any] = []  # boxes of points, then of names
    for line in ax.lines:
        if line.get_marker() != "None":
            for x, y in ax.transData.transform(line.get_xydata()):
                shown.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
    curves = [line.get_path().transformed(line.get_transform()) for line in ax.lines]
    for name in ax.texts:
        free: list[tuple[int, int]] = []
        for number, (offset, ha, va) in enumerate(_BESIDE):
            name.set(position=offset, ha=ha, va=va)
            box = name.get_window_extent()
            is_inside = ax.bbox.contains(*box.min) and ax.bbox.contains(*box.max)
            if is_inside and not any(box.overlaps(other) for other in shown):
                near = box.padded(half / 2)
                crossed = sum(c.intersects_bbox(near, filled=False) for c in curves)
                free.append((crossed, number))
        name.set_visible(bool(free))
        if free:
            offset, ha, va = _BESIDE[min(free)[1]]
            name.set(position=offset, ha=ha, va=va)
            shown.append(name.get_window_extent())


def _draw_heat_map(figure: Any, plot: Plot) -> None:
    """A cell a value, with its number where there is room; a crossed cell is not measured.

    Limits that are the same on both sides of 0 give two-sided colours.
    """
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    columns, series = plot.categories[:MOST_COLUMNS], plot.series[: _most_heat_rows(plot)]
    rows = [row.y[:MOST_COLUMNS] for row in series]
    shades = _Shades(plot, [v for row in rows for v in row if v is not None])
    numbers = _numbers(plot, [v for row in rows for v in row])
    texts = [[None if v is None else numbers[v] for v in row] for row in rows]
    longest = max((len(text) for row in texts for text in row if text), default=0)
    side = 1.4 + 0.075 * min(LONGEST_TICK, max((len(row.label) for row in series), default=0))
    room = _WIDEST_INCHES - side
    cell = max(0.16 + 0.07 * longest, min(0.8, 2.6 / max(1, len(columns))))
    many = cell * len(columns) > room or len(rows) > MOST_ROWS
    if many:
        cell = min(0.16, room / len(columns))
    tall = 0.3 if not many else max(0.06, min(0.16, 7.0 / max(1, len(rows))))
    figure.set_size_inches(
        max(WIDTH - 1.0, side + cell * len(columns)), max(2.1, 1.35 + tall * len(rows))
    )
    ax = figure.subplots()
    cells: dict[str, list[tuple[int, int]]] = {}
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            face = PAPER if value is None else shades.of(value)
            cells.setdefault(face, []).append((x, y))
            if value is None and not many:
                ax.text(x, y, "\u00d7", ha="center", va="center", fontsize=8)
            elif not many:
                ax.text(x, y, texts[y][x], ha="center", va="center", fontsize=8,
                        color="#000000" if _is_bright(face) else "#ffffff")  # fmt: skip
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)])
    codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY]
    for face, middles in cells.items():  # one path a shade
        outline = (np.array(middles)[:, None] + corners).reshape(-1, 2)
        ax.add_patch(
            PathPatch(
                Outline(outline, codes * len(middles)), facecolor=face,
                edgecolor=face if many else PAPER, linewidth=0.1 if many else 0.5,
            )
        )  # fmt: skip
    longest_name = min(16, max((len(name) for name in columns), default=0))
    wide = 0.085 * longest_name + 0.08
    turned = longest_name > 3 and wide > cell
    step = max(1, math.ceil((_LEAST_TICK_INCHES / 0.6 if turned else wide) / cell))
    ax.set_xticks(
        range(0, len(columns), step), names_of_ticks(columns, 16)[::step],
        rotation=_TURN_DEGREES if turned else 0, ha="right" if turned else "center",
        rotation_mode="anchor",
    )  # fmt: skip
    step = max(1, math.ceil(_LEAST_TICK_INCHES / tall)) if many else 1
    ax.set_yticks(range(0, len(rows), step), names_of_ticks([row.label for row in series])[::step])
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel(short(plot.x_label, 120) + _cut_note(len(rows), len(plot.series)))
    ax.set_ylabel(short(plot.y_label, 120))
    shades.draw_bar(figure, ax, short(plot.unit, 80))


def _most_heat_rows(plot: Plot) -> int:
    """So many rows that no map has more cells than a page bears."""
    return max(1, _MOST_CELLS // max(1, min(MOST_COLUMNS, len(plot.categories))))


class _Shades:
    """The shades of a heat map: a few, so that a cell's is found in the bar next to the map."""

    def __init__(self, plot: Plot, values: Sequence[float]) -> None:
        from matplotlib import colormaps

        low, high = plot.limits
        self.low = min(values, default=0.0) if low is None else low
        self.high = max(values, default=0.0) if high is None else high
        if self.high - self.low < _NOISE:
            self.high = self.low
        self.two_sided = self.low == -self.high and self.high > 0
        self.yes_or_no = {*values} <= {self.low, self.high} == {0.0, 1.0}
        self.map = colormaps[_TWO_SIDED if self.two_sided else _ONE_SIDED]
        self.count = 2 if self.yes_or_no else _SHADES

    def of(self, value: float) -> str:
        from matplotlib.colors import to_hex

        if self.high <= self.low:
            return to_hex(self.map(0.0))
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        shade = min(self.count - 1, int(share * self.count))
        return to_hex(self.map(shade / (self.count - 1)))

    def draw_bar(self, figure: Any, ax: Any, unit: str) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import BoundaryNorm, ListedColormap

        low, high = self.low, self.high if self.high > self.low else self.low + 1.0
        edges = [low + (high - low) * n / self.count for n in range(self.count + 1)]
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        shades = ListedColormap([self.of(middle) for middle in middles])
        meaning = "orange: more, purple: less" if self.two_sided else "brighter: more"
        label, ticks = f"{unit} ({meaning})", edges[:: max(1, self.count // 3)]
        if self.two_sided:
            ticks = [low, low / 2, 0.0, high / 2, high]
        if self.yes_or_no:
            label, ticks = unit, middles
        mappable = ScalarMappable(BoundaryNorm(edges, self.count), shades)
        bar = figure.colorbar(mappable, ax=ax, label=label, ticks=ticks)
        names = ["0", "1"] if self.yes_or_no else [f"{tick:.3g}" for tick in ticks]
        bar.ax.set_yticklabels(names)
        bar.minorticks_off()
        bar.outline.set_visible(False)


def _is_bright(face: str) -> bool:
    """Whether black is easier to read on it than white, by WCAG's relative luminance."""
    parts = [int(face[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179


def _cut_note(shown: int, count: int) -> str:
    """Below the axis, where a plot has not all rows."""
    return "" if shown == count else f"\nthe first {shown:,} of {count:,}"


_DRAW = {
    "intervals": _draw_intervals,
    "series": _draw_series,
    "lines": _draw_curves,
    "points": _draw_curves,
    "frontier": _draw_frontier,
    "heat map": _draw_heat_map,
}


# --- room for every text --------------------------------------------------------------------------


def fit(figure: Any) -> None:
    """Wrap and turn labels and make room until none lies over another or leaves the figure.

    Titles and labels of axes are wrapped to what they belong to, names below a plot are turned, and
    the figure grows where that is not enough.
    """
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
            legend.legend_handles, labels, loc=f"outside {legend._outside_loc} center",
            ncols=max(1, int(legend._ncols * figure.bbox.width / width)),
            title=legend.get_title().get_text() or None, alignment="left",
        )  # fmt: skip
    else:
        figure.set_size_inches(1.02 * width / figure.dpi, figure.get_size_inches()[1])
    return True
