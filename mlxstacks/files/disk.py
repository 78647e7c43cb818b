"""Writing to disk: errors in words, free space, syncing, early write-back."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxstacks.errors import InputError, TargetError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# EBUSY: the target is a mount point, which nothing can be renamed over
_UNUSABLE = {errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.ENOENT, errno.EBUSY}


@contextmanager
def target_errors(
    path: Path, needed_bytes: int = 0, *, only_writes: bool = False
) -> Iterator[None]:
    """Turn an OSError about the target `path` into a TargetError that says what to do.

    only_writes: translate just what only a write can cause (full, too large, read-only file
        system); for blocks that also read other files.

    Raises:
        TargetError: full disk (with needed and free bytes), read-only, a file where a directory
            should be, a name too long.
    """
    try:
        yield
    except OSError as error:
        message = _explain(error, path, needed_bytes, only_writes)
        if message is None:
            raise
        raise TargetError(message) from error


def _explain(error: OSError, path: Path, needed_bytes: int, only_writes: bool) -> str | None:
    if error.errno in _FULL:
        needed = f"{needed_bytes} bytes needed, " if needed_bytes else ""
        return f"{path}: {_full_disk(path, needed)}; make room or choose a target on another disk"
    if error.errno == errno.EFBIG:
        return (
            f"{path}: a file grew past what the file system or `ulimit -f` allows; "
            "choose a target on another disk or raise the limit"
        )
    if error.errno == errno.EROFS or (error.errno in _REFUSED and not only_writes):
        place = Path(os.fsdecode(error.filename or path))
        where = "" if place == path else f"{place}, "
        whose = owner_note(place)
        return f"{path}: not writable ({where}{error.strerror}{whose}); choose another target"
    if only_writes:
        return None
    if error.errno in {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}:
        return f"{error.filename or path}: {error.strerror}; choose another target"
    if error.errno in _UNUSABLE:
        return f"{path}: not a usable target ({error.strerror}); choose another"
    return None


def _full_disk(path: Path, needed: str = "") -> str:
    system = os.statvfs(existing_ancestor(path))
    if system.f_files and not system.f_favail:  # some file systems have no such count
        return "the disk has no room for another file, of whatever size (no inodes are free)"
    return f"the disk is full ({needed}{free_bytes(path)} free)"


@contextmanager
def mlx_write_errors(path: Path) -> Iterator[None]:
    """`target_errors` for MLX's own writers and NumPy's, whose errors have no errno and no name."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        is_mlx = str(error).startswith(("[write]", "[save_safetensors] Failed to open"))
        if not is_mlx and not str(error).endswith(" written"):
            raise
        raise TargetError(
            f"{path}: {str(error).rpartition('] ')[2].rstrip('.')}: {_full_disk(path)} or "
            "`ulimit -f` ends the file; make room or choose a target on another disk"
        ) from None


def user_path(path: str | Path, kind: type[InputError] = InputError) -> Path:
    """A path as somebody wrote it, with `~` replaced by the home directory.

    Raises:
        InputError (or the given kind of it): `~name` of an unknown user, or a NUL character.
    """
    if not isinstance(path, str | Path):
        raise kind(f"got {str(path)[:200]!a} ({type(path).__name__}); give a path")
    if "\0" in str(path):
        raise kind(f"{str(path)[:200]!a}: not a usable path: it holds a NUL character")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise kind(f"{str(path)[:200]!a}: not a usable path: {error}") from None


def cache_directory() -> Path:
    """`$MLXSTACKS_CACHE`, else `~/.cache/mlxstacks`."""
    return Path(os.environ.get("MLXSTACKS_CACHE") or Path.home() / ".cache" / "mlxstacks")


