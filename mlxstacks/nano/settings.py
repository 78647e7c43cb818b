"""Settings of the built-in model. Imports neither mlx nor numpy."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

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
    samples: bool = Field(
        False,
        description="All that the how-to pages begin with, side by side: model (at 3 bits), "
        "adapters, store, data, preferences and domains.",
    )
    force: bool = Field(False, description="Replace an existing save path.")

    @model_validator(mode="after")
    def _one_width(self) -> Self:
        if self.samples and self.bits != ADAPTER_BITS and "bits" in self.model_fields_set:
            raise ValueError(f"samples belong to the model at {ADAPTER_BITS} bits; leave out bits")
        return self


class ShowSettings(Settings):
    """`nano`: show the built-in model."""

    bits: Literal[2, 3, 4, 5, 6, 8] | None = Field(
        ADAPTER_BITS, description="Bits of the export that `model_path` names."
    )
