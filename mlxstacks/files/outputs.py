"""Output directories that exist whole or not at all, and JSON files likewise.

A directory is built next to its target as `.{name}.tmp-{pid}-{random}`, marked as ours, synced, and
renamed. A lock on `.{name}.lock` keeps other runs away from the same target meanwhile. An existing
target is exchanged with the new directory in one step where the system can (Linux, macOS);
elsewhere it is first renamed to `.{name}.old-{random}`, and the next run to this target puts it
back if the process died between the two renames. That next run also removes the marked temporaries
of dead runs: holding the lock proves that they are dead.

The mark `.mlxstacks.json` lies in every directory that a command writes:

    written_by    "mlxstacks": without this field nothing is replaced, whatever the files are called
    files         every file and directory next to it, as relative paths; absent while unfinished
    bare_run      whether the next bare run may replace the directory
    built_in      whether it belongs to the cache of what comes with mlxstacks

What is not in `files` is somebody else's, and stays.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from mlxstacks.errors import InputError, TargetError, TargetExistsError
from mlxstacks.files.disk import (
    c_function,
    cache_directory,
    existing_ancestor,
    mlx_write_errors,
    owner_note,
    require_space,
    sync_directory,
    sync_tree,
    target_errors,
    user_path,
    write_new,
)
from mlxstacks.resources import NAMES, resource_dir

# Settings that say where a run writes and how it goes on, not what comes of it.
PLACES = {"force", "save_path", "resume"}
STORE_LOCK = ".lock"
MARK = ".mlxstacks.json"
_WRITER = "mlxstacks"
_MOST_BYTES = 64_000_000
# macOS leaves one in every directory that Finder shows.
_OF_THE_SYSTEM = ".DS_Store"
# The mark, or what a run that was killed while it wrote one left of it.
_MARK_OR_PART = re.compile(rf"{re.escape(MARK)}|\.{re.escape(MARK)}\.tmp-\d+-[0-9a-f]{{8}}")
_PACKAGE = Path(__file__).resolve().parent.parent

# A directory -> what in it may go, as relative paths; None where nothing shows that it is ours.
Owned = Callable[[Path], Collection[str] | None]


def new_mark(files: Collection[str] | None = None, **fields: bool) -> dict[str, Any]:
    """The content of a mark; without `files` that of a directory that is not finished."""
    listed = {} if files is None else {"files": sorted(files)}
    return {"written_by": _WRITER, **listed, **fields}


def read_mark(directory: Path) -> dict[str, Any] | None:
    """The mark of a directory; None where there is none of ours."""
    path = directory / MARK
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        mark = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return mark if isinstance(mark, dict) and mark.get("written_by") == _WRITER else None


def entries(directory: Path) -> list[str]:
    """Everything below a directory but its mark, as relative paths; links are not followed."""
    return sorted(
        path
        for parent, folders, files in os.walk(directory)
        for name in (*folders, *files)
        if name != _OF_THE_SYSTEM
        and not _MARK_OR_PART.fullmatch(
            path := os.path.relpath(os.path.join(parent, name), directory)
        )
    )


def listed_entries(directory: Path) -> Collection[str] | None:
    """What the mark of a finished directory lists; None where there is no such mark."""
    files = (read_mark(directory) or {}).get("files")
    return set(map(str, files)) if isinstance(files, list) else None


def check_replaceable(target: Path, owned: Owned = listed_entries) -> None:
    """Raises: TargetError where a directory is not marked as ours, or naming what else it holds."""
    ours = owned(target)
    if ours is None:
        raise TargetError(
            f"{target}: exists, and mlxstacks did not write it (it holds "
            f"{_listed(entries(target))} and no {MARK} that says so); such a directory is never "
            "replaced, not with --force either; choose another target, or look at it and remove it "
            "yourself"
        )
    # a store in it that was changed since has a lock
    others = [p for p in entries(target) if p not in ours and os.path.basename(p) != STORE_LOCK]
    # of a directory that is not ours, not what lies in it as well
    others = [path for path in others if os.path.dirname(path) not in others]
    if others:
        raise TargetError(
            f"{target}: holds {_listed(others)}, not written there by mlxstacks: --force does not "
            "replace it; move that elsewhere, or choose another target"
        )


def check_claimable(directory: Path) -> None:
    """Of a work directory, which is ours as a whole and is removed as a whole.

    Raises: TargetError where somebody else's files lie under its name.
    """
    if directory.is_symlink() or not directory.is_dir():
        if os.path.lexists(directory):
            raise TargetError(f"{directory}: is no directory; a run needs the name, so remove it")
        return
    if entries(directory) and read_mark(directory) is None:
        raise TargetError(
            f"{directory}: a run keeps its work there, and mlxstacks did not write what it holds "
            f"({_listed(entries(directory))}); move that elsewhere, or choose another save path"
        )


def remove_marked(directory: Path) -> None:
    """Remove a directory of ours, its mark last: what a kill or another user leaves of it can be
    removed later. What carries no mark stays.
    """
    if directory.is_symlink() or not directory.is_dir():
        return
    inside = [path for path in directory.iterdir() if not _is_mark(path)]
    if inside and read_mark(directory) is None:
        return
    for path in inside:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    if all(map(_is_mark, directory.iterdir())):
        shutil.rmtree(directory, ignore_errors=True)


def _is_mark(path: Path) -> bool:
    return _MARK_OR_PART.fullmatch(path.name) is not None and not path.is_dir()


def refuse_built_in(target: Path) -> None:
    """Raises: TargetError for a path inside the installed package or the cache of what it makes."""
    try:
        target = Path(os.path.realpath(target))
    except ValueError:  # a NUL in the name: no path at all, as whoever opens it will say
        return
    roots = [_PACKAGE, *(resource_dir(name).resolve() for name in NAMES)]
    inside = [root for root in roots if target.is_relative_to(root)]
    inside += [
        place for place in (target, *target.parents) if (read_mark(place) or {}).get("built_in")
    ]
    if inside:
        what = f"{inside[0]} " * (inside[0] != target)
        raise TargetError(
            f"{target}: {what}comes with mlxstacks and is only read; choose another target"
        )


def _listed(paths: Collection[str]) -> str:
    shown = ", ".join(sorted(paths)[:3]) or "nothing"
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")


# --- directories and files that exist whole or not at all -----------------------------------------

_AT_FDCWD = -100
_EXCHANGE = 2  # Linux RENAME_EXCHANGE and macOS RENAME_SWAP


def check_target(
    target: Path,
    *,
    force: bool = False,
    needed_bytes: int = 0,
    inputs: Sequence[Path] = (),
    owned: Owned = listed_entries,
    extends: bool = False,
) -> Path:
    """Say whether `target` could be written, touching nothing; return it with links resolved.

    inputs: files or directories that are read; the target may not be one of them or hold one.
    extends: what is there stays, and more is added to it.
    See `staged_directory` for the rest.
    """
    resolved = _resolved(target)
    with target_errors(resolved):
        _check_place(resolved, inputs)
        if os.path.lexists(resolved) and not extends:
            if not resolved.is_dir():
                raise TargetError(
                    f"{resolved}: is a file, a directory is needed; choose another target"
                )
            if any(resolved.iterdir()):  # an empty directory holds nothing to lose
                check_replaceable(resolved, owned)  # first: to some --force would be no advice
                if not force:
                    others = (f"{target}-{number}" for number in itertools.count(2))
                    free = next(other for other in others if not os.path.lexists(other))
                    raise TargetExistsError(
                        f"{resolved}: exists; choose another target with --save-path ({free} is "
                        "free), or --force to replace it"
                    )
        require_space(resolved, needed_bytes)
    return resolved


def _resolved(target: Path) -> Path:
    path = user_path(target, TargetError)
    try:
        return path.resolve()
    # a circle of links is a RuntimeError to Python 3.11, a NUL in the name a ValueError
    except (OSError, RuntimeError, ValueError) as error:
        raise TargetError(f"{str(path)!a}: not a usable target: {error}; choose another") from None


def _check_place(resolved: Path, inputs: Sequence[Path]) -> None:
    refuse_built_in(resolved)
    for path in [*map(Path, inputs), Path.cwd(), Path.home()]:
        try:
            source = path.resolve()
        except (RuntimeError, ValueError) as error:  # YAML can write a NUL, or half a character
            raise InputError(f"{str(path)!a}: not a usable path: {error}") from None
        if source.is_relative_to(resolved):
            raise TargetError(
                f"{resolved}: is or holds {path}, which must not be replaced; choose another target"
            )
    ancestor = existing_ancestor(resolved.parent)
    if ancestor != resolved.parent and os.path.lexists(_below(ancestor, resolved)):
        raise TargetError(
            f"{_below(ancestor, resolved)}: is a file, a directory is needed; choose another target"
        )
    if not os.access(ancestor, os.W_OK | os.X_OK):
        whose = owner_note(ancestor)
        raise TargetError(f"{resolved}: {ancestor} is not writable{whose}; choose another target")


@contextmanager
def staged_directory(
    target: Path,
    *,
    force: bool = False,
    needed_bytes: int = 0,
    inputs: Sequence[Path] = (),
    owned: Owned = listed_entries,
) -> Iterator[Path]:
    """Yield a directory without files that becomes `target` when the block ends without an error.

    force: an existing directory may be replaced, if all that is in it is ours.
    needed_bytes: refused at once where fewer are free.
    inputs: paths the target may not be or hold.
    owned: tells what in an existing directory is ours; by default what its mark lists. What can be
        told otherwise gets no mark.

    Law: whenever the process dies, `target` is what it was, or whole and new, or (only on systems
    without an atomic exchange, for an instant) absent until the next run puts the old one back.

    Raises:
        TargetError: the target exists, holds what is not ours, is being written by another run, is
            not writable, or the disk is too small or becomes full.
    """
    target = _resolved(target)

    def check(needed_bytes: int = needed_bytes) -> None:
        check_target(
            target, force=force, needed_bytes=needed_bytes, inputs=inputs, owned=owned
        )  # fmt: skip

    # before the lock, because a refusal should leave no trace; and again once nobody else writes
    check()
    with _locked(target, needed_bytes):
        check()
        with _staging(target, needed_bytes, marked=owned is listed_entries) as staged:
            yield staged
            check(0)  # files that somebody put there meanwhile are theirs too


def mark_bare(target: Path) -> None:
    """Let the next bare run replace what a command wrote. Raises: TargetError."""
    write_json(target / MARK, {**(read_mark(target) or new_mark()), "bare_run": True})


def fill_cache(target: Path, is_whole: Callable[[], bool], fill: Callable[[Path], None]) -> None:
    """Make a directory of the cache of built-in things where it is not whole. fill: writes it.

    Law: the directory appears whole or not at all; of two at once one works, the other waits.
    Whoever may read the cache's own directory may read what is put there, and whoever may write it
    may add to it, whatever the umask.

    Raises:
        TargetError: the cache cannot be written, or something else lies under the name.
    """
    cache = cache_directory()
    try:
        with target_errors(target):
            if is_whole():
                return
            cache.mkdir(parents=True, exist_ok=True)
            mode = stat.S_IMODE(cache.stat().st_mode)
            if target.parent != cache:
                with suppress(FileExistsError):
                    target.parent.mkdir()
                    target.parent.chmod(mode)
                    write_json(target.parent / MARK, new_mark(built_in=True))
                    (target.parent / MARK).chmod(mode & 0o644 | 0o600)
        with _locked(target, wait=True, mode=mode & 0o666):
            if not is_whole():
                if os.path.lexists(target):
                    check_replaceable(target)
                with _staging(target, built_in=True) as staged, mlx_write_errors(target):
                    fill(staged)
                    for path in [staged, *staged.rglob("*")]:
                        if not path.is_symlink():
                            shared = mode & (0o755 if path.is_dir() else 0o644)
                            path.chmod(stat.S_IMODE(path.stat().st_mode) | shared)
    except TargetError as error:
        hint = "set MLXSTACKS_CACHE to a directory that can be written"
        raise TargetError(f"the cache {cache}: {error}; or {hint}") from error


@contextmanager
def _locked(
    target: Path, needed_bytes: int = 0, *, wait: bool = False, mode: int | None = None
) -> Iterator[None]:
    """Be the one writer of `target`, next to which what dead ones left is put in order."""
    with target_errors(target, needed_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
    lock = acquire_lock(target.parent / f".{target.name}.lock", target, wait=wait, mode=mode)
    try:
        with target_errors(target, needed_bytes):
            for old in _leftovers(target, "old"):
                if not target.exists():
                    old.rename(target)
                else:
                    remove_marked(old)
            for temporary in _leftovers(target, r"tmp-\d+"):
                remove_marked(temporary)
        yield
    finally:
        release_lock(lock)


@contextmanager
def _staging(
    target: Path, needed_bytes: int = 0, *, marked: bool = True, **fields: bool
) -> Iterator[Path]:
    """Yield the directory that becomes `target`. fields: of its mark."""
    with target_errors(target, needed_bytes):
        staged = _sibling(target, f"tmp-{os.getpid()}")
        staged.mkdir()
    try:
        write_json(staged / MARK, new_mark())
        with target_errors(target, needed_bytes, only_writes=True):
            yield staged
        write_json(staged / MARK, new_mark(entries(staged) if marked else None, **fields))
        with target_errors(target, needed_bytes):
            sync_tree(staged)
            _swap_in(staged, target)
            if not marked:
                (target / MARK).unlink()
    finally:
        # the old target, or what was written until an error; what has become the target is gone
        remove_marked(staged)


def acquire_lock(
    path: Path, target: Path, *, wait: bool = False, mode: int | None = None
) -> filelock.FileLock:
    """Hold the lock file `path` of `target`; it names this process.

    mode: of the file that is made; None leaves it to the umask.

    Raises:
        TargetError: another process holds it, another user owns it, or it is no lock at all.
    """
    lock = filelock.FileLock(path) if mode is None else filelock.FileLock(path, mode=mode)
    with target_errors(path):
        if os.path.lexists(path) and (not path.is_file() or _process_in(path) is None):
            raise TargetError(f"{path}: is no lock of mlxstacks, whose name it has; move it away")
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except filelock.Timeout:
            raise TargetError(
                f"{target}: process {_process_in(path) or 'unknown'} is writing it"
                f"{owner_note(path)}; wait for it or choose another target"
            ) from None
        with path.open("r+") as file:  # another user's dead lock in a sticky directory: no O_CREAT
            file.truncate()
            file.write(f"{os.getpid()}\n")
    return lock


def release_lock(lock: filelock.BaseFileLock) -> None:
    """Let a lock go, and its file."""
    with suppress(OSError):  # gone, or another user's in a sticky directory
        # removed while held: filelock does not accept a lock on a file that has lost its name
        Path(lock.lock_file).unlink()
    lock.release()


def _process_in(path: Path) -> str | None:
    """The process that a lock file names, "" for none; None where it holds anything else."""
    try:
        with path.open("rb") as file:
            text = file.read(40).strip()
    except FileNotFoundError:
        return ""
    return text.decode() if re.fullmatch(rb"\d*", text) else None


def write_json(
    path: Path,
    value: Any,
    *,
    sort_keys: bool = False,
    allow_nan: bool = False,
    mode: int = 0o666,
) -> None:
    """Write JSON atomically: a reader sees the old file or the whole new one.

    allow_nan: let NaN and Infinity through as Python spells them (some model configs hold them).
    mode: of the new file, before the umask.

    Raises:
        ValueError: NaN or Infinity in `value` without `allow_nan`.
        TargetError: the directory is missing or read-only, the disk is full.
    """
    options: dict[str, Any] = {"indent": 2, "sort_keys": sort_keys, "allow_nan": allow_nan}
    try:
        content = f"{json.dumps(value, ensure_ascii=False, **options)}\n".encode()
    except UnicodeEncodeError:  # a path that is not UTF-8: JSON can still escape it
        content = f"{json.dumps(value, **options)}\n".encode()
    write_file(path, content, mode)


def write_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically, as `write_json`. Raises: TargetError."""
    path = Path(path)
    temporary = _sibling(path, f"tmp-{os.getpid()}")
    try:
        with target_errors(path, len(content)):
            write_new(temporary, content, mode)
            os.replace(temporary, path)
            sync_directory(path.parent)
    finally:
        with suppress(OSError):  # nothing to remove is the usual case; an error above must be seen
            temporary.unlink()


def _below(ancestor: Path, path: Path) -> Path:
    """The first path component below `ancestor` on the way to `path`."""
    return ancestor / path.relative_to(ancestor).parts[0]


def _sibling(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{secrets.token_hex(4)}"


def _leftovers(target: Path, kind: str) -> list[Path]:
    # a whole match: a target named "a.tmp-1-00000000" has temporaries that begin like those of "a"
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{kind}-[0-9a-f]{{8}}")
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


def _swap_in(staged: Path, target: Path) -> None:
    if not target.exists():
        staged.rename(target)
        sync_directory(target.parent)
        return
    # a store: from here on it may be removed under another name
    if any(target.iterdir()) and read_mark(target) is None:
        write_json(target / MARK, new_mark())
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
    remove_marked(old)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step; False where the system or file system cannot."""
    paths = os.fsencode(first), os.fsencode(second)
    if sys.platform == "darwin":
        rename = c_function("renamex_np")
        return rename is not None and rename(*paths, _EXCHANGE) == 0
    rename = c_function("renameat2")
    arguments = _AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _EXCHANGE
    return rename is not None and rename(*arguments) == 0
