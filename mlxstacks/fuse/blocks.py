"""One block of rows through the stages of a fuse: unpack, change, measure, pack.

A block is a few thousand groups at a time, so that a stage's arrays stay in the cache of one core;
every function here is called from worker threads and holds no state.
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlxstacks.fuse.fidelity import Sums, dot
from mlxstacks.ops import float_grids
from mlxstacks.ops.affine import Array, dequantize, pack, round_to, unpack
from mlxstacks.ops.float_grids import FloatGroups
from mlxstacks.ops.gptq import InputStatistics, fit_scales, round_rows
from mlxstacks.ops.policies import Change, Groups, refit_and_control, requantize, shift

# Groups handled at once: 2,048 groups of 64 are 512 KiB in float32, half of a core's L2 cache.
GROUPS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to a module in one stage.

    policy: a name of `ops.policies.POLICIES`, "gptq", "shift" or "dequantize", or "add" for modules
    without quantization. bits: width afterwards, None when the module is not quantized then; mode:
    its grid then. on_device: refit by the default device's own mx.quantize.
    """

    policy: str
    bits: int | None
    on_device: bool = False
    mode: str = "affine"


@dataclass(frozen=True, slots=True)
class Dense:
    """A block without quantization: values (G, group_size) float32 holding values of `dtype`."""

    values_: Array
    dtype: str

    def values(self) -> Array:
        return self.values_

    @property
    def size(self) -> int:
        return self.values_.size


State = Groups | FloatGroups | Dense


def part_of(state: State, part: slice | Array) -> State:
    """Some groups of a state."""
    if isinstance(state, Dense):
        return Dense(state.values_[part], state.dtype)
    if isinstance(state, FloatGroups):
        return replace(state, codes=state.codes[part], scales=state.scales[part])
    return Groups(
        state.codes[part], state.scales[part], state.biases[part], state.bits, state.dtype
    )


def join(states: list[State], width: int) -> State:
    """States one after another, as rows of `width` weights."""
    first = states[0]
    if isinstance(first, Dense):
        return Dense(np.concatenate([s.values().reshape(-1, width) for s in states]), first.dtype)
    if isinstance(first, FloatGroups):
        floats = [s for s in states if isinstance(s, FloatGroups)]
        codes, scales = ([getattr(g, name) for g in floats] for name in ("codes", "scales"))
        return replace(first, codes=np.concatenate(codes), scales=np.concatenate(scales))
    groups = [s for s in states if isinstance(s, Groups)]
    return Groups(
        np.concatenate([g.codes for g in groups]),
        np.concatenate([g.scales for g in groups]),
        np.concatenate([g.biases for g in groups]),
        first.bits,
        first.dtype,
    )


@dataclass(frozen=True, slots=True)
class StageInput:
    """A stage's decision and its share of the delta, shaped like the block (G, group_size)."""

    decision: Decision
    delta: Array
    rounded: Array | None = None
    generator: np.random.Generator | None = None


def run_stages(state: State, stages: list[StageInput]) -> tuple[State, list[Sums]]:
    """The block after all stages, and each stage's sums."""
    sums = []
    for stage in stages:
        before = state
        state, at_zero = apply_stage(before, stage)
        sums.append(measure(before, state, stage.delta, at_zero))
    return state, sums


def measure_together(before: State, after: State, stages: list[StageInput]) -> Sums:
    """Sums of all stages as one: the whole change against the sum of the deltas.

    What the fuse does by itself is what the stages make of `before` one after another at zero
    delta; stochastic rounding then changes nothing.
    """
    at_zero = None
    moves = isinstance(before, FloatGroups)
    if moves or any(stage.decision.policy in ("refit", "dequantize") for stage in stages):
        at_zero = before
        for stage in stages:
            if stage.decision.policy != "stochastic":
                nothing = replace(stage, delta=np.zeros_like(stage.delta), rounded=None)
                at_zero, _ = apply_stage(at_zero, nothing)
    return measure(before, after, np.add.reduce([stage.delta for stage in stages]), at_zero)


