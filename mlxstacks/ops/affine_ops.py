"""The affine grid of `ops/affine.py` as MLX operations: the references of the kernels.

Everything is elementary operations, each one rounded on its own, so the results have the same bits
on every device, for scales of normal size (1e-38 or more). Float arrays are float32 that hold
values of the storage dtype.
"""

import mlx.core as mx

from mlxstacks.ops.affine import check_bits, logical_width

SCALE_DTYPES = (mx.bfloat16, mx.float16, mx.float32)
_SMALLEST_SCALE = 1e-7  # as in ops/affine.py


def round_to(values: mx.array, dtype: mx.Dtype) -> mx.array:
    """Float32 values rounded to `dtype` and back, ties to even. Any shape."""
    return values.astype(dtype).astype(mx.float32)


def unpack_codes(packed: mx.array, bits: int) -> mx.array:
    """Codes of packed rows. Shapes: (..., W) uint32 -> (..., W * 32 / bits) float32.

    Law: pack_codes(unpack_codes(p, bits), bits) is p.
    """
    width = logical_width(packed.shape[-1], check_bits(bits))
    octets = mx.contiguous(packed).view(mx.uint8)
    octets = octets.reshape(*packed.shape[:-1], width // 8, bits).astype(mx.uint64)
    # Eight codes are `bits` bytes, lowest first.
    words = mx.sum(octets << mx.arange(0, 8 * bits, 8, dtype=mx.uint64), axis=-1, keepdims=True)
    codes = words >> mx.arange(0, 8 * bits, bits, dtype=mx.uint64)  # (..., K / 8, 8)
    codes = codes & mx.array((1 << bits) - 1, mx.uint64)
    return codes.reshape(*packed.shape[:-1], width).astype(mx.float32)


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Packed form of codes. Shapes: (..., K) float32 -> (..., K * bits / 32) uint32."""
    width = codes.shape[-1]
    octets = codes.reshape(*codes.shape[:-1], width // 8, 8).astype(mx.uint64)
    words = mx.sum(octets << mx.arange(0, 8 * bits, bits, dtype=mx.uint64), axis=-1)
    stream = words[..., None].view(mx.uint8)[..., :bits]  # (..., K / 8, bits)
    return mx.contiguous(stream.reshape(*codes.shape[:-1], width // 8 * bits)).view(mx.uint32)


def values_of(codes: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """`scale * code + bias` in float32, two roundings. Shapes: (..., G, group_size), (..., G)."""
    return codes * scales[..., None] + biases[..., None]


def stored_values_of(
    codes: mx.array, scales: mx.array, biases: mx.array, dtype: mx.Dtype
) -> mx.array:
    """As `values_of`, rounded to `dtype` after each operation: what `mx.dequantize` gives."""
    product = round_to(codes * scales[..., None], dtype)
    return round_to(product + biases[..., None], dtype)


def fit_grid(values: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """Scales and biases that `mx.quantize` gives on the CPU device, before any cast.

    Shapes: values (..., G, group_size) float32 -> (..., G) float32 twice.
    """
    low, high = values.min(axis=-1), values.max(axis=-1)
    widths = mx.maximum((high - low) / ((1 << bits) - 1), mx.array(_SMALLEST_SCALE, mx.float32))
    low_is_edge = mx.abs(low) > mx.abs(high)
    scales = mx.where(low_is_edge, widths, -widths)
    edge = mx.where(low_is_edge, low, high)
    steps = mx.round(edge / scales)
    on_grid = steps != 0
    scales = mx.where(on_grid, edge / mx.where(on_grid, steps, 1), scales)
    return scales, mx.where(on_grid, edge, 0)


def nearest_codes(values: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """Codes of the grid points nearest to the values, ties to even. Shapes as in `values_of`."""
    return clip_codes((values - biases[..., None]) / scales[..., None], bits)


def clip_codes(codes: mx.array, bits: int) -> mx.array:
    """Whole numbers from 0 to 2**bits - 1, ties to even, as float32; 0 for what is not a number.

    A group of equal values too large for a step of its own has the scale 0, and codes 0 / 0.
    """
    clipped = mx.minimum(mx.maximum(mx.round(codes), 0), (1 << bits) - 1)
    return mx.where(mx.isnan(clipped), 0, clipped)


def tree_sum(values: mx.array) -> mx.array:
    """Sum over the last axis, a power of two long: neighbours first. (..., L) -> (...)."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]
