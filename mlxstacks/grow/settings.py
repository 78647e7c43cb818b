"""Settings of `mlxstacks grow`. Imports neither mlx nor numpy."""

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from mlxstacks.files.manifest import DomainName
from mlxstacks.routing.settings import BaseNumbers, RouteGapsSettings, RouteSettings
from mlxstacks.settings import Force, output_path

Stage = Literal["confirm", "gather", "train", "gate", "route", "accept"]
Approval = Literal["confirm", "gather", "train", "gate", "route", "accept", "all"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class GrowSettings(RouteGapsSettings, RouteSettings):
    """A domain that a store lacks: found in its gaps, trained, tested and added, stage by stage."""

    yes: tuple[Approval, ...] = Field(
        (),
        description="Stages that may run: confirm, gather, train, gate, route, accept, or all. "
        "Without any, nothing is written; a run stops before the first one not named. Repeatable.",
    )
    domain: DomainName | None = Field(None, description="Name of the new domain.")
    data: str | None = Field(
        None, description="Directory with NAME.jsonl for the new domain: prompts and answers."
    )
    provider: str | None = Field(
        None,
        description="Instead of `data`: FILE.py:FUNCTION, called with the domain's name and a "
        "number of rows; it returns rows in any format that training data has.",
    )
    rows: int = Field(500, ge=20, description="Maximum rows to ask for.")
    routing_data: str | None = Field(
        None,
        description="Directory of NAME.jsonl files, as `mlxstacks route discover --data DIR` "
        "takes: prompts of the domains that are there. Default: the rows of the store's domains.",
    )
    stored_data: str | None = Field(
        None,
        description="Directory of the rows that the store's domains were trained with. Default: "
        "where they were then.",
    )
    save_path: str | None = output_path("grow")
    rounds: int | None = Field(
        None, ge=1, description="Maximum stacks. Default: as the last domain."
    )
    iters: int | None = Field(
        None, ge=1, description="Batches per round. Default: as the last domain."
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate. Default: as the last domain."
    )
    samples_per_domain: int = Field(
        40,
        ge=1,
        description="Prompts per domain whose losses are compared: to confirm the gap, to judge "
        "the new stack, and to find the router's targets.",
    )
    confirm_share: float = Field(
        0.8, ge=0, le=1, description="Share of sample rows that no present stack may answer well."
    )
    min_gain: float = Field(
        0.05,
        ge=0,
        description="Nats per token by which the new stack must lower its domain's loss, below the "
        "base and below the best route without it.",
    )
    max_fall: float = Field(
        0.01,
        ge=0,
        description="Largest fall of routing accuracy, and rise of routed loss, on the domains "
        "that were there before.",
    )
    base: BaseNumbers = "auto"
    seed: int = Field(42, ge=0, description="Seed of the training and of the draws.")
    resume: bool = Field(True, description="Go on with the stages of an unfinished run.")
    force: Force = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data is not None and self.provider is not None:
            raise ValueError("data and provider: give one of them")
        return self

    def may(self, stage: Stage) -> bool:
        """Whether a stage was approved."""
        return stage in self.yes or "all" in self.yes
