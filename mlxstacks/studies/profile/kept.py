"""Choices of one group, kept until the profile is done: what was counted is not counted again."""

import os
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxstacks.base_model import load_arrays, save_arrays
from mlxstacks.errors import InputError
from mlxstacks.files.disk import mlx_write_errors

_ARRAY, _OF = "choices", "plan_and_group"


def keep_choices(path: Path, choices: np.ndarray, of: str) -> None:
    """choices: (n, L, E), written as float32. of: what they are counts of.

    The file is there as a whole or not at all.
    """
    temporary = path.with_name(f".{path.name}.tmp.safetensors")
    with mlx_write_errors(path):
        arrays = {_ARRAY: mx.array(choices.astype(np.float32))}
        save_arrays(temporary, arrays, {_OF: of})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def kept_choices(path: Path, of: str) -> np.ndarray:
    """(n, L, E) float64. Raises: InputError for a damaged file and for counts of something else."""
    try:
        arrays, about = load_arrays(path)
        found, said = np.array(arrays[_ARRAY]).astype(np.float64), about.get(_OF)
    except (RuntimeError, KeyError, ValueError) as error:
        raise InputError(f"{path}: damaged ({error}); remove it to count again") from None
    if said != of:
        raise InputError(f"{path}: counts of another plan or group; remove it to count again")
    return found
