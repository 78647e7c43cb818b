"""Drawings on a matplotlib figure: dots with intervals, dots by module, heat maps, curves.

Colours are of Okabe and Ito's palette, which colour-blind eyes tell apart, and every series has a
marker or dash of its own besides. The same colours stand in the page's style, where they change
with light and dark; see html.py. A figure is about as wide as a phone, and grows with its rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
# Beyond so many a plot cannot be read; its table has all.
MOST_ROWS = 40
MOST_NUMBERS = 400
_LABEL = 34
# Values this near to each other differ by rounding: colours would make a pattern of it.
_NOISE = 1e-9
# cividis is bright at its upper end.
_BRIGHT = 0.55


@dataclass(frozen=True)
class Dot:
    """A value with its interval, where it has one. group: what its colour and marker mean."""

    label: str
    value: float | None
    low: float | None = None
    high: float | None = None
    group: str = ""


def percent_dot(
    label: str, value: float | None, low: float | None, high: float | None, group: str = ""
) -> Dot:
    """Of a share and its interval, in percent."""
    value, low, high = (None if one is None else 100 * one for one in (value, low, high))
    return Dot(label, value, low, high, group)


def draw_intervals(
    figure: Any,
    dots: Sequence[Dot],
    xlabel: str,
    *,
    title: str,
    references: Mapping[str, float] | None = None,
    limits: tuple[float, float] | None = None,
    form: str = "{:.3g}",
) -> None:
    """A row a dot, its interval as a whisker, its value as a number; references: dashed lines."""
    shown = dots[:MOST_ROWS]
    groups = list(dict.fromkeys(dot.group for dot in shown))
    names = [name for name in (*groups, *(references or {})) if name]
    wide = _width(dot.label for dot in shown)
    figure.set_size_inches(wide, 1.15 + 0.27 * len(shown) + 0.2 * ((len(names) + 1) // 2))
    ax = figure.subplots()
    for place, dot in enumerate(shown):
        style = groups.index(dot.group) % len(SERIES)
        _draw_dot(ax, place, dot, style, form)
    _draw_references(ax, references or {})
    ax.set_yticks(range(len(shown)), [short(dot.label, _LABEL) for dot in shown])
    ax.set_ylim(len(shown) - 0.4, -0.75)
    ax.grid(axis="x")
    ax.set_axisbelow(True)
    ax.set_xlabel(short(xlabel, 120) + _cut(len(shown), len(dots)))
    ax.margins(x=0.12)
    if limits:
        ax.set_xlim(*limits)
    _title(figure, title)
    _legend(figure, groups, references or {})


def _width(labels: Iterable[str]) -> float:
    """Inches: long labels must not take the room of what they name."""
    longest = max(map(len, labels), default=0)
    return WIDTH + 0.06 * max(0, min(_LABEL, longest) - 24)


def _draw_dot(ax: Any, place: int, dot: Dot, style: int, form: str) -> None:
    if dot.value is None:
        ax.annotate("not measured", (0.01, place), xycoords=("axes fraction", "data"),
                    va="center", fontsize=9)  # fmt: skip
        return
    colour = SERIES[style]
    if dot.low is not None and dot.high is not None:
        ax.plot([dot.low, dot.high], [place, place], color=colour, linewidth=2.2, alpha=0.75)
    ax.plot([dot.value], [place], marker=MARKERS[style], color=colour, markersize=6, linestyle="")
    ax.annotate(form.format(dot.value), (dot.value, place), xytext=(0, 5),
                textcoords="offset points", ha="center", va="bottom", fontsize=8)  # fmt: skip


def _draw_references(ax: Any, references: Mapping[str, float]) -> None:
    for number, place in enumerate(references.values()):
        ax.axvline(place, color=INK, linewidth=1.1, linestyle=DASHES[1 + number % 3], zorder=0.5)


def _legend(
    figure: Any, groups: Sequence[str], references: Mapping[str, float], line: Any = "-"
) -> None:
    """Below the plot, one entry for what each marker and line means; none for a single unnamed."""
    from matplotlib.lines import Line2D

    entries: list[Any] = []
    if any(groups):
        entries += [
            Line2D([], [], color=SERIES[n % len(SERIES)], marker=MARKERS[n % len(MARKERS)],
                   linestyle=line, label=short(name or "other", 40))
            for n, name in enumerate(groups)
        ]  # fmt: skip
    entries += [
        Line2D([], [], color=INK, linewidth=1.1, linestyle=DASHES[1 + n % 3], label=short(name, 40))
        for n, name in enumerate(references)
    ]
    if entries:
        figure.legend(handles=entries, loc="outside lower center", ncols=_columns(entries))


def _columns(entries: Sequence[Any]) -> int:
    """Of a legend: two where their texts fit into the figure's width."""
    return 2 if max(len(entry.get_label()) for entry in entries) <= 26 else 1


