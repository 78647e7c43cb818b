"""The emulator's trust, second part: MLX's own quantization kernels give what they say, to the bit.

    python -m pytest tests/test_emulator_trust_mlx.py

The text of `affine_quantize`, `affine_dequantize` and the matrix-vector products is read from
`quantized.h` in the installed MLX and run in the emulator. metal_rule.py is the same rule in NumPy.
How far that rule is from `mx.quantize` on the CPU is counted in the last tests;
`python -m tests.emulator.rule_differences` prints the whole table.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops.affine import BITS, pack, round_to, unpack
from tests.cases import GRIDS, MX_DTYPES, Grid
from tests.emulator import metal_rule, mlx_headers
from tests.emulator.lint import lint
from tests.emulator.rule_differences import all_negative, compare, gaussian, tied
from tests.metal_emulator import (
    VARIANTS,
    Kernel,
    gathered,
    generated_text,
    metal_kernel,
    models_contraction,
    unavailable,
    variant,
)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

Array = np.ndarray

HEADER = mlx_headers.header()
GROUPS = 96
FUSED, UNFUSED = VARIANTS[0], VARIANTS[3]  # contraction on and off

_PLACE = "uint2(thread_position_in_grid.x, 0u), uint2(threads_per_grid.x, 1u)"
QUANTIZE = metal_kernel(
    name="mlx_affine_quantize",
    input_names=["weights"],
    output_names=["codes", "scales", "biases"],
    source=f"\n  affine_quantize<T, G, B>(weights, codes, scales, biases, {_PLACE});\n",
    header=HEADER,
)
DEQUANTIZE = metal_kernel(
    name="mlx_affine_dequantize",
    input_names=["codes", "scales", "biases"],
    output_names=["weights"],
    source=f"\n  affine_dequantize<T, G, B>(codes, scales, biases, weights, {_PLACE});\n",
    header=HEADER,
)


def weights(grid: Grid) -> Array:
    """Groups of every kind that the rule has a branch for. (GROUPS, group_size) float32."""
    rng = np.random.default_rng(grid.bits * 1000 + grid.group_size)
    values = rng.normal(0, 0.05, (GROUPS, grid.group_size)).astype(np.float32)
    values[16:32] = tied(grid.bits)(rng, 16, grid.group_size)
    values[32:40] = -np.abs(values[32:40]) - np.float32(0.01)
    values[40:48] = np.abs(values[40:48]) + np.float32(0.01)
    values[48:52] = 0
    values[52:60] = values[52:60, :1]  # one value throughout
    values[60:68] *= np.float32(1e-6)  # scales at the smallest that MLX allows
    values[68:76] *= np.float32(1e4)
    values[76:84] = tied(grid.bits)(rng, 8, grid.group_size) * np.float32(-1)
    return round_to(values, grid.dtype)


def stored(values: Array, grid: Grid) -> mx.array:
    return mx.array(values).astype(MX_DTYPES[grid.dtype])


def quantize_call(values: Array, grid: Grid) -> dict[str, Any]:
    groups = len(values)
    threads = groups * 32
    dtype = MX_DTYPES[grid.dtype]
    return {
        "inputs": [stored(values, grid)],
        "template": [("T", dtype), ("G", grid.group_size), ("B", grid.bits)],
        "grid": (threads, 1, 1),
        "threadgroup": (min(threads, 256), 1, 1),
        "output_shapes": [(groups, grid.group_size * grid.bits // 8), (groups,), (groups,)],
        "output_dtypes": [mx.uint8, dtype, dtype],
    }


def dequantize_call(codes: Array, scales: Array, biases: Array, grid: Grid) -> dict[str, Any]:
    dtype = MX_DTYPES[grid.dtype]
    # A thread takes the codes of one byte, or of the smallest whole number of bytes.
    each = {3: 8, 5: 8, 6: 4}.get(grid.bits, 8 // grid.bits)
    packed = mx.array(pack(codes, grid.bits).view(np.uint8))
    return {
        "inputs": [packed, stored(scales, grid), stored(biases, grid)],
        "template": [("T", dtype), ("G", grid.group_size), ("B", grid.bits)],
        "grid": (codes.size // each, 1, 1),
        "threadgroup": (256, 1, 1),
        "output_shapes": [codes.shape],
        "output_dtypes": [dtype],
    }


def numbers(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32))


def differing(left: Array, right: Array) -> int:
    """How many values differ in any bit."""
    return int(np.count_nonzero(left.view(np.uint32) != right.view(np.uint32)))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All instances at once: several share the reading of the header."""
    with gathered([FUSED, UNFUSED]):
        for grid in GRIDS:
            values = weights(grid)
            rule = metal_rule.quantize(values, grid.bits, grid.dtype)
            QUANTIZE(**quantize_call(values, grid))
            DEQUANTIZE(**dequantize_call(*rule, grid))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_affine_quantize_gives_the_metal_rule_to_the_bit(grid: Grid) -> None:
    values = weights(grid)
    codes, scales, biases = metal_rule.quantize(values, grid.bits, grid.dtype)
    for chosen in (FUSED, UNFUSED):  # it has nothing to fuse
        with variant(chosen):
            packed, *affine = QUANTIZE(**quantize_call(values, grid))
        words = np.array(packed).view(np.uint32)
        np.testing.assert_array_equal(unpack(words, grid.bits), codes)
        assert differing(numbers(affine[0]), scales) == 0
        assert differing(numbers(affine[1]), biases) == 0


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_affine_dequantize_gives_the_metal_rule_to_the_bit(grid: Grid) -> None:
    codes, scales, biases = metal_rule.quantize(weights(grid), grid.bits, grid.dtype)
    with variant(UNFUSED):
        (got,) = DEQUANTIZE(**dequantize_call(codes, scales, biases, grid))
    wanted = metal_rule.dequantize(codes, scales, biases, grid.dtype)
    assert differing(numbers(got), wanted) == 0
    on_cpu = mx.dequantize(
        mx.array(pack(codes, grid.bits)),
        stored(scales, grid)[:, None],
        stored(biases, grid)[:, None],
        group_size=grid.group_size,
        bits=grid.bits,
        stream=mx.cpu,
    )
    assert differing(numbers(on_cpu), wanted) == 0


