"""What `mlxstacks train` works on: base, projections, rows, batches; loaded, checked, not begun."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import Rendering, Row, RowFile, read_rows
from mlxstacks.errors import InputError
from mlxstacks.evaluate import VALIDATION_ROWS
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.layers.attach import attach_lora
from mlxstacks.layers.settings import LoRASettings, TargetSettings, parse_layers
from mlxstacks.layers.targets import Target, find_targets
from mlxstacks.training.batches import BatchPlan, choose_widths
from mlxstacks.training.prepare_base import prepare_base
from mlxstacks.training.settings import OptimizerSettings, TrainSettings

# Without iters a run sees the data once, but makes no more batches than mlx-lm's default.
MOST_DEFAULT_ITERS = 1000


@dataclass(frozen=True, eq=False)
class TrainSetup:
    """The model has its LoRA, new. steps, evaluations and saves count optimizer steps."""

    model: nn.Module
    base_fingerprint: str
    float32_base: bool
    lora: LoRASettings
    targets: list[Target]
    train: RowFile
    validation: RowFile | None
    plan: BatchPlan
    optimizer: OptimizerSettings
    notes: list[str] = field(default_factory=list)

    @property
    def validation_rows(self) -> list[Row]:
        return self.validation.rows if self.validation else []

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return trained_parameters(self.targets, self.lora.rank)

    def projections(self) -> dict[str, int]:
        """Name inside a layer -> in how many layers it has LoRA."""
        return dict(sorted(Counter(target.name for target in self.targets).items()))

    def identity(self, settings: TrainSettings) -> dict[str, Any]:
        """All that the trained weights depend on."""
        about_files = {"save_path", "force", "resume", "model", "data"}
        about_limits = {"guard", "resource_limit", "working_set_bytes"}
        about_time = {"save_every", "steps_per_report"}
        return {
            **settings.model_dump(mode="json", exclude=about_files | about_limits | about_time),
            "iters": self.optimizer.steps * settings.grad_accumulation_steps,
            "base_fingerprint": self.base_fingerprint,
            "base_in_float32": self.float32_base,
            "train_data_sha256": self.train.sha256,
            "validation_data_sha256": self.validation.sha256 if self.validation else None,
        }


def set_up(settings: TrainSettings) -> TrainSetup:
    """Load lazily (nothing of the base is read yet), choose, attach, encode, plan.

    Raises: InputError for whatever cannot be used: model, projections, rank, data.
    """
    if settings.model is None or settings.data is None:
        raise InputError("train needs model and data")
    notes: list[str] = []
    checkpoint = open_checkpoint(resolve_model(settings.model))
    model, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
    in_float32 = prepare_base(model, settings.base, notes)
    alpha = settings.scale * settings.rank
    lora = LoRASettings(
        rank=settings.rank, alpha=alpha, scale_rule="lora", dropout=settings.dropout
    )
    targets = choose_targets(model, settings)
    try:
        attach_lora(model, targets, lora, mx.random.key(settings.seed))
    except ValueError as error:
        raise InputError(str(error)) from error
    train, validation = read_data(settings, tokenizer, notes)
    lengths = tuple(len(row.tokens) for row in train.rows)
    widths = choose_widths(lengths, settings.max_seq_length)
    plan = BatchPlan(lengths, widths, settings.batch_size, settings.seed)
    return TrainSetup(
        model, fingerprint(checkpoint), in_float32, lora, targets, train, validation, plan,
        optimizer_settings(settings, plan.batches_per_epoch, notes), notes,
    )  # fmt: skip


def choose_targets(model: nn.Module, settings: TrainSettings) -> list[Target]:
    """The projections to train. Raises: InputError for layers or names that the model lacks."""
    try:
        return find_targets(model, _target_settings(model, settings))
    except ValueError as error:
        raise InputError(str(error)) from error


def trained_parameters(targets: Sequence[Target], rank: int) -> int:
    """Numbers of a LoRA of this rank on these projections."""
    return sum(
        (t.dims.base_experts or 1) * rank * (t.dims.input_dims + t.dims.output_dims)
        for t in targets
    )


def _target_settings(model: nn.Module, settings: TrainSettings) -> TargetSettings:
    layers = parse_layers(settings.layers)
    wanted, there = settings.num_layers, len(model.layers)
    if wanted is not None and wanted > there:
        raise InputError(f"num_layers {wanted}: the model has {there} layers")
    if wanted == 0:
        raise InputError("num_layers is 0: nothing would be trained; -1 means all layers")
    if wanted is not None and wanted > 0:
        layers = tuple(range(there - wanted, there))
    return TargetSettings(layers=layers, projections=settings.keys or None)


def read_data(
    settings: TrainSettings, tokenizer: Any, notes: list[str]
) -> tuple[RowFile, RowFile | None]:
    """Rows of train.jsonl and, where it exists, of valid.jsonl; or of one file to train on."""
    path = user_path(settings.data or "")
    try:
        file = path / "train.jsonl" if path.is_dir() else path
        is_there = file.is_file()
    except OSError as error:
        raise InputError(f"{str(path)[:200]!a}: cannot be opened: {error.strerror}") from None
    if not is_there:
        what = "has no train.jsonl" if path.is_dir() else "is neither a directory nor a file"
        raise InputError(
            f"{path}: {what}; --data takes a directory with train.jsonl and valid.jsonl, "
            "one JSON object a line: messages, prompt and completion, or text. A data set of the "
            "hub has to be written as such files first"
        )
    prompt_weight = 0.0 if settings.mask_prompt else 1.0

    def read(file: Path) -> RowFile:
        found = read_rows(
            file, tokenizer, prompt_weight, settings.max_seq_length, Rendering.of(settings)
        )
        if found.cut:
            notes.append(
                f"{file.name}: {found.cut} of {len(found.rows) + found.empty} rows were cut to "
                f"max_seq_length {settings.max_seq_length}."
            )
        if found.empty:
            notes.append(f"{file.name}: {found.empty} rows have nothing to learn from; left out.")
        notes.extend(f"{file.name}: {note}" for note in found.notes)
        return found

    train = read(file)
    valid = path / "valid.jsonl"
    # Something of this name that is no file (a dangling link) must not pass for none: a run without
    # validation keeps other weights. `read` says what is wrong with it.
    if not path.is_dir() or not os.path.lexists(valid):
        notes.append("No valid.jsonl: the last weights are kept, better or not.")
        return train, None
    found = read(valid)
    most = {None: VALIDATION_ROWS, -1: None}.get(
        settings.val_batches, (settings.val_batches or 0) * settings.batch_size
    )
    return train, RowFile(found.rows[:most], found.cut, found.empty, found.sha256)


def optimizer_settings(
    settings: TrainSettings, batches_per_epoch: int, notes: list[str]
) -> OptimizerSettings:
    """The optimizer's settings: batches become steps of `grad_accumulation_steps` batches."""
    each = settings.grad_accumulation_steps
    iters = settings.iters or max(each, min(batches_per_epoch, MOST_DEFAULT_ITERS))
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
