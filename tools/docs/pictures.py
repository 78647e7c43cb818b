"""The pictures of Measure, in the style of result pages: of fuses of nano or a formula.

Each is an SVG inside its page, whose colours change with light and dark and whose title says in
words what it shows.
"""

import math
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import mlxstacks as ms
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.study.document import Plot, Series
from mlxstacks.study.power import least_effect_of_mcnemar
from mlxstacks.study.render.figures import svg_of
from mlxstacks.study.render.html import picture

POLICIES: tuple[PolicyName, ...] = (
    "refit", "keep", "nearest", "stochastic", "promote", "dequantize", "auto",
)  # fmt: skip
LOOKS = (1, 2, 3, 5, 10, 20)
SEED = 0


@cache
def pictures() -> Mapping[str, str]:
    """Name -> SVG."""
    plots = [survival(), correlation(), noise(), artifact(), steps(), kl(), standing(), power()]
    return {plot.id: str(picture(svg_of(plot), plot.id, plot.alt)[1]) for plot in plots}


@cache
def fuses() -> Mapping[str, Mapping[str, float]]:
    """Policy -> figures of nano's sample adapter fused with it, all modules together."""
    totals: dict[str, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for policy in POLICIES:
            result = ms.fuse(requant=policy, save_path=Path(directory) / policy)
            totals[policy] = result.data["stages"][0]["total"]
    return totals


def _of_policies(name: str, title: str, x_label: str, alt: str, **more: Any) -> Plot:
    values = {policy: total[name] for policy, total in fuses().items()}
    said = ", ".join(f"{policy} {value:.3g}" for policy, value in values.items())
    series = Series(label="nano, 3 bits", y=tuple(values.values()))
    return Plot(
        id=name, title=title, kind="intervals", series=(series,), categories=tuple(values),
        x_label=x_label, alt=f"{alt}: {said}.", **more,
    )  # fmt: skip


def survival() -> Plot:
    return _of_policies(
        "survival", "Survival: how much of D is in F", "<F, D> / <D, D>",
        "Survival of nano's adapter at 3 bits by policy", references={"all of it": 1.0},
    )  # fmt: skip


def correlation() -> Plot:
    return _of_policies(
        "correlation", "Correlation: whether F points where D points", "<F, D> / |F||D|",
        "Correlation of the fused with the trained change of nano at 3 bits by policy",
        references={"the same direction": 1.0},
    )  # fmt: skip


def noise() -> Plot:
    return _of_policies(
        "noise", "Noise: what F has besides D", "|F - survival D| / |D|",
        "Noise of fuses of nano at 3 bits by policy, in sizes of the adapter",
        references={"as large as the adapter": 1.0},
    )  # fmt: skip


def artifact() -> Plot:
    return _of_policies(
        "artifact", "Artifact: what a fuse of nothing changes", "|F0| / |W|",
        "Artifact of fuses of nano at 3 bits by policy, in sizes of the weights",
    )  # fmt: skip


def steps() -> Plot:
    """A delta of random numbers, rounded onto a grid of step 1 whose codes stand where they did."""
    draw = np.random.default_rng(SEED)
    sizes = tuple(float(size) for size in np.geomspace(0.02, 2, 25))
    shares = []
    for size in sizes:
        delta = size * draw.standard_normal(40_000)
        change = np.round(delta)
        length = float(np.linalg.norm(change) * np.linalg.norm(delta))
        shares.append(float(change @ delta) / length if length else 0.0)
    return Plot(
        id="steps", title="A small change is rounded away", kind="lines",
        series=(Series(label="keep", x=sizes, y=tuple(shares)),),
        x_label="size of the trained change, in quantization steps",
        y_label="correlation after rounding",
        alt="Correlation of a rounded random change with itself: 0 below 0.1 steps, "
        f"{_at(sizes, shares, 0.5):.2f} at half a step, {_at(sizes, shares, 1):.2f} at one step.",
    )  # fmt: skip


def _at(xs: tuple[float, ...], ys: list[float], x: float) -> float:
    return float(np.interp(x, xs, ys))


def kl() -> Plot:
    """Two tokens of chance p and 1 - p, of which a change of the model makes q and 1 - q."""
    qs = tuple(float(q) for q in np.linspace(0.02, 0.98, 97))
    series = [
        Series(
            label=f"the model gave {p:.0%}",
            x=qs,
            y=tuple(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)) for q in qs),
        )
        for p in (0.5, 0.9)
    ]
    return Plot(
        id="kl", title="KL of a choice between two tokens", kind="lines", series=tuple(series),
        x_label="chance that the changed model gives the same token", y_label="KL, nats per token",
        alt="KL divergence between two chances of a token: 0 where they are equal, 0.02 from 50% "
        "to 40%, 0.37 from 90% to 50%, without bound towards 0 and 1.",
    )  # fmt: skip


def standing() -> Plot:
    """How often a test of nothing passes at p < 0.05, if it may stop at any of some looks."""
    draw = np.random.default_rng(SEED)
    sums = np.cumsum(draw.standard_normal((20_000, 200)), axis=1)
    shares = []
    for looks in LOOKS:
        at = np.linspace(200 / looks, 200, looks).astype(int)
        z = np.abs(sums[:, at - 1]) / np.sqrt(at)
        shares.append(float((z > 1.96).any(axis=1).mean()))
    said = ", ".join(f"{share:.0%} with {n}" for n, share in zip(LOOKS, shares, strict=True))
    return Plot(
        id="standing", title="A result that was looked for until it came", kind="lines",
        series=(Series(label="passed", x=tuple(map(float, LOOKS)), y=tuple(shares)),),
        x_label="looks at the answers, each of which may end the run",
        y_label="share of runs that find an effect",
        alt=f"Share of simulated runs without any effect that reach p < 0.05: {said} looks.",
    )  # fmt: skip


def power() -> Plot:
    counts = (50, 100, 200, 400, 800, 1600, 3200)
    series = []
    for discordant in (0.1, 0.3):
        least = [least_effect_of_mcnemar(discordant, n) for n in counts]
        points = [(n, 100 * effect) for n, effect in zip(counts, least, strict=True) if effect]
        series.append(
            Series(
                label=f"{discordant:.0%} of the answers change",
                x=tuple(float(n) for n, _ in points),
                y=tuple(effect for _, effect in points),
            )
        )
    ends = ", ".join(f"{plot.label}: {plot.y[0]:.1f} to {plot.y[-1]:.1f}" for plot in series)
    return Plot(
        id="power", title="The smallest gain that paired items find", kind="lines",
        series=tuple(series), x_label="items", y_label="percentage points, at 80% power",
        alt=f"Smallest gain found at 80% power from 50 to 3,200 paired items. {ends} points.",
    )  # fmt: skip