# --- contraction, variants, lint -----------------------------------------------------------------


def dequantized(values: Array, grid: Grid) -> tuple[Array, tuple[Array, Array, Array]]:
    rule = metal_rule.quantize(values, grid.bits, grid.dtype)
    (got,) = DEQUANTIZE(**dequantize_call(*rule, grid))
    return numbers(got), rule


@pytest.mark.skipif(not models_contraction(), reason="only clang fuses, and not on every processor")
@pytest.mark.parametrize("bits", BITS)
def test_contraction_fuses_scale_times_code_plus_bias(
    bits: int, record_property: Callable[[str, object], None]
) -> None:
    """Metal contracts by default: so many values of float32 then differ in their last bit."""
    grid = Grid(bits, 64, "F32")
    values = gaussian(np.random.default_rng(bits), GROUPS, 64)
    with variant(FUSED):
        got, rule = dequantized(values, grid)
    assert differing(got, metal_rule.dequantize(*rule, "F32", contracted=True)) == 0
    separately = metal_rule.dequantize(*rule, "F32")
    share = differing(got, separately) / got.size
    record_property("fused_percent", f"{100 * share:.0f}")
    assert 0.1 < share < 0.7
    apart = np.abs(got.view(np.int32).astype(np.int64) - separately.view(np.int32))
    assert apart[np.abs(separately) > 1e-3].max() <= 64  # last bits, more where it cancels


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("bits", BITS)
def test_16_bit_types_round_after_every_operation(bits: int, dtype: str) -> None:
    """A kernel that computes in float32 and rounds once is another rule."""
    grid = Grid(bits, 64, dtype)
    values = round_to(gaussian(np.random.default_rng(bits), GROUPS, 64), dtype)
    got, (codes, scales, biases) = dequantized(values, grid)
    once = round_to(codes * scales[:, None] + biases[:, None], dtype)
    assert differing(got, once) > 0.1 * got.size


@pytest.mark.parametrize(
    "grid", [Grid(3, 64, "BF16"), Grid(5, 32, "F32"), Grid(8, 128, "F16")], ids=str
)
def test_no_variant_moves_a_bit(grid: Grid) -> None:
    values = weights(grid)
    codes, scales, biases = metal_rule.quantize(values, grid.bits, grid.dtype)
    wanted = metal_rule.dequantize(codes, scales, biases, grid.dtype)
    for chosen in VARIANTS:
        with variant(chosen):
            packed, *affine = QUANTIZE(**quantize_call(values, grid))
            (got,) = DEQUANTIZE(**dequantize_call(codes, scales, biases, grid))
        words = np.array(packed).view(np.uint32)
        np.testing.assert_array_equal(unpack(words, grid.bits), codes, err_msg=str(chosen))
        assert differing(numbers(affine[0]), scales) == 0
        assert differing(numbers(affine[1]), biases) == 0
        if grid.dtype != "F32" or not chosen.contraction:
            assert differing(numbers(got), wanted) == 0


@pytest.mark.parametrize("grid", [Grid(3, 64, "BF16"), Grid(8, 32, "F32")], ids=str)
def test_the_lint_is_silent(grid: Grid) -> None:
    rule = metal_rule.quantize(weights(grid), grid.bits, grid.dtype)
    for kernel, call in (
        (QUANTIZE, quantize_call(weights(grid), grid)),
        (DEQUANTIZE, dequantize_call(*rule, grid)),
    ):
        text = generated_text(kernel, **call)
        assert lint(HEADER, kernel.source.source, ours=False, generated=text) == []


