"""The header of a GGUF file, believed only after every check.

Layout, little-endian: "GGUF", version, number of tensors, number of keys; then each key with its
type and value, each tensor with its dimensions, type and offset, padding, and the bytes of the
tensors. The `gguf` package knows the types and their grids and is used for them; its reader is not,
because it makes an array of every token (5 s for 49,000 of them; here 0.1 s) and reads past the end
of a truncated header without a word.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.errors import CheckpointError
from mlxstacks.files.shards import AGAIN, MAX_DIMENSION, MAX_NAME, open_regular

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_RANK = 4  # GGML_MAX_DIMS
# Real files have some 50 keys, 1,200 tensors and 300,000 tokens with as many merges.
MAX_KEYS, MAX_TENSORS, MAX_ELEMENTS = 1 << 16, 1 << 17, 1 << 24

# value type -> format of struct and NumPy
_SCALARS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor. shape: rows first, as NumPy and MLX count; kind: "F32", "Q4_1", ..."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A checked header. Values of `fields` are Python scalars and text, lists of text, arrays."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key, of this type; `default` where there is none.

        Raises:
            CheckpointError: the value has another type.
        """
        value = self.fields.get(key)
        if value is None:
            return default
        if type(value) is not kind:
            shown = ascii(value)[:60]
            raise CheckpointError(
                f"{self.path}: key {key} is {shown}, a {kind.__name__} is needed; {AGAIN}"
            )
        return value

    def read(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's bytes as they lie in the file: (rows, bytes a row) uint8, read-only."""
        rows = math.prod(tensor.shape[:-1])
        flat = np.memmap(self.path, np.uint8, "r", tensor.start, (tensor.nbytes,))
        return flat.view(np.ndarray).reshape(rows, -1)


def open_gguf(path: str | Path) -> GGUFFile:
    """Read and check the header of a GGUF file; touches none of its tensors.

    Law: fields and tensors are those of `gguf.GGUFReader`.

    Raises:
        CheckpointError: no GGUF file, truncated, big-endian, one of several parts, or a count, name
            or size that cannot be; the message names the file and the key or tensor.
    """
    path = Path(path)
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size < 24:
            raise CheckpointError(f"{path}: too short for a GGUF file; {AGAIN}")
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as view:
            return _Reader(path, view).file()
    finally:
        os.close(descriptor)


class _Reader:
    """Walks through the header; `what` says in messages what is being read."""

    def __init__(self, path: Path, view: mmap.mmap) -> None:
        self.path, self.view, self.size = path, view, len(view)
        self.position, self.elements = 0, 0
        self.what = "header"

    def file(self) -> GGUFFile:
        tensor_count, key_count = self._counts()
        fields = self._fields(key_count)
        parts = fields.get("split.count", 0)
        if type(parts) is int and parts > 1:
            raise CheckpointError(
                f"{self.path}: one of {parts} parts; "
                "join them first: `llama-gguf-split --merge FIRST-PART OUT.gguf`"
            )
        return GGUFFile(self.path, fields, self._tensors(tensor_count, fields))

    def _counts(self) -> tuple[int, int]:
        if self._take(4) != b"GGUF":
            raise CheckpointError(f"{self.path}: does not begin with 'GGUF'; {AGAIN}")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.path}: a big-endian GGUF file; convert it on the machine it is for, with "
                "gguf-py's gguf_convert_endian.py"
            )
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path}: GGUF version {version}; known are 2 and 3: convert the model again"
            )
        tensors, keys = self._number("<Q"), self._number("<Q")
        for count, most, name in ((tensors, MAX_TENSORS, "tensors"), (keys, MAX_KEYS, "keys")):
            if count > most:
                raise CheckpointError(
                    f"{self.path}: {count:,} {name} in the header, at most {most:,}; {AGAIN}"
                )
        return tensors, keys

    def _fields(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for number in range(count):
            self.what = f"key {number + 1} of {count}"
            name = self._name(fields)
            self.what = f"key {name!r}"
            fields[name] = self._value(self._number("<I"))
        return fields

    def _tensors(self, count: int, fields: dict[str, Any]) -> dict[str, GGUFTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}; {AGAIN}")
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for number in range(count):
            self.what = f"tensor {number + 1} of {count}"
            name = self._name(entries)
            self.what = f"tensor {name!r}"
            entries[name] = (self._shape(), self._number("<I"), self._number("<Q"))
        data_start = -(-self.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, (shape, code, offset) in entries.items():
            self.what = f"tensor {name!r}"
            try:
                kind = GGMLQuantizationType(code)
            except ValueError:
                raise self._error(f"its type, {code}, is not known to the gguf package") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise self._error(f"rows of {shape[-1]} in {kind.name} blocks of {block}")
            nbytes = math.prod(shape) // block * block_bytes
            start = data_start + offset
            if offset % alignment or start + nbytes > self.size:
                raise self._error(
                    f"{nbytes} bytes at byte {start}, the file has {self.size}: truncated"
                )
            tensors[name] = GGUFTensor(name, kind.name, shape, start, nbytes)
        self._check_overlaps(tensors)
        return tensors

    def _check_overlaps(self, tensors: dict[str, GGUFTensor]) -> None:
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                self.what = f"tensor {tensor.name!r}"
                raise self._error("overlaps the tensor before it")
            end = tensor.start + tensor.nbytes

    def _shape(self) -> tuple[int, ...]:
        rank = self._number("<I")
        if not 1 <= rank <= MAX_RANK:
            raise self._error(f"{rank} dimensions, 1 to {MAX_RANK} are allowed")
        shape = tuple(self._number("<Q") for _ in range(rank))[::-1]
        if not all(1 <= size <= MAX_DIMENSION for size in shape) or math.prod(shape) >= 1 << 59:
            raise self._error(f"its shape cannot be: {list(shape)}")
        return shape

    def _name(self, known: dict[str, Any]) -> str:
        name = self._text()
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise self._error(f"a name must be printable text of at most {MAX_NAME} letters")
        if name in known:
            raise self._error(f"the name {name!r} is given twice")
        return name

    def _value(self, code: int) -> Any:
        if code == _TEXT:
            return self._text()
        if code == _ARRAY:
            return self._array()
        if code not in _SCALARS:
            raise self._error(f"{code} is no type of a value")
        return self._numbers(code, 1)[0].item()

    def _array(self) -> Any:
        code, count = self._number("<I"), self._number("<Q")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self._error(f"{count:,} elements; at most {MAX_ELEMENTS:,} in all arrays")
        if code == _TEXT:
            return [self._text() for _ in range(count)]
        if code not in _SCALARS:
            raise self._error(f"an array of type {code}")
        return self._numbers(code, count)

    def _numbers(self, code: int, count: int) -> np.ndarray:
        dtype = np.dtype(_SCALARS[code])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _text(self) -> str:
        raw = self._take(self._number("<Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"text that is not UTF-8: {error}") from None

    def _number(self, code: str) -> int:
        number: int = struct.unpack(code, self._take(struct.calcsize(code)))[0]
        return number

    def _take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > self.size:
            raise self._error(f"ends at byte {end}, the file has {self.size}: truncated")
        raw = self.view[self.position : end]
        self.position = end
        return raw

    def _error(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.what}: {fault}; {AGAIN}")


def row_blocks(array: np.ndarray, most_bytes: int = 8 << 20) -> Iterator[np.ndarray]:
    """Consecutive rows of an array, at most `most_bytes` at once (one row at least)."""
    step = max(1, most_bytes // max(1, array[:1].nbytes))
    for start in range(0, len(array), step):
        yield array[start : start + step]
