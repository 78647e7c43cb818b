"""Settings of `mlxstacks route train`. Imports neither mlx nor numpy."""

from typing import Literal

from pydantic import Field

from mlxstacks.routing.route_settings import RouteSettings


class RouterTrainSettings(RouteSettings):
    """Train the network that says which domains help with a prompt."""

    targets: str = Field(
        "mlxstacks-out/route-discover", description="Directory that `route discover` wrote."
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/route-train."
    )
    install: bool = Field(
        True, description="Put the router into the store too, in place of the one before."
    )
    extend: Literal["new", "all"] | None = Field(
        None,
        description="Go on from the store's router, for domains that it does not know: new trains "
        "nothing but their queries, so that old domains keep their scores to the bit; all trains "
        "everything from there.",
    )
    hidden_dims: int = Field(512, ge=1, le=65_536, description="Width of the router.")
    epochs: int = Field(8, ge=1, le=1000, description="Passes over the training examples.")
    learning_rate: float = Field(
        8e-4, gt=0, description="Of AdamW in the first epoch; falls along a cosine."
    )
    weight_decay: float = Field(0.01, ge=0, description="Of AdamW.")
    batch_size: int = Field(16, ge=1, le=65_536, description="Prompts in a batch.")
    clip_norm: float = Field(1.0, gt=0, description="Largest joint norm of a step's gradients.")
    dropout: float = Field(0.1, ge=0, lt=1, description="In the two hidden layers.")
    margin_weight: float = Field(
        0.05, ge=0, description="Of the loss that pushes scores out of 0.2 to 0.8."
    )
    oracle_only: bool = Field(
        False, description="Use only examples whose outcome was discovered, no plain labels."
    )
    discovered_weight: float = Field(
        1.0, gt=0, description="How much such an example counts in the loss; a plain label: 1."
    )
    validation_share: float = Field(
        0.1, gt=0, lt=1, description="Share of the groups of like prompts that is held out."
    )
    validation_groups: int = Field(
        200,
        ge=1,
        description="Groups that are held out at least, where they are no more than half of all.",
    )
    max_tokens: int = Field(
        256, ge=1, le=1_000_000, description="The router sees so many tokens of a prompt."
    )
    mid_weight: float = Field(0.45, description="Of the hidden states half-way, in the features.")
    last_weight: float = Field(0.55, description="Of the last hidden states, in the features.")
    normalise_features: bool = Field(
        False, description="Bring both hidden states to one scale before they are weighted."
    )
    threshold: float = Field(
        0.12, ge=0, le=1, description="A domain answers where its weight is above this."
    )
    chat_domain: str | None = Field(
        None,
        description="Domain whose weight has a floor. Default: as in the targets, else chat where "
        "the store has it.",
    )
    chat_floor: float | None = Field(
        None, ge=0, le=1, description="That floor. Default: as in the targets, else 0.2."
    )
    base: Literal["auto", "stored", "float32"] = Field(
        "auto",
        description="Numbers the base computes with; float32: its stored values, some 20 times "
        "faster on a CPU; auto: that, on a CPU with the memory for it.",
    )
    seed: int = Field(
        42, ge=0, lt=2**64, description="Of first weights, dropout, order of examples, and split."
    )
    force: bool = Field(False, description="Replace an existing save path.")
