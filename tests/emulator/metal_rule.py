"""What MLX's Metal kernels affine_quantize and affine_dequantize compute, in NumPy.

Read from `quantized.h` in the installed MLX (`include/mlx/backend/metal/kernels`). It differs from
the rule of MLX's CPU device, which `mlxstacks.ops.affine` follows, in two places:

- codes and the step count of the edge are rounded half away from zero (`round`), not half to even;
- the maximum of a group starts at 0, so a group of negative weights spans up to zero, where the
  CPU takes the true maximum.

Both are arguments of `quantize`: with the CPU's choices it is the CPU's rule. That codes are
clamped only from above makes no difference.

`mlxstacks` requantizes by the CPU's rule on every device. This file serves the tests of the Metal
emulator: it is what MLX's own Metal text, run there, has to give to the bit.
"""

from collections.abc import Callable

import numpy as np

from mlxstacks.ops.affine import round_to

Array = np.ndarray

_SMALLEST_SCALE = np.float32(1e-7)


def round_half_away(values: Array) -> Array:
    """Metal's `round`. Shapes: any, float32 -> float32. `x - trunc(x)` is exact."""
    whole = np.trunc(values)
    return whole + np.copysign((np.abs(values - whole) >= 0.5).astype(np.float32), values)


def quantize(
    values: Array,
    bits: int,
    dtype: str,
    *,
    rounding: Callable[[Array], Array] = round_half_away,
    maximum_start: float = 0.0,
) -> tuple[Array, Array, Array]:
    """What `affine_quantize` writes for weights of `dtype`.

    Shapes: values (G, group_size) float32 with values of `dtype`
    -> codes (G, group_size) uint8, scales (G,) and biases (G,) float32 rounded to `dtype`.
    """
    bins = np.float32((1 << bits) - 1)
    low = values.min(axis=1)
    high = np.maximum(values.max(axis=1), np.float32(maximum_start))
    scales = np.maximum((high - low) / bins, _SMALLEST_SCALE)
    side = np.abs(low) > np.abs(high)
    scales = np.where(side, scales, -scales)
    edge = np.where(side, low, high)
    steps = rounding(edge / scales)
    at_zero = steps == 0
    scales = np.where(at_zero, scales, edge / np.where(at_zero, np.float32(1), steps))
    biases = np.where(at_zero, np.float32(0), edge)
    # The scale before it is rounded to dtype chooses the codes. Only the top is clamped: no value
    # lies half a step beyond the edge, which is the value of largest magnitude.
    steps = rounding((values - biases[:, None]) / scales[:, None])
    codes = np.minimum(steps, bins).astype(np.uint8)
    return codes, round_to(scales.copy(), dtype), round_to(biases.copy(), dtype)


def dequantize(
    codes: Array, scales: Array, biases: Array, dtype: str, *, contracted: bool = False
) -> Array:
    """What `affine_dequantize` writes: `scale * code + bias` in the arithmetic of `dtype`.

    Shapes: codes (G, group_size) uint8, scales and biases (G,) float32 with values of `dtype`
    -> (G, group_size) float32 with values of `dtype`.
    contracted: float32 only; one fused multiply-add instead of two roundings.
    """
    product = codes * scales[:, None].astype(np.float64)  # exact: 24 and 8 bits
    if contracted:
        if dtype != "F32":
            raise ValueError("only float32 has a fused form here")
        return _rounded_sum(product, biases[:, None].astype(np.float64))
    rounded = round_to(product.astype(np.float32), dtype)
    return round_to(rounded + biases[:, None], dtype)


def _rounded_sum(a: Array, b: Array) -> Array:
    """a + b with a single rounding to float32, from float64 arrays.

    A float64 sum rounded to odd has room enough that the second rounding cannot err.
    """
    total = a + b
    of_b = total - a
    error = (a - (total - of_b)) + (b - of_b)
    raw = total.view(np.int64)
    even = (raw & 1) == 0
    toward = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & even, raw + toward, raw)
    return odd.view(np.float64).astype(np.float32)
