"""What all safetensors files of a store share: written once under a plan, read only after checks.

A plan is tensor name -> (safetensors dtype, shape), in the order of the file. Messages end with a
`repair`: what to do about a bad file of that kind.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.base_model import load_arrays
from mlxstacks.errors import CheckpointError, StoreError
from mlxstacks.files.shard_header import AGAIN, ShardHeader, open_regular, read_header
from mlxstacks.files.shard_writer import ShardWriter
from mlxstacks.files.strict_json import read_object

Plan = Mapping[str, tuple[str, tuple[int, ...]]]

_MLX = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
_INFINITY = {mx.float16: 0x7C00, mx.bfloat16: 0x7F80, mx.float32: 0x7F80_0000}


def write_tensors(
    path: Path, plan: Plan, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]
) -> None:
    """Write a new file, synced to disk. Raises: TargetError; nothing is left then."""
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


def read_metadata(
    path: Path, key: str, kind: str, repair: str
) -> tuple[dict[str, Any], ShardHeader]:
    """The JSON object under a metadata key, and the file's own header; reads no tensor.

    kind: what the file should be, for messages. Raises: StoreError naming the file.
    """
    shard = open_shard(path, repair)
    text = shard.metadata.get(key)
    if text is None:
        raise StoreError(f"{path}: no {kind}: its metadata has no key {key}; {repair}")
    try:
        return read_object(text.encode()), shard
    except ValueError as error:
        raise StoreError(f"{path}: header: {error}; {repair}") from None


def open_shard(path: Path, repair: str) -> ShardHeader:
    """The checked header of a safetensors file. Raises: StoreError naming the file."""
    try:
        return read_header(path)
    except CheckpointError as error:
        raise StoreError(_in_a_store(error, repair)) from None


def load_tensors(shard: ShardHeader, repair: str, *, check_numbers: bool) -> dict[str, mx.array]:
    """Every tensor, in memory. Raises: StoreError: changed, shrunk or gone since its header was
    read; NaN or Inf.
    """
    try:
        loaded, _ = load_arrays(shard.path)
        if problems := differences(plan_in(shard), plan_of(loaded)):
            raise StoreError(f"{shard.path}: changed while it was read: {problems[0]}; {repair}")
        tensors = {name: loaded[name] for name in shard.tensors}
        mx.eval(tensors)
    except (RuntimeError, ValueError) as error:  # shrunk or gone
        raise StoreError(f"{shard.path}: cannot be read: {error}; {repair}") from None
    if check_numbers and (problems := non_finite(tensors)):
        raise StoreError(f"{shard.path}: {problems[0]}; {repair}")
    return tensors


def check_hash(path: Path, expected: str | None, repair: str) -> None:
    """Raises: StoreError where the file's bytes do not hash to `expected`, if that is known."""
    if expected is not None and (found := hash_file(path, repair)) != expected:
        raise StoreError(
            f"{path}: its bytes changed: sha256 {found[:12]}, expected {expected[:12]}; {repair}"
        )


def hash_file(path: Path, repair: str) -> str:
    """SHA-256 (hex) of a regular file. Raises: StoreError naming a file that cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (CheckpointError, OSError) as error:
        raise StoreError(_in_a_store(error, repair)) from None


def plan_of(tensors: Mapping[str, mx.array]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The plan that these arrays follow, in their order."""
    names = {dtype: name for name, dtype in _MLX.items()}
    return {
        name: (names.get(array.dtype, str(array.dtype)), array.shape)
        for name, array in tensors.items()
    }


def plan_in(shard: ShardHeader) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The plan that a file follows."""
    return {name: (info.dtype, info.shape) for name, info in shard.tensors.items()}


def differences(wanted: Plan, found: Plan) -> list[str]:
    """Tensors that are missing, unexpected, of another dtype or shape; one line each."""
    if wanted == found:  # tables of thousands, whenever a stack is read
        return []
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


def non_finite(tensors: Mapping[str, mx.array]) -> list[str]:
    """Tensors with NaN or Inf and where, one line each."""
    largest = {name: mx.max(_magnitude(array)) for name, array in tensors.items() if array.size}
    mx.eval(largest)
    return [
        f"{name}: NaN or Inf at index {_first_bad(tensors[name])}"
        for name, bits in largest.items()
        if bits.item() >= _INFINITY[tensors[name].dtype]
    ]


def raw_numbers(array: mx.array) -> np.ndarray[Any, Any]:
    """The array's numbers for the file: bfloat16 as uint16, which NumPy has."""
    array = mx.contiguous(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


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


def _in_a_store(error: Exception, repair: str) -> str:
    """The message of a reader of checkpoints, with the advice that fits a store."""
    return f"{str(error).removesuffix(AGAIN).rstrip(' ;:')}; {repair}"
