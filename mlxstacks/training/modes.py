"""Train and eval mode where each belongs: below the lowest trained layer nothing trains.

A layer below all trained parameters gets no gradient: no input of it depends on them, so MLX builds
none, whatever its mode. Its mode decides how it computes. In eval mode mlx-lm's recurrent layers
call a kernel that only Metal has; elsewhere it is a loop over tokens, and the chunks of training
are the faster form of the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxstacks import base_model, memory
from mlxstacks.layers.output_head import eval_mode


def lowest_trained_layer(model: nn.Module) -> int:
    """Number of the first decoder layer whose gradient is needed: 0 when embeddings train too."""
    trained = len(tree_flatten(model.trainable_parameters()))
    lowest, inside = len(model.layers), 0
    for index, layer in enumerate(model.layers):
        count = len(tree_flatten(layer.trainable_parameters()))
        if count:
            lowest = min(lowest, index)
        inside += count
    return lowest if inside == trained else 0


def set_training_modes(model: nn.Module) -> int:
    """Train mode from the lowest trained layer up, eval mode below; returns that layer's number."""
    lowest = lowest_trained_layer(model)
    model.train()
    for layer in model.layers[:lowest]:
        layer.eval()
        _use_chunks(layer)
    return lowest


@contextmanager
def evaluating(model: nn.Module, *, for_gradients: bool = False) -> Iterator[None]:
    """Eval mode inside the block: no dropout, no noise; afterwards every mode is as it was.

    for_gradients: recurrent blocks do not call the kernel, which has no gradient.
    """
    with eval_mode(model):
        _use_chunks(model, always=for_gradients)
        yield


def _use_chunks(module: nn.Module, *, always: bool = False) -> None:
    """Recurrent blocks compute in chunks where there is no kernel for them, or always."""
    if always or not _has_recurrent_kernel():
        for inner in module.modules():
            if "A_log" in inner:
                inner._set_training_mode(True)


def _has_recurrent_kernel() -> bool:
    return mx.default_device() == mx.gpu and mx.metal.is_available()


def prepare_base(
    model: nn.Module, base: str | None, notes: list[str], *, checkpointed: bool = False
) -> bool:
    """Widen the base in place where that is asked for, or worth it; returns whether it was.

    base: "stored", "float32", or "auto": float32 on a CPU with twice the memory for it, where its
        products are some 20 times faster; None: the same where there is no setting of it. The
        values stay those that are stored.
    checkpointed: the layers will be. Experts are not grouped then: what they evaluate to count
        their rows is kept until the gradient is built, and checkpointing would save nothing.
    """
    device = memory.device()
    needed = 4 * base_model.count_parameters(model)
    fits = device.memory_bytes is not None and needed <= device.memory_bytes // 2
    wanted = base == "float32" or (base in ("auto", None) and device.kind == "cpu" and fits)
    if wanted:
        base_model.dequantize(model)
        base_model.cast(model, mx.float32)
        if device.kind == "cpu" and not checkpointed:
            base_model.group_experts(model)
        size = memory.bytes_in_words(needed)
        note = f"The base computes with its stored values in float32 ({size})"
        if base == "auto":
            note += "; --base stored rounds as mlx-lm does, and may answer otherwise"
        notes.append(f"{note}.")
    return wanted
