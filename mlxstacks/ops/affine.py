"""MLX's affine grid in NumPy: pack, unpack, quantize, dequantize, and the rounding of its dtypes.

A group is `group_size` neighbouring weights of a row. It is stored as integer codes q of `bits`
bits, a scale s and a bias b, and stands for `s * q + b`. Codes are packed along the row as one
little-endian bit stream in uint32 words.

Everything here follows the rule of MLX's CPU device to the bit (`mlx/backend/cpu/quantized.cpp`),
on every machine, because a fused file must not depend on where it was made. Arrays are grouped:
codes are (G, group_size), scales and biases (G,), where G counts the groups of a tensor or block.
Floats are float32 that hold values of the scale dtype exactly; `to_storage` and `from_storage`
convert to what lies on disk.
"""

import numpy as np

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
SCALE_DTYPES = ("BF16", "F16", "F32")

Array = np.ndarray

# MLX's smallest scale (mlx/backend/cpu/quantized.cpp::quantize).
_SMALLEST_SCALE = np.float32(1e-7)

# How the codes of one unit are spread from adjacent bit fields to one byte each: the unit's
# unsigned type, then steps (shift, mask) that move the masked upper half of every field up.
_SPREAD: dict[int, tuple[type[np.unsignedinteger], tuple[tuple[int, int], ...]]] = {
    2: (np.uint32, ((12, 0xF0), (6, 0x000C000C))),
    3: (np.uint64, ((20, 0xFFF000), (10, 0x00000FC000000FC0), (5, 0x0038003800380038))),
    4: (np.uint16, ((4, 0xF0),)),
    5: (np.uint64, ((12, 0xFFFFF00000), (6, 0x000FFC00000FFC00), (3, 0x03E003E003E003E0))),
    6: (np.uint32, ((4, 0xFFF000), (2, 0x0FC00FC0))),
}


def check_bits(bits: int) -> int:
    """Return `bits`, or raise ValueError when MLX has no affine grid of that width."""
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; the affine grid has {', '.join(map(str, BITS))}")
    return bits


def packed_width(input_dims: int, bits: int) -> int:
    """Number of uint32 words that hold `input_dims` codes of `bits` bits.

    Law: logical_width(packed_width(k, bits), bits) is k for every k that is a multiple of 32.
    """
    check_bits(bits)
    if input_dims % 32:
        raise ValueError(f"a packed row needs a multiple of 32 weights, got {input_dims}")
    return input_dims // 32 * bits


def logical_width(packed: int, bits: int) -> int:
    """Number of weights in a row of `packed` uint32 words."""
    check_bits(bits)
    if packed * 32 % bits:
        raise ValueError(f"{packed} words do not hold a whole number of {bits}-bit codes")
    return packed * 32 // bits


