"""What the settings of studies of arms share. Imports neither mlx nor numpy."""

from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field

from mlxstacks.data.text_settings import ThinkingMode
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.settings import EachOnce, Normalisation, Probability, Settings
from mlxstacks.study.repeat import TRAINING_OF_A_STUDY
from mlxstacks.training.settings import TrainSettings


def _leaves_out(train: TrainSettings) -> TrainSettings:
    plain = TrainSettings()
    repeated = [key for key in TRAINING_OF_A_STUDY if getattr(train, key) != getattr(plain, key)]
    if repeated:
        raise ValueError(
            "; ".join(f"train.{key} is set by the experiment: leave it out" for key in repeated)
        )
    return train


def _some(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise ValueError("got none; give at least one")
    return values


Scoring = Literal["generate", "likelihood"]
Model = Annotated[
    str | None,
    Field(
        description="Quantized base: a directory or Hugging Face id. Default: the built-in nano "
        "model."
    ),
]
Policies = Annotated[tuple[PolicyName, ...], EachOnce, AfterValidator(_some)]
TargetCorrelation = Annotated[
    float, Field(gt=0, lt=1, description="Delta correlation that auto and promote aim for.")
]
Training = Annotated[TrainSettings, AfterValidator(_leaves_out)]
LikelihoodNormalisation = Annotated[
    Normalisation,
    Field(description="How to normalize likelihoods: sum, or mean per token or character."),
]
Alpha = Annotated[Probability, Field(description="Significance level for p-values.")]

PUBLISHED_TRAINING = TrainSettings(
    layers="8,14,20", keys=("down_proj",), rank=2, scale=1.0, iters=200, batch_size=1,
    learning_rate=5e-6, max_seq_length=2048, keep="last",
)  # fmt: skip


Text = Annotated[str, Field(pattern=r"\S")]
DEFAULT_SUITE = "default"


class PersonaCard(Settings):
    """Who the persona is, for the default suite."""

    name: Text = Field(description="Name the persona gives itself.")
    maker: Text = Field(description="Who the persona says made it.")
    forbidden: tuple[Text, ...] = Field(
        (),
        description="Claims that no reply may contain, such as `I am Qwen` or `made by Alibaba`. "
        "Give whole claims: a reply may deny being Qwen.",
    )


Card = Annotated[
    PersonaCard | None,
    Field(description="Persona for the default suite: name, maker and forbidden claims."),
]


class AnswerSettings(Protocol):
    """How an arm answers. train: for the numbers that its base computes with."""

    @property
    def scoring(self) -> Scoring: ...
    @property
    def normalisation(self) -> Normalisation: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def thinking(self) -> ThinkingMode: ...
    @property
    def allow_special(self) -> bool: ...
    @property
    def train(self) -> TrainSettings: ...
