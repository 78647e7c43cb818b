"""Architectures of GGUF files as mlx-lm knows them: names of tensors, `config.json`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlxstacks.convert.gguf_file import GGUFFile
from mlxstacks.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Keys of an architecture that are read below, or that change nothing.
_KNOWN_KEYS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "tensor_data_layout",
}  # fmt: skip

# Llama 3.1 and 3.2: what their rope_freqs tensors were made with, the factor aside.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Architecture:
    """One file's architecture: `module_of` for names, `config` for mlx-lm.

    Raises:
        CheckpointError: an unknown architecture, a missing key, a setting that mlx-lm's class of
            that name does not have.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name = file.value("general.architecture", str)
        if self.name not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {self.name!r}; known: {', '.join(ARCHITECTURES)}. "
                "Convert the original checkpoint instead"
            )
        prefix = f"{self.name}."
        self.keys = {
            key.removeprefix(prefix): value
            for key, value in file.fields.items()
            if key.startswith(prefix)
        }
        unknown = sorted(self.keys.keys() - _KNOWN_KEYS)
        if unknown:
            listed = ", ".join(prefix + key for key in unknown)
            raise CheckpointError(
                f"{file.path}: {listed}: not known here, and leaving it out could change the model"
            )
        self.experts = self._count("expert_count", 0)
        self.model_type = {"qwen3moe": "qwen3_moe"}.get(self.name, self.name)
        if self.name == "llama" and self.experts:
            self.model_type = "mixtral"
        self.heads = self._count("attention.head_count")
        self.key_value_heads = self._count("attention.head_count_kv", self.heads)
        self.layers = self._count("block_count")
        if self.layers > len(file.tensors):
            raise CheckpointError(
                f"{file.path}: {self.name}.block_count is {self.layers:,}, and there are "
                f"{len(file.tensors)} tensors"
            )
        self.hidden = self._count("embedding_length")
        self.head_dim = self._head_dim()
        self._blocks = self._block_names()

    @property
    def interleaved(self) -> bool:
        """Whether q and k rows are stored for a rope over neighbours, not over halves."""
        return self.name == "llama"

    def module_of(self, name: str) -> str | None:
        """mlx-lm's name of a tensor, `.weight` or `.bias` included; None where it is no part of it.

        Raises:
            CheckpointError: no tensor of this architecture.
        """
        if name == "rope_freqs.weight":
            return None
        outer, _, part = name.rpartition(".")
        if outer in _OUTER and part in ("weight", "bias"):
            return f"{_OUTER[outer]}.{part}"
        match = _BLOCK_NAME.fullmatch(name)
        if match and int(match[1]) < self.layers and match[2] in self._blocks:
            return f"model.layers.{match[1]}.{self._blocks[match[2]]}.{match[3]}"
        raise CheckpointError(
            f"{self.file.path}: tensor {name!r} belongs to no {self.model_type} that mlx-lm knows"
        )

    def check_complete(self) -> None:
        """Raises: CheckpointError listing tensors that are needed and not in the file."""
        needed = ["token_embd.weight", "output_norm.weight"]
        needed += [f"blk.{n}.{name}.weight" for n in range(self.layers) for name in self._blocks]
        missing = [name for name in needed if name not in self.file.tensors]
        if missing:
            shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
            raise CheckpointError(f"{self.file.path}: {len(missing)} tensors are missing: {shown}")

    def config(self) -> dict[str, Any]:
        """`config.json` without `quantization`; end and begin of text as the tokenizer has them."""
        vocabulary, *width = self.file.tensors["token_embd.weight"].shape
        if width != [self.hidden]:
            raise CheckpointError(
                f"{self.file.path}: token_embd.weight has rows of "
                f"{' x '.join(map(str, width)) or 'no numbers'}, "
                f"{self.name}.embedding_length is {self.hidden}"
            )
        tokens = self.file.fields.get("tokenizer.ggml.tokens", ())
        if len(tokens) > vocabulary:
            raise CheckpointError(
                f"{self.file.path}: {len(tokens)} tokens, but token_embd.weight has only "
                f"{vocabulary} rows"
            )
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self._count("feed_forward_length"),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "vocab_size": vocabulary,
            "max_position_embeddings": self._count("context_length"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
        }
        config |= self._rope_scaling()
        config |= self._biases()
        config |= self._expert_settings()
        return config

    def _block_names(self) -> Mapping[str, str]:
        norms = _HEAD_NORMS if self.name in ("qwen3", "qwen3moe") else {}
        if not self.experts:
            return _ATTENTION | norms | _DENSE
        block = "block_sparse_moe" if self.model_type == "mixtral" else "mlp"
        moe = {"ffn_gate_inp": f"{block}.gate"}
        for name in ("gate", "up", "down"):
            moe[f"ffn_{name}_exps"] = f"{block}.switch_mlp.{name}_proj"
        return _ATTENTION | norms | moe

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.keys.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.file.path}: key {self.name}.{key} is missing")
        if type(value) is not int or not (1 <= value < 1 << 31 or value == default):
            raise CheckpointError(
                f"{self.file.path}: key {self.name}.{key} is {value!r}; one whole number is needed"
            )
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal of a stored float32: 1e-05, not 9.999999747378752e-06."""
        value = self.file.value(f"{self.name}.{key}", float, default)
        if value is None or not 0 < value < math.inf:
            raise CheckpointError(
                f"{self.file.path}: key {self.name}.{key} is {value}; a number above 0 is needed"
            )
        return float(str(np.float32(value)))

    def _head_dim(self) -> int:
        default = self.hidden // self.heads
        head_dim = self._count("attention.key_length", default)
        same = {
            "attention.value_length": self._count("attention.value_length", head_dim),
            "rope.dimension_count": self._count("rope.dimension_count", head_dim),
        }
        if self.model_type in ("qwen2", "mixtral"):
            same["embedding_length / attention.head_count"] = default
        if head_dim < 2 or head_dim % 2:
            raise CheckpointError(f"{self.file.path}: heads of {head_dim}; an even size is needed")
        for key, value in same.items():
            if value != head_dim:
                raise CheckpointError(
                    f"{self.file.path}: heads of {head_dim}, but {self.name}.{key} is {value}; "
                    f"mlx-lm's {self.model_type} needs them equal"
                )
        return head_dim

    def _biases(self) -> dict[str, Any]:
        names = self.file.tensors
        attention = [f"blk.0.attn_{part}.bias" in names for part in ("q", "k", "v", "output")]
        dense = [f"blk.0.ffn_{part}.bias" in names for part in ("gate", "up", "down")]
        fixed = [True, True, True, False] if self.name == "qwen2" else None
        if self.model_type == "llama" and len(set(attention)) == len(set(dense)) == 1:
            return {"attention_bias": attention[0], "mlp_bias": dense[0]}
        if attention == (fixed or [False] * 4) and not any(dense):
            return {}
        raise CheckpointError(
            f"{self.file.path}: mlx-lm's {self.model_type} has no biases as in this file"
        )

    def _expert_settings(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        used = self._count("expert_used_count")
        if used > self.experts:
            raise CheckpointError(
                f"{self.file.path}: {self.name}.expert_used_count is {used}, and there are "
                f"{self.experts} experts"
            )
        if self.model_type == "mixtral":
            return {"num_local_experts": self.experts, "num_experts_per_tok": used}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": used,
            "moe_intermediate_size": self._count("expert_feed_forward_length"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            # llama.cpp divides the weights of the chosen experts by their sum
            "norm_topk_prob": True,
        }

    def _rope_scaling(self) -> dict[str, Any]:
        scaling = self._llama3_scaling() or self._named_scaling()
        if scaling and self.model_type in ("mixtral", "qwen3_moe"):
            raise CheckpointError(
                f"{self.file.path}: rope scaling, which mlx-lm's {self.model_type} would ignore"
            )
        return {"rope_scaling": scaling} if scaling else {}

    def _named_scaling(self) -> dict[str, Any] | None:
        kind = self.file.value(f"{self.name}.rope.scaling.type", str, "none")
        factor = self._number("rope.scaling.factor", 1.0)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            original = self._count("rope.scaling.original_context_length")
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        raise CheckpointError(
            f"{self.file.path}: rope scaling {kind!r}; known: none, linear, yarn, Llama 3's"
        )

    def _llama3_scaling(self) -> dict[str, Any] | None:
        """Llama 3's scaling, stored as a divisor for each frequency; its factor is the largest."""
        tensor = self.file.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        if tensor.kind != "F32" or tensor.shape != (self.head_dim // 2,):
            raise CheckpointError(f"{self.file.path}: rope_freqs.weight has {tensor.shape} numbers")
        divisors = self.file.read(tensor).view("<f4").reshape(-1)
        if not (divisors > 0).all():
            raise CheckpointError(
                f"{self.file.path}: rope_freqs.weight holds divisors that are not above 0"
            )
        scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3_ROPE}
        expected = llama3_divisors(scaling, self.head_dim, self._number("rope.freq_base", 10000.0))
        if not np.allclose(divisors, expected, rtol=1e-4):
            raise CheckpointError(
                f"{self.file.path}: rope_freqs.weight is not Llama 3's scaling by any factor"
            )
        return scaling


def llama3_divisors(scaling: Mapping[str, Any], head_dim: int, theta: float) -> np.ndarray:
    """What Llama 3's rope scaling divides each frequency by, (head_dim / 2,) float64."""
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / (smooth + (1 - smooth) / scaling["factor"])
