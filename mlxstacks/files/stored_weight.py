"""How a module's weight lies in an MLX checkpoint: plain, or packed with scales and biases.

bits and group_size come from `config["quantization"]`: the module's own entry, else the default
where it fits the shapes, else the one grid that does. Packed shapes tell bits x group_size alone:
(4, 64), (8, 32) and (2, 128) look alike, with 64, 32 and 128 inputs to a scale. mlx-lm tells them
apart by the width in its model class, which is not at hand here. No adapter decides: a wrong one
would make the weight look as wide as itself. What stays open, and what config and shapes disagree
about, is an error that names both.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, TypeGuard

from mlxstacks.errors import CheckpointError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.lora_modules import FLOAT_DTYPES
from mlxstacks.files.shards import TensorInfo
from mlxstacks.ops.affine import BITS, GROUP_SIZES

# Vision, audio and multi-token-prediction parts keep the hub's layout in converted checkpoints too.
_SIDE_PART = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|audio_tower)\.")
_PER_EXPERT = re.compile(r"\.experts\.\d+\.")
_PACKED_ELSEWHERE = (".qweight", ".qzeros", ".g_idx")
# bits x group_size of the modes whose scales are bytes; each has one grid.
_BYTE_SCALED = {4 * 16: "nvfp4", 4 * 32: "mxfp4", 8 * 32: "mxfp8"}

Grid = tuple[int, int]  # (bits, group_size)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight: rows (N, or E x N) of input_dims numbers. bits is None when it is not packed."""

    weight: TensorInfo
    scales: TensorInfo | None
    biases: TensorInfo | None
    bits: int | None
    group_size: int | None
    input_dims: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, (N, K) or (E, N, K)."""
        return (*self.weight.shape[:-1], self.input_dims)


def refuse_unconverted(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError, with the command to run, for a checkpoint not in MLX's own layout.

    Refused: AWQ and GPTQ tensors, fused or separate hub experts, convolutions of hub layout.
    """
    directory = checkpoint.directory
    convert = f"`mlx_lm.convert --hf-path {directory} --mlx-path {directory}-mlx`"
    for name, info in checkpoint.tensors.items():
        if _SIDE_PART.search(name):
            continue
        if name.endswith(_PACKED_ELSEWHERE):
            what = "AWQ or GPTQ weights"
        elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            what = "an unconverted hub checkpoint (fused experts)"
        elif name.endswith("conv1d.weight") and len(info.shape) == 3 and info.shape[-1] != 1:
            what = "an unconverted hub checkpoint (convolution of hub layout)"
        else:
            continue
        raise CheckpointError(f"{directory}: {name} is of {what}; convert it first: {convert}")


def holds_separate_experts(checkpoint: Checkpoint) -> bool:
    """Whether experts are stored one by one, as some hub checkpoints do and mlx-lm's do not."""
    return any(_PER_EXPERT.search(n) and not _SIDE_PART.search(n) for n in checkpoint.tensors)


def stored_weight(checkpoint: Checkpoint, path: str) -> StoredWeight:
    """The weight of module `path`, which must exist.

    Raises: CheckpointError for another mode than affine, missing or odd-shaped parts, a config that
        contradicts the shapes, and a grid that neither of them decides.
    """
    tensors = checkpoint.tensors
    weight = tensors[f"{path}.weight"]
    scales, biases = tensors.get(f"{path}.scales"), tensors.get(f"{path}.biases")
    quantization = checkpoint.config.get("quantization")
    modules = quantization if isinstance(quantization, dict) else {}
    named, entry = path in modules, modules.get(path)
    if not weight.shape:
        raise CheckpointError(f"{path}: the weight in {weight.file.name} is a single number")
    if scales is None:
        return _plain(weight, biases, path, entry)
    if not isinstance(quantization, dict):
        raise CheckpointError(_unknown_quantization(checkpoint, path))
    if named and not entry:  # mlx-lm leaves the module plain for null and {} too
        raise CheckpointError(
            f"{path}: config says it is not quantized ({json.dumps(entry)}), {scales.name} is there"
        )
    if named and entry is not True and not isinstance(entry, dict):
        raise CheckpointError(
            f"{path}: config's quantization is {str(entry)[:40]!a}; true, false or an object with "
            "bits and group_size is allowed"
        )
    _check_mode(path, _mode(entry, quantization, weight, scales))
    _check_parts(path, weight, scales, biases)
    bits, group_size = _grid(checkpoint, path, weight, scales)
    return StoredWeight(weight, scales, biases, bits, group_size, scales.shape[-1] * group_size)


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


