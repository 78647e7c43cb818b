"""Hugging Face checkpoints as quantized mlx-lm directories, a tensor at a time.

mlx-lm's model class says what a checkpoint's tensors become: its `sanitize` renames, splits, stacks
experts, shifts norms. MLX's arrays are lazy, so all that, the cast and the quantization are
recorded over the whole checkpoint at once and computed module by module while the files are
written: memory holds one module and the tensors that it is made of.

`sanitize` also drops what the text model does not compute with: vision towers, heads that predict
several tokens. The recorded graph says which tensors nothing is made of; they are copied byte for
byte into files beside the model's. mlx-lm does not read those; mlx-vlm finds them by the index.
"""

from __future__ import annotations

import fnmatch
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.convert.conversion import Conversion, Part, of_checkpoint, stored_part
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.shards import Chunk
from mlxstacks.files.stack_file import non_finite, raw_numbers

DTYPES = ("float16", "bfloat16", "float32")

# Files for what mlx-lm's classes drop, named as the tools that read them expect.
_SIDECARS = {
    "mtp.safetensors": re.compile(r"(^|[._])(mtp|nextn)"),
    "vision.safetensors": re.compile(r"(^|[._])(visual|vision|image|multi_?modal|mm)([._]|$)"),
}
_REST = "extra.safetensors"
# Of the source's config: its quantization is undone, and its code stays behind.
_NOT_WRITTEN = {"quantization_config", "auto_map", "_name_or_path"}
_QUANTIZATION_KEYS = ("quantization", "quantization_config")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# Lines of MLX's graph as text: an array that an operation makes, and one that it takes.
_OUTPUT = re.compile(r'-> "([^"]+)"$', re.MULTILINE)
_INPUT = re.compile(r'^"([^"]+)" ->', re.MULTILINE)

_DTYPE_NAMES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64",
    mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32", mx.float64: "F64",
}  # fmt: skip


def checkpoint_conversion(
    source: Path,
    bits: int | None,
    group_size: int,
    module_bits: Sequence[tuple[str, int | None]] = (),
    dtype: str | None = None,
) -> Conversion:
    """The conversion of an unquantized checkpoint of any architecture that mlx-lm has a class for.

    bits: of every module that mlx-lm quantizes, but those to which the class itself gives others
        (router gates); None: floats.
    module_bits: (shell pattern over module paths, bits or None for floats); the last match wins.
    dtype: of what stays in floats, and of scales; None: the config's, as mlx-lm reads it, if any.
    Law: what mlx-lm keeps has the bytes that `mlx_lm.convert` writes on this device; every other
        tensor of the source keeps its name and bytes.
    Raises: CheckpointError, InputError (a pattern that no module matches).
    """
    checkpoint = open_checkpoint(source)
    _refuse(checkpoint)
    model, config, stored = base_model.load_stored(source)
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    unused = _unused(stored, list(parameters.values()))
    kinds = {name: _dtype_name(array) for name, array in parameters.items()}
    in_config = config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    if dtype := dtype or (in_config if in_config in DTYPES else None):
        base_model.cast(model, getattr(mx, dtype))
        parameters = dict(tree_flatten(model.parameters()))
    # What mlx-lm reads of the config decides; what is written is the file's own text.
    written = {k: v for k, v in checkpoint.config.items() if k not in _NOT_WRITTEN}
    if "eos_token_id" in config:
        written["eos_token_id"] = config["eos_token_id"]
    if bits is not None or module_bits:
        for path, module in base_model.named_quantizable(model):
            if not mx.issubdtype(module.weight.dtype, mx.floating):
                raise CheckpointError(
                    f"{source}: {path}.weight is {_dtype_name(module.weight)}, which mlx-lm's "
                    "class does not turn into floats; convert an unquantized checkpoint"
                )
        overrides = _overrides(source, model, module_bits)
        written = base_model.quantize(model, written, bits, group_size, overrides)
    parts = (*_parts(model, parameters, kinds), *_carried(checkpoint, unused))
    return of_checkpoint(checkpoint, written, parts)


def _refuse(checkpoint: Checkpoint) -> None:
    source, config = checkpoint.directory, checkpoint.config
    if "model_file" in config:
        raise CheckpointError(
            f"{source}: config.json names code to run (model_file); only classes of mlx-lm are used"
        )
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    entries = [part[key] for part in parts for key in _QUANTIZATION_KEYS if part.get(key)]
    # mlx-lm's classes turn FP8 with float scales into floats, as many hub models are; power-of-two
    # scales over 32 x 32 blocks stay packed there, as mxfp8.
    packed = any(
        not isinstance(entry, dict)
        or entry.get("quant_method") != "fp8"
        or (entry.get("scale_fmt") == "ue8m0" and entry.get("weight_block_size") == [32, 32])
        for entry in entries
    )
    if packed or (source / "hf_quant_config.json").exists():
        methods = [
            e["quant_method"] for e in entries if isinstance(e, dict) and "quant_method" in e
        ]
        raise CheckpointError(
            f"{source}: already quantized{f' ({methods[0]})' if methods else ''}, and rounding "
            "again adds its own error; convert the unquantized model that it was made of"
        )


