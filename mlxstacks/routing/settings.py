"""Settings of `mlxstacks route` discover, train and gaps, of `chat` and `generate`.

Imports neither mlx nor numpy.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlxstacks.data.settings import DomainData, Template
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.files.settings import PeftLayout
from mlxstacks.settings import Force, ResourceLimit, Settings, output_path

BaseNumbers = Annotated[
    Literal["auto", "stored", "float32"],
    Field(
        description="How the base computes. float32: its stored values in float32, about 20 times "
        "faster on a CPU; auto: float32 on a CPU with enough memory, else stored."
    ),
]
AnswerTemplate = Annotated[
    Template | None,
    Field(description="Prompt template: chat or alpaca. Default: as the store was trained."),
]


class RouteSettings(Settings):
    """A store of stacks, and the base that they belong to."""

    store_path: str | None = Field(
        None, description="Store directory. Default: nano's sample store."
    )
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the base. Default: the store's base.",
    )


# --- discover -------------------------------------------------------------------------------------


SearchName = Literal["greedy", "greedy_first", "exhaustive"]
# Above it, a pair takes more than 64 forward passes.
MOST_EXHAUSTIVE = 6


class LabelledSource(Settings):
    """Prompts with their label. A plain path stands for data of one source."""

    domains: tuple[str, ...] = Field(
        description="label: one domain, several for mixed prompts, none for prompts that no "
        "domain should help with"
    )
    data: DomainData = Field(description="where the rows come from")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.domains)) != len(self.domains):
            raise ValueError(f"domains {', '.join(self.domains)}: one is named twice")
        return self


class OutcomeSettings(RouteSettings):
    """`mlxstacks route discover`: which stacks lower the loss of an answer, prompt by prompt."""

    data: str | None = Field(
        None,
        description="Directory of NAME.jsonl files, where NAME is a domain, domain+domain for "
        "mixed prompts, or others for prompts that no domain should help with. Default: the rows "
        "of the store's domains, held-out ones first.",
    )
    sources: tuple[LabelledSource, ...] = Field(
        (), description="Data by label, instead of files by name; paths are relative to `data`."
    )
    save_path: str | None = output_path("route-discover")
    single_cap: int = Field(2000, ge=1, description="Maximum examples per domain.")
    mixed_cap: int = Field(400, ge=1, description="Maximum examples per pair of domains.")
    shortest_prompt: int = Field(
        1, ge=1, description="Skip prompts with fewer characters than this (published: 15)."
    )
    shortest_answer: int = Field(
        1, ge=1, description="Drop answers with fewer characters than this (published: 6)."
    )
    samples_per_domain: int = Field(
        200, ge=0, description="Examples per domain for outcome discovery."
    )
    mixed_samples: int = Field(0, ge=0, description="The same, per pair of domains.")
    other_samples: int = Field(0, ge=0, description="The same, for prompts that no domain fits.")
    search: SearchName = Field(
        "greedy",
        description="How to search. greedy: make the best addition in each pass; greedy_first: "
        "add within a pass, as published; exhaustive: try every set (at most 6 domains), and "
        "report how far off greedy is.",
    )
    threshold: float = Field(
        0.01, ge=0, description="Nats by which each added domain must lower the loss."
    )
    chat_domain: str | None = Field(
        None, description="Domain that is always on. Default: chat, if the store has it."
    )
    chat_floor: float = Field(
        0.2, ge=0, le=1, description="Minimum chat-domain weight in every run but the base's."
    )
    soft: tuple[str, ...] = Field(
        ("reasoning",),
        description="Domains to add on any improvement, with target 0.5, if the store has them. "
        "Repeatable.",
    )
    label_share: float = Field(0.2, ge=0, le=1, description="Weight of the label in a target.")
    max_tokens: int = Field(256, ge=2, description="Maximum tokens of prompt and answer.")
    template: AnswerTemplate = None
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    random_control: bool = Field(
        False,
        description="Also try a random stack of equal norm for each domain; it is reported, but "
        "never a target.",
    )
    base: BaseNumbers = "auto"
    batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens per batch, padding included; bounds memory. Default: by model width "
        "and device.",
    )
    seed: int = Field(42, ge=0, description="Seed for draws under a cap and for random stacks.")
    resume: bool = Field(True, description="Reuse the losses of an earlier run, finished or not.")
    force: bool = Field(False, description="Replace an existing save path, but keep its losses.")


# --- train ----------------------------------------------------------------------------------------


class RouterTrainSettings(RouteSettings):
    """Train the network that says which domains help with a prompt."""

    targets: str = Field(
        "mlxstacks-out/route-discover", description="Output directory of `route discover`."
    )
    save_path: str | None = output_path("route-train")
    install: bool = Field(
        True, description="Also put the router into the store, replacing the previous one."
    )
    extend: Literal["new", "all"] | None = Field(
        None,
        description="Extend the store's router to domains that it does not know. new: train only "
        "their queries, so that scores of old domains stay identical; all: train everything from "
        "there.",
    )
    hidden_dims: int = Field(512, ge=1, le=65_536, description="Hidden width of the router.")
    epochs: int = Field(8, ge=1, le=1000, description="Passes over the training examples.")
    learning_rate: float = Field(
        8e-4, gt=0, description="Initial learning rate of AdamW, with cosine decay."
    )
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW.")
    batch_size: int = Field(16, ge=1, le=65_536, description="Prompts per batch.")
    clip_norm: float = Field(1.0, gt=0, description="Maximum global gradient norm.")
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout in the two hidden layers.")
    margin_weight: float = Field(
        0.05, ge=0, description="Weight of the loss that pushes scores out of [0.2, 0.8]."
    )
    oracle_only: bool = Field(
        False, description="Use only examples with a discovered outcome, not plain labels."
    )
    labels_only: bool = Field(
        False,
        description="Use each example's label as its target, whatever was discovered: the control "
        "for a router trained on outcomes.",
    )
    discovered_weight: float = Field(
        1.0, gt=0, description="Loss weight of a discovered outcome; a plain label has 1."
    )
    validation_share: float = Field(
        0.1, gt=0, lt=1, description="Share of the groups of similar prompts to hold out."
    )
    validation_groups: int = Field(
        200, ge=1, description="Minimum groups to hold out; ignored if more than half of all."
    )
    max_tokens: int = Field(
        256, ge=1, le=1_000_000, description="Tokens of a prompt that the router sees."
    )
    mid_weight: float = Field(0.45, description="Feature weight of the middle hidden states.")
    last_weight: float = Field(0.55, description="Feature weight of the last hidden states.")
    normalise_features: bool = Field(
        False, description="Divide both hidden states by their RMS before weighting them."
    )
    threshold: float = Field(0.12, ge=0, le=1, description="Weight above which a domain answers.")
    chat_domain: str | None = Field(
        None,
        description="Domain with a minimum weight. Default: as in the targets, else chat if the "
        "store has it.",
    )
    chat_floor: float | None = Field(
        None, ge=0, le=1, description="Its minimum weight. Default: as in the targets, else 0.2."
    )
    base: BaseNumbers = "auto"
    seed: int = Field(
        42, ge=0, lt=2**64, description="Seed for initial weights, dropout, data order and split."
    )
    force: Force = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.labels_only and self.oracle_only:
            raise ValueError("labels_only and oracle_only leave no target: set one of them")
        return self


# --- gaps -----------------------------------------------------------------------------------------


# Where chat and generate write, and `route gaps` reads, unless told otherwise.
DEFAULT_GAP_LOG = "mlxstacks-out/gaps.jsonl"
# As the setting `gap_log`: write none.
NO_GAP_LOG = "none"


class RouteGapsSettings(Settings):
    """Prompts that no domain fits, in groups of like ones; a large group is a domain to train."""

    log_path: str = Field(DEFAULT_GAP_LOG, description="Log of gap events, read only.")
    similarity: float = Field(
        0.8, gt=0, lt=1, description="Cosine similarity above which two prompts are alike."
    )
    centre: bool = Field(
        False,
        description="Subtract the mean of all events first, to separate prompts in a model whose "
        "features all point one way. Cosines are then much lower: on nano try --similarity 0.3.",
    )
    minimum_events: int = Field(
        50, ge=1, description="Minimum events in a group for which to propose a domain."
    )
    samples: int = Field(3, ge=0, description="Prompts to show per group.")


# --- chat and generate ----------------------------------------------------------------------------


MOST_TEMP = 100
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_bytes(value: Any) -> Any:
    """`"2GB"`, `"500 MB"`, `"1.5GiB"` -> bytes; anything that is not text is passed on.

    Raises: ValueError for other text.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{value[:40]!r} is no number of bytes; write 2000000000, 2GB or 500MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


