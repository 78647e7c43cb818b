"""A conversion before a byte is written: what each source tensor becomes, the config, the files.

Readers of a format make a `Conversion`; `write` streams it into an mlx-lm directory. Memory stays
at the chunk in hand.

`upcycled` makes a dense model a mixture of equal experts: the same function, with routers that can
be trained. mlx-lm's mixtral weighs the chosen experts by a softmax over their gates alone: the
weights sum to one, so N copies of an MLP give what the MLP gives, whatever the router says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.errors import CheckpointError
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.outputs import write_json
from mlxstacks.files.shards import (
    COPY_BYTES,
    Chunk,
    ShardWriter,
    TensorInfo,
    read_range,
    tensor_nbytes,
)
from mlxstacks.files.side_files import copy_side_files, side_files
from mlxstacks.ops import affine

_OTHER_FORMAT = re.compile(r"(^|/)consolidated[^/]*$|\.(gguf|onnx\w*|h5|msgpack|ot)$")
_SAME_MODEL = "the model in another format"

_MLP = re.compile(r"(.*\.layers\.\d+)\.mlp\.((?:gate|up|down)_proj)(\..+)?")
# Settings that mixtral takes over, with what else they may be beside it.
_KEPT_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
_GATE_SCALE = 0.02  # of transformers' own initialisation

MAX_SHARD_BYTES = 5 << 30  # as mlx-lm writes them

ProgressCallback = Callable[[int, int], None]
TensorSpec = tuple[str, str, tuple[int, ...]]  # name, dtype of safetensors, shape


@dataclass(frozen=True)
class Part:
    """One tensor of the source and the tensors it becomes; they lie in one shard.

    kind: what it is in the source ("Q4_1", "BF16").
    stored: what it becomes, in words ("4 bits in groups of 32, the same codes").
    specs: name, dtype and shape of each tensor to write.
    chunks: yields (name, C-contiguous bytes), the chunks of one tensor in their order; called once.
    file: a safetensors file beside the model's, for what mlx-lm does not load; in the hub's layout.
    """

    kind: str
    stored: str
    specs: tuple[TensorSpec, ...]
    chunks: Callable[[], Iterable[tuple[str, Chunk]]]
    file: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(tensor_nbytes(dtype, shape) or 0 for _, dtype, shape in self.specs)


def stored_part(info: TensorInfo, file: str | None = None) -> Part:
    """A part that copies a tensor of a file byte for byte."""

    def chunks() -> Iterator[tuple[str, Chunk]]:
        for start in range(0, info.nbytes, COPY_BYTES):
            chunk = bytearray(min(COPY_BYTES, info.nbytes - start))
            read_range(info, start, memoryview(chunk))
            yield info.name, chunk

    stored = "as it is" if file is None else f"as it is, in {file}"
    return Part(info.dtype, stored, ((info.name, info.dtype, info.shape),), chunks, file)


@dataclass(frozen=True)
class Conversion:
    """Everything of the directory to come.

    config: `config.json`, with `quantization`.
    write_files: writes tokenizer and other side files into a directory.
    notes: what a user should know, a sentence each.
    inputs: paths that are read, which the target may not be or hold.
    """

    config: dict[str, Any]
    parts: tuple[Part, ...]
    write_files: Callable[[Path], object]
    notes: tuple[str, ...] = ()
    inputs: tuple[Path, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts)


def of_checkpoint(
    checkpoint: Checkpoint, config: dict[str, Any], parts: Iterable[Part]
) -> Conversion:
    """A conversion that carries the files beside a checkpoint's shards, but for the same model in
    other formats; its notes say what is left out, and which links lead out of the directory.
    """
    shards = [header.path for header in checkpoint.headers]
    files = [
        replace(file, how=None, reason=_SAME_MODEL) if _OTHER_FORMAT.search(file.name) else file
        for file in side_files(checkpoint.directory, shards)
    ]
    names: dict[str, list[str]] = {}
    for file in files:
        if file.reason not in (None, "hidden"):
            names.setdefault(file.reason, []).append(file.name)
    notes = [f"Left out ({reason}): {', '.join(named)}." for reason, named in names.items()]
    if links := [f"{file.name} ({file.link})" for file in files if file.link and file.how]:
        notes.append(f"Carried from behind links that leave the directory: {', '.join(links)}.")
    return Conversion(
        config=config,
        parts=tuple(parts),
        write_files=partial(copy_side_files, checkpoint.directory, files=files),
        notes=tuple(notes),
        inputs=(checkpoint.directory, *shards),
    )


def shards_of(conversion: Conversion, most: int = MAX_SHARD_BYTES) -> dict[str, list[Part]]:
    """File name -> parts, filled in order up to `most` bytes; a larger part has its own file."""
    shards: list[list[Part]] = [[]]
    sidecars: dict[str, list[Part]] = {}
    size = 0
    for part in conversion.parts:
        if part.file is not None:
            sidecars.setdefault(part.file, []).append(part)
            continue
        if shards[-1] and size + part.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(part)
        size += part.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]} | sidecars
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": parts
        for number, parts in enumerate(shards, 1)
    } | sidecars


def write(
    conversion: Conversion, directory: Path, progress: ProgressCallback | None = None
) -> list[dict[str, Any]]:
    """Write shards, index, config and side files into `directory`; returns file, bytes of shards.

    Raises: TargetError: the disk is full.
    """
    shards = shards_of(conversion)
    done, total = 0, conversion.nbytes
    files, weight_map = [], {}
    for file, parts in shards.items():
        specs = [spec for part in parts for spec in part.specs]
        layout = "mlx" if parts[0].file is None else "pt"
        with ShardWriter(directory / file, specs, {"format": layout}) as writer:
            for part in parts:
                for name, chunk in part.chunks():
                    writer.write(name, chunk)
                done += part.nbytes
                if progress is not None:
                    progress(done, total)
            files.append({"file": file, "bytes": writer.close()})
        weight_map.update({name: file for name, _, _ in specs})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)
    write_json(directory / "config.json", conversion.config, sort_keys=True, allow_nan=True)
    conversion.write_files(directory)
    return files


def stored_conversion(directory: Path) -> Conversion:
    """A dense model's directory as it is: each tensor copied.

    Raises: CheckpointError: see `open_checkpoint`; no model to upcycle, or mlx-lm cannot load it.
    """
    checkpoint = open_checkpoint(directory)
    _check_dense(checkpoint.config)
    checkpoint.loaded_weights  # noqa: B018
    return of_checkpoint(
        checkpoint, checkpoint.config, map(stored_part, checkpoint.tensors.values())
    )


def upcycled(dense: Conversion, experts: int, top_k: int, seed: int) -> Conversion:
    """A mixtral whose every layer has `experts` copies of the dense MLP, and a random router.

    Codes and scales are those of `dense`; a copy at a time is in memory.
    Law: logits are those of `dense` but for the order of the last sum.

    Raises: CheckpointError: the model is no llama, or has what mlx-lm's mixtral cannot do.
    """
    _check_dense(dense.config)
    config = _mixtral_config(dense.config, experts, top_k)
    parts = [_expert_part(part, experts) for part in dense.parts]
    generator = np.random.default_rng(seed)
    dtypes = {name: dtype for part in dense.parts for name, dtype, _ in part.specs}
    of_scales = (dtype for name, dtype in dtypes.items() if name.endswith(".scales"))
    dtype = next(of_scales, dtypes["model.embed_tokens.weight"])
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        gate = generator.standard_normal((experts, config["hidden_size"]), np.float32)
        chunks = [(name, affine.to_storage(_GATE_SCALE * gate, dtype))]
        specs = ((name, dtype, gate.shape),)
        parts.append(Part("none", "router, random", specs, partial(iter, chunks)))
    return replace(dense, config=config, parts=tuple(parts))


def _check_dense(config: dict[str, Any]) -> None:
    """Raises: CheckpointError where mlx-lm's mixtral would compute something else."""
    heads: Any = config.get("num_attention_heads")
    hidden: Any = config.get("hidden_size")
    countable = all(type(size) is int and size > 0 for size in (heads, hidden))
    faults = {
        f"model_type {config.get('model_type')!r}": config.get("model_type") != "llama",
        "rope_scaling": bool(config.get("rope_scaling")),
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "layers of sliding_attention": "sliding_attention" in str(config.get("layer_types")),
        "rope_traditional": bool(config.get("rope_traditional")),
        "head_dim that is not hidden_size / num_attention_heads": (
            countable and config.get("head_dim") not in (None, hidden // heads)
        ),
    }
    refused = [fault for fault, is_met in faults.items() if is_met]
    if refused:
        raise CheckpointError(
            f"--upcycle takes llama models that mlx-lm's mixtral can compute; this one has "
            f"{', '.join(refused)}"
        )


def _mixtral_config(config: dict[str, Any], experts: int, top_k: int) -> dict[str, Any]:
    kept = {key: config[key] for key in _KEPT_KEYS if key in config}
    mixtral = {
        **kept,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rope_theta": config.get("rope_theta", 10000.0),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
        "num_key_value_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
    }
    quantization = config.get("quantization") or config.get("quantization_config")
    if quantization:
        renamed = {expert_name(key): value for key, value in quantization.items()}
        mixtral |= {"quantization": renamed, "quantization_config": renamed}
    return mixtral


def expert_name(name: str) -> str:
    """The mixtral's name of a dense model's tensor or module."""
    match = _MLP.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}.block_sparse_moe.switch_mlp.{match[2]}{match[3] or ''}"


def _expert_part(part: Part, experts: int) -> Part:
    if not any(_MLP.fullmatch(name) for name, _, _ in part.specs):
        return part

    def chunks() -> Iterator[tuple[str, Chunk]]:
        copy = [(expert_name(name), chunk) for name, chunk in part.chunks()]
        for _ in range(experts):
            yield from copy

    specs = tuple(
        (expert_name(name), dtype, (experts, *shape)) for name, dtype, shape in part.specs
    )
    return replace(part, stored=f"{part.stored}, {experts} copies", specs=specs, chunks=chunks)
