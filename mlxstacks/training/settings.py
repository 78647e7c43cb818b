"""Settings of the trainer core, of `train` and of `stack`. Imports neither mlx nor numpy."""

import json
import math
import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mlxstacks.data.settings import DomainData, TrainDataSettings
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.layers.settings import LayersText, StackSettings
from mlxstacks.settings import Count, ResourceLimit, Settings, WorkingSetBytes

Schedule = Literal["cosine", "linear", "constant"]
LogTo = Annotated[
    Literal["trackio", "wandb"] | None,
    Field(
        description="Send metrics there too, by a package that you install. Default: metrics.csv "
        "and log.jsonl alone."
    ),
]
LogProject = Annotated[str, Field(description="Project of log_to.")]
LogName = Annotated[
    str | None, Field(description="Name of the run in log_to. Default: the package's own.")
]
# No number depends on them.
LOGGING = {"log_to", "log_project", "log_name"}


# What `train` and `stack` have alike.
Keys = Annotated[
    tuple[str, ...],
    Field(
        description="Projections to adapt, by path suffix: down_proj, switch_mlp.down_proj. "
        "Repeatable. Default: the usual ones of attention, linear attention and experts."
    ),
]
TrainedBase = Annotated[
    Literal["auto", "stored", "float32"],
    Field(
        description="How the frozen base computes. float32: its stored values in float32, about "
        "20 times faster on a CPU; auto: float32 on a CPU with enough memory, else stored."
    ),
]
CompileStep = Annotated[
    Literal["auto", "on", "off"],
    Field(
        description="Use mx.compile. auto: on Metal only; elsewhere each shape is slow to build.",
        json_schema_extra={"cli_name": "--compile"},
    ),
]
SaveEvery = Annotated[
    Count, Field(description="Batches between saved states; one is also saved every minute.")
]
GradCheckpoint = Annotated[
    bool, Field(description="Recompute layers in the backward pass: less memory, more time.")
]


class OptimizerSettings(Settings):
    """AdamW, clipping, linear warm-up, then a schedule down to `final_share` of the peak, by step.

    The schedule `constant` stays at the peak.
    """

    steps: int = Field(ge=0, description="optimizer steps")
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
        None, ge=1, description="stop after this many evaluations without a new best; none: never"
    )


class SafeguardSettings(Settings):
    """Limits that keep training on preferences from destroying a model."""

    max_loss: float = Field(100.0, gt=0, description="skip a step with a larger loss")
    max_gradient_growth: float = Field(
        50.0, gt=1, description="skip a step whose gradient norm is this many times the median"
    )
    max_skipped: int = Field(
        3, ge=1, description="skipped steps in a row that restore the best weights and halve the "
        "learning rate",
    )  # fmt: skip
    max_restored: int = Field(3, ge=1, description="restorations that end the run")
    max_delta_growth: float = Field(
        2.0, ge=1, description="largest delta of a projection, as a multiple of its size at the "
        "start; new adapters have no limit",
    )  # fmt: skip
    max_nll_rise: float | None = Field(
        0.1, gt=0, description="end the run when the validation loss of the chosen answers, or of "
        "the reference answers of grpo, is this many nats per token above its start; none: no "
        "limit",
    )  # fmt: skip
    max_divergence: float | None = Field(
        0.5, gt=0, description="grpo: end the run when the answers of a step diverge from the "
        "start by more nats per token; none: no limit",
    )  # fmt: skip


