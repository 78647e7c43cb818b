"""Files of outcomes in a work directory other than answers: not believed where they were changed.

What is read back by a run that goes on (a fuse's figures, notes of an arm, the harness's results)
carries a `digest` of its own values. It shows damage and edits, not a digest computed anew, as in
answer_log.py. What follows from answers and settings (rows to train on) is made again instead.
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import write_file, write_json
from mlxstacks.files.strict_json import compact, json_sha256, read_object

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
