"""A GGUF file as a `Conversion`: codes as they are where the grid is MLX's, values elsewhere."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.convert.conversion import Conversion, Part
from mlxstacks.convert.gguf_config import Architecture
from mlxstacks.convert.gguf_file import GGUFFile, GGUFTensor, open_gguf
from mlxstacks.convert.gguf_grids import FLOATS, GRIDS, GROUP_SIZE, float_values, same_codes
from mlxstacks.convert.gguf_tokenizer import end_of_text_ids, write_tokenizer
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.files.shard_writer import Chunk
from mlxstacks.ops import affine


def gguf_conversion(path: Path, settings: ConvertSettings) -> Conversion:
    """Plan of a GGUF file: reads its header, and no tensor but small ones.

    Raises:
        CheckpointError: see `open_gguf`, `Architecture`, `write_tokenizer`.
    """
    return _Reader(open_gguf(path), settings).conversion()


def head_order(rows: int, heads: int) -> np.ndarray:
    """Rows of q or k for a rope over halves, as indices of rows stored for one over neighbours.

    llama.cpp stores row 2i of a head where the halves' order has row i, and 2i + 1 where it has
    i + head_dim / 2.
    """
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return order.transpose(0, 2, 1).reshape(-1)


class _Reader:
    def __init__(self, file: GGUFFile, settings: ConvertSettings) -> None:
        self.file, self.settings = file, settings
        self.architecture = Architecture(file)
        self.architecture.check_complete()
        self.dtype = self._model_dtype()
        self.quantization: dict[str, Any] = {}
        self.inexact: list[str] = []
        self.float32: list[str] = []

    def conversion(self) -> Conversion:
        config = self.architecture.config()
        parts = tuple(
            self._part(tensor, name)
            for tensor in self.file.tensors.values()
            if (name := self.architecture.module_of(tensor.name)) is not None
        )
        config |= end_of_text_ids(self.file) | self._quantization()
        return Conversion(
            config=config,
            parts=parts,
            write_files=partial(write_tokenizer, self.file),
            notes=tuple(self._notes()),
            inputs=(self.file.path,),
        )

    def _model_dtype(self) -> str:
        """What the weights are computed in: the scales' dtype, else that of the unpacked weights."""
        kinds = [tensor.kind for tensor in self.file.tensors.values() if len(tensor.shape) > 1]
        if all(kind in FLOATS for kind in kinds):
            return max(set(kinds), key=kinds.count)
        return "F16"

    def _part(self, tensor: GGUFTensor, name: str) -> Part:
        module, _, leaf = name.rpartition(".")
        order = self._order(tensor)
        bits = self._bits(tensor, module) if leaf == "weight" else None
        if bits is not None:
            return self._quantized(tensor, module, bits, order)
        if leaf == "weight" and tensor.kind in GRIDS and len(tensor.shape) > 1:
            return self._same_codes(tensor, module, order)
        return self._floats(tensor, name, order)

    def _order(self, tensor: GGUFTensor) -> np.ndarray | None:
        heads = {"attn_q": self.architecture.heads, "attn_k": self.architecture.key_value_heads}
        role = tensor.name.split(".")[-2]
        if not self.architecture.interleaved or role not in heads:
            return None
        return head_order(tensor.shape[0], heads[role])

    def _bits(self, tensor: GGUFTensor, module: str) -> int | None:
        """Width to quantize to by values; None where codes or floats stay."""
        if len(tensor.shape) < 2 or tensor.shape[-1] % self.settings.group_size:
            return None
        named = any(fnmatch.fnmatchcase(module, one) for one, _ in self.settings.overrides())
        if not named and (tensor.kind in GRIDS or module.endswith(".gate")):
            return None
        return self.settings.bits_of(module)

    def _same_codes(self, tensor: GGUFTensor, module: str, order: np.ndarray | None) -> Part:
        bits = GRIDS[tensor.kind].bits
        self.quantization[module] = {"group_size": GROUP_SIZE, "bits": bits}
        return Part(
            tensor.kind,
            f"{bits} bits in groups of {GROUP_SIZE}, the same codes",
            _quantized_specs(tensor, module, bits, GROUP_SIZE, "F16"),
            lambda: _named(module, same_codes(self.file, tensor, order)),
        )

    def _quantized(
        self, tensor: GGUFTensor, module: str, bits: int, order: np.ndarray | None
    ) -> Part:
        group_size, dtype = self.settings.group_size, self.dtype
        self.quantization[module] = {"group_size": group_size, "bits": bits}

        def chunks() -> Iterator[tuple[str, Chunk]]:
            for values in float_values(self.file, tensor, order):
                groups = affine.round_to(values.reshape(-1, group_size), dtype)
                codes, scales, biases = affine.quantize(groups, bits, dtype)
                yield f"{module}.weight", affine.pack(codes.reshape(values.shape), bits)
                yield f"{module}.scales", affine.to_storage(scales, dtype)
                yield f"{module}.biases", affine.to_storage(biases, dtype)

        return Part(
            tensor.kind,
            f"{bits} bits in groups of {group_size}, by value",
            _quantized_specs(tensor, module, bits, group_size, dtype),
            chunks,
        )

    def _floats(self, tensor: GGUFTensor, name: str, order: np.ndarray | None) -> Part:
        dtype = self.dtype
        if tensor.kind not in (*FLOATS, *GRIDS):
            self.inexact.append(tensor.kind)
        elif tensor.kind != dtype and not self._fits(tensor, dtype):
            dtype = "F32"
            self.float32.append(name)

        def chunks() -> Iterator[tuple[str, Chunk]]:
            for values in float_values(self.file, tensor, order):
                yield name, affine.to_storage(values, dtype)

        return Part(tensor.kind, _DTYPE_NAMES[dtype], ((name, dtype, tensor.shape),), chunks)

    def _fits(self, tensor: GGUFTensor, dtype: str) -> bool:
        """Whether every value of the tensor is one of `dtype`."""
        return all(
            np.array_equal(affine.round_to(values.copy(), dtype), values)
            for values in float_values(self.file, tensor)
        )

    def _quantization(self) -> dict[str, Any]:
        """The commonest width for all, and an entry for each module that differs."""
        widths = [tuple(entry.values()) for entry in self.quantization.values()]
        if not widths:
            return {}
        group_size, bits = max(set(widths), key=widths.count)
        usual = {"group_size": group_size, "bits": bits}
        others = {module: one for module, one in self.quantization.items() if one != usual}
        quantization = {**usual, "mode": "affine", **others}
        return {"quantization": quantization, "quantization_config": quantization}

    def _notes(self) -> Iterator[str]:
        if self.inexact:
            kinds = ", ".join(sorted(set(self.inexact)))
            yield (
                f"{kinds}: not MLX's grid, so {len(self.inexact)} tensors are values rounded to "
                f"{_DTYPE_NAMES[self.dtype]}; --bits N quantizes them again."
            )
        if self.float32:
            yield (
                f"{len(self.float32)} tensors hold values that are none of "
                f"{_DTYPE_NAMES[self.dtype]} and stay float32: mlx-lm then computes in float32."
            )


_DTYPE_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def _quantized_specs(
    tensor: GGUFTensor, module: str, bits: int, group_size: int, dtype: str
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    *rows, width = tensor.shape
    grouped = (*rows, width // group_size)
    return (
        (f"{module}.weight", "U32", (*rows, affine.packed_width(width, bits))),
        (f"{module}.scales", dtype, grouped),
        (f"{module}.biases", dtype, grouped),
    )


def _named(module: str, chunks: Iterator[tuple[str, np.ndarray]]) -> Iterator[tuple[str, Chunk]]:
    for leaf, array in chunks:
        yield f"{module}.{leaf}", array
