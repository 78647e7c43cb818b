"""Settings of `mlxstacks confound`. Imports neither mlx nor numpy."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.settings import Settings
from mlxstacks.training.settings import TrainSettings

Scoring = Literal["generate", "likelihood"]
Normalisation = Literal["sum", "token", "character"]
PUBLISHED_TRAINING = TrainSettings(
    layers="8,14,20", keys=("down_proj",), rank=2, scale=1.0, iters=200, batch_size=1,
    learning_rate=5e-6, max_seq_length=2048, keep="last",
)  # fmt: skip
# What the training gets from the experiment; in `train` it would be said twice.
_OF_THE_EXPERIMENT = (
    "model", "data", "save_path", "seed", "resume", "force", "thinking", "allow_special"
)  # fmt: skip
# How a run writes and goes on, not what comes of it; `limit` makes a result exploratory instead.
NOT_OF_THE_PLAN = {
    "model", "persona", "items", "save_path", "limit", "keep_models", "plots", "resume", "force",
}  # fmt: skip


def said_twice(train: TrainSettings) -> list[str]:
    """A line for each setting of the training that is the experiment's to say."""
    plain = TrainSettings()
    return [
        f"train.{key} is set by the experiment: leave it out"
        for key in _OF_THE_EXPERIMENT
        if getattr(train, key) != getattr(plain, key)
    ]


class ConfoundSettings(Settings):
    """Does fusing a second adapter add knowledge? The defaults are the published settings."""

    model: str | None = Field(
        None,
        description="Quantized base: a directory or Hugging Face id. Default: the built-in nano "
        "model.",
    )
    persona: str | None = Field(
        None,
        description="The persona: an adapter to fuse into the base first, or a model that has it "
        "already. Default: nano's sample adapter.",
    )
    items: str | None = Field(
        None,
        description="Multiple-choice items: a JSONL file with question_id, question, options, "
        "answer (a letter), category; or a data set in the Hugging Face cache, as "
        "TIGER-Lab/MMLU-Pro. Default: nano's own.",
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/confound."
    )
    persona_requant: PolicyName = Field(
        "refit",
        description="Policy by which the persona adapter is fused.",
    )
    scoring: Scoring = Field(
        "generate",
        description="generate: a greedy answer with a boxed letter, taken out by rule. likelihood: "
        "the option text with the highest probability, for small models.",
    )
    normalisation: Normalisation = Field(
        "sum", description="Of likelihoods: their sum, or the mean over tokens or characters."
    )
    max_tokens: int = Field(64, ge=1, description="Longest generated answer.")
    thinking: Thinking = "off"
    allow_special: AllowSpecial = False
    subjects: tuple[str, ...] = Field(
        (), description="Only items of these subjects. Repeatable. Default: all."
    )
    sample: Annotated[int, Field(ge=2)] | None = Field(
        6000, description="Items to mine from, stratified over subjects; none: all there are."
    )
    train_share: float = Field(
        0.7, gt=0, lt=1, description="Of the mined items, in each subject; the rest is the test."
    )
    right_items: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Items that both models get right, for the control. Default: as many as the "
        "test has, if there are so many.",
    )
    policies: tuple[PolicyName, ...] = Field(
        ("refit", "nearest", "promote"),
        description="Fuses to compare, the one that decides first; promote is always among them. "
        "Repeatable.",
    )
    target_correlation: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.98, description="Correlation that auto and promote seek."
    )
    train: TrainSettings = Field(
        PUBLISHED_TRAINING,
        description="Settings of the adapter's training, by the names of `mlxstacks train`.",
    )
    train_answers: Literal["right", "random"] = Field(
        "right",
        description="What the adapter is taught: the right options, or, as a planted null, options "
        "drawn at random.",
    )
    least_gain: float = Field(
        0.05,
        ge=0,
        le=0.999999,
        description="Smallest A1 - A0 that counts, as a difference of rates; 0, or from 1e-6 on.",
    )
    alpha: float = Field(
        0.05, ge=1e-6, le=0.999999, description="p-values below it count as significant."
    )
    expected_rate: float = Field(
        0.18,
        ge=1e-6,
        le=0.999999,
        description="Accuracy of A0 that the power table takes as known.",
    )
    expected_discordant: float = Field(
        0.1,
        ge=1e-6,
        le=0.999999,
        description="Share of items whose answer A1 changes, for the power table.",
    )
    batch_size: int = Field(16, ge=1, description="Items scored before they are written down.")
    limit: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description="Evaluate only so many test items: a quick look, marked exploratory, that "
        "cannot meet the criterion.",
    )
    keep_models: bool = Field(
        False, description="Keep the fused models; by default each goes once it is evaluated."
    )
    plots: bool = Field(True, description="Draw plots, where matplotlib is installed.")
    resume: bool = Field(True, description="Go on with a run that was interrupted.")
    force: bool = Field(False, description="Replace an existing save path.")
    seed: int = Field(
        0, ge=0, lt=2**64, description="Seed of sample, split, training and random delta."
    )

    @field_validator("least_gain")
    @classmethod
    def _gain_can_be_told_from_none(cls, gain: float) -> float:
        if 0 < gain < 1e-6:
            raise ValueError("0, or at least 1e-6")
        return gain

    @field_validator("policies", "subjects")
    @classmethod
    def _each_once(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(values)) < len(values):
            raise ValueError("give each once")
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.policies:
            raise ValueError("policies is empty; give at least one")
        if problems := said_twice(self.train):
            raise ValueError("; ".join(problems))
        return self

    @property
    def ways(self) -> tuple[str, ...]:
        """How the adapters meet the model, the deciding way first: policies, then unfused."""
        more = () if "promote" in self.policies else ("promote",)
        return (*self.policies, *more, "unfused")
