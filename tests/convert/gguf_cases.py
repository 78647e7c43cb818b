"""Tiny GGUF files, written with the `gguf` package as llama.cpp's converter would write them.

The names, the order of q and k rows and the keys are undone here by hand, from llama.cpp's own
converter as published.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlxstacks import base_model
from tests.tiny_models import llama_config

HIDDEN, HEADS, KEY_VALUE_HEADS, LAYERS, VOCABULARY = 128, 4, 2, 2, 320
CONTROL, NORMAL = 3, 1
BEGIN, END = 256, 257  # after the 256 bytes

# mlx-lm's module -> llama.cpp's
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
for _part in ("gate", "up", "down"):
    _NAMES[f"mlp.{_part}_proj"] = f"ffn_{_part}"
    for _block in ("mlp", "block_sparse_moe"):
        _NAMES[f"{_block}.switch_mlp.{_part}_proj"] = f"ffn_{_part}_exps"

Tensors = dict[str, np.ndarray]
Kinds = Callable[[str, np.ndarray], str]


def config_of(architecture: str, tied: bool = False) -> dict[str, Any]:
    """mlx-lm's config of a tiny model; `mixtral` is a llama with experts to llama.cpp."""
    config = {**llama_config(HIDDEN, tied), "vocab_size": VOCABULARY, "head_dim": 32}
    experts = {"num_experts_per_tok": 2}
    if architecture == "llama":
        return config
    if architecture == "mixtral":
        return {**config, **experts, "model_type": "mixtral", "num_local_experts": 4}
    if architecture == "qwen3moe":
        moe = {
            "num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "norm_topk_prob": True,
        }  # fmt: skip
        return {**config, **experts, **moe, "model_type": "qwen3_moe"}
    return {**config, "model_type": architecture}


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """mlx-lm's tensors of a config, float32 with values of float16."""
    generator = np.random.default_rng(seed)
    shapes = {
        name: array.shape
        for name, array in tree_flatten(base_model.build_model(dict(config)).parameters())
    }
    return {
        name: (generator.standard_normal(shape) * shape[-1] ** -0.5)
        .astype(np.float16)
        .astype(np.float32)
        for name, shape in shapes.items()
    }


def gguf_name(name: str) -> str:
    """llama.cpp's name of an mlx-lm tensor."""
    module, _, leaf = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if match:
        return f"blk.{match[1]}.{_NAMES[match[2]]}.{leaf}"
    return f"{_NAMES[module]}.{leaf}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows in files of architecture llama."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    kinds: Kinds = lambda name, array: "F32",
    extra: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    tokenizer: bool = True,
    more_tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF file of mlx-lm's tensors.

    kinds: gives each tensor's type by its name in mlx-lm and its values.
    extra: keys to add or replace, without their type where they are text or numbers.
    """
    model_type = config["model_type"]
    architecture = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, architecture)
    keys = (
        _keys(architecture, config) | (_byte_tokenizer() if tokenizer else {}) | dict(extra or {})
    )
    for key, value in keys.items():
        if key not in without:
            add_key(writer, key, value)
    for name, array in tensors.items():
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = HEADS if "q_proj" in name else KEY_VALUE_HEADS
            array = permuted(array, heads)
        kind = gguf.GGMLQuantizationType[kinds(name, array)]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (more_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp's converter gives it."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def dense_values(tensors: Mapping[str, mx.array]) -> Tensors:
    """Float32 values of an mlx-lm directory's tensors, quantized ones by `mx.dequantize`."""
    values = {}
    for name, array in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        scales = tensors.get(f"{module}.scales")
        if leaf == "weight" and scales is not None:
            bits = array.shape[-1] * 32 // (scales.shape[-1] * 32)
            array = mx.dequantize(
                array, *(tensors[f"{module}.{part}"].astype(mx.float32) for part in _GROUP),
                group_size=32, bits=bits,
            )  # fmt: skip
        values[name] = np.array(array.astype(mx.float32))
    return values


_GROUP = ("scales", "biases")


def _keys(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
    }
    if "num_experts_per_tok" in config:
        keys["expert_count"] = 4
        keys["expert_used_count"] = config["num_experts_per_tok"]
    if "moe_intermediate_size" in config:
        keys["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def byte_alphabet() -> list[str]:
    """GPT-2's letter of each byte, by byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in shown}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(shown)))
    return [letters[byte] for byte in range(256)]


def _byte_tokenizer() -> dict[str, Any]:
    """A token a byte, a begin and an end token, "ab", and unused ones to the vocabulary's size."""
    tokens = [*byte_alphabet(), "<|begin|>", "<|end|>", "ab"]
    unused = VOCABULARY - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{n}]" for n in range(unused))],
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [CONTROL] * 2 + [NORMAL] + [5] * unused,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": BEGIN,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }
