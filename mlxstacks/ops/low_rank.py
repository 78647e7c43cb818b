"""The low-rank delta of an adapter to the bit: a chain of fused multiply-adds over the rank.

    delta[n, k] = d_R,  d_0 = 0,  d_(r+1) = fma(scaled_b[n, r], a[r, k], d_r)

with `scaled_b = scale * b` rounded to float32 once. A kernel runs this chain in registers, one
instruction a step, and gets the same bits on every device. MLX has no fused multiply-add among its
operations, so `fma` makes one of float64, which MLX has on the CPU only: all of this runs there.

Why `fma` is exact: the product of two float32 numbers has at most 48 significant bits and is a
float64 number. Its sum with a third float32 is rounded to float64 by round-to-odd (the exact sum if
it is a float64 number, else whichever neighbour has an odd last bit). A second rounding from 53
bits, of which the last one says "more or less than what the others show", to 24 bits or fewer is
then the rounding of the exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded
sums", 2008; it needs two bits more than the result has).
"""

import mlx.core as mx


def scaled_factor(lora_b: mx.array, scale: float) -> mx.array:
    """`scale * lora_b` with one rounding. Shapes: lora_b (...) any float -> (...) float32."""
    return mx.multiply(mx.array(scale, mx.float32), lora_b.astype(mx.float32))


def low_rank_delta(lora_a: mx.array, lora_b: mx.array, scale: float) -> mx.array:
    """The chain above, (..., N, K) float32.

    Shapes: lora_a (..., R, K), lora_b (..., N, R), any float dtype but float64; leading axes
    broadcast. Law: equal to the same chain in exact rational arithmetic, each step rounded to
    float32 once (ties to even, subnormal numbers included, overflow to infinity).
    """
    with mx.stream(mx.cpu):
        left = scaled_factor(lora_b, scale)[..., None]  # (..., N, R, 1)
        right = lora_a.astype(mx.float32)[..., None, :, :]  # (..., 1, R, K)
        total = mx.zeros((), mx.float32)
        for r in range(lora_a.shape[-2]):
            total = fma(left[..., r, :], right[..., r, :], total)
            mx.eval(total)  # nothing of float64 outlives its step
        shape = mx.broadcast_shapes((*left.shape[:-2], 1), (*right.shape[:-2], right.shape[-1]))
        return mx.broadcast_to(total, shape)


def fma(a: mx.array, b: mx.array, c: mx.array) -> mx.array:
    """`a * b + c` with one rounding, as float32. Shapes: any that broadcast, float32.

    Must run on the CPU's stream, where MLX has float64. Not finite where an operand is not finite.
    """
    product = mx.multiply(a.astype(mx.float64), b.astype(mx.float64))
    addend = c.astype(mx.float64)
    total = product + addend
    # TwoSum (Knuth): what the addition lost, exactly.
    shown = total - product
    lost = (product - (total - shown)) + (addend - shown)
    bits = total.view(mx.int64)
    # An even last bit beside a loss: the neighbour towards the exact sum. The number behind `bits`
    # grows in magnitude with them. Beside infinity or NaN nothing is lost that could be said.
    away = mx.where((lost > 0) == (total > 0), 1, -1).astype(mx.int64)
    inexact = (lost != 0) & mx.isfinite(lost) & ((bits & 1) == 0)
    odd = mx.where(inexact, bits + away, bits)
    return odd.view(mx.float64).astype(mx.float32)
