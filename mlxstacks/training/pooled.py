"""LoRA whose delta is one number a quantization group: a fuse then moves biases alone.

As in QA-LoRA (Xu et al., ICLR 2024): A acts on the sums of the input over the groups of the base's
affine grid, so `scale * code + bias + delta` has its delta in the bias, and no code has to change.
A pooled A is an ordinary one whose entries are equal within a group, which is how it is kept here
and stored: any tool that reads a LoRA reads it. Equal entries with equal gradients stay equal under
AdamW, so it is enough to begin with such an A and to take the mean of its gradient over each group.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.stored_weight import stored_weight

Pool = Callable[[Any], Any]


def group_sizes(checkpoint: Checkpoint, paths: Sequence[str]) -> dict[str, int]:
    """The group size of each quantized module; plain ones, which lose nothing, are left out.

    Raises: InputError: a module in a mode that has no biases; none that is quantized.
    """
    sizes = {}
    for path in paths:
        try:
            stored = stored_weight(checkpoint, path)
        except CheckpointError as error:
            raise InputError(str(error)) from error
        if stored.mode != "affine":
            raise InputError(
                f"{path} is {stored.mode}, which has no biases to move; merge_ready pooled is for "
                "affine grids"
            )
        if stored.group_size is not None:
            sizes[path] = stored.group_size
    if not sizes:
        raise InputError("merge_ready pooled: no trained module of this model is quantized")
    return sizes


def pooled(sizes: Mapping[str, int], gain: bool = False) -> Pool:
    """A function of a tree of parameters or gradients: `lora_a` becomes its mean over each group.

    Shapes: lora_a (K, R), or (E, R, K) of experts. gain: times the root of the group size, so that
        first weights that were drawn one by one keep their size.
    """

    def pool(path: str, array: mx.array) -> mx.array:
        module, _, name = path.rpartition(".")
        size = sizes.get(module)
        if size is None or name != "lora_a":
            return array
        factor = math.sqrt(size) if gain else 1.0
        if array.ndim == 3:  # (E, R, K)
            means = array.reshape(*array.shape[:-1], -1, size).mean(axis=-1, keepdims=True)
            return mx.broadcast_to(factor * means, (*means.shape[:-1], size)).reshape(array.shape)
        means = array.reshape(-1, size, array.shape[-1]).mean(axis=1, keepdims=True)
        return mx.broadcast_to(
            factor * means, (len(means), size, array.shape[-1])
        ).reshape(array.shape)  # fmt: skip

    return lambda tree: tree_map_with_path(pool, tree)
