"""Settings of `guard`. Imports neither mlx nor numpy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mlxstacks.layers.settings import LayersText, StackSettings
from mlxstacks.settings import ResourceLimit, Settings, WorkingSetBytes

OptimizerName = Literal["adam", "adamw", "lion", "sgd"]
CheckpointingName = Literal["none", "layers", "mlx"]
RecurrenceName = Literal["loop", "chunked"]
DecodeName = Literal["stream", "batched", "drawn"]

# Shares of a limit from which a run is warned of, and refused.
WARN_SHARE, REFUSE_SHARE = 0.5, 0.9


class GuardSettings(Settings):
    """A run to predict: a model by its config, and how it would be trained."""

    model: str | None = Field(
        None,
        description="Model directory, config.json or Hugging Face id; weights are not needed. "
        "Default: the built-in nano model.",
    )
    max_seq_length: int = Field(2048, ge=1, description="Tokens in the longest row.")
    # Above that MLX's shapes, of 32 bits, overflow.
    batch_size: int = Field(
        1, ge=1, le=1_000_000, description="Rows per batch; `mlxstacks train` has 4."
    )
    grad_accumulation_steps: int = Field(1, ge=1, description="Batches per optimizer step.")
    rank: int = Field(8, ge=1, description="Adapter rank; stacks have their own.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Adapter dropout; stacks have their own.")
    shared_outer: bool = Field(False, description="Shared outer halves, as in `mlxstacks train`.")
    merge_ready: Literal["pooled", "grid"] | None = Field(
        None, description="Merge-ready adapter, as in `mlxstacks train`."
    )
    stack: StackSettings | None = Field(
        None, description="Train a stack, as `mlxstacks stack` does, instead of a LoRA adapter."
    )
    frozen_stacks: int = Field(
        0, ge=0, le=1000, description="Number of frozen stacks shaped like `stack`."
    )
    directions: int = Field(
        0, ge=0, description="Output directions per projection that a stack must avoid, at most."
    )
    layers: LayersText = Field(
        "all", description="Layers to adapt: all, or numbers and ranges such as 8,14,20-24."
    )
    keys: tuple[str, ...] = Field(
        (),
        description="Projections to adapt, by path suffix (down_proj, or switch_mlp.down_proj). "
        "Repeatable. Default: the usual ones.",
    )
    base: Literal["stored", "float32"] = Field(
        "stored",
        description="How the frozen base computes: as stored, or in float32, as `mlxstacks train` "
        "does on a CPU.",
    )
    optimizer: OptimizerName = Field("adamw", description="Optimizer whose state is counted.")
    checkpointing: CheckpointingName = Field(
        "none",
        description="Recomputation in the backward pass. none; layers: each decoder layer; mlx: "
        "as mlx-lm's trainer.",
    )
    compile: bool = Field(False, description="Compile the whole step with mx.compile.")
    recurrence: RecurrenceName = Field(
        "chunked",
        description="Linear attention in training: chunked, as in `mlxstacks train`, or loop "
        "(over tokens), as in mlx-lm.",
    )
    loss: Literal["whole", "pieces"] = Field(
        "pieces",
        description="Loss in training. pieces: a few tokens at a time where the model's head "
        "allows it, as in `mlxstacks train` and `stack`; whole: all logits at once, as in mlx-lm.",
    )
    adapter_copies: int = Field(
        1,
        ge=0,
        description="Extra copies of the adapter in memory: one for the best weights so far, if "
        "`mlxstacks train` validates.",
    )
    decode_tokens: int = Field(0, ge=0, description="Also predict generating this many tokens.")
    decode_batch: int = Field(1, ge=1, le=1_000_000, description="Sequences generated at once.")
    decode_with: DecodeName = Field(
        "stream",
        description="Generator: mlx-lm's stream_generate (stream) or BatchGenerator (batched), or "
        "that of align by GRPO (drawn).",
    )
    hosts: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Also plan generating on 1, 2, 4, ... up to this many machines: bytes counted, "
        "speeds from the three assumptions below.",
    )
    # Apple's figure for the M4 Max with 40 GPU cores; an M3 Ultra has 819.
    memory_gbps: float = Field(546, gt=0, description="Memory of a host, GB/s (assumed).")
    # TCP over Thunderbolt 5, of 80 on the label: 53 to 64 with iperf3 (exo, pull request 2063).
    link_gbps: float = Field(60, gt=0, description="Link between hosts, Gbit/s (assumed).")
    # RDMA over Thunderbolt 5 (Apple's TN3205, MLX's jaccl): below 50 by those who measured. TCP:
    # 170 to 350, half the round trips of the same pull request.
    link_latency_us: float = Field(
        50,
        ge=0,
        description="Latency of a message, microseconds (assumed): 50 for RDMA (jaccl), about 300 "
        "for TCP (ring).",
    )
    tokens_per_second: float | None = Field(
        None,
        gt=0,
        description="What one host was measured to write; the time that reading memory does not "
        "explain then counts for every host. Default: computing is free.",
    )
    resource_limit: ResourceLimit = None
    working_set_bytes: WorkingSetBytes = None
    apply: bool = Field(False, description="Print only the settings that fit, as a recipe.")
    force: bool = Field(False, description="Exit with 0 even if the run would be refused.")

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
