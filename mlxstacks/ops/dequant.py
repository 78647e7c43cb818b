"""Packed weights to floats: kernels/dequant.metal and its reference.

`mx.dequantize` fuses its multiplication and addition on Metal, so its values differ between devices
in the last bit. These are those of the CPU device everywhere: what is exported or compared must not
depend on the machine. (Numbers below 1e-38, which a GPU may flush to zero, are the exception.)
"""

import mlx.core as mx

from mlxstacks.ops import affine_ops as grid
from mlxstacks.ops import kernels
from mlxstacks.ops.requant_arguments import grid_problems, grid_refusal

_THREADS = 256
_WORDS = 4  # of eight bytes, that a lane writes
_UNITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
_MOST_WORDS = (1 << 32) - 1  # counted in 32 bits


def dequant_reference(
    packed: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """`dequant` in MLX operations, for any shape and device; arguments are taken to be valid."""
    codes = grid.unpack_codes(packed, bits)  # (..., N, K)
    groups = codes.reshape(*scales.shape, group_size)
    wide = [x.astype(mx.float32) for x in (scales, biases)]
    values = grid.stored_values_of(groups, wide[0], wide[1], scales.dtype)
    return values.reshape(codes.shape).astype(scales.dtype)


def dequant_kernel(
    packed: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """`dequant` by one launch of kernels/dequant.metal; arguments are taken to be supported."""
    weights = scales.size * group_size
    per_word = 8 // scales.dtype.size
    # The codes of a word as one unit where they are whole bytes of a kind that MLX has.
    unit = per_word * bits // 8 if bits in (4, 8) else 1
    words = weights // per_word
    run = kernels.kernel(
        "dequant", ("old_codes", "old_scales", "old_biases", "word_total"), ("words",)
    )
    groups = -(-words // (kernels.LANES * _WORDS))
    threads = -(-groups * kernels.LANES // _THREADS) * _THREADS
    (made,) = run(
        inputs=[packed.view(_UNITS[unit]), scales, biases, mx.array([words], mx.uint32)],
        template=[
            ("T", scales.dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("VALUE_BITS", 8 * scales.dtype.size),
            ("UNIT_BITS", 8 * unit),
            ("WORDS", _WORDS),
        ],
        grid=(threads, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*scales.shape[:-1], scales.shape[-1] * group_size // per_word)],
        output_dtypes=[mx.uint64],
    )
    return made.view(scales.dtype)


def _refusal(scales: mx.array, group_size: int) -> str | None:
    """Why the kernel cannot take these (valid) arguments."""
    words = scales.size * group_size * scales.dtype.size // 8
    if words > _MOST_WORDS:
        return f"there are {words} words of eight bytes; the kernel writes up to {_MOST_WORDS}"
    return grid_refusal(scales, group_size)


def dequant(
    packed: mx.array,
    scales: mx.array,
    biases: mx.array,
    *,
    group_size: int,
    bits: int,
    use_kernel: bool | None = None,
) -> mx.array:
    """Values of packed weights, (..., N, K) in the dtype of the scales.

    packed: (..., N, K * bits / 32) uint32; scales, biases: (..., N, K / group_size), bfloat16,
    float16 or float32. use_kernel: None takes the kernel where it runs.

    Law: equal to `mx.dequantize` on the CPU device to the bit, kernel or not, for scales of normal
    size (1e-38 or more).

    Raises: ValueError listing all arguments that do not fit; ValueError with the reason for
    `use_kernel=True` where the kernel cannot run.
    """
    problems = grid_problems(packed, scales, biases, group_size, bits)
    if problems:
        raise ValueError("\n  ".join(["dequant cannot use these arguments:", *problems]))
    reason = _refusal(scales, group_size)
    run = dequant_kernel if kernels.use_kernel(use_kernel, "dequant", reason) else dequant_reference
    return run(packed, scales, biases, group_size=group_size, bits=bits)
