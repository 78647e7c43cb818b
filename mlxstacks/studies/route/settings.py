"""Settings of `mlxstacks route` check, explain and evaluate. Imports neither mlx nor numpy."""

from os.path import isfile
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlxstacks.data.settings import SourceSettings
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.routing.settings import (
    AnswerTemplate,
    BaseNumbers,
    LabelledSource,
    RouteSettings,
)
from mlxstacks.settings import Force, Settings, output_path
from mlxstacks.training.settings import TrainSettings

CheckMode = Literal["base", "ungated", "routed"]


RouterPath = Annotated[
    str | None, Field(description="Router file or directory. Default: the store's own.")
]
Hard = Annotated[bool, Field(description="Weight active domains by 1 instead of their score.")]


class _ServedSettings(RouteSettings):
    """How a base with every stack of a store is asked."""

    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    base: BaseNumbers = "auto"


class CheckPrompt(Settings):
    """One prompt, with the rules that its answer and its route are held to.

    The answer is written in every mode if there is a rule for it; otherwise the prompt is routed
    only.
    """

    name: str = Field(min_length=1, description="name of the check in tables")
    prompt: str = Field(min_length=1)
    expect: tuple[str, ...] = Field(
        (), description="texts of which at least one must occur, ignoring case"
    )
    number: float | None = Field(None, description="number that must occur")
    tolerance: float = Field(0.01, ge=0, description="maximum deviation from number")
    forbid: tuple[str, ...] = Field(
        (), description="texts that must not occur, ignoring case: marks of another domain"
    )
    domains: tuple[str, ...] = Field(
        (), description="domains that must all be in the prompt's active set"
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


class RouteCheckSettings(_ServedSettings):
    """Prompts whose answers and routes are known, in modes base, ungated and routed."""

    router_path: RouterPath = None
    save_path: str | None = output_path("route-check")
    prompts: tuple[CheckPrompt, ...] = Field((), description="Prompts to check.")
    modes: tuple[CheckMode, ...] = Field(
        ("base", "ungated", "routed"), min_length=1, description="Modes to answer in. Repeatable."
    )
    hard: Hard = False
    max_tokens: int = Field(256, ge=1, description="Maximum tokens per (greedy) answer.")
    most_think_share: float = Field(
        0.2, ge=0, le=1, description="Maximum share of an answer's tokens spent on thinking."
    )
    most_repetition: float = Field(
        0.3, ge=0, le=1, description="Maximum share of repeated four-word sequences in an answer."
    )
    force: Force = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [prompt.name for prompt in self.prompts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"prompts: {', '.join(twice)} is there twice; each needs its own name")
        if len(set(self.modes)) < len(self.modes):
            raise ValueError(f"modes: {', '.join(self.modes)}; give each once")
        return self


class RouteExplainSettings(_ServedSettings):
    """Why a prompt goes where it goes, and, with an answer, what each domain does to its loss."""

    prompt: str | None = Field(None, description="Prompt to explain.")
    answer: str | None = Field(
        None, description="Expected answer; losses are of it, given the prompt."
    )
    router_path: RouterPath = None
    hard: Hard = False
    threshold: float = Field(
        0.01, ge=0, description="Nats by which each domain the search adds must lower the loss."
    )
    template: AnswerTemplate = None
    max_tokens: int = Field(256, ge=2, description="Maximum tokens of prompt and answer.")

    @model_validator(mode="before")
    @classmethod
    def _in_either_order(cls, values: Any) -> Any:
        """A prompt that is a store's directory is the store."""
        first, second = values.get("prompt"), values.get("store_path")
        if isinstance(first, str) and isfile(f"{first}/manifest.json"):
            return {**values, "prompt": second, "store_path": first}
        return values


# A plain path stands for a source with all else at its default.
UnseenSource = Annotated[
    SourceSettings,
    BeforeValidator(
        lambda value: {"path": value} if isinstance(value, str) else value,
        json_schema_input_type=SourceSettings | str,
    ),
]


class RouteEvaluateSettings(_ServedSettings):
    """Whether routing pays: losses in every mode on held-out rows, the router's metrics, gaps."""

    data: str | None = Field(
        None,
        description="Directory of NAME.jsonl files, where NAME is a domain, domain+domain for "
        "mixed prompts, or others for prompts that no domain should help with. Default: the "
        "validation rows of the store's domains.",
    )
    sources: tuple[LabelledSource, ...] = Field(
        (), description="Data by label, instead of files by name; paths are relative to `data`."
    )
    unseen: tuple[UnseenSource, ...] = Field(
        (),
        description="Data of domains that neither stacks nor router were trained on, to measure "
        "how many gaps are detected. Repeatable.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = output_path("route-evaluate")
    routers: tuple[str, ...] = Field(
        (),
        description="Router files or directories to compare, such as several seeds; the first one "
        "makes the matrix. Default: the store's own. Repeatable.",
    )
    similarity: bool = Field(
        False,
        description="Also compare with an untrained router: the cosine of a prompt to each "
        "domain's mean prompt, from rows that are not measured on.",
    )
    arrow: bool = Field(
        False,
        description="Also compare with Arrow, a router from the weights alone: by the input that "
        "each domain's stacks respond to most (Ostapenko et al. 2024).",
    )
    targets: str | None = Field(
        None,
        description="Output directory of `route discover` for these routers; prompts that they "
        "were trained on are left out. Required if the data here differs. Default: the one named "
        "in the report next to a router, else mlxstacks-out/route-discover.",
    )
    rows_per_group: int = Field(
        100, ge=1, description="Maximum held-out rows per group: a domain, mixed prompts and so on."
    )
    include_trained: bool = Field(
        False, description="Also measure on rows that a router or stack was trained on."
    )
    gap_rows: int = Field(
        50, ge=0, description="Rows per group for the loss test for gaps; 0: no test."
    )
    threshold: float = Field(
        0.01, ge=0, description="Nats by which a domain must lower the loss in that test."
    )
    random_control: bool = Field(
        True, description="Also measure random stacks of equal norm instead of the right ones."
    )
    sample_prompts: int = Field(
        2, ge=0, description="Prompts per domain to answer in the three panels."
    )
    sample_tokens: int = Field(48, ge=1, description="Maximum tokens in such an answer.")
    template: AnswerTemplate = None
    max_tokens: int = Field(256, ge=2, description="Maximum tokens of prompt and answer.")
    draws: int = Field(2000, ge=100, le=1_000_000, description="Bootstrap draws per interval.")
    seed: int = Field(0, ge=0, description="Seed for the bootstrap and for random stacks.")
    resume: bool = Field(
        True, description="Reuse the losses of an unfinished run in this save path."
    )
    force: Force = False


# --- distill --------------------------------------------------------------------------------------


TeacherRoutes = Literal["routed", "dense", "multi-route"]


class DistillSettings(TrainSettings):
    """`mlxstacks distill`: one LoRA that answers as a store's stacks do when they are routed."""

    store_path: str | None = Field(
        None, description="Store directory of the teacher. Default: nano's sample store."
    )
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the student. Default: the store's base.",
    )
    teacher: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the teacher's base. Default: the "
        "store's base.",
    )
    router: RouterPath = None
    data: str | None = Field(
        None,
        description="Directory of NAME.jsonl files, where NAME is a domain, domain+domain for "
        "mixed prompts, or others. Default: the rows of the store's domains.",
    )
    save_path: str | None = Field(
        None, description="Output directory: adapter, report, log. Default: "
        "./mlxstacks-out/distill.",
    )  # fmt: skip
    routes: TeacherRoutes = Field(
        "routed",
        description="Which stacks teach a row. routed: those the router chooses, with its weights; "
        "dense: the same with every expert of a stack, not the top k; multi-route: drawn among "
        "the routes that lower the row's loss.",
    )
    temperature: float = Field(
        2.0, ge=0.05, le=100, description="Temperature of the teacher's and the student's "
        "distributions in the divergence.",
    )  # fmt: skip
    top_logits: int = Field(
        64, ge=1, le=65_536, description="Likeliest tokens kept of a teacher's distribution; the "
        "others count as one.",
    )  # fmt: skip
    max_rise: float = Field(
        0.02, ge=0, description="Largest rise of a domain's validation loss above the start, in "
        "nats per token; weights beyond it are never written.",
    )  # fmt: skip
    rows_per_domain: int = Field(
        2000, ge=2, description="Maximum rows per domain, held-out ones among them."
    )
    template: AnswerTemplate = None
    compile_step: Literal["auto", "on", "off"] = Field(
        "off", description="Steps of distill are not compiled.",
        json_schema_extra={"cli_name": "--compile"},
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_distill(self) -> Self:
        fixed = {"mask_prompt": True, "keep": "best", "compile_step": "off"}
        for key, only in fixed.items():
            if getattr(self, key) != only:
                raise ValueError(f"{key} {getattr(self, key)} is of train; distill takes {only}")
        return self
