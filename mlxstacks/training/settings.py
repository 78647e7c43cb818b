"""Settings of the trainer core and of `mlxstacks train`. Imports neither mlx nor numpy."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from mlxstacks.data.settings import TrainDataSettings
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.layers.settings import LayersText
from mlxstacks.settings import Settings

Schedule = Literal["cosine", "linear", "constant"]


class OptimizerSettings(Settings):
    """AdamW, clipping, linear warm-up, then a schedule down to `final_share` of the peak, by step.

    The schedule `constant` stays at the peak.
    """

    steps: int = Field(ge=1, description="optimizer steps")
    learning_rate: float = Field(gt=0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    schedule: Schedule = Field("cosine", description="shape of the learning rate after the warm-up")
    final_share: float = Field(
        0.02, ge=0, le=1, description="last learning rate as a share of the peak"
    )
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    weight_decay: float = Field(0.02, ge=0)
    clip_norm: float = Field(1.0, gt=0, description="largest global gradient norm")
    log_every: int = Field(50, ge=1)

    def learning_rate_at(self, step: int) -> float:
        """The rate of step 0, 1, ...: rises over the warm-up, then follows the schedule."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        left = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.learning_rate * (self.final_share + (1 - self.final_share) * left)


class SnapshotSettings(Settings):
    """When validation says that training should end; the best weights are kept in any case."""

    spike_threshold: float | None = Field(
        None, gt=0, description="stop when the loss is this far above the best; none: never"
    )
    patience: int | None = Field(
        None, ge=1, description="stop after so many evaluations without a new best; none: never"
    )


class TrainSettings(Settings):
    """`mlxstacks train`: one LoRA, named as mlx-lm names its options."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the built-in nano model."
    )
    data: str | TrainDataSettings | None = Field(
        None,
        description="Rows in any format: a file, a directory (with train.jsonl and valid.jsonl, as "
        "in mlx-lm, or other files by split), or the id of a cached Hugging Face data set. Of a "
        "file or data set with nothing to validate with, 2% of the rows are held out; train.jsonl "
        "without valid.jsonl is trained on whole. In a recipe also sources, as a domain of stack "
        "has them. Default: nano's sample data, a persona.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = Field(
        None, description="Directory to write: an adapter that mlx-lm loads, report and log."
    )
    num_layers: int | None = Field(
        None, ge=-1, description="How many of the last layers get LoRA; -1 or nothing: all."
    )
    layers: LayersText = Field(
        "all",
        description="Layers that get LoRA, instead of num_layers: all, or numbers and ranges as in "
        "8,14,20-24.",
    )
    keys: tuple[str, ...] = Field(
        (),
        description="Projections by the end of their path: down_proj, switch_mlp.down_proj. "
        "Repeatable. Default: all usual ones, of attention, linear attention and experts.",
    )
    rank: int = Field(8, ge=1, description="Rank of every LoRA.")
    scale: float = Field(20.0, gt=0, le=1e30, description="Factor of the low-rank delta.")
    dropout: float = Field(0.0, ge=0, lt=1, description="On the input of a LoRA, in training.")
    iters: int | None = Field(
        None,
        ge=1,
        description="Batches to train on. Default: the data once, but at most 1,000.",
    )
    batch_size: int = Field(4, ge=1, le=1_000_000, description="Rows in a batch.")
    grad_accumulation_steps: int = Field(
        1, ge=1, description="Batches whose gradients make one optimizer step."
    )
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of Adam.")
    lr_schedule: Schedule = Field("constant", description="Learning rate after the warm-up.")
    warmup: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.0, ge=0, description="Of AdamW.")
    clip_norm: float = Field(1.0, gt=0, description="Largest joint norm of a step's gradients.")
    max_seq_length: int = Field(2048, ge=2, description="Longer rows are cut, and counted.")
    mask_prompt: bool = Field(
        True, description="Chat rows: the loss counts the assistant's turns, not what they answer."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    val_batches: int | None = Field(
        None, ge=-1, description="Validation batches; -1: all. Default: the first 200 rows."
    )
    steps_per_report: int = Field(10, ge=1, description="Batches between lines of the log.")
    steps_per_eval: int = Field(200, ge=1, description="Batches between evaluations.")
    save_every: int = Field(100, ge=1, description="Batches between saved states.")
    patience: int | None = Field(
        None, ge=1, description="Stop after so many evaluations without a new best."
    )
    spike_threshold: float | None = Field(
        None, gt=0, description="Stop when the validation loss is this far above its best."
    )
    keep: Literal["best", "last"] = Field(
        "best", description="Which weights are written, where there is validation data."
    )
    grad_checkpoint: bool = Field(
        False, description="Compute layers again for their gradient: less memory, more time."
    )
    compile_step: Literal["auto", "on", "off"] = Field(
        "auto",
        description="mx.compile the step. auto: on a GPU; on a CPU it gains a few percent.",
        json_schema_extra={"cli_name": "--compile"},
    )
    base: Literal["auto", "stored", "float32"] = Field(
        "auto",
        description="Numbers the frozen base computes with. float32: its stored values, some 20 "
        "times faster on a CPU; auto: that, on a CPU with the memory for it.",
    )
    resume: bool = Field(True, description="Go on from the last saved state of this recipe.")
    guard: Literal["refuse", "reshape", "warn", "off"] = Field(
        "refuse",
        description="A run that is predicted not to fit: refuse it, reshape it with the cheapest "
        "change that fits, or warn and run it as it is.",
    )
    resource_limit: int | None = Field(
        None, ge=1, description="Buffers a process may hold. Default: what the device says."
    )
    working_set_bytes: int | None = Field(
        None, ge=1, description="Memory to stay within. Default: what a Metal device recommends."
    )
    force: bool = Field(
        False, description="Replace an existing save path; run although the guard refuses."
    )
    # MLX's keys are made of 64 bits.
    seed: int = Field(
        0, ge=0, lt=2**64, description="Seed of first weights, dropout and order of the data."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers != "all" and self.num_layers is not None:
            raise ValueError("give layers or num_layers, not both")
        if self.val_batches == 0:
            raise ValueError(
                "val_batches is 0; give a number, -1 for all, or data without valid.jsonl"
            )
        if self.iters is not None and self.iters < self.grad_accumulation_steps:
            raise ValueError(
                f"iters {self.iters} is below grad_accumulation_steps "
                f"{self.grad_accumulation_steps}: not one optimizer step"
            )
        return self
