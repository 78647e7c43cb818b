"""Data parallelism: the processes of `mlx.launch`, and sums over them."""

import os
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

Number = TypeVar("Number", int, float)


def current_group() -> mx.distributed.Group | None:
    """The group of this process; None for a process of its own.

    Raises: RuntimeError when a list of hosts is given but they cannot be joined: each would
        otherwise train alone.
    """
    if "MLX_HOSTFILE" in os.environ:
        group = mx.distributed.init(strict=True, backend="ring")
    else:
        group = mx.distributed.init()
    return group if group.size() > 1 else None


def size_and_rank(group: mx.distributed.Group | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def sum_over_group(tree: Any, group: mx.distributed.Group | None) -> Any:
    """A tree of arrays, added over the processes; sent as one flat message."""
    if group is None:
        return tree
    flat = tree_flatten(tree)
    message = mx.concatenate([array.reshape(-1) for _, array in flat])
    message = mx.distributed.all_sum(message, group=group)
    ends = list(np.cumsum([array.size for _, array in flat]))
    parts = mx.split(message, [int(end) for end in ends[:-1]])
    shaped = [p.reshape(a.shape).astype(a.dtype) for (_, a), p in zip(flat, parts, strict=True)]
    return tree_unflatten([(name, p) for (name, _), p in zip(flat, shaped, strict=True)])


def gathered(number: Number, group: mx.distributed.Group | None) -> list[Number]:
    """The numbers of all processes, by rank; a float comes back as a float32."""
    if group is None:
        return [number]
    found: list[Number] = mx.distributed.all_gather(mx.array([number]), group=group).tolist()
    return found


def wait_for_all(group: mx.distributed.Group | None) -> None:
    """Return once every process of the group has come here."""
    if group is not None:
        mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))
