"""GGUF files: the header, believed only after every check, and tensors as groups of MLX's grid.

Layout, little-endian: "GGUF", version, number of tensors, number of keys; then each key with its
type and value, each tensor with its dimensions, type and offset, padding, and the bytes of the
tensors. The `gguf` package knows the types and their grids and is used for them; its reader is not,
because it makes an array of every token (5 s for 49,000 of them; here 0.1 s) and reads past the end
of a truncated header without a word.

A block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0 holds 32 codes, an f16 scale d and, in Q4_1 and Q5_1, an
f16 minimum m. It stands for `d * q + m`, or `d * (q - zero)` with zero 8 (Q4_0), 16 (Q5_0) or, for
the signed codes of Q8_0, 128 after a shift. With bias m or -zero * d these are MLX's groups of 32
at 4, 5 and 8 bits. All other types are read by their values.
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
from mlxstacks.ops.affine import pack

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

        Raises: CheckpointError: the value has another type.
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

    Raises: CheckpointError: no GGUF file, truncated, big-endian, one of several parts, or a count,
        name or size that cannot be; the message names the file and the key or tensor.
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
        fields: dict[str, Any] = {}
        for number in range(key_count):
            self.what = f"key {number + 1} of {key_count}"
            name = self._name(fields)
            self.what = f"key {name!r}"
            fields[name] = self._value(self._number("<I"))
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
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                self.what = f"tensor {tensor.name!r}"
                raise self._error("overlaps the tensor before it")
            end = tensor.start + tensor.nbytes
        return tensors

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
        if code in _SCALARS:
            return self._numbers(code, 1)[0].item()
        if code != _ARRAY:
            raise self._error(f"{code} is no type of a value")
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


def row_blocks(
    array: np.ndarray, order: np.ndarray | None = None, most_bytes: int = 8 << 20
) -> Iterator[np.ndarray]:
    """Consecutive rows of an array, or rows in this order, at most `most_bytes` at once (one row at
    least).
    """
    array = array if order is None else array[order]
    step = max(1, most_bytes // max(1, array[:1].nbytes))
    for start in range(0, len(array), step):
        yield array[start : start + step]


# --- blocks as groups -----------------------------------------------------------------------------

GROUP_SIZE = 32
FLOATS: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
}


@dataclass(frozen=True, slots=True)
class Grid:
    """Layout of a block. zero: the code that stands for zero; None with a minimum."""

    bits: int
    block: np.dtype
    zero: int | None


def _block(*fields: tuple[str, str, int]) -> np.dtype:
    return np.dtype([(name, dtype, (size,)) for name, dtype, size in fields])


_D, _M, _HIGH = ("d", "<f2", 1), ("m", "<f2", 1), ("high", "u1", 4)
_NIBBLES = ("low", "u1", 16)
GRIDS = {
    "Q4_0": Grid(4, _block(_D, _NIBBLES), 8),
    "Q4_1": Grid(4, _block(_D, _M, _NIBBLES), None),
    "Q5_0": Grid(5, _block(_D, _HIGH, _NIBBLES), 16),
    "Q5_1": Grid(5, _block(_D, _M, _HIGH, _NIBBLES), None),
    "Q8_0": Grid(8, _block(_D, ("low", "u1", 32)), 128),
}


def split_blocks(raw: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, scales and biases of rows of blocks.

    Shapes: raw (rows, bytes a row) uint8 -> packed (rows, K * bits / 32) uint32, scales and biases
    (rows, K / 32) float16.
    Law: scale * code + bias in float32 is what `gguf.quants.dequantize` gives, to the bit (but for
    the sign of a zero).
    """
    grid = GRIDS[kind]
    blocks = raw.view(grid.block)  # (rows, K / 32)
    low = blocks["low"]
    if grid.bits == 8:
        codes = low ^ np.uint8(0x80)
    else:
        codes = np.concatenate([low & np.uint8(0x0F), low >> np.uint8(4)], axis=-1)
    if grid.bits == 5:
        codes |= np.unpackbits(blocks["high"], axis=-1, bitorder="little") << np.uint8(4)
    codes = codes.reshape(len(raw), -1)  # (rows, K)
    scales = np.ascontiguousarray(blocks["d"][..., 0])
    if grid.zero is None:
        return pack(codes, grid.bits), scales, np.ascontiguousarray(blocks["m"][..., 0])
    with np.errstate(over="ignore"):
        return pack(codes, grid.bits), scales, scales * np.float16(-grid.zero)


def same_codes(
    file: GGUFFile, tensor: GGUFTensor, order: np.ndarray | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Chunks ("weight" | "scales" | "biases", array) of a tensor on one of the `GRIDS`.

    order: rows of the result as indices of rows in the file.

    Raises: CheckpointError: a scale or bias is no finite float16.
    """
    for block in row_blocks(file.read(tensor), order):
        packed, scales, biases = split_blocks(block, tensor.kind)
        for part, array in (("scales", scales), ("biases", biases)):
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"{file.path}: tensor {tensor.name!r}: {part} that are no finite float16"
                )
        yield from (("weight", packed), ("scales", scales), ("biases", biases))


def float_values(
    file: GGUFFile, tensor: GGUFTensor, order: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """The tensor's values in float32, some rows at a time, by the gguf package's dequantization.

    Raises: CheckpointError: the gguf package cannot dequantize this type; NaN or infinite values.
    """
    from gguf import GGMLQuantizationType, quants

    for block in row_blocks(file.read(tensor), order, 1 << 20):
        # floats by their dtype, blocks as bytes
        raw = block.view(FLOATS[tensor.kind]) if tensor.kind in ("F16", "F32") else block
        try:
            values = quants.dequantize(raw, GGMLQuantizationType[tensor.kind])
        except NotImplementedError:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name!r}: the gguf package cannot read {tensor.kind}; "
                "take another file of the model, Q8_0 for example"
            ) from None
        if not np.isfinite(values).all():
            raise CheckpointError(f"{file.path}: tensor {tensor.name!r}: NaN or infinite values")
        yield np.array(values, np.float32)  # a copy: floats are a view of the file
