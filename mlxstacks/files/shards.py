"""Reads tensors of safetensors files by rows, and is the door to the header and the writer.

Tensors go through `pread` into a buffer of the caller's size, never through a map, which the
library takes for a moment to check the header: mapped pages count as resident memory, and a fuse
promises to stay small.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mlxstacks.errors import CheckpointError
from mlxstacks.files.shard_header import (
    DTYPES,
    SUB_BYTE_DTYPES,
    ShardHeader,
    TensorInfo,
    read_header,
    read_range,
    tensor_nbytes,
)
from mlxstacks.files.shard_writer import ShardWriter

__all__ = [
    "DTYPES",
    "SUB_BYTE_DTYPES",
    "ShardHeader",
    "ShardWriter",
    "TensorInfo",
    "read_header",
    "read_rows",
    "read_tensor",
    "tensor_nbytes",
]

Array = np.ndarray[Any, np.dtype[Any]]


def read_rows(info: TensorInfo, first: int, last: int, out: Array | None = None) -> Array:
    """Rows `first` to `last` (exclusive) along axis 0, in the raw NumPy dtype (BF16 as uint16).

    out: (at least last - first, *info.shape[1:]), C-contiguous, of the dtype in `DTYPES`; filled
        from its first row on. Nothing of the tensor's size is allocated then.

    Returns: (last - first, *info.shape[1:]); a view of `out` where it was given.

    Raises:
        ValueError: rows outside the tensor, a scalar, or an unfit `out`.
        CheckpointError: the file ended early, or the dtype has no whole bytes.
    """
    if not info.shape or not 0 <= first <= last <= info.shape[0]:
        raise ValueError(f"tensor {info.name!r} {info.shape} has no rows {first} to {last}")
    dtype, shape = _numpy_dtype(info), (last - first, *info.shape[1:])
    if out is None:
        out = np.empty(shape, dtype)
    elif out.dtype != dtype or out.shape[1:] != shape[1:] or len(out) < shape[0]:
        raise ValueError(
            f"tensor {info.name!r}: out must be {dtype} with at least {shape}, "
            f"got {out.dtype} {out.shape}"
        )
    elif not out.flags.c_contiguous:
        raise ValueError(f"tensor {info.name!r}: out must be C-contiguous")
    out = out[: shape[0]]
    row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
    if out.nbytes:
        read_range(info, first * row_bytes, out.data.cast("B"))
    return out


def read_tensor(info: TensorInfo) -> Array:
    """The whole tensor, of shape `info.shape`, in the raw NumPy dtype (BF16 as uint16)."""
    if info.shape:
        return read_rows(info, 0, info.shape[0])
    out = np.empty((1,), _numpy_dtype(info))
    read_range(info, 0, out.data.cast("B"))
    return out.reshape(())


def _numpy_dtype(info: TensorInfo) -> np.dtype[Any]:
    if info.dtype not in DTYPES:
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r} has dtype {info.dtype}, which can be copied, "
            f"not read; readable: {', '.join(DTYPES)}; take the model in a dtype that mlx-lm reads"
        )
    return DTYPES[info.dtype][1]
