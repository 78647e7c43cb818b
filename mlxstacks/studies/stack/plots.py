"""Plots of a store's analysis, from its JSON document, where matplotlib is (the extra `plots`).

Colours are Okabe and Ito's, which the colour-blind tell apart; every colour has a marker of its
own, and heat maps carry their numbers, so that a grey print says the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.study.render.figures import Drawing, write_figures

Document = Mapping[str, Any]

# Okabe and Ito (2008), without yellow, which a white page swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INCHES, _DPI, _COLUMNS = 7.0, 200, 3
# Panels beyond so many are left out of a figure; the JSON has all of them.
_MOST_PANELS = 18
# cividis is bright at its upper end.
_BRIGHT = 0.55
_STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "lines.markersize": 4, "lines.linewidth": 1.2,
    "image.cmap": "cividis", "axes.grid": False,
}  # fmt: skip


def write_plots(directory: Path, document: Document, suffix: str) -> tuple[list[str], list[str]]:
    """Every plot that the document has numbers for; (names of the files, notes).

    Law: equal documents give equal bytes (of one version of matplotlib).
    """
    return write_figures(directory, _plots(document), [suffix], dpi=_DPI, style=_STYLE)


def _plots(document: Document) -> Iterator[Drawing]:
    """(name, what draws it) of the plots that there are numbers for."""
    domains = document["domains"]
    if any(domain["curve"] or domain["losses"] for domain in domains):
        yield "losses", partial(draw_losses, domains=domains)
    for mode, rows in document["matrix"].items():
        if rows:
            yield f"matrix-{mode}", partial(draw_matrix, mode=mode, rows=rows)
    geometry = document["geometry"]
    found = {name: geometry[name] for name in ("weights", "data") if geometry.get(name)}
    if any(table["pairs"] for table in found.values()):
        yield "cosines", partial(draw_cosines, found=found)
    if geometry["spectra"]:
        yield "spectra", partial(draw_spectra, stacks=geometry["spectra"])
    routing = document["routing"]
    if routing and routing["stacks"]:
        for what in ("gate", "dispatch"):
            yield f"experts-{what}", partial(draw_load, stacks=routing["stacks"], what=what)
    if routing and routing["points"]:
        yield "routing-pca", partial(draw_points, points=routing["points"])


def look_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each name; pairs differ up to 49 names."""
    return {
        name: {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[(index + index // len(COLOURS)) % len(MARKERS)],
        }
        for index, name in enumerate(names)
    }


def _panels(figure: Any, count: int, height: float = 2.2, **options: Any) -> list[Any]:
    """`count` axes in rows of three, the rest of the last row empty."""
    if count > _MOST_PANELS:
        figure.suptitle(f"the first {_MOST_PANELS} of {count}; all are in the report")
    count = min(count, _MOST_PANELS)
    columns = min(count, _COLUMNS)
    rows = math.ceil(count / columns)
    figure.set_size_inches(max(3.5, _INCHES * columns / _COLUMNS), 0.5 + height * rows)
    axes = figure.subplots(rows, columns, squeeze=False, **options).flatten().tolist()
    for ax in axes[count:]:
        ax.remove()
    return axes[:count]


def draw_losses(figure: Any, domains: Sequence[Document]) -> None:
    """Validation loss of every domain over its own optimizer steps, a line a round; without a log,
    the losses after its rounds.
    """
    shown = [domain for domain in domains if domain["curve"] or domain["losses"]]
    axes = _panels(figure, len(shown))
    for ax, domain in zip(axes, shown, strict=False):
        if domain["curve"]:
            _draw_rounds(ax, domain["curve"])
            ax.set_xlabel("optimizer step, all rounds")
        else:
            ax.plot(range(len(domain["losses"])), domain["losses"], marker="o", color=COLOURS[0])
            ax.set_xticks(range(len(domain["losses"])))
            ax.set_xlabel("rounds trained")
        ax.set_title(domain["name"])
    for ax in axes[::_COLUMNS]:
        ax.set_ylabel("validation loss, nats a token")


def _draw_rounds(ax: Any, curve: Sequence[Document]) -> None:
    looks = look_of([str(number) for number in dict.fromkeys(p["round"] for p in curve)])
    start = 0
    for number, look in looks.items():
        points = [point for point in curve if str(point["round"]) == number]
        steps = [start + point["step"] for point in points]
        ax.plot(steps, [p["validation_loss"] for p in points], label=f"round {number}", **look)
        start = steps[-1]
    ax.legend()


def draw_matrix(figure: Any, mode: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    """The forgetting matrix of one mode: rows, the domain trained last; columns, measured."""
    names = list(rows)
    values = [[rows[a].get(b, math.nan) for b in names] for a in names]
    side = 1.6 + 0.75 * len(names)
    figure.set_size_inches(side + 0.9, side)
    ax = figure.subplots()
    image = _heat_map(ax, values, names, "{:.3f}")
    ax.set_xlabel("measured on")
    ax.set_ylabel("after training")
    scale = "validation loss, nats a token (brighter: higher)"
    figure.colorbar(image, ax=ax, label=scale, shrink=0.8)
    ax.set_title(f"forgetting matrix, {mode}")


def _heat_map(
    ax: Any, values: Sequence[Sequence[float]], names: Sequence[str], form: str, **options: Any
) -> Any:
    image = ax.imshow(values, **options)
    low, high = image.get_clim()
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(names)), names)
    ax.spines[:].set_visible(False)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if not math.isnan(value):
                bright = high > low and (value - low) / (high - low) > _BRIGHT
                colour = "black" if bright else "white"
                ax.text(x, y, form.format(value), ha="center", va="center", color=colour)
    return image


def draw_cosines(figure: Any, found: Mapping[str, Document]) -> None:
    """Heat maps of the mean largest cosine between domains, and its mean by projection.

    The diagonal, 1 by definition, is left white: it would take the scale.
    """
    names = list(next(iter(found.values()))["matrix"])
    kinds = list(dict.fromkeys(kind for table in found.values() for kind in table["by_projection"]))
    side, rows_height = max(2.4, 1.2 + 0.55 * len(names)), 1.0 + 0.22 * len(kinds)
    figure.set_size_inches(max(_INCHES, (side + 0.5) * len(found)), side + 0.7 + rows_height)
    above, below = figure.subfigures(2, 1, height_ratios=[side + 0.7, rows_height])
    axes = above.subplots(1, len(found), squeeze=False)[0]
    shown = {what: _off_diagonal(table["matrix"], names) for what, table in found.items()}
    top = max(v for rows in shown.values() for row in rows for v in row if not math.isnan(v))
    for ax, (what, rows) in zip(axes, shown.items(), strict=True):
        image = _heat_map(ax, rows, names, "{:.2f}", vmin=0, vmax=top)
        chance = found[what]["mean_chance"]
        ax.set_title(f"from {what}" + ("" if chance is None else f" (chance {chance:.2f})"))
    scale = "largest |cosine|, mean (brighter: more)"
    above.colorbar(image, ax=list(axes), label=scale, shrink=0.8)
    _draw_by_projection(below.subplots(), found, kinds)


def _off_diagonal(table: Mapping[str, Any], names: Sequence[str]) -> list[list[float]]:
    return [
        [_number(table.get(a, {}).get(b)) if a != b else math.nan for b in names] for a in names
    ]


def _draw_by_projection(ax: Any, found: Mapping[str, Document], kinds: Sequence[str]) -> None:
    """A row a projection: mean over pairs and layers, with a tick where chance is."""
    highest = 0.0
    for index, (what, look) in enumerate(look_of(list(found)).items()):
        shift = 0.3 * (index - (len(found) - 1) / 2)
        rows = found[what]["by_projection"]
        places = [place + shift for place, kind in enumerate(kinds) if kind in rows]
        means, chance = (
            [rows[kind][key] for kind in kinds if kind in rows] for key in ("mean", "mean_chance")
        )
        label = "chance" if index == len(found) - 1 else None
        ax.plot(means, places, ls="", label=f"from {what}", **look)
        ax.plot(chance, places, ls="", marker="|", color="black", markersize=8, label=label)
        highest = max(highest, *means, *chance)
    ax.set_yticks(range(len(kinds)), kinds)
    ax.invert_yaxis()
    ax.set_xlim(0, min(1.0, 1.1 * highest))
    ax.grid(axis="both", color="0.92")
    ax.set_axisbelow(True)
    ax.set_xlabel("largest |cosine| between two domains' directions, mean over pairs and layers")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_spectra(figure: Any, stacks: Mapping[str, Document]) -> None:
    """Normalised singular values, a panel a projection, a line a stack: a colour and marker for
    its domain, a line style for its place in it.
    """
    kinds = list(
        dict.fromkeys(kind for stack in stacks.values() for kind in stack["by_projection"])
    )
    axes = _panels(figure, len(kinds), height=1.8, sharey=True, sharex=True)
    domains: dict[str, list[str]] = {}
    for name, stack in stacks.items():
        domains.setdefault(stack["domain"], []).append(name)
    looks = look_of(list(domains))
    for ax, kind in zip(axes, kinds, strict=False):
        for name, stack in stacks.items():
            found = stack["by_projection"].get(kind)
            if found and found["values"]:
                values = found["values"]
                place = domains[stack["domain"]].index(name)
                ax.plot(range(1, len(values) + 1), values, label=name, ls=_LINES[place % 4],
                        markevery=max(1, len(values) // 4), **looks[stack["domain"]])  # fmt: skip
        ax.set_title(kind)
        ax.set_ylim(0, 1.05)
        ax.tick_params(labelbottom=True)
    for ax in axes[::_COLUMNS]:
        ax.set_ylabel("value over the largest")
    for ax in axes[-_COLUMNS:]:
        ax.set_xlabel("singular value, by size")
    _legend_below(figure, axes[0])


def draw_load(figure: Any, stacks: Mapping[str, Document], what: str) -> None:
    """Mean gate weight or dispatch share by expert, a panel a stack, a marker a domain's data."""
    words = {"gate": "mean gate weight", "dispatch": "share of tokens that choose it"}
    axes = _panels(figure, len(stacks), height=2.0, sharey=True)
    domains = list(dict.fromkeys(name for stack in stacks.values() for name in stack["on"]))
    looks = look_of(domains)
    for ax, (name, stack) in zip(axes, stacks.items(), strict=False):
        for index, (domain, found) in enumerate(stack["on"].items()):
            shift = 0.6 * ((index + 0.5) / len(domains) - 0.5)
            _draw_means(ax, found[what], shift, domain, looks[domain])
        uniform = stack[f"uniform_{what}"]
        ax.axhline(uniform, color="0.4", ls="--", lw=0.8, zorder=0, label=f"uniform {uniform:g}")
        ax.set_xticks(range(stack["experts"]))
        ax.set_title(f"stack {name}")
    for ax in axes[::_COLUMNS]:
        ax.set_ylabel(words[what])
    for ax in axes[-_COLUMNS:]:
        ax.set_xlabel("expert")
    axes[0].set_ylim(bottom=0)
    _legend_below(figure, axes[0], "on rows of")


def _draw_means(
    ax: Any, means: Sequence[Document], shift: float, label: str, look: Mapping[str, Any]
) -> None:
    """Means with their intervals, where they have one."""
    places = [expert + shift for expert in range(len(means))]
    values = [found["mean"] for found in means]
    lows = [v - (v if f["low"] is None else f["low"]) for v, f in zip(values, means, strict=True)]
    highs = [
        (v if f["high"] is None else f["high"]) - v for v, f in zip(values, means, strict=True)
    ]
    ax.errorbar(places, values, [lows, highs], ls="", elinewidth=0.8, label=label, **look)


def draw_points(figure: Any, points: Document) -> None:
    """Two principal components of the routing, a point a prompt."""
    figure.set_size_inches(4.5, 3.6)
    ax = figure.subplots()
    for name, look in look_of(list(dict.fromkeys(points["labels"]))).items():
        chosen = [
            p for p, n in zip(points["coordinates"], points["labels"], strict=True) if n == name
        ]
        ax.scatter([p[0] for p in chosen], [p[1] for p in chosen], s=14, label=name,
                   alpha=0.75, linewidths=0, **look)  # fmt: skip
    first, second = (100 * share for share in points["explained"][:2])
    ax.set_xlabel(f"component 1, {first:.0f}% of the variance of mean gates")
    ax.set_ylabel(f"component 2, {second:.0f}%")
    ax.set_title(_separation_words(points))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="prompts of")


def _separation_words(points: Document) -> str:
    found, random = points["separation"], points["separation_of_random_routers"]
    if found is None:
        return "routing of prompts"
    return (
        f"domain told from all gates: {100 * found['accuracy']:.0f}% (random routers "
        f"{100 * random['accuracy']:.0f}%, chance {100 * found['chance']:.0f}%)"
    )


def _legend_below(figure: Any, ax: Any, title: str | None = None) -> None:
    handles, labels = ax.get_legend_handles_labels()
    columns = min(len(labels), 6) or 1
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
