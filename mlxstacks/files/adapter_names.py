"""Module names of Hugging Face models and of mlx-lm, both ways.

    Llama family       model.layers.N.self_attn.q_proj        the same
    Qwen3.5, Qwen3.5-MoE
      whole model      model.language_model.layers.N.X        language_model.model.layers.N.X
      text model       model.layers.N.X, lm_head              language_model.model.layers.N.X, ...
    experts (any)      ....mlp.experts: gate_up_proj,         ....mlp.switch_mlp.gate_proj,
                       down_proj                              .up_proj, .down_proj

A text-model name does not say which family it is of: `has_language_model` collects the evidence.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

EXPERTS = re.compile(r"^(?P<block>.+\.mlp)\.experts$")
ONE_EXPERT = re.compile(
    r"^(?P<block>.+\.mlp)\.experts\.(?P<expert>\d+)\.(?P<name>gate_proj|up_proj|down_proj)$"
)
# All experts in one tensor of three axes, as Tinker and SGLang name them; w1, w3, w2 are gate, up
# and down.
STACKED_EXPERTS = re.compile(
    r"^(?P<block>.+\.mlp)\.experts\.(?P<name>gate_up_proj|gate_proj|up_proj|down_proj|w[123])$"
)
SWITCH = re.compile(r"^(?P<block>.+\.mlp)\.switch_mlp\.(?P<name>gate_proj|up_proj|down_proj)$")

_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)$")
_ROUTER = re.compile(r"\.mlp\.gate$")
# A gated-delta layer's parts as Qwen3.5 has them; Qwen3-Next has in_proj_qkvz and in_proj_ba.
_QWEN35_PART = re.compile(r"\.linear_attn\.in_proj_(qkv|z|a|b)$")
_QWEN35_NAME = re.compile(r"qwen3[._]5", re.IGNORECASE)


def is_embedding_name(path: str) -> bool:
    """Whether a module of this name is an embedding table (embed_tokens, wte, ...)."""
    return _EMBEDDING.search(path) is not None


def is_router_name(path: str) -> bool:
    """Whether this is the router of a mixture of experts, which transformers 5 keeps as a bare
    parameter `mlp.gate.weight`."""
    return _ROUTER.search(path) is not None


def has_language_model(paths: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm puts these modules under `language_model`, as it does for Qwen3.5.

    paths: module names of a Hugging Face model. config: a PEFT adapter_config.json, which names the
    class or the hub id of the base.
    """
    mapping = config.get("auto_mapping")
    named = [config.get("base_model_name_or_path")]
    named += [mapping.get("base_model_class")] if isinstance(mapping, Mapping) else []
    if any(isinstance(name, str) and _QWEN35_NAME.search(name) for name in named):
        return True
    return any(_QWEN35_PART.search(p) or "language_model." in p for p in paths)


def to_mlx(path: str, language_model: bool) -> str:
    """mlx-lm's name of a Hugging Face module (experts apart: those are split, see `SWITCH`).

    Law: to_mlx(to_hub(p), has_language_model of p) is p for names of either family.
    """
    if path.startswith("model.language_model."):
        return "language_model.model." + path.removeprefix("model.language_model.")
    if language_model and not path.startswith("language_model."):
        return "language_model." + path
    return path


def to_hub(path: str, whole_model: bool = False) -> str:
    """The Hugging Face name of an mlx-lm module (experts apart).

    whole_model: name it as in the whole Qwen3.5 model, not as in its text model; PEFT loads an
    adapter only into the class whose names it has, and leaves out the rest with a warning.
    """
    if path.startswith("language_model.model."):
        prefix = "model.language_model." if whole_model else "model."
        return prefix + path.removeprefix("language_model.model.")
    return path.removeprefix("language_model.")
