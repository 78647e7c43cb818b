"""Losses of every mode on every domain's rows, with intervals; and the differences between modes.

A domain's loss in a mode is the mean over the tokens of its rows, as the one evaluator has it.
Intervals are percentiles of a bootstrap over rows: rows are drawn with replacement, each with all
its tokens, the same rows for all modes. A difference between two modes is of pairs: the same tokens
in both. Where its interval holds 0 the modes are not distinguishable.

Of few rows percentiles are too close to each other (they never leave the range of the rows, and
the bootstrap's variance lacks the factor n / (n - 1)). Their distances from the value are therefore
stretched by sqrt(n / (n - 1)) t / z, Student's quantile over the normal one; the same correction as
in Hesterberg, What teachers should know about the bootstrap (2015), made on the bounds.

Letters: n rows of a domain, R bootstrap draws.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CONFIDENCE = 0.95
# Under this name stands the mean over domains, each counting alike.
ALL = "all domains"


@dataclass(frozen=True, eq=False)
class DomainLosses:
    """One domain's rows. tokens (n,): with loss weight. sums: mode -> (n,) nats of all of them."""

    tokens: np.ndarray
    sums: Mapping[str, np.ndarray]

    def loss(self, mode: str) -> float:
        return float(self.sums[mode].sum() / self.tokens.sum())


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval; no bounds where one row tells nothing of the spread."""

    value: float
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """1 or -1 where the interval lies above or below 0, else 0: not distinguishable from it."""
        if self.low is None or self.high is None:
            return 0
        return int(self.low > 0) - int(self.high < 0)

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, eq=False)
class _Drawn:
    """value: of the rows as they are. replicates (R,): of the drawn ones. n: rows."""

    value: float
    replicates: np.ndarray
    n: int

    def estimate(self) -> Estimate:
        if self.n < 2:
            return Estimate(self.value, None, None)
        tail = 50 * (1 - CONFIDENCE)
        bounds = np.percentile(self.replicates, [tail, 100 - tail])
        low, high = self.value + _stretch(self.n) * (bounds - self.value)
        return Estimate(self.value, float(low), float(high))


def _stretch(n: int) -> float:
    """What the interval of a bootstrap over n >= 2 rows lacks in width; towards 1 for many."""
    from scipy.special import ndtri, stdtrit

    upper = 0.5 + CONFIDENCE / 2
    return math.sqrt(n / (n - 1)) * float(stdtrit(n - 1, upper) / ndtri(upper))


def loss_matrix(
    losses: Mapping[str, DomainLosses],
    modes: Sequence[str],
    averaged: Collection[str],
    draws: int,
    seed: int,
) -> dict[str, dict[str, Estimate]]:
    """Mode -> domain -> loss. ALL is the mean over the `averaged` ones."""
    return {
        mode: _estimates(
            losses, {name: d.sums[mode] for name, d in losses.items()}, averaged, draws, seed
        )
        for mode in modes
    }


def loss_differences(
    losses: Mapping[str, DomainLosses],
    modes: Sequence[str],
    against: str,
    averaged: Collection[str],
    draws: int,
    seed: int,
) -> dict[str, dict[str, Estimate]]:
    """Mode -> domain (and ALL) -> loss less that of the mode `against`: below 0 is better.

    Law: the difference of a mode to itself is 0, with an interval of no width.
    """
    return {
        mode: _estimates(
            losses,
            {name: d.sums[mode] - d.sums[against] for name, d in losses.items()},
            averaged,
            draws,
            seed,
        )
        for mode in modes
        if mode != against
    }


def _estimates(
    losses: Mapping[str, DomainLosses],
    sums: Mapping[str, np.ndarray],
    averaged: Collection[str],
    draws: int,
    seed: int,
) -> dict[str, Estimate]:
    drawn = {
        name: _drawn(sums[name], losses[name].tokens, draws, seed + place)
        for place, name in enumerate(losses)
    }
    found = {name: d.estimate() for name, d in drawn.items()}
    if among := [drawn[name] for name in drawn if name in averaged]:
        value = float(np.mean([d.value for d in among]))
        replicates = np.mean([d.replicates for d in among], axis=0)
        found[ALL] = _Drawn(value, replicates, min(d.n for d in among)).estimate()
    return found


def _drawn(sums: np.ndarray, tokens: np.ndarray, draws: int, seed: int) -> _Drawn:
    """Sums, tokens (n,): the mean a token. The rows drawn depend on n, draws and seed alone."""
    n = len(tokens)
    chosen = np.random.default_rng(seed).integers(0, n, (draws, n))
    replicates = sums[chosen].sum(axis=1) / tokens[chosen].sum(axis=1)  # (R,)
    return _Drawn(float(sums.sum() / tokens.sum()), replicates, n)


def compared_words(
    differences: Mapping[str, Estimate], better: str, worse: str, unclear: str
) -> str:
    """How one mode stands to another over domains: `better a, b; worse c; unclear d`."""
    by_sign: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for name, difference in differences.items():
        if name != ALL:
            by_sign[difference.sign].append(f"{name} ({difference.value:+.3f})")
    words = {-1: better, 1: worse, 0: unclear}
    return "; ".join(f"{words[s]} {', '.join(names)}" for s, names in by_sign.items() if names)
