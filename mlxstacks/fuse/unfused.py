"""An adapter beside the weights that it was trained for: attached to a loaded model, not fused."""

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.lora_modules import LoraModule
from mlxstacks.fuse.gather import gather_modules
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.affine import Array


def attach_adapters(model: nn.Module, checkpoint: Checkpoint, settings: FuseSettings) -> list[str]:
    """Put `settings.adapter_path` over modules of `model`, which was loaded from `checkpoint`: one
    adapter over the other, in order. Returns notes on the adapters, as the fuse gives them.

    Law: what the model computes is what mlx-lm computes with the adapter, to the bit; with several,
    each adds its delta to the same inputs.
    Raises: AdapterError, CheckpointError: as the fuse, for what does not fit.
    """
    modules, notes = gather_modules(checkpoint, settings)
    for module in modules:
        for _, match in sorted(module.stages.items()):
            base_model.attach_pair(
                model, module.path, match.kind, _pair(match.module), match.module.scale
            )
    model.eval()
    return notes


def _pair(module: LoraModule) -> tuple[mx.array, mx.array]:
    return _as_mlx(module.lora_a, module.dtype), _as_mlx(module.lora_b, module.dtype)


def _as_mlx(raw: Array, dtype: str) -> mx.array:
    array = mx.array(raw)
    return array.view(mx.bfloat16) if dtype == "BF16" else array
