"""Settings of `mlxstacks psn stacks` and `psn blocks`, their plans. Imports no mlx or numpy."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from mlxstacks.data.settings import TrainDataSettings
from mlxstacks.layers.settings import StackSettings
from mlxstacks.settings import Force, Resume, Settings, output_path
from mlxstacks.training.settings import Domain, PretrainSettings, StackRunSettings


def _each_once(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len({*seeds}) < len(seeds):
        raise ValueError("give each once")
    return seeds


Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    Field(min_length=1, description="Seeds of all weights and orders. Repeatable."),
    AfterValidator(_each_once),
]


def _leaves_out(*names: str) -> AfterValidator:
    def check(given: Any) -> Any:
        plain = type(given).model_fields
        if said := [key for key in names if getattr(given, key) != plain[key].default]:
            raise ValueError(f"{', '.join(said)}: set by the study; leave out")
        return given

    return AfterValidator(check)


Pretraining = Annotated[
    PretrainSettings,
    _leaves_out("model", "data", "save_path", "seed", "tokenizer", "resume", "force"),
    Field(description="Settings of the base, as in `mlxstacks pretrain`."),
]


class PsnStacksSettings(Settings):
    """Do stacks need a base that has learned something? Stacks on a random and a pretrained base.

    The control trains every weight of the random base on the same rows, for as many steps as cost
    the same arithmetic.
    """

    corpus: str | TrainDataSettings | None = Field(
        None,
        description="Texts that the base is pretrained on. Default: nano's sample data.",
        json_schema_extra={"cli_type": "text"},
    )
    data: str | None = Field(
        None, description="Directory with NAME.jsonl for each domain given by name only."
    )
    domains: tuple[Domain, ...] = Field(
        (),
        description="Domains in training order, as in `mlxstacks stack`. Default: every NAME.jsonl "
        "in `data`.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = output_path("psn-stacks")
    seeds: Seeds = (0, 1, 2)
    pretrain: Pretraining = PretrainSettings()
    stack: Annotated[
        StackRunSettings,
        _leaves_out("model", "data", "save_path", "domains", "resume", "force"),
    ] = Field(
        # Every round runs to its end: the steps are the same in every arm.
        StackRunSettings(
            rounds=1, validation_rows=32, patience=100, spike_threshold=10.0, min_loss_delta=0.0,
            keep_plateau_stack=True, modes=("prefix",),
        ),
        description="Settings of the stacks, as in `mlxstacks stack`.",
    )  # fmt: skip
    control_learning_rate: float = Field(
        1e-3, gt=0, description="Peak learning rate of the control."
    )
    resume: Resume = True
    force: Force = False


class BlockSettings(Settings):
    """One capability block beside the base."""

    num_layers: int = Field(2, ge=1, description="decoder layers of a block, as those of the base")
    stack: StackSettings = Field(
        StackSettings(rank=8), description="experts of each projection, as those of a stack"
    )
    balance_weight: float = Field(0.01, ge=0, description="weight of the experts' balance loss")


class PsnBlocksSettings(Settings):
    """Do blocks beside a frozen base, weighted by a router, hold capabilities?"""

    corpus: str | TrainDataSettings | None = Field(
        None,
        description="Texts that the base is trained on. Default: nano's sample data.",
        json_schema_extra={"cli_type": "text"},
    )
    data: str | None = Field(
        None, description="Directory with NAME.jsonl for each domain given by name only."
    )
    domains: tuple[Domain, ...] = Field(
        (),
        description="Domains that get a block each, as in `mlxstacks stack`. Default: every "
        "NAME.jsonl in `data`.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = output_path("psn-blocks")
    seeds: Seeds = (0, 1, 2)
    pretrain: Pretraining = PretrainSettings()
    block: BlockSettings = BlockSettings()
    iters: int = Field(200, ge=1, description="Batches that a block is trained on.")
    batch_size: int = Field(8, ge=1, description="Rows per batch.")
    learning_rate: float = Field(1e-3, gt=0, description="Peak learning rate of a block.")
    validation_rows: int = Field(64, ge=1, description="Held-out rows of each domain.")
    directions: int = Field(
        8, ge=1, description="Output directions that each block takes away from later ones."
    )
    formats: tuple[str, ...] = Field(
        (),
        description="NAME=REGEX: what an answer of a domain in its format matches from its "
        "beginning on. Default: those of code and math. Repeatable.",
    )
    control: str | None = Field(
        None, description="Domain of the block on shuffled tokens. Default: the first one."
    )
    prompts: int = Field(40, ge=2, description="Held-out prompts of each domain to answer.")
    max_tokens: int = Field(48, ge=1, description="Longest answer, in tokens.")
    resume: Resume = True
    force: Force = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.domains:
            self.check_domains([domain.name for domain in self.domains])
        return self

    def check_domains(self, names: Sequence[str]) -> None:
        """Raises: ValueError: `formats` or `control` name another domain."""
        for text in self.formats:
            name, _, pattern = text.partition("=")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"formats: {pattern}: no regular expression: {error}") from None
            if not pattern or name not in names:
                raise ValueError(f"formats: {text}: give NAME=REGEX, NAME one of the domains")
        if self.control is not None and self.control not in names:
            raise ValueError(f"control {self.control}: no domain; there are {', '.join(names)}")
