"""The header of a safetensors file, believed once the library `safetensors` has accepted it.

Layout: 8 bytes little-endian header length, that many bytes of JSON, then the bytes of the tensors
without a gap. The JSON maps a name to `{"dtype", "shape", "data_offsets"}` (offsets count from the
end of the header) and `__metadata__` to strings.

The library has checked types, sizes and that the tensors cover the file. Refused beyond it:
duplicate and unknown keys, names that are empty, not printable or longer than 500 letters, shapes
that MLX or NumPy cannot count, tables of more than two million parts.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mlxstacks.errors import CheckpointError

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
    raw, file_bytes = _header_bytes(path)
    try:
        table = parse_object(raw.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: header is not valid: {error}; {AGAIN}") from None
    metadata = table.pop("__metadata__", None) or {}  # MLX writes null where a caller gives none
    data_start = 8 + len(raw)
    tensors = {name: _tensor(path, name, entry, data_start) for name, entry in table.items()}
    return ShardHeader(path, tensors, metadata, data_start, file_bytes)


def parse_object(text: str, *, unique_keys: bool = True) -> dict[str, Any]:
    """A JSON object from text.

    Raises:
        ValueError: not JSON, not an object, nested too deeply, or (unique_keys) a key given twice,
            NaN or Infinity, which some configs of models have.
    """
    strict: dict[str, Any] = {}
    if unique_keys:
        strict = {"object_pairs_hook": _unique_object, "parse_constant": refuse_constant}
    try:
        value = json.loads(text, **strict)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"JSON must be an object, got {type(value).__name__}")
    return value


def refuse_constant(name: str) -> NoReturn:
    """For `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is not a JSON number")


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


def _header_bytes(path: Path) -> tuple[bytes, int]:
    """The JSON of a header that the library accepts, and the size of the file."""
    descriptor = open_regular(path)
    try:
        state = os.fstat(descriptor)
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        limit = min(MAX_HEADER_BYTES, state.st_size - 8)
        if length > limit:
            raise CheckpointError(
                f"{path}: header length {length}, allowed: {max(limit, 0)} bytes "
                f"(file: {state.st_size} bytes); truncated or no safetensors file: {AGAIN}"
            )
        raw = os.pread(descriptor, length, 8)
        parts = sum(raw.count(mark) for mark in b"{[:,")
        if parts > MAX_HEADER_PARTS:
            raise CheckpointError(
                f"{path}: header has {parts} JSON parts, allowed: {MAX_HEADER_PARTS}; {AGAIN}"
            )
        _check_by_library(path, state)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    finally:
        os.close(descriptor)
    return raw, state.st_size


def _check_by_library(path: Path, opened: os.stat_result) -> None:
    """Raises: CheckpointError: it refuses the file, or `path` no longer is the one that is open."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np"):  # maps the file, and of its pages touches the header
            now = os.stat(path)
    except SafetensorError as error:
        reason = _shown(str(error).removeprefix("Error while deserializing header: "))
        raise CheckpointError(f"{path}: no whole safetensors file: {reason}; {AGAIN}") from None
    if any(getattr(now, key) != getattr(opened, key) for key in _IDENTITY):
        raise CheckpointError(f"{path}: was changed while it was opened; try again")


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {_shown(key)} is given twice")
        result[key] = value
    return result


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


def _shown(value: Any) -> str:
    """A hostile value cut to what a message can carry; huge containers are not spelled out."""
    if isinstance(value, str):
        return ascii(value if len(value) <= 100 else value[:97] + "...")
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "object"
        if len(value) > 8 or any(isinstance(part, list | dict) for part in value):
            return f"{kind} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(part) for part in value) + "]"
    if isinstance(value, dict):
        return "object with " + ", ".join(_shown(key) for key in value)
    return ascii(value)
