"""Settings of `mlxstacks profile`. Imports neither mlx nor numpy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.settings import Settings, output_path

# Announced with the published profile (MoE Routing Layers Converge): a mean Jaccard below
# the first means different layers, above the second shared ones.
DIFFERENT_BELOW, SHARED_ABOVE = 0.3, 0.6
# Halves of one group have to agree better than those of two groups by more than this, ours.
HALVES_MARGIN = 0.05
PlotFormat = Literal["png", "svg"]


class ProfileSettings(Settings):
    """Do groups of prompts (subjects, domains) use different experts, and in which layers?"""

    model: str | None = Field(
        None,
        description="Mixture of experts: model directory or Hugging Face id. Default: the built-in "
        "nano model.",
    )
    data: str | None = Field(
        None,
        description="Groups of prompts: a directory with a JSONL file for each, a file with a "
        "group key, or the id of a cached Hugging Face data set. Default: nano's five domains.",
    )
    save_path: str | None = output_path("profile")
    split: str = Field("test", description="Split of a Hugging Face data set.")
    group_key: str = Field("category", description="Row key that names the group.")
    groups: tuple[str, ...] = Field(
        (), description="Use only these groups. Repeatable. Default: all."
    )
    questions: int = Field(
        100, ge=2, description="Maximum prompts to draw per group; published: 100."
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="Content tokens to count per group, the same for all, not counting those of "
        "the chat template. Default: as many as the smallest group has.",
    )
    options: bool = Field(True, description="Include the options of a question in its prompt.")
    chat_template: bool = Field(True, description="Use the model's chat template, if it has one.")
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    max_seq_length: int = Field(1024, ge=2, description="Truncate prompts to this many tokens.")
    batch_size: int = Field(8, ge=1, description="Prompts per batch.")
    measure: Literal["counts", "weights"] = Field(
        "counts", description="Basis of an expert's share: choices (counts) or router weights."
    )
    top_layers: int = Field(
        3, ge=1, description="Most divergent layers to call a group's own; published: 3."
    )
    top_experts: int | None = Field(
        None,
        ge=1,
        description="Experts to compare per group and layer. Default: 16 of 32 or more, else a "
        "quarter of them.",
    )
    permutations: int = Field(
        200,
        ge=20,
        le=1_000_000,
        description="Times to shuffle labels among prompts of similar length.",
    )
    halves: int = Field(
        20, ge=1, le=1_000_000, description="Times to split each group into two random halves."
    )
    untrained: int = Field(
        20,
        ge=0,
        description="Control: number of random routers, with weights as large as the trained "
        "ones', that choose for the same tokens: do trained ones differ more? 0: no control.",
    )
    alpha: float = Field(0.05, ge=1e-6, lt=0.5, description="Significance level for p-values.")
    plots: bool = Field(True, description="Draw plots if matplotlib is installed.")
    plot_format: PlotFormat = Field("png", description="Plot format; svg for print.")
    seed: int = Field(0, ge=0, description="Seed for drawn prompts, permutations and halves.")
    resume: bool = Field(True, description="Resume an interrupted profile.")
    force: bool = Field(False, description="Replace an existing save path.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.groups) == 1 or len(set(self.groups)) < len(self.groups):
            raise ValueError(f"groups is {list(self.groups)}; name two or more, each once, or none")
        for name in ("permutations", "untrained"):
            count = getattr(self, name)
            if count and 1 / (count + 1) >= self.alpha:
                raise ValueError(
                    f"{count} {name} give no p below {1 / (count + 1):.3g}; alpha "
                    f"{self.alpha:g} needs more than {1 / self.alpha - 1:.0f}"
                )
        return self
