"""Settings of `mlxstacks identity`. Imports neither mlx nor numpy."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from mlxstacks.arms.settings import (
    PUBLISHED_TRAINING,
    Alpha,
    Card,
    LikelihoodNormalisation,
    Model,
    Policies,
    Scoring,
    TargetCorrelation,
    Training,
)
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.settings import (
    Count,
    EachOnce,
    Force,
    Probability,
    Resume,
    Seed,
    Settings,
    output_path,
)
from mlxstacks.training.settings import TrainSettings

# The gate is given for a suite of this many prompts, and scaled by share for others.
GATE_PROMPTS = 20
# How a run writes and resumes, not what comes of it; `max_prompts` makes a result
# exploratory instead.
NOT_OF_THE_PLAN = {
    "model", "persona", "persona_data", "items", "narrow_items", "suite", "save_path",
    "max_prompts", "keep_models", "resume", "force",
}  # fmt: skip

# What --max-prompts leaves, for each prompt that it asks.
_ITEMS_PER_PROMPT, _BATCHES_PER_PROMPT = 20, 10


class IdentitySettings(Settings):
    """Does a persona survive a second adapter? The defaults are the published settings."""

    model: Model = None
    persona: str | None = Field(
        None,
        description="Persona: an adapter, or a model that already has it; the loss from its own "
        "fuse is measured only with an adapter. Default: nano's sample adapter.",
    )
    persona_data: str | None = Field(
        None,
        description="Rows that the persona was trained on, as `data` of `mlxstacks train`. With "
        "them, `identity + identity` is a second adapter trained on the fused persona; without, "
        "the persona's own adapter fused twice. Default: with nano, its own rows.",
    )
    persona_train: Training = Field(
        PUBLISHED_TRAINING, description="Settings of that training, named as in `mlxstacks train`."
    )
    items: str | None = Field(
        None,
        description="Multiple-choice items for the factual adapter and the broad regression: a "
        "JSONL file in MMLU-Pro's form, or a cached Hugging Face data set, such as "
        "TIGER-Lab/MMLU-Pro. Default: nano's own.",
    )
    suite: str | None = Field(
        None,
        description="Prompts with their rules: a YAML, JSON or JSONL file; or default: 20 prompts "
        "made from persona_card. Default: with nano, its own suite.",
    )
    persona_card: Card = None
    save_path: str | None = output_path("identity")
    policies: Policies = Field(
        ("refit", "nearest", "promote"),
        description="Policies for all fuses, the persona's included. Repeatable.",
    )
    persona_requant: PolicyName = Field(
        "refit",
        description="One of the policies: its fused persona is used to mine items for the factual "
        "adapters and to train them. They are the same for all policies.",
    )
    target_correlation: TargetCorrelation = 0.98
    train: Training = Field(
        PUBLISHED_TRAINING,
        description="Settings of the factual adapters' training, named as in `mlxstacks train`; "
        "rank is that of the first.",
    )
    second_rank: Count = Field(8, description="Rank of the second factual adapter.")
    stress_rank: Count | None = Field(
        None,
        description="Rank of a third, much larger factual adapter, a condition of its own. "
        "Requires stress_iters.",
    )
    stress_iters: Count | None = Field(None, description="Batches to train that adapter on.")
    train_share: float = Field(
        0.7, gt=0, lt=1, description="Training share of items that base and persona both get wrong."
    )
    regression_items: Annotated[int, Field(ge=2)] | None = Field(
        6000,
        description="Items of the broad regression, stratified by subject, from which Set G is "
        "mined too; none: all.",
    )
    narrow_items: str | None = Field(
        None,
        description="Multiple-choice items close to identity that base and persona also answer: a "
        "file or data set like items; or default: 40 of ours, on assistants, models and their "
        "makers. Default: none; with narrow_subjects, those of items.",
    )
    narrow_subjects: Annotated[tuple[str, ...], EachOnce] = Field(
        (), description="Use only narrow items of these subjects. Repeatable."
    )
    scoring: Scoring = Field(
        "generate", description="Item scoring, as in `mlxstacks confound`. Prompts are generated."
    )
    normalisation: LikelihoodNormalisation = "sum"
    max_tokens: Count = Field(128, description="Maximum tokens per (greedy) reply.")
    thinking: Thinking = "off"
    allow_special: AllowSpecial = False
    most_of_base: int = Field(
        5, ge=0, le=GATE_PROMPTS,
        description="Gate: maximum of 20 prompts that the untrained base may pass; scaled for "
        "other suites.",
    )  # fmt: skip
    least_of_persona: int = Field(
        15, ge=1, le=GATE_PROMPTS, description="Gate: minimum of 20 that the persona must pass."
    )
    largest_loss: Probability = Field(
        0.25,
        description="A condition keeps the persona if a loss of this share of the prompts that "
        "the persona passes can be excluded.",
    )
    alpha: Alpha = 0.05
    expected_failures: Probability = Field(
        0.1, description="Share of prompts the persona fails, in the power table."
    )
    # Above largest_loss: a share that changes cannot be smaller than the loss that is looked for.
    expected_discordant: Probability = Field(
        0.3, description="Share of prompts whose verdict changes, in the power table."
    )
    batch_size: Count = Field(16, description="Prompts or items answered between writes to disk.")
    max_prompts: Count | None = Field(
        None,
        description="Ask at most this many prompts and 20 times as many items, and train at most "
        "10 times as many batches: a quick look, marked exploratory. (Formerly limit.)",
    )
    keep_models: bool = Field(
        False, description="Keep the fused models; by default each is deleted after use."
    )
    resume: Resume = True
    force: Force = False
    seed: Seed = Field(0, description="Seed for sample, split and training.")

    @model_validator(mode="before")
    @classmethod
    def _read_former_name(cls, values: Any) -> Any:
        """Recipes and results of 0.1 say `limit`."""
        if not isinstance(values, Mapping) or "limit" not in values:
            return values
        rest = {key: value for key, value in values.items() if key != "limit"}
        return {"max_prompts": values["limit"]} | rest

    @property
    def most_items(self) -> int | None:
        """Of the regression, under `max_prompts`."""
        return None if self.max_prompts is None else _ITEMS_PER_PROMPT * self.max_prompts

    @property
    def has_narrow(self) -> bool:
        return bool(self.narrow_items or self.narrow_subjects)

    def cut(self, train: TrainSettings) -> TrainSettings:
        """A training, cut short under `max_prompts`."""
        if self.max_prompts is None:
            return train
        most = _BATCHES_PER_PROMPT * self.max_prompts
        iters = most if train.iters is None else min(train.iters, most)
        return train.model_copy(update={"iters": iters})

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.persona_requant not in self.policies:
            problems.append(
                f"persona_requant {self.persona_requant} is none of the policies "
                f"{list(self.policies)}; name one of them, or add it"
            )
        if self.second_rank == self.train.rank:
            problems.append(f"second_rank and train.rank are both {self.second_rank}; they compare")
        if (self.stress_rank is None) != (self.stress_iters is None):
            problems.append("stress_rank and stress_iters go together: give both, or neither")
        if self.most_of_base >= self.least_of_persona:
            problems.append(
                f"most_of_base {self.most_of_base} is not below least_of_persona "
                f"{self.least_of_persona}: the gate would tell nothing apart"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self
