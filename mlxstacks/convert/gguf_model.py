"""A GGUF file as a `Conversion`: codes as they are where the grid is MLX's, values elsewhere."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.convert.conversion import Conversion, Part
from mlxstacks.convert.gguf_config import Architecture
from mlxstacks.convert.gguf_file import GGUFFile, GGUFTensor, open_gguf
from mlxstacks.convert.gguf_grids import FLOATS, GRIDS, GROUP_SIZE, float_values, same_codes
from mlxstacks.convert.gguf_tokenizer import end_of_text_ids, tokenizer_files, write_files
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.shards import Chunk
from mlxstacks.ops import affine


def gguf_conversion(path: Path, settings: ConvertSettings) -> Conversion:
    """Plan of a GGUF file: reads its header, and of tensors only
    floats that are to become another dtype.

    Raises:
        CheckpointError: see `open_gguf`, `Architecture`, `tokenizer_files`; tensors of other shapes
            than the keys say.
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
        self.patterns = {pattern for pattern, _ in settings.overrides()}
        self.inexact: list[str] = []
        self.float32: list[str] = []

    def conversion(self) -> Conversion:
        config = self.architecture.config()
        self._check_shapes(config)
        parts = tuple(
            self._part(tensor, name)
            for tensor in self.file.tensors.values()
            if (name := self.architecture.module_of(tensor.name)) is not None
        )
        if self.patterns:
            raise InputError(
                f"{self.file.path}: module_bits {', '.join(sorted(self.patterns))}: no module of "
                f"this model matches; they are named like {parts[-1].specs[0][0]}"
            )
        config |= end_of_text_ids(self.file) | self._quantization()
        return Conversion(
            config=config,
            parts=parts,
            write_files=partial(write_files, tokenizer_files(self.file)),
            notes=tuple(self._notes()),
            inputs=(self.file.path,),
        )

    def _check_shapes(self, config: dict[str, Any]) -> None:
        """Raises: CheckpointError listing tensors of another shape than the config asks for."""
        expected = {
            name: array.shape
            for name, array in tree_flatten(base_model.build_model(config).parameters())
        }
        names = {self.architecture.module_of(name): t for name, t in self.file.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in names.items() if name is not None}
        faults = [
            f"{name} {shapes.get(name, 'is missing')}, not {expected.get(name, 'known')}"
            for name in sorted(shapes.keys() | expected.keys())
            if shapes.get(name) != expected.get(name)
        ]
        if faults:
            more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
            raise CheckpointError(
                f"{self.file.path}: tensors do not fit the keys of {self.architecture.name}: "
                f"{'; '.join(faults[:4])}{more}"
            )

    def _model_dtype(self) -> str:
        """What is computed in: the dtype of scales, else of most weights; `--dtype` where given."""
        kinds = [tensor.kind for tensor in self.file.tensors.values() if len(tensor.shape) > 1]
        floats = all(kind in FLOATS for kind in kinds)
        dtype = Counter(kinds).most_common(1)[0][0] if floats else "F16"
        if self.settings.dtype is None:
            return dtype
        given = _DTYPES[self.settings.dtype]
        if given != "F16" and any(kind in GRIDS for kind in kinds):
            raise InputError(
                f"{self.file.path}: --dtype {self.settings.dtype}: the file's scales are float16; "
                "take float16, or none"
            )
        return given

    def _part(self, tensor: GGUFTensor, name: str) -> Part:
        module, _, leaf = name.rpartition(".")
        order = self._order(tensor)
        if leaf == "bias" or len(tensor.shape) == 1:
            return self._floats(tensor, name, order)
        named = [
            pattern
            for pattern, _ in self.settings.overrides()
            if fnmatch.fnmatchcase(module, pattern)
        ]
        self.patterns.difference_update(named)
        bits = self.settings.bits_of(module)
        has_grid = tensor.kind in GRIDS
        by_value = bool(named) or not (has_grid or module.endswith(".gate"))
        if by_value and bits is not None and tensor.shape[-1] % self.settings.group_size == 0:
            return self._quantized(tensor, module, bits, order)
        if has_grid and not (named and bits is None):
            return self._same_codes(tensor, module, order)
        return self._floats(tensor, name, order)

    def _order(self, tensor: GGUFTensor) -> np.ndarray | None:
        heads = {"attn_q": self.architecture.heads, "attn_k": self.architecture.key_value_heads}
        role = tensor.name.split(".")[-2]
        if not self.architecture.interleaved or role not in heads:
            return None
        return head_order(tensor.shape[0], heads[role])

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
            for values in self._rounded(tensor, dtype, order):
                groups = values.reshape(-1, group_size)
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
        elif self.settings.dtype is None and not self._fits(tensor, dtype):
            dtype = "F32"
            self.float32.append(name)

        def chunks() -> Iterator[tuple[str, Chunk]]:
            for values in self._rounded(tensor, dtype, order):
                yield name, affine.to_storage(values, dtype)

        return Part(tensor.kind, _DTYPE_NAMES[dtype], ((name, dtype, tensor.shape),), chunks)

    def _rounded(
        self, tensor: GGUFTensor, dtype: str, order: np.ndarray | None
    ) -> Iterator[np.ndarray]:
        for values in float_values(self.file, tensor, order):
            affine.round_to(values, dtype)
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{self.file.path}: tensor {tensor.name!r}: values too large for "
                    f"{_DTYPE_NAMES[dtype]}; try --dtype float32"
                )
            yield values

    def _fits(self, tensor: GGUFTensor, dtype: str) -> bool:
        """Whether every value of the tensor is one of `dtype`."""
        return tensor.kind == dtype or all(
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
                f"{_DTYPE_NAMES[self.dtype]} and stay float32: mlx-lm then computes in float32. "
                f"--dtype {_DTYPE_NAMES[self.dtype]} rounds them."
            )


_DTYPE_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


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
