"""Settings of `mlxstacks report`. Imports neither mlx nor numpy."""

from typing import Literal

from pydantic import Field, field_validator

from mlxstacks.settings import Settings, output_path

FigureFormat = Literal["svg", "png"]


class ReportSettings(Settings):
    """Which results become a page, and where it is written."""

    runs: tuple[str, ...] = Field(
        (),
        description="Output directories of commands, directories of these, or result files. "
        "Default: everything under ./mlxstacks-out.",
    )
    save_path: str | None = output_path("report")
    title: str = Field("Results", min_length=1, max_length=200, description="Page title.")
    date: str | None = Field(
        None,
        max_length=100,
        description="Date to print under the title. Default: none, so that equal results give "
        "identical bytes.",
    )
    formats: tuple[FigureFormat, ...] = Field(
        ("svg", "png"),
        description="File formats of the plots in figures/; the page embeds its own. Repeatable.",
    )
    force: bool = Field(False, description="Replace an existing save path.")

    @field_validator("formats")
    @classmethod
    def _each_once(cls, formats: tuple[FigureFormat, ...]) -> tuple[FigureFormat, ...]:
        if len(set(formats)) < len(formats):
            raise ValueError("give each once")
        return formats
