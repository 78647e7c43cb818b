"""Files of a store: found without leaving it, written under the name of their content; its manifest
and its lock.

A content file is `<folder>/<stem>-<first 12 digits of its sha256>.<suffix>`. It is written under a
temporary name, synced and renamed, and never changed afterwards, so a reader of an old manifest and
a reader of the new one both find what theirs names.
"""

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock

from mlxstacks.errors import CheckpointError, InputError, StoreError
from mlxstacks.files.disk import append_line, require_space, sync_directory, target_errors
from mlxstacks.files.manifest import FOLDERS, FileRecord, Manifest, parse_manifest
from mlxstacks.files.outputs import STORE_LOCK, refuse_built_in
from mlxstacks.files.router_file import REPAIR as ROUTER_REPAIR
from mlxstacks.files.shards import open_regular
from mlxstacks.files.stack_file import REPAIR as STACK_REPAIR
from mlxstacks.files.strict_json import MAX_JSON_BYTES

MANIFEST = "manifest.json"
# The manifest before the last change.
PREVIOUS = "previous.json"
LOCK = STORE_LOCK
LOG = "log.jsonl"
LOCATION = "base.json"
# Of the last training; study.document names the first too. Before 0.2 it was the last of them.
RESULT, RESULT_PAGE, FORMER_REPORT = "result.json", "result.md", "stack_report.json"
# Of every training.
METRICS = "metrics.csv"

_TEMPORARY = re.compile(r"\..{1,220}\.tmp-\d+-[0-9a-f]{8}")
_CONTENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*-[0-9a-f]{12}\.[a-z]+")


def file_of(root: Path, record: FileRecord) -> Path:
    """The path of a file that the manifest names; its size is that of the record.

    Raises: StoreError: missing, a link (its target may lie anywhere), no regular file, truncated.
    """
    path, repair = root / record.file, _repair(record)
    for part in (path.parent, path):
        if part.is_symlink():
            raise StoreError(f"{part}: is a link; a store holds its own files; {repair}")
    try:
        status = path.stat()
    except FileNotFoundError:
        raise StoreError(
            f"{path}: missing; {repair}; or open the store again if it was changed meanwhile"
        ) from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened: {error.strerror}; {repair}") from None
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path}: not a regular file; {repair}")
    if status.st_size != record.nbytes:
        what = "truncated" if status.st_size < record.nbytes else "grown"
        raise StoreError(
            f"{path}: {what}: {status.st_size} bytes, the manifest says {record.nbytes}; {repair}"
        )
    return path


def read_checked(root: Path, record: FileRecord) -> bytes:
    """All bytes of a small file of the store. Raises: StoreError as `file_of`, or changed bytes."""
    path = file_of(root, record)
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise StoreError(
            f"{path}: its bytes changed: not the sha256 of the manifest; {_repair(record)}"
        )
    return data


def _repair(record: FileRecord) -> str:
    """What to do about a bad file."""
    return ROUTER_REPAIR if record.file.startswith("routers/") else STACK_REPAIR


def add_content(
    root: Path, folder: str, stem: str, suffix: str, needed_bytes: int, write: Callable[[Path], str]
) -> FileRecord:
    """A new content file. write: makes the file at the path it is given, returns its sha256.

    Bytes that are there already are written again: a damaged copy is replaced by a whole one.
    Raises: TargetError: full disk, read-only. Nothing is left then.
    """
    assert folder in FOLDERS
    directory = root / folder
    with target_errors(directory, needed_bytes):
        if directory.is_symlink():
            raise StoreError(f"{directory}: is a link; a store holds its own files")
        directory.mkdir(exist_ok=True)
        require_space(directory, needed_bytes)
    temporary = directory / f".{stem}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        with target_errors(directory, needed_bytes):
            sha256 = write(temporary)
        name = f"{stem}-{sha256[:12]}.{suffix}"
        with target_errors(directory / name, needed_bytes):
            nbytes = temporary.stat().st_size
            os.replace(temporary, directory / name)
            sync_directory(directory)
    finally:
        with suppress(OSError):  # it is gone in the usual case; an error above must be seen
            temporary.unlink()
    return FileRecord(f"{folder}/{name}", sha256, nbytes)


