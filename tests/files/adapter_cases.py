"""Edits of mlx-lm adapters, for several test files."""

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

Q_PROJ = "model.layers.0.self_attn.q_proj"


def edited(source: Path, target: Path, edit: Callable[[dict, dict], None]) -> Path:
    """A copy of an adapter with `edit(tensors, config)` applied."""
    tensors = mx.load(str(source / "adapters.safetensors"))
    config = json.loads((source / "adapter_config.json").read_text())
    assert isinstance(tensors, dict)
    edit(tensors, config)
    target.mkdir(parents=True)
    mx.save_safetensors(str(target / "adapters.safetensors"), tensors)
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target
