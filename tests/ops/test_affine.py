"""MLX's grid in NumPy against MLX itself, to the bit. Run: pytest tests/ops/test_affine.py"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.ops import affine
from tests.cases import GRIDS, MX_DTYPES, SHAPES_2D, SHAPES_3D, Grid

WEIGHTS = ("gaussian", "all_negative", "constant", "zeros", "tiny", "wide")


def weights_of(kind: str, shape: tuple[int, ...], dtype: str, seed: int = 0) -> mx.array:
    """Test weights of one character, in `dtype`."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape).astype(np.float32) * 0.02
    if kind == "all_negative":
        values = -np.abs(values) - 0.001
    elif kind == "constant":
        values = np.full(shape, 0.0371, dtype=np.float32)
    elif kind == "zeros":
        values = np.zeros(shape, dtype=np.float32)
    elif kind == "tiny":
        values *= 1e-5
    elif kind == "wide":
        values *= random.choice(np.array([1e-3, 1.0, 1e3], np.float32), size=(*shape[:-1], 1))
    return mx.array(values).astype(MX_DTYPES[dtype])


def as_float32(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_quantize_and_dequantize_are_mlx_to_the_bit(grid: Grid, kind: str) -> None:
    shape = SHAPES_2D[len(kind) % len(SHAPES_2D)]
    weight = weights_of(kind, shape, grid.dtype)
    packed, scales, biases = mx.quantize(weight, grid.group_size, grid.bits, stream=mx.cpu)
    values = as_float32(weight).reshape(-1, grid.group_size)
    codes, our_scales, our_biases = affine.quantize(values, grid.bits, grid.dtype)
    np.testing.assert_array_equal(affine.pack(codes.reshape(shape), grid.bits), np.array(packed))
    np.testing.assert_array_equal(our_scales, as_float32(scales).ravel())
    np.testing.assert_array_equal(our_biases, as_float32(biases).ravel())
    theirs = mx.dequantize(packed, scales, biases, grid.group_size, grid.bits, stream=mx.cpu)
    ours = affine.dequantize(codes, our_scales, our_biases, grid.dtype)
    np.testing.assert_array_equal(ours.reshape(shape), as_float32(theirs))


@pytest.mark.parametrize("shape", SHAPES_3D, ids=str)
@pytest.mark.parametrize("bits", affine.BITS)
def test_expert_weights_have_the_same_layout(shape: tuple[int, ...], bits: int) -> None:
    weight = weights_of("gaussian", shape, "BF16")
    packed, _, _ = mx.quantize(weight, 64, bits, stream=mx.cpu)
    codes, _, _ = affine.quantize(as_float32(weight).reshape(-1, 64), bits, "BF16")
    np.testing.assert_array_equal(affine.pack(codes.reshape(shape), bits), np.array(packed))
    np.testing.assert_array_equal(affine.unpack(np.array(packed), bits), codes.reshape(shape))


@given(
    bits=st.sampled_from(affine.BITS),
    rows=st.integers(1, 5),
    units=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_pack_and_unpack_are_inverse(bits: int, rows: int, units: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (rows, 32 * units), dtype=np.uint8)
    packed = affine.pack(codes, bits)
    assert packed.shape == (rows, affine.packed_width(32 * units, bits))
    assert affine.logical_width(packed.shape[-1], bits) == 32 * units
    np.testing.assert_array_equal(affine.unpack(packed, bits), codes)
    words = random.integers(0, 2**32, packed.shape, dtype=np.uint32)
    np.testing.assert_array_equal(affine.pack(affine.unpack(words, bits), bits), words)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_rounding_is_that_of_mlx(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32)
    array = np.clip(array, -3e38, 3e38)
    for dtype in ("BF16", "F16", "F32"):
        expected = as_float32(mx.array(array).astype(MX_DTYPES[dtype]))
        rounded = affine.round_to(array.copy(), dtype)
        # The CPU flushes no subnormal numbers here; compare them as they are.
        np.testing.assert_array_equal(rounded, expected)
        np.testing.assert_array_equal(
            affine.from_storage(affine.to_storage(array, dtype), dtype), rounded
        )


def test_what_the_grid_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="bits is 7"):
        affine.packed_width(64, 7)
    with pytest.raises(ValueError, match="multiple of 32"):
        affine.pack(np.zeros((2, 33), dtype=np.uint8), 4)
    with pytest.raises(ValueError, match="multiple of 3 words"):
        affine.unpack(np.zeros((2, 4), dtype=np.uint32), 3)
    with pytest.raises(ValueError, match="dtype is F8"):
        affine.round_to(np.zeros(3, dtype=np.float32), "F8")
