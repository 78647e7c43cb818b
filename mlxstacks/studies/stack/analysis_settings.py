"""Settings of `mlxstacks stacks analyse`. Imports neither mlx nor numpy."""

from typing import Literal

from pydantic import Field

from mlxstacks.settings import Settings

PlotFormat = Literal["png", "svg"]


class StacksAnalyseSettings(Settings):
    """What the frozen stacks of a store do: routing, directions, spectra, losses, plots."""

    store_path: str | None = Field(None, description="Directory of the store; it is only read.")
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/stacks-analyse."
    )
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the base. Default: what the store "
        "names.",
    )
    data: str | None = Field(
        None,
        description="Directory in which the domains' files lie. Default: the current one.",
    )
    weights_only: bool = Field(
        False,
        description="Look at the weights alone, without base and data: no routing, and no "
        "directions on data.",
    )
    prompts: int = Field(64, ge=2, description="Validation rows of a domain, at most.")
    max_seq_length: int = Field(512, ge=2, description="Longer rows are cut.")
    directions: int = Field(
        4, ge=1, le=256, description="Principal output directions of a domain that are compared."
    )
    plots: bool = Field(True, description="Draw plots, where matplotlib is installed.")
    plot_format: PlotFormat = Field("png", description="png, or svg for print.")
    seed: int = Field(0, ge=0, description="Of folds, permutations and randomized directions.")
    force: bool = Field(False, description="Replace an existing save path.")
