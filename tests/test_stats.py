"""Wilson's interval against published numbers and its laws. Run: pytest tests/test_stats.py"""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.stats import wilson_interval


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
