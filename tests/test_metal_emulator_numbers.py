"""The Metal emulator: half, bfloat, vectors, functions and what Metal's types refuse.

Expected values come from NumPy in float64, rounded once, or from exact fractions.
Run: pytest tests/test_metal_emulator_numbers.py
"""

from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator.small import run
from tests.metal_emulator import VARIANTS, CompileError, unavailable, variant

# Infinities and NaN are what is tested.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

X = "uint e = thread_position_in_grid.x;\n"
ALL = np.arange(65536, dtype=np.uint16)
WIDE = {"grid": 65536, "threadgroup": 1024}
KINDS = {"half": mx.float16, "bfloat": mx.bfloat16}
LARGEST = {"half": 65504.0, "bfloat": float(mx.finfo(mx.bfloat16).max)}


@pytest.fixture(autouse=True)
def compiler() -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)


def as_float64(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "half":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Bits of float64 `values` rounded once to `kind`, ties to even."""
    if kind == "half":
        return values.astype(np.float16).view(np.uint16)
    # 8 digits; the exponent of subnormal values stays at that of the smallest normal one.
    exponent = np.maximum(np.frexp(values)[1], -125)
    unit = np.ldexp(1.0, exponent - 8)
    kept = np.where(np.isfinite(values), np.rint(values / unit) * unit, values)
    return (kept.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def same(a: np.ndarray, b: np.ndarray, kind: str) -> bool:
    """Equal bits, or both not a number."""
    nan = np.isnan(as_float64(a, kind)) & np.isnan(as_float64(b, kind))
    return bool(((a == b) | nan).all())


@pytest.mark.parametrize("kind", KINDS)
def test_every_pattern_to_float_and_back(kind: str) -> None:
    given = {"bits": ALL}
    wide = np.array(
        run(X + f"out[e] = float(as_type<{kind}>(bits[e]));", given, (65536,), **WIDE)
    ).astype(np.float64)
    expected = as_float64(ALL, kind)
    assert np.array_equal(wide, expected, equal_nan=True)
    assert np.array_equal(np.signbit(wide), np.signbit(expected))
    back = run(
        X + f"out[e] = as_type<ushort>({kind}(float(as_type<{kind}>(bits[e]))));",
        given,
        (65536,),
        mx.uint16,
        **WIDE,
    )
    assert same(np.array(back), ALL, kind)
    moved = mx.array(ALL).view(KINDS[kind]).astype(mx.float32)
    assert np.array_equal(np.array(moved).astype(np.float64), expected, equal_nan=True)


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_float_to_sixteen_bits_rounds_to_even(kind: str, flush: bool) -> None:
    """Ties and their neighbours around every value, and random patterns."""
    middle = as_float64(ALL, kind)
    ties = ((middle[:-1] + middle[1:]) / 2).astype(np.float32)
    near = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, -np.float32(np.inf))]
    anything = np.random.default_rng(1).integers(0, 2**32, 65536, np.uint32).view(np.float32)
    for values in [*near, anything, np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)]:
        if flush:
            values = np.where(np.abs(values) < 2.0**-126, 0, values).astype(np.float32)
        with variant(next(v for v in VARIANTS if v.flush == flush)):
            got = run(
                X + f"if (e < n[0]) out[e] = as_type<ushort>({kind}(values[e]));",
                {"values": values, "n": np.array([values.size], np.uint32)},
                values.shape,
                mx.uint16,
                **WIDE,
            )
        assert same(np.array(got), rounded(values.astype(np.float64), kind), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_arithmetic_rounds_once_in_its_type(kind: str) -> None:
    random = np.random.default_rng(2)
    a, b = random.permutation(ALL), random.permutation(ALL)
    body = (
        X
        + f"""
    {kind} x = as_type<{kind}>(a[e]), y = as_type<{kind}>(b[e]);
    out[e] = as_type<ushort>(x + y);
    out[65536 + e] = as_type<ushort>(x - y);
    out[2 * 65536 + e] = as_type<ushort>(x * y);
    out[3 * 65536 + e] = as_type<ushort>(x / y);
    out[4 * 65536 + e] = as_type<ushort>(-x);
    out[5 * 65536 + e] = as_type<ushort>(sqrt(x));
    x += 3; x *= y;
    out[6 * 65536 + e] = as_type<ushort>(x);
    """
    )
    got = np.array(run(body, {"a": a, "b": b}, (7, 65536), mx.uint16, **WIDE))
    x, y = as_float64(a, kind), as_float64(b, kind)
    three = as_float64(rounded(x + 3, kind), kind)
    for bits, exact in zip(
        got, [x + y, x - y, x * y, x / y, -x, np.sqrt(x), three * y], strict=True
    ):
        assert same(bits, rounded(exact, kind), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_fma_rounds_once(kind: str) -> None:
    """Against exact fractions, among them sums that are close to a tie."""
    random = np.random.default_rng(3)
    finite = ALL[np.isfinite(as_float64(ALL, kind))]
    middle = finite[np.abs(np.log2(np.abs(as_float64(finite, kind)) + 1e-30)) < 8]
    a, b = random.choice(middle, 2000), random.choice(middle, 2000)
    c = np.where(
        random.random(2000) < 0.5, random.choice(middle, 2000), random.choice(finite, 2000)
    )
    body = (
        X
        + f"""
    if (e < 2000u) out[e] = as_type<ushort>(
        fma(as_type<{kind}>(a[e]), as_type<{kind}>(b[e]), as_type<{kind}>(c[e])));
    """
    )
    given = {"a": a, "b": b, "c": c.astype(np.uint16)}
    got = np.array(run(body, given, (2000,), mx.uint16, grid=2048, threadgroup=256))
    values = [as_float64(v, kind) for v in (*given.values(), got)]
    for x, y, z, r, bits in zip(*values, got, strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        if not np.isfinite(r):
            assert abs(exact) > LARGEST[kind]
            continue
        error = abs(Fraction(r) - exact)
        for other in (bits - 1, bits + 1):
            beside = float(as_float64(np.array([other], np.uint16), kind)[0])
            if np.isfinite(beside) and (bits & 0x7FFF):
                distance = abs(Fraction(beside) - exact)
                assert error < distance or (error == distance and bits % 2 == 0)


REFUSED = {
    "bfloat b = 1.0f;": "bfloat",
    "bfloat b = half(1.0f);": "bfloat",
    "half h = bfloat(1.0f);": "half",
    "bfloat b = bfloat(1.0f); b += 0.5f;": "bfloat",
    "float f = max(1.0f, 1);": "ambiguous",
    "float f = min(half(1.0f), 1.0f);": "ambiguous",
    "uint u = max(1u, 2);": "ambiguous",
    "float f = expf(1.0f);": "expf",
    "float f = std::exp(1.0f);": "std",
    'printf("x");': "printf",
    "float f = nonsense;": "nonsense",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_what_metal_refuses(statement: str) -> None:
    with pytest.raises(CompileError, match=REFUSED[statement]):
        run("\n\n" + statement, {"unused": ALL}, (1,), grid=1)


def test_refusals_tell_the_line_of_the_body() -> None:
    with pytest.raises(CompileError, match="small:3:"):
        run("\n\nfloat f = nonsense;", {"unused": ALL}, (1,), grid=1)


# An expression and its value; `x` is 2.5f.
VALUES = {
    "sizeof(1.0) + 10 * sizeof(half) + 100 * sizeof(float3)": 1624,
    "sizeof(packed_float3) + 100 * sizeof(bfloat4) + 1000 * sizeof(complex64_t)": 8812,
    "1.0 / 3": float(np.float32(1) / np.float32(3)),
    "float(1.5h) + 2.0bf": 3.5,
    "half(1) / 3": float(np.float16(1) / np.float16(3)),
    "bfloat(257)": 256.0,
    "half(x) + x": 5.0,
    "float4(1, 2, 3, 4).w + float3(float2(5, 6), 7).z": 11.0,
    "dot(float3(1, 2, 3), float3(4, 5, 6))": 32.0,
    "(float2(1, 2) * 3 + float2(4)).y": 10.0,
    "length(float2(3, 4))": 5.0,
    "uint3(7, 8, 9)[1]": 8.0,
    "any(int2(1, 2) == int2(3, 2)) + 2 * all(int2(1, 2) == int2(3, 2))": 1.0,
    "metal::rint(x) + metal::rint(3.5f)": 6.0,
    "metal::round(x) + round(-0.5f)": 2.0,
    "floor(-x) + ceil(-x) + trunc(-x)": -7.0,
    "fma(x, 2.0f, 1.0f)": 6.0,
    "fast::exp(0.0f) + precise::exp(0.0f) + metal::precise::log(1.0f)": 2.0,
    "clamp(x, 0.0f, 1.0f) + saturate(-x) + clamp(7, 1, 5)": 6.0,
    "max(x, NAN) + fmin(NAN, 1.0f)": 3.5,
    "isnan(NAN) + isinf(-INFINITY) * 2 + isfinite(x) * 4 + isinf(bfloat(x)) * 8": 7.0,
    "select(1.0f, 2.0f, true) + mix(0.0f, 10.0f, 0.5f) + step(1.0f, x) + sign(-x)": 7.0,
    "fract(x) + rsqrt(4.0f) + powr(2.0f, 3.0f) + exp2(3.0f)": 17.0,
    "popcount(0xF0u) + clz(1u) + ctz(8u) + clz(uchar(1)) + popcount(short(-1))": 61.0,
    "reverse_bits(1u) / 2147483648u + mulhi(0x80000000u, 6u) + rotate(0x80000001u, 1u)": 7.0,
    "absdiff(3, -4) + abs(-3) + extract_bits(0xABCDu, 4, 4) + insert_bits(0u, 3u, 1, 2)": 28.0,
    "float(numeric_limits<half>::max()) + numeric_limits<uchar>::max()": 65759.0,
    "Limits<float>::min < -3e38f && Limits<int8_t>::finite_min == -128": 1.0,
    "as_type<float>(0x40200000u) + as_type<half>(ushort(0x3C00))": 3.5,
    "ceildiv(10, 4) + is_same_v<float, decltype(1.0)> + is_floating_point_v<bfloat>": 5.0,
    "M_PI_F > 3.14159f && M_PI_F < 3.1416f && MAXFLOAT == FLT_MAX": 1.0,
}  # fmt: skip


def test_functions_and_vectors() -> None:
    lines = ["float x = input_x[0];"]
    lines += [f"out[{i}] = {text};" for i, text in enumerate(VALUES)]
    got = run("\n".join(lines), {"input_x": np.array([2.5], np.float32)}, (len(VALUES),), grid=1)
    for value, (text, expected) in zip(np.array(got), VALUES.items(), strict=True):
        assert value == np.float32(expected), text


SWIZZLED = {
    "float4(1, 2, 3, 4).xy.y": 2.0,
    "float4(1, 2, 3, 4).wz.x": 4.0,
    "float4(1, 2, 3, 4).yzw.z": 4.0,
    "(uint3(5, 6, 7).zx + uint2(1, 1)).x": 8.0,
}


def test_several_components_at_once() -> None:
    from tests.emulator.compiler import find

    found = find()
    if found is None or not found.is_clang:
        pytest.skip("g++ names single components only")
    lines = ["float4 put = float4(0); put.xy = float2(8, 9); out[0] = put.y;"]
    lines += [f"out[{i}] = {text};" for i, text in enumerate(SWIZZLED, 1)]
    got = run("\n".join(lines), {"unused": ALL}, (len(SWIZZLED) + 1,), grid=1)
    assert got.tolist() == [9.0, *SWIZZLED.values()]


UNARY = ["exp", "log", "sqrt", "sin", "cos", "tanh", "exp2", "log2", "rint", "floor", "abs"]


@pytest.mark.parametrize("kind", KINDS)
def test_functions_in_sixteen_bits_round_the_float_result(kind: str) -> None:
    lines = [X, f"{kind} x = as_type<{kind}>(bits[e]);"]
    lines += [f"out[{i} * 65536 + e] = as_type<ushort>({name}(x));" for i, name in enumerate(UNARY)]
    got = run("\n".join(lines), {"bits": ALL}, (len(UNARY), 65536), mx.uint16, **WIDE)
    x = as_float64(ALL, kind)
    for bits, name in zip(np.array(got), UNARY, strict=True):
        exact = getattr(np, name)(x)
        values, near = as_float64(bits, kind), as_float64(rounded(exact, kind), kind)
        finite = np.isfinite(near) & np.isfinite(values)
        assert np.array_equal(np.isnan(values), np.isnan(near)), name
        # The float function is off by an ulp of float at most: another value only next to a tie.
        assert (values[finite] != near[finite]).mean() < 1e-3, name
