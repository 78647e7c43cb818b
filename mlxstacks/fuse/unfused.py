"""An adapter beside the weights that it was trained for: attached to a loaded model, not fused."""

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.fuse.gather import gather_modules
from mlxstacks.fuse.in_memory import check_places
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.affine import Array


def attach_adapters(
    model: nn.Module, checkpoint: Checkpoint, settings: FuseSettings, dtype: mx.Dtype | None = None
) -> list[str]:
    """Put `settings.adapter_path` over modules of `model`, which was loaded from `checkpoint`: one
    adapter over the other, in order. Returns notes on the adapters, as the fuse gives them.

    dtype: that the pairs compute in, as in `prepare_base`; None: their own.
    Law: what the model computes is what mlx-lm computes with the adapter, to the bit; with several,
    each adds its delta to the same inputs.
    Raises: AdapterError, CheckpointError: as the fuse, for what does not fit; the model has LoRA
        layers already.
    """
    modules, notes = gather_modules(checkpoint, settings)
    check_places(model, modules)
    for module in modules:
        for _, match in sorted(module.stages.items()):
            lora = match.module
            pair = _as_mlx(lora.lora_a, lora.dtype, dtype), _as_mlx(lora.lora_b, lora.dtype, dtype)
            base_model.attach_pair(model, module.path, match.kind, pair, lora.scale)
    model.eval()
    return notes


def _as_mlx(raw: Array, stored: str, dtype: mx.Dtype | None) -> mx.array:
    array = mx.array(raw)
    array = array.view(mx.bfloat16) if stored == "BF16" else array
    return array if dtype is None else array.astype(dtype)
