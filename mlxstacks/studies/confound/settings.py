"""Settings of `mlxstacks confound`. Imports neither mlx nor numpy."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

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
from mlxstacks.convert.settings import Bits
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.settings import (
    Count,
    EachOnce,
    Force,
    Limit,
    Plots,
    Probability,
    Resume,
    Seed,
    Settings,
    output_path,
)

# How a run writes and resumes, not what comes of it; `limit` makes a result exploratory instead.
NOT_OF_THE_PLAN = {
    "model", "persona", "items", "suite", "plain_model", "save_path", "limit", "keep_models",
    "plots", "resume", "force",
}  # fmt: skip


class ConfoundSettings(Settings):
    """Does fusing a second adapter add knowledge? The defaults are the published settings."""

    model: Model = None
    persona: str | None = Field(
        None,
        description="Persona: an adapter to fuse into the base first, or a model that already has "
        "it. Default: nano's sample adapter.",
    )
    items: str | None = Field(
        None,
        description="Multiple-choice items: a JSONL file with question, options, answer (a "
        "letter), category and, optionally, question_id, justification; or a cached Hugging Face "
        "data set, such as TIGER-Lab/MMLU-Pro; or mix:mmlu-pro or mix:mmlu-pro-medmcqa-arc, which "
        "are downloaded. Default: nano's own.",
    )
    suite: str | None = Field(
        None,
        description="Identity suite that every arm also answers, as in `mlxstacks identity`: a "
        "file of prompts with rules, or default: 20 made from persona_card. Default: none; with "
        "persona_card, default.",
    )
    persona_card: Card = None
    save_path: str | None = output_path("confound")
    persona_requant: PolicyName = Field(
        "refit", description="Policy for fusing the persona adapter."
    )
    scoring: Scoring = Field(
        "generate",
        description="How to score. generate: extract the boxed letter from a greedy answer. "
        "likelihood: take the most likely option text, for small models.",
    )
    normalisation: LikelihoodNormalisation = "sum"
    max_tokens: Count = Field(64, description="Maximum tokens in a generated answer.")
    thinking: Thinking = "off"
    allow_special: AllowSpecial = False
    subjects: Annotated[tuple[str, ...], EachOnce] = Field(
        (), description="Use only items of these subjects. Repeatable. Default: all."
    )
    sample: Annotated[int, Field(ge=2)] | None = Field(
        6000, description="Items to mine from, stratified by subject; none: all."
    )
    train_share: float = Field(
        0.7, gt=0, lt=1, description="Share of mined items to train on, by subject; test the rest."
    )
    right_items: Count | None = Field(
        None,
        description="Items that both models get right, for the control. Default: as many as the "
        "test has, if available.",
    )
    probe_items: Count = Field(
        200,
        description="Training items used to find the scale at which a random delta moves as many "
        "answers as A1.",
    )
    second_form: bool = Field(
        False,
        description="Ask every arm the test items a second time, reworded and with the options in "
        "another order, and claim as knowledge only what holds in both forms. Takes about a third "
        "more time.",
    )
    policies: Policies = Field(
        ("refit", "nearest", "promote"),
        description="Fuse policies to compare; the first one decides, and promote is always "
        "included. Repeatable.",
    )
    widths: Annotated[tuple[Bits, ...], EachOnce] = Field(
        (),
        description="Bits at which to ask plain_model too, before and after a refit of zeros: "
        "which answers does rounding move, and more at fewer bits? Each costs twice the answers "
        "of an arm. Repeatable.",
    )
    plain_model: str | None = Field(
        None,
        description="For widths: the base in unquantized weights, a directory or Hugging Face id. "
        "Default: nano's.",
    )
    target_correlation: TargetCorrelation = 0.98
    train: Training = Field(
        PUBLISHED_TRAINING,
        description="Settings of the adapter's training, named as in `mlxstacks train`.",
    )
    train_answers: Literal["right", "random"] = Field(
        "right",
        description="Options to teach the adapter: the right ones, or random ones as a planted "
        "null.",
    )
    least_gain: float = Field(
        0.05,
        ge=0,
        le=0.999999,
        description="Smallest A1 - A0 that counts, as a difference in rates: 0, or at least 1e-6.",
    )
    alpha: Alpha = 0.05
    expected_rate: Probability = Field(
        0.18, description="Accuracy of A0 that the power table assumes."
    )
    expected_discordant: Probability = Field(
        0.1, description="Share of items whose answer A1 changes, in the power table."
    )
    batch_size: Count = Field(16, description="Items scored between writes to disk.")
    limit: Limit = Field(
        None,
        description="Answer at most this many items of each set: a quick look, marked "
        "exploratory, that decides nothing. Mining and training keep their size: use sample and "
        "train.iters to cut them.",
    )
    keep_models: bool = Field(
        False, description="Keep the fused models; by default each is deleted after evaluation."
    )
    plots: Plots = True
    resume: Resume = True
    force: Force = False
    seed: Seed = Field(0, description="Seed for sample, split, training and random delta.")

    @field_validator("least_gain")
    @classmethod
    def _gain_can_be_told_from_none(cls, gain: float) -> float:
        if 0 < gain < 1e-6:
            raise ValueError("0, or at least 1e-6")
        return gain

    @property
    def has_suite(self) -> bool:
        return self.suite is not None or self.persona_card is not None

    @property
    def ways(self) -> tuple[str, ...]:
        """How the adapters meet the model, the deciding way first: policies, then unfused."""
        more = () if "promote" in self.policies else ("promote",)
        return (*self.policies, *more, "unfused")
