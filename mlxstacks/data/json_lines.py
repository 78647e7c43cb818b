"""JSONL files: one JSON object a line, read a line at a time."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError

MAX_LINE_BYTES = 256 << 20  # a book is some MB; what is longer is no row


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, blank lines skipped.

    Raises:
        InputError: a line is not a JSON object, or the file holds none.
    """
    return [record for _, record in numbered_records(path)]


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of a JSONL file. Raises: as `read_records`."""
    number = found = 0
    try:
        lines = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; give a file with a JSON object a line"
        ) from None
    with lines:
        for number, line in enumerate(iter(partial(lines.readline, MAX_LINE_BYTES), b""), start=1):
            if len(line) == MAX_LINE_BYTES:
                raise InputError(
                    f"{path}, line {number}: {MAX_LINE_BYTES:,} bytes or more; each line must be "
                    "one object"
                )
            if not line.strip():
                continue
            found += 1
            try:
                # some editors begin a file with a mark of UTF-8
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
                reason = getattr(error, "msg", str(error))
                raise InputError(
                    f"{path}, line {number}: not JSON ({reason}); each line must be one object"
                ) from error
            if not isinstance(record, dict):
                raise InputError(
                    f"{path}, line {number}: got {type(record).__name__}, need an object"
                )
            yield number, record
    if not found:
        raise InputError(f"{path}: no rows; each line must be one JSON object")
