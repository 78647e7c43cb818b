"""How often intervals of 95% over few rows hold the loss that the rows are drawn from.

A row has 5 to 40 tokens and a loss a token of its own: normal, exponential (skewed, as losses
are), or log-normal with a standard deviation of the logarithm of 0.5 or 1 (a long tail). The figure
is the loss a token of all rows. `studentized` is what `mlxstacks route evaluate` shows; percentiles
of the drawn means, stretched to Student's width, were what it showed before; Student's interval
takes no draws.

Run: python -m benchmarks.interval_coverage [SAMPLES]
The last line of stdout is one JSON object.
"""

import json
import math
import sys
from collections.abc import Callable

import numpy as np
from scipy.special import ndtri, stdtrit

from mlxstacks.stats import wilson_interval
from mlxstacks.studies.route.evaluate_figures import DomainLosses, loss_matrix

DRAWS = 600
ROWS = (3, 5, 10, 24, 100)
# Losses a token of n rows, and their true mean.
SHAPES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda rng, n: rng.normal(0, 1, n), 0.0),
    "exponential": (lambda rng, n: rng.exponential(1, n), 1.0),
    "log-normal, 0.5": (lambda rng, n: rng.lognormal(0, 0.5, n), math.exp(0.125)),
    "log-normal, 1": (lambda rng, n: rng.lognormal(0, 1, n), math.exp(0.5)),
}
METHODS = ("studentized", "stretched percentiles", "Student")


def interval(method: str, sums: np.ndarray, tokens: np.ndarray, seed: int) -> tuple[float, float]:
    """sums, tokens (n,) -> (low, high) of the loss a token."""
    n = len(tokens)
    if method == "studentized":
        rows = {"a": DomainLosses(tokens, {"base": sums})}
        found = loss_matrix(rows, ["base"], ["a"], DRAWS, seed)["base"]["a"]
        assert found["low"] is not None
        assert found["high"] is not None
        return found["low"], found["high"]
    value, student = sums.sum() / tokens.sum(), float(stdtrit(n - 1, 0.975))
    if method == "Student":
        squares = ((sums - value * tokens) ** 2).sum()
        half = student * math.sqrt(n / (n - 1) * squares) / tokens.sum()
        return value - half, value + half
    chosen = np.random.default_rng(seed).integers(0, n, (DRAWS, n))
    means = sums[chosen].sum(axis=1) / tokens[chosen].sum(axis=1)
    stretch = math.sqrt(n / (n - 1)) * student / float(ndtri(0.975))
    low, high = value + stretch * (np.percentile(means, [2.5, 97.5]) - value)
    return float(low), float(high)


def coverage(method: str, shape: str, n: int, samples: int) -> float:
    """Share of the samples whose interval holds the true mean."""
    draw, mean = SHAPES[shape]
    held = 0
    for seed in range(samples):
        rng = np.random.default_rng([seed, n])
        tokens = rng.integers(5, 41, n)
        low, high = interval(method, draw(rng, n) * tokens, tokens, seed)
        held += low <= mean <= high
    return held / samples


def main(samples: int = 1000) -> None:
    shares = {}
    for shape in SHAPES:
        for method in METHODS:
            of_rows = [coverage(method, shape, n, samples) for n in ROWS]
            shares[f"{shape}; {method}"] = of_rows
            cells = "  ".join(f"n={n}: {s:.1%}" for n, s in zip(ROWS, of_rows, strict=True))
            print(f"{shape:16} {method:22} {cells}", flush=True)
    widest = wilson_interval(round(0.95 * samples), samples)
    print(f"Of {samples} samples 95% is known to {100 * (0.95 - widest.low):.1f} points.")
    print(json.dumps({"samples": samples, "rows": ROWS, "held": shares}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
