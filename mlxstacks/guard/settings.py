"""Settings of `guard`. Imports neither mlx nor numpy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mlxstacks.layers.settings import LayersText, StackSettings
from mlxstacks.settings import Settings

OptimizerName = Literal["adam", "adamw", "lion", "sgd"]
CheckpointingName = Literal["none", "layers", "mlx"]
RecurrenceName = Literal["loop", "chunked"]
DecodeName = Literal["stream", "batched"]

# Shares of a limit from which a run is warned of, and refused.
WARN_SHARE, REFUSE_SHARE = 0.5, 0.9


class GuardSettings(Settings):
    """A run to predict: a model by its config, and how it would be trained."""

    model: str | None = Field(
        None,
        description="Model directory, config.json or Hugging Face id; weights are not needed. "
        "Default: the built-in nano model.",
    )
    max_seq_length: int = Field(2048, ge=1, description="Tokens of the longest row.")
    # Above that MLX's shapes, of 32 bits, overflow.
    batch_size: int = Field(1, ge=1, le=1_000_000, description="Rows a step.")
    grad_accumulation_steps: int = Field(
        1, ge=1, description="Batches whose gradients make one optimizer step."
    )
    rank: int = Field(8, ge=1, description="Rank of the adapter; stacks have their own.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Of the adapter; stacks have their own.")
    shared_outer: bool = Field(False, description="As of `mlxstacks train`.")
    merge_ready: Literal["pooled", "grid"] | None = Field(
        None, description="As of `mlxstacks train`."
    )
    stack: StackSettings | None = Field(
        None, description="A stack of `mlxstacks stack` is trained, in place of a LoRA adapter."
    )
    frozen_stacks: int = Field(
        0, ge=0, le=1000, description="Stacks of that shape which are frozen already."
    )
    directions: int = Field(
        0, ge=0, description="Output directions of a projection that a stack keeps out of, at most."
    )
    layers: LayersText = Field(
        "all",
        description="Layers that get an adapter: all, or numbers and ranges as in 8,14,20-24.",
    )
    keys: tuple[str, ...] = Field(
        (),
        description="Projections that get an adapter, by the end of their path (down_proj, or "
        "switch_mlp.down_proj). Repeatable. Default: the usual ones.",
    )
    base: Literal["stored", "float32"] = Field(
        "stored", description="Numbers the frozen base computes with."
    )
    optimizer: OptimizerName = Field("adamw", description="What holds optimizer state.")
    checkpointing: CheckpointingName = Field(
        "none",
        description="none; layers: each decoder layer is computed again in the backward pass; "
        "mlx: mlx-lm's --grad-checkpoint.",
    )
    compile: bool = Field(False, description="The whole step goes through mx.compile.")
    recurrence: RecurrenceName = Field(
        "chunked",
        description="Linear attention in training: chunked is that of `mlxstacks train`; loop, "
        "over tokens, is mlx-lm's.",
    )
    loss: Literal["whole", "pieces"] = Field(
        "pieces",
        description="pieces: the step of `mlxstacks train` and `stack`, its loss a few tokens at a "
        "time where the model's head allows it; whole: mlx-lm's, the logits of all tokens at once.",
    )
    adapter_copies: int = Field(
        1,
        ge=0,
        description="Further copies of the adapter that the run holds: one for the best weights so "
        "far, where `mlxstacks train` validates.",
    )
    decode_tokens: int = Field(0, ge=0, description="Also predict generating so many tokens.")
    decode_batch: int = Field(1, ge=1, le=1_000_000, description="Sequences generated at once.")
    decode_with: DecodeName = Field(
        "stream", description="stream: mlx-lm's stream_generate; batched: its BatchGenerator."
    )
    resource_limit: int | None = Field(
        None, ge=1, description="Buffers a process may hold. Default: what the device says."
    )
    working_set_bytes: int | None = Field(
        None,
        ge=1,
        description="Memory to stay within, in bytes. Default: what a Metal device recommends.",
    )
    apply: bool = Field(False, description="Print the settings that fit, and nothing else.")
    force: bool = Field(False, description="Exit with 0 also where the run would be refused.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        forms = self.merge_ready is not None, self.shared_outer
        if self.loss == "whole" and (
            self.stack or self.dropout or any(forms) or self.grad_accumulation_steps > 1
        ):
            raise ValueError(
                "stack, dropout, shared_outer, merge_ready and grad_accumulation_steps are "
                "predicted of this package's step: they need loss pieces, not whole"
            )
        if sum((self.stack is not None, *forms)) > 1:
            raise ValueError("stack, shared_outer and merge_ready do not go together: give one")
        if self.stack is None and (self.frozen_stacks or self.directions):
            raise ValueError("frozen_stacks and directions go with stack; give its shape")
        return self
