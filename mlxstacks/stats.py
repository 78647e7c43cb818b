"""Small statistics for reports; scipy is not needed here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, fmean, stdev


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval of a rate; `low` and `high` lie in [0, 1]."""

    low: float
    high: float
    confidence: float

    def as_json(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high, "confidence": self.confidence}


def wilson_interval(count: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of `count` successes in `n` trials.

    Laws: it holds count/n, stays in [0, 1], and wilson(n - count, n) is its mirror image.

    Raises:
        ValueError: n < 1, count outside 0..n, or confidence outside (0, 1).
    """
    if n < 1 or not 0 <= count <= n:
        raise ValueError(f"got {count} successes of {n} trials; need 1 <= n and 0 <= count <= n")
    if not 0 < confidence < 1:
        raise ValueError(f"got confidence {confidence}; need a number between 0 and 1")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = count / n
    shrink = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At 0 and n the bound is exact in theory; rounding must not move it past the rate.
    low = 0.0 if count == 0 else min(max(0.0, centre - half), rate)
    high = 1.0 if count == n else max(min(1.0, centre + half), rate)
    return Interval(low, high, confidence)


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean with its two-sided interval by Student's t; no bounds where n is 1."""

    mean: float
    low: float | None
    high: float | None
    n: int
    confidence: float

    def as_json(self) -> dict[str, float | int | None]:
        return {
            "mean": self.mean,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "confidence": self.confidence,
        }

    def excludes(self, value: float) -> bool:
        """Whether the interval is known and does not hold `value`."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high

    def within(self, margin: float) -> bool:
        """Whether the interval is known and lies inside -margin to margin."""
        return self.low is not None and self.high is not None and (
            -margin < self.low <= self.high < margin
        )  # fmt: skip


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Mean of independent values and Student's interval for what it estimates.

    Laws: it holds the mean; equal values give an interval of no width; shifting the values shifts
    it. For differences of pairs it is the interval of the paired t test.

    Raises:
        ValueError: no values, one that is not finite, or confidence outside (0, 1).
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"got {list(values)}; need at least one value, all finite")
    if not 0 < confidence < 1:
        raise ValueError(f"got confidence {confidence}; need a number between 0 and 1")
    mean, n = fmean(values), len(values)
    if n == 1:
        return MeanInterval(mean, None, None, 1, confidence)
    half = t_quantile(0.5 + confidence / 2, n - 1) * stdev(values) / math.sqrt(n)
    return MeanInterval(mean, mean - half, mean + half, n, confidence)


@lru_cache(maxsize=256)  # some 20 ms each, and a report asks for the same few again and again
def t_quantile(probability: float, degrees: int) -> float:
    """The value below which Student's t with `degrees` of freedom falls with `probability`.

    Law: t_quantile(1 - p, k) = -t_quantile(p, k).
    Raises: ValueError for a probability outside (0, 1) or degrees < 1.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"got probability {probability} and {degrees} degrees of freedom")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _t_upper_tail(high, degrees) > 1 - probability:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        above = _t_upper_tail(middle, degrees) > 1 - probability
        low, high = (middle, high) if above else (low, middle)
    return (low + high) / 2


def _t_upper_tail(t: float, degrees: int) -> float:
    """P(T > t) for t >= 0: half the incomplete beta function at k / (k + t^2)."""
    return _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularized; the continued fraction of NIST's DLMF 8.17.22, on the side where it is fast."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    fraction = 1.0
    for m in range(200, 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        fraction = 1 + odd / (1 + even / fraction)
    return front / (a * fraction)
