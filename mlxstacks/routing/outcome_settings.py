"""Settings of `mlxstacks route discover`. Imports neither mlx nor numpy."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlxstacks.data.settings import DomainDataSettings, Template
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.routing.route_settings import RouteSettings
from mlxstacks.settings import Settings

SearchName = Literal["greedy", "greedy_first", "exhaustive"]
# Above it, a pair takes more than 64 forward passes.
MOST_EXHAUSTIVE = 6


def _as_data(value: Any) -> Any:
    return {"sources": [value]} if isinstance(value, str) else value


class LabelledSource(Settings):
    """Prompts with their label. A plain path stands for data of one source."""

    domains: tuple[str, ...] = Field(
        description="the label: one domain, several for mixed prompts, none for prompts that no "
        "domain should help with"
    )
    data: Annotated[
        DomainDataSettings,
        BeforeValidator(_as_data, json_schema_input_type=DomainDataSettings | str),
    ] = Field(description="where the rows come from")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.domains)) != len(self.domains):
            raise ValueError(f"domains {', '.join(self.domains)}: one is named twice")
        return self


class OutcomeSettings(RouteSettings):
    """`mlxstacks route discover`: which stacks lower the loss of an answer, prompt by prompt."""

    data: str | None = Field(
        None,
        description="Directory with NAME.jsonl, NAME a domain, domain+domain for mixed prompts, "
        "or others for prompts that no domain should help with. Default: the rows that the "
        "store's domains were trained with, those held out first.",
    )
    sources: tuple[LabelledSource, ...] = Field(
        (), description="Data by label, in place of files by name; relative paths start in `data`."
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/route-discover."
    )
    single_cap: int = Field(2000, ge=1, description="Examples of a domain, at most.")
    mixed_cap: int = Field(400, ge=1, description="Examples of a pair of domains, at most.")
    shortest_prompt: int = Field(
        1, ge=1, description="Characters; shorter prompts are left out (published: 15)."
    )
    shortest_answer: int = Field(
        1, ge=1, description="Characters; shorter answers are dropped (published: 6)."
    )
    samples_per_domain: int = Field(
        200, ge=0, description="Examples of a domain whose outcome is discovered."
    )
    mixed_samples: int = Field(0, ge=0, description="The same, of each pair of domains.")
    other_samples: int = Field(0, ge=0, description="The same, of prompts that no domain fits.")
    search: SearchName = Field(
        "greedy",
        description="greedy: the best addition of each pass; greedy_first: additions inside a "
        "pass, as published; exhaustive: every set of up to 6 domains, and how far greedy is "
        "from the best one.",
    )
    threshold: float = Field(
        0.01, ge=0, description="Nats by which a further domain must lower the loss."
    )
    chat_domain: str | None = Field(
        None, description="Domain that is always on. Default: chat, where the store has it."
    )
    chat_floor: float = Field(
        0.2, ge=0, le=1, description="Least weight of the chat domain in every run but the base's."
    )
    soft: tuple[str, ...] = Field(
        ("reasoning",),
        description="Domains that any improvement adds, with target 0.5; where the store has "
        "them. Repeatable.",
    )
    label_share: float = Field(0.2, ge=0, le=1, description="Share of the label in a target.")
    max_tokens: int = Field(256, ge=2, description="Longer pairs are cut.")
    template: Template | None = Field(
        None, description="chat or alpaca. Default: what the store's domains were trained with."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    random_control: bool = Field(
        False,
        description="Try, beside each domain, a random stack of equal norm; reported, never a "
        "target.",
    )
    base: Literal["auto", "stored", "float32"] = Field(
        "auto", description="Numbers the base computes with; as in `mlxstacks stack`."
    )
    batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens of a batch, padding included: bounds the memory. Default: by the "
        "width of the model and the device.",
    )
    seed: int = Field(42, ge=0, description="Of draws under a cap, and of random stacks.")
    resume: bool = Field(
        True, description="Use the losses that an earlier run, finished or not, left behind."
    )
    force: bool = Field(False, description="Replace an existing save path; its losses are kept.")
