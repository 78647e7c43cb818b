"""Intervals of rates and of means against published numbers, and their laws.

Run: pytest tests/test_stats.py
"""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.stats import mean_interval, t_quantile, wilson_interval


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [
        (18, 20, 0.6990, 0.9721),  # spec/confound.md: 18/20 is 70 to 97%
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_known_intervals(count: int, n: int, low: float, high: float) -> None:
    interval = wilson_interval(count, n)
    assert interval.low == pytest.approx(low, abs=6e-5)
    assert interval.high == pytest.approx(high, abs=6e-5)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_holds_the_rate_and_mirrors(case: tuple[int, int]) -> None:
    count, n = case
    interval, mirror = wilson_interval(count, n), wilson_interval(n - count, n)
    assert 0 <= interval.low <= count / n <= interval.high <= 1
    assert interval.low == pytest.approx(1 - mirror.high, abs=1e-12)


def test_more_confidence_is_wider() -> None:
    narrow, wide = wilson_interval(30, 100, 0.9), wilson_interval(30, 100, 0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize(
    ("count", "n", "confidence"), [(1, 0, 0.95), (-1, 5, 0.95), (6, 5, 0.95), (1, 5, 1.0)]
)
def test_impossible_counts_are_refused(count: int, n: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="got"):
        wilson_interval(count, n, confidence)


def test_scipy_is_not_imported() -> None:
    code = "import sys, mlxstacks.stats; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 19, 239, 10_000])
@pytest.mark.parametrize("probability", [0.6, 0.9, 0.95, 0.975, 0.995, 0.9999])
def test_t_quantile_is_that_of_scipy(probability: float, degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    expected = stats.t.ppf(probability, degrees)
    assert t_quantile(probability, degrees) == pytest.approx(expected, rel=1e-9)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-expected, rel=1e-6)


def test_mean_interval_is_that_of_the_t_test() -> None:
    # t(0.975, 4) = 2.776445 by any table; the standard error of these is 0.7071068
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (interval.mean, interval.n) == (3.0, 5)
    assert interval.low == pytest.approx(3 - 2.776445 * 0.7071068, abs=1e-5)
    assert interval.high == pytest.approx(3 + 2.776445 * 0.7071068, abs=1e-5)
    assert not interval.excludes(3.0)
    assert interval.excludes(6.0)
    assert not interval.within(4.0)
    assert interval.within(5.0)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.floats(-1e3, 1e3))
def test_mean_interval_holds_the_mean_and_shifts(values: list[float], shift: float) -> None:
    interval, moved = mean_interval(values), mean_interval([v + shift for v in values])
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low <= interval.mean <= interval.high
    assert moved.low == pytest.approx(interval.low + shift, abs=1e-6)
    wide = mean_interval(values, 0.99)
    assert wide.low is not None
    assert wide.low <= interval.low


def test_one_value_has_no_interval_and_equal_ones_no_width() -> None:
    one = mean_interval([2.5])
    assert (one.mean, one.low, one.high, one.n) == (2.5, None, None, 1)
    assert not one.excludes(0.0)
    assert not one.within(10.0)
    same = mean_interval([0.5] * 4)
    assert (same.low, same.high) == (0.5, 0.5)
    assert same.excludes(0.0)


@pytest.mark.parametrize(
    ("values", "confidence"), [([], 0.95), ([1.0, math.nan], 0.95), ([1.0, 2.0], 1.0)]
)
def test_impossible_means_are_refused(values: list[float], confidence: float) -> None:
    with pytest.raises(ValueError, match="got"):
        mean_interval(values, confidence)


@pytest.mark.parametrize(("probability", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_impossible_quantiles_are_refused(probability: float, degrees: int) -> None:
    with pytest.raises(ValueError, match="degrees of freedom"):
        t_quantile(probability, degrees)
