"""Settings of the trainer core, of `train` and of `stack`. Imports neither mlx nor numpy."""

import math
import re
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mlxstacks.data.settings import DomainDataSettings, TrainDataSettings
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.layers.settings import LayersText, StackSettings
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
    shared_outer: bool = Field(
        False,
        description="Routed experts share one lora_a of gate_proj and up_proj, and one lora_b of "
        "down_proj: about half of the numbers, as SGLang serves them. The adapter has a copy for "
        "each expert; `adapter convert --experts stacked` stores it once.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="On the input of a LoRA, in training.")
    merge_ready: Literal["pooled", "grid"] | None = Field(
        None,
        description="Train what a fuse puts into a quantized base without loss. pooled: A acts on "
        "sums over quantization groups, and a fuse moves biases only. grid: the base is rounded on "
        "its own grid with the delta in it, in training as in the fuse; it needs the memory of "
        "every adapted weight in float32.",
    )
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
    save_every: int = Field(
        100, ge=1, description="Batches between saved states; a state is also saved every minute."
    )
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
    resume: bool = Field(True, description="Resume from the last saved state of this recipe.")
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
        if self.merge_ready is not None and self.shared_outer:
            raise ValueError("merge_ready and shared_outer do not go together: leave one out")
        if self.merge_ready == "grid" and self.dropout:
            raise ValueError(
                f"dropout {self.dropout:g} is of a LoRA's own input, which merge_ready grid does "
                "not have: leave dropout out, or take merge_ready pooled"
            )
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


MatrixMode = Literal["ungated", "prefix", "isolated"]
MATRIX_MODES: tuple[MatrixMode, ...] = get_args(MatrixMode)


def names_a_file(whose: str, most: int) -> AfterValidator:
    """For a name that becomes part of file names, on file systems that ignore case too."""

    def check(name: str) -> str:
        if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{most - 1}}}", name):
            raise ValueError(
                f"{whose} name becomes part of file names: letters, digits, _ . and -, the first "
                f"one a letter or a digit, {most} at most"
            )
        return name

    return AfterValidator(check)


class DomainSettings(Settings):
    """One domain; what is not said here is as the run says. A name alone stands for all of it."""

    name: Annotated[str, names_a_file("a domain's", 64)]
    data: DomainDataSettings | None = Field(
        None, description="where its rows come from; default: NAME.jsonl in the run's `data`"
    )
    rounds: int | None = Field(None, ge=1, description="stacks to train at most")
    iters: int | None = Field(None, ge=1, description="batches of a round")
    learning_rate: float | None = Field(None, gt=0, description="peak learning rate")
    layers: LayersText | None = Field(None, description="layers that its stacks are put on")


Domain = Annotated[
    DomainSettings,
    BeforeValidator(
        lambda value: {"name": value} if isinstance(value, str) else value,
        json_schema_input_type=DomainSettings | str,
    ),
]


class NullSpaceSettings(Settings):
    """Output directions that earlier stacks write into and a new one must keep out of."""

    directions: int = Field(64, ge=1, description="directions of a projection (each new domain)")
    samples: int = Field(400, ge=1, description="rows from which the directions are made")
    oversampling: int = Field(8, ge=0, description="directions more that the search looks at")
    scope: Literal["aggregate", "cumulative"] = Field(
        "aggregate",
        description="the leading directions of all stacks together, or, cumulative, those of every "
        "domain added up",
    )
    data: Literal["previous", "new", "both"] = Field(
        "previous", description="whose validation rows: the earlier domains', the new one's, both"
    )


