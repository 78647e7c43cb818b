"""Settings of `mlxstacks chat` and `mlxstacks generate`. Imports neither mlx nor numpy."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.files.settings import PeftLayout
from mlxstacks.settings import Settings

MOST_TEMP = 100
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_bytes(value: Any) -> Any:
    """`"2GB"`, `"500 MB"`, `"1.5GiB"` -> bytes; anything that is not text is passed on.

    Raises: ValueError for other text.
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", value)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{value[:40]!r} is no number of bytes; write 2000000000, 2GB or 500MiB")
    return int(float(found[1]) * _UNITS[found[2].lower()])


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
        description="Adapter directory (mlx-lm or PEFT), beside the base and not fused. Repeat it "
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
        "./mlxstacks-out/gaps.jsonl",
        description="Where routed prompts that no domain fits are noted; none: nowhere.",
    )
    base: Literal["auto", "stored", "float32"] = Field(
        "auto",
        description="Numbers the base computes with. float32: its stored values, some 20 times "
        "faster on a CPU; auto: that, on a CPU with the memory for it.",
    )
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
