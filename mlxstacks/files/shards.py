"""Safetensors files: headers that are believed once the library has accepted them, tensors by
rows, and a writer in a stream.

Layout: 8 bytes little-endian header length, that many bytes of JSON, then the bytes of the tensors
without a gap. The JSON maps a name to `{"dtype", "shape", "data_offsets"}` (offsets count from the
end of the header) and `__metadata__` to strings.

The library checks types, sizes and that the tensors cover the file. Refused beyond it: duplicate
and unknown keys, names that are empty, not printable or longer than 500 letters, shapes that MLX or
NumPy cannot count, tables of more than two million parts.

Tensors go through `pread` into a buffer of the caller's size, never through a map, which the
library takes for a moment to check the header: mapped pages count as resident memory, and a fuse
promises to stay small.
"""

from __future__ import annotations

import errno
import json
import math
import os
import reprlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mlxstacks.errors import CheckpointError, TargetError
from mlxstacks.files.disk import start_writeback, target_errors, write_all
from mlxstacks.files.strict_json import parse_object
from mlxstacks.ops.affine import Array

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
# brackets, colons and commas: enough for 150,000 tensors; bounds the memory that parsing takes
MAX_HEADER_PARTS = 2_000_000
MAX_DIMENSION = 2**31 - 1  # MLX counts each dimension in 32 bits
MAX_RANK = 32
MAX_NAME = 500  # letters; real names have some 100, and names are taken apart by pattern

# name -> (bytes an element, NumPy dtype); what NumPy lacks is carried as raw unsigned integers
DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "BOOL": (1, np.dtype(np.bool_)),
    "U8": (1, np.dtype(np.uint8)),
    "I8": (1, np.dtype(np.int8)),
    "F8_E4M3": (1, np.dtype(np.uint8)),
    "F8_E5M2": (1, np.dtype(np.uint8)),
    "F8_E8M0": (1, np.dtype(np.uint8)),
    "F8_E4M3FNUZ": (1, np.dtype(np.uint8)),
    "F8_E5M2FNUZ": (1, np.dtype(np.uint8)),
    "U16": (2, np.dtype("<u2")),
    "I16": (2, np.dtype("<i2")),
    "F16": (2, np.dtype("<f2")),
    "BF16": (2, np.dtype("<u2")),
    "U32": (4, np.dtype("<u4")),
    "I32": (4, np.dtype("<i4")),
    "F32": (4, np.dtype("<f4")),
    "U64": (8, np.dtype("<u8")),
    "I64": (8, np.dtype("<i8")),
    "F64": (8, np.dtype("<f8")),
    "C64": (8, np.dtype("<c8")),
}
# bits an element: such tensors can be copied whole, not read
SUB_BYTE_DTYPES = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

