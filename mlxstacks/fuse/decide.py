"""Choose, per module and stage, the policy and the bits of a fuse; estimate the alternatives.

Decisions rest on the trained deltas, also for a zero-delta run. An estimate reads an evenly spread
sample of rows; where it says that `nearest` might do, all rows are read before that is believed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.fuse.blocks import (
    GROUPS_AT_ONCE,
    Decision,
    Dense,
    StageInput,
    State,
    apply_stage,
    join,
    measure,
    part_of,
)
from mlxstacks.fuse.delta import LowRankDelta, dora_delta
from mlxstacks.fuse.fidelity import Fidelity, Sums, fidelity
from mlxstacks.fuse.module import Module, check_delta
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.affine import Array
from mlxstacks.ops.float_grids import FloatGroups
from mlxstacks.ops.policies import PROMOTED_BITS, Groups

_SAMPLE_WEIGHTS = 1 << 19
_ALTERNATIVE_WEIGHTS = 1 << 17  # for a remark in the verdict, two digits are enough
_SAMPLE_RUN_ROWS = 4  # neighbouring rows read at once
# An estimate this far below the target settles that nearest is not enough; above, all rows decide.
_NEAREST_MARGIN = 0.01
# A sampled promotion has to clear the target by this share of what is missing to 1, so that the
# whole module reaches it.
_PROMOTE_MARGIN = 0.1

FullPass = Callable[[Module, dict[int, Decision]], dict[int, Sums]]


@dataclass(frozen=True, slots=True)
class Choice:
    """Decisions of one module by stage, with what they were based on.

    tried: stage -> candidate ("nearest", "promote-6", "dequantize") -> estimated fidelity.
    """

    decisions: dict[int, Decision]
    tried: dict[int, dict[str, Fidelity]] = field(default_factory=dict)


def mode_of(state: State) -> str:
    """MLX's name of a state's grid."""
    return state.mode.name if isinstance(state, FloatGroups) else "affine"


def policy_name(decision: Decision) -> str:
    """A decision as the reports name it: "nearest", "promote-6", "gptq", "dequantize", "add"."""
    return f"promote-{decision.bits}" if decision.policy == "promote" else decision.policy


def decide(
    module: Module, settings: FuseSettings, full_pass: FullPass, estimate_all: bool = False
) -> Choice:
    """Decisions for every stage of a module. Raises InputError for impossible bits.

    estimate_all: estimate what was chosen even where the choice needed no estimate (a dry run).
    """
    estimates = estimate_all or settings.requant in ("auto", "promote")
    # where nothing is estimated, one run of rows gives the shapes
    sample = _Sample(module, None if estimates else 1)
    choice = Choice({})
    for stage in sorted(module.stages):
        sample.take_delta(stage)
        choice.tried[stage] = {}
        decision = _decide_stage(module, stage, settings, sample, choice, full_pass)
        choice.decisions[stage] = decision
        known = decision.policy == "gptq" or policy_name(decision) in choice.tried[stage]
        if estimate_all and not known:
            choice.tried[stage][policy_name(decision)] = sample.estimate(decision)
        if stage != max(module.stages):
            sample.advance(decision)
    return choice


def _decide_stage(
    module: Module,
    stage: int,
    settings: FuseSettings,
    sample: "_Sample",
    choice: Choice,
    full_pass: FullPass,
) -> Decision:
    if isinstance(sample.state, Dense):
        if settings.bits_for(module.path) is not None:
            raise InputError(f"bits names {module.path}, which is not quantized at that stage")
        return Decision("refit" if settings.requant == "refit" else "add", None)
    bits, mode = sample.state.bits, mode_of(sample.state)
    wanted = settings.bits_for(module.path)
    if mode != "affine" and settings.requant == "refit" and wanted not in (None, bits):
        raise InputError(
            f"bits asks {wanted} for {module.path}, which is {mode}; refit keeps that mode, "
            "promote and auto allow more bits"
        )
    is_promoted = (bits, mode) != (module.stored.bits, module.stored.mode)
    if not (settings.requant == "promote" and wanted == bits and is_promoted):
        _check_wanted_bits(module.path, settings.requant, bits, wanted, mode)
    tried = choice.tried[stage]
    if settings.requant == "refit":
        return Decision("refit", wanted or bits, settings.device_parity, mode)
    if settings.requant == "shift":
        if problem := _cannot_shift(module, stage, sample.state):
            raise InputError(problem)
        return Decision("shift", bits)
    if settings.requant in ("auto", "gptq") and wanted in (None, bits):
        marked = _as_trained(module, stage, sample.state)
        if marked is not None:
            return marked
    if settings.requant == "gptq":
        return gptq(wanted or bits, sample.state)
    if settings.requant in ("keep", "stochastic"):
        return Decision(settings.requant, bits, mode=mode)
    if settings.requant == "nearest" or (settings.requant == "auto" and wanted == bits):
        return Decision("nearest", bits, mode=mode)
    if settings.requant == "dequantize":
        return Decision("dequantize", None)
    if wanted is not None:  # an earlier stage may have gone there already
        if _is_finer(wanted, bits, mode):
            return Decision("promote", wanted)
        return Decision("nearest", wanted, mode=mode)
    if settings.requant == "auto":
        nearest = Decision("nearest", bits, mode=mode)
        if _nearest_is_enough(module, stage, settings, sample, choice, full_pass):
            return nearest
    return promotion(sample, settings.target_correlation, tried)


def _as_trained(module: Module, stage: int, state: Groups | FloatGroups) -> Decision | None:
    """What takes the delta of an adapter of `train --merge-ready` whole, at the same bits."""
    mark = module.merge_ready.get(stage)
    if mark == "grid":
        return Decision("keep", state.bits, mode=mode_of(state))
    if mark == "pooled" and _cannot_shift(module, stage, state) is None:
        return Decision("shift", state.bits)
    return None


def _cannot_shift(module: Module, stage: int, state: Groups | FloatGroups) -> str | None:
    """Why biases alone cannot take the delta of a stage, or None."""
    match, remedy = module.stages[stage], "take requant auto"
    if isinstance(state, FloatGroups):
        return f"{module.path} is {mode_of(state)}, which has no biases to shift; {remedy}"
    width = state.codes.shape[1]
    a = match.module.lora_b.T if match.kind == "embedding" else match.module.lora_a
    a = np.moveaxis(a, -1 if match.kind == "switch" else 0, -1)  # (..., K)
    groups = a.reshape(*a.shape[:-1], -1, width)
    if match.module.magnitude is None and np.array_equal(
        groups, np.broadcast_to(groups[..., :1], groups.shape)
    ):
        return None
    return (
        f"{module.path}: the delta differs inside of groups of {width} weights, and requant shift "
        f"moves biases only, for adapters of `mlxstacks train --merge-ready pooled`; {remedy}"
    )


def gptq(wanted: int, state: Groups | FloatGroups) -> Decision:
    """Codes by gptq on the grid that is there, or on the affine one of `wanted` bits."""
    finer = _is_finer(wanted, state.bits, mode_of(state))
    return Decision("gptq", wanted, mode="affine" if finer else mode_of(state))


def _is_finer(wanted: int, bits: int, mode: str) -> bool:
    """Whether an affine grid of `wanted` bits is finer than what is there."""
    return wanted > bits or (mode == "mxfp8" and wanted == bits)


def _check_wanted_bits(path: str, policy: str, bits: int, wanted: int | None, mode: str) -> None:
    if wanted is None or policy == "refit":
        return
    if policy in ("auto", "gptq") and wanted >= bits:
        return
    if policy == "promote" and _is_finer(wanted, bits, mode):
        return
    if policy in ("keep", "nearest", "stochastic", "shift") and wanted == bits:
        return
    raise InputError(
        f"bits asks {wanted} for {path}, which has {bits}; requant {policy} allows "
        + {
            "promote": "more bits only",
            "dequantize": "none",
            **dict.fromkeys(("auto", "gptq"), f"{bits} or more"),
        }.get(policy, f"{bits} only")
        + "; refit allows any"
    )


def _nearest_is_enough(
    module: Module,
    stage: int,
    settings: FuseSettings,
    sample: "_Sample",
    choice: Choice,
    full_pass: FullPass,
) -> bool:
    assert not isinstance(sample.state, Dense)
    nearest = Decision("nearest", sample.state.bits, mode=mode_of(sample.state))
    found = sample.estimate(nearest)
    choice.tried[stage]["nearest"] = found
    # None: a zero delta, of which nearest leaves every byte; in a sample, rows may hide one
    if (
        found.correlation is not None
        and found.correlation < settings.target_correlation - _NEAREST_MARGIN
    ):
        return False
    if not sample.is_whole:
        sums = full_pass(module, {**choice.decisions, stage: nearest})[stage]
        found = fidelity(sums)
        choice.tried[stage]["nearest"] = found
    return found.correlation is None or found.correlation >= settings.target_correlation


def promotion(sample: "_Sample", target: float, tried: dict[str, Fidelity]) -> Decision:
    """The fewest bits that reach the target correlation, else the most bits there are.

    Of mxfp8 the affine grid of 8 bits counts as more: its steps are finer for most weights.
    """
    state = sample.state
    assert not isinstance(state, Dense)
    wider = [bits for bits in PROMOTED_BITS if _is_finer(bits, state.bits, mode_of(state))]
    if not wider:
        return _eight_bits(sample, tried)
    margin = 0.0 if sample.is_whole else _PROMOTE_MARGIN * (1 - target)
    for bits in wider:
        decision = Decision("promote", bits)
        found = sample.estimate(decision)
        tried[f"promote-{bits}"] = found
        if found.correlation is None or found.correlation >= target + margin:
            break
    return decision


def _eight_bits(sample: "_Sample", tried: dict[str, Fidelity]) -> Decision:
    """Nearest or plain floats, whichever is closer to the target.

    There are no wider codes. Plain BF16 has 8 significant bits, hardly more than the codes: for
    small deltas its own rounding is larger than the delta, and nearest is never worse than nothing.
    """
    plain, nearest = Decision("dequantize", None), Decision("nearest", 8)
    tried["dequantize"], tried["nearest"] = sample.estimate(plain), sample.estimate(nearest)
    errors = tried["dequantize"].error, tried["nearest"].error
    if errors[0] is not None and errors[1] is not None and errors[0] < errors[1]:
        return plain
    return nearest


@dataclass(frozen=True, slots=True)
class Width:
    """A module at its own bits or at more, as estimated on a sample of rows.

    lost, noise: in squares of the size of the trained change: what of it is missing, and what else
        is there, (1 - survival)^2 and noise^2.
    """

    decision: Decision
    lost: float
    noise: float


def widths(module: Module, by_gptq: bool = False) -> list[Width]:
    """A quantized module as it is fused at its own bits and at all wider ones; else as it is.

    Of several adapters the last is estimated, as if the others had been fused without loss.
    """
    sample = _Sample(module)
    sample.take_delta(max(module.stages))
    state = sample.state
    if isinstance(state, Dense):
        return [Width(Decision("add", None), 0.0, 0.0)]
    mode = mode_of(state)
    same = _as_trained(module, max(module.stages), state)
    wider = [bits for bits in PROMOTED_BITS if _is_finer(bits, state.bits, mode)]
    if by_gptq and same is None:  # its error is rounding alone
        return [Width(gptq(b, state), 0.0, 4.0**-b) for b in (state.bits, *wider)]
    decisions = [same or Decision("nearest", state.bits, mode=mode)]
    decisions += [Decision("promote", bits) for bits in wider]
    found = []
    for decision in decisions:
        figures = sample.estimate(decision)
        survival = 1.0 if figures.survival is None else figures.survival
        found.append(Width(decision, (1 - survival) ** 2, (figures.noise or 0.0) ** 2))
    return found


def estimate_alternative(
    module: Module, choice: Choice, policy: str, target: float
) -> tuple[Decision, Fidelity] | None:
    """What "promote" or "dequantize" would do in the module's last stage; None where plain."""
    sample, last = _Sample(module, _ALTERNATIVE_WEIGHTS), max(module.stages)
    for stage in sorted(module.stages):
        sample.take_delta(stage)
        if stage != last:
            sample.advance(choice.decisions[stage])
    if isinstance(sample.state, Dense):
        return None
    if policy == "dequantize":
        decision = Decision("dequantize", None)
        return decision, sample.estimate(decision)
    tried: dict[str, Fidelity] = {}
    decision = promotion(sample, target, tried)
    return decision, tried[policy_name(decision)]


