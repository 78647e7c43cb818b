"""A task of a fuse by the requant or dequant kernel: packed rows in, new rows and their sums out.

The same bytes as `module.run_task` makes with NumPy, and the same sums up to their order. Where the
CPU's product has the bits of the kernel's own, requant takes the low-rank pair and multiplies it in
registers; elsewhere, for refit, which promises mlx-lm's product, and for dequant, whose values it
is added to, the delta comes from `delta.py`. Tasks run in the thread that made MLX's stream, one
after another: a task is a bounded piece of a module already.

A device is not taken at its word: the first task of every module is done by NumPy as well, and the
kernel has the module only where the bytes are the same.
"""

import logging

import mlx.core as mx
import numpy as np

from mlxstacks.fuse.blocks import Decision, StageInput, measure_together
from mlxstacks.fuse.delta import as_mx, product_is_chain
from mlxstacks.fuse.fidelity import ALL_STAGES, Sums
from mlxstacks.fuse.module import (
    Done,
    Module,
    Task,
    check_delta,
    check_finite,
    check_range,
    flat_rows,
    run_task,
    tasks,
    uniform_draws,
)
from mlxstacks.ops import kernels
from mlxstacks.ops.affine import GROUP_SIZES, Array, from_storage, unpack
from mlxstacks.ops.dequant import dequant
from mlxstacks.ops.policies import POLICIES, Groups
from mlxstacks.ops.requant import SUM_NAMES, Requantized, requant
from mlxstacks.ops.requant_arguments import MOST_RANKS

_log = logging.getLogger("mlxstacks.fuse")


def takes_kernel(module: Module, decisions: dict[int, Decision]) -> bool:
    """Whether the stages of a module run by the kernel here.

    Where only the module is in the way, the reason is logged at INFO, which `-v` shows.
    """
    if kernels.backend() is None:
        return False
    reason = _refusal(module, decisions)
    if reason is not None:
        _log.info("%s is fused by NumPy: %s", module.path, reason)
    return reason is None


def _refusal(module: Module, decisions: dict[int, Decision]) -> str | None:
    if module.stored.scales is None:
        return "it is not quantized"
    if module.stored.biases is None:
        return f"the kernel has no {module.stored.mode}"
    if module.stored.group_size not in GROUP_SIZES:
        allowed = ", ".join(map(str, GROUP_SIZES))
        return f"its group_size is {module.stored.group_size}; the kernel has {allowed}"
    if any(match.module.magnitude is not None for match in module.stages.values()):
        return "the kernel has no DoRA"
    for decision in decisions.values():
        if decision.on_device:
            return "--device-parity asks for the device's own mx.quantize"
        if decision.policy == "dequantize" and len(decisions) > 1:
            return "the kernel dequantizes for one adapter"
        if decision.policy not in {*POLICIES, "dequantize"}:
            return f"the kernel has no policy {decision.policy}"
    return None


def takes_pair(module: Module, decisions: dict[int, Decision]) -> bool:
    """Whether the kernel multiplies the low-rank pair of a module itself, to NumPy's bytes.

    Where the CPU's product is in the way, that is logged at INFO.
    """
    if len(module.stages) != 1:
        return False
    ((stage, match),) = module.stages.items()
    pair, policy = match.module, decisions[stage].policy
    # The refit inside nearest adds mlx-lm's product in half precision.
    by_product = policy in ("refit", "dequantize") or (policy == "nearest" and pair.dtype != "F32")
    if by_product or pair.rank > MOST_RANKS:
        return False
    shapes = pair.lora_a.shape, pair.lora_b.shape
    if product_is_chain(match.kind, *shapes, pair.dtype, pair.scale):
        return True
    _log.info("the delta of %s is multiplied by the CPU: its sums differ by rounding", module.path)
    return False


def kernel_fault(
    module: Module, decisions: dict[int, Decision], zero: bool, seed: int, low_rank: bool
) -> str | None:
    """Why this device's kernel may not have the module: it failed, or its bytes are others.

    Raises: what `module.run_task` raises for weights or deltas that cannot be fused.
    """
    task = next(tasks(module, decisions, zero, seed))
    wanted = run_task(task)
    try:
        made = run_kernel_task(next(tasks(module, decisions, zero, seed, low_rank)))
    except RuntimeError as error:  # MLX could not build or launch it
        return f"the kernel failed on {module.path}: {str(error).strip().splitlines()[0]}"
    different = [
        name
        for name, chunk in wanted.chunks.items()
        if chunk.tobytes() != made.chunks[name].tobytes()
    ]
    return f"the kernel made other bytes of {different[0]} than NumPy" if different else None


def run_kernel_task(task: Task) -> Done:
    """Read, change, measure and pack the rows of a task; raises what `module.run_task` raises."""
    module = task.module
    state, bits = _read(module, task.first, task.last), module.stored.bits
    if any(decision.policy == "dequantize" for decision, _, _ in task.stages.values()):
        return _dequantized(task, state)
    first = state
    assert bits is not None
    sums = {}
    for stage, (decision, _, _) in task.stages.items():
        made = _requantized(task, stage, state, bits)
        sums[stage] = _sums(module, made)
        check_delta(module.path, sums[stage])
        state, bits = (made.packed, made.scales, made.biases), decision.bits or bits
    if len(task.stages) > 1:
        width = module.stored.group_size
        assert width is not None
        inputs = [
            StageInput(decision, delta.reshape(-1, width))
            for decision, delta, _ in task.stages.values()
        ]
        before = _groups(module, first, module.stored.bits)
        sums[ALL_STAGES] = measure_together(before, _groups(module, state, bits), inputs)
    return Done((task.last - task.first) * module.stored.input_dims, _encode(module, state), sums)


