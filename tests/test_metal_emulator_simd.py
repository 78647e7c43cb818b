"""The Metal emulator: operations between the 32 lanes of a SIMD group, against NumPy.

One kernel makes all of them at once. Run: pytest tests/test_metal_emulator_simd.py
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.emulator.small import run
from tests.metal_emulator import VARIANTS, Variant, unavailable, variant

X = "uint e = thread_position_in_grid.x;\n"
LANE = np.arange(32)
VALUES = (LANE * 7 % 32 + 1).astype(np.int32)  # every number from 1 to 32, mixed

# Body expression on x (int, one a lane) and l (its lane), and the same in NumPy.
OPERATIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "simd_sum(x)": lambda x: x.sum(),
    "simd_max(x)": lambda x: x.max(),
    "simd_min(x)": lambda x: x.min(),
    "simd_product(x % 3 + 1)": lambda x: np.prod((x % 3 + 1).astype(np.int64)).astype(np.int32),
    "simd_and(x | 64)": lambda x: np.bitwise_and.reduce(x | 64),
    "simd_or(x)": lambda x: np.bitwise_or.reduce(x),
    "simd_xor(x)": lambda x: np.bitwise_xor.reduce(x),
    "simd_prefix_inclusive_sum(x)": lambda x: np.cumsum(x),
    "simd_prefix_exclusive_sum(x)": lambda x: np.cumsum(x) - x,
    "simd_prefix_inclusive_product(x % 2 + 1)": lambda x: np.cumprod(x % 2 + 1),
    "simd_prefix_exclusive_product(x % 2 + 1)": lambda x: np.cumprod(x % 2 + 1) // (x % 2 + 1),
    "simd_shuffle(x, (l * 5 + 3) % 32)": lambda x: x[(LANE * 5 + 3) % 32],
    "simd_shuffle_xor(x, 13)": lambda x: x[LANE ^ 13],
    "simd_shuffle_down(x, 3)": lambda x: np.concatenate([x[3:], x[-3:]]),
    "simd_shuffle_up(x, 5)": lambda x: np.concatenate([x[:5], x[:-5]]),
    "simd_shuffle_and_fill_down(x, -1, 3)": lambda x: np.concatenate([x[3:], [-1] * 3]),
    "simd_shuffle_and_fill_up(x, -2, 5)": lambda x: np.concatenate([[-2] * 5, x[:-5]]),
    "simd_shuffle_rotate_down(x, 9)": lambda x: np.roll(x, -9),
    "simd_shuffle_rotate_up(x, 9)": lambda x: np.roll(x, 9),
    "simd_broadcast(x, 17)": lambda x: x[17],
    "simd_broadcast_first(x)": lambda x: x[0],
    "int(ulong(simd_ballot(x > 9)) % 65521)": lambda x: ((x > 9) << LANE).sum() % 65521,
    "simd_all(x > 0) + 2 * simd_all(x > 1)": lambda x: 1,
    "simd_any(x > 31) + 2 * simd_any(x > 32)": lambda x: 1,
    "simd_is_first() ? 5 : 6": lambda x: np.where(LANE == 0, 5, 6),
    "quad_sum(x)": lambda x: x.reshape(8, 4).sum(1).repeat(4),
    "quad_shuffle(x, 2)": lambda x: x.reshape(8, 4)[:, 2].repeat(4),
    "quad_shuffle_xor(x, 3)": lambda x: x[LANE ^ 3],
    "int(simd_sum(half(x)))": lambda x: x.sum(),
    "int(simd_max(bfloat(x)))": lambda x: x.max(),
    "as_type<int2>(simd_shuffle_xor(as_type<uint2>(long(x) << 33), 1)).y >> 1": lambda x: x[
        LANE ^ 1
    ],
    "int(simd_shuffle(float4(x, 1, 2, x + 1), 4).w)": lambda x: x[4] + 1,
}


@pytest.fixture(autouse=True)
def compiler() -> None:
    reason = unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture(params=VARIANTS, ids=str)
def chosen(request: pytest.FixtureRequest) -> Iterator[Variant]:
    with variant(request.param):
        yield request.param


def test_operations_over_a_whole_simd_group(chosen: Variant) -> None:
    lines = [X, "int x = values[e]; uint l = thread_index_in_simdgroup; (void)l;"]
    lines += [f"out[{64 * i} + e] = {text};" for i, text in enumerate(OPERATIONS)]
    values = np.concatenate([VALUES, VALUES[::-1]])
    shape = (len(OPERATIONS), 64)
    result = np.array(
        run("\n".join(lines), {"values": values}, shape, mx.int32, grid=64, threadgroup=64)
    )
    for got, (text, function) in zip(result, OPERATIONS.items(), strict=True):
        for part, x in zip(np.split(got, 2), np.split(values, 2), strict=True):
            assert np.array_equal(part, np.broadcast_to(function(x), 32)), text


def test_a_partial_simd_group_reduces_over_its_own_lanes(chosen: Variant) -> None:
    body = (
        X
        + """
    out[e] = simd_sum(values[e]);
    out[20 + e] = simd_min(values[e]);
    out[40 + e] = float(ulong(simd_ballot(true)));
    out[60 + e] = simd_prefix_inclusive_sum(values[e]);
    """
    )
    values = np.arange(1, 21, dtype=np.float32)
    result = np.array(run(body, {"values": values}, (80,), grid=20)).reshape(4, 20)
    assert (result[0] == 210).all()
    assert (result[1] == 1).all()
    assert (result[2] == np.float32(2**20 - 1)).all()
    assert np.array_equal(result[3], np.cumsum(values))


def test_an_absent_lane_brings_poison(chosen: Variant) -> None:
    body = X + "out[e] = as_type<uint>(simd_shuffle_xor(values[e], 16));"
    values = np.arange(1, 21, dtype=np.float32)
    result = np.array(run(body, {"values": values}, (20,), mx.uint32, grid=20))
    assert np.array_equal(result[:4], values[16:].view(np.uint32))
    assert (result[4:16] == (0xFFFFFFFF if chosen.poison == "nan" else 0xA5A5A5A5)).all()


def test_a_sum_in_sixteen_bits_rounds_at_every_step(chosen: Variant) -> None:
    """2048 ones too few for half: the tree and the sequence round differently, both in half."""
    values = np.where(LANE == 0, 2048, 1).astype(np.float16)
    result = run(X + "out[e] = simd_sum(values[e]);", {"values": values}, (32,), mx.float16)
    expected = values.copy()
    if chosen.reduction == "sequence":
        for i in range(1, 32):
            expected[0] = expected[0] + expected[i]
    else:
        while expected.size > 1:
            pairs = expected.reshape(-1, 2).T if chosen.reduction == "neighbours" else None
            a, b = pairs if pairs is not None else np.split(expected, 2)
            expected = a + b
    assert (np.array(result) == expected[0]).all()


def test_a_butterfly_gives_every_lane_the_same_bits(chosen: Variant) -> None:
    body = (
        X
        + """
    float s = values[e];
    for (ushort mask = 1; mask < 32; mask <<= 1) s += simd_shuffle_xor(s, mask);
    out[e] = s;
    """
    )
    values = np.random.default_rng(0).normal(size=32).astype(np.float32)
    tree = values
    while tree.size > 1:
        tree = tree[::2] + tree[1::2]
    assert (np.array(run(body, {"values": values}, (32,))) == tree[0]).all()
