"""Settings of the built-in model. Imports neither mlx nor numpy."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from mlxstacks.settings import Settings

EXPORT_BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZE = 64
# The sample adapter and stacks belong to this export, which bare commands therefore use.
ADAPTER_BITS: Literal[3] = 3
# A domain of the curriculum that no sample stack is trained on, and where its file is: prompts that
# a router should not know.
HELD_OUT, HELD_OUT_DIRECTORY = "music", "held_out"


class Persona(Settings):
    """Who the model says it is once an identity adapter is on."""

    name: str = Field("Quinn", description="Name the persona gives itself.")
    maker: str = Field("Rosa", description="Who the persona says made it.")
    forbidden: tuple[str, ...] = Field((), description="Texts an answer must not contain.")


class ExportSettings(Settings):
    """`nano export`: write the built-in model as an mlx checkpoint."""

    save_path: Path = Field(description="Output directory.")
    bits: Literal[2, 3, 4, 5, 6, 8] | None = Field(4, description="Bits per weight; none: float32.")
    force: bool = Field(False, description="Replace an existing save path.")


class ShowSettings(Settings):
    """`nano`: show the built-in model."""

    bits: Literal[2, 3, 4, 5, 6, 8] | None = Field(
        ADAPTER_BITS, description="Bits of the export that `model_path` names."
    )
