"""Settings of `mlxstacks route evaluate`. Imports neither mlx nor numpy."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlxstacks.data.settings import SourceSettings, Template
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.routing.outcome_settings import LabelledSource
from mlxstacks.routing.route_settings import RouteSettings


def _from_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


# A plain path stands for a source with all else at its default.
UnseenSource = Annotated[
    SourceSettings, BeforeValidator(_from_path, json_schema_input_type=SourceSettings | str)
]


class RouteEvaluateSettings(RouteSettings):
    """Whether routing pays: losses in every mode on held-out rows, the router's metrics, gaps."""

    data: str | None = Field(
        None,
        description="Directory with NAME.jsonl, NAME a domain, domain+domain for mixed prompts, "
        "or others for prompts that no domain should help with. Default: the validation rows of "
        "the store's domains.",
    )
    sources: tuple[LabelledSource, ...] = Field(
        (), description="Data by label, in place of files by name; relative paths start in `data`."
    )
    unseen: tuple[UnseenSource, ...] = Field(
        (),
        description="Data of domains that neither stacks nor router were trained on, to measure "
        "how many gaps are detected. Repeatable.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/route-evaluate."
    )
    routers: tuple[str, ...] = Field(
        (),
        description="Routers to compare, as of several seeds: files or directories; the first one "
        "makes the matrix. Default: the store's own. Repeatable.",
    )
    targets: str | None = Field(
        None,
        description="Directory that `route discover` wrote for these routers: prompts that they "
        "were trained on are left out. Needed where the data here is other data. Default: what "
        "the report beside a router names, else mlxstacks-out/route-discover.",
    )
    rows_per_group: int = Field(
        100, ge=1, description="Held-out rows of a domain, of mixed prompts and so on, at most."
    )
    include_trained: bool = Field(
        False, description="Also measure on rows that a router or a stack was trained on."
    )
    gap_rows: int = Field(
        50, ge=0, description="Rows of a group on which the loss test for gaps is made; 0: none."
    )
    threshold: float = Field(
        0.01, ge=0, description="Nats by which a domain must lower the loss, in that test."
    )
    random_control: bool = Field(
        True, description="Also measure random stacks of equal norm in place of the right ones."
    )
    sample_prompts: int = Field(
        2, ge=0, description="Prompts of a domain that are answered in the three panels."
    )
    sample_tokens: int = Field(48, ge=1, description="Tokens of such an answer, at most.")
    template: Template | None = Field(
        None, description="chat or alpaca. Default: what the store's domains were trained with."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    max_tokens: int = Field(256, ge=2, description="Prompt and answer are cut to so many tokens.")
    draws: int = Field(2000, ge=100, le=1_000_000, description="Bootstrap draws of an interval.")
    base: Literal["auto", "stored", "float32"] = Field(
        "auto", description="Numbers the base computes with; as in `mlxstacks stack`."
    )
    seed: int = Field(0, ge=0, description="Of the bootstrap and of random stacks.")
    force: bool = Field(False, description="Replace an existing save path.")
