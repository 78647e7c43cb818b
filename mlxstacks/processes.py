"""The processes that share a run, as `mlx.launch` starts them, and what they tell each other."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import numpy as np

from mlxstacks.errors import InputError, PeerLostError

Value = TypeVar("Value")
# What tells a process of a group of its peers, by the backends of MLX.
_OF_A_GROUP = ("MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES", "MLX_JACCL", "OMPI_", "PMI")
_DEALING: ContextVar[mx.distributed.Group | None] = ContextVar("dealing", default=None)


def current_group() -> mx.distributed.Group | None:
    """The group of this process; None for a process of its own.

    Raises: InputError when a list of hosts is given but they cannot be joined: each would
        otherwise work alone.
    """
    if _DEALING.get() is not None or not any(v.startswith(_OF_A_GROUP) for v in os.environ):
        return None
    hosts = os.environ.get("MLX_HOSTFILE")
    by_mpi = any(os.environ.get(name, "1") != "1" for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    try:
        if hosts is None:
            strict = by_mpi or ("MLX_RANK" in os.environ and mx.distributed.is_available())
            group = mx.distributed.init(strict=strict)
        elif not Path(hosts).read_text().strip():  # what `mlx.launch -n 1` gives
            return None
        else:
            group = mx.distributed.init(strict=True, backend="ring")
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(
            f"the processes cannot be joined: {error}; start them with mlx.launch, which writes "
            "the list of hosts that MLX_HOSTFILE names"
            + (", or name the library of MPI in MLX_MPI_LIBNAME" if by_mpi else "")
        ) from None
    return group if group.size() > 1 else None


@contextmanager
def dealing_over(group: mx.distributed.Group | None) -> Iterator[None]:
    """Inside, what can be dealt out goes to the processes of `group`, by `dealing`; all else works
    as in a process of its own.
    """
    token = _DEALING.set(group)
    try:
        yield
    finally:
        _DEALING.reset(token)


def dealing() -> mx.distributed.Group | None:
    """The processes that share out the work here; None for a process of its own."""
    return _DEALING.get()


def environment_alone() -> dict[str, str]:
    """The environment for a process of its own."""
    return {name: v for name, v in os.environ.items() if not name.startswith(_OF_A_GROUP)}


def size_and_rank(group: mx.distributed.Group | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def wait_for_all(group: mx.distributed.Group | None) -> None:
    """Return once every process of the group has come here."""
    gathered(None, group)


def gathered(value: Value, group: mx.distributed.Group | None) -> list[Value]:
    """The JSON values of all processes, by rank, exactly. Raises: PeerLostError."""
    if group is None:
        return [value]
    message = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with _peers():
        lengths = mx.distributed.all_gather(mx.array([message.size]), group=group).tolist()
        padded = np.zeros((1, max(lengths)), np.uint8)
        padded[0, : message.size] = message
        rows = np.array(mx.distributed.all_gather(mx.array(padded), group=group))
    return [json.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]


def sent_from(owner: int, data: bytes, size: int, group: mx.distributed.Group) -> bytes:
    """The `size` bytes that process `owner` gives, for all; of the others `data` is not read.

    Raises: PeerLostError.
    """
    mine = group.rank() == owner
    array = mx.array(np.frombuffer(data, np.uint8)) if mine else mx.zeros(size, mx.uint8)
    with _peers():
        return np.array(mx.distributed.all_sum(array, group=group)).tobytes()


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(
            f"another process of the group has ended ({error}). What was done is kept: the same "
            "command, on all hosts again, goes on from there"
        ) from None
