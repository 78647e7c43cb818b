"""affine.h's division by a reciprocal is the division, in the cases that are hardest for it.

A quotient of two 24-bit numbers is never the middle between two floats, but it can come as near to
it as 2**-24 of their distance. For a divisor B those dividends A solve A * 2**s = c (mod B) with a
small c. Run: pytest tests/ops/test_division.py
"""

from collections.abc import Callable
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops.kernels import kernel_text
from tests.metal_emulator import VARIANTS, Variant, metal_kernel, variant

LOWEST, HIGHEST = 1 << 23, 1 << 24  # significands as whole numbers
BODY = """
const uint at = thread_position_in_grid.x;
if (at < total[0]) {
  const float reciprocal = div_rn(1.0f, divisors[at]);
  exact[at] = quotient(dividends[at], divisors[at], reciprocal);
  whole[at] = rounded_quotient(dividends[at], divisors[at], reciprocal);
}
"""


def hard_dividends(divisor: int) -> list[int]:
    """Significands whose quotients are nearest to floats, and to the middles between them."""
    odd, twos = divisor, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    found: list[int] = []
    for shift in (23, 24, 25):
        # Half of the last place is 2**-24 for quotients from 1 to 2, and 2**-25 below 1.
        end = HIGHEST if shift < 25 else divisor
        inverse = pow(pow(2, max(0, shift - twos), odd), -1, odd) if odd > 1 else 0
        for residue in (-3, -2, -1, 1, 2, 3):
            first = inverse * residue % odd
            start = first + -(-(LOWEST - first) // odd) * odd
            found += range(start, min(start + 3 * odd, end), odd)
    return found


def divide(dividends: np.ndarray, divisors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(quotient, rounded_quotient) of affine.h, in the emulator."""
    header, _ = kernel_text("requant", "metal")
    names = ["dividends", "divisors", "total"], ["exact", "whole"]
    kernel = metal_kernel("division", *names, source=BODY, header=header)
    count = len(dividends)
    exact, whole = kernel(
        inputs=[mx.array(dividends), mx.array(divisors), mx.array([count], mx.uint32)],
        grid=(-(-count // 256) * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(count,), (count,)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return np.array(exact), np.array(whole)


@pytest.fixture(scope="module")
def hard() -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    def cases(divisors: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(5)
        # The last significands are the worst: their reciprocals are farthest from a float.
        drawn = [
            *random.integers(LOWEST, HIGHEST, divisors).tolist(),
            *range(HIGHEST - 64, HIGHEST),
        ]
        pairs = [(a, b) for b in drawn for a in hard_dividends(b)]
        dividends, chosen = np.array(pairs, dtype=np.float32).T.copy()
        dividends *= random.choice(np.array([-1, 1], np.float32), len(pairs))
        scales = np.exp2(random.integers(-70, 20, len(pairs))).astype(np.float32)
        sizes = np.exp2(random.integers(-8, 18, len(pairs))).astype(np.float32)
        return dividends * scales * sizes, chosen * scales

    return cases


def test_hard_cases_lie_where_rounding_is_decided() -> None:
    """Beside a float, or beside the middle between two, by a few parts in 2**24."""
    middles = 0
    divisors = np.random.default_rng(6).integers(LOWEST, HIGHEST, 200) | 1
    pairs = [(a, b) for b in divisors.tolist() for a in hard_dividends(b)]
    for dividend, divisor in pairs:
        halves = Fraction(dividend, divisor) * (1 << 24 if dividend >= divisor else 1 << 25)
        assert abs(halves - round(halves)) < Fraction(1, 1 << 19)
        middles += round(halves) % 2
    assert 0.2 < middles / len(pairs) < 0.8


def test_quotient_is_that_of_a_division(
    emulator: None,
    hard: Callable[[int], tuple[np.ndarray, np.ndarray]],
    campaign: Callable[[int], range],
) -> None:
    dividends, divisors = hard(len(campaign(20_000)))
    exact, whole = divide(dividends, divisors)
    np.testing.assert_array_equal(exact, dividends / divisors)
    np.testing.assert_array_equal(whole, np.rint(dividends / divisors))


@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
def test_quotient_is_the_same_however_it_is_run(
    emulator: None, hard: Callable[[int], tuple[np.ndarray, np.ndarray]], chosen: Variant
) -> None:
    dividends, divisors = hard(100)
    with variant(chosen):
        exact, whole = divide(dividends, divisors)
    np.testing.assert_array_equal(exact, dividends / divisors)
    np.testing.assert_array_equal(whole, np.rint(dividends / divisors))


def test_ties_go_to_even(emulator: None) -> None:
    halves = np.arange(-1000, 1000, dtype=np.float32) + np.float32(0.5)
    divisors = np.full_like(halves, 0.25)
    np.testing.assert_array_equal(divide(halves / 4, divisors)[1], np.rint(halves))
