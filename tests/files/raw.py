"""Builds safetensors bytes by hand, well-formed or not, and mounts small file systems for tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from a header (object, text or bytes) and its data; `length` overrides the prefix."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    length = len(header) if length is None else length
    return length.to_bytes(8, "little") + header + data


def entry(dtype: Any, shape: Any, start: Any, end: Any) -> dict[str, Any]:
    """One tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


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