def _dequantized(task: Task, state: tuple[mx.array, mx.array, mx.array]) -> Done:
    """A task whose only stage writes plain values."""
    ((stage, (_, delta, _)),) = task.stages.items()
    stored, dtype = task.module.stored, task.module.dtype
    assert stored.group_size is not None
    assert stored.bits is not None
    packed, *columns = state
    old, plain = (
        dequant(packed, *numbers, group_size=stored.group_size, bits=stored.bits)
        for numbers in ([column.astype(mx.float32) for column in columns], columns)
    )  # what a quantized matmul multiplies, and that in the dtype of the scales
    change = mx.array(delta)
    values = (plain.astype(mx.float32) + change).astype(plain.dtype)
    fused, drift = values.astype(mx.float32) - old, plain.astype(mx.float32) - old
    pairs = {
        "delta_delta": (change, change),
        "fused_delta": (fused, change),
        "error_error": (fused - change, fused - change),
        "fused_fused": (fused, fused),
        "weight_weight": (old, old),
        "zero_zero": (drift, drift),
    }
    rows = mx.stack([(first * second).sum(axis=1) for first, second in pairs.values()])
    steps = np.array(mx.abs(columns[0].astype(mx.float32)))
    found = dict(zip(pairs, np.array(rows).sum(axis=1, dtype=np.float64).tolist(), strict=True))
    sums = Sums(
        **found,
        weights=delta.size,
        codes=delta.size,
        groups=steps.size,
        step_sum=float(steps.sum(dtype=np.float64)),
        delta_delta_on_grid=found["delta_delta"],
    )
    check_delta(task.module.path, sums)
    raw = np.array(values.view(mx.uint16) if dtype == "BF16" else values)
    check_range(stored.weight, from_storage(raw, dtype), dtype)
    return Done(delta.size, {stored.weight.name: raw}, {stage: sums})


def _groups(module: Module, state: tuple[mx.array, mx.array, mx.array], bits: int | None) -> Groups:
    """A state as NumPy's blocks take it."""
    assert bits is not None
    scales, biases = (np.array(a.astype(mx.float32)).reshape(-1) for a in state[1:])
    codes = unpack(np.array(state[0]), bits).reshape(len(scales), -1)
    return Groups(codes, scales, biases, bits, module.dtype)


def _read(module: Module, first: int, last: int) -> tuple[mx.array, mx.array, mx.array]:
    """Rows as packed codes, scales and biases. Raises CheckpointError on NaN, Inf."""
    assert module.stored.scales is not None
    assert module.stored.biases is not None
    packed = mx.array(flat_rows(module.stored.weight, first, last))
    columns = []
    for info in (module.stored.scales, module.stored.biases):
        raw = flat_rows(info, first, last)
        check_finite(info, first, from_storage(raw, module.dtype))
        columns.append(as_mx(raw, module.dtype))
    return packed, columns[0], columns[1]


def _requantized(
    task: Task, stage: int, state: tuple[mx.array, mx.array, mx.array], bits: int
) -> Requantized:
    decision, delta, rounded = task.stages[stage]
    group_size = task.module.stored.group_size
    assert group_size is not None
    lora_a = lora_b = dense = uniform = None
    leading: tuple[int, ...] = state[0].shape[:-1]
    if task.low_rank is None:
        dense = mx.array(delta)
    else:
        lora_b, lora_a = task.low_rank.operands(task.first, task.last)
        leading = lora_b.shape[:-1]  # (n,) or (E, n)
    if decision.policy == "stochastic":
        uniform = mx.array(uniform_draws(task, stage).reshape(*leading, -1))
    packed, scales, biases = (array.reshape(*leading, -1) for array in state)
    return requant(
        packed,
        scales,
        biases,
        lora_a,
        lora_b,
        1.0 if task.low_rank is None else task.low_rank.scale,
        policy=decision.policy,
        group_size=group_size,
        bits=bits,
        new_bits=decision.bits,
        delta=dense,
        rounded=None if rounded is None else mx.array(rounded),
        uniform=uniform,
        control=decision.policy == "refit",
    )


def _sums(module: Module, made: Requantized) -> Sums:
    """The rows' sums added up in float64."""
    total = np.array(made.sums).sum(axis=0, dtype=np.float64)
    found = dict(zip(SUM_NAMES, total.tolist(), strict=True))
    weights = len(made.sums) * module.stored.input_dims
    return Sums(
        weights=weights,
        delta_delta=found["delta_delta"],
        fused_delta=found["fused_delta"],
        error_error=found["error_error"],
        fused_fused=found["fused_fused"],
        weight_weight=found["weight_weight"],
        zero_zero=found["zero_zero"],
        codes=weights,
        codes_changed=round(found["codes_changed"]),
        codes_changed_at_zero=round(found["codes_changed_at_zero"]),
        groups=made.scales.size,
        step_sum=found["step_sum"],
        delta_delta_on_grid=found["delta_delta"],
    )


def _encode(module: Module, state: tuple[mx.array, mx.array, mx.array]) -> dict[str, Array]:
    """Bytes of the output tensors. Raises CheckpointError where a dtype overflowed."""
    assert module.stored.scales is not None
    assert module.stored.biases is not None
    chunks = {module.stored.weight.name: np.array(state[0])}
    for info, column in zip((module.stored.scales, module.stored.biases), state[1:], strict=True):
        raw = np.array(column.view(mx.uint16) if module.dtype == "BF16" else column)
        check_range(info, from_storage(raw, module.dtype), module.dtype)
        chunks[info.name] = raw
    return chunks