class StackRunSettings(Settings):
    """`mlxstacks stack`: frozen stacks, domain after domain, in a store."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the built-in nano model."
    )
    data: str | None = Field(
        None,
        description="Directory with NAME.jsonl for each domain that is given by its name alone. "
        "Default: nano's curriculum.",
    )
    save_path: str | None = Field(
        None, description="The store: a new directory, or a store to extend."
    )
    domains: tuple[Domain, ...] = Field(
        (),
        description="Domains in the order of training. Repeatable. Default: every NAME.jsonl of "
        "`data`, by name.",
        json_schema_extra={"cli_type": "text"},
    )
    validation_rows: int | None = Field(
        None,
        ge=1,
        description="Rows to validate with, of a domain that is given by its name alone. Default: "
        "2% of its rows.",
    )
    rounds: int = Field(2, ge=1, description="Stacks of a domain, at most.")
    layers: LayersText = Field(
        "all", description="Layers: all, or numbers and ranges as in 8,14,20-24."
    )
    keys: tuple[str, ...] = Field(
        (),
        description="Projections by the end of their path: down_proj, switch_mlp.down_proj. "
        "Repeatable. Default: all usual ones, of attention, linear attention and experts.",
    )
    stack: StackSettings = Field(
        StackSettings(), description="The shape of a stack: rank, num_experts, alpha, ..."
    )
    null_space: NullSpaceSettings | None = Field(
        NullSpaceSettings(), description="Directions to keep out of; none: a stack may write all."
    )
    iters: int | None = Field(
        None,
        ge=1,
        description="Batches of a round. Default: the domain's data once, but at most 1,000.",
    )
    batch_size: int = Field(4, ge=1, description="Rows in a batch.")
    grad_accumulation_steps: int = Field(
        1, ge=1, description="Batches whose gradients make one optimizer step."
    )
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Schedule = Field("linear", description="Learning rate after the warm-up.")
    warmup: int = Field(0, ge=0, description="Optimizer steps of linear warm-up.")
    weight_decay: float = Field(0.01, ge=0, description="Of AdamW.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Of AdamW.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Of AdamW.")
    clip_norm: float = Field(1.0, gt=0, description="Largest joint norm of a step's gradients.")
    balance_weight: float = Field(0.01, ge=0, description="Factor of the experts' balance loss.")
    max_seq_length: int = Field(2048, ge=2, description="Longer rows are cut, and counted.")
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    packing: bool = Field(
        False, description="Lay rows end to end, up to max_seq_length, in training and validation."
    )
    steps_per_report: int = Field(10, ge=1, description="Batches between lines of the log.")
    steps_per_eval: int = Field(50, ge=1, description="Batches between evaluations.")
    save_every: int = Field(
        100, ge=1, description="Batches between saved states; a state is also saved every minute."
    )
    spike_threshold: float = Field(
        0.1, gt=0, description="End a round when the loss is this far above its best."
    )
    patience: int = Field(
        4, ge=1, description="End a round after so many evaluations without a new best."
    )
    min_loss_delta: float = Field(
        0.002, ge=0, description="A round that gains less is the domain's last."
    )
    keep_plateau_stack: bool = Field(
        False, description="Keep the stack of a round that gains less than min_loss_delta."
    )
    modes: tuple[MatrixMode, ...] = Field(
        MATRIX_MODES,
        description="What the forgetting matrix shows: every stack on, those up to the domain's "
        "own, or its own alone. Repeatable.",
    )
    sample_prompts: int = Field(
        0,
        ge=0,
        description="Validation prompts, of all domains by turns, that are answered in each mode "
        "after each domain (published: 5).",
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
    guard: Literal["refuse", "warn", "off"] = Field(
        "refuse", description="A run that is predicted not to fit: refuse it, warn, do not ask."
    )
    resource_limit: int | None = Field(
        None, ge=1, description="Buffers a process may hold. Default: what the device says."
    )
    working_set_bytes: int | None = Field(
        None, ge=1, description="Memory to stay within. Default: what a Metal device recommends."
    )
    resume: bool = Field(
        True, description="Resume a domain that was stopped; otherwise start it again."
    )
    force: bool = Field(False, description="Remove an existing store and start again.")
    seed: int = Field(42, ge=0, description="Seed of first weights, noise and order of the data.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [domain.name for domain in self.domains]
        folded = [name.casefold() for name in names]
        twice = sorted({name for name in names if folded.count(name.casefold()) > 1})
        if twice:
            raise ValueError(
                f"domains: {', '.join(twice)} {'is' if len(twice) == 1 else 'are'} there more than "
                "once (case does not count); name each domain once"
            )
        if not self.modes:
            raise ValueError(f"modes is empty; give one of {', '.join(MATRIX_MODES)}")
        for name, iters in [("iters", self.iters), *((d.name, d.iters) for d in self.domains)]:
            if iters is not None and iters < self.grad_accumulation_steps:
                raise ValueError(
                    f"{name}: {iters} batches are below grad_accumulation_steps "
                    f"{self.grad_accumulation_steps}: not one optimizer step"
                )
        return self
