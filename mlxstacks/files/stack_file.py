"""One frozen stack in one safetensors file: half-precision pairs, float32 routers, a JSON header.

The header (stack_header.py) is the safetensors metadata `mlxstacks`: JSON with sorted keys, no
times; the tensors stand in the order of their names. Equal stacks are equal bytes.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.errors import CheckpointError, StoreError
from mlxstacks.files.shard_header import AGAIN, ShardHeader, open_regular, read_header
from mlxstacks.files.shard_writer import ShardWriter
from mlxstacks.files.stack_header import Form, ProjectionShape, StackHeader, StorageDtype
from mlxstacks.files.strict_json import compact, read_object

__all__ = [
    "Form",
    "ProjectionShape",
    "StackFile",
    "StackHeader",
    "StorageDtype",
    "file_sha256",
    "raw_numbers",
    "read_arrays",
    "read_stack",
    "read_stack_header",
    "write_arrays",
    "write_stack",
]

METADATA_KEY = "mlxstacks"
REPAIR = "restore this file from a copy, or remove its domain with `mlxstacks stacks remove`"

_MLX = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
_INFINITY = {mx.float16: 0x7C00, mx.bfloat16: 0x7F80, mx.float32: 0x7F80_0000}


@dataclass(frozen=True, eq=False)
class StackFile:
    """A stack that was read. tensors: name -> array, shapes in stack_header.py."""

    header: StackHeader
    tensors: dict[str, mx.array]


def write_stack(path: str | Path, tensors: Mapping[str, mx.array], header: StackHeader) -> str:
    """Write a new file, synced to disk; returns its SHA-256 (hex).

    Law: `read_stack` gives the same header and arrays, bit for bit; equal calls write equal bytes.

    Raises: ValueError listing tensors that are missing, unexpected, of another dtype or shape than
        the header says, or not finite. TargetError: the file exists, the disk is full or
        read-only. Nothing is left then.
    """
    path = Path(path)
    StackHeader.from_json(header.as_json())
    wanted = header.tensors()
    found = {name: (_dtype_of(array), array.shape) for name, array in tensors.items()}
    problems = _differences(wanted, found) or _non_finite(tensors)
    if problems:
        raise ValueError("\n  ".join([f"stack {header.name} cannot be written:", *problems[:20]]))
    _write(path, wanted, tensors, {METADATA_KEY: compact(header.as_json()).decode()})
    return file_sha256(path)


def write_arrays(path: str | Path, arrays: Mapping[str, mx.array]) -> str:
    """Write a new file of float32 arrays that several stacks read; returns its SHA-256 (hex).

    Raises: ValueError: another dtype, NaN or Inf. TargetError as `write_stack`.
    """
    path = Path(path)
    plan = {name: (_dtype_of(array), array.shape) for name, array in sorted(arrays.items())}
    problems = [
        f"{name}: {dtype}, must be F32" for name, (dtype, _) in plan.items() if dtype != "F32"
    ]
    if problems := problems or _non_finite(arrays):
        raise ValueError("\n  ".join(["shared arrays cannot be written:", *problems[:20]]))
    _write(path, plan, arrays, {})
    return file_sha256(path)


def _write(
    path: Path,
    plan: Mapping[str, tuple[str, tuple[int, ...]]],
    tensors: Mapping[str, mx.array],
    metadata: Mapping[str, str],
) -> None:
    writer = ShardWriter(path, [(name, *spec) for name, spec in plan.items()], metadata)
    done = False
    try:
        with writer:
            for name in plan:
                writer.write(name, raw_numbers(tensors[name]))
        done = True
    finally:
        if not done:
            path.unlink(missing_ok=True)


def read_stack_header(path: str | Path) -> StackHeader:
    """The header of a stack's file, checked against its tensors' names, dtypes and shapes; reads
    none of the tensors.

    Raises: StoreError naming the file and what is wrong.
    """
    return _checked(Path(path))[0]


def read_stack(
    path: str | Path, expected_sha256: str | None = None, *, verified: bool = False
) -> StackFile:
    """A stack with its arrays in memory.

    expected_sha256: what the file's bytes must hash to, where known.
    verified: this file was read before, and nothing but its header is checked again.

    Raises: StoreError naming the file: missing, truncated, changed, not a stack, NaN or Inf.
    """
    path = Path(path)
    if not verified:
        _check_hash(path, expected_sha256)
    header, shard = _checked(path)
    return StackFile(header, _load(shard, check_numbers=not verified))


def read_arrays(path: str | Path, expected_sha256: str | None = None) -> dict[str, mx.array]:
    """The inverse of `write_arrays`. Raises: StoreError naming the file and what is wrong."""
    path = Path(path)
    _check_hash(path, expected_sha256)
    shard = _shard(path)
    strange = [name for name, info in shard.tensors.items() if info.dtype != "F32"]
    if strange:
        raise StoreError(f"{path}: {strange[0][:200]!a} is not float32; {REPAIR}")
    return _load(shard, check_numbers=True)


def _check_hash(path: Path, expected: str | None) -> None:
    if expected is not None and (found := file_sha256(path)) != expected:
        raise StoreError(
            f"{path}: its bytes changed: sha256 {found[:12]}, expected {expected[:12]}; {REPAIR}"
        )


def _load(shard: ShardHeader, check_numbers: bool) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(shard.path), format="safetensors")
        assert isinstance(loaded, dict)
        tensors = {name: loaded[name] for name in shard.tensors}
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:  # shrunk or gone since its header was read
        raise StoreError(f"{shard.path}: cannot be read: {error}; {REPAIR}") from None
    if check_numbers and (problems := _non_finite(tensors)):
        raise StoreError(f"{shard.path}: {problems[0]}; {REPAIR}")
    return tensors


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a regular file. Raises: StoreError naming a file that cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (CheckpointError, OSError) as error:
        raise StoreError(_in_a_store(error)) from None


def _checked(path: Path) -> tuple[StackHeader, ShardHeader]:
    shard = _shard(path)
    text = shard.metadata.get(METADATA_KEY)
    if text is None:
        raise StoreError(f"{path}: no stack: its metadata has no key {METADATA_KEY}; {REPAIR}")
    try:
        header = StackHeader.from_json(read_object(text.encode()))
    except ValueError as error:
        raise StoreError(f"{path}: header: {error}; {REPAIR}") from None
    found = {name: (info.dtype, info.shape) for name, info in shard.tensors.items()}
    if problems := _differences(header.tensors(), found):
        raise StoreError(f"{path}: {'; '.join(problems[:8])}; {REPAIR}")
    return header, shard


def _shard(path: Path) -> ShardHeader:
    try:
        return read_header(path)
    except CheckpointError as error:
        raise StoreError(_in_a_store(error)) from None


def _in_a_store(error: Exception) -> str:
    """The message of a reader of checkpoints, with the advice that fits a store."""
    return f"{str(error).removesuffix(AGAIN).rstrip(' ;:')}; {REPAIR}"


def _differences(
    wanted: Mapping[str, tuple[str, tuple[int, ...]]],
    found: Mapping[str, tuple[str, tuple[int, ...]]],
) -> list[str]:
    problems = [f"{name[:200]!a}: missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name[:200]!a}: unexpected" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if wanted[name] != found[name]:
            (dtype, shape), (other, other_shape) = wanted[name], found[name]
            problems.append(
                f"{name[:200]!a}: {other} {list(other_shape)}, the header says {dtype} "
                f"{list(shape)}"
            )
    return problems


def _non_finite(tensors: Mapping[str, mx.array]) -> list[str]:
    largest = {name: mx.max(_magnitude(array)) for name, array in tensors.items() if array.size}
    mx.eval(largest)
    return [
        f"{name}: NaN or Inf at index {_first_bad(tensors[name])}"
        for name, bits in largest.items()
        if bits.item() >= _INFINITY[tensors[name].dtype]
    ]


def _magnitude(array: mx.array) -> mx.array:
    """The bits of each number without its sign: they order as magnitudes do, Inf and NaN on top.

    On the CPU this takes a twentieth of the time of mx.isfinite.
    """
    wide = array.dtype == mx.float32
    unsigned = mx.uint32 if wide else mx.uint16
    return array.view(unsigned) & mx.array(0x7FFF_FFFF if wide else 0x7FFF, unsigned)


def _first_bad(array: mx.array) -> list[int]:
    bad = np.flatnonzero(~np.isfinite(np.array(array.astype(mx.float32))))
    return [int(index) for index in np.unravel_index(bad[0], array.shape)]


def _dtype_of(array: mx.array) -> str:
    names = {dtype: name for name, dtype in _MLX.items()}
    return names.get(array.dtype, str(array.dtype))


def raw_numbers(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's numbers for the file: bfloat16 as uint16, which NumPy has."""
    array = mx.contiguous(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)
