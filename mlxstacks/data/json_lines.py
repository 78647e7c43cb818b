"""JSONL files: one JSON object a line, read a line at a time."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError

MAX_LINE_BYTES = 64 << 20  # a book is some MB; what is longer is no row
_BLOCK_BYTES = 1 << 20
# How JSON writes half of a character outside of Unicode's first 65,536; the other half follows it.
_HALF = re.compile(r"\\u[dD][89a-fA-F]")


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
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = json.loads(text)
            except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
                reason = getattr(error, "msg", str(error))
                raise InputError(
                    f"{path}, line {number}: not JSON ({reason}); each line must be one object"
                ) from error
            if not isinstance(record, dict):
                raise InputError(
                    f"{path}, line {number}: got {type(record).__name__}, need an object"
                )
            check_halves(text, record, f"{path}, line {number}")
            yield number, record
    if not found:
        raise InputError(f"{path}: no rows; each line must be one JSON object")


def count_rows(path: Path) -> int:
    """Lines of a file that are not blank; no more than a block of one is held."""
    rows = 0
    is_blank = True
    with path.open("rb") as file:
        for part in iter(partial(file.readline, _BLOCK_BYTES), b""):
            rows += is_blank and bool(part.strip())
            is_blank = part.endswith(b"\n") or (is_blank and not part.strip())
    return rows


def check_halves(text: str, value: Any, where: str) -> None:
    """text: the JSON of `value`. Raises: InputError: a text in it holds half a character, which no
    tokenizer, file or screen takes.
    """
    if not _HALF.search(text):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InputError(
            f"{where}: \\u{ord(half):04x} is half a character; write its other half, or take it out"
        ) from None
