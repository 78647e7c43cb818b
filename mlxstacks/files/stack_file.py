"""One frozen stack in one safetensors file: half-precision pairs, float32 routers, a JSON header.

The header (stack_header.py) is the safetensors metadata `mlxstacks`: JSON with sorted keys, no
times; the tensors stand in the order of their names. Equal stacks are equal bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlxstacks.errors import StoreError
from mlxstacks.files.shard_header import ShardHeader
from mlxstacks.files.stack_header import Form, ProjectionShape, StackHeader, StorageDtype
from mlxstacks.files.strict_json import compact
from mlxstacks.files.tensor_file import (
    check_hash,
    differences,
    hash_file,
    load_tensors,
    non_finite,
    open_shard,
    plan_in,
    plan_of,
    raw_numbers,
    read_metadata,
    write_tensors,
)

__all__ = [
    "Form",
    "ProjectionShape",
    "StackFile",
    "StackHeader",
    "StackIndex",
    "StorageDtype",
    "file_sha256",
    "raw_numbers",
    "read_arrays",
    "read_stack",
    "read_stack_header",
    "read_stack_index",
    "write_arrays",
    "write_stack",
]

METADATA_KEY = "mlxstacks"
REPAIR = "restore this file from a copy, or remove its domain with `mlxstacks stacks remove`"


@dataclass(frozen=True, eq=False)
class StackIndex:
    """A stack's header, checked against what its file holds (`shard`)."""

    header: StackHeader
    shard: ShardHeader


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
    problems = differences(wanted, plan_of(tensors)) or non_finite(tensors)
    if problems:
        raise ValueError("\n  ".join([f"stack {header.name} cannot be written:", *problems[:20]]))
    write_tensors(path, wanted, tensors, {METADATA_KEY: compact(header.as_json()).decode()})
    return file_sha256(path)


def write_arrays(path: str | Path, arrays: Mapping[str, mx.array]) -> str:
    """Write a new file of float32 arrays that several stacks read; returns its SHA-256 (hex).

    Raises: ValueError: another dtype, NaN or Inf. TargetError as `write_stack`.
    """
    path = Path(path)
    plan = dict(sorted(plan_of(arrays).items()))
    problems = [
        f"{name}: {dtype}, must be F32" for name, (dtype, _) in plan.items() if dtype != "F32"
    ]
    if problems := problems or non_finite(arrays):
        raise ValueError("\n  ".join(["shared arrays cannot be written:", *problems[:20]]))
    write_tensors(path, plan, arrays, {})
    return file_sha256(path)


def read_stack_header(path: str | Path) -> StackHeader:
    """The header of a stack's file, checked against its tensors' names, dtypes and shapes; reads
    none of the tensors.

    Raises: StoreError naming the file and what is wrong.
    """
    return read_stack_index(path).header


def read_stack_index(path: str | Path) -> StackIndex:
    """As `read_stack_header`, with the file's own header."""
    path = Path(path)
    value, shard = read_metadata(path, METADATA_KEY, "stack", REPAIR)
    try:
        header = StackHeader.from_json(value)
    except ValueError as error:
        raise StoreError(f"{path}: header: {error}; {REPAIR}") from None
    if problems := differences(header.tensors(), plan_in(shard)):
        raise StoreError(f"{path}: {'; '.join(problems[:8])}; {REPAIR}")
    return StackIndex(header, shard)


def read_stack(
    path: str | Path, expected_sha256: str | None = None, *, known: StackIndex | None = None
) -> StackFile:
    """A stack with its arrays in memory.

    expected_sha256: what the file's bytes must hash to, where known.
    known: of this very file, where it was hashed before and has not changed since; what it holds
        is not checked again then.

    Raises: StoreError naming the file: missing, truncated, changed, not a stack, NaN or Inf.
    """
    path = Path(path)
    if known is not None:
        return StackFile(known.header, load_tensors(known.shard, REPAIR, check_numbers=False))
    check_hash(path, expected_sha256, REPAIR)
    index = read_stack_index(path)
    return StackFile(index.header, load_tensors(index.shard, REPAIR, check_numbers=True))


def read_arrays(path: str | Path, expected_sha256: str | None = None) -> dict[str, mx.array]:
    """The inverse of `write_arrays`. Raises: StoreError naming the file and what is wrong."""
    path = Path(path)
    check_hash(path, expected_sha256, REPAIR)
    shard = open_shard(path, REPAIR)
    strange = [name for name, info in shard.tensors.items() if info.dtype != "F32"]
    if strange:
        raise StoreError(f"{path}: {strange[0][:200]!a} is not float32; {REPAIR}")
    return load_tensors(shard, REPAIR, check_numbers=True)


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a regular file. Raises: StoreError naming a file that cannot be read."""
    return hash_file(path, REPAIR)
