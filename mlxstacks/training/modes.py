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

from mlxstacks.layers.output_head import eval_mode


def lowest_trained_layer(model: nn.Module) -> int:
    """Number of the first decoder layer whose gradient is needed: 0 when embeddings train too."""
    trained = len(tree_flatten(model.trainable_parameters()))
    lowest, inside = len(model.layers), 0
    for index, layer in enumerate(model.layers):
        own = len(tree_flatten(layer.trainable_parameters()))
        if own:
            lowest = min(lowest, index)
        inside += own
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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside the block: no dropout, no noise; afterwards every mode is as it was."""
    with eval_mode(model):
        _use_chunks(model)
        yield


def _use_chunks(module: nn.Module) -> None:
    """Recurrent blocks compute in chunks where there is no kernel for them."""
    if not _has_recurrent_kernel():
        for inner in module.modules():
            if "A_log" in inner:
                inner._set_training_mode(True)


def _has_recurrent_kernel() -> bool:
    return mx.default_device() == mx.gpu and mx.metal.is_available()
