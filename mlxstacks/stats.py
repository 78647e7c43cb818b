"""Small statistics for reports; scipy is not needed here."""

import math
from dataclasses import dataclass
from statistics import NormalDist


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
