"""Requantize packed weights with a delta in them, in one pass over the weights.

The rule is that of `ops/policies.py` (NumPy, which the fuse uses where no kernel runs), to the bit,
on every device, for scales of normal size (1e-38 or more): GPUs may flush smaller numbers to zero.
The delta is dense, or low-rank and then never stored: full-precision weights exist only in
registers. The same pass sums up what the fidelity report needs, row by row.

Letters: N rows of a matrix, K weights a row, G = K / group_size groups a row, R rank.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlxstacks.ops import affine_ops as grid
from mlxstacks.ops import kernels
from mlxstacks.ops.low_rank import low_rank_delta, scaled_factor
from mlxstacks.ops.policies import POLICIES
from mlxstacks.ops.policy_ops import Groups, changed, refit
from mlxstacks.ops.requant_arguments import check_arguments, refusal

# The columns of `Requantized.sums`. With D the intended change, F the realised one, F0 the one
# realised at zero delta, W the old weights, in float32:
SUM_NAMES = (
    "fused_delta",  # <F, D>
    "delta_delta",  # <D, D>
    "error_error",  # |F - D|^2; the kernel of nearest and promote sums |new weight - (W + D)|^2
    "fused_fused",  # <F, F>
    "weight_weight",  # <W, W>
    "zero_zero",  # <F0, F0>; measured for refit with control, 0 for policies that keep W
    "codes_changed",  # codes that differ from the old code at the new width
    "codes_changed_at_zero",  # the same at zero delta
    "step_sum",  # sum of |old scale| over the groups
)

# Weights that a SIMD group works on at once along a row: 8 a lane.
STEP = 8 * kernels.LANES
_THREADS = 128
_INPUTS = (
    "old_codes", "old_scales", "old_biases", "pairs_of_a", "scaled_b", "dense_delta",
    "rounded_delta", "uniform_draws", "sizes",
)  # fmt: skip
_OUTPUTS = ("new_codes", "new_scales", "new_biases", "row_sums")
_FITS = ("refit", "nearest", "promote")  # policies that may change scales and biases
_UNITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True, slots=True)
class Requantized:
    """New packed codes, scales and biases, and the sums of each row.

    Shapes: packed (..., N, K * new_bits / 32) uint32; scales, biases (..., N, G) T;
    sums (rows, len(SUM_NAMES)) float32, rows = all leading axes and N joined.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    sums: mx.array


def requant_reference(
    packed: mx.array,
    scales: mx.array,
    biases: mx.array,
    lora_a: mx.array | None,
    lora_b: mx.array | None,
    scale: float,
    *,
    policy: str,
    group_size: int,
    bits: int,
    new_bits: int | None = None,
    delta: mx.array | None = None,
    rounded: mx.array | None = None,
    uniform: mx.array | None = None,
    control: bool = False,
) -> Requantized:
    """`requant` in MLX operations, for any shape and device; arguments are taken to be valid."""
    wide = new_bits or bits
    codes = grid.unpack_codes(packed, bits)  # (..., N, K)
    shape = (*scales.shape, group_size)

    def grouped(array: mx.array) -> mx.array:
        return mx.broadcast_to(array.astype(mx.float32), codes.shape).reshape(shape)

    if delta is None:
        assert lora_a is not None
        assert lora_b is not None
        delta = low_rank_delta(lora_a, lora_b, scale)
    change = grouped(delta)
    stored = grid.round_to(change, scales.dtype) if rounded is None else grouped(rounded)
    draws = None if uniform is None else grouped(uniform)
    steps, origins = scales.astype(mx.float32), biases.astype(mx.float32)
    old = Groups(codes.reshape(shape), steps, origins, bits, scales.dtype)
    new = changed(old, policy, wide, change, stored, draws)
    controlled = control and policy == "refit"
    at_zero = refit(old, mx.zeros_like(change), wide) if controlled else None
    return Requantized(
        grid.pack_codes(new.codes.reshape(codes.shape), wide),
        new.scales.astype(scales.dtype),
        new.biases.astype(scales.dtype),
        _sums(old, new, at_zero, change).reshape(-1, len(SUM_NAMES)),
    )


