"""A conversion before a byte is written: what each source tensor becomes, the config, the files.

Readers of a format make a `Conversion`; `write` streams it into an mlx-lm directory. Memory stays
at the chunk in hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.outputs import write_json
from mlxstacks.files.shards import (
    COPY_BYTES,
    Chunk,
    ShardWriter,
    TensorInfo,
    read_range,
    tensor_nbytes,
)
from mlxstacks.files.side_files import SideFile, side_files

_OTHER_FORMAT = re.compile(r"(^|/)consolidated[^/]*$|\.(gguf|onnx\w*|h5|msgpack|ot)$")
_SAME_MODEL = "the model in another format"

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
    inputs: tuple[Path, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts)


def carried_files(checkpoint: Checkpoint) -> list[SideFile]:
    """The files beside a checkpoint's shards, but for the same model in other formats."""
    files = side_files(checkpoint.directory, [header.path for header in checkpoint.headers])
    return [
        replace(file, how=None, reason=_SAME_MODEL) if _OTHER_FORMAT.search(file.name) else file
        for file in files
    ]


def side_file_notes(files: Collection[SideFile]) -> tuple[str, ...]:
    """Notes on what `copy_side_files` does not carry, a sentence for each reason, and on links
    that lead it out of the directory.
    """
    names: dict[str, list[str]] = {}
    for file in files:
        if file.reason not in (None, "hidden"):
            names.setdefault(file.reason, []).append(file.name)
    notes = [f"Left out ({reason}): {', '.join(named)}." for reason, named in names.items()]
    if links := [f"{file.name} ({file.link})" for file in files if file.link and file.how]:
        notes.append(f"Carried from behind links that leave the directory: {', '.join(links)}.")
    return tuple(notes)


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

    Raises:
        TargetError: the disk is full.
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
