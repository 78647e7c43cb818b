"""The low-rank chain against exact rational arithmetic. Run: pytest tests/ops/test_low_rank.py"""

import math
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.ops.low_rank import fma, low_rank_delta, scaled_factor

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def rounded(exact: Fraction) -> float:
    """The float32 nearest to a rational number, ties to even, by integers alone."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    # The exponent of the last bit: 24 bits below the leading one, and not below 2**-149.
    exponent = size.numerator.bit_length() - size.denominator.bit_length() - 24
    while size / Fraction(2) ** exponent >= 1 << 24:
        exponent += 1
    while exponent > -149 and size / Fraction(2) ** (exponent - 1) < 1 << 24:
        exponent -= 1
    exponent = max(exponent, -149)
    steps = round(size / Fraction(2) ** exponent)  # round() of a Fraction takes ties to even
    value = Fraction(steps) * Fraction(2) ** exponent
    if value >= 1 << 128:
        return math.copysign(math.inf, exact)
    return math.copysign(float(value), exact)


def fused(a: float, b: float, c: float) -> float:
    """`fma` of three numbers."""
    with mx.stream(mx.cpu):
        made = fma(*(mx.array([x], mx.float32) for x in (a, b, c)))
        return float(np.array(made)[0])


@given(floats, floats, floats)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    assert fused(a, b, c) == rounded(Fraction(a) * Fraction(b) + Fraction(c))


@given(
    st.integers(1 << 23, (1 << 24) - 1),
    st.integers(1 << 23, (1 << 24) - 1),
    st.integers(-60, 10),
    st.integers(-80, 40),
    st.sampled_from([-1.0, 1.0]),
)
def test_fma_rounds_once_where_the_addend_is_far_from_the_product(
    a: int, b: int, shift: int, addend: int, sign: float
) -> None:
    """The sum of the two does not fit in float64: rounding twice would show."""
    first, second = math.ldexp(a, shift), math.ldexp(b, -24)
    third = sign * math.ldexp(1.0, addend)
    exact = Fraction(first) * Fraction(second) + Fraction(third)
    assert fused(first, second, third) == rounded(exact)


@pytest.mark.parametrize(
    ("a", "b", "c"),
    [
        # 1 + 2**-24 is a tie of float32; the product moves the sum off it by less than float64 has.
        (2.0**-40, 2.0**-40, 1.0 + 2.0**-23),
        (2.0**-12 + 2.0**-35, 2.0**-12, 1.0),
        # The product is a tie itself; the addend, far below its last bit in float64, decides.
        (1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**-80),
        (1.0 + 2.0**-12, 1.0 + 2.0**-12, -(2.0**-80)),
        (-1.0 - 2.0**-12, 1.0 + 2.0**-12, -(2.0**-80)),
        (-(2.0**-40), 2.0**-40, 1.0),
        (1.0 + 2.0**-23, 1.0 + 2.0**-23, -1.0),
        (LARGEST, 1.0, LARGEST * 2.0**-25),
        (LARGEST, 1.0, LARGEST * 2.0**-24),
        (SMALLEST, 0.5, SMALLEST),
        (SMALLEST, 0.5, 0.0),
        (SMALLEST, SMALLEST, -SMALLEST),
        (0.0, 1.0, -0.0),
    ],
)
def test_fma_at_ties_and_ends(a: float, b: float, c: float) -> None:
    assert fused(a, b, c) == rounded(Fraction(a) * Fraction(b) + Fraction(c))


def test_the_middle_between_two_floats_is_told_from_what_lies_beside_it() -> None:
    """Where float64 rounds the sum to a tie of float32, a second rounding would go wrong."""
    tie = 1.0 + 2.0**-24
    assert np.float32(tie + 2.0**-60) == np.float32(1.0)  # twice rounded
    product = (2.0**-12, 2.0**-12 + 2.0**-35)  # 2**-24 + 2**-47
    assert fused(*product, 1.0) == 1.0 + 2.0**-23
    # 1 + 2**-23 is odd: the tie above it goes up, unless the product is a little less than half.
    below = fused(1.0 - 2.0**-24, 2.0**-24, 1.0 + 2.0**-23)
    assert below == 1.0 + 2.0**-23
    assert fused(1.0, 2.0**-24, 1.0 + 2.0**-23) == 1.0 + 2.0**-22


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_chain_is_the_exact_chain(rank: int, dtype: mx.Dtype) -> None:
    random = np.random.default_rng(rank)
    lora_a = mx.array(random.standard_normal((2, rank, 5)).astype(np.float32)).astype(dtype)
    lora_b = mx.array(random.standard_normal((2, 3, rank)).astype(np.float32)).astype(dtype)
    scale = 0.7
    a, b = (np.array(x.astype(mx.float32)) for x in (lora_a, lora_b))
    found = np.array(low_rank_delta(lora_a, lora_b, scale))
    assert found.shape == (2, 3, 5)
    for expert, n, k in np.ndindex(found.shape):
        total = 0.0
        for r in range(rank):
            left = rounded(Fraction(float(np.float32(scale))) * Fraction(float(b[expert, n, r])))
            total = rounded(Fraction(left) * Fraction(float(a[expert, r, k])) + Fraction(total))
        assert found[expert, n, k] == total


def test_chain_broadcasts_and_takes_rank_zero() -> None:
    lora_a, lora_b = mx.ones((2, 6)), mx.ones((3, 4, 2))
    assert np.array_equal(low_rank_delta(lora_a, lora_b, 0.5), np.ones((3, 4, 6)))
    none = low_rank_delta(mx.zeros((0, 6)), mx.zeros((3, 4, 0)), 1.0)
    assert none.shape == (3, 4, 6)
    assert not np.array(none).any()


def test_factor_is_rounded_to_float32_once() -> None:
    values = mx.array([0.1, 3.0, 1e-3], mx.float32)
    found = np.array(scaled_factor(values, 0.3))
    exact = [rounded(Fraction(float(np.float32(0.3))) * Fraction(float(v))) for v in values]
    assert found.tolist() == exact
