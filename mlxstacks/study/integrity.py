"""Files of outcomes in a work directory other than answers: not believed where they were changed.

What is read back by a run that goes on (a fuse's figures, notes of an arm, the harness's results)
carries a `digest` of its own values. It shows damage and edits, not a digest computed anew, as in
answer_log.py. What follows from answers and settings (rows to train on) is made again instead.

What a report was made from it holds as `provenance`, path below its directory -> `answers` and
`digest` (of the last of so many answers, see answer_log.py) or `sha256` (of a whole file). They are
of what was read when the report was made, and are held here against what lies beside it now.
"""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from io import BufferedReader
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import write_file, write_json
from mlxstacks.files.strict_json import compact, json_sha256, read_object
from mlxstacks.study.answer_log import digests_of, lines_of

# Of files that this program wrote: one holds every sample of a benchmark, so it has no small limit.
MOST_SEALED_BYTES = 1 << 30


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """JSON with its digest, atomically; makes the directory. Raises: ValueError for NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = compact(value)
    plain = read_object(data, len(data))  # as it is read: keys are texts, tuples are lists
    write_json(path, {**plain, "digest": json_sha256(plain)})


def read_sealed(
    path: Path, remedy: str = "remove it to make it again"
) -> tuple[dict[str, Any], bytes]:
    """The values without their digest, and the bytes that were read. remedy: for its errors.

    Law: with any byte changed this raises, or gives the same values (a blank between them).
    Raises: InputError for a file that is missing, damaged, or was changed.
    """
    try:
        data = path.read_bytes()
        value = read_object(data, MOST_SEALED_BYTES)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: damaged ({error}); {remedy}") from None
    if "digest" not in value:
        raise InputError(
            f"{path}: carries no digest, so it was written by an older version or by hand; {remedy}"
        )
    if value.pop("digest") != json_sha256(value):
        raise InputError(f"{path}: was changed after it was written; {remedy}")
    return value, data


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as JSONL, or nothing where the same ones lie there; returns their bytes."""
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if path.is_file() and path.read_bytes() == data:
        return data
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)
    return data


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


# --- what a report was made from ------------------------------------------------------------------

Provenance = dict[str, dict[str, Any]]
_MOST_FILES = 5_000
# Of one file, and of all together: the same large one can be named under many paths.
MOST_BYTES, _MOST_BYTES_IN_ALL = 1 << 30, 1 << 31


def of_bytes(data: bytes) -> dict[str, Any]:
    """The entry of a file that was read as a whole."""
    return {"sha256": hashlib.sha256(data).hexdigest()}


def of_file(path: Path) -> dict[str, Any]:
    """The entry of a file, read in pieces: it may be weights."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@dataclass(frozen=True)
class Checked:
    """same: how many files are as they were. other: why one is not, a sentence's part each.
    missing: files that are not there.
    """

    same: int
    other: tuple[str, ...]
    missing: tuple[str, ...]


def check_provenance(directory: Path, provenance: Mapping[str, Any]) -> Checked:
    """The files of a report, each against its entry. Report and files may be a stranger's: nothing
    outside the directory is read, nor what is no plain file, nor more than so many bytes in all.
    """
    if len(provenance) > _MOST_FILES:
        return Checked(0, (f"it names {len(provenance):,} files, allowed: {_MOST_FILES:,}",), ())
    root, left, other, missing = directory.resolve(), _MOST_BYTES_IN_ALL, [], []
    for name, entry in provenance.items():
        try:
            file = _opened(root, name)
            if file is None:
                missing.append(name)
                continue
            with file:
                left -= os.fstat(file.fileno()).st_size
                if left < 0:
                    raise ValueError(
                        f"with it they are more than {_MOST_BYTES_IN_ALL:,} bytes of files"
                    )
                _compare(file, entry)
        except ValueError as error:
            other.append(f"{name} is not what the result was made from: {error}")
    same = len(provenance) - len(other) - len(missing)
    return Checked(same, tuple(other), tuple(missing))


def copy_named(
    directory: Path, provenance: Mapping[str, Any], target: Path, most_bytes: int
) -> None:
    """Copy the files of a report to `target`, so that what reads them there meets plain files that
    are named, and nothing else: no link, no pipe, no file that was laid next to them.

    Raises: ValueError for one that is not there or not to be read, and for too many bytes.
    """
    root, left = directory.resolve(), most_bytes
    for name in provenance:
        file = _opened(root, name)
        if file is None:
            raise ValueError(f"{name:.200} is not there")
        with file:
            left -= os.fstat(file.fileno()).st_size
            if left < 0:
                raise ValueError(f"its files have more than {most_bytes:,} bytes")
            copy = target / (root / name).resolve().relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("wb") as written:
                shutil.copyfileobj(file, written)


def _opened(root: Path, name: str) -> BufferedReader | None:
    """None where nothing is. Raises: ValueError for what is not to be read."""
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise ValueError("it lies outside the directory")
        # Not waiting on a pipe that somebody laid there.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"it cannot be read ({type(error).__name__})") from None
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:
        os.close(descriptor)
        raise ValueError("it is no plain file, or too large to be one of ours")
    return os.fdopen(descriptor, "rb")


def _compare(file: BufferedReader, entry: Any) -> None:
    """Raises: ValueError saying what differs."""
    if not isinstance(entry, Mapping):
        raise ValueError("the report holds no digest of it")
    if "sha256" in entry:
        if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
            raise ValueError("it was changed")
        return
    count = entry.get("answers")
    if type(count) is not int or count < 0:
        raise ValueError("the report holds no digest of it")
    last, lines = None, 0  # of the header and `count` answers; lines behind them must follow too
    for lines, digest in enumerate(digests_of(lines_of(file)), 1):
        if lines == count + 1:
            last = digest
    if lines <= count:
        raise ValueError(f"it holds {max(lines - 1, 0):,} of {count:,} answers")
    if last != entry.get("digest"):
        raise ValueError("it holds other answers")
