"""Settings of the modes that benchmarks compare. Imports neither mlx nor numpy."""

from typing import Literal

from pydantic import Field

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.settings import Settings

ArmName = Literal["base", "adapter", "fused", "ungated", "routed", "oracle", "random"]
# Those of one line share a model, loaded once.
STORE_ARMS: tuple[ArmName, ...] = ("ungated", "routed", "oracle", "random")
ADAPTER_ARMS: tuple[ArmName, ...] = ("adapter", "fused")
ARMS: tuple[ArmName, ...] = ("base", *ADAPTER_ARMS, *STORE_ARMS)


class ArmSettings(Settings):
    """A model, what changes it, and how it is asked."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the base of the store."
    )
    adapter_path: str | None = Field(
        None,
        description="Adapter (mlx-lm or PEFT): beside the base in arm adapter, in it in fused.",
    )
    store_path: str | None = Field(
        None, description="Store of stacks of the arms ungated, routed, oracle and random."
    )
    router_path: str | None = Field(
        None, description="Router to use instead of the store's own: its file or directory."
    )
    requant: PolicyName = Field(
        "auto", description="How arm fused puts the adapter into quantized weights (see fuse)."
    )
    hard: bool = Field(False, description="Routed domains count 1 instead of their score.")
    chat: Literal["none", "generate", "all"] = Field(
        "generate",
        description="Prompts that the model's chat template is put around: those answered in text, "
        "all (contexts of candidates too, which then lose their leading blank: an assistant's turn "
        "begins without one), or none.",
    )
    system_prompt: str | None = Field(
        None, description="Said before each prompt that goes through the chat template."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    base: Literal["auto", "stored", "float32"] = Field(
        "auto",
        description="Numbers the base computes with. float32: its stored values, some 20 times "
        "faster on a CPU; auto: that, on a CPU with the memory for it.",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        description="Most tokens of a prompt (with a candidate, of both); longer prompts lose "
        "their beginning and are marked. Default: what the model was made for.",
    )
    batch_size: int = Field(64, ge=1, description="Most candidates that are scored at once.")
    reference_offset: bool = Field(
        False,
        description="Score as the published script did: the first token of a candidate is left "
        "out, so one of one token gets 0 and wins. For comparison alone.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Divides the logits of the last 20 tokens; 1: no penalty (published: 1.2).",
    )
    seed: int = Field(0, ge=0, lt=2**64, description="Seed of the random stacks.")
