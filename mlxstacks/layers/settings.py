"""Settings of adapter layers. Imports neither mlx nor numpy."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    model_validator,
)

from mlxstacks.settings import Settings

ScaleRule = Literal["rslora", "lora"]
SwitchForm = Literal["shared", "per_expert"]
ProjectorMode = Literal["folded", "train_only"]
StorageDtype = Literal["float16", "bfloat16"]


def lora_scale(alpha: float, rank: int, rule: ScaleRule) -> float:
    """The factor of a low-rank delta: alpha / sqrt(rank) (rsLoRA) or alpha / rank (LoRA).

    mlx-lm's adapters store this number as `scale`, not alpha.
    """
    return alpha / (rank**0.5 if rule == "rslora" else rank)


def parse_layers(text: str) -> tuple[int, ...] | None:
    """`8,14,20-22` is (8, 14, 20, 21, 22); `all` is None. Raises: ValueError."""
    if text.strip() == "all":
        return None
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not found:
            raise ValueError("layers takes all, or numbers and ranges as in 8,14,20-24")
        first = int(found[1])
        last = int(found[2] or first)
        # A typo in a range must not become a list of a billion numbers.
        if last < first or last - first > 10_000:
            raise ValueError(f"{part.strip()} is no range of layers")
        numbers += range(first, last + 1)
    return tuple(dict.fromkeys(numbers))


def _layers_text(value: Any) -> Any:
    """A recipe may have a number, or a list of numbers, where the command line has text."""
    if isinstance(value, list | tuple) and value and all(type(part) is int for part in value):
        return ",".join(map(str, value))
    return str(value) if type(value) is int else value


def _checked_layers(text: str) -> str:
    parse_layers(text)
    return text


LayersText = Annotated[
    str,
    BeforeValidator(_layers_text, json_schema_input_type=str | int | list[int]),
    AfterValidator(_checked_layers),
]
"""A set of layers as settings hold it: `all`, or numbers and ranges; see `parse_layers`."""


class TargetSettings(Settings):
    """Which projections get an adapter."""

    layers: tuple[int, ...] | None = Field(None, description="decoder layers; default: all")
    projections: tuple[str, ...] | None = Field(
        None,
        description="path suffixes: down_proj, or switch_mlp.down_proj for routed experts only; "
        "default: all usual ones of the model",
    )
    small_projections: bool = Field(
        False,
        description="include linear attention's in_proj_a and in_proj_b, which can have fewer "
        "outputs than a stack has ranks",
    )


class LoRASettings(Settings):
    """One low-rank pair a projection, as mlx-lm trains it."""

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    scale_rule: ScaleRule = Field("lora", description="lora: alpha/rank; rslora: alpha/sqrt(rank)")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on the input in training")
    shared_outer: bool = Field(
        False,
        description="share the half next to the hidden state among routed experts: lora_b of "
        "down_proj, lora_a of the others",
    )

    @property
    def scale(self) -> float:
        return lora_scale(self.alpha, self.rank, self.scale_rule)


class StackSettings(Settings):
    """One MoE-LoRA stack: `num_experts` low-rank pairs a projection, some of them for each token.

    With num_experts=1 there is no router: a plain LoRA that can be frozen and stacked.
    """

    rank: int = Field(16, ge=1, description="rank of each expert")
    alpha: float = Field(16.0, gt=0)
    scale_rule: ScaleRule = Field(
        "rslora", description="rslora: alpha/sqrt(rank); lora: alpha/rank"
    )
    num_experts: int = Field(4, ge=1, le=64)
    experts_per_token: int = Field(
        2, ge=1, description="experts used per token; 1 if there is only one"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on lora_a's input in training")
    router_noise: bool = Field(True, description="add learned noise to router logits in training")
    normalise_balance: bool = Field(
        False, description="divide the balance loss by experts_per_token: uniform routing gives 1"
    )
    switch_form: SwitchForm = Field(
        "shared",
        description="routed experts: one pair for all (shared) or one for each (per_expert)",
    )
    latent_dim: int | None = Field(
        None, ge=1, description="dims to route and compute in, behind shared frozen projections"
    )
    projector_mode: ProjectorMode = Field(
        "folded",
        description="avoid protected directions in training, evaluation and the frozen stack "
        "(folded), or in training only (train_only, as the published code does)",
    )
    storage: StorageDtype = Field("float16", description="dtype of a frozen stack")

    @model_validator(mode="after")
    def _check(self) -> Self:
        # The default goes with any number of experts, also when it is read back from a report.
        default = type(self).model_fields["experts_per_token"].default
        asked = self.experts_per_token != default
        if asked and self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}, num_experts is "
                f"{self.num_experts}; a token can use at most all of them"
            )
        if self.latent_dim is not None and self.rank > self.latent_dim:
            raise ValueError(
                f"rank {self.rank} is above latent_dim {self.latent_dim}; lower the rank"
            )
        if self.latent_dim is not None and self.switch_form == "per_expert":
            raise ValueError("latent_dim goes with switch_form=shared only")
        return self

    @property
    def scale(self) -> float:
        return lora_scale(self.alpha, self.rank, self.scale_rule)

    @property
    def top_k(self) -> int:
        """Experts that a token uses, whatever the default says of a stack with fewer."""
        return min(self.experts_per_token, self.num_experts)
