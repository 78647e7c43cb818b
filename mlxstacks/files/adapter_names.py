"""Module names of Hugging Face models and of mlx-lm, both ways.

    Llama family       model.layers.N.self_attn.q_proj        the same
    Qwen3.5, Qwen3.5-MoE
      whole model      model.language_model.layers.N.X        language_model.model.layers.N.X
      text model       model.layers.N.X, lm_head              language_model.model.layers.N.X, ...
    experts (any)      ....mlp.experts: gate_up_proj,         ....mlp.switch_mlp.gate_proj,
                       down_proj                              .up_proj, .down_proj
    Mixtral            ....mlp.experts, ....mlp.gate;         ....block_sparse_moe.switch_mlp,
                       before transformers 5                  ....block_sparse_moe.gate
                       ....block_sparse_moe.experts.0.w1

A text-model name does not say which family it is of: `has_language_model` collects the evidence.
Where the model is at hand, its own modules decide (`in_model`).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

EXPERTS = re.compile(r"^(?P<block>.+)\.experts$")
ONE_EXPERT = re.compile(
    r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<name>gate_proj|up_proj|down_proj|w[123])$"
)
# All experts in one tensor of three axes, as Tinker and SGLang name them.
STACKED_EXPERTS = re.compile(
    r"^(?P<block>.+)\.experts\.(?P<name>gate_up_proj|gate_proj|up_proj|down_proj|w[123])$"
)
EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
SWITCH = re.compile(r"^(?P<block>.+)\.switch_mlp\.(?P<name>gate_proj|up_proj|down_proj)$")
# What transformers 5 calls `mlp`.
OLD_BLOCK = "block_sparse_moe"
_OLD_BLOCK = re.compile(rf"\.{OLD_BLOCK}(?=\.|$)")

# Where mlx-lm's `sanitize` finds the text model, and where its classes keep it.
_TEXT_PREFIX = re.compile(r"^(model\.|backbone\.)?(language_model\.)?(model\.)?")
# deepseek_v41 keeps the stacked experts in `mlp.experts`.
_EXPERTS_OF_SWITCH = re.compile(r"\.experts(?=\.switch_mlp\.)")
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


def text_name(path: str) -> str:
    """What all names of one module of a text model have in common: of Hugging Face's versions, its
    whole and text models, and mlx-lm's class. Names of other towers and heads keep their prefix.

    Law: text_name(to_mlx(p)) is text_name(p), and so it is of to_hub(p).
    """
    name = _EXPERTS_OF_SWITCH.sub("", _TEXT_PREFIX.sub("", path))
    return _OLD_BLOCK.sub(".mlp", name)


def in_model(paths: Iterable[str], modules: Collection[str]) -> list[str]:
    """The module that each path names, which may be of another version or wrapping of the model;
    the path itself where that is one, or none or several are meant.
    """
    known, by_name = set(modules), dict[str, list[str]]()
    for module in modules:
        by_name.setdefault(text_name(module), []).append(module)

    def module_of(path: str) -> str:
        same = [path] if path in known else by_name.get(text_name(path), [])
        return same[0] if len(same) == 1 else path

    return [module_of(path) for path in paths]


def to_hub(path: str, whole_model: bool = False, model_type: str | None = None) -> str:
    """The name of an mlx-lm module (experts apart) in transformers 5.

    whole_model: name it as in the whole Qwen3.5 model, not as in its text model; PEFT loads an
    adapter only into the class whose names it has, and leaves out the rest with a warning.
    model_type: of the model's config, where known: Granite keeps `block_sparse_moe`.
    """
    if not (model_type or "").startswith("granitemoe"):
        path = _OLD_BLOCK.sub(".mlp", path)
    if path.startswith("language_model.model."):
        prefix = "model.language_model." if whole_model else "model."
        return prefix + path.removeprefix("language_model.model.")
    return path.removeprefix("language_model.")