def use_private_temporary_directory() -> None:
    """Set TMPDIR to a directory that nobody else can write; call before mlx is used.

    MLX's CPU compiler keeps its libraries in `$TMPDIR/mlx/<version>/cpu` and loads one that is
    there without looking whose it is. Where others can write too, as in `/tmp`, temporary files go
    to `mlxstacks-<user id>` in it, which only this user can open.

    Raises: InputError: it belongs to another user, is open to others, or cannot be written.
    """
    advice = "set TMPDIR to a directory of yours"
    path = Path(os.environ.get("TMPDIR") or "/tmp")
    try:
        path = Path(os.environ.get("TMPDIR") or tempfile.gettempdir()).absolute()
        if path.name.startswith("mlxstacks-") and path.stat().st_uid != os.getuid():
            path = path.parent  # inherited from a process of another user
        mode, private = path.stat(), path / f"mlxstacks-{os.getuid()}"
        if mode.st_uid != os.getuid() or mode.st_mode & _WRITABLE_BY_OTHERS:
            if mode.st_mode & _WRITABLE_BY_OTHERS and not mode.st_mode & stat.S_ISVTX:
                raise InputError(
                    f"{path}: others can rename what is there; `chmod go-w`, or {advice}"
                )
            path = private
            if not is_made_private(path):
                raise InputError(f"{path}: not a directory of yours alone; remove it, or {advice}")
        with tempfile.TemporaryFile(dir=path) as file:  # a full disk is told here
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        raise InputError(
            f"{path}: temporary files cannot be written there: {error.strerror}; {advice}"
        ) from None
    os.environ["TMPDIR"] = str(path)


def is_made_private(path: Path) -> bool:
    """Make a directory where there is none; whether it is this user's alone. Raises: OSError."""
    with suppress(FileExistsError):
        path.mkdir(0o700)
    mode = path.lstat()
    return stat.S_ISDIR(mode.st_mode) and mode.st_uid == os.getuid() and not mode.st_mode & 0o77


def existing_ancestor(path: Path) -> Path:
    """The nearest directory at or above `path` that exists."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def owner_note(path: Path) -> str:
    """`, which belongs to NAME` where the path, or what of it is there, is another user's."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    user = path.lstat().st_uid
    if user == os.geteuid():
        return ""
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = f"user {user}"
    return f", which belongs to {name}"


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of `path` (which need not exist)."""
    return shutil.disk_usage(existing_ancestor(path)).free


def require_space(path: Path, needed_bytes: int) -> None:
    """Raises TargetError where fewer than `needed_bytes` are free for `path`, or none at all, as in
    file systems that hold no files (/proc, /sys).
    """
    free = free_bytes(path)
    if free < max(needed_bytes, 1):
        needed = f"{needed_bytes} bytes needed, " if needed_bytes else ""
        raise TargetError(
            f"{path}: {needed}{free} free; make room or choose a target on another disk"
        )


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write every byte of `data` (format B, contiguous) at `offset`."""
    while data.nbytes:
        written = os.pwrite(descriptor, data[: 1 << 30], offset)
        data, offset = data[written:], offset + written


def write_new(path: Path, data: bytes, mode: int = 0o666) -> str:
    """Write a new file, synced; returns its SHA-256. Raises: OSError, for callers to name the file
    that somebody asked for: `path` is a temporary one.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        write_all(descriptor, memoryview(data), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return hashlib.sha256(data).hexdigest()


def append_line(descriptor: int, line: bytes, path: Path) -> None:
    """Add a line, its end included, to the log `path`, open for reading and appending, in one
    write; what a dead writer left of a line stays a line of its own. Raises: OSError.
    """
    nbytes = os.fstat(descriptor).st_size
    torn = nbytes > 0 and os.pread(descriptor, 1, nbytes - 1) != b"\n"
    data = b"\n" * torn + line
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def sync_directory(path: Path) -> None:
    """Make the names in a directory last through a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """fsync every file and directory below `directory`, files first."""
    for parent, _, files in os.walk(directory, topdown=False):
        for name in files:
            if not os.path.islink(os.path.join(parent, name)):
                sync_directory(Path(parent, name))
        sync_directory(Path(parent))


def c_function(name: str) -> Callable[..., int] | None:
    """A function of the C library by name, or None where the system has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.restype = ctypes.c_int
    return function


_sync_file_range = c_function("sync_file_range") if sys.platform == "linux" else None
_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(descriptor: int) -> None:
    """Ask Linux to start writing a file now, so that a later fsync has less to wait for. A hint:
    its failure changes nothing that fsync does not do.
    """
    if _sync_file_range is not None:
        whole = ctypes.c_int64(0)  # from byte 0, length 0: to the end of the file
        _sync_file_range(descriptor, whole, whole, _SYNC_FILE_RANGE_WRITE)
