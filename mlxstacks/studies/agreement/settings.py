"""Settings of `mlxstacks compare`. Imports neither mlx nor numpy."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.files.settings import PeftLayout
from mlxstacks.settings import Force, Plots, Resume, Settings, output_path


class AgreementSettings(Settings):
    """How far do the next tokens of models differ from a reference's?"""

    model: str | None = Field(
        None,
        description="Reference model: directory or Hugging Face id. Default: the built-in nano "
        "model with its sample adapter.",
    )
    other: tuple[str, ...] = Field(
        (), description="Model to compare with the reference. Repeatable. Default: its base."
    )
    adapter_path: tuple[str, ...] = Field(
        (),
        description="Unfused adapter of the reference (mlx-lm or PEFT); its base without it is "
        "compared too. Repeatable.",
    )
    data: str | None = Field(
        None,
        description="JSONL file of rows with text (read as is), or with prompt or messages "
        "(answered by the reference). Default: 16 texts and 8 prompts that ship with mlxstacks.",
    )
    answer_tokens: Annotated[int, Field(ge=1, le=4096)] = Field(
        32, description="Maximum tokens in an answer to a prompt."
    )
    max_tokens: Annotated[int, Field(ge=2, le=8192)] = Field(
        256, description="Maximum tokens in a text or prompt."
    )
    base: Literal["auto", "stored", "float32"] = Field(
        "auto",
        description="How models compute; auto: float32 on a CPU with enough memory, else stored.",
    )
    fail_under_agreement: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Exit with 3 if a model of OTHER agrees on a smaller share of next tokens.",
    )
    peft_layout: PeftLayout | None = Field(
        None, description="Expert layout of a PEFT adapter whose shapes fit two layouts."
    )
    allow_base: bool = Field(
        False, description="Accept an adapter even if its recorded base fingerprint differs."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    plots: Plots = True
    plot_format: Literal["svg", "png"] = Field("svg", description="Plot format.")
    save_path: str | None = output_path("compare")
    resume: Resume = True
    force: Force = False

    @model_validator(mode="after")
    def _has_a_second_model(self) -> Self:
        if self.model and not (self.other or self.adapter_path):
            raise ValueError(
                "compare needs a second model: `mlxstacks compare MODEL OTHER`, or --adapter-path "
                "for a model with its adapter against without"
            )
        return self
