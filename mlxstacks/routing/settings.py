"""Settings of `mlxstacks route` discover, train and gaps, of `chat` and `generate`.

Imports neither mlx nor numpy.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlxstacks.data.settings import DomainDataSettings, Template
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.files.settings import PeftLayout
from mlxstacks.settings import Force, Settings

BaseNumbers = Annotated[
    Literal["auto", "stored", "float32"],
    Field(
        description="Numbers the base computes with; float32: its stored values, some 20 times "
        "faster on a CPU; auto: that, on a CPU with the memory for it."
    ),
]
AnswerTemplate = Annotated[
    Template | None,
    Field(description="chat or alpaca. Default: what the store's domains were trained with."),
]


class RouteSettings(Settings):
    """A store of stacks, and the base that they belong to."""

    store_path: str | None = Field(
        None, description="Directory of the store. Default: nano's sample store."
    )
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the base. Default: what the store "
        "names.",
    )


# --- discover -------------------------------------------------------------------------------------


SearchName = Literal["greedy", "greedy_first", "exhaustive"]
# Above it, a pair takes more than 64 forward passes.
MOST_EXHAUSTIVE = 6


class LabelledSource(Settings):
    """Prompts with their label. A plain path stands for data of one source."""

    domains: tuple[str, ...] = Field(
        description="the label: one domain, several for mixed prompts, none for prompts that no "
        "domain should help with"
    )
    data: Annotated[
        DomainDataSettings,
        BeforeValidator(
            lambda value: {"sources": [value]} if isinstance(value, str) else value,
            json_schema_input_type=DomainDataSettings | str,
        ),
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
    template: AnswerTemplate = None
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    random_control: bool = Field(
        False,
        description="Try, next to each domain, a random stack of equal norm; reported, never a "
        "target.",
    )
    base: BaseNumbers = "auto"
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


# --- train ----------------------------------------------------------------------------------------


class RouterTrainSettings(RouteSettings):
    """Train the network that says which domains help with a prompt."""

    targets: str = Field(
        "mlxstacks-out/route-discover", description="Directory that `route discover` wrote."
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/route-train."
    )
    install: bool = Field(
        True, description="Put the router into the store too, in place of the one before."
    )
    extend: Literal["new", "all"] | None = Field(
        None,
        description="Start from the store's router, for domains that it does not know: new trains "
        "nothing but their queries, so that old domains keep their scores to the bit; all trains "
        "everything from there.",
    )
    hidden_dims: int = Field(512, ge=1, le=65_536, description="Width of the router.")
    epochs: int = Field(8, ge=1, le=1000, description="Passes over the training examples.")
    learning_rate: float = Field(
        8e-4, gt=0, description="Of AdamW in the first epoch; falls along a cosine."
    )
    weight_decay: float = Field(0.01, ge=0, description="Of AdamW.")
    batch_size: int = Field(16, ge=1, le=65_536, description="Prompts in a batch.")
    clip_norm: float = Field(1.0, gt=0, description="Largest joint norm of a step's gradients.")
    dropout: float = Field(0.1, ge=0, lt=1, description="In the two hidden layers.")
    margin_weight: float = Field(
        0.05, ge=0, description="Of the loss that pushes scores out of 0.2 to 0.8."
    )
    oracle_only: bool = Field(
        False, description="Use only examples whose outcome was discovered, no plain labels."
    )
    labels_only: bool = Field(
        False,
        description="Take the label of every example for its target, whatever was discovered: the "
        "control of a router trained on outcomes.",
    )
    discovered_weight: float = Field(
        1.0, gt=0, description="How much such an example counts in the loss; a plain label: 1."
    )
    validation_share: float = Field(
        0.1, gt=0, lt=1, description="Share of the groups of like prompts that is held out."
    )
    validation_groups: int = Field(
        200,
        ge=1,
        description="Groups that are held out at least, where they are no more than half of all.",
    )
    max_tokens: int = Field(
        256, ge=1, le=1_000_000, description="The router sees so many tokens of a prompt."
    )
    mid_weight: float = Field(0.45, description="Of the hidden states half-way, in the features.")
    last_weight: float = Field(0.55, description="Of the last hidden states, in the features.")
    normalise_features: bool = Field(
        False, description="Bring both hidden states to one scale before they are weighted."
    )
    threshold: float = Field(
        0.12, ge=0, le=1, description="A domain answers where its weight is above this."
    )
    chat_domain: str | None = Field(
        None,
        description="Domain whose weight has a floor. Default: as in the targets, else chat where "
        "the store has it.",
    )
    chat_floor: float | None = Field(
        None, ge=0, le=1, description="That floor. Default: as in the targets, else 0.2."
    )
    base: BaseNumbers = "auto"
    seed: int = Field(
        42, ge=0, lt=2**64, description="Of first weights, dropout, order of examples, and split."
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

    log_path: str = Field(DEFAULT_GAP_LOG, description="Log of gap events; it is only read.")
    similarity: float = Field(
        0.8, gt=0, lt=1, description="Cosine above which two prompts are alike."
    )
    centre: bool = Field(
        False,
        description="Take the mean of all events off first: tells prompts apart in a model whose "
        "features all point one way. Cosines are then far lower: on nano try --similarity 0.3.",
    )
    minimum_events: int = Field(
        50, ge=1, description="Events of a group from which a domain is proposed."
    )
    samples: int = Field(3, ge=0, description="Prompts shown of a group.")


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


class AnswerSettings(Settings):
    """What `chat` and `generate` have in common: the model, its stacks, how tokens are chosen."""

    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id. Default: the base of the store; without "
        "one the built-in nano model.",
    )
    adapter_path: tuple[str, ...] = Field(
        (),
        description="Adapter directory (mlx-lm or PEFT), next to the base and not fused. Repeat it "
        "for several, whose changes add up. Not with a store: its stacks know the bare base.",
    )
    peft_layout: PeftLayout | None = Field(
        None, description="Expert layout of a PEFT adapter whose shapes fit two layouts."
    )
    allow_base: bool = Field(
        False, description="Take an adapter whose recorded fingerprint is not this base's."
    )
    store_path: str | None = Field(
        None, description="Store of stacks. Default: with nano its sample store."
    )
    router_path: str | None = Field(
        None, description="Router to use instead of the store's own: its file or directory."
    )
    routed: bool = Field(False, description="A router decides for each prompt which stacks answer.")
    ungated: bool = Field(False, description="All stacks answer, each at weight 1.")
    pin: tuple[str, ...] = Field(
        (), description="Domains that answer at weight 1, whatever the prompt. Repeatable."
    )
    compare: bool = Field(
        False, description="Answer with the base, ungated and routed, side by side."
    )
    hard: bool = Field(False, description="Routed domains count 1 instead of their score.")
    budget: Bytes | None = Field(
        None,
        description="Memory for stacks, as 2GB or 500MiB; the least recently used go first. "
        "Default: a quarter of the memory.",
        json_schema_extra={"cli_type": "text"},
    )
    temp: float = Field(0.0, ge=0, le=MOST_TEMP, description="Temperature; 0: the likeliest token.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Draw from the likeliest tokens with this share of all."
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="Drop tokens with less than this share of the likeliest's."
    )
    top_k: int = Field(0, ge=0, description="Draw from this many likeliest tokens; 0: from all.")
    max_tokens: int = Field(256, ge=1, description="Most tokens of an answer.")
    repetition_penalty: float = Field(
        1.0, gt=0, le=100, description="Divides the logits of the last 20 tokens; 1: no penalty."
    )
    system_prompt: str | None = Field(None, description="Said to the model before anything else.")
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    gap_log: str = Field(
        f"./{DEFAULT_GAP_LOG}",
        description="Where routed prompts that no domain fits are noted; none: nowhere.",
    )
    base: BaseNumbers = "auto"
    seed: int = Field(0, ge=0, lt=2**64, description="Seed of what is drawn with a temperature.")

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        asked = [name for name in ("routed", "ungated", "pin") if getattr(self, name)]
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
                raise ValueError(f"{name} is of no use without routed or compare")
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
        description="Weights of a later prompt with the same active domains. set: those the "
        "conversation has, so that what was read before is not read again; always: new ones.",
    )


class GenerateSettings(AnswerSettings):
    """`mlxstacks generate`."""

    prompt: str | None = Field(None, description="The prompt; - or nothing: standard input.")
    prompts: str | None = Field(
        None, description="JSONL file of prompts: a row has prompt (text) or messages (a list)."
    )

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("give a prompt or prompts, not both")
        return self