def _unused(sources: Mapping[str, mx.array], results: Sequence[mx.array]) -> list[str]:
    """Names of sources that no result is made of; nothing is evaluated.

    In the text of MLX's graph a source is an output line of the operation that loads it, and a used
    one begins an input line. Arrays are named as they are met, so sources given first come first.
    """
    result_ids, source_ids = set(map(id, results)), set(map(id, sources.values()))
    candidates = [name for name, array in sources.items() if id(array) not in result_ids]
    computed = [array for array in results if id(array) not in source_ids]
    text = io.StringIO()
    mx.export_to_dot(text, *(sources[name] for name in candidates), *computed)
    graph = text.getvalue()
    nodes = [match[1] for match in islice(_OUTPUT.finditer(graph), len(candidates))]
    used = {match[1] for match in _INPUT.finditer(graph)}
    return [name for name, node in zip(candidates, nodes, strict=True) if node not in used]


def _overrides(
    source: Path, model: nn.Module, module_bits: Sequence[tuple[str, int | None]]
) -> dict[str, int | None]:
    """Module path -> bits, for modules that a pattern names."""
    paths = [path for path, _ in base_model.named_quantizable(model)]
    overrides: dict[str, int | None] = {}
    for pattern, bits in module_bits:
        matching = fnmatch.filter(paths, pattern)
        if not matching:
            names = sorted({path.rpartition(".")[2] for path in paths})
            raise InputError(
                f"{source}: no module that can be quantized matches {pattern!r}; patterns match "
                f"whole paths, like {min(paths)}; the last parts are {', '.join(names)}"
            )
        overrides.update(dict.fromkeys(matching, bits))
    return overrides


def _parts(
    model: nn.Module, floats: Mapping[str, mx.array], kinds: Mapping[str, str]
) -> Iterator[Part]:
    """A part for each module that has parameters of its own, in mlx-lm's order.

    floats: the parameters before the quantization. kinds: their dtypes in the source.
    """
    modules = dict(model.named_modules())
    parameters = tree_flatten(model.parameters())
    for path, group in groupby(parameters, key=lambda item: item[0].rpartition(".")[0]):
        arrays = dict(group)
        specs = tuple((name, _dtype_name(array), array.shape) for name, array in arrays.items())
        stored = specs[0][1]
        sources = dict(arrays)
        if f"{path}.scales" in arrays:
            stored = f"{modules[path].bits} bits in groups of {modules[path].group_size}"
            sources = {n: floats[n] for n in arrays if not n.endswith((".scales", ".biases"))}
        yield Part(kinds[specs[0][0]], stored, specs, partial(_computed, arrays, sources))


def _computed(
    arrays: dict[str, mx.array], floats: dict[str, mx.array]
) -> Iterator[tuple[str, Chunk]]:
    """Evaluates each array and lets go of it: both dicts are empty afterwards.

    floats: what they are made from. NaN and Inf are looked for there, since codes do not show them.
    """
    known = {n: a for n, a in floats.items() if mx.issubdtype(a.dtype, mx.floating)}
    if problems := non_finite(known):
        raise CheckpointError(
            f"{problems[0]}: no model computes with that; download it again or, where its numbers "
            "are too large for the dtype, choose --dtype bfloat16"
        )
    floats.clear()
    for name in list(arrays):
        yield name, raw_numbers(arrays.pop(name))
    mx.clear_cache()


def _carried(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[Part]:
    """Parts that copy tensors byte for byte into files that mlx-lm does not read."""
    text = checkpoint.config.get("text_config")
    layers = (text if isinstance(text, dict) else checkpoint.config).get("num_hidden_layers")
    for name in names:
        info = checkpoint.tensors[name]
        number = _LAYER.search(name)
        # Layers behind the last one predict more tokens.
        is_behind = number and isinstance(layers, int) and int(number[1]) >= layers
        default = "mtp.safetensors" if is_behind else _REST
        file = next((f for f, pattern in _SIDECARS.items() if pattern.search(name)), default)
        while (checkpoint.directory / file).exists():  # the hub's own, carried as it is
            file = f"extra-{file}"
        yield stored_part(info, file)


def _dtype_name(array: mx.array) -> str:
    return _DTYPE_NAMES[array.dtype]