Bytes = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str), Field(ge=1)]


class BaseSettings(Settings):
    """A base and what can stand beside it: of every command that answers."""

    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id. Default: the store's base; without a "
        "store, the built-in nano model.",
    )
    adapter_path: tuple[str, ...] = ()
    peft_layout: PeftLayout | None = Field(
        None, description="Expert layout of a PEFT adapter whose shapes fit two layouts."
    )
    allow_base: bool = Field(
        False, description="Accept an adapter even if its recorded base fingerprint differs."
    )
    store_path: str | None = Field(
        None, description="Store directory. Default: with nano, its sample store."
    )
    router_path: str | None = Field(
        None, description="Router file or directory to use instead of the store's router."
    )
    hard: bool = Field(False, description="Weight routed domains by 1 instead of their score.")
    budget: Bytes | None = Field(
        None,
        description="Memory for stacks, and what else `serve` keeps, such as 2GB or 500MiB; the "
        "least recently used are dropped first. Default: a quarter of the memory.",
        json_schema_extra={"cli_type": "text"},
    )
    base: BaseNumbers = "auto"
    thinking: Thinking = "auto"


class AnswerSettings(BaseSettings):
    """What `chat` and `generate` have in common: the model, its stacks, how tokens are chosen."""

    adapter_path: tuple[str, ...] = Field(
        (),
        description="Adapter directory (mlx-lm or PEFT) to apply to the base without fusing. "
        "Repeat it to add several. Not with a store: its stacks were trained on the bare base.",
    )
    routed: bool = Field(False, description="Let a router decide which stacks answer each prompt.")
    ungated: bool = Field(False, description="Answer with all stacks, each at weight 1.")
    pin: tuple[str, ...] = Field(
        (), description="Domains that answer every prompt, at weight 1. Repeatable."
    )
    compare: bool = Field(
        False, description="Answer with the base, ungated and routed, side by side."
    )
    temp: float = Field(0.0, ge=0, le=MOST_TEMP, description="Sampling temperature; 0: greedy.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the top tokens with this total probability."
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="Drop tokens below this share of the top token's probability."
    )
    top_k: int = Field(0, ge=0, description="Sample from this many top tokens; 0: all.")
    max_tokens: int = Field(256, ge=1, description="Maximum tokens per answer.")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="Penalty on the logits of the last 20 tokens; 1: no penalty."
    )
    json_schema: str | dict[str, Any] | None = Field(
        None,
        json_schema_extra={"cli_type": "text"},
        description="JSON file of a schema: answers are JSON that it allows (by llguidance, of the "
        "extra serve).",
    )
    system_prompt: str | None = Field(None, description="System message for the conversation.")
    allow_special: AllowSpecial = False
    gap_log: str = Field(
        f"./{DEFAULT_GAP_LOG}",
        description="File to log routed prompts that no domain fits; none: no log.",
    )
    seed: int = Field(0, ge=0, lt=2**64, description="Seed for sampling.")

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        asked = [f"--{name}" for name in ("routed", "ungated", "pin") if getattr(self, name)]
        if len(asked) > 1:
            raise ValueError(f"give only one of {', '.join(asked)}")
        if self.adapter_path and (self.store_path or self.wants_store):
            raise ValueError(
                "adapter_path goes with the base alone: a store's stacks were trained on the base "
                "as it is. `mlxstacks stacks import` takes an adapter into a store as a stack; or "
                "fuse the adapter, and train a store on the fused model"
            )
        for name in ("router_path", "hard"):
            if getattr(self, name) and not (self.routed or self.compare):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} is of no use without --routed or --compare")
        return self

    @property
    def wants_store(self) -> bool:
        """Whether an answer needs stacks."""
        return self.routed or self.ungated or bool(self.pin) or self.compare

    @property
    def mode(self) -> Literal["base", "ungated", "routed"]:
        """How a question is answered that names no mode and no domains."""
        return "ungated" if self.ungated else "routed" if self.routed or self.compare else "base"


