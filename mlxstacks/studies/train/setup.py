"""What a training run works on: base, rows, batches, the word of the guard; not begun yet."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model, memory
from mlxstacks.data import (
    DomainData,
    EncodedPairs,
    EncodedPrompts,
    EncodedRows,
    Row,
    TrainDataSettings,
    data_notes,
    encode_examples,
    encode_pairs,
    encode_prompts,
    read_train_data,
    train_data_settings,
)
from mlxstacks.data.settings import FormatName
from mlxstacks.errors import InputError, ResourceLimitError
from mlxstacks.evaluate import VALIDATION_ROWS
from mlxstacks.files.adapters import WEIGHTS, load_any_adapter, match_adapter
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.lora_modules import Adapter, outer_half
from mlxstacks.guard.run import GuardReport, guard
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.attach import attach_lora
from mlxstacks.layers.merge_ready import merge_ready_layers, stored_grids
from mlxstacks.layers.settings import LoRASettings, TargetSettings, parse_layers
from mlxstacks.layers.targets import Target, find_targets, left_out_notes
from mlxstacks.studies.train.rewards import rewards_sha256
from mlxstacks.study.document import counted
from mlxstacks.study.run_directory import IDENTITY, recorded_fingerprint, work_path
from mlxstacks.training.batches import BatchPlan, choose_widths
from mlxstacks.training.loop import arrays_sha256, trainable_weights
from mlxstacks.training.modes import prepare_base
from mlxstacks.training.settings import (
    LOGGING,
    AlignSettings,
    OptimizerSettings,
    StackRunSettings,
    TrainingSettings,
    TrainSettings,
)

# Without iters a run sees the data once, but makes no more batches than mlx-lm's default.
MOST_DEFAULT_ITERS = 1000


@dataclass(frozen=True, eq=False)
class TrainSetup:
    """The model has its LoRA, new, or `active`. steps, evaluations and saves count optimizer steps.

    data: the report of the rows; see `read_train_data`. start_sha256: of the adapter that training
    starts from. pairs: to train on and to validate with, whose chosen answers are then the rows.
    prompts: the same of grpo, whose prompts are then the rows.
    """

    model: nn.Module
    base_directory: Path
    base_fingerprint: str
    float32_base: bool
    lora: LoRASettings
    targets: list[Target]
    train: EncodedRows
    validation: EncodedRows | None
    data: dict[str, Any]
    plan: BatchPlan
    optimizer: OptimizerSettings
    notes: list[str] = field(default_factory=list)
    start_sha256: str | None = None
    pairs: tuple[EncodedPairs, EncodedPairs] | None = None
    prompts: tuple[EncodedPrompts, EncodedPrompts] | None = None
    tokenizer: Any = None
    active: "StackOfStore | None" = None

    @property
    def validation_rows(self) -> list[Row]:
        return self.validation.rows if self.validation else []

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return sum(weight.size for weight in trainable_weights(self.model).values())

    def identity(self, settings: TrainSettings) -> dict[str, Any]:
        """All that the trained weights depend on."""
        about_files = {
            "save_path", "force", "resume", "model", "data", "resume_adapter_file", "store_path",
            "domain", "stored_data",
        }  # fmt: skip
        about_limits = {"guard", "resource_limit", "working_set_bytes", "count_buffers"}
        about_time = {"save_every", "steps_per_report", *LOGGING}
        held_out = self.data["validation_sources"] or self.data["sources"]
        rules = {}
        if isinstance(settings.data, TrainDataSettings):  # how rows are made of files, not which
            where = {"sources": {"__all__": {"path", "dataset"}}}
            rules = {"data": settings.data.model_dump(mode="json", exclude=where)}
        return {
            **settings.model_dump(mode="json", exclude=about_files | about_limits | about_time),
            **rules,
            "iters": self.optimizer.steps * settings.grad_accumulation_steps,
            **({"start_sha256": self.start_sha256} if self.start_sha256 else {}),
            **(self.active.identity() if self.active else {}),
            **({"reward_sha256": rewards} if (rewards := _rewards(settings)) else {}),
            "base_fingerprint": self.base_fingerprint,
            "base_in_float32": self.float32_base,
            "train_data_sha256": _files_sha256(self.data["sources"]),
            "validation_data_sha256": _files_sha256(held_out) if self.validation else None,
            "rows": {key: self.data[f"{key}_rows"] for key in ("train", "validation")},
        }


class StackOfStore(Protocol):
    """What `align` may train in place of a LoRA; see `studies.stack.align`."""

    loss_before: float

    def attach(
        self, model: nn.Module, tokenizer: Any, base: Path, in_float32: bool, notes: list[str]
    ) -> list[Target]: ...
    def plan(self) -> dict[str, Any]: ...
    def identity(self) -> dict[str, Any]: ...
    def asked_of(self, settings: TrainSettings, longest_row_tokens: int) -> GuardSettings: ...
    def begin(self, say: Callable[[str], None]) -> None: ...
    def loss(self) -> float: ...
    def finish(
        self, how: dict[str, Any], most_rise: float | None, say: Callable[[str], None]
    ) -> dict[str, Any]: ...


RowsOf = Callable[[Any, Any, list[str]], tuple[EncodedRows, EncodedRows | None, dict[str, Any]]]
"""(settings, tokenizer, notes) -> rows to train on, rows to validate with, the report of both."""


def set_up(
    settings: TrainSettings, rows_of: RowsOf | None = None, active: StackOfStore | None = None
) -> TrainSetup:
    """Load lazily (nothing of the base is read yet), choose, attach, encode, plan.

    rows_of: None: as the settings say. active: what to train in place of a LoRA.
    Raises: InputError for whatever cannot be used: model, projections, rank, data.
    """
    if settings.model is None or (settings.data is None and rows_of is None):
        raise InputError("train needs model and data")
    notes: list[str] = []
    checkpoint = open_checkpoint(resolve_model(settings.model))
    recorded = recorded_fingerprint(
        work_path(user_path(settings.save_path or "")) / IDENTITY, "base_fingerprint",
        resume=settings.resume,
    )  # fmt: skip
    model, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
    how = settings.merge_ready
    grids = stored_grids(model) if how else {}
    in_float32 = prepare_base(model, settings.base, notes, checkpointed=settings.grad_checkpoint)
    alpha = settings.scale * settings.rank
    lora = LoRASettings(
        rank=settings.rank, alpha=alpha, scale_rule="lora", dropout=settings.dropout,
        shared_outer=settings.shared_outer,
    )  # fmt: skip
    start_sha256 = None
    if active is not None:
        targets = active.attach(model, tokenizer, checkpoint.directory, in_float32, notes)
    else:
        start = starting_adapter(settings, checkpoint)
        if start is not None:
            match_adapter(start, checkpoint)
        targets = choose_targets(model, settings) if start is None else targets_of(model, start)
        notes += [] if settings.keys or start else left_out_notes(model, targets)
        if how == "grid":
            weights = sum(
                (t.dims.base_experts or 1) * t.dims.input_dims * t.dims.output_dims for t in targets
            )
            notes.append(
                "merge_ready grid holds the rounded weights of a step in float32, "
                f"{memory.bytes_in_words(4 * weights)}, or of one layer with grad_checkpoint."
            )
        try:
            layer_of = merge_ready_layers(targets, grids, how)
            attach_lora(model, targets, lora, mx.random.key(settings.seed), layer_of)
        except ValueError as error:
            raise InputError(str(error)) from error
        if start is not None:
            arrays = {
                f"{path}.{half}": mx.array(np.asarray(getattr(module, half), np.float32))
                for path, module in start.modules.items()
                for half in ("lora_a", "lora_b")
            }
            model.load_weights(list(arrays.items()), strict=False)
            start_sha256 = arrays_sha256(arrays, {})
    pairs: tuple[EncodedPairs, EncodedPairs] | None = None
    prompts: tuple[EncodedPrompts, EncodedPrompts] | None = None
    train: EncodedRows
    validation: EncodedRows | None
    if rows_of is not None:
        train, validation, data = rows_of(settings, tokenizer, notes)
        lengths = tuple(len(row.tokens) for row in train.rows)
    elif isinstance(settings, AlignSettings) and settings.method == "grpo":
        prompts, data = read_prompts(settings, tokenizer, notes)
        train, validation = (
            EncodedRows([Row(p, (0.0,) * len(p)) for p in part.prompts], [], 0, part.too_long)
            for part in prompts
        )
        lengths = tuple(len(prompt) + settings.max_tokens for prompt in prompts[0].prompts)
    elif isinstance(settings, AlignSettings):
        *both, data = read_pairs(settings, tokenizer, notes)
        pairs = (both[0], both[1])
        train, validation = (EncodedRows(p.chosen, [], p.cut, p.empty) for p in pairs)
        sides = zip(pairs[0].chosen, pairs[0].rejected, strict=True)
        lengths = tuple(max(len(one.tokens), len(other.tokens)) for one, other in sides)
    else:
        train, validation, data = read_data(settings, tokenizer, notes)
        lengths = tuple(len(row.tokens) for row in train.rows)
    widths = choose_widths(lengths, settings.max_seq_length)
    plan = BatchPlan(lengths, widths, settings.batch_size, settings.seed)
    return TrainSetup(
        model, checkpoint.directory, fingerprint(checkpoint, recorded), in_float32, lora, targets,
        train, validation, data, plan,
        optimizer_settings(settings, plan.batches_per_epoch, notes), notes, start_sha256, pairs,
        prompts, tokenizer, active,
    )  # fmt: skip


def with_start(settings: TrainSettings) -> TrainSettings:
    """The settings with rank and scale of the adapter that training starts from.

    Raises: InputError: they were given and are others, or its modules have several.
    """
    if settings.resume_adapter_file is None or settings.model is None:
        return settings
    start = starting_adapter(settings, open_checkpoint(resolve_model(settings.model)))
    assert start is not None
    found: dict[str, Any] = {}
    for key in ("rank", "scale"):
        values = sorted({getattr(module, key) for module in start.modules.values()})
        if len(values) > 1:
            raise InputError(
                f"{start.directory}: its modules have {key} {', '.join(map(str, values))}; one "
                f"{key} for all can be trained on. Fuse it and train on the result"
            )
        found[key] = values[0]
        if key in settings.model_fields_set and getattr(settings, key) != values[0]:
            raise InputError(
                f"{key} is {getattr(settings, key)}, and that of {start.directory} is {values[0]}; "
                f"leave {key} out"
            )
    return settings.model_copy(update=found)


def starting_adapter(settings: TrainSettings, checkpoint: Checkpoint) -> Adapter | None:
    """The adapter that training starts from; None for a new one."""
    if settings.resume_adapter_file is None:
        return None
    path = user_path(settings.resume_adapter_file)
    is_file = path.name == WEIGHTS and path.exists()
    return load_any_adapter(path.parent if is_file else path, None, checkpoint)


def targets_of(model: nn.Module, adapter: Adapter) -> list[Target]:
    """The projections that an adapter has. Raises: InputError: one that cannot be trained."""
    names = {path.rpartition(".")[2] for path in adapter.modules}
    try:
        found = find_targets(model, TargetSettings(projections=tuple(sorted(names))))
    except ValueError as error:
        raise InputError(f"{adapter.directory}: {error}") from error
    targets = [target for target in found if target.path in adapter.modules]
    if left := sorted(adapter.modules.keys() - {target.path for target in targets}):
        raise InputError(
            f"{adapter.directory}: {left[0]} is no projection of a layer, so it cannot be trained "
            f"on ({len(left)} of {len(adapter.modules)} modules). Fuse it and train on the result"
        )
    return targets


def check_targets(model: str, settings: TrainSettings) -> None:
    """Raises: InputError, as `choose_targets`, for a model that is here; nothing of it is read."""
    directory = user_path(model)
    if (directory / "config.json").is_file():
        choose_targets(base_model.load(directory, lazy=True)[0], settings)


def choose_targets(model: nn.Module, settings: TrainSettings) -> list[Target]:
    """The projections to train. Raises: InputError for layers or names that the model lacks."""
    layers = parse_layers(settings.layers)
    last, total = settings.num_layers, len(model.layers)
    if last is not None and last > total:
        raise InputError(f"num_layers {last}: the model has {total} layers")
    if last == 0:
        raise InputError("num_layers is 0: nothing would be trained; -1 means all layers")
    if last is not None and last > 0:
        layers = tuple(range(total - last, total))
    wanted = TargetSettings(layers=layers, projections=settings.keys or None)
    try:
        targets = find_targets(model, wanted)
    except ValueError as error:
        raise InputError(str(error)) from error
    if settings.shared_outer and not any(t.dims.base_experts for t in targets):
        names = ", ".join(sorted({t.name for t in targets}))
        raise InputError(
            f"shared_outer is about routed experts, and {names} are none; leave it out, or train "
            "experts of a mixture (--keys switch_mlp.down_proj)"
        )
    return targets


def trained_parameters(targets: Sequence[Target], rank: int, shared_outer: bool = False) -> int:
    """Numbers of a LoRA of this rank on these projections."""
    total = 0
    for t in targets:
        of_a, of_b = (t.dims.base_experts or 1,) * 2
        if shared_outer:
            outer = outer_half(t.path)
            of_a, of_b = (1, of_b) if outer == "lora_a" else (of_a, 1)
        total += rank * (of_a * t.dims.input_dims + of_b * t.dims.output_dims)
    return total


def read_data(
    settings: TrainSettings, tokenizer: Any, notes: list[str]
) -> tuple[EncodedRows, EncodedRows | None, dict[str, Any]]:
    """Rows to train on, rows to validate with, if there are any, and the report of both."""
    if settings.data is None:
        raise InputError("train needs data")
    about = train_data_settings(settings.data).rendered_as(settings)
    if about.mask_prompt is None:
        about = about.model_copy(update={"mask_prompt": settings.mask_prompt})
    data = read_train_data(about, Path(), tokenizer)
    notes += data_notes("data", data.report)
    longest = settings.max_seq_length

    def encode(part: str) -> EncodedRows:
        rows = encode_examples(getattr(data, part), tokenizer, about, longest)
        if rows.cut:
            total = len(rows.rows) + rows.empty
            notes.append(f"{part}: cut to {longest} tokens: {rows.cut} of {counted(total, 'row')}.")
        if rows.empty:
            notes.append(
                f"{part}: left out, with nothing to learn from: {counted(rows.empty, 'row')}."
            )
        notes.extend(f"{part}: {note}" for note in rows.notes)
        return rows

    train = encode("train")
    held = None
    if data.validation:
        try:
            held = encode("validation")
        except InputError as error:
            if data.report["validation_sources"]:
                raise
            notes.append(f"Rows that were held out cannot be validated with: {error}.")
    if held is None:
        notes.append("No rows to validate with: the last weights are kept, better or not.")
        return train, None, data.report
    if not data.report["validation_sources"]:
        held_out = counted(len(data.validation), "row")
        notes.append(f"Held out to validate with: {held_out} of the data.")
    if repeated := data.report["validation_rows_trained_on"]:
        notes.append(f"{repeated} of {len(data.validation)} validation rows are trained on too.")
    most = most_validated(settings)
    return train, replace(held, rows=held.rows[:most], ids=held.ids[:most]), data.report


def most_validated(settings: TrainingSettings) -> int | None:
    """How many rows, or pairs, to validate with; None for all."""
    return {None: VALIDATION_ROWS, -1: None}.get(
        settings.val_batches, (settings.val_batches or 0) * settings.batch_size
    )


def read_pairs(
    settings: AlignSettings, tokenizer: Any, notes: list[str]
) -> tuple[EncodedPairs, EncodedPairs, dict[str, Any]]:
    """Pairs to train on, pairs to validate with, and the report of both."""
    about, data = _read_aligned(settings, tokenizer, notes, "preference", "pair")
    parts = []
    for part in ("train", "validation"):
        pairs = encode_pairs(getattr(data, part), tokenizer, about, settings.max_seq_length)
        if pairs.cut:
            notes.append(f"{part}: cut to max_seq_length: {counted(pairs.cut, 'answer')}.")
        if pairs.empty:
            notes.append(
                f"{part}: left out, with nothing to compare: {counted(pairs.empty, 'pair')}."
            )
        notes.extend(f"{part}: {note}" for note in pairs.notes)
        parts.append(pairs)
    train, held = parts
    most = most_validated(settings)
    held = replace(held, chosen=held.chosen[:most], rejected=held.rejected[:most])
    return train, held, data.report


# Each is answered group_size times.
VALIDATION_PROMPTS = 32


def read_prompts(
    settings: AlignSettings, tokenizer: Any, notes: list[str]
) -> tuple[tuple[EncodedPrompts, EncodedPrompts], dict[str, Any]]:
    """Prompts to train on and to validate with, and the report of both."""
    about, data = _read_aligned(settings, tokenizer, notes, "prompt", "prompt")
    if about.template == "alpaca":
        raise InputError("grpo puts prompts into the chat template; leave template out")
    parts = []
    for part in ("train", "validation"):
        prompts = encode_prompts(
            getattr(data, part), tokenizer, about, settings.max_seq_length, settings.max_tokens
        )
        if prompts.too_long:
            notes.append(
                f"{part}: left out, without room for {settings.max_tokens} tokens of answer within "
                f"max_seq_length: {counted(prompts.too_long, 'prompt')}."
            )
        parts.append(prompts)
    train, held = parts
    most = VALIDATION_PROMPTS if settings.val_batches is None else most_validated(settings)
    held = replace(
        held, prompts=held.prompts[:most], rows=held.rows[:most], references=held.references[:most]
    )
    return (train, held), data.report


def _read_aligned(
    settings: AlignSettings, tokenizer: Any, notes: list[str], form: FormatName, what: str
) -> tuple[TrainDataSettings, DomainData]:
    """Rows of one format; one is held out where none would be."""
    about = train_data_settings(settings.data or "").rendered_as(settings)
    sources = tuple(
        source.model_copy(update={"format": form}) if source.format == "auto" else source
        for source in about.sources
    )
    if other := [source.label for source in sources if source.format != form]:
        raise InputError(
            f"{other[0]}: align by {settings.method} reads format {form} alone; leave format out"
        )
    about = about.model_copy(update={"sources": sources})
    data = read_train_data(about, Path(), tokenizer)
    if not data.validation:
        data = read_train_data(about.model_copy(update={"validation_rows": 1}), Path(), tokenizer)
    notes += data_notes("data", data.report)
    if not data.report["validation_sources"]:
        held_out = counted(len(data.validation), what)
        notes.append(f"Held out to validate with: {held_out} of the data.")
    return about, data


def _rewards(settings: TrainSettings) -> list[str]:
    return rewards_sha256(settings.reward) if isinstance(settings, AlignSettings) else []


def _files_sha256(sources: Sequence[Mapping[str, Any]]) -> str:
    """The hash of one file; of several, of their hashes."""
    hashes = [sha256 for source in sources for _, sha256 in sorted(source["sha256"].items())]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def optimizer_settings(
    settings: TrainingSettings | StackRunSettings, batches_per_epoch: int, notes: list[str]
) -> OptimizerSettings:
    """The optimizer's settings: batches become steps of `grad_accumulation_steps` batches."""
    each = settings.grad_accumulation_steps
    default = max(each, min(batches_per_epoch, MOST_DEFAULT_ITERS))
    iters = default if settings.iters is None else settings.iters
    steps = -(-iters // each)
    if steps * each != iters and settings.iters:
        notes.append(f"iters {iters} was rounded up to {steps * each}, whole optimizer steps.")
    return OptimizerSettings(
        steps=steps,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup,
        schedule=settings.lr_schedule,
        final_share=0.0,
        beta2=0.999,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        log_every=steps_of(settings.steps_per_report, each),
    )


def steps_of(batches: int, each: int) -> int:
    """Optimizer steps for an interval that is given in batches; at least one."""
    return max(1, batches // each)


class SaveTimer:
    """Saves a state after so many steps, and when a minute has passed, or more where saving takes
    over a fiftieth of the time. A resumed run ends with the bytes of one that was never stopped
    wherever it resumes, so time may decide.
    """

    def __init__(self, steps: int, seconds: float = 60.0) -> None:
        self.steps, self.seconds, self.saved_at = steps, seconds, time.monotonic()

    def save_if_due(self, step: int, save: Callable[[], None]) -> None:
        begun = time.monotonic()
        if step % self.steps and begun - self.saved_at < self.seconds:
            return
        save()
        self.saved_at = time.monotonic()
        self.seconds = max(self.seconds, 50 * (self.saved_at - begun))


def asked_of(
    settings: TrainSettings,
    model: str,
    longest_row_tokens: int,
    *,
    validates: bool,
    layers: str | None = None,
    processes: int = 1,
    in_float32: bool = False,
) -> GuardSettings:
    """What the guard is asked of a run with these rows, for each of its processes.

    in_float32: the base computes so, whatever its config says. validates: the best weights so far
    are kept next to the present ones. layers: those that train, where the settings
    only tell how many.
    """
    return guard_settings(
        settings, model, longest_row_tokens, processes, in_float32,
        layers=layers or settings.layers, adapter_copies=int(validates),
        force=settings.force or settings.guard == "warn",
    )  # fmt: skip


def guard_settings(
    settings: TrainSettings | StackRunSettings, model: str, longest_row_tokens: int,
    processes: int, in_float32: bool, **more: Any,
) -> GuardSettings:  # fmt: skip
    """Those of the run; what the guard has under the same name is the same."""
    alike = GuardSettings.model_fields.keys() & type(settings).model_fields.keys()
    return GuardSettings.model_validate({
        **{name: getattr(settings, name) for name in alike},
        "model": model,
        # the guard counts inputs, a row has one token more
        "max_seq_length": longest_row_tokens - 1,
        "batch_size": -(-settings.batch_size // processes),
        "base": "float32" if in_float32 else "stored",
        "checkpointing": "layers" if settings.grad_checkpoint else "none",
        "compile": compiles(settings.compile_step),
        **more,
    })  # fmt: skip


def compiles(choice: Literal["auto", "on", "off"]) -> bool:
    """Whether the step is compiled. On a CPU that gains 4% (benchmarks/bench_train.py) and each
    shape has to be built first, by the system's C++ compiler; on CUDA the first step was not done
    after a minute, when 30 eager ones take a few seconds (RESULTS.md, "Rewards on SmolLM2").
    """
    if choice == "auto":
        return memory.device().kind == "metal"
    return choice == "on"


def train_change(report: GuardReport) -> dict[str, Any]:
    """The guard's cheapest change as settings of `train`."""
    asked = dict(report.change.settings) if report.change else {}
    change: dict[str, Any] = {}
    if asked.get("checkpointing") == "layers":
        change["grad_checkpoint"] = True
    if "max_seq_length" in asked:
        # the guard counts inputs, a row has one token more
        change["max_seq_length"] = asked["max_seq_length"] + 1
    return change


def guard_json(report: GuardReport, change: Mapping[str, Any]) -> dict[str, Any]:
    """What a report keeps of the guard's. change: the settings that it made other ones."""
    return {
        "outcome": report.outcome,
        "verdict": report.verdict,
        "buffers": report.buffers,
        "bytes": report.nbytes.total,
        "parts_bytes": asdict(report.nbytes),
        **({"drawing": asdict(report.decode)} if report.decode else {}),
        "limit_buffers": report.limit.buffers,
        "limit_known": report.limit.known,
        "advice": report.change.words if report.change else None,
        "change": dict(change),
    }


@dataclass(frozen=True, eq=False)
class GuardedRun:
    """A run as it may go on. settings, setup: with the guard's change, where it made one. report:
    None where the guard was not asked.
    """

    settings: TrainSettings
    setup: TrainSetup
    report: GuardReport | None = None
    change: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any] | None:
        return None if self.report is None else guard_json(self.report, self.change)

    def watch(self) -> memory.ResourceGuard | None:
        """Watches the batches of the run; it refuses none where the run was only warned of."""
        report = self.report
        if report is None:
            return None

        def predicted(tokens: int) -> int:
            # At most so many for shorter rows: the count grows with their length.
            longest: int = report.settings["max_seq_length"]
            return round(report.buffers * max(1.0, tokens / longest))

        force = _only_warns(self.settings, report)
        return memory.ResourceGuard(predicted, limit=report.limit.buffers, force=force)


def guarded(
    settings: TrainSettings,
    setup: TrainSetup,
    processes: int = 1,
    *,
    plan_only: bool = False,
    rows_of: RowsOf | None = None,
) -> GuardedRun:
    """The run as it is, or reshaped. Notes of the setup tell what the guard said.

    plan_only: a refusal is a note too. rows_of: as in `set_up`.
    Raises: ResourceLimitError from 90% of a limit on, unless the settings want otherwise.
    """
    if settings.guard == "off":
        return GuardedRun(settings, setup)
    report, change = _verdict_of(settings, setup, processes), {}
    if report.outcome == "refused" and settings.guard == "reshape":
        change = train_change(report)
    if change:
        settings = settings.model_copy(update=change)
        setup = set_up(settings, rows_of, setup.active)
        report = _verdict_of(settings, setup, processes)
        setup.notes.append(f"Reshaped by the guard: {_in_words(change)}.")
    if report.outcome == "tight" or (report.outcome == "refused" and _only_warns(settings, report)):
        setup.notes.append(f"The guard warns: {report.verdict}.")
    elif report.outcome == "refused":
        if not plan_only:
            raise ResourceLimitError(_refusal(report))
        setup.notes.append(_refusal(report))
    return GuardedRun(settings, setup, report, change)


def _only_warns(settings: TrainSettings, report: GuardReport) -> bool:
    return settings.force or settings.guard == "warn" or limit_is_assumed(report)


def limit_is_assumed(report: GuardReport) -> bool:
    """The only limit is Metal's usual one, and this is no Metal: no reason to refuse a run."""
    return not (report.limit.known or report.limit.nbytes)


def _verdict_of(settings: TrainSettings, setup: TrainSetup, processes: int) -> GuardReport:
    layers = ",".join(map(str, sorted({target.layer for target in setup.targets})))
    longest = max(setup.plan.widths)
    rows = min(settings.batch_size, len(setup.train.rows)) * (1 if setup.pairs is None else 2)
    parts = settings.grad_accumulation_steps
    of_align: dict[str, Any] = {}
    if isinstance(settings, AlignSettings) and settings.method != "orpo":
        # the best weights are kept, and those of the start
        of_align = {"adapter_copies": 2}
        if settings.method == "grpo":  # one group after the other
            rows, parts = settings.group_size, parts * settings.batch_size
            of_align |= {
                "decode_tokens": longest, "decode_batch": rows, "decode_with": "drawn",
            }  # fmt: skip
    of_step = {"batch_size": rows, "grad_accumulation_steps": parts}
    settings = settings.model_copy(update=of_step)
    if setup.active is not None:
        asked = setup.active.asked_of(settings, longest)
    else:
        asked = asked_of(
            settings, str(resolve_model(settings.model or "")), longest, layers=layers,
            validates=setup.validation is not None, processes=processes,
            in_float32=setup.float32_base,
        )  # fmt: skip
    return guard(asked.model_copy(update=of_align))


def _refusal(report: GuardReport) -> str:
    lines = [f"the guard refuses this run: {report.verdict}"]
    change = train_change(report)
    if report.change and change:
        lines.append(f"cheapest change: {report.change.words} ({_in_words(change)})")
    remedies = ["--guard reshape makes that change"] if change else ["shorten the rows"]
    lines.append("; ".join([*remedies, "--guard warn runs all the same"]))
    return "\n".join(lines)


def _in_words(change: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in change.items())
