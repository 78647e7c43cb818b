"""Pipes, sockets, devices and the kernel's files in place of files: reading may never end."""

import functools
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mlxstacks.errors import InputError


def check_regular(*paths: Path, kind: type[InputError] = InputError) -> None:
    """For files of others that a library opens by name; what is not there passes.

    A directory stands for the files in it and in its folders, two levels down; links are followed.
    Raises: InputError (or the given kind of it) naming what is neither a file nor a directory.
    """
    for path in paths:
        for file in _entries(path):
            try:
                status = file.stat()
            except (OSError, ValueError):  # whoever opens it says so
                continue
            is_file = stat.S_ISREG(status.st_mode) and status.st_dev not in _kernel_devices()
            if not is_file and not stat.S_ISDIR(status.st_mode):
                raise kind(f"{file}: not a regular file; put the file itself there or remove it")


def check_hub_reference(repository: str, folder: str, kind: type[InputError] = InputError) -> None:
    """For what names the newest revision of a repository in the hub cache, before it is read.

    folder: "models" or "datasets". Raises: as `check_regular`.
    """
    from huggingface_hub import constants

    name = f"{folder}--{repository.replace('/', '--')}"
    check_regular(Path(constants.HF_HUB_CACHE, name, "refs", "main"), kind=kind)


@functools.cache
def _kernel_devices() -> frozenset[int]:
    """Of file systems whose regular files the kernel makes up as they are read."""
    return frozenset(os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.ismount(path))


def _entries(path: Path, levels: int = 2) -> Iterator[Path]:
    yield path
    if levels and os.path.isdir(path):
        with suppress(PermissionError):
            for entry in path.iterdir():
                yield from _entries(entry, levels - 1)
