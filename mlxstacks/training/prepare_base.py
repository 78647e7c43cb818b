"""The numbers a frozen base computes with: those it was stored in, or float32 on a CPU."""

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model, memory


def prepare_base(
    model: nn.Module, base: str, notes: list[str], *, checkpointed: bool = False
) -> bool:
    """Widen the base in place where that is asked for, or worth it; returns whether it was.

    base: "stored", "float32", or "auto": float32 on a CPU with twice the memory for it, where its
        products are some 20 times faster. The values stay those that are stored.
    checkpointed: the layers will be. Experts are not grouped then: what they evaluate to count
        their rows is kept until the gradient is built, and checkpointing would save nothing.
    """
    device = memory.device()
    needed = 4 * base_model.count_parameters(model)
    fits = device.memory_bytes is not None and needed <= device.memory_bytes // 2
    wanted = base == "float32" or (base == "auto" and device.kind == "cpu" and fits)
    if wanted:
        base_model.dequantize(model)
        base_model.cast(model, mx.float32)
        if device.kind == "cpu" and not checkpointed:
            base_model.group_experts(model)
        size = memory.bytes_in_words(needed)
        notes.append(f"The base computes with its stored values in float32 ({size}).")
    return wanted
