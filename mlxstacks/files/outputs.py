"""Output directories that exist whole or not at all, and JSON files likewise.

A directory is built beside its target as `.{name}.tmp-{pid}-{random}`, synced, and renamed. A lock
on `.{name}.lock` keeps other runs away from the same target meanwhile. An existing target is
exchanged with the new directory in one step where the system can (Linux, macOS); elsewhere it is
first renamed to `.{name}.old-{random}`, and the next run to this target puts it back if the process
died between the two renames. That next run also removes the temporaries of dead runs: holding the
lock proves that they are dead.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.carry import SideFile, carry_side_files, clone_or_link, side_files
from mlxstacks.files.disk import (
    c_function,
    existing_ancestor,
    require_space,
    sync_directory,
    sync_tree,
    target_errors,
    user_path,
    write_all,
)

__all__ = [
    "SideFile",
    "carry_side_files",
    "check_target",
    "clone_or_link",
    "side_files",
    "staged_directory",
    "write_json",
]

# One of these lies in every directory that --force may replace.
_REPORTS = {
    "fuse_report.json", "sweep_report.json", "compare_report.json", "analysis_report.json",
    "discover_report.json", "route_evaluate_report.json", "route_check_report.json",
    "confound_report.json", "profile_report.json", "identity_report.json", "eval_report.json",
    "report.json",
}  # fmt: skip
_OWN_FILES = {"config.json", "adapter_config.json", "manifest.json", *_REPORTS}
_AT_FDCWD = -100
_EXCHANGE = 2  # Linux RENAME_EXCHANGE and macOS RENAME_SWAP


def check_target(
    target: Path,
    *,
    force: bool = False,
    needed_bytes: int = 0,
    inputs: Sequence[Path] = (),
) -> Path:
    """Say whether `target` could be written, touching nothing; return it with links resolved.

    inputs: files or directories that are read; the target may not be one of them or hold one.
    See `staged_directory` for the rest.
    """
    resolved = _resolved(target)
    with target_errors(resolved):
        _check_place(resolved, force, inputs)
        require_space(resolved, needed_bytes)
    return resolved


def _resolved(target: Path) -> Path:
    path = user_path(target, TargetError)
    try:
        return path.resolve()
    # a circle of links is a RuntimeError to Python 3.11, a NUL in the name a ValueError
    except (OSError, RuntimeError, ValueError) as error:
        raise TargetError(f"{str(path)!a}: not a usable target: {error}; choose another") from None


def _check_place(resolved: Path, force: bool, inputs: Sequence[Path]) -> None:
    for path in [*map(Path, inputs), Path.cwd(), Path.home()]:
        try:
            source = path.resolve()
        except (RuntimeError, ValueError) as error:  # YAML can write a NUL, or half a character
            raise InputError(f"{str(path)!a}: not a usable path: {error}") from None
        if source.is_relative_to(resolved):
            raise TargetError(
                f"{resolved}: is or holds {path}, which must not be replaced; choose another target"
            )
    if os.path.lexists(resolved):
        _check_existing(resolved, force)
    ancestor = existing_ancestor(resolved.parent)
    if ancestor != resolved.parent and os.path.lexists(_below(ancestor, resolved)):
        raise TargetError(
            f"{_below(ancestor, resolved)}: is a file, a directory is needed; choose another target"
        )
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise TargetError(f"{resolved}: {ancestor} is not writable; choose another target")


@contextmanager
def staged_directory(
    target: Path,
    *,
    force: bool = False,
    needed_bytes: int = 0,
    inputs: Sequence[Path] = (),
) -> Iterator[Path]:
    """Yield an empty directory that becomes `target` when the block ends without an error.

    force: an existing directory may be replaced, if it holds a model, an adapter or a report.
    needed_bytes: refused at once where fewer are free.
    inputs: paths the target may not be or hold.

    Law: whenever the process dies, `target` is what it was, or whole and new, or (only on systems
    without an atomic exchange, for an instant) absent until the next run puts the old one back.

    Raises:
        TargetError: the target exists, is being written by another run, is not writable, or the
            disk is too small or becomes full.
    """
    target = _resolved(target)

    def check() -> None:
        check_target(
            target,
            force=force,
            needed_bytes=needed_bytes,
            inputs=inputs,
        )

    # before the lock, because a refusal should leave no trace; and again once nobody else writes
    check()
    with target_errors(target, needed_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(target)
    try:
        with target_errors(target, needed_bytes):
            _repair(target)
            check()
            staged = _sibling(target, f"tmp-{os.getpid()}")
            staged.mkdir()
        done = False
        try:
            with target_errors(target, needed_bytes, only_writes=True):
                yield staged
            with target_errors(target, needed_bytes):
                sync_tree(staged)
                _swap_in(staged, target)
            done = True
        finally:
            if not done:
                shutil.rmtree(staged, ignore_errors=True)
    finally:
        # removed while held: filelock does not accept a lock on a file that has lost its name
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def write_json(path: Path, value: Any, *, sort_keys: bool = False, allow_nan: bool = False) -> None:
    """Write JSON atomically: a reader sees the old file or the whole new one.

    allow_nan: let NaN and Infinity through as Python spells them (some model configs hold them).

    Raises:
        ValueError: NaN or Infinity in `value` without `allow_nan`.
        TargetError: the directory is missing or read-only, the disk is full.
    """
    write_file(path, _json_bytes(value, sort_keys, allow_nan))


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically, as `write_json`. Raises: TargetError."""
    path = Path(path)
    data = memoryview(content)
    temporary = _sibling(path, f"tmp-{os.getpid()}")
    try:
        with target_errors(path, data.nbytes):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o666)
            try:
                write_all(descriptor, data, 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
            sync_directory(path.parent)
    finally:
        with suppress(OSError):  # nothing to remove is the usual case; an error above must be seen
            temporary.unlink()


def _json_bytes(value: Any, sort_keys: bool, allow_nan: bool) -> bytes:
    options: dict[str, Any] = {"indent": 2, "sort_keys": sort_keys, "allow_nan": allow_nan}
    try:
        return f"{json.dumps(value, ensure_ascii=False, **options)}\n".encode()
    except UnicodeEncodeError:  # a path that is not UTF-8: JSON can still escape it
        return f"{json.dumps(value, **options)}\n".encode()


def _check_existing(target: Path, force: bool) -> None:
    if not target.is_dir():
        raise TargetError(f"{target}: is a file, a directory is needed; choose another target")
    names = sorted(path.name for path in target.iterdir())
    if not names:  # an empty directory holds nothing to lose
        return
    if not force:
        raise TargetError(f"{target}: exists; choose another target, or --force to replace it")
    if not any(name in _OWN_FILES or name.endswith(".safetensors") for name in names):
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise TargetError(
            f"{target}: holds {shown} but no model, adapter or report, so --force does not "
            "replace it; choose another target or remove it yourself"
        )


def _below(ancestor: Path, path: Path) -> Path:
    """The first path component below `ancestor` on the way to `path`."""
    return ancestor / path.relative_to(ancestor).parts[0]


def _sibling(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{secrets.token_hex(4)}"


def _locked(target: Path) -> filelock.BaseFileLock:
    path = target.parent / f".{target.name}.lock"
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        holder = path.read_text().strip() if path.exists() else ""
        raise TargetError(
            f"{target}: process {holder or 'unknown'} is writing it; "
            "wait for it or choose another target"
        ) from None
    path.write_text(f"{os.getpid()}\n")
    return lock


def _leftovers(target: Path, kind: str) -> list[Path]:
    # a whole match: a target named "a.tmp-1-00000000" has temporaries that begin like those of "a"
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{kind}-[0-9a-f]{{8}}")
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


def _repair(target: Path) -> None:
    """Finish what a dead run left; call only under the lock."""
    for old in _leftovers(target, "old"):
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)
    for temporary in _leftovers(target, r"tmp-\d+"):
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary)


def _swap_in(staged: Path, target: Path) -> None:
    if not target.exists():
        staged.rename(target)
        sync_directory(target.parent)
        return
    if _exchange(staged, target):
        old = staged
    else:
        old = _sibling(target, "old")
        target.rename(old)
        staged.rename(target)
        # under a temporary's name nobody puts it back once its removal has begun
        old = old.rename(staged)
    sync_directory(target.parent)
    # the new directory is in place: what cannot be removed now, the next run removes
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step; False where the system or file system cannot."""
    one, two = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        rename = c_function("renamex_np")
        return rename is not None and rename(one, two, _EXCHANGE) == 0
    rename = c_function("renameat2")
    return rename is not None and rename(_AT_FDCWD, one, _AT_FDCWD, two, _EXCHANGE) == 0
