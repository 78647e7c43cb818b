"""The arms of a confound run as plots, where matplotlib is installed (the extra `plots`)."""

from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.studies.confound.report import Findings
from mlxstacks.study.render.figures import Drawing, write_figures

_STYLE = {
    "font.size": 8, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
    "legend.frameon": False, "lines.linewidth": 1.2,
}  # fmt: skip
# Colours that also the colour-blind tell apart, and a mark for each.
_LOOKS = {"persona": ("#000000", "D"), "a0": ("#0072B2", "s"), "a1": ("#D55E00", "o"),
          "random": ("#777777", "^")}  # fmt: skip
_NAMES = {"persona": "persona, unfused", "a0": "A0 (zero delta)", "a1": "A1 (trained)",
          "random": "random of equal norm"}  # fmt: skip


def write_plots(
    directory: Path, found: Findings, ways: list[str], least_gain: float
) -> tuple[list[str], list[str]]:
    """arms and content, each as PNG and SVG; (names of the files, notes)."""
    drawings: list[Drawing] = [
        ("arms", partial(draw_arms, found=found)),
        ("content", partial(draw_content, found=found, ways=ways, least_gain=least_gain)),
    ]
    return write_figures(directory, drawings, style=_STYLE)


def draw_arms(figure: Any, found: Findings) -> None:
    """Share of right answers of each arm with its 95% interval; the rate of guessing dashed."""
    names = list(found.arms)
    figure.set_size_inches(6.4, 1.5 + 0.22 * len(names))
    ax = figure.subplots()
    ax.axvline(100 * found.guess_rate, color="black", ls="--", lw=0.9, label="guessing")
    labelled: set[str] = set()
    for place, name in enumerate(names):
        result, kind = found.arms[name], name.partition("_")[0]
        colour, mark = _LOOKS[kind]
        share = 100 * result.accuracy
        reach = [[share - 100 * result.interval.low], [100 * result.interval.high - share]]
        label = None if kind in labelled else _NAMES[kind]
        labelled.add(kind)
        ax.errorbar([share], [place], xerr=reach, color=colour, marker=mark, ms=4, capsize=2,
                    ls="none", label=label)  # fmt: skip
    ax.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    ax.invert_yaxis()
    ax.set_xlim(left=-1)  # room for the marks of arms at 0
    ax.set_xlabel("right answers to Set G's test items, percent, 95%")
    n = next(iter(found.arms.values())).n
    ax.set_title(found.standing.mark(f"arms on {n} items that base and persona got wrong"))
    figure.legend(loc="outside lower center", ncols=3)


def draw_content(figure: Any, found: Findings, ways: list[str], least_gain: float) -> None:
    """A1 less A0, and A1 less the random delta, by way; the smallest gain that counts dotted."""
    figure.set_size_inches(6.4, 1.4 + 0.36 * len(ways))
    ax = figure.subplots()
    ax.axvline(0, color="black", lw=0.9)
    ax.axvline(100 * least_gain, color="black", ls=":", lw=1, label="smallest gain that counts")
    rows = (("a0", found.claims, -0.13), ("random", found.against_random, 0.13))
    for control, claims, shift in rows:
        colour, mark = _LOOKS[control]
        there = [(place, claims[way]) for place, way in enumerate(ways) if way in claims]
        values = [100 * claim.difference for _, claim in there]
        bounds = [(100 * (c.bootstrap.low or 0), 100 * (c.bootstrap.high or 0)) for _, c in there]
        reach = [
            [max(0.0, v - low) for v, (low, _) in zip(values, bounds, strict=True)],
            [max(0.0, high - v) for v, (_, high) in zip(values, bounds, strict=True)],
        ]
        ax.errorbar(values, [place + shift for place, _ in there], xerr=reach, color=colour,
                    marker=mark, ms=4, capsize=2, ls="none",
                    label=f"A1 less {_NAMES[control]}")  # fmt: skip
    outcomes = {one.way: one.outcome for one in found.judgements}
    labels = [f"{way}: {outcomes[way]}" if way in outcomes else way for way in ways]
    ax.set_yticks(range(len(ways)), labels)
    ax.set_ylim(len(ways) - 0.5, -0.5)
    ax.set_xlabel("difference of right answers, points, 95% (bootstrap over items)")
    ax.set_title(found.standing.mark("content by way of fusing"))
    figure.legend(loc="outside lower center", ncols=3)
