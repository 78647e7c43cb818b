"""Settings of `mlxstacks profile`. Imports neither mlx nor numpy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.settings import Settings

# Announced with the published profile (spec/metal_limits_and_routing.md B1): a mean Jaccard below
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
        description="Groups of prompts: a directory with a JSONL file each, a file with a group "
        "key, or the id of a cached Hugging Face data set. Default: nano's five domains.",
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/profile."
    )
    split: str = Field("test", description="Split of a Hugging Face data set.")
    group_key: str = Field("category", description="Key of a row that names its group.")
    groups: tuple[str, ...] = Field(
        (), description="Only these groups. Repeatable. Default: all there are."
    )
    questions: int = Field(
        100, ge=2, description="Prompts drawn of each group, at most; published: 100."
    )
    tokens: int | None = Field(
        None,
        ge=1,
        description="Content tokens counted of each group, the same for all; those of the chat "
        "template are not counted. Default: as many as the smallest group has.",
    )
    options: bool = Field(True, description="Put the options of a question into its prompt.")
    chat_template: bool = Field(
        True, description="Ask through the model's chat template, where it has one."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    max_seq_length: int = Field(1024, ge=2, description="Longer prompts are cut at their end.")
    batch_size: int = Field(8, ge=1, description="Prompts that go through the model together.")
    measure: Literal["counts", "weights"] = Field(
        "counts",
        description="What an expert's share is of: choices, or the router's weights of them.",
    )
    top_layers: int = Field(
        3, ge=1, description="Layers that are called a group's own, by divergence; published: 3."
    )
    top_experts: int | None = Field(
        None,
        ge=1,
        description="Experts of a group and layer that are compared. Default: 16 of 32 or more, "
        "else a quarter of them.",
    )
    permutations: int = Field(
        200,
        ge=20,
        le=1_000_000,
        description="Permutations: times that labels are shuffled among prompts of like length.",
    )
    halves: int = Field(
        20, ge=1, le=1_000_000, description="Times that each group is split in two by chance."
    )
    untrained: int = Field(
        20,
        ge=0,
        description="Control: so many times routers with weights drawn anew, as large as the "
        "trained ones', choose for the same tokens. Do trained ones differ more? 0: no control.",
    )
    alpha: float = Field(0.05, ge=1e-6, lt=0.5, description="A p-value below it is called a find.")
    plots: bool = Field(True, description="Draw plots, where matplotlib is installed.")
    plot_format: PlotFormat = Field("png", description="png, or svg for print.")
    seed: int = Field(0, ge=0, description="Of drawn prompts, permutations and halves.")
    resume: bool = Field(True, description="Resume a profile that was interrupted.")
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
