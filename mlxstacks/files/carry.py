"""Carries files of a model over to another directory: clone, hard link or copy."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path

from mlxstacks.errors import CheckpointError
from mlxstacks.files.disk import c_function, target_errors

_FICLONE = 0x40049409
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EINVAL}
_CANNOT_CLONE = _UNSUPPORTED | {errno.ENOTTY, errno.EBADF, errno.ETXTBSY}
_CANNOT_LINK = _UNSUPPORTED | {errno.EMLINK, errno.EACCES}

# weights, pickles, code and what this package writes itself are never carried
_SIDE_SUFFIXES = {".json", ".jsonl", ".jinja", ".txt", ".model", ".tiktoken", ".md"}
_NOT_SIDE = {"config.json", "fuse_report.json", "adapter_config.json"}


def clone_or_link(source: Path, destination: Path, copy: bool = False) -> str:
    """Make `destination` hold the bytes of `source` as cheaply as the file systems allow.

    Tried in order: a copy-on-write clone ("cloned"), a hard link to the file behind any symlinks
    ("linked"), a full copy ("copied", the only one with `copy=True`). Nothing may ever write into
    a linked file: its other name would change with it. `ShardWriter` opens new files only.

    Raises:
        CheckpointError: the source is missing.
        TargetError: the destination exists, is not writable, or the disk is full.
    """
    try:
        real = Path(source).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{source}: cannot be carried over: {error}; download or convert the model again"
        ) from None
    with target_errors(destination, real.stat().st_size):
        if not copy:
            if _clone(real, destination):
                return "cloned"
            if _link(real, destination):
                return "linked"
        with real.open("rb") as reader, destination.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 4 << 20)
            writer.flush()
            os.fsync(writer.fileno())
    return "copied"


def copy_side_files(source_dir: Path, target_dir: Path) -> list[str]:
    """Copy tokenizer, chat template, generation config and processor files; return their names.

    By suffix: json, jsonl, jinja, txt, model, tiktoken, md. Never code, weights, pickles, indices,
    `config.json` (the caller writes it) or a name that exists in the target. Directories are left
    out but for `additional_chat_templates/*.jinja`.
    """
    source_dir, target_dir = Path(source_dir), Path(target_dir)
    found = [path for path in source_dir.iterdir() if path.suffix in _SIDE_SUFFIXES]
    found += (source_dir / "additional_chat_templates").glob("*.jinja")
    names = []
    for path in sorted(found):
        name = path.relative_to(source_dir)
        skipped = path.name in _NOT_SIDE or path.name.endswith(".index.json")
        if skipped or path.name.startswith(".") or not path.is_file():
            continue
        target = target_dir / name
        if target.exists():
            continue
        with target_errors(target, path.stat().st_size):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        names.append(str(name))
    return names


def _clone(source: Path, destination: Path) -> bool:
    if sys.platform == "darwin":
        function = c_function("clonefile")
        return (
            function is not None and function(os.fsencode(source), os.fsencode(destination), 0) == 0
        )
    if sys.platform != "linux":
        return False
    with source.open("rb") as reader, destination.open("xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
        except OSError as error:
            if error.errno not in _CANNOT_CLONE:
                raise
        else:
            return True
    destination.unlink()
    return False


def _link(source: Path, destination: Path) -> bool:
    try:
        os.link(source, destination)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True
