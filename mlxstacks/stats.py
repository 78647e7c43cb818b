"""Statistics of reports: intervals, tests of two rates, pairs, several claims.

Rates of the same items in two arms are compared by `mcnemar_exact_test` (pairs) and beside it by
`two_proportion_z_test` (which knows no pairs); `paired_interval` gives the interval.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev


@dataclass(frozen=True, slots=True)
class Interval:
    """A two-sided interval; of a rate `low` and `high` lie in [0, 1]."""

    low: float
    high: float
    confidence: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def wilson_interval(count: int, n: int, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of `count` successes in `n` trials.

    Laws: it holds count/n, stays in [0, 1], and wilson(n - count, n) is its mirror image.

    Raises:
        ValueError: n < 1, count outside 0..n, or confidence outside (0, 1).
    """
    _check_confidence(confidence)
    _check_counts(count, n)
    # Newcombe (1998), Statistics in Medicine 17, 857, method 3. scipy.stats has it, and takes
    # longer to import than most commands run.
    z, rate = NormalDist().inv_cdf(0.5 + 0.5 * confidence), count / n
    width = 2 * (n + z**2)
    center = (2 * n * rate + z**2) / width
    half = z / width * math.sqrt(4 * n * rate * (1 - rate) + z**2)
    low = 0.0 if count == 0 else center - half
    return Interval(low, 1.0 if count == n else center + half, confidence)


def share(count: int, n: int) -> tuple[float, float, float]:
    """A rate with its Wilson interval of 95%, as a cell of a table."""
    interval = wilson_interval(count, n)
    return count / n, interval.low, interval.high


def share_note(n: int) -> str:
    """What stands below a table whose shares have no interval of their own.

    The rule of all tables, pages and verdicts: a share that estimates something (of prompts, items,
    answers, picks) has its n and its 95% interval beside it, or this note below its table. A share
    of a known whole (bytes, weights, codes, buffers) is no estimate and needs neither.

    Raises: ValueError: n < 1.
    """
    widest = wilson_interval(n // 2, n)
    width = 100 * (widest.high - widest.low)
    return f"shares are of n = {n:,} items, with 95% intervals at most {width:.1f} points wide"


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean with its two-sided interval by Student's t; no bounds where n is 1."""

    mean: float
    low: float | None
    high: float | None
    n: int
    confidence: float

    def as_json(self) -> dict[str, float | int | None]:
        return asdict(self)

    @property
    def cell(self) -> float | tuple[float, float, float]:
        """As a cell of a table: the mean with its interval, alone where it has none."""
        if self.low is None or self.high is None:
            return self.mean
        return self.mean, self.low, self.high

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
    from scipy.special import stdtrit  # Student's quantile; scipy.stats takes longer to import

    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"got {list(values)}; need at least one value, all finite")
    _check_confidence(confidence)
    mean, n = fmean(values), len(values)
    if n == 1:
        return MeanInterval(mean, None, None, 1, confidence)
    half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * stdev(values) / math.sqrt(n)
    return MeanInterval(mean, mean - half, mean + half, n, confidence)


@dataclass(frozen=True, slots=True)
class ClusteredMean:
    """A mean over clusters of values that are not independent. low, high, p_value (two-sided, of a
    mean of 0): by Student's t with one degree less than there are clusters; None for one cluster.
    """

    mean: float
    low: float | None
    high: float | None
    p_value: float | None
    clusters: int

    @property
    def cell(self) -> tuple[float, float, float] | None:
        """As a cell of a table; None without an interval, or where all clusters are alike."""
        if self.low is None or self.high is None or self.low == self.high:
            return None
        return self.mean, self.low, self.high