class TrainingSettings(Settings):
    """What every run of its own on the trainer core is told."""

    model: str | None = Field(None, description="Model directory or Hugging Face id.")
    data: str | TrainDataSettings | None = Field(
        None, description="Rows in any format.", json_schema_extra={"cli_type": "text"}
    )
    save_path: str | None = Field(None, description="Output directory.")
    iters: int | None = Field(
        None,
        ge=1,
        description="Batches to train on. Default: one pass over the data, at most 1,000.",
    )
    batch_size: int = Field(4, ge=1, le=1_000_000, description="Rows per batch.")
    grad_accumulation_steps: int = Field(1, ge=1, description="Batches per optimizer step.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Schedule = Field("constant", description="Learning rate schedule after warm-up.")
    warmup: int = Field(0, ge=0, description="Linear warm-up, in optimizer steps.")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of AdamW.")
    clip_norm: float = Field(1.0, gt=0, description="Maximum global gradient norm.")
    max_seq_length: int = Field(2048, ge=2, description="Truncate rows to this many tokens.")
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    val_batches: int | None = Field(
        None, ge=-1, description="Validation batches; -1: all. Default: the first 200 rows."
    )
    steps_per_report: int = Field(10, ge=1, description="Batches between log lines.")
    steps_per_eval: int = Field(200, ge=1, description="Batches between evaluations.")
    save_every: SaveEvery = 100
    patience: int | None = Field(
        None, ge=1, description="Stop after this many evaluations without a new best."
    )
    spike_threshold: float | None = Field(
        None, gt=0, description="Stop when the validation loss is this many nats above its best."
    )
    keep: Literal["best", "last"] = Field(
        "best", description="Weights to write, if there is validation data."
    )
    grad_checkpoint: GradCheckpoint = False
    compile_step: CompileStep = "auto"
    resume: bool = Field(True, description="Resume from the last saved state of this recipe.")
    count_buffers: bool = Field(
        False,
        description="Count live buffers in each step, beside the prediction. Needs a C++ compiler.",
    )
    force: bool = Field(
        False, description="Replace an existing save path; run even if the guard refuses."
    )
    log_to: LogTo = None
    log_project: LogProject = "mlxstacks"
    log_name: LogName = None
    # MLX's keys are made of 64 bits.
    seed: int = Field(
        0, ge=0, lt=2**64, description="Seed for initial weights, dropout and data order."
    )

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.val_batches == 0:
            raise ValueError(
                "val_batches is 0; give a number, -1 for all, or data without valid.jsonl"
            )
        if self.iters is not None and 0 < self.iters < self.grad_accumulation_steps:
            raise ValueError(
                f"iters {self.iters} is below grad_accumulation_steps "
                f"{self.grad_accumulation_steps}: not one optimizer step"
            )
        return self


class TrainSettings(TrainingSettings):
    """`mlxstacks train`: one LoRA, named as mlx-lm names its options."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the built-in nano model."
    )
    data: str | TrainDataSettings | None = Field(
        None,
        description="Rows in any format: a file, a directory (with train.jsonl and valid.jsonl, "
        "as in mlx-lm, or other files by split), or the id of a cached Hugging Face data set. "
        "Without validation rows, about 2% of a file or data set are held out, none of fewer than "
        "50 rows; train.jsonl without valid.jsonl is trained on in full. A recipe may also give "
        "sources, as for a domain of stack. Default: nano's sample data, a persona.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = Field(
        None, description="Output directory: adapter, report, log. Default: ./mlxstacks-out/train."
    )
    num_layers: int | None = Field(
        None, ge=-1, description="Number of last layers to adapt. Default and -1: all."
    )
    layers: LayersText = Field(
        "all",
        description="Layers to adapt, instead of num_layers: all, or numbers and ranges such as "
        "8,14,20-24.",
    )
    keys: Keys = ()
    resume_adapter_file: str | None = Field(
        None,
        description="Adapter to start from: a directory, or mlx-lm's adapters.safetensors. Its "
        "projections, rank and scale are taken over. Default: a new one.",
    )
    rank: int = Field(8, ge=1, description="LoRA rank.")
    scale: float = Field(20.0, gt=0, le=1e30, description="Factor of the low-rank delta.")
    shared_outer: bool = Field(
        False,
        description="Share one lora_a of gate_proj and up_proj, and one lora_b of down_proj, "
        "among routed experts: about half the parameters, as SGLang serves them. The adapter has "
        "a copy for each expert; `mlxstacks adapter convert --experts stacked` stores one.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the LoRA input, in training.")
    merge_ready: Literal["pooled", "grid"] | None = Field(
        None,
        description="Train an adapter that fuses into a quantized base without loss. pooled: A "
        "acts on sums over quantization groups, and a fuse changes biases only. grid: round base "
        "plus delta to the base's grid, in training as in the fuse; needs memory for every "
        "adapted weight in float32.",
    )
    mask_prompt: bool = Field(
        True,
        description="In chat rows, compute the loss on the assistant's turns only. mlx_lm.lora's "
        "default is off, so the losses of the two do not compare.",
    )
    base: TrainedBase = "auto"
    guard: Literal["refuse", "reshape", "warn", "off"] = Field(
        "refuse",
        description="If the run is predicted not to fit: refuse it, reshape it with the cheapest "
        "change that fits, warn and run it as it is, or do not check (off).",
    )
    resource_limit: ResourceLimit = None
    working_set_bytes: WorkingSetBytes = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers != "all" and self.num_layers is not None:
            raise ValueError("give layers or num_layers, not both")
        if self.resume_adapter_file is not None:
            named = {"layers": self.layers != "all", "num_layers": self.num_layers is not None,
                     "keys": bool(self.keys), "shared_outer": self.shared_outer,
                     "merge_ready": self.merge_ready is not None}  # fmt: skip
            if given := [key for key, is_given in named.items() if is_given]:
                raise ValueError(
                    f"resume_adapter_file brings its own projections; leave out {', '.join(given)}"
                )
        if self.merge_ready is not None and self.shared_outer:
            raise ValueError("merge_ready and shared_outer do not go together: leave one out")
        if self.merge_ready == "grid" and self.dropout:
            raise ValueError(
                f"dropout {self.dropout:g} is of a LoRA's own input, which merge_ready grid does "
                "not have: leave dropout out, or take merge_ready pooled"
            )
        return self


class PretrainSettings(TrainingSettings):
    """`mlxstacks pretrain`: every weight of a small decoder, random at first or of a model."""

    model: str | None = Field(
        None,
        description="Unquantized model to go on from, with its shape and tokenizer. Default: a new "
        "decoder of the shape below.",
    )
    data: str | TrainDataSettings | None = Field(
        None,
        description="Texts or rows in any format, as in train, and .txt files. Every token counts, "
        "prompts too; rows are laid end to end. Default: nano's sample data.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = Field(
        None, description="Output directory: a model. Default: ./mlxstacks-out/pretrain."
    )
    tokenizer: str | None = Field(
        None,
        description="Model directory or Hugging Face id whose tokenizer to use. Default: a "
        "byte-level BPE, trained on the data.",
    )
    vocab_size: int = Field(
        1024, ge=259, le=1_000_000,
        description="Tokens of the tokenizer that is trained; 259: the bytes and three marks.",
    )  # fmt: skip
    hidden_size: int = Field(128, ge=1, le=65_536, description="Width of the residual stream.")
    num_hidden_layers: int = Field(4, ge=1, le=1024, description="Decoder layers.")
    num_attention_heads: int = Field(4, ge=1, le=1024, description="Attention heads.")
    intermediate_size: int | None = Field(
        None, ge=1, le=1_000_000, description="Width of the MLP. Default: 8/3 of hidden_size."
    )
    iters: int | None = Field(
        None, ge=0,
        description="Batches to train on; 0 writes the initial weights. Default: one pass over the "
        "data, at most 1,000.",
    )  # fmt: skip
    batch_size: int = Field(16, ge=1, le=1_000_000, description="Rows per batch.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Schedule = Field("cosine", description="Learning rate schedule after warm-up.")
    warmup: int = Field(20, ge=0, description="Linear warm-up, in optimizer steps.")
    weight_decay: float = Field(0.1, ge=0, description="Weight decay of AdamW.")
    max_seq_length: int = Field(256, ge=2, description="Tokens per row.")

    @model_validator(mode="after")
    def _check_shape(self) -> Self:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} gives {self.num_attention_heads} heads no even "
                "number of dims each"
            )
        of_new = ("tokenizer", "vocab_size", "hidden_size", "num_hidden_layers",
                  "num_attention_heads", "intermediate_size")  # fmt: skip
        given = [k for k in of_new if getattr(self, k) != type(self).model_fields[k].default]
        if self.model is not None and given:
            raise ValueError(f"{', '.join(given)}: of a new model; leave out, or leave model out")
        return self


class AlignSettings(TrainSettings):
    """`mlxstacks align`: a LoRA, or a stack of a store, trained on preferred answers or rewards."""

    store_path: str | None = Field(
        None,
        description="Store of stacks: instead of an adapter, train the last stack of a domain, on "
        "the stacks that it was trained on, and replace it there. The model then is the store's.",
    )
    domain: str | None = Field(
        None, description="Domain of the store whose last stack is trained. Default: the last one."
    )
    stored_data: str | None = Field(
        None,
        description="Directory of the files that the store's domains were trained on, whose losses "
        "are measured. Default: where they were then.",
    )

    data: str | TrainDataSettings | None = Field(
        None,
        description="Rows with prompt, chosen and rejected, as text or messages; for grpo with a "
        "prompt and, where the reward needs one, an answer. A file, a directory with train.jsonl "
        "and valid.jsonl, or the id of a cached Hugging Face data set. Without validation rows, "
        "2% are held out, or one. Default: nano's sample pairs.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = Field(
        None, description="Output directory: adapter, report, log. Default: ./mlxstacks-out/align."
    )
    method: Literal["dpo", "orpo", "grpo"] = Field(
        "dpo",
        description="dpo: prefer the chosen answers more than the model does at the start. orpo: "
        "learn the chosen answers and prefer them, without a reference. grpo: draw answers, and "
        "make those likelier that have more reward than others to the same prompt.",
    )
    beta: float | None = Field(
        None, ge=0, le=1e3, description="dpo: how closely to stay to the start. orpo: weight of "
        "the preference. grpo: weight of the divergence from the start. Default: 0.1; grpo: 0.04.",
    )  # fmt: skip
    reward: tuple[str, ...] = Field(
        (),
        description="grpo: what an answer is worth: math, exact, code, rubric, pattern=REGEX, or "
        "FILE.py:FUNCTION, a function (answer, row) of your own. Repeatable: the mean counts.",
    )
    group_size: int = Field(8, ge=2, le=1024, description="grpo: answers to each prompt.")
    max_tokens: int = Field(256, ge=1, description="grpo: longest answer, in tokens.")
    clip: float = Field(
        0.2, gt=0, lt=1, description="grpo: how far a ratio of probabilities may be from 1."
    )
    updates: int = Field(1, ge=1, le=100, description="grpo: optimizer steps on the same answers.")
    allow_code: bool = Field(
        False, description="Run programs that the model writes, in a sandbox, for reward code."
    )
    learning_rate: float = Field(2e-5, gt=0, description="Peak learning rate of AdamW.")
    compile_step: Literal["auto", "on", "off"] = Field(
        "off", description="Steps of align are not compiled.",
        json_schema_extra={"cli_name": "--compile"},
    )  # fmt: skip
    safeguards: SafeguardSettings = Field(
        SafeguardSettings(), description="Limits that end, undo or skip what damages the model."
    )

    @property
    def strength(self) -> float:
        """beta, or its default for the method."""
        default = 0.04 if self.method == "grpo" else 0.1
        return default if self.beta is None else self.beta

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        fixed = {"merge_ready": None, "shared_outer": False, "mask_prompt": True, "keep": "best",
                 "compile_step": "off"}  # fmt: skip
        for key, only in fixed.items():
            if getattr(self, key) != only:
                raise ValueError(f"{key} {getattr(self, key)} is of train; align takes {only}")
        if self.store_path is None and (self.domain or self.stored_data):
            raise ValueError("domain and stored_data are of a store; give store_path too")
        of_adapter = ("resume_adapter_file", "rank", "scale", "layers", "num_layers", "keys")
        given = [k for k in of_adapter if getattr(self, k) != type(self).model_fields[k].default]
        if self.store_path is not None and given:
            raise ValueError(
                f"{', '.join(given)}: of an adapter; a stack of a store has its own, leave out"
            )
        of_grpo = {"reward", "group_size", "max_tokens", "clip", "updates", "allow_code"}
        given = sorted(of_grpo & self.model_fields_set)
        if self.method != "grpo":
            changed = [k for k in given if getattr(self, k) != type(self).model_fields[k].default]
            if changed:
                raise ValueError(f"{', '.join(changed)}: of method grpo alone; leave out, or give "
                                 "method grpo")  # fmt: skip
            if self.beta == 0:
                raise ValueError(f"beta is 0, with which {self.method} prefers nothing")
            return self
        if not self.reward:
            raise ValueError(
                "grpo needs a reward: math, exact, code, rubric, pattern=REGEX or FILE.py:FUNCTION"
            )
        if self.dropout:
            raise ValueError("dropout with grpo would make ratios of probabilities wrong; 0 only")
        if self.max_tokens >= self.max_seq_length:
            raise ValueError(
                f"max_tokens {self.max_tokens} leaves no room for a prompt within max_seq_length "
                f"{self.max_seq_length}"
            )
        return self


MatrixMode = Literal["ungated", "prefix", "isolated"]
MATRIX_MODES: tuple[MatrixMode, ...] = get_args(MatrixMode)


def names_a_file(whose: str, most: int) -> AfterValidator:
    """For a name that becomes part of file names, on file systems that ignore case too."""

    def check(name: str) -> str:
        if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{most - 1}}}", name):
            several = "; to give several, repeat the option" * ("," in name)
            raise ValueError(
                f"{whose} name becomes part of file names: letters, digits, _ . and -, the first "
                f"one a letter or a digit, {most} at most{several}"
            )
        return name

    return AfterValidator(check)


class DomainSettings(Settings):
    """One domain; what is not said here is as the run says. A name alone stands for all of it."""

    name: Annotated[str, names_a_file("a domain's", 64)]
    data: DomainData | None = Field(
        None, description="a file or sources of its rows; default: NAME.jsonl in the run's `data`"
    )
    rounds: int | None = Field(None, ge=1, description="maximum stacks to train")
    iters: int | None = Field(None, ge=1, description="batches per round")
    learning_rate: float | None = Field(None, gt=0, description="peak learning rate")
    layers: LayersText | None = Field(None, description="layers that its stacks are put on")


def _as_domain(value: Any) -> Any:
    """Of a name, or of `{"name": ..., "data": ...}` as the command line gives it."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.startswith("{") else {"name": value}


Domain = Annotated[
    DomainSettings, BeforeValidator(_as_domain, json_schema_input_type=DomainSettings | str)
]


class NullSpaceSettings(Settings):
    """Output directions that earlier stacks write into and a new one must keep out of."""

    directions: int = Field(64, ge=1, description="directions per projection and new domain")
    samples: int = Field(400, ge=1, description="rows to compute the directions from")
    oversampling: int = Field(8, ge=0, description="extra directions in the search")
    scope: Literal["aggregate", "cumulative"] = Field(
        "aggregate",
        description="aggregate: the leading directions of all stacks together; cumulative: those "
        "of every domain, added up",
    )
    data: Literal["previous", "new", "both"] = Field(
        "previous", description="validation rows to use: earlier domains', the new one's, or both"
    )


class StackRunSettings(Settings):
    """`mlxstacks stack`: frozen stacks, domain after domain, in a store."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the built-in nano model."
    )
    data: str | None = Field(
        None,
        description="Directory with NAME.jsonl for each domain given by name only. Default: "
        "nano's curriculum.",
    )
    save_path: str | None = Field(
        None, description="Store directory, new or to extend. Default: ./mlxstacks-out/stack."
    )
    domains: tuple[Domain, ...] = Field(
        (),
        description="Domains in training order, each a name, or name and data as in "
        '{"name": "colors", "data": "colors.jsonl"}. Repeatable. Default: every NAME.jsonl in '
        "`data`, by name.",
        json_schema_extra={"cli_type": "text"},
    )
    validation_rows: int | None = Field(
        None,
        ge=1,
        description="Validation rows of each domain whose data say no number. Default: 2% of its "
        "rows.",
    )
    rounds: int = Field(2, ge=1, description="Maximum stacks per domain.")
    layers: LayersText = Field(
        "all", description="Layers to adapt: all, or numbers and ranges such as 8,14,20-24."
    )
    keys: Keys = ()
    stack: StackSettings = Field(
        StackSettings(), description="Shape of a stack: rank, num_experts, alpha, ..."
    )
    null_space: NullSpaceSettings | None = Field(
        NullSpaceSettings(), description="Directions that a new stack avoids; none: no limit."
    )
    iters: int | None = Field(
        None,
        ge=1,
        description="Batches per round. Default: one pass over the domain's data, at most 1,000.",
    )
    batch_size: int = Field(4, ge=1, description="Rows per batch.")
    grad_accumulation_steps: int = Field(1, ge=1, description="Batches per optimizer step.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of AdamW.")
    lr_schedule: Schedule = Field("linear", description="Learning rate schedule after warm-up.")
    warmup: int = Field(0, ge=0, description="Linear warm-up, in optimizer steps.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Beta1 of AdamW.")
    beta2: float = Field(0.95, ge=0, lt=1, description="Beta2 of AdamW.")
    clip_norm: float = Field(1.0, gt=0, description="Maximum global gradient norm.")
    balance_weight: float = Field(0.01, ge=0, description="Weight of the experts' balance loss.")
    max_seq_length: int = Field(2048, ge=2, description="Truncate rows to this many tokens.")
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    packing: bool = Field(
        False, description="Pack rows end to end, up to max_seq_length, in training and validation."
    )
    steps_per_report: int = Field(10, ge=1, description="Batches between log lines.")
    steps_per_eval: int = Field(50, ge=1, description="Batches between evaluations.")
    save_every: SaveEvery = 100
    spike_threshold: float = Field(
        0.1, gt=0, description="End a round when the loss is this many nats above its best."
    )
    patience: int = Field(
        4, ge=1, description="End a round after this many evaluations without a new best."
    )
    min_loss_delta: float = Field(
        0.002, ge=0, description="A round that lowers the loss by less is a domain's last."
    )
    keep_plateau_stack: bool = Field(
        False, description="Keep the stack of a round that gains less than min_loss_delta."
    )
    modes: tuple[MatrixMode, ...] = Field(
        MATRIX_MODES,
        description="Modes in the forgetting matrix: ungated (all stacks), prefix (stacks up to "
        "the domain's own), isolated (its own only). Repeatable.",
    )
    sample_prompts: int = Field(
        0,
        ge=0,
        description="Validation prompts, taken from all domains in turn, to answer in each mode "
        "after each domain (published: 5).",
    )
    grad_checkpoint: GradCheckpoint = False
    compile_step: CompileStep = "auto"
    base: TrainedBase = "auto"
    guard: Literal["refuse", "warn", "off"] = Field(
        "refuse", description="If the run is predicted not to fit: refuse, warn, or do not check."
    )
    resource_limit: ResourceLimit = None
    working_set_bytes: WorkingSetBytes = None
    log_to: LogTo = None
    log_project: LogProject = "mlxstacks"
    log_name: LogName = None
    resume: bool = Field(True, description="Resume an interrupted domain instead of restarting it.")
    force: bool = Field(False, description="Delete an existing store and start over.")
    seed: int = Field(42, ge=0, description="Seed for initial weights, noise and data order.")

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
