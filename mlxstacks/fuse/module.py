"""The modules that adapters change in a checkpoint: found, read and written in blocks of rows."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from mlxstacks.errors import AdapterError, CheckpointError, InputError
from mlxstacks.files.adapters import Match, base_name, load_any_adapter, match_adapter
from mlxstacks.files.checkpoint import Checkpoint, read_json_object
from mlxstacks.files.lora_modules import MERGE_READY_KEY, Adapter, outside_config
from mlxstacks.files.manifest import binding_notes
from mlxstacks.files.shards import TensorInfo, read_rows
from mlxstacks.files.stored_weight import StoredWeight
from mlxstacks.fuse.blocks import (
    GROUPS_AT_ONCE,
    Decision,
    Dense,
    StageInput,
    State,
    join,
    measure_together,
    part_of,
    run_gptq,
    run_stages,
)
from mlxstacks.fuse.delta import LowRankDelta, dora_delta
from mlxstacks.fuse.fidelity import ALL_STAGES, Sums
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.affine import Array, from_storage, pack, packed_width, to_storage, unpack
from mlxstacks.ops.float_grids import MODES, PROMOTED_GROUP_SIZE, FloatGroups
from mlxstacks.ops.gptq import InputStatistics, Moments, statistics_of
from mlxstacks.ops.policies import Groups
from mlxstacks.study.document import RESULT

# Rows handed to a worker at once: about a million weights, 4 MiB of delta in float32. No fewer than
# of the experts that share a product.
_WEIGHTS_PER_TASK = 1 << 20
# GPTQ takes a column at a time: below some thousand rows it would wait for Python more than count.
_WEIGHTS_PER_GPTQ_TASK = 1 << 22


@dataclass(frozen=True, slots=True)
class Module:
    """A module that at least one adapter changes.

    stages: index of the stage -> the adapter's match; a stage without this module is absent.
    merge_ready: stage -> "pooled" or "grid", of adapters that were trained so.
    moments: of the module's K inputs, where they were measured.
    """

    path: str
    stored: StoredWeight
    stages: dict[int, Match]
    merge_ready: dict[int, str] = field(default_factory=dict)
    moments: Moments | None = None

    @property
    def dtype(self) -> str:
        """Dtype of the module's values: that of affine scales or of a plain weight; else BF16."""
        return self.stored.dtype

    def group_size(self, mode: str) -> int | None:
        """Of the module in that mode."""
        same = mode == self.stored.mode or self.stored.bits is None
        return self.stored.group_size if same else PROMOTED_GROUP_SIZE

    @property
    def rows(self) -> int:
        return int(np.prod(self.stored.weight.shape[:-1], dtype=np.int64))

    @property
    def weights(self) -> int:
        return self.rows * self.stored.input_dims

    def tensors(self) -> list[TensorInfo]:
        infos = (self.stored.weight, self.stored.scales, self.stored.biases)
        return [info for info in infos if info is not None]

    @property
    def biases_name(self) -> str:
        """Of the affine biases that the module has or would have."""
        if self.stored.biases is not None:
            return self.stored.biases.name
        assert self.stored.scales is not None
        return self.stored.scales.name.removesuffix("scales") + "biases"

    def outputs(self, bits: int | None, mode: str) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of the module's tensors once it has `bits` (None: plain)."""
        leading = self.stored.weight.shape[:-1]
        if bits is None:
            return [(self.stored.weight.name, self.dtype, (*leading, self.stored.input_dims))]
        assert self.stored.scales is not None
        if mode in MODES:
            return [(info.name, info.dtype, info.shape) for info in self.tensors()]
        group_size = self.group_size(mode)
        assert group_size is not None
        packed = (*leading, packed_width(self.stored.input_dims, bits))
        groups = (*leading, self.stored.input_dims // group_size)
        return [
            (self.stored.weight.name, "U32", packed),
            (self.stored.scales.name, self.dtype, groups),
            (self.biases_name, self.dtype, groups),
        ]

    def read(self, first: int, last: int) -> State:
        """Rows first to last as groups, or as plain values. Raises CheckpointError on NaN, Inf."""
        raw = flat_rows(self.stored.weight, first, last)
        if self.stored.scales is not None and self.stored.mode in MODES:
            groups = flat_rows(self.stored.scales, first, last)
            return self._float_groups(raw, groups, first)
        if self.stored.scales is None or self.stored.biases is None:
            values = from_storage(raw, self.dtype)
            check_finite(self.stored.weight, first, values)
            return Dense(values, self.dtype)
        assert self.stored.bits is not None
        assert self.stored.group_size is not None
        scales = from_storage(flat_rows(self.stored.scales, first, last), self.dtype)
        biases = from_storage(flat_rows(self.stored.biases, first, last), self.dtype)
        check_finite(self.stored.scales, first, scales)
        check_finite(self.stored.biases, first, biases)
        codes = unpack(raw, self.stored.bits).reshape(-1, self.stored.group_size)  # (G, group_size)
        return Groups(codes, scales.reshape(-1), biases.reshape(-1), self.stored.bits, self.dtype)

    def _float_groups(self, raw: Array, scales: Array, first: int) -> FloatGroups:
        mode = MODES[self.stored.mode]
        codes = mode.unpack(raw).reshape(-1, mode.group_size)
        groups = FloatGroups(codes, scales.reshape(-1), mode, self.dtype)
        check_finite(self.stored.weight, first, groups.values().reshape(len(raw), -1))
        return groups


@dataclass(frozen=True, slots=True)
class Task:
    """Rows first to last of a module with each stage's share of its delta.

    magnitudes: of stages with DoRA, of these rows; their delta is then that of the direction.
    low_rank: the delta of the only stage, where a kernel shall multiply it; no rows of it are in
        `stages` then.
    inputs: of the module, where the only stage is by gptq.
    """

    module: Module
    first: int
    last: int
    stages: dict[int, tuple[Decision, Array, Array | None]]
    seed: int
    magnitudes: dict[int, Array] = field(default_factory=dict)
    low_rank: LowRankDelta | None = None
    inputs: InputStatistics | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """A finished task: raw bytes of each output tensor by name, and sums by stage; of several
    stages also those of ALL_STAGES.
    """

    weights: int
    chunks: dict[str, Array]
    sums: dict[int, Sums]


def tasks(
    module: Module,
    decisions: dict[int, Decision],
    zero: bool,
    seed: int,
    low_rank: bool = False,
) -> Iterator[Task]:
    """The module's rows in order, with deltas computed just before they are needed.

    Stages without a decision are left out: a full pass may look at the first ones alone.
    low_rank: leave the product of the only stage to a kernel.
    """
    deltas = {
        stage: LowRankDelta(
            match.module, match.kind, module.dtype, zero, decisions[stage].on_device
        )
        for stage, match in sorted(module.stages.items())
        if stage in decisions
    }
    with_rounded = [decisions[s].policy in ("refit", "nearest") for s in deltas]
    inputs = None
    if module.moments is not None and any(d.policy == "gptq" for d in decisions.values()):
        inputs = statistics_of(module.moments)
    weights_per_task = _WEIGHTS_PER_TASK if inputs is None else _WEIGHTS_PER_GPTQ_TASK
    rows_per_task = max(1, weights_per_task // module.stored.input_dims)
    if low_rank:
        ((stage, delta),) = deltas.items()
        share = decisions[stage], np.empty((0, delta.width), np.float32), None
        for start, end in delta.ranges():
            for first in range(start, end, rows_per_task):
                last = min(first + rows_per_task, end)
                yield Task(module, first, last, {stage: share}, seed, low_rank=delta)
        return
    streams = [d.pieces(r) for d, r in zip(deltas.values(), with_rounded, strict=True)]
    for pieces in zip(*streams, strict=True):
        for first in range(pieces[0].first, pieces[0].last, rows_per_task):
            last = min(first + rows_per_task, pieces[0].last)
            cut = slice(first - pieces[0].first, last - pieces[0].first)
            shares = {
                stage: (decisions[stage], piece.delta[cut], _cut(piece.rounded, cut))
                for stage, piece in zip(deltas, pieces, strict=True)
            }
            magnitudes = {
                stage: magnitude[first:last]
                for stage, match in module.stages.items()
                if stage in shares
                and (magnitude := match.module.magnitude) is not None
                and not zero
            }
            yield Task(module, first, last, shares, seed, magnitudes, inputs=inputs)


def _cut(rows: Array | None, part: slice) -> Array | None:
    return None if rows is None else rows[part]


def run_task(task: Task, keep_output: bool = True) -> Done:
    """Read, change, measure and pack the rows of a task.

    Raises: CheckpointError for weights that are not finite before or after, AdapterError for a
        delta that is not.
    """
    # Overflow is looked for in the results, where the tensor can be named.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _run_task(task, keep_output)


def _run_task(task: Task, keep_output: bool) -> Done:
    module = task.module
    state = module.read(task.first, task.last)
    if task.magnitudes:
        task = _with_dora_deltas(task, state.values().reshape(task.last - task.first, -1))
    if task.inputs is not None and isinstance(state, Groups):
        return _run_gptq_task(task, state, task.inputs, keep_output)
    # A plain weight has no groups; blocks of 64 serve just as well.
    width = module.stored.group_size or module.stored.input_dims
    regrouped = join([state], width)
    count = regrouped.size // width
    at_once = max(1, GROUPS_AT_ONCE * 64 // width)
    total = defaultdict[int, Sums](Sums)
    outputs: list[State] = []
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        inputs = [_stage_input(task, stage, start, part, width) for stage in task.stages]
        before = part_of(regrouped, part)
        after, sums = run_stages(before, inputs)
        for stage, stage_sums in zip(task.stages, sums, strict=True):
            check_delta(module.path, stage_sums)
            total[stage] += stage_sums
        if len(inputs) > 1:
            total[ALL_STAGES] += measure_together(before, after, inputs)
        if keep_output:
            outputs.append(after)
    chunks = _encode(module, width, outputs) if keep_output else {}
    return Done((task.last - task.first) * module.stored.input_dims, chunks, total)


def _run_gptq_task(task: Task, state: Groups, inputs: InputStatistics, keep_output: bool) -> Done:
    ((stage, (decision, delta, _)),) = task.stages.items()
    module, width = task.module, state.codes.shape[1]
    after, sums = run_gptq(state, decision, delta, inputs)
    check_delta(module.path, sums)
    chunks = _encode(module, width, [after]) if keep_output else {}
    return Done(delta.size, chunks, {stage: sums})


def _with_dora_deltas(task: Task, weights: Array) -> Task:
    """The task with what DoRA changes in rows of the stored weight, (rows, K) float32."""
    stages = dict(task.stages)
    for stage, magnitude in task.magnitudes.items():
        decision, delta, _ = stages[stage]
        stages[stage] = decision, dora_delta(weights, delta, magnitude), None
    return replace(task, stages=stages, magnitudes={})


def _stage_input(task: Task, stage: int, start: int, part: slice, width: int) -> StageInput:
    decision, delta, rounded = task.stages[stage]
    stochastic = decision.policy == "stochastic"
    generator = _generator(task, stage, start) if stochastic else None
    shaped = None if rounded is None else rounded.reshape(-1, width)[part]
    return StageInput(decision, delta.reshape(-1, width)[part], shaped, generator)


def _generator(task: Task, stage: int, start: int) -> np.random.Generator:
    """The same draws whatever the number of threads: keyed by module, row and stage."""
    name = hashlib.sha256(task.module.path.encode()).digest()
    key = [task.seed, stage, task.first, start, int.from_bytes(name[:8], "little")]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def uniform_draws(task: Task, stage: int) -> Array:
    """What stochastic rounding draws for a task, (G, group_size) float32 in [0, 1)."""
    width = task.module.stored.group_size
    assert width is not None
    count = (task.last - task.first) * task.module.stored.input_dims // width
    at_once = max(1, GROUPS_AT_ONCE * 64 // width)
    return np.concatenate(
        [
            _generator(task, stage, start).random(
                (min(at_once, count - start), width), dtype=np.float32
            )
            for start in range(0, count, at_once)
        ]
    )


def _encode(module: Module, width: int, outputs: list[State]) -> dict[str, Array]:
    """Bytes of the output tensors. Raises CheckpointError where a dtype overflowed."""
    state = join(outputs, width)
    if isinstance(state, FloatGroups):
        assert module.stored.scales is not None
        packed = state.mode.pack(state.codes.reshape(-1))
        return {module.stored.weight.name: packed, module.stored.scales.name: state.scales}
    if isinstance(state, Dense):
        check_range(module.stored.weight, state.values_, module.dtype)
        return {module.stored.weight.name: to_storage(state.values_, module.dtype)}
    assert module.stored.scales is not None
    check_range(module.stored.scales, state.scales, module.dtype)
    check_range(module.stored.biases or module.stored.scales, state.biases, module.dtype)
    return {
        module.stored.weight.name: pack(state.codes.reshape(-1), state.bits),
        module.stored.scales.name: to_storage(state.scales, module.dtype),
        module.biases_name: to_storage(state.biases, module.dtype),
    }


def flat_rows(info: TensorInfo, first: int, last: int) -> Array:
    """Rows of a tensor with its leading axes joined, (last - first, width)."""
    flat = info
    if len(info.shape) != 2:
        rows = int(np.prod(info.shape[:-1], dtype=np.int64))
        flat = TensorInfo(
            info.name, info.dtype, (rows, info.shape[-1]), info.file, info.start, info.end
        )
    return read_rows(flat, first, last)


def check_finite(info: TensorInfo, first: int, values: Array) -> None:
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        index = [*np.unravel_index(first + int(row), info.shape[:-1]), column]
        raise CheckpointError(
            f"{info.file}: tensor {info.name} holds {values[row, column]} at "
            f"{tuple(int(i) for i in index)}; weights to be fused must be finite. "
            "Download or convert the model again."
        )


def check_delta(path: str, sums: Sums) -> None:
    """Raises AdapterError where the squared delta overflows float32: no adapter is that large."""
    if not np.isfinite(sums.delta_delta):
        raise AdapterError(
            f"{path}: scale * B @ A is beyond the range of float32; the adapter is damaged, or "
            "its scale is wrong"
        )


def check_range(info: TensorInfo, values: Array, dtype: str) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(
            f"{info.name}: a fused value is beyond the range of {dtype}. "
            "The adapter's scale is far too large for this model, or the adapter is damaged."
        )


def gather_modules(
    checkpoint: Checkpoint, settings: FuseSettings, moments: Mapping[str, Moments] | None = None
) -> tuple[list[Module], list[str]]:
    """The modules that the adapters change, in the order of the checkpoint's tensors; and notes.

    moments: by path, see `Module`. A note says what a reader should know of the inputs: a base that
    an adapter names and that cannot be verified, a mismatch that was overridden, a model that is a
    fused one already.

    Raises: AdapterError, CheckpointError for what does not fit; InputError for a pattern of `bits`
        that matches nothing.
    """
    stages: dict[str, dict[int, Match]] = {}
    marks: dict[int, str] = {}
    notes = _history_note(checkpoint)
    for stage, path in enumerate(settings.adapter_path):
        adapter = load_any_adapter(path, settings.peft_layout, checkpoint, dora=True, stream=True)
        matches = match_adapter(adapter, checkpoint, allow_base=settings.allow_base)
        if isinstance(mark := adapter.config.get(MERGE_READY_KEY), str):
            marks[stage] = mark
        notes += _base_note(path, adapter, matches, str(settings.model))
        if outside := outside_config(adapter):
            notes.append(
                f"{path}: its config leaves out {len(outside)} of its {len(adapter.modules)} "
                f"modules, {outside[0]} for one, and mlx-lm would not load it; all are fused here. "
                "Mend num_layers or keys, or remove what should not count."
            )
        for match in matches:
            stages.setdefault(match.path, {})[stage] = match
    for pattern in settings.bits_patterns():
        if not any(fnmatchcase(path, pattern) for path in stages):
            some = ", ".join(list(stages)[:6]) + (", ..." if len(stages) > 6 else "")
            raise InputError(
                f"bits pattern {pattern!r} matches none of the adapter's modules: {some}"
            )
    order = {name: index for index, name in enumerate(checkpoint.tensors)}
    modules = [
        Module(path, by_stage[min(by_stage)].stored, by_stage, marks, (moments or {}).get(path))
        for path, by_stage in stages.items()
    ]
    return sorted(modules, key=lambda module: order[module.stored.weight.name]), notes


def _base_note(path: str, adapter: Adapter, matches: list[Match], model: str) -> list[str]:
    """What is known of the base that the adapter was trained on, where that is not this one."""
    bases = {match.base for match in matches}
    if "overridden" in bases:
        return [f"{path} was trained on another base than this one; taken because of --allow-base."]
    if "verified by samples" in bases:
        return [f"{path}: {note}" for note in binding_notes(adapter.base_fingerprint)]
    named = base_name(adapter)
    if "not verifiable" not in bases or named is None:
        return []
    if Path(named).name == Path(model).name:
        return []
    note = f"{path} says that it was trained on {named}, and this is {model}. "
    return [note + "It carries no fingerprint, so whether the two fit is not known."]


def _history_note(checkpoint: Checkpoint) -> list[str]:
    """A requantized model is not the base that it came from."""
    former, result = (checkpoint.directory / name for name in ("fuse_report.json", RESULT))
    try:
        is_fused = former.is_file() or read_json_object(result).get("kind") == "fuse"
    except CheckpointError:  # none, or somebody else's file of this name
        is_fused = False
    if not is_fused:
        return []
    return [f"{checkpoint.directory} is itself the result of a fuse; its report is inside."]