def apply_stage(state: State, stage: StageInput) -> tuple[State, State | None]:
    """The block after a stage, and what the stage makes of it at zero delta (None: no change)."""
    decision = stage.decision
    if isinstance(state, Dense):
        return _add(state, stage), None
    if stage.delta.shape != state.codes.shape:  # an earlier stage went to other groups
        rounded = None if stage.rounded is None else stage.rounded.reshape(state.codes.shape)
        stage = replace(stage, delta=stage.delta.reshape(state.codes.shape), rounded=rounded)
    if decision.policy == "gptq":  # nothing is known of the inputs, or the grid is not affine
        same = decision.bits == state.bits and (decision.mode == "affine") == isinstance(
            state, Groups
        )
        decision = replace(decision, policy="nearest" if same else "promote")
    if decision.policy == "dequantize":
        if isinstance(state, FloatGroups):
            values = round_to(state.values(), state.dtype)
        else:
            values = dequantize(state.codes, state.scales, state.biases, state.dtype)
        plain = Dense(values, state.dtype)
        return _add(plain, stage), plain
    uniform = None
    if decision.policy == "stochastic":
        assert stage.generator is not None
        uniform = stage.generator.random(stage.delta.shape, dtype=np.float32)
    if decision.policy == "refit":
        return _refit(state, stage)
    change = Change(stage.delta, stage.rounded, decision.bits, uniform)
    if isinstance(state, FloatGroups):
        fused = float_grids.requantize(state, change, decision.policy)
        at_zero = None
        if decision.policy == "promote" and state.mode.name != "mxfp4":
            nothing = replace(change, delta=np.zeros_like(stage.delta))
            at_zero = float_grids.requantize(state, nothing, "promote")
        return fused, at_zero
    if decision.policy == "shift":
        return shift(state, change), None
    return requantize(state, change, decision.policy), None


def _refit(
    state: Groups | FloatGroups, stage: StageInput
) -> tuple[Groups | FloatGroups, Groups | FloatGroups | None]:
    decision = stage.decision
    if isinstance(state, FloatGroups):
        zero = np.zeros_like(stage.delta)
        if decision.on_device:
            rounded = _rounded(stage, float_grids.VALUE_DTYPE)
            return float_refit_on_device(state, rounded), float_refit_on_device(state, zero)
        change = Change(stage.delta, stage.rounded)
        return float_grids.refit(state, change), float_grids.refit(state, Change(zero))
    if not decision.on_device:
        return refit_and_control(state, Change(stage.delta, stage.rounded, decision.bits))
    bits = decision.bits or state.bits
    fused = refit_on_device(state, _rounded(stage, state.dtype), bits)
    return fused, refit_on_device(state, np.zeros_like(stage.delta), bits)


def _rounded(stage: StageInput, dtype: str) -> Array:
    """The delta as mlx-lm adds it: the product cast to the dtype of the weights."""
    return round_to(stage.delta.copy(), dtype) if stage.rounded is None else stage.rounded


def _add(state: Dense, stage: StageInput) -> Dense:
    """Float32 add and one cast; refit rounds the delta first, as mlx-lm's fuse does."""
    is_refit = stage.decision.policy == "refit"
    delta = _rounded(stage, state.dtype) if is_refit else stage.delta
    return Dense(round_to(state.values_ + delta, state.dtype), state.dtype)


def run_gptq(
    groups: Groups, decision: Decision, delta: Array, inputs: InputStatistics
) -> tuple[Groups, Sums]:
    """Whole rows after a stage by gptq, from the grid that nearest or promote gives each group, and
    its sums: those of changes are of what the changes do to the outputs.

    Shapes: delta (rows, K) float32.
    """
    change = Change(delta.reshape(groups.codes.shape), None, decision.bits)
    policy = "nearest" if decision.bits == groups.bits else "promote"
    old = groups.values()
    grid = requantize(groups, change, policy)
    target = (old + change.delta).reshape(delta.shape)
    after = round_rows(target, fit_scales(target, grid, inputs), inputs)
    after = fit_scales(target, after, inputs)
    error = (after.values() - old).reshape(delta.shape) - delta
    of_delta, of_error = (rows @ inputs.moments for rows in (delta, error))
    wanted, missed, both = dot(of_delta, delta), dot(of_error, error), dot(of_delta, error)
    outputs = replace(
        measure(groups, after, change.delta, None), delta_delta=wanted, error_error=missed,
        fused_delta=wanted + both, fused_fused=wanted + 2 * both + missed,
    )  # fmt: skip
    return after, outputs


