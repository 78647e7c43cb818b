"""Intervals, tests of two rates and families of claims: published numbers and laws.

Run: pytest tests/test_stats.py
"""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.stats import (
    ClusteredMean,
    binomial_test,
    clustered_mean,
    holm,
    mcnemar_exact_test,
    mcnemar_of_pairs,
    mean_interval,
    two_proportion_z_test,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("count", "n", "low", "high"),
    [
        (18, 20, 0.6990, 0.9721),  # the published 18 of 20: 70 to 97%
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
    with pytest.raises(ValueError, match=r"must|got"):
        wilson_interval(count, n, confidence)


@pytest.mark.parametrize(
    ("n", "confidence", "quantile"),
    [(2, 0.95, 12.7062), (10, 0.95, 2.2622), (31, 0.99, 2.7500), (5, 0.9, 2.1318)],
)
def test_the_tabulated_quantiles_of_student(n: int, confidence: float, quantile: float) -> None:
    interval = mean_interval([0.0, 1.0] + [0.5] * (n - 2), confidence)
    error = math.sqrt(0.5 / (n - 1) / n)
    assert interval.low == pytest.approx(0.5 - quantile * error, abs=6e-5 * error)
    assert interval.high == pytest.approx(0.5 + quantile * error, abs=6e-5 * error)


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


def test_the_published_counts_give_the_published_p() -> None:
    """The Stacking Confound: 128 and 123 of 692, and the subset of 200."""
    result = two_proportion_z_test(128, 692, 123, 692)
    assert result.difference == pytest.approx(0.0072254, abs=5e-8)
    assert result.z == pytest.approx(0.349, abs=5e-4)
    assert round(result.p_value, 3) == 0.727
    subset = two_proportion_z_test(47, 200, 39, 200)
    assert subset.difference == pytest.approx(0.04)
    assert (round(subset.z, 3), round(subset.p_value, 2)) == (0.974, 0.33)
    assert round(two_proportion_z_test(153, 692, 123, 692).p_value, 3) == 0.044
    assert two_proportion_z_test(152, 692, 123, 692).p_value > 0.05
    assert round(two_proportion_z_test(158, 692, 123, 692).p_value, 3) == 0.019


COUNTS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(COUNTS, COUNTS)
def test_z_test_is_the_chi_square_test(a: tuple[int, int], b: tuple[int, int]) -> None:
    """A pooled two-sided z-test is Pearson's test of the 2x2 table."""
    result, swapped = two_proportion_z_test(*a, *b), two_proportion_z_test(*b, *a)
    assert (result.z, result.p_value) == (-swapped.z, swapped.p_value)
    right, wrong = a[0] + b[0], a[1] + b[1] - a[0] - b[0]
    if 0 in (right, wrong):
        assert (result.z, result.p_value) == (0.0, 1.0)
    else:
        cross = a[0] * (b[1] - b[0]) - b[0] * (a[1] - a[0])
        chi_square = cross**2 * (a[1] + b[1]) / (right * wrong * a[1] * b[1])
        assert result.z**2 == pytest.approx(chi_square, rel=1e-9, abs=1e-12)
        assert result.p_value == pytest.approx(2 - 2 * NormalDist().cdf(abs(result.z)), abs=1e-12)


@given(st.integers(0, 900), st.integers(0, 900))
def test_mcnemar_is_exact(gained: int, lost: int) -> None:
    """Against binomial coefficients, which are integers."""
    result, n = mcnemar_exact_test(gained, lost), gained + lost
    assert result.p_value == mcnemar_exact_test(lost, gained).p_value
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1))
    assert result.p_value == pytest.approx(min(1.0, 2 * tail / 2**n), rel=1e-9)
    assert result.chi_square == pytest.approx((gained - lost) ** 2 / max(n, 1))


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.integers(1, 4))
def test_copies_in_a_cluster_say_nothing_new(values: list[float], copies: int) -> None:
    names = [str(place) for place in range(len(values)) for _ in range(copies)]
    clustered = clustered_mean([value for value in values for _ in range(copies)], names)
    alone = mean_interval(values)
    assert clustered.clusters == len(values)
    assert (clustered.low, clustered.high) == pytest.approx((alone.low, alone.high), abs=1e-9)


def test_one_cluster_has_no_error() -> None:
    assert clustered_mean([1.0, 0.0], ["a", "a"]) == ClusteredMean(0.5, None, None, None, 1)
    assert clustered_mean([0.0, 0.0], ["a", "b"]).p_value == 1.0
    assert clustered_mean([1.0, 1.0], ["a", "b"]).p_value == 0.0
    with pytest.raises(ValueError, match="2 values and 1 clusters"):
        clustered_mean([1.0, 0.0], ["a"])


@given(st.integers(0, 40), st.integers(1, 40), st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
def test_the_binomial_test_is_exact(count: int, more: int, rate: float) -> None:
    n = count + more
    p_value = binomial_test(count, n, rate)
    assert 0 <= p_value <= 1
    assert p_value == pytest.approx(binomial_test(more, n, 1 - rate), rel=1e-9, abs=1e-300)
    up = sum(math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(count, n + 1))
    down = sum(math.comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in range(count + 1))
    assert p_value == pytest.approx(min(1.0, 2 * min(up, down)), rel=1e-9, abs=1e-300)


def test_pairs_are_counted() -> None:
    result = mcnemar_of_pairs([True, False, False, True, False], [True, True, True, False, False])
    assert (result.gained, result.lost) == (2, 1)
    with pytest.raises(ValueError, match=r"shorter|longer"):
        mcnemar_of_pairs([True], [True, False])


def test_holm_by_hand() -> None:
    # Sorted 0.005, 0.01, 0.03, 0.04: times 4, 3, 2, 1, then never falling.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.2]) == [0.2]
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="p-values"):
        holm([0.1, math.nan])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_the_value_and_bonferroni(values: list[float]) -> None:
    adjusted = holm(values)
    for own, made in zip(values, adjusted, strict=True):
        assert own <= made <= min(1.0, len(values) * own)
    by_value = sorted(range(len(values)), key=lambda i: values[i])
    assert [adjusted[i] for i in by_value] == sorted(adjusted)


def test_impossible_tests_are_refused() -> None:
    with pytest.raises(ValueError, match="got 5 successes of 4"):
        two_proportion_z_test(1, 4, 5, 4)
    with pytest.raises(ValueError, match="got 1 gained and -1 lost"):
        mcnemar_exact_test(1, -1)
