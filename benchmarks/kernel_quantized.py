"""Cases of the kernels on quantized weights: `requant` and `dequant`, on the experts of a layer.

The competitor of `requant` is what mlx_lm.fuse does, for every policy: it is the fastest way to a
requantized weight in MLX operations, and does less, for it keeps no count of what was lost. The
LoRA is in bfloat16 too, which spares it a product in float32.
"""

from functools import partial
from typing import Any

import mlx.core as mx

from benchmarks.kernel_case import (
    DTYPE,
    SCALE,
    Arguments,
    Arrays,
    Case,
    Comparison,
    Sizes,
    bit_comparison,
    close,
    largest_error,
    same_bytes,
    sets,
    some,
)
from mlxstacks.ops.dequant import dequant
from mlxstacks.ops.requant import SUM_NAMES, Requantized, requant, requant_reference

GROUP_SIZE = 64
STEP = 0.005  # mean width of a level; the deltas are about half of it
# Sums of a row in float32, in one order here and in another there.
SUMS_TOLERANCE = 1e-5


def _quantized(shape: tuple[int, int, int], bits: int) -> Arguments:
    """Random codes on a plausible grid: packed, scales, biases."""
    experts, rows, columns = shape
    width = columns * bits // 8
    packed = mx.random.randint(0, 256, (experts, rows, width), mx.uint8).view(mx.uint32)
    grid = (experts, rows, columns // GROUP_SIZE)
    scales = mx.random.uniform(0.8 * STEP, 1.2 * STEP, grid).astype(DTYPE)
    return packed, scales, (scales * -(2 ** (bits - 1))).astype(DTYPE)


def _with_lora(shape: tuple[int, int, int], bits: int, rank: int) -> Arguments:
    """packed, scales, biases, lora_a, lora_b; the delta is about half a level."""
    experts, rows, columns = shape
    a = mx.random.normal((experts, rank, columns), scale=0.02).astype(DTYPE)
    b_scale = 0.5 * STEP / (0.02 * SCALE * rank**0.5)
    b = mx.random.normal((experts, rows, rank), scale=b_scale).astype(DTYPE)
    return *_quantized(shape, bits), a, b


def _parts(result: Requantized) -> Arrays:
    return [result.packed, result.scales, result.biases, result.sums]


def requant_case(
    sizes: Sizes,
    name: str,
    shape: tuple[int, int, int],
    bits: int,
    policy: str,
    new_bits: int | None,
) -> Case:
    """One policy on the experts of one projection, with a LoRA of the smallest rank."""
    experts, rows, columns = shape
    arguments = partial(_with_lora, shape, bits, sizes.ranks[0])
    settings: dict[str, Any] = {
        "policy": policy,
        "group_size": GROUP_SIZE,
        "bits": bits,
        "new_bits": new_bits,
    }

    def run(w: mx.array, s: mx.array, b: mx.array, *lora: mx.array) -> Arrays:
        return _parts(requant(w, s, b, lora[0], lora[1], SCALE, **settings, use_kernel=True))

    def composition(w: mx.array, s: mx.array, b: mx.array, *lora: mx.array) -> Arrays:
        lora_a, lora_b = lora
        weight = mx.dequantize(w, s, b, GROUP_SIZE, bits)
        delta = ((SCALE * lora_b) @ lora_a).astype(weight.dtype)
        return mx.quantize(weight + delta, GROUP_SIZE, new_bits or bits)

    def compare(arrays: Arguments, result: Arrays) -> Comparison:
        with mx.stream(mx.cpu):
            chosen = some(experts)
            w, s, b, lora_a, lora_b = (x[chosen] for x in arrays)
            wanted = _parts(requant_reference(w, s, b, lora_a, lora_b, SCALE, **settings))
            found = [x.reshape(experts, -1, x.shape[-1])[chosen] for x in result]
            wanted = [x.reshape(y.shape) for x, y in zip(wanted, found, strict=True)]
            return _comparison(found, wanted, new_bits or bits)

    def needed_bytes(*arrays: mx.array) -> int:
        # In: everything once. Out: the codes, a row of sums, and a new grid where there is one.
        weights = experts * rows * columns
        out = weights * (new_bits or bits) // 8 + experts * rows * 4 * len(SUM_NAMES)
        grid = 0 if policy == "keep" else arrays[1].nbytes + arrays[2].nbytes
        return sum(x.nbytes for x in arrays) + out + grid

    to = f" to {new_bits}" if new_bits else ""
    return Case(
        kernel="requant",
        label=f"{policy} {bits}{to} bit, {name} {experts}x{rows}x{columns}",
        composition_name="mx.dequantize + matmul + add + mx.quantize",
        make=lambda: sets(experts * rows * columns * bits // 4, sizes.cycle_bytes, arguments),
        run=run,
        composition=composition,
        compare=compare,
        needed_bytes=needed_bytes,
    )


def _comparison(found: Arrays, wanted: Arrays, bits: int) -> Comparison:
    """Of packed codes, scales, biases and sums, each (experts, ...)."""
    values = [mx.dequantize(*x[:3], GROUP_SIZE, bits) for x in (found, wanted)]
    sums = [x[3].reshape(-1, len(SUM_NAMES)) for x in (found, wanted)]
    return bit_comparison(
        largest_error(values[0], values[1]),
        codes=same_bytes(found[0], wanted[0]),
        scales=same_bytes(found[1], wanted[1]),
        biases=same_bytes(found[2], wanted[2]),
        sums=close(sums[0], sums[1], SUMS_TOLERANCE, SUMS_TOLERANCE),
    )


def dequant_case(sizes: Sizes, name: str, shape: tuple[int, int, int], bits: int) -> Case:
    """Packed codes to bfloat16."""
    experts, rows, columns = shape

    def run(w: mx.array, s: mx.array, b: mx.array) -> Arrays:
        return [dequant(w, s, b, group_size=GROUP_SIZE, bits=bits, use_kernel=True)]

    def composition(*arrays: mx.array) -> Arrays:
        return [mx.dequantize(*arrays, GROUP_SIZE, bits)]

    def compare(arrays: Arguments, result: Arrays) -> Comparison:
        with mx.stream(mx.cpu):
            chosen = some(experts)
            wanted = mx.dequantize(*(x[chosen] for x in arrays), GROUP_SIZE, bits)
            found = result[0][chosen]
            return bit_comparison(largest_error(found, wanted), values=same_bytes(found, wanted))

    return Case(
        kernel="dequant",
        label=f"{bits} bit, {name} {experts}x{rows}x{columns}",
        composition_name="mx.dequantize",
        make=lambda: sets(
            experts * rows * columns * 2, sizes.cycle_bytes, partial(_quantized, shape, bits)
        ),
        run=run,
        composition=composition,
        compare=compare,
        needed_bytes=lambda *a: sum(x.nbytes for x in a) + experts * rows * columns * DTYPE.size,
    )