# --- matrix-vector products ----------------------------------------------------------------------

_PRODUCT = """
  {implementation}<T, G, B>(packed, scales, biases, vectors, products, sizes[0], sizes[1],
      threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
"""
PRODUCTS: dict[str, Kernel] = {
    name: metal_kernel(
        name=f"mlx_affine_{name}",
        input_names=["packed", "scales", "biases", "vectors", "sizes"],
        output_names=["products"],
        source=_PRODUCT.format(implementation=f"{name}_impl"),
        header=HEADER,
    )
    for name in ("qmv", "qmv_fast")
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
# The fast one wants whole blocks; the other also takes rows and columns that fill none.
@pytest.mark.parametrize(("name", "rows", "columns"), [("qmv_fast", 16, 1024), ("qmv", 13, 320)])
def test_matrix_vector_products_agree_with_float64(
    name: str, rows: int, columns: int, dtype: str, bits: int
) -> None:
    grid, tokens = Grid(bits, 64, dtype), 2
    rng = np.random.default_rng(bits)
    values = round_to(gaussian(rng, rows * columns // 64, 64), dtype)
    codes, scales, biases = metal_rule.quantize(values, bits, dtype)
    vectors = round_to(rng.standard_normal((tokens, columns), dtype=np.float32), dtype)
    (got,) = PRODUCTS[name](
        inputs=[
            mx.array(pack(codes, bits)),
            stored(scales, grid),
            stored(biases, grid),
            stored(vectors, grid),
            mx.array([columns, rows]),
        ],
        template=[("T", MX_DTYPES[dtype]), ("G", 64), ("B", bits)],
        grid=(32 * tokens, 2 * -(-rows // 8), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(tokens, rows)],
        output_dtypes=[MX_DTYPES[dtype]],
    )
    exact = codes * scales[:, None].astype(np.float64) + biases[:, None]
    wanted = vectors.astype(np.float64) @ exact.reshape(rows, columns).T
    error = np.abs(numbers(got) - wanted).max() / np.abs(wanted).max()
    # Sums of 1024 products in float32, each lane some 32; bfloat16 rounds once more at the store.
    assert error < (1e-6 if dtype == "F32" else 2.0**-8)


# --- how far the rule is from the CPU's ----------------------------------------------------------


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_cpu_differs_in_rounding_and_in_the_maximums_start_alone(grid: Grid) -> None:
    values = weights(grid)
    wanted = mx.quantize(
        stored(values, grid), group_size=grid.group_size, bits=grid.bits, stream=mx.cpu
    )
    codes, scales, biases = metal_rule.quantize(
        values, grid.bits, grid.dtype, rounding=np.rint, maximum_start=-np.inf
    )
    np.testing.assert_array_equal(unpack(np.array(wanted[0]), grid.bits), codes)
    assert differing(numbers(wanted[1])[:, 0], scales) == 0
    assert differing(numbers(wanted[2])[:, 0], biases) == 0


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_half_of_all_ties_go_the_other_way(dtype: str) -> None:
    """One weight in 16 is a tie; half away and half to even part for every other tie."""
    weights = tied(4)(np.random.default_rng(4), 1024, 64)
    found = compare(weights, 4, dtype)
    assert 2.7 < found.codes_percent < 3.3
    assert (found.groups_percent, found.largest_step) == (0.0, 1)


@pytest.mark.parametrize("bits", BITS)
def test_groups_of_negative_weights_get_another_grid(bits: int) -> None:
    values = all_negative(np.random.default_rng(bits), 256, 64)
    found = compare(values, bits, "F32")
    assert found.groups_percent == 100.0
    # The Metal grid reaches up to zero: its scale is too large by the weights' distance from zero.
    low, high = values.min(axis=1), values.max(axis=1)
    scales = metal_rule.quantize(values, bits, "F32")[1]
    np.testing.assert_allclose(scales, -low / ((1 << bits) - 1), rtol=0.3)
    assert (scales > (high - low) / ((1 << bits) - 1)).all()


def test_ordinary_weights_differ_where_the_type_is_coarse() -> None:
    """bfloat16 has so few values that many fall on ties; float32 has next to none."""
    shares = {
        dtype: compare(
            round_to(gaussian(np.random.default_rng(0), 4096, 64), dtype), 4, dtype
        ).codes_percent
        for dtype in ("BF16", "F16", "F32")
    }
    assert 0.05 < shares["BF16"] < 1.0
    assert shares["BF16"] > shares["F16"] > shares["F32"]
    assert shares["F32"] < 0.001
