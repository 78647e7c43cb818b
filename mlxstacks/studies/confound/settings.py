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
        description="The persona: an adapter to fuse into the base first, or a model that has it "
        "already. Default: nano's sample adapter.",
    )
    items: str | None = Field(
        None,
        description="Multiple-choice items: a JSONL file with question_id, question, options, "
        "answer (a letter), category and, if wanted, justification; or a data set in the Hugging "
        "Face cache, as TIGER-Lab/MMLU-Pro; or mix:mmlu-pro or mix:mmlu-pro-medmcqa-arc, which are "
        "downloaded. Default: nano's own.",
    )
    suite: str | None = Field(
        None,
        description="Identity suite that every arm replies to as well, as in `mlxstacks identity`: "
        "a file of prompts with rules, or default: 20 made from persona_card. Default: none, or "
        "with persona_card those.",
    )
    persona_card: Card = None
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/confound."
    )
    persona_requant: PolicyName = Field(
        "refit", description="Policy by which the persona adapter is fused."
    )
    scoring: Scoring = Field(
        "generate",
        description="generate: a greedy answer with a boxed letter, taken out by rule. likelihood: "
        "the option text with the highest probability, for small models.",
    )
    normalisation: LikelihoodNormalisation = "sum"
    max_tokens: Count = Field(64, description="Longest generated answer.")
    thinking: Thinking = "off"
    allow_special: AllowSpecial = False
    subjects: Annotated[tuple[str, ...], EachOnce] = Field(
        (), description="Only items of these subjects. Repeatable. Default: all."
    )
    sample: Annotated[int, Field(ge=2)] | None = Field(
        6000, description="Items to mine from, stratified over subjects; none: all there are."
    )
    train_share: float = Field(
        0.7, gt=0, lt=1, description="Of the mined items, in each subject; the rest is the test."
    )
    right_items: Count | None = Field(
        None,
        description="Items that both models get right, for the control. Default: as many as the "
        "test has, if there are so many.",
    )
    probe_items: Count = Field(
        200,
        description="Items of the part to train on that show at which scale a random delta moves "
        "as many answers as A1.",
    )
    second_form: bool = Field(
        False,
        description="Ask every arm the test's items a second time, in other words and with the "
        "options in another order: knowledge is claimed only of what holds in both forms. Costs as "
        "many answers as the test's again: about a third more time.",
    )
    policies: Policies = Field(
        ("refit", "nearest", "promote"),
        description="Fuses to compare, the one that decides first; promote is always among them. "
        "Repeatable.",
    )
    widths: Annotated[tuple[Bits, ...], EachOnce] = Field(
        (),
        description="Also ask plain_model at each of these bits, before and after a refit of "
        "zeros: whom does rounding move, and more at fewer bits? Costs twice the answers of an arm "
        "for each. Repeatable.",
    )
    plain_model: str | None = Field(
        None,
        description="With widths: the base in unquantized weights, a directory or Hugging Face id. "
        "Default: nano's.",
    )
    target_correlation: TargetCorrelation = 0.98
    train: Training = Field(
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
    alpha: Alpha = 0.05
    expected_rate: Probability = Field(
        0.18, description="Accuracy of A0 that the power table takes as known."
    )
    expected_discordant: Probability = Field(
        0.1, description="Share of items whose answer A1 changes, for the power table."
    )
    batch_size: Count = Field(16, description="Items scored before they are written down.")
    limit: Limit = Field(
        None,
        description="Answer at most so many items of each set: a quick look, marked exploratory, "
        "by which nothing is decided. Mining and training keep their size: sample cuts the one, "
        "train.iters the other.",
    )
    keep_models: bool = Field(
        False, description="Keep the fused models; by default each goes once it is evaluated."
    )
    plots: Plots = True
    resume: Resume = True
    force: Force = False
    seed: Seed = Field(0, description="Seed of sample, split, training and random delta.")

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