class ChatSettings(AnswerSettings):
    """`mlxstacks chat`."""

    reroute: Literal["set", "always"] = Field(
        "set",
        description="Weights for a later prompt with the same active domains. set: keep those of "
        "the conversation, so that earlier turns are not read again; always: compute new ones.",
    )


class GenerateSettings(AnswerSettings):
    """`mlxstacks generate`."""

    prompt: str | None = Field(None, description="Prompt; - or nothing: standard input.")
    prompts: str | None = Field(
        None, description="JSONL file of prompts: each row has prompt (text) or messages (a list)."
    )

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("give a prompt or prompts, not both")
        return self


class ServeSettings(BaseSettings):
    """`mlxstacks serve`."""

    adapter_path: tuple[str, ...] = Field(
        (),
        description="Adapter directory (mlx-lm or PEFT) to serve under its name, next to the base "
        "and the store. Repeat it to serve several.",
    )
    host: str = Field(
        "127.0.0.1", description="Address to listen on. Any but this machine's own needs a key."
    )
    port: int = Field(8080, ge=0, le=65_535, description="Port to listen on; 0: any free one.")
    api_key_file: str | None = Field(
        None,
        description="File whose first line is the key that clients have to send. Default: the "
        "environment variable MLXSTACKS_API_KEY; without either, no key.",
    )
    cache_path: str | None = Field(
        None,
        description="Directory to keep beginnings of prompts in, for the next start. It holds what "
        "users wrote. Default: in memory alone.",
    )
    resource_limit: ResourceLimit = None
    concurrency: int = Field(
        16, ge=1, le=256, description="Answers at the same time; further requests are refused."
    )
    max_tokens: int = Field(
        512, ge=1, description="Maximum tokens of an answer whose request gives none."
    )
    most_tokens: int = Field(8192, ge=1, description="Maximum tokens that a request may ask for.")
    most_seconds: float = Field(
        600, gt=0, description="Seconds after which an answer is cut off, as at its most tokens."
    )
    body_bytes: Bytes = Field(
        4_000_000,
        description="Largest body of a request, such as 4MB.",
        json_schema_extra={"cli_type": "text"},
    )
