"""How a module's weight lies in an MLX checkpoint: plain, or packed with scales and biases.

bits and group_size come from `config["quantization"]`: the module's own entry, else the default
where it fits the shapes, else the one grid that does. Packed shapes tell bits x group_size alone:
(4, 64), (8, 32) and (2, 128) look alike, with 64, 32 and 128 inputs to a scale. Where that leaves
it open, mlx-lm is asked, which knows the width from its model class. No adapter decides: a wrong
one would make the weight look as wide as itself. What config and shapes disagree about is an error
that names both.

A module is stored under its path in mlx-lm's model, or under the name that the model had on the
hub; mlx-lm's loading says which. What it computes while loading (experts stacked, AWQ unpacked,
FP8 widened) is stored nowhere and cannot be fused in place.
"""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from mlxstacks.base_model import LoadedWeight
from mlxstacks.command_line import command_line
from mlxstacks.errors import CheckpointError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.lora_modules import FLOAT_DTYPES
from mlxstacks.files.shards import TensorInfo
from mlxstacks.ops.affine import BITS, GROUP_SIZES
from mlxstacks.ops.float_grids import MODES, VALUE_DTYPE

# bits x group_size of the modes whose scales are bytes tell them apart.
_BYTE_SCALED = {mode.bits * mode.group_size: mode.name for mode in MODES.values()}

# Nearest names cost time in proportion to modules x problems (30 microseconds each); further
# problems are listed without.
_NAMED_NEIGHBOURS, _COMPARED_NAMES = 20, 40_000

Grid = tuple[int, int]  # (bits, group_size)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight: rows (N, or E x N) of input_dims numbers. bits is None when it is not packed.

    mode: MLX's name of the grid; those of FP4 and FP8 have no biases. dtype: of the values where
    they are plain: that of the weight, of affine scales, or BF16.
    """

    weight: TensorInfo
    scales: TensorInfo | None
    biases: TensorInfo | None
    bits: int | None
    group_size: int | None
    input_dims: int
    dtype: str
    mode: str = "affine"

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, (N, K) or (E, N, K)."""
        return (*self.weight.shape[:-1], self.input_dims)


def stored_name(checkpoint: Checkpoint, path: str) -> str | None:
    """The tensor that is the weight of module `path` of mlx-lm's model; None without a module.

    Raises: CheckpointError, with the command to run, where mlx-lm computes the weight from other
        tensors; where the files are not in MLX's layout and mlx-lm cannot load them.
    """
    plain_name = f"{path}.weight"
    is_stored = plain_name in checkpoint.tensors
    if is_stored and checkpoint.is_converted:
        return plain_name
    loaded = loaded_or_none(checkpoint) if checkpoint.is_converted else checkpoint.loaded_weights
    module = loaded.get(path)
    if module is None:
        return plain_name if is_stored else None  # a vision tower, say, that mlx-lm drops
    if module.tensor is None:
        method = _hub_quantization(checkpoint) or "an unconverted hub checkpoint"
        raise CheckpointError(
            f"{path}: mlx-lm computes this weight from other tensors as it loads the model "
            f"({method}); convert it first: `{_conversion(checkpoint)}`"
        )
    return module.tensor


def loaded_or_none(checkpoint: Checkpoint) -> dict[str, LoadedWeight]:
    """mlx-lm's modules; none where it cannot load the files: they are then all that is known."""
    try:
        return checkpoint.loaded_weights
    except CheckpointError:
        return {}


def module_paths(checkpoint: Checkpoint) -> list[str]:
    """Modules that an adapter could mean: those with a weight of two or three axes."""
    loaded = {} if checkpoint.is_converted else loaded_or_none(checkpoint)
    return [path for path in loaded if "norm" not in path] or [
        name.removesuffix(".weight")
        for name, info in checkpoint.tensors.items()
        if name.endswith(".weight") and len(info.shape) in (2, 3)
    ]


