"""A file of answers, one JSON object a line, appended as they come: a killed run loses a batch.

The first line, the header, says what they are answers of.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from mlxstacks.errors import InputError
from mlxstacks.files.disk import target_errors

Parsed = TypeVar("Parsed")


def read_answers(
    path: Path, header: dict[str, Any], parse: Callable[[dict[str, Any]], Parsed]
) -> tuple[list[Parsed], int]:
    """The answers, and the byte behind the last whole line; ([], 0) where nothing is.

    parse: a row as an answer; raises ValueError, TypeError or KeyError for one that is none.
    Raises: InputError for a damaged file or another header.
    """
    if not path.exists():
        return [], 0
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        return [], 0
    try:
        first, *rows = [json.loads(line) for line in lines]
        found = [parse(row) for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error}); remove it to answer again") from None
    if first != header:
        raise InputError(f"{path}: answers of another plan or arm; remove it to answer again")
    return found, sum(len(line) + 1 for line in lines)


def other_items(path: Path) -> InputError:
    """What a file says whose answers are not to the items that are asked."""
    return InputError(f"{path}: answers to other items; remove it to answer again")


def begin_answers(path: Path, header: dict[str, Any], end: int) -> None:
    """Write the header, or cut off behind `end` half a line of a run that was killed."""
    with target_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if end == 0:
            path.write_bytes(_line(header))
        else:
            os.truncate(path, end)


def append_answers(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """All of them in one write, on the disk when this returns."""
    with target_errors(path), path.open("ab") as file:
        file.write(b"".join(map(_line, rows)))
        file.flush()
        os.fsync(file.fileno())


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