_MOST_OPENS = 3
# Compared and written together; a multiple of every file system's blocks.
_PATCHED_AT_ONCE = 1 << 16
_IDENTITY = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
AGAIN = "download or convert the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file; `start` and `end` are absolute byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start

    @property
    def size(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardHeader:
    """A checked header. `tensors` keeps the order of the JSON."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    file_bytes: int


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor of a known dtype; None where sub-byte elements do not fill whole bytes."""
    bits = SUB_BYTE_DTYPES.get(dtype) or 8 * DTYPES[dtype][0]
    total = bits * math.prod(shape)
    return total // 8 if total % 8 == 0 else None


def read_header(path: str | Path) -> ShardHeader:
    """Read and check the header of one safetensors file; touches none of its tensors.

    Law: the tensors cover the bytes from `data_start` to `file_bytes` exactly once.

    Raises:
        CheckpointError: the file is missing, truncated, or breaks any rule of the format; the
            message names the file and, where there is one, the tensor.
    """
    path = Path(path)
    # Again, since a writer of a store may replace a file by one of the same bytes.
    checked = next(filter(None, (_header_bytes(path) for _ in range(_MOST_OPENS))), None)
    if checked is None:
        raise CheckpointError(f"{path}: was changed each time it was opened; try again")
    raw, file_bytes = checked
    try:
        table = parse_object(raw.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: header is not valid: {error}; {AGAIN}") from None
    metadata = table.pop("__metadata__", None) or {}  # MLX writes null where a caller gives none
    data_start = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in table.items()}
    return ShardHeader(path, tensors, metadata, data_start, file_bytes)


def file_identity(path: Path) -> tuple[int, ...]:
    """What changes with the file behind a path: device, inode, size, time of the last write."""
    now = os.stat(path)
    return tuple(getattr(now, key) for key in _IDENTITY)


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; never waits on a pipe or device.

    Raises:
        CheckpointError: missing, unreadable, or not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        if path.is_symlink():
            target = os.readlink(path)
            raise CheckpointError(f"{path}: link to {target}, which is missing; {AGAIN}") from None
        raise CheckpointError(f"{path}: no such file; {AGAIN}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r}: cannot be opened: {error}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: not a regular file; {AGAIN}")
    return descriptor


def read_range(info: TensorInfo, start: int, out: memoryview) -> None:
    """Fill `out` (format B) with the tensor's bytes from its byte `start` on.

    Opens the file each time (5 microseconds): no descriptor outlives the call, threads share none.

    Raises:
        CheckpointError: the file is gone, unreadable, or ends early.
    """
    descriptor = open_regular(info.file)
    try:
        read_exactly(descriptor, out, info, info.start + start)
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, out: memoryview, info: TensorInfo, offset: int) -> None:
    """Fill `out` (format B) from the absolute `offset` of an open file; `info` for messages."""
    while out.nbytes:
        try:
            # one call moves at most 2 GiB on Linux and on macOS
            count = os.preadv(descriptor, [out[: 1 << 30]], offset)
        except OSError as error:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} cannot be read: {error}"
            ) from error
        if count == 0:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r}: the file ends at byte {offset}, the tensor at "
                f"{info.end}: truncated since its header was read; {AGAIN}"
            )
        out, offset = out[count:], offset + count