def no_such_modules(paths: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """A problem for each path, which is no module of the model; the first name the nearest."""
    candidates = module_paths(checkpoint) if paths else []
    compared = min(_NAMED_NEIGHBOURS, max(1, _COMPARED_NAMES // max(1, len(candidates))))
    problems = []
    for number, path in enumerate(paths):
        near = difflib.get_close_matches(path, candidates, 2) if number < compared else []
        nearest = f"; nearest: {', '.join(near)}" if near else ""
        problems.append(f"{path}: no such module in the model{nearest}")
    return problems


def stored_weight(checkpoint: Checkpoint, path: str) -> StoredWeight:
    """The weight of module `path` of mlx-lm's model.

    Raises: CheckpointError for no such module, what `stored_name` refuses, another mode than
        affine, missing or odd-shaped parts, a config that contradicts the shapes, and a grid that
        nothing decides.
    """
    tensors, name = checkpoint.tensors, stored_name(checkpoint, path)
    if name is None:
        raise CheckpointError(f"{path}: no such module in {checkpoint.directory}")
    weight, stored = tensors[name], name.removesuffix(".weight")
    scales, biases = tensors.get(f"{stored}.scales"), tensors.get(f"{stored}.biases")
    quantization = checkpoint.config.get("quantization")
    modules = quantization if isinstance(quantization, dict) else {}
    key = config_key(modules, path, weight)
    named, entry = key in modules, modules.get(key)
    if not weight.shape:
        raise CheckpointError(f"{path}: the weight in {weight.file.name} is a single number")
    if scales is None:
        return _plain(checkpoint, weight, biases, path, entry)
    if not isinstance(quantization, dict):
        if method := _hub_quantization(checkpoint):
            raise CheckpointError(
                f"{checkpoint.directory}: {method}; only MLX's own modes "
                f"are supported: {_requantize(checkpoint.directory)}"
            )
        raise CheckpointError(
            f"{path}: {path}.scales is there, but config.json has no `quantization`; mlx-lm cannot "
            "load this either: restore the config or convert the model again"
        )
    if named and not entry:  # mlx-lm leaves the module plain for null and {} too
        raise CheckpointError(
            f"{path}: config says it is not quantized ({json.dumps(entry)}), {scales.name} is there"
        )
    if named and entry is not True and not isinstance(entry, dict):
        raise CheckpointError(
            f"{path}: config's quantization is {str(entry)[:40]!a}; true, false or an object with "
            "bits and group_size is allowed"
        )
    mode = _mode(entry, quantization, weight, scales)
    if mode in MODES:
        return _byte_scaled(path, entry, mode, (weight, scales, biases))
    if mode != "affine":
        raise CheckpointError(
            f"{path}: quantized as {mode}; MLX has affine, {', '.join(MODES)}: "
            f"{_requantize(checkpoint.directory)}"
        )
    _check_parts(path, weight, scales, biases)
    bits, group_size = _grid(checkpoint, path, key, weight, scales)
    width = scales.shape[-1] * group_size
    return StoredWeight(weight, scales, biases, bits, group_size, width, scales.dtype)


def _byte_scaled(
    path: str,
    entry: object,
    name: str,
    parts: tuple[TensorInfo, TensorInfo, TensorInfo | None],
) -> StoredWeight:
    """A weight in an FP4 or FP8 mode. Raises CheckpointError for parts that are not of it."""
    (weight, scales, biases), mode = parts, MODES[name]
    shapes = f"weight {weight.dtype} {list(weight.shape)}, scales {scales.dtype} "
    shapes += f"{list(scales.shape)} in {weight.file.name}"
    words, groups = weight.shape[-1], scales.shape[-1] if scales.shape else 0
    fits = weight.dtype == "U32" and scales.dtype == "U8" and len(scales.shape) > 1
    fits = fits and weight.shape[:-1] == scales.shape[:-1] and groups > 0
    if not fits or words * 32 != groups * mode.group_size * mode.bits:
        raise CheckpointError(
            f"{path}: {shapes} are not {name}, which has {mode.bits} bits packed into U32 and a U8 "
            f"scale for {mode.group_size} weights: download or convert the model again"
        )
    if biases is not None:
        raise CheckpointError(f"{path}: {biases.name} is there, and {name} has no biases")
    stated = entry if isinstance(entry, dict) else {}
    wanted = {"bits": mode.bits, "group_size": mode.group_size}
    if wrong := {key: n for key, n in wanted.items() if stated.get(key, n) != n}:
        raise CheckpointError(f"{path}: config says {stated}, and {name} has {wrong}")
    return StoredWeight(
        weight,
        scales,
        None,
        mode.bits,
        mode.group_size,
        groups * mode.group_size,
        VALUE_DTYPE,
        name,
    )


def weight_shape(checkpoint: Checkpoint, path: str) -> tuple[int, ...]:
    """Logical shape of a module's weight, (N, K) or (E, N, K), where it can be fused or not.

    Raises: CheckpointError as `stored_weight`, where mlx-lm does not load the module either.
    """
    try:
        return stored_weight(checkpoint, path).shape
    except CheckpointError:
        module = loaded_or_none(checkpoint).get(path)
        if module is None:
            raise
        return module.shape


def config_key(quantization: dict[str, Any], path: str, weight: TensorInfo) -> str:
    """The name by which the config's `quantization` knows a module: mlx-lm's, else the stored."""
    stored = weight.name.removesuffix(".weight")
    return stored if path not in quantization and stored in quantization else path


def other_grids(checkpoint: Checkpoint, path: str, stored: StoredWeight) -> list[Grid]:
    """Grids that fit the shapes of a packed weight as well, where the config does not name it."""
    quantization = checkpoint.config.get("quantization")
    named = isinstance(quantization, dict) and path in quantization
    if stored.scales is None or named:
        return []
    fitting = _fitting(stored.weight, stored.scales)
    return [grid for grid in fitting if grid != (stored.bits, stored.group_size)]


def grid_texts(grids: list[Grid], scales: TensorInfo) -> str:
    """Grids for a message, each with the input_dims that it would mean."""
    return " or ".join(
        f"{bits} bits, group_size {size} ({scales.shape[-1] * size} inputs)" for bits, size in grids
    )


def _plain(
    checkpoint: Checkpoint,
    weight: TensorInfo,
    biases: TensorInfo | None,
    path: str,
    entry: object,
) -> StoredWeight:
    if isinstance(entry, dict) or entry is True:
        raise CheckpointError(f"{path}: config says it is quantized ({entry}), no {path}.scales")
    if weight.dtype == "U32":
        raise CheckpointError(f"{path}: the weight is packed (U32), {path}.scales is missing")
    if weight.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{path}: weight dtype {weight.dtype}; allowed are {', '.join(FLOAT_DTYPES)} or packed "
            f"U32: convert the checkpoint with `{_conversion(checkpoint)}`"
        )
    if biases is not None:
        raise CheckpointError(f"{path}: {biases.name} is there, {path}.scales is missing")
    return StoredWeight(weight, None, None, None, None, weight.shape[-1], weight.dtype)


def _hub_quantization(checkpoint: Checkpoint) -> str | None:
    """ "quantized as awq", or whatever the config of a hub checkpoint says."""
    text = checkpoint.config.get("text_config")
    for part in (checkpoint.config, text if isinstance(text, dict) else {}):
        hub = part.get("quantization_config")
        if isinstance(hub, dict) and "quant_method" in hub:
            return f"quantized as {str(hub['quant_method'])[:40]}"
    return None


def _conversion(checkpoint: Checkpoint) -> str:
    """The command that writes a hub checkpoint in MLX's layout."""
    directory = checkpoint.directory
    if _hub_quantization(checkpoint) in (None, "quantized as fp8"):
        return command_line("mlxstacks convert", directory, bits=4, save_path=f"{directory}-4bit")
    # codes of AWQ and GPTQ, which mlx-lm unpacks
    return command_line("mlx_lm.convert", hf_path=directory, mlx_path=f"{directory}-mlx")


def _requantize(directory: Path) -> str:
    plain = f"{directory}-plain"
    commands = (
        command_line("mlx_lm.convert", hf_path=directory, mlx_path=plain, dequantize=True),
        command_line("mlxstacks convert", plain, bits=4, save_path=f"{directory}-affine"),
    )
    return "dequantize with `{}`, then `{}`".format(*commands)


def _mode(
    entry: object, quantization: dict[str, Any], weight: TensorInfo, scales: TensorInfo
) -> str:
    """Name of the quantization mode: the config's, or as the scales tell."""
    if isinstance(entry, dict):
        return str(entry.get("mode", "affine"))
    if entry is True:
        return str(quantization.get("mode", "affine"))
    if scales.dtype != "U8":
        return "affine"
    width, groups = weight.shape[-1], scales.shape[-1] if scales.shape else 0
    for product, mode in _BYTE_SCALED.items():
        if groups and width * 32 == groups * product:
            return mode
    default = quantization.get("mode", "affine")
    return str(default) if default != "affine" else " or ".join(sorted(_BYTE_SCALED.values()))


def _check_parts(
    path: str, weight: TensorInfo, scales: TensorInfo, biases: TensorInfo | None
) -> None:
    if weight.dtype != "U32":
        raise CheckpointError(f"{path}: {scales.name} is there, but the weight is {weight.dtype}")
    if biases is None:
        raise CheckpointError(
            f"{path}: {path}.biases is missing; an affine grid needs them: download the model again"
        )
    if scales.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{scales.name}: dtype {scales.dtype}; affine scales are {', '.join(FLOAT_DTYPES)}"
        )
    if (biases.shape, biases.dtype) != (scales.shape, scales.dtype):
        raise CheckpointError(
            f"{path}: biases {biases.dtype} {list(biases.shape)} and scales {scales.dtype} "
            f"{list(scales.shape)} must be alike"
        )
    if scales.shape[:-1] != weight.shape[:-1] or not scales.shape or not scales.shape[-1]:
        raise CheckpointError(
            f"{path}: weight {list(weight.shape)} and scales {list(scales.shape)} differ in rows"
        )


def _grid(
    checkpoint: Checkpoint, path: str, key: str, weight: TensorInfo, scales: TensorInfo
) -> Grid:
    """By the config's own entry, else its default where that fits, else as mlx-lm loads it."""
    quantization = checkpoint.config["quantization"]
    entry = quantization.get(key)
    fitting = _fitting(weight, scales)
    shapes = f"weight {list(weight.shape)} and scales {list(scales.shape)} in {weight.file.name}"
    if not fitting:
        raise CheckpointError(
            f"{path}: {shapes} fit no affine grid; MLX has {', '.join(map(str, BITS))} bits in "
            f"groups of {', '.join(map(str, GROUP_SIZES))}: download or convert the model again"
        )
    if isinstance(entry, dict) or entry is True:
        # A per-module entry without a number gets MLX's own defaults, 4 bits in groups of 64.
        named = entry if isinstance(entry, dict) else quantization
        grid = named.get("bits", 4), named.get("group_size", 64)
        if not _is_one_of(grid, fitting):
            raise CheckpointError(
                f"{path}: config says {grid[0]} bits, group_size {grid[1]}, which {shapes} "
                "contradict"
            )
        return grid
    if len(fitting) == 1:
        return fitting[0]
    default = quantization.get("bits"), quantization.get("group_size")
    # The default of a model in another mode says nothing of the affine modules in it, and one
    # next to entries under other names than the stored ones may be meant for other modules.
    affine = quantization.get("mode", "affine") == "affine"
    plausible = affine and _is_one_of(default, fitting)
    names_unknown_modules = any(
        isinstance(entry, dict | bool) and f"{name}.weight" not in checkpoint.tensors
        for name, entry in quantization.items()
    )
    if plausible and not names_unknown_modules:
        return default
    if (module := loaded_or_none(checkpoint).get(path)) is not None:
        loaded = module.bits, module.group_size
        if _is_one_of(loaded, fitting):
            return loaded
    if plausible:
        return default
    raise CheckpointError(
        f"{path}: config has no entry, its default of {default[0]} bits, group_size "
        f"{default[1]} does not fit {shapes}, and {grid_texts(fitting, scales)} would; add "
        "the module, with its bits and group_size, to config.json's `quantization`"
    )


def _fitting(weight: TensorInfo, scales: TensorInfo) -> list[Grid]:
    words, groups = weight.shape[-1], scales.shape[-1]
    return [(b, size) for b in BITS for size in GROUP_SIZES if words * 32 == groups * size * b]


def _is_one_of(numbers: tuple[Any, Any], grids: list[Grid]) -> TypeGuard[Grid]:
    # JSON has 4.0 and true as well, which are equal to whole numbers.
    return all(type(n) is int for n in numbers) and numbers in grids
