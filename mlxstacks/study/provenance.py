"""What a report was made from: digests of its answers and of other files of outcomes.

A result holds them as `provenance`, path below its directory -> `answers` and `digest` (of the
last of so many answers, see answer_log.py) or `sha256` (of a whole file). They are of what was read
when the report was made, and are held here against what lies beside it now.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from mlxstacks.study.answer_log import digests_of, lines_of

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
