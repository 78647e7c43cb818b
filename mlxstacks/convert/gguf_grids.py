"""Blocks of GGUF files as groups of MLX's affine grid: the same codes, scales and biases.

A block of Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0 holds 32 codes, an f16 scale d and, in Q4_1 and Q5_1, an
f16 minimum m. It stands for `d * q + m`, or `d * (q - zero)` with zero 8 (Q4_0), 16 (Q5_0) or, for
the signed codes of Q8_0, 128 after a shift. With bias m or -zero * d these are MLX's groups of 32
at 4, 5 and 8 bits. All other types are read by their values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxstacks.convert.gguf_file import GGUFFile, GGUFTensor, row_blocks
from mlxstacks.errors import CheckpointError
from mlxstacks.ops.affine import pack

GROUP_SIZE = 32
FLOATS: dict[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
}

Array = np.ndarray


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


def split_blocks(raw: Array, kind: str) -> tuple[Array, Array, Array]:
    """Packed codes, scales and biases of rows of blocks.

    Shapes: raw (rows, bytes a row) uint8 -> packed (rows, K * bits / 32) uint32, scales and biases
    (rows, K / 32) float16.
    Law: scale * code + bias in float32 is what `gguf.quants.dequantize` gives, to the bit (but for
    the sign of a zero).
    """
    grid = GRIDS[kind]
    blocks = raw.view(grid.block)  # (rows, K / 32)
    codes = _codes(blocks, grid).reshape(len(raw), -1)  # (rows, K)
    scales = np.ascontiguousarray(blocks["d"][..., 0])
    if grid.zero is None:
        return pack(codes, grid.bits), scales, np.ascontiguousarray(blocks["m"][..., 0])
    with np.errstate(over="ignore"):
        return pack(codes, grid.bits), scales, scales * np.float16(-grid.zero)


def _codes(blocks: Array, grid: Grid) -> Array:
    """(rows, blocks) -> (rows, blocks, 32) uint8."""
    low = blocks["low"]
    if grid.bits == 8:
        return low ^ np.uint8(0x80)
    codes = np.concatenate([low & np.uint8(0x0F), low >> np.uint8(4)], axis=-1)
    if grid.bits == 5:
        codes |= np.unpackbits(blocks["high"], axis=-1, bitorder="little") << np.uint8(4)
    return codes


def same_codes(
    file: GGUFFile, tensor: GGUFTensor, order: Array | None = None
) -> Iterator[tuple[str, Array]]:
    """Chunks ("weight" | "scales" | "biases", array) of a tensor on one of the `GRIDS`.

    order: rows of the result as indices of rows in the file.

    Raises:
        CheckpointError: a scale or bias is no finite float16.
    """
    rows = file.read(tensor)
    blocks = row_blocks(rows if order is None else rows[order])
    for block in blocks:
        packed, scales, biases = split_blocks(block, tensor.kind)
        for part, array in (("scales", scales), ("biases", biases)):
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"{file.path}: tensor {tensor.name!r}: {part} that are no finite float16"
                )
        yield from (("weight", packed), ("scales", scales), ("biases", biases))


def float_values(file: GGUFFile, tensor: GGUFTensor, order: Array | None = None) -> Iterator[Array]:
    """The tensor's values in float32, some rows at a time, by the gguf package's dequantization.

    Raises:
        CheckpointError: the gguf package cannot dequantize this type; NaN or infinite values.
    """
    from gguf import GGMLQuantizationType, quants

    rows = file.read(tensor)
    for block in row_blocks(rows if order is None else rows[order], 1 << 20):
        try:
            values = quants.dequantize(
                _typed(block, tensor.kind), GGMLQuantizationType[tensor.kind]
            )
        except NotImplementedError:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name!r}: the gguf package cannot read {tensor.kind}; "
                "take another file of the model, Q8_0 for example"
            ) from None
        if not np.isfinite(values).all():
            raise CheckpointError(f"{file.path}: tensor {tensor.name!r}: NaN or infinite values")
        yield np.array(values, np.float32)  # a copy: floats are a view of the file


def _typed(raw: Array, kind: str) -> Array:
    """What `gguf.quants.dequantize` takes: floats by their dtype, blocks as bytes."""
    return raw.view(FLOATS[kind]) if kind in ("F16", "F32") else raw
