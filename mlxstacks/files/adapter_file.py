"""What both adapter formats share on disk: one safetensors file and one JSON config.

Problems are collected in a list, so that a bad adapter is reported once and whole.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.lora_modules import FLOAT_DTYPES, first_non_finite
from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.files.shard_header import refuse_constant
from mlxstacks.files.shards import ShardHeader, ShardWriter, TensorInfo, read_header, read_tensor
from mlxstacks.ops.affine import Array
from mlxstacks.regular_files import check_regular

CONFIG = "adapter_config.json"
_LARGEST_CONFIG_BYTES = 16_000_000


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of an adapter_config.json.

    Raises: AdapterError when it is missing, not JSON (NaN and Infinity are not), or no object.
    """
    if not path.is_file():
        raise AdapterError(f"{path}: missing; an adapter is a directory with its {path.name}")
    check_regular(path, kind=AdapterError)
    if path.stat().st_size > _LARGEST_CONFIG_BYTES:
        raise AdapterError(f"{path}: larger than {_LARGEST_CONFIG_BYTES} bytes, not a config")
    try:
        config = json.loads(path.read_bytes(), parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: holds a {type(config).__name__}, not a JSON object")
    return config


def open_weights(path: Path) -> ShardHeader:
    """Header of an adapter's safetensors file. Raises: AdapterError when missing or malformed."""
    if not path.is_file():
        raise AdapterError(f"{path}: missing; the adapter's config is there but not its weights")
    try:
        return read_header(path)
    except CheckpointError as error:
        raise AdapterError(f"adapter weights: {error}") from error


def read_float(info: TensorInfo, problems: list[str]) -> Array | None:
    """Raw numbers of a float tensor; None, and a line in `problems`, when it cannot be used."""
    if info.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(FLOAT_DTYPES)
        problems.append(f"{info.name}: dtype {info.dtype}; an adapter's numbers are {allowed}")
        return None
    if not info.size:
        problems.append(f"{info.name}: shape {info.shape} holds nothing")
        return None
    raw = read_tensor(info)
    index = first_non_finite(raw, info.dtype)
    if index is not None:
        problems.append(f"{info.name}: NaN or Inf at index {list(index)}; train or export it again")
        return None
    return raw


def raise_problems(directory: Path, problems: Sequence[str]) -> None:
    """One AdapterError that lists every problem; nothing when there is none."""
    if problems:
        many = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise AdapterError(f"adapter {directory}: {many}{lines}")


def save_adapter(
    directory: str | Path,
    weights_name: str,
    tensors: Mapping[str, tuple[str, Array]],
    config: Mapping[str, Any],
    metadata: Mapping[str, str],
    force: bool,
    source: Path,
) -> None:
    """Write weights and config as a whole: after a crash the target is the old one or the new.

    tensors: name -> (safetensors dtype, raw numbers), written in this order. source: the adapter
    that was read, which `force` does not replace either.
    Raises: TargetError when the target exists (without force), is or holds the source, or cannot
        be written.
    """
    plan = [(name, dtype, raw.shape) for name, (dtype, raw) in tensors.items()]
    needed = sum(raw.nbytes for _, raw in tensors.values()) + 1_000_000
    target = Path(directory)
    with staged_directory(target, force=force, needed_bytes=needed, inputs=[source]) as staging:
        with ShardWriter(staging / weights_name, plan, dict(metadata)) as writer:
            for name, (_, raw) in tensors.items():
                writer.write(name, np.ascontiguousarray(raw))
        write_json(staging / CONFIG, dict(config))
