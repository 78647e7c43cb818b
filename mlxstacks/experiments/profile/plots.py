"""Heat maps of a routing profile, where matplotlib is installed (the extra `plots`)."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.experiments.figures import Drawing, write_figures
from mlxstacks.experiments.profile.routing_profile import shares

_STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "image.cmap": "cividis", "lines.linewidth": 1.2,
}  # fmt: skip
_DPI = 200
# Beyond so many cells numbers are too small to read; the JSON has them.
_MOST_NUMBERS = 200
# Groups: more make an image that no reader takes in and no memory holds.
MOST_SHOWN = 40
# cividis is bright at its upper end.
_BRIGHT = 0.55


def write_plots(
    directory: Path,
    tables: Mapping[str, Any],
    names: Sequence[str],
    layers: Sequence[int],
    counts: np.ndarray,
    suffix: str,
) -> tuple[list[str], list[str]]:
    """divergence, jaccard and experts; (names of the files, notes). counts (S, L, E).

    Of more groups than can be read the first ones are drawn, and a note says so.
    """
    every, names = len(names), names[:MOST_SHOWN]
    counts = counts[: len(names)]
    drawings: list[Drawing] = [
        ("divergence", partial(draw_divergence, tables=tables, names=names, layers=layers)),
        ("jaccard", partial(draw_jaccard, tables=tables, names=names)),
        ("experts", partial(
            draw_experts, tables=tables, names=names, layers=layers, counts=counts,
        )),
    ]  # fmt: skip
    written, notes = write_figures(directory, drawings, [suffix], dpi=_DPI, style=_STYLE)
    if written and every > len(names):
        notes.append(f"Plots show the first {len(names)} of {every} groups; the report has all.")
    return written, notes


def draw_divergence(
    figure: Any, tables: Mapping[str, Any], names: Sequence[str], layers: Sequence[int]
) -> None:
    """Groups by layers, each group's own layers framed; below, the mean beside shuffled labels."""
    figure.set_size_inches(max(4.5, 2.2 + 0.22 * len(layers)), 2.4 + 0.24 * len(names))
    above, below = figure.subplots(2, 1, height_ratios=[1 + 0.24 * len(names), 1.3], sharex=True)
    values = [[1000 * kl for kl in tables["divergence"]["kl_nats"][name]] for name in names]
    image = _heat_map(above, values, "{:.1f}")
    above.set_yticks(range(len(names)), names)
    own, places = tables["top_layers"]["by_kl"], {layer: i for i, layer in enumerate(layers)}
    for row, name in enumerate(names):
        above.scatter(
            [places[layer] for layer in own[name]], [row - 0.36] * len(own[name]),
            marker="v", s=9, color="#D55E00", linewidths=0,
        )  # fmt: skip
    figure.colorbar(image, ax=above, label="KL to the pooled routing, nats / 1000 (brighter: more)")
    above.set_title(
        f"divergence of each group by layer; marks: its top {tables['top_layers']['k']}"
    )
    rows = tables["layers"]
    below.plot([row["jensen_shannon_nats"] for row in rows], marker="o", ms=3, color="#0072B2",
               label="groups (mean over them)")  # fmt: skip
    below.plot([row["shuffled_nats"] for row in rows], marker="s", ms=3, ls="--", color="#000000",
               label="shuffled labels")  # fmt: skip
    step = max(1, len(layers) // 20)
    below.set_xticks(range(0, len(layers), step), layers[::step])
    below.set_xlabel("layer")
    below.set_ylabel("nats")
    below.set_ylim(0, 1.7 * max(row["jensen_shannon_nats"] for row in rows) or None)
    below.legend(loc="upper left", ncols=2 if len(layers) > 12 else 1)


def draw_jaccard(figure: Any, tables: Mapping[str, Any], names: Sequence[str]) -> None:
    """Jaccard of the top sets, pair by pair."""
    side = 2.2 + 0.36 * len(names)
    figure.set_size_inches(side + 0.9, side)
    ax = figure.subplots()
    shown = [row[: len(names)] for row in tables["jaccard_matrix"][: len(names)]]
    image = _heat_map(ax, shown, "{:.2f}", vmin=0, vmax=1)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(names)), names)
    k = tables["top_layers"]["k"]
    found = tables["jaccard"][str(k)]
    scale = f"Jaccard of the top-{k} layers (brighter: more)"
    figure.colorbar(image, ax=ax, label=scale, shrink=0.8)
    ax.set_title(
        f"mean {found['mean']:.3f}; random layers {found['chance']:.3f}, shuffled labels "
        f"{found['shuffled']:.3f}"
    )


def draw_experts(
    figure: Any,
    tables: Mapping[str, Any],
    names: Sequence[str],
    layers: Sequence[int],
    counts: np.ndarray,
) -> None:
    """Shares of experts, a row a group, at the layers whose experts are compared; experts in the
    order of their pooled share.
    """
    shown = tables["expert_overlap"]["layers"][:4]
    p = shares(counts)
    experts = p.shape[2]
    figure.set_size_inches(
        max(4.5, 7.0 if experts > 32 else 5.0), (1 + 0.2 * len(names)) * len(shown)
    )
    for ax, layer in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        own = p[:, list(layers).index(layer)]  # (S, E)
        order = np.argsort(-own.mean(axis=0), kind="stable")
        image = _heat_map(ax, 100 * own[:, order], "{:.0f}", vmin=0)
        ax.set_yticks(range(len(names)), names)
        if experts <= 32:
            ax.set_xticks(range(experts), order)
        else:
            ax.set_xticks([])
        ax.set_title(f"layer {layer}")
        figure.colorbar(image, ax=ax, label="percent (brighter: more)")
    ax.set_xlabel("expert, by its pooled share")


def _heat_map(ax: Any, values: Any, form: str, **options: Any) -> Any:
    """An image with its numbers, where there is room for them."""
    array = np.asarray(values)
    image = ax.imshow(array, aspect="auto", **options)
    ax.spines[:].set_visible(False)
    if array.size <= _MOST_NUMBERS:
        low, high = image.get_clim()
        for (y, x), value in np.ndenumerate(array):
            bright = high > low and (value - low) / (high - low) > _BRIGHT
            ax.text(x, y, form.format(value), ha="center", va="center",
                    color="black" if bright else "white", fontsize=6)  # fmt: skip
    return image
