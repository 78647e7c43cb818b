"""One SHA-256 over every byte of a model's tensors, remembered by the state of its files.

Hashed: for each tensor, in order of names, `[name, dtype, shape, SHA-256 of its bytes]` as a line
of compact JSON. How many files hold the tensors, and how they are called, makes no difference.
Tensors are hashed in parallel: preadv and hashlib let go of the interpreter's lock.

`fingerprints-UID.json` in the cache directory maps the state of all files of a model (each one's
resolved path, device, inode, size, mtime, ctime; hashed) to its digest. On file systems of Unix no
program can set ctime, so a change is seen though mtime was put back. The file is only believed
where no other user can have written it; what cannot be read or written costs time, nothing else.
"""

import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import filelock

from mlxstacks.errors import CheckpointError, TargetError
from mlxstacks.files.disk import cache_directory
from mlxstacks.files.outputs import write_json
from mlxstacks.files.shard_header import AGAIN, TensorInfo, parse_object, read_header, read_range

# Of each user: what another one wrote is not believed.
CACHE_NAME = f"fingerprints-{os.getuid()}.json"
MAX_ENTRIES = 256  # models; the newest stay
# Files changed so recently are not remembered: another change could bear the same time, which some
# file systems keep in steps of this length.
CLOCK_STEP_NS = 2_000_000_000
_MAX_CACHE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20  # read and hashed at once, a thread
_LOCK_SECONDS = 5.0
_MOST_READS = 3
_SHA256 = re.compile(r"[0-9a-f]{64}")

# Of this process: where the cache cannot be written, a run still hashes its model once.
_known: dict[str, str] = {}


def weights_sha256(files: Sequence[Path], tensors: Mapping[str, TensorInfo]) -> str:
    """SHA-256 (hex) of all tensors. files: the safetensors files, whose headers say `tensors`.

    Where the files are as they were when they were hashed last, none of them is opened.

    Raises: CheckpointError: a file is gone, cannot be read, or is being changed.
    """
    # Again, since a link or a chmod by another process changes ctime too.
    for _ in range(_MOST_READS):
        now_ns = time.time_ns()
        state, changed_ns = _state(files)
        if digest := _known.get(state) or _entries().get(state):
            return digest
        digest = _hash(files, tensors)
        if _state(files)[0] == state:
            if changed_ns + CLOCK_STEP_NS < now_ns:
                _remember(state, digest)
            return digest
    raise CheckpointError(f"{files[0].parent}: changed each time it was read; {AGAIN}")


def _state(files: Sequence[Path]) -> tuple[str, int]:
    """Name of the state of all files, and when the last of them was changed (ns since 1970)."""
    states, changed_ns = [], 0
    for path in sorted(files):
        try:
            info = os.stat(path)
            place = os.path.realpath(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}; {AGAIN}") from None
        numbers = info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns
        states.append([place, *numbers])
        changed_ns = max(changed_ns, info.st_ctime_ns)
    return hashlib.sha256(json.dumps(states).encode()).hexdigest(), changed_ns


def _hash(files: Sequence[Path], tensors: Mapping[str, TensorInfo]) -> str:
    # Headers were read before the state was: they have to be of the same files.
    headers = {name: info for path in files for name, info in read_header(path).tensors.items()}
    if headers != tensors:
        raise CheckpointError(f"{files[0].parent}: changed since it was opened; {AGAIN}")
    ordered = [info for _, info in sorted(tensors.items())]
    total = hashlib.sha256()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for info, digest in zip(ordered, threads.map(_tensor_sha256, ordered), strict=True):
            line = json.dumps([info.name, info.dtype, info.shape, digest], separators=(",", ":"))
            total.update(line.encode() + b"\n")
    return total.hexdigest()


def _tensor_sha256(info: TensorInfo) -> str:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(min(info.nbytes, _CHUNK_BYTES)))
    for start in range(0, info.nbytes, _CHUNK_BYTES):
        part = chunk[: info.nbytes - start]
        read_range(info, start, part)
        digest.update(part)
    return digest.hexdigest()


# --- the cache ------------------------------------------------------------------------------------


def _entries() -> dict[str, str]:
    """State -> digest, the oldest first; empty where the file is missing, damaged or not ours."""
    try:
        descriptor = os.open(
            cache_directory() / CACHE_NAME,
            os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
        )
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            ours = info.st_uid == os.geteuid() and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not (stat.S_ISREG(info.st_mode) and ours and info.st_size <= _MAX_CACHE_BYTES):
                return {}
            values = parse_object(file.read(_MAX_CACHE_BYTES).decode())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home directory
        return {}
    return {
        state: digest
        for state, digest in values.items()
        if _SHA256.fullmatch(state) and isinstance(digest, str) and _SHA256.fullmatch(digest)
    }


def _remember(state: str, digest: str) -> None:
    _known[state] = digest
    # RuntimeError: no home directory, or a file system without locks
    with suppress(OSError, RuntimeError, TargetError):
        path = cache_directory() / CACHE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=_LOCK_SECONDS, mode=0o600):
            entries = _entries() | {state: digest}
            newest = list(entries.items())[-MAX_ENTRIES:]
            write_json(path, dict(newest), mode=0o600)
