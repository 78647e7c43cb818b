"""Settings of `mlxstacks route check`. Imports neither mlx nor numpy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.routing.route_settings import RouteSettings
from mlxstacks.settings import Settings

CheckMode = Literal["base", "ungated", "routed"]


class CheckPrompt(Settings):
    """One prompt, with the rules that its answer and its route are held to.

    The answer is written in every mode if there is a rule for it; otherwise the prompt is routed
    only.
    """

    name: str = Field(min_length=1, description="what the check is called in tables")
    prompt: str = Field(min_length=1)
    expect: tuple[str, ...] = Field(
        (), description="texts of which one must occur, whatever the case"
    )
    number: float | None = Field(None, description="a number that must occur")
    tolerance: float = Field(0.01, ge=0, description="how far off the number may be")
    forbid: tuple[str, ...] = Field(
        (), description="texts that must not occur, whatever the case: marks of another domain"
    )
    domains: tuple[str, ...] = Field(
        (), description="domains that must be in the prompt's active set, all of them"
    )

    @property
    def is_answered(self) -> bool:
        return bool(self.expect or self.forbid) or self.number is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.prompt.strip():
            raise ValueError(f"{self.name}: the prompt is blank")
        if not self.is_answered and not self.domains:
            raise ValueError(f"{self.name}: no rule; give expect, number, forbid or domains")
        if not all(text.strip() for text in (*self.expect, *self.forbid)):
            raise ValueError(f"{self.name}: a blank text occurs in every answer")
        return self


class RouteCheckSettings(RouteSettings):
    """Prompts whose answers and routes are known, in modes base, ungated and routed."""

    router_path: str | None = Field(
        None, description="Router's file or directory. Default: the store's own."
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/route-check."
    )
    prompts: tuple[CheckPrompt, ...] = Field((), description="what is checked")
    modes: tuple[CheckMode, ...] = Field(
        ("base", "ungated", "routed"), min_length=1, description="Modes to answer in. Repeatable."
    )
    hard: bool = Field(False, description="Active domains count 1 instead of their score.")
    max_tokens: int = Field(256, ge=1, description="Tokens of an answer, at most; greedy.")
    most_think_share: float = Field(
        0.2, ge=0, le=1, description="Share of an answer's tokens that may be thinking."
    )
    most_repetition: float = Field(
        0.3, ge=0, le=1, description="Share of an answer's word fours that may be repeats."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    base: Literal["auto", "stored", "float32"] = Field(
        "auto", description="Numbers the base computes with; as in `mlxstacks stack`."
    )
    force: bool = Field(False, description="Replace an existing save path.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [prompt.name for prompt in self.prompts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"prompts: {', '.join(twice)} is there twice; each needs its own name")
        if len(set(self.modes)) < len(self.modes):
            raise ValueError(f"modes: {', '.join(self.modes)}; give each once")
        return self