def _header_bytes(path: Path) -> tuple[bytes, int] | None:
    """The JSON of a header that the library accepts, and the size of the file; None where `path`
    became another file meanwhile.
    """
    from safetensors import SafetensorError, safe_open

    descriptor = open_regular(path)
    try:
        opened = os.fstat(descriptor)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        limit = min(MAX_HEADER_BYTES, opened.st_size - 8)
        if length > limit:
            raise CheckpointError(
                f"{path}: header length {length}, allowed: {max(limit, 0)} bytes "
                f"(file: {opened.st_size} bytes); truncated or no safetensors file: {AGAIN}"
            )
        raw = os.pread(descriptor, length, 8)
        parts = sum(raw.count(mark) for mark in b"{[:,")
        if parts > MAX_HEADER_PARTS:
            raise CheckpointError(
                f"{path}: header has {parts} JSON parts, allowed: {MAX_HEADER_PARTS}; {AGAIN}"
            )
        with safe_open(path, "np"):  # maps the file, and of its pages touches the header
            now = os.stat(path)
    except SafetensorError as error:
        reason = _shown(str(error).removeprefix("Error while deserializing header: "))
        raise CheckpointError(f"{path}: no whole safetensors file: {reason}; {AGAIN}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    same = all(getattr(now, key) == getattr(opened, key) for key in _IDENTITY)
    return (raw, opened.st_size) if same else None


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Refuses what the library lets pass."""

    def refuse(what: str, got: Any) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {_shown(name)}: {what}, got {_shown(got)}; {AGAIN}")

    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise refuse(f"a name must be printable text of at most {MAX_NAME} letters", name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("an entry must have exactly dtype, shape and data_offsets", entry)
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in {*DTYPES, *SUB_BYTE_DTYPES}:
        known = ", ".join([*DTYPES, *SUB_BYTE_DTYPES])
        raise refuse(f"dtype must be one of {known}", dtype)
    if len(shape) > MAX_RANK or max(shape, default=0) > MAX_DIMENSION:
        raise refuse(f"shape must be at most {MAX_RANK} integers to {MAX_DIMENSION}", [*shape])
    # NumPy multiplies the non-zero dimensions in 64 bits even where another one is zero
    if math.prod(dimension for dimension in shape if dimension) >= 2**59:
        raise refuse("shape has too many elements", [*shape])
    return TensorInfo(name, dtype, shape, path, data_start + start, data_start + end)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def _shown(value: Any) -> str:
    """A hostile value cut to what a message can carry."""
    return _short.repr(value).encode("ascii", "backslashreplace").decode()


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


Chunk = bytes | bytearray | memoryview | np.ndarray[Any, np.dtype[Any]]

COPY_BYTES = 4 << 20
_WRITEBACK_BYTES = 8 << 20
# what copy_file_range answers where it cannot serve two files; plain reads and writes can
_NO_RANGE_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


class ShardWriter:
    """A new safetensors file whose tensors are known beforehand, so that every offset is.

    tensors: (name, dtype, shape) in the order of the file; no gaps. Tensors may be written in any
    order, the chunks of one tensor in theirs. The file must not exist: nothing is ever written
    through a link into somebody else's file. like: a shard with these very tensors, whose header,
    and so every offset, the file gets. Law: a file that `close` accepted is read back by
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
        like: ShardHeader | None = None,
    ) -> None:
        self.path = Path(path)
        self._specs = {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        if like is not None:
            header = self._placed_like(like)
        else:
            header, sizes = _header(tensors, metadata or {})
            position = len(header)
            for name, nbytes in sizes.items():
                self._next[name], self._end[name] = position, position + nbytes
                position += nbytes
            self.bytes_total = position
        self._descriptor, self._unsynced = -1, 0
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

    def _placed_like(self, like: ShardHeader) -> bytes:
        """Every tensor where that shard has it; returns its bytes before the data."""
        if self._specs != {info.name: (info.dtype, info.shape) for info in like.tensors.values()}:
            raise ValueError(f"{self.path}: {like.path} has other tensors")
        for info in like.tensors.values():
            self._next[info.name], self._end[info.name] = info.start, info.end
        self.bytes_total = like.file_bytes
        source = open_regular(like.path)
        try:
            return os.pread(source, like.data_start, 0)
        finally:
            os.close(source)

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
            self._put(data, offset)
        self._advance(name, data.nbytes)

    def _put(self, data: memoryview, offset: int) -> None:
        write_all(self._descriptor, data, offset)

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
        self._advance(name, info.nbytes)

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

    def _advance(self, name: str, nbytes: int) -> None:
        self._next[name] += nbytes
        self._unsynced += nbytes
        if self._unsynced >= _WRITEBACK_BYTES:
            start_writeback(self._descriptor)
            self._unsynced = 0


class ShardPatcher(ShardWriter):
    """A copy-on-write clone of a shard: what is written differs from it or is left alone.

    path: the clone of `source`, whose tensors keep their dtype and shape. `close` returns the bytes
    that were written. Law: the file is the one that `ShardWriter(..., like=source)` would write.
    """

    def __init__(self, path: str | Path, source: ShardHeader) -> None:
        self.path, self.written = Path(path), 0
        self._specs = {info.name: (info.dtype, info.shape) for info in source.tensors.values()}
        self._next, self._end, self._unsynced = {}, {}, 0
        self._placed_like(source)
        with target_errors(self.path, self.bytes_total):
            self.path.chmod(self.path.stat().st_mode | stat.S_IWUSR)  # a clone has its source's
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)

    def _put(self, data: memoryview, offset: int) -> None:
        """Blocks that are as they were are not written: they stay shared."""
        for start in range(0, data.nbytes, _PATCHED_AT_ONCE):
            part = data[start : start + _PATCHED_AT_ONCE]
            if os.pread(self._descriptor, part.nbytes, offset + start) != part:
                write_all(self._descriptor, part, offset + start)
                self.written += part.nbytes

    def copy(self, info: TensorInfo, name: str | None = None) -> None:
        """The tensor is there already."""
        self._next[info.name] = self._end[info.name]

    def close(self) -> int:
        """Check that nothing is missing, sync the file, return the bytes that were written."""
        super().close()
        return self.written


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