def _plain(weight: TensorInfo, biases: TensorInfo | None, path: str, entry: object) -> StoredWeight:
    if isinstance(entry, dict) or entry is True:
        raise CheckpointError(f"{path}: config says it is quantized ({entry}), no {path}.scales")
    if weight.dtype == "U32":
        raise CheckpointError(f"{path}: the weight is packed (U32), {path}.scales is missing")
    if weight.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{path}: weight dtype {weight.dtype}; allowed are {', '.join(FLOAT_DTYPES)} or packed "
            "U32: convert the checkpoint with `mlx_lm.convert`"
        )
    if biases is not None:
        raise CheckpointError(f"{path}: {biases.name} is there, {path}.scales is missing")
    return StoredWeight(weight, None, None, None, None, weight.shape[-1])


def _unknown_quantization(checkpoint: Checkpoint, path: str) -> str:
    config = checkpoint.config
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    hub = next((p["quantization_config"] for p in parts if p.get("quantization_config")), None)
    if isinstance(hub, dict) and "quant_method" in hub:
        return (
            f"{checkpoint.directory}: quantized as {hub['quant_method']}; only MLX's affine grid "
            f"is supported: {_requantize(checkpoint.directory)}"
        )
    return (
        f"{path}: {path}.scales is there, but config.json has no `quantization`; mlx-lm cannot "
        "load this either: restore the config or convert the model again"
    )


def _requantize(model: object) -> str:
    return (
        f"dequantize with `mlx_lm.convert --hf-path {model} --mlx-path PLAIN -d`, then "
        "`mlx_lm.convert --hf-path PLAIN --mlx-path AFFINE -q --q-mode affine`"
    )


def _mode(
    entry: object, quantization: dict[str, Any], weight: TensorInfo, scales: TensorInfo
) -> str:
    """Name of the quantization mode; "affine" is the only one supported."""
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


def _check_mode(path: str, mode: str) -> None:
    if mode != "affine":
        raise CheckpointError(
            f"{path}: quantized as {mode}; only affine is supported: {_requantize('MODEL')}"
        )


def _check_parts(
    path: str, weight: TensorInfo, scales: TensorInfo, biases: TensorInfo | None
) -> None:
    if weight.dtype != "U32":
        raise CheckpointError(f"{path}: {scales.name} is there, but the weight is {weight.dtype}")
    if biases is None:
        raise CheckpointError(
            f"{path}: {path}.biases is missing; an affine grid needs them: {_requantize('MODEL')}"
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


def _grid(checkpoint: Checkpoint, path: str, weight: TensorInfo, scales: TensorInfo) -> Grid:
    """By the config's own entry, else its default where that fits, else the one grid that does."""
    quantization = checkpoint.config["quantization"]
    entry = quantization.get(path)
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
        own = named.get("bits", 4), named.get("group_size", 64)
        if not _is_one_of(own, fitting):
            raise CheckpointError(
                f"{path}: config says {own[0]} bits, group_size {own[1]}, which {shapes} contradict"
            )
        return own
    default = quantization.get("bits"), quantization.get("group_size")
    # The default of a model in another mode says nothing of the affine modules in it.
    if quantization.get("mode", "affine") == "affine" and _is_one_of(default, fitting):
        return default
    if len(fitting) > 1:
        raise CheckpointError(
            f"{path}: config has no entry, its default of {default[0]} bits, group_size "
            f"{default[1]} does not fit {shapes}, and {grid_texts(fitting, scales)} would; add "
            "the module, with its bits and group_size, to config.json's `quantization`"
        )
    return fitting[0]


def _fitting(weight: TensorInfo, scales: TensorInfo) -> list[Grid]:
    words, groups = weight.shape[-1], scales.shape[-1]
    return [(b, size) for b in BITS for size in GROUP_SIZES if words * 32 == groups * size * b]


def _is_one_of(numbers: tuple[Any, Any], grids: list[Grid]) -> TypeGuard[Grid]:
    # JSON has 4.0 and true as well, which are equal to whole numbers.
    return all(type(n) is int for n in numbers) and numbers in grids
