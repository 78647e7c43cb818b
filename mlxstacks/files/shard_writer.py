"""Writes one safetensors file in a stream: the header at once, then chunks as they come."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mlxstacks.errors import TargetError
from mlxstacks.files.disk import start_writeback, target_errors, write_all
from mlxstacks.files.shard_header import (
    DTYPES,
    SUB_BYTE_DTYPES,
    TensorInfo,
    open_regular,
    read_exactly,
    tensor_nbytes,
)

Chunk = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[Any]]

COPY_BYTES = 4 << 20
WRITEBACK_BYTES = 8 << 20
# what copy_file_range answers where it cannot serve two files; plain reads and writes can
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class ShardWriter:
    """A new safetensors file whose tensors are known beforehand, so that every offset is.

    tensors: (name, dtype, shape) in the order of the file; no gaps. Tensors may be written in any
    order, the chunks of one tensor in theirs. The file must not exist: nothing is ever written
    through a link into somebody else's file. Law: a file that `close` accepted is read back by
    `read_header`, by the safetensors library and by `mx.load` with the same bytes.

    Raises:
        ValueError: a name twice, an unknown dtype, a chunk too many, an incomplete tensor.
        TargetError: the file exists, the disk is full, the directory is read-only.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        header, sizes = _header(tensors, metadata or {})
        self._specs = {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        position = len(header)
        for name, nbytes in sizes.items():
            self._next[name], self._end[name] = position, position + nbytes
            position += nbytes
        self.bytes_total = position
        self._unsynced = 0
        self._descriptor = -1
        with target_errors(self.path, self.bytes_total):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                self._descriptor = os.open(self.path, flags, 0o666)
            except FileExistsError:
                raise TargetError(f"{self.path}: exists; shards are new files") from None
            done = False
            try:
                write_all(self._descriptor, memoryview(header), 0)
                done = True
            finally:
                if not done:  # nobody gets the object that would close it
                    self._release()
                    self.path.unlink()

    def write(self, name: str, chunk: Chunk) -> None:
        """Append the bytes of a C-contiguous buffer to one tensor."""
        data = chunk.data if isinstance(chunk, np.ndarray) else memoryview(chunk)
        if data.nbytes == 0:
            return
        if not data.c_contiguous:
            raise ValueError(f"{self.path}: tensor {name!r}: a chunk must be C-contiguous")
        data = data.cast("B")
        offset = self._reserve(name, data.nbytes)
        with target_errors(self.path, self.bytes_total):
            write_all(self._descriptor, data, offset)
        self._advance(name, offset, data.nbytes)

    def copy(self, info: TensorInfo, name: str | None = None) -> None:
        """Copy a whole tensor from another file, inside the kernel where it can.

        name: the tensor's name here, if it differs. dtype and shape must agree.

        Raises:
            ValueError: dtype or shape differ from what was declared.
            CheckpointError: the source is missing or shorter than its header said.
        """
        name = info.name if name is None else name
        if self._specs.get(name) != (info.dtype, info.shape):
            raise ValueError(
                f"{self.path}: tensor {name!r}: declared {self._specs.get(name)}, "
                f"got {(info.dtype, info.shape)} from {info.file}"
            )
        offset = self._reserve(name, info.nbytes)
        source = open_regular(info.file)
        try:
            with target_errors(self.path, self.bytes_total):
                _copy_range(source, info, self._descriptor, offset)
        finally:
            os.close(source)
        self._advance(name, offset, info.nbytes)

    def close(self) -> int:
        """Check that nothing is missing, sync the file, return its size in bytes."""
        if self._descriptor < 0:
            return self.bytes_total
        missing = {name: end - self._next[name] for name, end in self._end.items()}
        missing = {name: nbytes for name, nbytes in missing.items() if nbytes}
        try:
            if missing:
                listed = ", ".join(f"{name!r} ({n} bytes)" for name, n in [*missing.items()][:5])
                raise ValueError(f"{self.path}: {len(missing)} tensors incomplete: {listed}")
            with target_errors(self.path, self.bytes_total):
                os.fsync(self._descriptor)
        finally:
            self._release()
        return self.bytes_total

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def _release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _reserve(self, name: str, nbytes: int) -> int:
        if name not in self._end:
            raise ValueError(f"{self.path}: tensor {name!r} was not declared")
        room = self._end[name] - self._next[name]
        if nbytes > room:
            raise ValueError(f"{self.path}: tensor {name!r}: {nbytes} bytes given, {room} are left")
        return self._next[name]

    def _advance(self, name: str, offset: int, nbytes: int) -> None:
        self._next[name] = offset + nbytes
        self._unsynced += nbytes
        if self._unsynced >= WRITEBACK_BYTES:
            start_writeback(self._descriptor, 0, 0)  # length 0: to the end of the file
            self._unsynced = 0


def _header(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data (a multiple of 8 long) and each tensor's size, in order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    sizes: dict[str, int] = {}
    position = 0
    for name, dtype, shape in tensors:
        if dtype not in DTYPES and dtype not in SUB_BYTE_DTYPES:
            raise ValueError(f"tensor {name!r}: dtype must be one of {[*DTYPES]}, got {dtype!r}")
        nbytes = tensor_nbytes(dtype, tuple(shape))
        if name in {"", "__metadata__"} or name in sizes or not name.isprintable():
            raise ValueError(f"tensor {name!r}: a name must be printable, and used once")
        if nbytes is None:
            raise ValueError(f"tensor {name!r}: {dtype} {shape} does not fill whole bytes")
        sizes[name] = nbytes
        offsets = [position, position + nbytes]
        entries[name] = {"dtype": dtype, "shape": [int(n) for n in shape], "data_offsets": offsets}
        position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, sizes


def _copy_range(source: int, info: TensorInfo, target: int, offset: int) -> None:
    done = 0
    if hasattr(os, "copy_file_range"):
        try:
            while done < info.nbytes:
                count = min(info.nbytes - done, 1 << 30)
                copied = os.copy_file_range(source, target, count, info.start + done, offset + done)
                if copied == 0:  # some file systems answer 0 for what they cannot serve
                    break
                done += copied
        except OSError as error:
            if error.errno not in _NO_RANGE_COPY:
                raise
    buffer = bytearray(min(COPY_BYTES, info.nbytes - done))
    while done < info.nbytes:
        part = memoryview(buffer)[: info.nbytes - done]
        read_exactly(source, part, info, info.start + done)
        write_all(target, part, offset + done)
        done += part.nbytes