def clustered_mean(
    values: Sequence[float], clusters: Sequence[str], confidence: float = 0.95
) -> ClusteredMean:
    """Mean of values and its interval by clustered standard errors, for items that share a source.

    clusters: the name of each value's. The error is that of Miller (2024), Adding error bars to
    evals, section 2.2, with the usual factor G / (G - 1) for G clusters; of few clusters (fewer
    than some 20) and very unequal ones it is known to be too small. Laws: clusters of one value
    each give `mean_interval`; clusters that are copies of one value each give that of the values.

    Raises: ValueError: no values, unequal lengths, or confidence outside (0, 1).
    """
    from scipy.special import stdtr, stdtrit

    _check_confidence(confidence)
    if not values or len(values) != len(clusters):
        raise ValueError(f"got {len(values)} values and {len(clusters)} clusters; need one of each")
    mean = fmean(values)
    sums = dict.fromkeys(clusters, 0.0)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value - mean
    count = len(sums)
    if count == 1:
        return ClusteredMean(mean, None, None, None, 1)
    squares = math.fsum(total * total for total in sums.values())
    error = math.sqrt(count / (count - 1) * squares) / len(values)
    half = float(stdtrit(count - 1, 0.5 + confidence / 2)) * error
    p_value = float(mean == 0)
    if error:
        p_value = 2 * float(stdtr(count - 1, -abs(mean) / error))
    return ClusteredMean(mean, mean - half, mean + half, p_value, count)


@dataclass(frozen=True, slots=True)
class ProportionTest:
    """Two independent rates: difference is a less b, p_value two-sided."""

    difference: float
    z: float
    p_value: float


def two_proportion_z_test(count_a: int, n_a: int, count_b: int, n_b: int) -> ProportionTest:
    """Pooled z-test without continuity correction: are two rates the same?

    The published one (The Stacking Confound): 128 and 123 of 692 give z = 0.349, p = 0.727.
    Laws: swapping the arms turns the signs and keeps p; equal rates give p = 1, also where all or
    none succeed, for then nothing differs.

    Raises:
        ValueError: n < 1 or a count outside 0..n.
    """
    _check_counts(count_a, n_a)
    _check_counts(count_b, n_b)
    difference = count_a / n_a - count_b / n_b
    pooled = (count_a + count_b) / (n_a + n_b)
    error = math.sqrt(pooled * (1 - pooled) * (1 / n_a + 1 / n_b))
    # Integers decide equality: in floats 1/3 less 2/6 need not be 0.
    z = 0.0 if count_a * n_b == count_b * n_a else difference / error
    return ProportionTest(difference, z, math.erfc(abs(z) / math.sqrt(2)))


@dataclass(frozen=True, slots=True)
class McNemarTest:
    """gained: wrong in the first arm, right in the second; lost: the other way round.

    chi_square: without continuity correction, for comparison with published ones.
    """

    gained: int
    lost: int
    p_value: float
    chi_square: float


def mcnemar_exact_test(gained: int, lost: int) -> McNemarTest:
    """Two-sided exact test of paired answers; pairs that agree do not count.

    Published (The Stacking Confound): 135 and 56 give chi-square 32.7 and p about 1e-8.
    Laws: swapping keeps p; equal counts give p = 1.

    Raises:
        ValueError: a negative count.
    """
    if gained < 0 or lost < 0:
        raise ValueError(f"got {gained} gained and {lost} lost; need counts of 0 or more")
    if not gained + lost:
        return McNemarTest(0, 0, 1.0, 0.0)
    pairs = gained + lost
    return McNemarTest(gained, lost, binomial_test(gained, pairs), (gained - lost) ** 2 / pairs)


def binomial_test(count: int, n: int, rate: float = 0.5) -> float:
    """Two-sided exact p of `count` successes in n trials of a known rate: twice the smaller tail.

    Laws: failures of the other rate have the same p; at most 1.
    Raises: ValueError: n < 1, a count outside 0..n or a rate outside [0, 1].
    """
    from scipy.special import bdtr

    _check_counts(count, n)
    if not 0 <= rate <= 1:
        raise ValueError(f"got rate {rate}; need a number from 0 to 1")
    tails = bdtr(count, n, rate), bdtr(n - count, n, 1 - rate)
    return min(1.0, 2 * float(min(tails)))


