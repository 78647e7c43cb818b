"""Builds safetensors bytes by hand, well-formed or not, and mounts small file systems for tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.shards import read_header


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from a header (object, text or bytes) and its data; `length` overrides the prefix."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(header) if length is None else length
    return length.to_bytes(8, "little") + header + data


def entry(dtype: Any, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    """One tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def with_metadata(good: Path, key: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A file next to `good` with the JSON under a metadata key changed, the tensors as they were.

    change: changes the object in place, or returns another one.
    """
    shard = read_header(good)
    value = json.loads(shard.metadata[key])
    table: dict[str, Any] = {"__metadata__": {key: json.dumps(change(value) or value)}}
    for name, info in shard.tensors.items():
        offsets = (info.start - shard.data_start, info.end - shard.data_start)
        table[name] = entry(info.dtype, list(info.shape), *offsets)
    bad = good.parent / "bad.safetensors"
    bad.write_bytes(file_bytes(table, good.read_bytes()[shard.data_start :]))
    return bad


def sampled_model(directory: Path) -> Path:
    """A model directory of two tensors of bytes; of `large` earlier fingerprints read samples."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    header = {"small": entry("U8", [9], 0, 9), "large": entry("U8", [70_000], 9, 70_009)}
    (directory / "model.safetensors").write_bytes(file_bytes(header, bytes(70_009)))
    return directory


def change_between_samples(model: Path, *, keep_mtime: bool = False) -> None:
    """Flip a low bit of the largest tensor, where fingerprints of samples (4 KiB each) do not look.

    keep_mtime: the file's mtime and size stay.
    """
    info = max(open_checkpoint(model).tensors.values(), key=lambda info: info.nbytes)
    assert info.nbytes > 65_600
    before = info.file.stat()
    with info.file.open("r+b") as file:
        file.seek(info.start + 4096)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    if keep_mtime:
        os.utime(info.file, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    """Mount a file system on `directory` for the block; skip the test where that cannot be."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", *arguments, str(directory)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{' '.join(arguments[:2])} cannot be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


@contextmanager
def small_disk(directory: Path, size: str = "1m") -> Iterator[Path]:
    """A tmpfs of the given size."""
    with mounted(directory, "-t", "tmpfs", "-o", f"size={size}", "tmpfs") as disk:
        yield disk


@contextmanager
def reflink_disk(directory: Path) -> Iterator[Path]:
    """An XFS file system in a sparse file, with copy-on-write clones."""
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("mkfs.xfs is not installed")
    image = directory.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(320 << 20)  # the least that mkfs.xfs accepts is 300 MB
    made = subprocess.run(
        ["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], capture_output=True, check=False
    )
    if made.returncode != 0:
        pytest.skip("mkfs.xfs cannot make a file system with clones")
    with mounted(directory, "-o", "loop", str(image)) as disk:
        yield disk
    image.unlink()