def draw_series(
    figure: Any,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    xlabel: str,
    *,
    title: str,
    references: Mapping[str, float] | None = None,
) -> None:
    """A row a label, in it a dot of each series."""
    count, labels = len(labels), list(labels)[:MOST_ROWS]
    names = list(series)
    wide = _width(labels)
    figure.set_size_inches(wide, 1.2 + 0.24 * len(labels) + 0.2 * ((len(names) + 1) // 2))
    ax = figure.subplots()
    for number, values in enumerate(series.values()):
        # side by side, since equal values would hide each other
        off = 0.22 * (number - (len(names) - 1) / 2)
        found = [(v, y + off) for y, v in enumerate(list(values)[: len(labels)]) if v is not None]
        ax.plot([v for v, _ in found], [y for _, y in found], linestyle="", markersize=6,
                marker=MARKERS[number % len(MARKERS)], color=SERIES[number % len(SERIES)],
                alpha=0.9)  # fmt: skip
    _draw_references(ax, references or {})
    ax.set_yticks(range(len(labels)), [short(label, _LABEL) for label in labels])
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.grid()
    ax.set_axisbelow(True)
    ax.set_xlabel(short(xlabel, 120) + _cut(len(labels), count))
    ax.margins(x=0.08)
    _title(figure, title)
    _legend(figure, names, references or {}, line="")


def draw_curves(
    figure: Any,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    *,
    title: str,
    joined: bool = True,
) -> None:
    """A line a name, or its points alone; of more than there are dashes and colours for, the first
    ones.
    """
    from matplotlib.lines import Line2D

    shown = dict(list(curves.items())[: len(SERIES)])
    figure.set_size_inches(WIDTH, 3.1 + 0.2 * ((len(shown) + 1) // 2))
    ax = figure.subplots()
    for number, points in enumerate(shown.values()):
        ax.plot([x for x, _ in points], [y for _, y in points], color=SERIES[number],
                linestyle=DASHES[number] if joined else "", marker=MARKERS[number], markersize=4,
                markevery=max(1, len(points) // 12) if joined else 1)  # fmt: skip
    ax.grid()
    ax.set_xlabel(short(xlabel, 120) + _cut(len(shown), len(curves)))
    ax.set_ylabel(short(ylabel, 120))
    _title(figure, title)
    if len(shown) > 1:
        entries = [
            Line2D([], [], color=SERIES[n], linestyle=DASHES[n] if joined else "",
                   marker=MARKERS[n], markersize=4, label=short(name, 40))
            for n, name in enumerate(shown)
        ]  # fmt: skip
        figure.legend(handles=entries, loc="outside lower center", ncols=_columns(entries))


def draw_heat_map(
    figure: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    unit: str,
    form: str = "{:.2f}",
    limits: tuple[float | None, float | None] = (None, None),
    words: tuple[str, str] | None = None,
) -> None:
    """A cell a value, with its number where there is room; a crossed cell is not measured.

    values: a row for each of `rows`, a number or None for each of `columns`. words: what low and
    high are called where there is nothing between them; without it a scale stands beside the map.
    """
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    numbers = [v for row in values for v in row if v is not None] or [0.0]
    low = min(numbers) if limits[0] is None else limits[0]
    high = max(numbers) if limits[1] is None else limits[1]
    if high - low < _NOISE:
        high = low
    colours = colormaps["cividis"]
    many = len(rows) * len(columns) > MOST_NUMBERS
    cell = 0.16 if many else max(0.52, min(0.8, 2.6 / max(1, len(columns))))
    longest = min(_LABEL, max(map(len, rows), default=0))
    wide = max(WIDTH - 1.0, 0.8 + 0.075 * longest + cell * len(columns))
    figure.set_size_inches(min(wide, 16), max(2.1, 1.35 + (0.16 if many else 0.3) * len(rows)))
    ax = figure.subplots()
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            share = 0.0 if value is None or high <= low else (value - low) / (high - low)
            share = min(1.0, max(0.0, share))
            face = PAPER if value is None else _hex(colours(share))
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor=PAPER,
                                   linewidth=0.5))  # fmt: skip
            if value is None:
                ax.text(x, y, "\u00d7", ha="center", va="center", fontsize=8)
            elif not many:
                ax.text(x, y, form.format(value), ha="center", va="center", fontsize=8,
                        color="#000000" if share > _BRIGHT else "#ffffff")  # fmt: skip
    step = max(1, len(columns) // 24)
    turned = max((len(name) for name in columns), default=0) > 12 * cell
    ax.set_xticks(
        range(0, len(columns), step), [short(name, 16) for name in columns][::step],
        rotation=40 if turned else 0, ha="right" if turned else "center", rotation_mode="anchor",
    )  # fmt: skip
    ax.set_yticks(range(len(rows)), [short(name, _LABEL) for name in rows])
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel(short(xlabel, 120))
    ax.set_ylabel(short(ylabel, 120))
    if words is None:
        _scale(figure, ax, low, high, unit)
    else:
        faces = [_hex(colours(share)) for share in (0.0, 1.0)]
        figure.legend(
            handles=[Rectangle((0, 0), 1, 1, facecolor=f, edgecolor=RULE) for f in faces],
            labels=list(words), loc="outside lower center", ncols=2,
        )  # fmt: skip
    _title(figure, title)


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


def _cut(shown: int, count: int) -> str:
    """Below the axis, where a plot has not all rows or lines."""
    return "" if shown == count else f"\nthe first {shown} of {count}"


def _hex(rgba: Sequence[float]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in rgba[:3])


def _title(figure: Any, title: str) -> None:
    # Of the figure, not of its axes: it may be as wide as all of it. `fit` wraps it: matplotlib's
    # own wrapping reads a dollar sign as a formula's, whatever text.parse_math says.
    figure.suptitle(short(title, 120), x=0.01, ha="left", fontsize=10)