def log_line(path: Path, line: str) -> None:
    """`append_line`, to a file that may not be there. Raises: TargetError; StoreError: a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    if path.is_symlink():
        raise StoreError(f"{path}: is a link; a store holds its own files")
    with target_errors(path):
        descriptor = os.open(path, flags, 0o666)
        try:
            append_line(descriptor, f"{line}\n".encode(), path)
        finally:
            os.close(descriptor)


def temporaries(root: Path) -> list[Path]:
    """What dead writers left half-written. Only under the writers' lock are all of them dead."""
    places = [root, *(root / folder for folder in FOLDERS)]
    paths = (path for place in places for path in _entries(place))
    return sorted(path for path in paths if _TEMPORARY.fullmatch(path.name))


def unnamed_files(root: Path, named: set[str]) -> tuple[list[Path], list[Path]]:
    """Content files that no record names, and entries that are not files of a store at all.

    named: paths inside the store, as records have them.
    """
    content: list[Path] = []
    strange: list[Path] = []
    for folder in FOLDERS:
        for path in _entries(root / folder):
            if f"{folder}/{path.name}" in named or _TEMPORARY.fullmatch(path.name):
                continue
            is_content = False  # has the name that `add_content` gave it, not one that looks so
            if not path.is_symlink() and path.is_file() and _CONTENT.fullmatch(path.name):
                with path.open("rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                is_content = path.stem.endswith(f"-{sha256[:12]}")
            (content if is_content else strange).append(path)
    return sorted(content), sorted(strange)


def own_entries(root: Path) -> set[str] | None:
    """What of a store's directory is the store's, as relative paths; None where no manifest says
    that it is one.

    Files that no manifest names any more are known by their name, which begins their hash.
    """
    try:
        records = read_manifest(root).files()
    except (InputError, StoreError):
        return None
    named = {record.file for record in records}
    unnamed = [*unnamed_files(root, named)[0], *temporaries(root)]
    named |= {path.relative_to(root).as_posix() for path in unnamed}
    results = {RESULT, RESULT_PAGE, FORMER_REPORT, METRICS}
    return named | results | {MANIFEST, PREVIOUS, LOG, LOCK, LOCATION, *FOLDERS}


def _entries(place: Path) -> list[Path]:
    return [] if place.is_symlink() or not place.is_dir() else list(place.iterdir())


def read_manifest(root: Path, name: str = MANIFEST) -> Manifest:
    """name: PREVIOUS for the one before the last change.

    Raises: InputError: no store is there. StoreError: the manifest is missing or damaged.
    """
    path = root / name
    if not os.path.lexists(path):
        if held := [name for name in ("stacks", "blocks") if (root / name).is_dir()]:
            raise StoreError(f"{path}: missing, its {held[0]} are there; restore it from a copy")
        for name, kind in (("adapter_config.json", "adapter_path"), ("config.json", "model")):
            if (root / name).is_file():
                option, what = "--" + kind.replace("_", "-"), kind.partition("_")[0]
                raise InputError(f"{root}: the {what} of a run, no store; give it with {option}")
        raise InputError(f"{root}: no store: it has no {MANIFEST} (`mlxstacks stack` makes one)")
    if path.is_symlink():
        raise StoreError(f"{path}: is a link; a store holds its own files")
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return parse_manifest(file.read(MAX_JSON_BYTES + 1))
    except (CheckpointError, OSError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise StoreError(f"{path}: damaged: {error}; restore it from a copy") from None


@contextmanager
def writers_lock(root: Path) -> Iterator[None]:
    """Be the one writer of a store. Raises: StoreError naming the process that is; TargetError."""
    refuse_built_in(root)
    path = root / LOCK
    if path.is_symlink():
        raise StoreError(f"{path}: is a link; remove it")
    lock = filelock.FileLock(path)
    try:
        with target_errors(root):
            lock.acquire(timeout=0)
    except filelock.Timeout:
        holder = path.read_text().strip() if path.exists() else ""
        raise StoreError(
            f"{root}: process {holder[:20] or 'unknown'} is changing it; wait for it to end"
        ) from None
    try:
        with target_errors(root):
            path.write_text(f"{os.getpid()}\n")
        yield
    finally:
        # the file stays: a lock on a file that has lost its name would exclude nobody
        lock.release()
