"""Settings of `mlxstacks compare`. Imports neither mlx nor numpy."""

from typing import Annotated, Literal

from pydantic import Field

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.files.settings import PeftLayout
from mlxstacks.settings import Force, Plots, Resume, Settings


class AgreementSettings(Settings):
    """How far do the next tokens of models differ from a reference's?"""

    model: str | None = Field(
        None,
        description="Reference: model directory or Hugging Face id. Default: the built-in nano "
        "model with its sample adapter.",
    )
    other: tuple[str, ...] = Field(
        (), description="Model to hold against it. Repeatable. Default: the reference's base."
    )
    adapter_path: tuple[str, ...] = Field(
        (),
        description="Adapters of the reference, not fused (mlx-lm or PEFT); its base without them "
        "is compared too. Repeatable.",
    )
    data: str | None = Field(
        None,
        description="JSONL file of rows with text, read as is, or with prompt or messages, which "
        "the reference answers. Default: 16 texts and 8 prompts that ship with mlxstacks.",
    )
    answer_tokens: Annotated[int, Field(ge=1, le=4096)] = Field(
        32, description="Longest answer to a prompt, in tokens."
    )
    max_tokens: Annotated[int, Field(ge=2, le=8192)] = Field(
        256, description="Most tokens of a text, and of a prompt."
    )
    base: Literal["auto", "stored", "float32"] = Field(
        "auto",
        description="Numbers that models compute with; auto: float32 on a CPU with memory for it.",
    )
    fail_under_agreement: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Exit with 3 when a model agrees on a smaller share of next tokens."
    )
    peft_layout: PeftLayout | None = Field(
        None, description="Expert layout of a PEFT adapter whose shapes fit two layouts."
    )
    allow_base: bool = Field(
        False, description="Take an adapter whose recorded fingerprint is not the reference's base."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    plots: Plots = True
    plot_format: Literal["svg", "png"] = Field("svg", description="Format of plots.")
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/compare."
    )
    resume: Resume = True
    force: Force = False
