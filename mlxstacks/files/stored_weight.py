"""How a module's weight lies in an MLX checkpoint: plain, or packed with scales and biases.

bits and group_size come from `config["quantization"]` where that names the module, else from the
shapes, as mlx-lm infers them. What config and shapes disagree about is an error that names both.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mlxstacks.errors import CheckpointError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.lora_modules import FLOAT_DTYPES
from mlxstacks.files.shards import TensorInfo
from mlxstacks.ops.affine import BITS, GROUP_SIZES

# Vision, audio and multi-token-prediction parts keep the hub's layout in converted checkpoints too.
_SIDE_PART = re.compile(r"(^|\.)(mtp|visual|vision_tower|vision_model|audio_tower)\.")
_PER_EXPERT = re.compile(r"\.experts\.\d+\.")
_PACKED_ELSEWHERE = (".qweight", ".qzeros", ".g_idx")
_HEADS = (
    ("num_attention_heads", "head_dim"),
    ("linear_num_value_heads", "linear_value_head_dim"),
)
# (bits, group_size) of the modes whose scales are bytes.
_BYTE_SCALED = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


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


def stored_weight(
    checkpoint: Checkpoint, path: str, expected_dims: Collection[int]
) -> StoredWeight:
    """The weight of module `path`, which must exist.

    expected_dims: input_dims that the caller would accept; they decide between widths that the
    packed shapes alone leave open.

    Raises: CheckpointError for another mode than affine, missing or odd-shaped parts, and for a
        config that contradicts the shapes.
    """
    tensors = checkpoint.tensors
    weight = tensors[f"{path}.weight"]
    scales, biases = tensors.get(f"{path}.scales"), tensors.get(f"{path}.biases")
    quantization = checkpoint.config.get("quantization")
    entry = quantization.get(path) if isinstance(quantization, dict) else None
    if scales is None:
        return _plain(weight, path, entry)
    if not isinstance(quantization, dict):
        raise CheckpointError(_unknown_quantization(checkpoint, path))
    if entry is False:
        raise CheckpointError(f"{path}: config says it is not quantized, {scales.name} is there")
    _check_mode(path, _mode(entry, quantization, weight, scales, expected_dims))
    _check_parts(path, weight, scales, biases)
    bits, group_size = _grid(checkpoint, path, weight, scales, expected_dims)
    return StoredWeight(weight, scales, biases, bits, group_size, scales.shape[-1] * group_size)


def _plain(weight: TensorInfo, path: str, entry: object) -> StoredWeight:
    if isinstance(entry, dict) or entry is True:
        raise CheckpointError(f"{path}: config says it is quantized ({entry}), no {path}.scales")
    if weight.dtype == "U32":
        raise CheckpointError(f"{path}: the weight is packed (U32), {path}.scales is missing")
    if weight.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{path}: weight dtype {weight.dtype}; allowed are {', '.join(FLOAT_DTYPES)} or packed "
            "U32: convert the checkpoint with `mlx_lm.convert`"
        )
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
    entry: object,
    quantization: dict[str, Any],
    weight: TensorInfo,
    scales: TensorInfo,
    expected_dims: Collection[int],
) -> str:
    """Name of the quantization mode; "affine" is the only one supported."""
    if isinstance(entry, dict):
        return str(entry.get("mode", "affine"))
    if entry is True:
        return str(quantization.get("mode", "affine"))
    if scales.dtype != "U8":
        return "affine"
    for dims in expected_dims:
        grid = weight.shape[-1] * 32 // dims, dims // scales.shape[-1]
        if grid in _BYTE_SCALED:
            return _BYTE_SCALED[grid]
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


def _grid(
    checkpoint: Checkpoint,
    path: str,
    weight: TensorInfo,
    scales: TensorInfo,
    expected_dims: Collection[int],
) -> tuple[int, int]:
    """(bits, group_size) by the config's own entry, else by shapes, the default first."""
    quantization = checkpoint.config["quantization"]
    entry = quantization.get(path)
    width, groups = weight.shape[-1], scales.shape[-1]
    default = (quantization.get("bits"), quantization.get("group_size"))
    fitting = [
        (bits, size) for bits in BITS for size in GROUP_SIZES if width * 32 == groups * size * bits
    ]
    shapes = f"weight {list(weight.shape)} and scales {list(scales.shape)}"
    if isinstance(entry, dict) or entry is True:
        # A per-module entry without a number gets MLX's own defaults, 4 bits in groups of 64.
        named = entry if isinstance(entry, dict) else quantization
        own = named.get("bits", 4), named.get("group_size", 64)
        if own not in fitting:
            raise CheckpointError(
                f"{path}: config says {own[0]} bits, group_size {own[1]}, which {shapes} contradict"
            )
        return own
    found = _inferred(checkpoint.config, default, fitting, groups, expected_dims)
    if found is None:
        raise CheckpointError(
            f"{path}: config has no entry and its default of {default[0]} bits, group_size "
            f"{default[1]} does not fit {shapes}; add the module to config.json's `quantization`"
        )
    return found


def _inferred(
    config: dict[str, Any],
    default: tuple[Any, Any],
    fitting: list[tuple[int, int]],
    groups: int,
    expected_dims: Collection[int],
) -> tuple[int, int] | None:
    """The grid of a module that the config does not name; None when it stays open.

    Packed shapes tell bits x group_size only: (4, 64) and (8, 32) look alike. mlx-lm knows the
    input_dims from its model class; here they must be a size that the config knows.
    """
    sizes = _known_sizes(config)
    known = [grid for grid in fitting if groups * grid[1] in sizes]
    expected = [grid for grid in known if groups * grid[1] in expected_dims]
    if len(expected) == 1:
        return expected[0]
    if default in fitting:
        return default
    for pool in (known, [g for g in fitting if groups * g[1] in expected_dims], fitting):
        if len(pool) == 1:
            return pool[0]
    return None


def _known_sizes(config: dict[str, Any]) -> set[int]:
    """Every whole number of the config, and the widths of its attention outputs."""
    sizes: set[int] = set()
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        numbers = {k: v for k, v in part.items() if isinstance(v, int) and not isinstance(v, bool)}
        sizes.update(numbers.values())
        for heads, width in _HEADS:
            sizes.add(numbers.get(heads, 0) * numbers.get(width, 0))
    return sizes
