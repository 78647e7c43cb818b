"""Settings of the adapter commands. Imports neither mlx nor numpy, so that `--help` stays fast."""

from typing import Literal

from pydantic import Field

from mlxstacks.settings import Settings

PeftLayout = Literal["current", "legacy"]
AdapterFormat = Literal["mlx", "peft"]
PeftModel = Literal["text", "whole"]

_LAYOUT = (
    "Layout of the experts in a PEFT adapter whose shapes fit both: current (PEFT >= 0.19.1) or "
    "legacy (before)."
)
_MODEL = (
    "MLX model directory that the adapter belongs to. Helps to name the modules of a PEFT adapter "
    "and to tell its layouts apart; not needed otherwise."
)


class _AdapterSettings(Settings):
    adapter_path: str | None = Field(
        None,
        description="Adapter directory to read (mlx-lm or PEFT). Default: nano's sample adapter.",
    )
    peft_layout: PeftLayout | None = Field(None, description=_LAYOUT)
    model: str | None = Field(None, description=_MODEL)


class AdapterShowSettings(_AdapterSettings):
    """What an adapter holds."""


class AdapterZeroSettings(_AdapterSettings):
    """The zero-delta copy of an adapter: same format, names, dtypes and shapes, all zero."""

    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/adapter-zero."
    )
    force: bool = Field(False, description="Replace an existing target.")


class AdapterConvertSettings(_AdapterSettings):
    """An adapter in the other format, with the same delta."""

    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/adapter-convert."
    )
    to: AdapterFormat = Field("peft", description="Format to write: mlx (mlx-lm) or peft.")
    base_model_name: str | None = Field(
        None,
        description="Hub id or path of the unquantized base to name in a PEFT adapter "
        "(base_model_name_or_path). Default: what the adapter names, if anything.",
    )
    peft_model: PeftModel = Field(
        "text",
        description="Class that a PEFT adapter for Qwen3.5 is written for: text "
        "(AutoModelForCausalLM) or whole (...ForConditionalGeneration). PEFT loads no other names.",
    )
    force: bool = Field(False, description="Replace an existing target.")
