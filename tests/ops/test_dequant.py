"""dequant beside mx.dequantize on the CPU, to the bit; its kernel in the emulator, on a device.

Run: pytest tests/ops/test_dequant.py
"""

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops import affine
from mlxstacks.ops.dequant import dequant
from tests.cases import GRIDS, KERNEL_SHAPES, MX_DTYPES, Grid, third_of_the_grids
from tests.metal_emulator import VARIANTS, Variant, emulated, gathered, unavailable, variant
from tests.ops.requant_cases import hostile_groups

Weights = tuple[mx.array, mx.array, mx.array]
FIRST_GRIDS = third_of_the_grids(0)
LATER_GRIDS = [grid for grid in GRIDS if grid not in FIRST_GRIDS]


def weights_of(grid: Grid, shape: tuple[tuple[int, ...], int] | None = None) -> Weights:
    """Packed weights, some of them such as no quantizer makes."""
    leading, width = shape or KERNEL_SHAPES[GRIDS.index(grid) % len(KERNEL_SHAPES)]
    width = max(width, grid.group_size)
    random = np.random.default_rng(GRIDS.index(grid))
    groups = hostile_groups(grid, int(np.prod(leading)) * width // grid.group_size, random)
    scales, biases = (
        mx.array(x.reshape(*leading, -1)).astype(MX_DTYPES[grid.dtype])
        for x in (groups.scales, groups.biases)
    )
    packed = affine.pack(groups.codes.reshape(*leading, width), grid.bits)
    return mx.array(packed), scales, biases


def call(weights: Weights, grid: Grid, use_kernel: bool | None) -> mx.array:
    return dequant(*weights, group_size=grid.group_size, bits=grid.bits, use_kernel=use_kernel)


def assert_is_mlx(made: mx.array, weights: Weights, grid: Grid) -> None:
    """Equal to mx.dequantize on the CPU, to the bit but for the sign of a zero."""
    wanted = mx.dequantize(*weights, group_size=grid.group_size, bits=grid.bits, stream=mx.cpu)
    assert made.dtype == wanted.dtype
    assert made.shape == wanted.shape
    with mx.stream(mx.cpu):
        assert mx.array_equal(made, wanted).item()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_reference_is_mlx_on_the_cpu(grid: Grid) -> None:
    weights = weights_of(grid)
    assert_is_mlx(call(weights, grid, False), weights, grid)


@pytest.mark.parametrize("grid", [Grid(3, 64, "BF16"), Grid(6, 32, "F32")], ids=str)
def test_reference_is_the_formula(grid: Grid) -> None:
    packed, scales, biases = weights_of(grid)
    codes = affine.unpack(np.array(packed), grid.bits)
    steps, origins = (np.array(x.astype(mx.float32)).ravel() for x in (scales, biases))
    values = affine.dequantize(codes.reshape(-1, grid.group_size), steps, origins, grid.dtype)
    made = np.array(call((packed, scales, biases), grid, False).astype(mx.float32))
    np.testing.assert_array_equal(made, values.reshape(made.shape))


# --- the kernel -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels of the common cases, compiled together."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with emulated(), gathered():
        for grid in FIRST_GRIDS:
            call(weights_of(grid), grid, True)


@pytest.mark.parametrize("grid", FIRST_GRIDS, ids=str)
def test_kernel_is_mlx_on_the_cpu(compiled: None, emulator: None, grid: Grid) -> None:
    weights = weights_of(grid)
    assert_is_mlx(call(weights, grid, True), weights, grid)


@pytest.mark.slow
def test_kernel_is_mlx_on_the_cpu_in_the_other_grids_and_shapes(emulator: None) -> None:
    cases = [(grid, KERNEL_SHAPES[2]) for grid in LATER_GRIDS]
    cases += [(grid, shape) for grid in FIRST_GRIDS for shape in KERNEL_SHAPES]
    with gathered():
        for grid, shape in cases:
            call(weights_of(grid, shape), grid, True)
    for grid, shape in cases:
        weights = weights_of(grid, shape)
        assert_is_mlx(call(weights, grid, True), weights, grid)


@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
@pytest.mark.parametrize("grid", FIRST_GRIDS[::5], ids=str)
def test_kernel_gives_the_same_bits_however_it_is_run(
    compiled: None, emulator: None, grid: Grid, chosen: Variant
) -> None:
    weights = weights_of(grid)
    with variant(chosen):
        assert_is_mlx(call(weights, grid, True), weights, grid)


def test_kernel_takes_views_and_many_experts(emulator: None) -> None:
    grid = Grid(4, 32, "BF16")
    weights = weights_of(grid, ((256, 1), 128))
    assert_is_mlx(call(weights, grid, True), weights, grid)
    doubled = [mx.stack([x, mx.zeros_like(x)], axis=-1)[..., 0] for x in weights]
    assert_is_mlx(call((doubled[0], doubled[1], doubled[2]), grid, True), weights, grid)
    part: Weights = (weights[0][3:9], weights[1][3:9], weights[2][3:9])
    assert_is_mlx(call(part, grid, True), part, grid)


def test_kernel_is_mlx_on_the_cpu_on_a_device(gpu: None) -> None:
    for grid in GRIDS:
        weights = weights_of(grid)
        assert_is_mlx(call(weights, grid, True), weights, grid)


# --- who runs it, and bad input -------------------------------------------------------------------


def test_an_unknown_group_falls_back_with_a_reason(
    emulator: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxstacks")
    packed, scales, biases = weights_of(Grid(4, 32, "F32"))
    halved: Weights = (packed, mx.repeat(scales, 2, axis=-1), mx.repeat(biases, 2, axis=-1))
    grid = Grid(4, 16, "F32")
    whole = mx.dequantize(packed, scales, biases, group_size=32, bits=4, stream=mx.cpu)
    assert mx.array_equal(call(halved, grid, None), whole).item()
    assert "group_size is 16; the kernel has 32, 64, 128" in caplog.text
    with pytest.raises(ValueError, match="group_size is 16"):
        call(halved, grid, True)


def test_more_words_than_a_kernel_counts_are_left_to_mlx(emulator: None) -> None:
    """2**34 values of two bytes; nothing is evaluated."""
    rows, groups = 1 << 20, 1 << 8
    packed = mx.broadcast_to(mx.zeros((1, 1), mx.uint32), (rows, groups * 8))
    scales = mx.broadcast_to(mx.zeros((1, 1), mx.bfloat16), (rows, groups))
    grid = Grid(4, 64, "BF16")
    assert call((packed, scales, scales), grid, None).shape == (rows, groups * 64)
    with pytest.raises(ValueError, match="4294967296 words of eight bytes"):
        call((packed, scales, scales), grid, True)


def test_an_array_of_numpy_is_named() -> None:
    packed, scales, biases = weights_of(Grid(4, 64, "F32"))
    with pytest.raises(ValueError, match="scales: got ndarray, allowed is an array of MLX"):
        dequant(packed, np.array(scales), biases, group_size=64, bits=4)


@pytest.mark.parametrize(
    ("grid", "named"),
    [
        (Grid(7, 64, "F32"), "bits: got 7, allowed are 2, 3, 4, 5, 6, 8"),
        (Grid(4, 48, "F32"), "group_size: got 48, allowed are powers of two"),
        (Grid(3, 64, "F32"), "packed, scales, biases: got .* check group_size and bits"),
        (Grid(4.0, 64, "F32"), "bits: got 4.0, allowed are 2, 3"),  # type: ignore[arg-type]
        (Grid(4, 64.0, "F32"), "group_size: got 64.0, allowed"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("use_kernel", [None, False, True])
def test_what_does_not_fit_is_named(grid: Grid, named: str, use_kernel: bool | None) -> None:
    weights = weights_of(Grid(4, 64, "F32"))
    with pytest.raises(ValueError, match=named):
        call(weights, grid, use_kernel)
