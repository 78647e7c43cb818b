"""Tiny checkpoints as the hub holds them: unquantized, in the names and layouts of transformers.

Shapes come from mlx-lm's classes; each architecture's layout is undone by hand here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxstacks import base_model
from tests.tiny_models import (
    END_OF_TEXT,
    NUM_LAYERS,
    VOCAB_SIZE,
    llama_config,
    qwen_moe_config,
    save_sharded,
    write_tokenizer,
)

Tensors = dict[str, mx.array]
Shapes = Mapping[str, tuple[int, ...]]
_PROJECTIONS = ("gate", "up", "down")
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def _random(shapes: Shapes) -> Tensors:
    key = mx.random.key(0)
    tensors = {}
    for name, shape in shapes.items():
        key, draw = mx.random.split(key)
        numbers = mx.random.normal(shape, key=draw)
        tensors[name] = numbers if name.endswith("A_log") else numbers.astype(mx.bfloat16)
    return tensors


def _mlx_shapes(config: dict[str, Any]) -> Shapes:
    return {
        name: array.shape
        for name, array in tree_flatten(base_model.build_model(config).parameters())
    }


def _same(tensors: Tensors) -> Tensors:
    return tensors


def _experts_apart(names: Sequence[str]) -> Callable[[Tensors], Tensors]:
    """`switch_mlp.gate_proj.weight` (E, N, K) as E tensors `experts.0.<name>.weight` (N, K).

    names: of gate, up and down.
    """
    hub_names = dict(zip(_PROJECTIONS, names, strict=True))

    def apart(tensors: Tensors) -> Tensors:
        hub: Tensors = {}
        for name, array in tensors.items():
            if match := re.fullmatch(r"(.*)\.switch_mlp\.(\w+)_proj\.weight", name):
                for expert, part in enumerate(array):
                    hub[f"{match[1]}.experts.{expert}.{hub_names[match[2]]}.weight"] = part
            else:
                hub[name] = array
        return hub

    return apart


def _qwen3_5(tensors: Tensors) -> Tensors:
    """Convolutions (C, 1, width); experts' gate and up in one tensor (E, 2N, K)."""
    hub: Tensors = {}
    for name, array in tensors.items():
        name = name.replace("language_model.model.", "model.language_model.")
        name = name.removeprefix("language_model.")
        hub[name] = array.moveaxis(2, 1) if name.endswith("conv1d.weight") else array
    for mlp in [name.split(".switch_mlp.")[0] for name in hub if "switch_mlp.gate_proj" in name]:
        gate, up, down = (hub.pop(f"{mlp}.switch_mlp.{n}_proj.weight") for n in _PROJECTIONS)
        hub[f"{mlp}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        hub[f"{mlp}.experts.down_proj"] = down
    return hub


def _fp8(tensors: Tensors) -> Tensors:
    """deepseek_v3: projections in FP8 with a scale for 128 x 128 blocks, MLA's kv_b_proj whole."""
    hub = _experts_apart(_EXPERT_NAMES)(tensors)
    for layer in range(NUM_LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        keys = hub.pop(f"{attention}.embed_q.weight").swapaxes(1, 2)  # (H, nope, rank)
        values = hub.pop(f"{attention}.unembed_out.weight")  # (H, v, rank)
        both = mx.concatenate([keys, values], axis=1)
        hub[f"{attention}.kv_b_proj.weight"] = both.reshape(-1, both.shape[-1])
    for name in [n for n in hub if n.endswith("_proj.weight")]:
        rows, columns = hub[name].shape
        hub[name + "_scale_inv"] = mx.full((-(-rows // 128), -(-columns // 128)), 0.0625)
        hub[name] = mx.to_fp8(hub[name])
    return hub


_VISION = {"patch_embed.proj.weight": (16, 3, 2, 4, 4), "blocks.0.norm1.weight": (16,)}
_MTP = {"fc.weight": (128, 256), "layers.0.input_layernorm.weight": (128,), "norm.weight": (128,)}


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


_VISION_AND_MTP = {**_prefixed("model.visual.", _VISION), **_prefixed("mtp.", _MTP)}


def _moe(model_type: str, **more: Any) -> dict[str, Any]:
    return llama_config() | {"model_type": model_type, **HEADS} | more


_QWEN3_MOE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
_HYBRID = qwen_moe_config()["text_config"]
_QWEN3_NEXT = {
    **_QWEN3_MOE,
    **{key: value for key, value in _HYBRID.items() if key.startswith("linear_")},
    "shared_expert_intermediate_size": 64,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 2,
}
_DEEPSEEK = {
    "n_shared_experts": 1, "n_routed_experts": 2, "moe_intermediate_size": 64,
    "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "qk_nope_head_dim": 64, "num_key_value_heads": 4,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def _gemma3() -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
    }
    return {
        "model_type": "gemma3",
        "text_config": llama_config() | HEADS | text,
        "vision_config": {"hidden_size": 16},
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": END_OF_TEXT,
    }


def _qwen3_5_dense() -> dict[str, Any]:
    config = qwen_moe_config() | {"model_type": "qwen3_5", "vision_config": {"depth": 1}}
    config["text_config"] |= {"num_experts": 0, "intermediate_size": 256, "dtype": "bfloat16"}
    return config


# name -> (config, layout of the hub, tensors that mlx-lm has no use for)
CASES: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors], Shapes]] = {
    "llama": (
        llama_config() | {"torch_dtype": "float16"},
        _same,
        {"model.layers.0.self_attn.rotary_emb.inv_freq": (16,)},
    ),
    "llama-tied": (llama_config(tied=True), _same, {"lm_head.weight": (VOCAB_SIZE, 128)}),
    "qwen2": (llama_config() | {"model_type": "qwen2"}, _same, {}),
    "qwen3": (llama_config() | {"model_type": "qwen3", **HEADS}, _same, {}),
    "qwen3_moe": (_moe("qwen3_moe", **_QWEN3_MOE), _experts_apart(_EXPERT_NAMES), {}),
    "qwen3_next": (
        _moe("qwen3_next", **_QWEN3_NEXT), _experts_apart(_EXPERT_NAMES), _prefixed("mtp.", _MTP),
    ),
    "mixtral": (
        _moe("mixtral", num_local_experts=2, num_experts_per_tok=2),
        _experts_apart(("w1", "w3", "w2")),
        {},
    ),
    "qwen3_5": (_qwen3_5_dense(), _qwen3_5, _VISION_AND_MTP),
    "qwen3_5_moe": (
        qwen_moe_config() | {"vision_config": {"depth": 1}}, _qwen3_5, _VISION_AND_MTP,
    ),
    "gemma3": (
        _gemma3(),
        _same,
        {
            **_prefixed("vision_tower.vision_model.", _VISION),
            "multi_modal_projector.mm_input_projection_weight": (16, 128),
        },
    ),
    "deepseek_v3-fp8": (
        _moe("deepseek_v3", **_DEEPSEEK), _fp8, _prefixed("model.layers.61.", _MTP),
    ),
}  # fmt: skip


def write_hub_model(directory: Path, name: str, shards: int = 2) -> tuple[Path, Tensors]:
    """The case `name` in files; returns the directory and all of its tensors."""
    config, layout, unused = CASES[name]
    tensors = layout(_random(_mlx_shapes(config))) | _random(unused)
    directory.mkdir()
    save_sharded(directory, tensors, shards)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory, tensors
