"""Checkpoints of one packed weight, and adapters for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.lora_modules import Adapter, LoraModule

PATH = "model.layers.0.self_attn.q_proj"


def one_module(
    directory: Path, shape: tuple[int, ...], grid: tuple[int, int], **quantization: Any
) -> Checkpoint:
    """A checkpoint of one packed weight of `shape` (N, K) or (E, N, K), and its config."""
    bits, group_size = grid
    parts = mx.quantize(mx.random.normal(shape), group_size=group_size, bits=bits)
    named = zip(("weight", "scales", "biases"), parts, strict=True)
    tensors = {f"{PATH}.{leaf}": array for leaf, array in named}
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    (directory / "config.json").write_text(json.dumps({"quantization": quantization}))
    return open_checkpoint(directory)


def adapter_for(*shape: int, path: str = PATH) -> Adapter:
    """An adapter of rank 2 for a weight (N, K) or (E, N, K)."""
    *experts, rows, width = shape
    if experts:
        a, b = np.zeros((*experts, 2, width), np.float32), np.zeros((*experts, rows, 2), np.float32)
    else:
        a, b = np.zeros((width, 2), np.float32), np.zeros((2, rows), np.float32)
    return Adapter(Path("a"), {}, {path: LoraModule(path, a, b, "F32", 1.0)}, {})


def edited(checkpoint: Checkpoint, name: str, **changes: Any) -> Checkpoint:
    info = replace(checkpoint.tensors[name], **changes)
    return replace(checkpoint, tensors=checkpoint.tensors | {name: info})