class _Sample:
    """Evenly spread rows of a module, carried through the stages decided so far."""

    def __init__(self, module: Module, weights: int | None = None) -> None:
        self.module = module
        self.width = module.stored.group_size or module.stored.input_dims
        runs = _row_runs(module.rows, module.stored.input_dims, weights or _SAMPLE_WEIGHTS)
        self.rows = np.concatenate([np.arange(first, last) for first, last in runs])
        self.is_whole = len(self.rows) == module.rows
        self.state: State = join([module.read(first, last) for first, last in runs], self.width)
        self.delta: Array = np.empty(0, dtype=np.float32)
        dora = any(match.module.magnitude is not None for match in module.stages.values())
        self.stored = self.state.values() if dora else self.delta

    def take_delta(self, stage: int) -> None:
        match = self.module.stages[stage]
        source = LowRankDelta(match.module, match.kind, self.module.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            delta = source.sample(self.rows)
            if (magnitude := match.module.magnitude) is not None:
                delta = dora_delta(self.stored.reshape(delta.shape), delta, magnitude[self.rows])
            self.delta = delta.reshape(-1, self.width)

    def estimate(self, decision: Decision) -> Fidelity:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            sums = sum((s for _, s in self._apply(decision, True)), Sums())
        check_delta(self.module.path, sums)
        if not np.isfinite(sums.fused_fused):  # beyond the range of the dtype: it keeps nothing
            sums = replace(sums, fused_delta=0.0, fused_fused=0.0, error_error=sums.delta_delta)
        return fidelity(sums)

    def advance(self, decision: Decision) -> None:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            states = [state for state, _ in self._apply(decision, False)]
        self.state = join(states, self.width)
        if not isinstance(self.state, Dense):
            self.width = self.state.codes.shape[1]

    def _apply(self, decision: Decision, with_sums: bool) -> Iterable[tuple[State, Sums]]:
        count = len(self.delta)
        at_once = max(1, GROUPS_AT_ONCE * 64 // self.width)
        generator = np.random.default_rng(0) if decision.policy == "stochastic" else None
        for start in range(0, count, at_once):
            part = slice(start, min(start + at_once, count))
            before = part_of(self.state, part)
            stage = StageInput(decision, self.delta[part], None, generator)
            after, at_zero = apply_stage(before, stage)
            sums = measure(before, after, stage.delta, at_zero) if with_sums else Sums()
            yield after, sums


def _row_runs(rows: int, width: int, weights: int) -> list[tuple[int, int]]:
    """Runs of neighbouring rows, evenly spread, about `weights` weights in all."""
    wanted = max(1, weights // width)
    if rows <= wanted:
        return [(0, rows)]
    count = max(1, wanted // _SAMPLE_RUN_ROWS)
    starts = [index * (rows - _SAMPLE_RUN_ROWS) // max(1, count - 1) for index in range(count)]
    # A width above a quarter of the sample can leave fewer rows than a run has.
    return [(max(start, 0), min(start + _SAMPLE_RUN_ROWS, rows)) for start in sorted(set(starts))]
