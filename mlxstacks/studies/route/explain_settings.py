"""Settings of `mlxstacks route explain`. Imports neither mlx nor numpy."""

from typing import Literal

from pydantic import Field

from mlxstacks.data.settings import Template
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.settings import Settings


class RouteExplainSettings(Settings):
    """Why a prompt goes where it goes, and, with an answer, what each domain does to its loss."""

    prompt: str | None = Field(None, description="The prompt.")
    answer: str | None = Field(
        None, description="What the answer should be: losses are of it, given the prompt."
    )
    store_path: str | None = Field(
        None, description="Directory of the store. Default: nano's sample store."
    )
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the base. Default: what the store "
        "names.",
    )
    router_path: str | None = Field(
        None, description="Router's file or directory. Default: the store's own."
    )
    hard: bool = Field(False, description="Active domains count 1 instead of their score.")
    threshold: float = Field(
        0.01, ge=0, description="Nats by which a further domain must lower the loss, in the search."
    )
    template: Template | None = Field(
        None, description="chat or alpaca. Default: what the store's domains were trained with."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    max_tokens: int = Field(256, ge=2, description="Prompt and answer are cut to so many tokens.")
    base: Literal["auto", "stored", "float32"] = Field(
        "auto", description="Numbers the base computes with; as in `mlxstacks stack`."
    )
