"""Settings of `mlxstacks report`. Imports neither mlx nor numpy."""

from typing import Literal

from pydantic import Field, field_validator

from mlxstacks.settings import Settings

FigureFormat = Literal["svg", "png"]


class ReportSettings(Settings):
    """Which results become a page, and where it is written."""

    runs: tuple[str, ...] = Field(
        (),
        description="Directories that commands wrote, directories of such, or their result files. "
        "Default: all under ./mlxstacks-out.",
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/report."
    )
    title: str = Field("Results", min_length=1, max_length=200, description="Title of the page.")
    date: str | None = Field(
        None,
        max_length=100,
        description="A date to print under the title. Without it the page has none, and equal "
        "results give equal bytes.",
    )
    formats: tuple[FigureFormat, ...] = Field(
        ("svg", "png"),
        description="Formats of the files in figures/; the page has its plots inside. Repeatable.",
    )
    force: bool = Field(False, description="Replace an existing save path.")

    @field_validator("formats")
    @classmethod
    def _each_once(cls, formats: tuple[FigureFormat, ...]) -> tuple[FigureFormat, ...]:
        if len(set(formats)) < len(formats):
            raise ValueError("give each once")
        return formats