def binomial_at_most(count: int, n: int, rate: float) -> float:
    """One-sided exact p of at most `count` successes in n trials: small where the rate is lower.

    Laws: it rises with count, to 1 at n; falls as the rate rises.
    Raises: ValueError: as `binomial_test`.
    """
    from scipy.special import bdtr

    _check_counts(count, n)
    if not 0 <= rate <= 1:
        raise ValueError(f"got rate {rate}; need a number from 0 to 1")
    return float(bdtr(count, n, rate))


def mcnemar_of_pairs(first: Sequence[bool], second: Sequence[bool]) -> McNemarTest:
    """`mcnemar_exact_test` of the answers of two arms, item by item.

    Raises: ValueError for arms of unequal length.
    """
    pairs = [(bool(a), bool(b)) for a, b in zip(first, second, strict=True)]
    return mcnemar_exact_test(sum(b > a for a, b in pairs), sum(a > b for a, b in pairs))


def paired_interval(
    both: int, gained: int, lost: int, n: int, confidence: float = 0.95
) -> Interval:
    """Interval of (gained - lost) / n, for the rates of two arms on the same n items.

    Newcombe (1998), Statistics in Medicine 17, 2635, method 10: Wilson's intervals of both rates
    and the correlation of the pairs, corrected for continuity. Unlike a bootstrap it has a width
    where no pair differs. Laws: it holds the difference; swapping gained and lost mirrors it.
    Raises: ValueError for counts that are negative or more than n.
    """
    neither = n - both - gained - lost
    if min(both, gained, lost, neither) < 0 or n < 1:
        raise ValueError(f"got {both} both, {gained} gained, {lost} lost of {n}")
    right, other = both + gained, both + lost
    first, second = (wilson_interval(count, n, confidence) for count in (right, other))
    product = right * (n - right) * other * (n - other)
    agreement = float(both * neither - gained * lost)
    if agreement > 0:
        agreement = max(agreement - n / 2, 0.0)
    phi = agreement / math.sqrt(product) if product else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    difference = (gained - lost) / n
    down = reach(right / n - first.low, second.high - other / n)
    up = reach(first.high - right / n, other / n - second.low)
    return Interval(max(-1.0, difference - down), min(1.0, difference + up), confidence)


def bootstrap_ratio(
    sums: Sequence[float],
    counts: Sequence[int],
    *,
    seed: int = 0,
    resamples: int = 2_000,
    confidence: float = 0.95,
) -> Interval:
    """Percentile interval of sum / count over resampled clusters: a sum and a count of each.

    For values that are alike within a cluster, as tokens of one text are. Laws: it holds the ratio
    where all clusters have the same; the order of clusters does not matter to what it estimates.

    Raises:
        ValueError: no clusters, unequal lengths, a sum that is not finite, a count below 1.
    """
    import numpy as np

    totals, sizes = np.array(sums, np.float64), np.array(counts, np.float64)
    if not totals.size or totals.shape != sizes.shape:
        raise ValueError(f"got {totals.size} sums and {sizes.size} counts; need one of each")
    if not np.isfinite(totals).all() or sizes.min() < 1:
        raise ValueError("sums must be finite and counts 1 or more")
    _check_confidence(confidence)
    random = np.random.default_rng(seed)
    drawn = random.multinomial(totals.size, [1 / totals.size] * totals.size, size=resamples)
    ratios = (drawn @ totals) / (drawn @ sizes)
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high), confidence)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several claims, adjusted by Holm's step-down rule, in the given order.

    A claim holds in the family at level alpha where its adjusted value is below alpha.
    Laws: an adjusted value is at least its own; the order of the values is kept; one value is
    itself; never above Bonferroni's.

    Raises:
        ValueError: a value outside [0, 1].
    """
    if not all(0 <= value <= 1 for value in p_values):  # NaN too
        raise ValueError(f"got {list(p_values)}; p-values lie in [0, 1]")
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def _check_counts(count: int, n: int) -> None:
    if n < 1 or not 0 <= count <= n:
        raise ValueError(f"got {count} successes of {n} trials; need 1 <= n and 0 <= count <= n")


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"got confidence {confidence}; need a number between 0 and 1")
