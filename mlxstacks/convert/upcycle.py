"""Dense models as mixtures of equal experts: the same function, with routers that can be trained.

mlx-lm's mixtral weighs the chosen experts by a softmax over their gates alone: the weights sum to
one, so N copies of an MLP give what the MLP gives, whatever the router says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.convert.conversion import (
    Conversion,
    Part,
    carried_files,
    side_file_notes,
    stored_part,
)
from mlxstacks.errors import CheckpointError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.shards import Chunk
from mlxstacks.files.side_files import copy_side_files
from mlxstacks.ops import affine

_MLP = re.compile(r"(.*\.layers\.\d+)\.mlp\.((?:gate|up|down)_proj)(\..+)?")
# Settings that mixtral takes over, with what else they may be beside it.
_KEPT_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
_GATE_SCALE = 0.02  # of transformers' own initialisation


def stored_conversion(directory: Path) -> Conversion:
    """A dense model's directory as it is: each tensor copied.

    Raises:
        CheckpointError: see `open_checkpoint`; no model to upcycle, or mlx-lm cannot load it.
    """
    checkpoint = open_checkpoint(directory)
    _check_dense(checkpoint.config)
    checkpoint.loaded_weights  # noqa: B018
    side = carried_files(checkpoint)
    return Conversion(
        config=checkpoint.config,
        parts=tuple(map(stored_part, checkpoint.tensors.values())),
        write_files=partial(copy_side_files, directory, files=side),
        notes=side_file_notes(side),
        inputs=(directory, *(header.path for header in checkpoint.headers)),
    )


def upcycled(dense: Conversion, experts: int, top_k: int, seed: int) -> Conversion:
    """A mixtral whose every layer has `experts` copies of the dense MLP, and a random router.

    Codes and scales are those of `dense`; a copy at a time is in memory.
    Law: logits are those of `dense` but for the order of the last sum.

    Raises:
        CheckpointError: the model is no llama, or has what mlx-lm's mixtral cannot do.
    """
    _check_dense(dense.config)
    config = _mixtral_config(dense.config, experts, top_k)
    parts = [_expert_part(part, experts) for part in dense.parts]
    generator = np.random.default_rng(seed)
    dtype = _float_dtype(dense)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        gate = generator.standard_normal((experts, config["hidden_size"]), np.float32)
        parts.append(_gate_part(name, affine.to_storage(_GATE_SCALE * gate, dtype), dtype))
    return replace(dense, config=config, parts=tuple(parts))


def _check_dense(config: dict[str, Any]) -> None:
    """Raises: CheckpointError where mlx-lm's mixtral would compute something else."""
    heads: Any = config.get("num_attention_heads")
    hidden: Any = config.get("hidden_size")
    countable = all(type(size) is int and size > 0 for size in (heads, hidden))
    faults = {
        f"model_type {config.get('model_type')!r}": config.get("model_type") != "llama",
        "rope_scaling": bool(config.get("rope_scaling")),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "layers of sliding_attention": "sliding_attention" in str(config.get("layer_types")),
        "rope_traditional": bool(config.get("rope_traditional")),
        "head_dim that is not hidden_size / num_attention_heads": (
            countable and config.get("head_dim") not in (None, hidden // heads)
        ),
    }
    refused = [fault for fault, there in faults.items() if there]
    if refused:
        raise CheckpointError(
            f"--upcycle takes llama models that mlx-lm's mixtral can compute; this one has "
            f"{', '.join(refused)}"
        )


def _mixtral_config(config: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    kept = {key: config[key] for key in _KEPT_KEYS if key in config}
    mixtral = {
        **kept,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_theta": config.get("rope_theta", 10000.0),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
    }
    quantization = config.get("quantization") or config.get("quantization_config")
    if quantization:
        renamed = {expert_name(key): value for key, value in quantization.items()}
        mixtral |= {"quantization": renamed, "quantization_config": renamed}
    return mixtral


def expert_name(name: str) -> str:
    """The mixtral's name of a dense model's tensor or module."""
    match = _MLP.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}.block_sparse_moe.switch_mlp.{match[2]}{match[3] or ''}"


def _expert_part(part: Part, experts: int) -> Part:
    if not any(_MLP.fullmatch(name) for name, _, _ in part.specs):
        return part

    def chunks() -> Iterator[tuple[str, Chunk]]:
        copy = [(expert_name(name), chunk) for name, chunk in part.chunks()]
        for _ in range(experts):
            yield from copy

    specs = tuple(
        (expert_name(name), dtype, (experts, *shape)) for name, dtype, shape in part.specs
    )
    return replace(part, stored=f"{part.stored}, {experts} copies", specs=specs, chunks=chunks)


def _gate_part(name: str, gate: np.ndarray, dtype: str) -> Part:
    return Part("none", "router, random", ((name, dtype, gate.shape),), lambda: [(name, gate)])


def _float_dtype(conversion: Conversion) -> str:
    """The dtype of the scales or, without any, of the embedding."""
    dtypes = {name: dtype for part in conversion.parts for name, dtype, _ in part.specs}
    scales = next((dtype for name, dtype in dtypes.items() if name.endswith(".scales")), None)
    return scales or dtypes["model.embed_tokens.weight"]