def _sums(old: Groups, new: Groups, at_zero: Groups | None, change: mx.array) -> mx.array:
    """The sums of SUM_NAMES, (..., N, 9) float32."""
    weight = old.values()
    fused = new.values() - weight
    before = old.codes * 2.0 ** max(0, new.bits - old.bits)
    drift = mx.zeros_like(weight) if at_zero is None else at_zero.values() - weight
    moved = mx.array(False) if at_zero is None else at_zero.codes != before
    terms = (
        fused * change,
        change * change,
        mx.square(fused - change),
        fused * fused,
        weight * weight,
        drift * drift,
        new.codes != before,
        mx.broadcast_to(moved, weight.shape),
    )
    # Groups first: a long sum in float32 loses more than two short ones.
    sums = [term.astype(mx.float32).sum(axis=-1).sum(axis=-1) for term in terms]
    return mx.stack([*sums, mx.abs(old.scales).sum(axis=-1)], axis=-1)


def requant_kernel(
    packed: mx.array,
    scales: mx.array,
    biases: mx.array,
    lora_a: mx.array | None,
    lora_b: mx.array | None,
    scale: float,
    *,
    policy: str,
    group_size: int,
    bits: int,
    new_bits: int | None = None,
    delta: mx.array | None = None,
    rounded: mx.array | None = None,
    uniform: mx.array | None = None,
    control: bool = False,
) -> Requantized:
    """`requant` by one launch of kernels/requant.metal; arguments are taken to be supported."""
    wide = new_bits or bits
    rows_per_expert, groups = scales.shape[-2:]
    rows, width = scales.size // groups, groups * group_size
    at_once = next(n for n in (4, 2, 1) if rows_per_expert % n == 0)
    rank = 0 if lora_a is None else lora_a.shape[-2]
    unit, new_unit = _UNITS[_unit_bytes(bits)], _UNITS[_unit_bytes(wide)]
    # A policy that keeps the grid returns the scales and biases that it was given.
    fits = policy in _FITS
    grid_shape = scales.shape if fits else (1,)
    run = kernels.kernel("requant", _INPUTS, _OUTPUTS)
    codes, new_scales, new_biases, sums = run(
        inputs=[
            packed.view(unit),
            scales,
            biases,
            *_delta_inputs(lora_a, lora_b, scale, delta, rounded, uniform),
            mx.array([rows, rows_per_expert, width // 8, rank], mx.uint32),
        ],
        template=[
            ("T", scales.dtype),
            ("BITS", bits),
            ("NEW_BITS", wide),
            ("GROUP", group_size),
            ("ROWS", at_once),
            ("POLICY", list(POLICIES).index(policy)),
            ("CONTROL", int(control and policy == "refit")),
            ("FROM_LORA", int(lora_a is not None)),
            ("HAS_ROUNDED", int(rounded is not None)),
        ],
        grid=(-(-(rows // at_once * kernels.LANES) // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[
            (*packed.shape[:-1], width * wide // (8 * new_unit.size)),
            grid_shape,
            grid_shape,
            (rows, len(SUM_NAMES)),
        ],
        output_dtypes=[new_unit, scales.dtype, scales.dtype, mx.float32],
    )
    if not fits:
        new_scales, new_biases = scales, biases
    return Requantized(codes.view(mx.uint32), new_scales, new_biases, sums)


def _delta_inputs(
    lora_a: mx.array | None, lora_b: mx.array | None, scale: float, *dense: mx.array | None
) -> list[mx.array]:
    """The kernel's inputs from pairs_of_a to uniform_draws. dense: delta, rounded, uniform."""
    absent = mx.zeros((1,), mx.float32)  # stands for an input that the template leaves out
    factors = [mx.zeros((1,), mx.uint64), absent]
    if lora_a is not None and lora_b is not None:
        factors = [lay_out(lora_a), scaled_factor(lora_b, scale)]
    return factors + [absent if x is None else x.astype(mx.float32) for x in dense]


def lay_out(lora_a: mx.array) -> mx.array:
    """lora_a as the lanes of requant.metal read it: (..., R, K) -> (..., steps * R * 128) uint64.

    For each step of 256 weights and each rank: pair j of lane l is at j * 32 + l, and holds the
    float32 values of weights 8 * l + 2 * j and the next one. Neighbouring lanes read neighbouring
    memory, and past the end of a row there are zeros.
    """
    rank, width = lora_a.shape[-2:]
    steps = -(-width // STEP)
    values = lora_a.astype(mx.float32).reshape(-1, rank, width)  # (E, R, K)
    values = mx.pad(values, [(0, 0), (0, 0), (0, steps * STEP - width)])
    values = values.reshape(-1, rank, steps, kernels.LANES, 4, 2)
    values = mx.contiguous(values.transpose(0, 2, 1, 4, 3, 5))  # (E, steps, R, 4, 32, 2)
    return values.view(mx.uint64).reshape(*lora_a.shape[:-2], -1)


def _unit_bytes(bits: int) -> int:
    """Widest unit that divides the `bits` bytes of eight codes."""
    return 4 if bits % 4 == 0 else 2 if bits % 2 == 0 else 1


def requant(
    packed: mx.array,
    scales: mx.array,
    biases: mx.array,
    lora_a: mx.array | None,
    lora_b: mx.array | None,
    scale: float,
    *,
    policy: str,
    group_size: int,
    bits: int,
    new_bits: int | None = None,
    delta: mx.array | None = None,
    rounded: mx.array | None = None,
    uniform: mx.array | None = None,
    control: bool = False,
    use_kernel: bool | None = None,
) -> Requantized:
    """Weights with a delta in them, requantized by a policy of `ops/policies.py`.

    packed: (..., N, K * bits / 32) uint32; scales, biases: (..., N, G) bfloat16, float16, float32.
    lora_a: (..., R, K), lora_b: (..., N, R), any float dtype, and scale, a number: the delta
        of `ops/low_rank.py`. Leading axes are those of packed, or broadcast to them.
    delta: (..., N, K) float32 instead of lora_a and lora_b.
    rounded: (..., N, K) float32 holding values of the scale dtype: what refit adds, also inside
        nearest, instead of the delta rounded to that dtype; other policies ignore it.
    uniform: (..., N, K) float32 in [0, 1), for "stochastic"; other policies ignore it.
    new_bits: width of the new codes; more than `bits` for promote, any for refit, else `bits`.
    control: measure a refit at zero delta as well (zero_zero, codes_changed_at_zero).
    use_kernel: None takes the kernel where it runs.

    Laws: codes, scales and biases are those of `policies.requantize` for the delta, to the bit,
    kernel or not, for scales of normal size (1e-38 or more); at zero delta keep, nearest and
    stochastic return what they were given.

    Raises: ValueError listing all arguments that do not fit; ValueError with the reason for
    `use_kernel=True` where the kernel cannot run.
    """
    check_arguments(
        packed, scales, biases, lora_a, lora_b, scale, policy=policy, group_size=group_size,
        bits=bits, new_bits=new_bits, delta=delta, rounded=rounded, uniform=uniform,
    )  # fmt: skip
    reason = refusal(packed, scales, lora_a, lora_b, group_size)
    run = requant_kernel if kernels.use_kernel(use_kernel, "requant", reason) else requant_reference
    return run(
        packed, scales, biases, lora_a, lora_b, scale, policy=policy, group_size=group_size,
        bits=bits, new_bits=new_bits, delta=delta, rounded=rounded, uniform=uniform,
        control=control,
    )  # fmt: skip