def measure(before: State, after: State, delta: Array, at_zero: State | None) -> Sums:
    """Sums of a stage over one block."""
    old = before.values()
    fused = after.values().reshape(old.shape) - old
    delta = delta.reshape(old.shape)
    delta_delta = dot(delta, delta)
    groups = None if isinstance(before, Dense) else before
    zero_zero = 0.0
    if at_zero is not None:
        rows = _changed_groups(before, at_zero)
        drift = part_of(at_zero, rows).values().reshape(-1, old.shape[1]) - old[rows]
        zero_zero = dot(drift, drift)
    fused_delta, fused_fused = dot(fused, delta), dot(fused, fused)
    error = np.subtract(fused, delta, out=fused)
    return Sums(
        weights=old.size,
        delta_delta=delta_delta,
        fused_delta=fused_delta,
        error_error=dot(error, error),
        fused_fused=fused_fused,
        weight_weight=dot(old, old),
        zero_zero=zero_zero,
        codes=old.size if groups else 0,
        codes_changed=_codes_changed(before, after),
        codes_changed_at_zero=_codes_changed(before, at_zero),
        groups=len(old) if groups else 0,
        step_sum=float(_steps(groups).sum(dtype=np.float64)) if groups else 0.0,
        delta_delta_on_grid=delta_delta if groups else 0.0,
    )


def _changed_groups(before: State, after: State) -> slice | Array:
    """Groups that differ in a byte; all where that are most, or where it takes longer to tell."""
    if not isinstance(before, Groups) or not isinstance(after, Groups) or before.bits != after.bits:
        return slice(None)
    differ = (before.scales != after.scales) | (before.biases != after.biases)
    words = before.codes.view(np.uint64) != after.codes.view(np.uint64)
    differ[np.flatnonzero(words) // words.shape[1]] = True
    return np.flatnonzero(differ) if 2 * differ.sum() < differ.size else slice(None)


def _steps(groups: Groups | FloatGroups) -> Array:
    """Mean distance of neighbouring values of each group, (G,)."""
    return groups.steps() if isinstance(groups, FloatGroups) else np.abs(groups.scales)


def _codes_changed(before: State, after: State | None) -> int:
    """Codes that differ; after a promotion from the old code at the new width. Of FP4 and FP8, of
    which equal values have several codes, the values that differ.
    """
    if isinstance(before, FloatGroups) and after is not None and not isinstance(after, Dense):
        old = before.values()
        return int(np.count_nonzero(old != after.values().reshape(old.shape)))
    if not isinstance(before, Groups) or not isinstance(after, Groups):
        return 0
    codes = before.codes
    if after.bits > before.bits:
        codes = codes << np.uint8(after.bits - before.bits)
    return int(np.count_nonzero(codes != after.codes))


MX_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


def refit_on_device(groups: Groups, rounded: Array, bits: int) -> Groups:
    """Groups of `mx.quantize(mx.dequantize(...) + delta)` on the default device.

    Shapes: rounded (G, group_size) float32 holding values of the scale dtype.
    """
    dtype = MX_DTYPES[groups.dtype]
    group_size = groups.codes.shape[1]
    columns = [mx.array(x).reshape(-1, 1).astype(dtype) for x in (groups.scales, groups.biases)]
    packed = mx.array(pack(groups.codes, groups.bits))
    weight = mx.dequantize(packed, *columns, group_size=group_size, bits=groups.bits)
    weight = weight + mx.array(rounded).astype(dtype)
    packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    codes = unpack(np.array(packed), bits)
    return Groups(codes, _flat(scales), _flat(biases), bits, groups.dtype)


def _flat(column: mx.array) -> Array:
    return np.array(column.astype(mx.float32)).reshape(-1)


def float_refit_on_device(groups: FloatGroups, rounded: Array) -> FloatGroups:
    """As `refit_on_device`, in the groups' FP4 or FP8 mode."""
    mode = groups.mode
    scales = mx.array(groups.scales).reshape(-1, 1)
    weight = mx.dequantize(mx.array(mode.pack(groups.codes)), scales, mode=mode.name)
    packed, scales = mx.quantize(weight + mx.array(rounded).astype(weight.dtype), mode=mode.name)
    codes = mode.unpack(np.array(packed))
    return replace(groups, codes=codes, scales=np.array(scales).reshape(-1))
