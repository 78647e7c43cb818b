"""Carries what lies in a model's directory next to its shards over to another one.

Nothing is lost but what could harm: code, pickles and archives, which may hold either, and an
adapter that a loader would apply a second time. What stays behind is listed with the reason.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlxstacks.errors import CheckpointError
from mlxstacks.files.disk import c_function, target_errors
from mlxstacks.files.outputs import MARK
from mlxstacks.files.shards import open_regular, read_header

_FICLONE = 0x40049409
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EINVAL}
_CANNOT_CLONE = _UNSUPPORTED | {errno.ENOTTY, errno.EBADF, errno.ETXTBSY}
_CANNOT_LINK = _UNSUPPORTED | {errno.EMLINK, errno.EACCES}

# Shared as shards are; anything else may be edited by hand, so it is never hard-linked.
_WEIGHT_SUFFIXES = {".safetensors", ".gguf"}
_CODE = {
    ".py", ".pyc", ".pyd", ".pyi", ".pyw", ".ipynb", ".so", ".dylib", ".dll", ".exe", ".sh",
    ".bash", ".zsh", ".command", ".ps1", ".bat", ".cmd", ".js", ".mjs", ".ts", ".rb",
    ".pl", ".lua", ".wasm",
}  # fmt: skip
_PICKLES = {
    ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz", ".dill",
}  # fmt: skip
_FIRST_BYTES = {
    b"#!": "a script",
    **dict.fromkeys((b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe"), "a program"),
    b"PK\x03\x04": "a zip archive, which may hold pickles",
    **{bytes((0x80, protocol)): "a pickle" for protocol in range(2, 6)},
}
# The writer of the new model makes these again.
_REPLACED = {"config.json", "model.safetensors.index.json", MARK}
_REPLACED |= {"result.json", "result.md", "fuse_report.json"}  # of a fuse, now and before 0.2
_ADAPTER = {"adapter_config.json", "adapters.safetensors", "adapter_model.safetensors"}


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file or folder next to the shards; `name` is relative to the model's directory.

    how: "cloned", "linked" or "copied", in a plan "shared" or "copied"; None where it stays behind,
    for which `reason` is given. link: where a link leads that leaves the directory; what lies there
    is carried, and should be known before the new model is published.
    """

    name: str
    nbytes: int = 0
    how: str | None = None
    reason: str | None = None
    link: str | None = None


def clone_or_link(source: Path, destination: Path, copy: bool = False, link: bool = True) -> str:
    """Make `destination` hold the bytes of `source` as cheaply as the file systems allow.

    Tried in order: a copy-on-write clone ("cloned"), a hard link to the file behind any symlinks
    ("linked", not with `link=False`), a full copy ("copied", the only one with `copy=True`).
    Nothing may ever write into a linked file: its other name would change with it. `ShardWriter`
    opens new files only.

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
            if clone(real, destination):
                return "cloned"
            if link:
                try:
                    os.link(real, destination)
                except OSError as error:
                    if error.errno not in _CANNOT_LINK:
                        raise
                else:
                    return "linked"
        with real.open("rb") as reader, destination.open("xb") as writer:
            shutil.copyfileobj(reader, writer, 4 << 20)
            writer.flush()
            os.fsync(writer.fileno())
    return "copied"


def side_files(directory: Path, shards: Collection[Path]) -> list[SideFile]:
    """Every file of a model's directory and of the folders in it but `shards`, in order of names.

    Names are those to carry (how "shared" or "copied") and to leave behind (with a reason). What
    the new model's writer makes itself is not listed: config, index, report.
    """
    directory, left_out = Path(directory), {Path(path) for path in shards}
    left_out |= {directory / name for name in _REPLACED}
    files = []
    for path in _walk(directory):
        if path in left_out:
            continue
        name = path.relative_to(directory).as_posix()
        try:
            reason = _folder_fault(path) if path.is_dir() else _file_fault(directory, path)
        except CheckpointError as error:
            reason = str(error)
        if reason is not None:
            files.append(SideFile(name, reason=reason))
            continue
        how = "shared" if path.suffix in _WEIGHT_SUFFIXES else "copied"
        real = path.resolve()  # a link may lead to the blobs of a hub cache
        stays = real.is_relative_to(directory.resolve()) or real.parent.name == "blobs"
        link = str(real) if path.is_symlink() and not stays else None
        files.append(SideFile(name, path.stat().st_size, how, link=link))
    return files


def copy_side_files(
    source_dir: Path, target_dir: Path, files: Collection[SideFile], copy: bool = False
) -> list[SideFile]:
    """Bring `files` of `source_dir` to `target_dir`; returns them with what was done with each.

    copy: copy sidecars too, instead of cloning or linking them.
    Raises: CheckpointError, TargetError as `clone_or_link`.
    """
    carried = []
    for file in files:
        if file.how is not None:
            target = Path(target_dir) / file.name
            with target_errors(target, file.nbytes):
                target.parent.mkdir(parents=True, exist_ok=True)
            is_weights = target.suffix in _WEIGHT_SUFFIXES
            source = Path(source_dir) / file.name
            how = clone_or_link(source, target, copy, link=is_weights)
            mode = source.stat().st_mode
            if how != "linked" and not mode & 0o077:  # its owner's alone, and so is the copy
                with target_errors(target):
                    target.chmod(mode & 0o700)
            file = replace(file, how=how)
        carried.append(file)
    return carried


def _walk(directory: Path) -> Iterator[Path]:
    """Files, folders that stay behind, and links that lead nowhere; real folders are entered."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink() and _folder_fault(path) is None:
            yield from _walk(path)
        else:
            yield path


def _folder_fault(path: Path) -> str | None:
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():
        return "a link to a folder"
    if not os.access(path, os.R_OK | os.X_OK):
        return "not readable"
    marks = (path / name for name in (MARK, "fuse_report.json"))
    is_ours = path.name == "mlxstacks-out" or any(mark.exists() for mark in marks)
    return "an output of mlxstacks" if is_ours else None


def _file_fault(directory: Path, path: Path) -> str | None:
    """Why a file stays behind; None where it is carried. Raises: CheckpointError as `open_regular`,
    and for a damaged sidecar.
    """
    if path.name.startswith("."):
        return "hidden"
    if path.suffix.lower() in _CODE:
        return "code"
    if path.suffix.lower() in _PICKLES:
        return "may be a pickle"
    if path.name.endswith(".bin.index.json"):
        return "an index of pickles"
    if path.parent == directory and path.name in _ADAPTER:
        return "an adapter, which loaders would apply again"
    if path.suffix == ".safetensors":
        read_header(path)
        return None
    with os.fdopen(open_regular(path), "rb") as file:
        start = file.read(4)
    return next((kind for first, kind in _FIRST_BYTES.items() if start.startswith(first)), None)


def can_clone(source: Path, directory: Path) -> bool:
    """Whether files of `source`'s kind can be cloned into a directory; tries it with `source`."""
    trial = directory / f".{MARK}.clone-{os.getpid()}"
    try:
        return clone(source.resolve(), trial)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()


def clone(source: Path, destination: Path) -> bool:
    """Make a new file that shares the bytes of `source` until one of them is written; False where
    the file systems cannot.
    """
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