def unpack(packed: Array, bits: int) -> Array:
    """Codes of a packed array.

    Shapes: packed (..., W) uint32 -> (..., W * 32 / bits) uint8, W * 32 / bits a multiple of 32.
    Law: pack(unpack(p, bits), bits) is p.
    """
    check_bits(bits)
    words = np.ascontiguousarray(packed, dtype=np.uint32)
    if words.shape[-1] % bits:
        raise ValueError(f"a row of {words.shape[-1]} words is not a multiple of {bits} words")
    shape = (*words.shape[:-1], words.shape[-1] // bits * 32)
    if bits == 8:
        return words.view(np.uint8).reshape(shape)
    unit_type, steps = _SPREAD[bits]
    units = _units(words.reshape(-1), bits, unit_type)
    upper = np.empty_like(units)
    for shift, mask in steps:
        np.bitwise_and(units, unit_type(mask), out=upper)
        np.bitwise_xor(units, upper, out=units)
        np.left_shift(upper, unit_type(shift), out=upper)
        np.bitwise_or(units, upper, out=units)
    return units.reshape(-1).view(np.uint8).reshape(shape)


def pack(codes: Array, bits: int) -> Array:
    """Packed form of an array of codes; the inverse of `unpack`.

    Shapes: codes (..., K) uint8, each below 2**bits, K a multiple of 32
    -> (..., K * bits / 32) uint32.
    """
    check_bits(bits)
    values = np.ascontiguousarray(codes, dtype=np.uint8)
    width = packed_width(values.shape[-1], bits)
    shape = (*values.shape[:-1], width)
    if bits == 8:
        return values.reshape(-1).view(np.uint32).reshape(shape)
    unit_type, steps = _SPREAD[bits]
    units = values.reshape(-1).view(unit_type).copy()
    upper = np.empty_like(units)
    for shift, mask in reversed(steps):
        np.bitwise_and(units, unit_type(mask << shift), out=upper)
        np.bitwise_xor(units, upper, out=units)
        np.right_shift(upper, unit_type(shift), out=upper)
        np.bitwise_or(units, upper, out=units)
    return _words(units, bits).reshape(shape)


def _units(words: Array, bits: int, unit_type: type[np.unsignedinteger]) -> Array:
    """Cut a stream of uint32 words into units: as many whole codes as bytes in `unit_type`."""
    if bits in (2, 4):
        return words.view(np.uint8).astype(unit_type)
    columns = words.reshape(-1, bits if bits == 5 else 3).astype(unit_type)  # (n, 3) or (n, 5)
    units = np.empty((len(columns), 4), dtype=unit_type)
    if bits == 5:  # 5 words are 4 units of 40 bits
        w0, w1, w2, w3, w4 = (columns[:, i] for i in range(5))
        units[:, 0] = w0 | (w1 & unit_type(0xFF)) << unit_type(32)
        units[:, 1] = w1 >> unit_type(8) | (w2 & unit_type(0xFFFF)) << unit_type(24)
        units[:, 2] = w2 >> unit_type(16) | (w3 & unit_type(0xFFFFFF)) << unit_type(16)
        units[:, 3] = w3 >> unit_type(24) | w4 << unit_type(8)
        return units
    w0, w1, w2 = (columns[:, i] for i in range(3))  # 3 words are 4 units of 24 bits
    low = unit_type(0xFFFFFF)
    units[:, 0] = w0 & low
    units[:, 1] = (w0 >> unit_type(24) | w1 << unit_type(8)) & low
    units[:, 2] = (w1 >> unit_type(16) | w2 << unit_type(16)) & low
    units[:, 3] = w2 >> unit_type(8)
    return units


def _words(units: Array, bits: int) -> Array:
    """Join units into a stream of uint32 words; the inverse of `_units`."""
    if bits in (2, 4):
        return units.astype(np.uint8).view(np.uint32)
    u0, u1, u2, u3 = (units.reshape(-1, 4)[:, i] for i in range(4))
    count = 5 if bits == 5 else 3
    words = np.empty((len(u0), count), dtype=np.uint32)
    t = units.dtype.type
    low = t(0xFFFFFFFF)
    if bits == 5:
        words[:, 0] = u0 & low
        words[:, 1] = (u0 >> t(32) | u1 << t(8)) & low
        words[:, 2] = (u1 >> t(24) | u2 << t(16)) & low
        words[:, 3] = (u2 >> t(16) | u3 << t(24)) & low
        words[:, 4] = u3 >> t(8)
        return words
    words[:, 0] = (u0 | u1 << t(24)) & low
    words[:, 1] = (u1 >> t(8) | u2 << t(16)) & low
    words[:, 2] = (u2 >> t(16) | u3 << t(8)) & low
    return words


def round_to(values: Array, dtype: str) -> Array:
    """Round float32 values in place to the nearest value of a scale dtype, ties to even.

    Shapes: values any shape, float32, finite, contiguous. Returns `values`.
    """
    if dtype == "BF16":
        raw = values.view(np.uint32)
        odd = np.right_shift(raw, np.uint32(16))
        np.bitwise_and(odd, np.uint32(1), out=odd)
        np.add(odd, np.uint32(0x7FFF), out=odd)
        np.add(raw, odd, out=raw)
        np.bitwise_and(raw, np.uint32(0xFFFF0000), out=raw)
    elif dtype == "F16":
        with np.errstate(over="ignore"):
            values[...] = values.astype(np.float16)
    elif dtype != "F32":
        raise ValueError(f"dtype is {dtype}; scales are one of {', '.join(SCALE_DTYPES)}")
    return values


def from_storage(raw: Array, dtype: str) -> Array:
    """Float32 copy of stored floats. Shapes: raw (...) uint16 for BF16, else the NumPy dtype."""
    if dtype == "BF16":
        return np.left_shift(raw.astype(np.uint32), np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def to_storage(values: Array, dtype: str) -> Array:
    """Stored form of float32 values; the inverse of `from_storage` after rounding to `dtype`."""
    rounded = round_to(np.array(values, dtype=np.float32, order="C"), dtype)
    if dtype == "BF16":
        return np.right_shift(rounded.view(np.uint32), np.uint32(16)).astype(np.uint16)
    return rounded.astype(np.float16) if dtype == "F16" else rounded


def dequantize(codes: Array, scales: Array, biases: Array, dtype: str = "F32") -> Array:
    """What `mx.dequantize` gives: `scale * code + bias`, rounded to `dtype` after each operation.

    Shapes: codes (G, group_size) uint8, scales and biases (G,) float32
    -> (G, group_size) float32 with values of `dtype`.
    """
    values = codes.astype(np.float32)
    np.multiply(values, scales[:, None], out=values)
    round_to(values, dtype)
    np.add(values, biases[:, None], out=values)
    return round_to(values, dtype)


def fit_grid(
    values: Array, bits: int, extremes: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Scale and bias that `mx.quantize` gives each group on the CPU device, before any cast.

    Shapes: values (G, group_size) float32 -> scales (G,), biases (G,) float32.
    extremes: minimum and maximum of each group, (G,) float32, where they are known.
    The end of the range with the larger magnitude becomes a grid point, and so does zero.
    """
    low, high = row_extremes(values) if extremes is None else extremes
    bins = np.float32((1 << bits) - 1)
    scales = np.maximum((high - low) / bins, _SMALLEST_SCALE)
    low_is_edge = np.abs(low) > np.abs(high)
    scales = np.where(low_is_edge, scales, -scales)
    edge = np.where(low_is_edge, low, high)
    steps = np.rint(edge / scales)
    on_grid = steps != 0
    scales = np.divide(edge, steps, out=scales, where=on_grid)
    return scales, np.where(on_grid, edge, np.float32(0))


def row_extremes(values: Array) -> tuple[Array, Array]:
    """Minimum and maximum of each row, (G, group_size) -> (G,), group_size a multiple of 16 bytes.

    Along the leading axis of a transposed copy: NumPy is slow where it starts anew for every row.
    First of pieces of 16 bytes, since a copy costs by the piece and not by the byte.
    """
    rows = len(values)
    pieces = np.ascontiguousarray(values).view(np.complex128)  # (G, pieces), for its 16 bytes
    columns = np.ascontiguousarray(pieces.T).view(values.dtype)  # (pieces, G * values of a piece)
    low, high = columns.min(axis=0), columns.max(axis=0)
    low, high = (np.ascontiguousarray(x.reshape(rows, -1).T) for x in (low, high))
    return low.min(axis=0), high.max(axis=0)


def nearest_codes(values: Array, scales: Array, biases: Array, bits: int) -> Array:
    """Codes of the grid points nearest to the values, ties to even, clipped to the grid.

    Shapes: values (G, group_size) float32, scales and biases (G,) float32
    -> (G, group_size) float32 holding whole numbers from 0 to 2**bits - 1.
    """
    codes = values - biases[:, None]
    np.divide(codes, scales[:, None], out=codes)
    return clip_codes(codes, bits)


def clip_codes(codes: Array, bits: int) -> Array:
    """Round float32 codes in place to whole numbers, ties to even, and clip them to the grid."""
    np.rint(codes, out=codes)
    # A quarter of the time of np.maximum and np.minimum with a number each.
    return np.clip(codes, np.float32(0), np.float32((1 << bits) - 1), out=codes)


def quantize(
    values: Array, bits: int, dtype: str = "F32", extremes: tuple[Array, Array] | None = None
) -> tuple[Array, Array, Array]:
    """What `mx.quantize` gives on the CPU device for values of `dtype`, bit for bit.

    Shapes: values (G, group_size) float32 with values of `dtype`
    -> codes (G, group_size) uint8, scales (G,) and biases (G,) float32 rounded to `dtype`.
    The codes are chosen with the scale before it is rounded, as MLX does.
    """
    scales, biases = fit_grid(values, bits, extremes)
    codes = nearest_codes(values, scales, biases, bits).astype(np.uint8)
    return codes, round_to(scales, dtype), round_to(biases, dtype)
