"""Rows that Python holds, as files: what a run reads can be read again, by a resumed run too."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError

# mlx-lm's names of the files of a directory; `datasets` calls the second part differently.
_FILES = dict.fromkeys(("validation", "val", "dev"), "valid")


def holds_rows(data: Any) -> bool:
    """Whether these are rows (dicts in a list, a `datasets.Dataset`, a pandas DataFrame), or named
    ones.
    """
    if isinstance(data, Mapping):
        return bool(data) and "sources" not in data and all(map(holds_rows, data.values()))
    return isinstance(data, Iterable) and not (
        isinstance(data, str | bytes) or hasattr(data, "model_fields")
    )


def write_rows(data: Any, target: Path, keyword: str = "data") -> Path:
    """Write rows next to a target, under a name with their hash: NAME.rows-HASH.jsonl, or of named
    rows a directory with a file each. keyword: that they were given as, for messages.

    Law: the same names and rows give the same files, those that are there with these bytes stay,
    and no other file is among them.
    Raises: InputError: a row is no dict, or holds what JSON has no form for.
    """
    named = data if isinstance(data, Mapping) else {"": data}
    if other := [name for name in named if not isinstance(name, str)]:
        key = other[0]
        raise InputError(f"{keyword}: {key!r} is no name; give text, as {{'{key}': rows}}")
    named = {  # of a DataFrame, whose iterator gives the columns' names
        name: _records(rows, f"{keyword} {name}".strip()) if hasattr(rows, "iterrows") else rows
        for name, rows in named.items()
    }
    texts = {name: _jsonl(rows, f"{keyword} {name}".strip()) for name, rows in named.items()}
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(hashlib.sha256(name.encode()).digest() * bool(name))
        digest.update(hashlib.sha256(text).digest())
    place = target.with_name(f"{target.name}.rows-{digest.hexdigest()[:12]}")
    if not isinstance(data, Mapping):
        place = place.with_name(f"{place.name}.jsonl")
        _write(place, texts[""])
        return place
    for name, text in texts.items():
        _write(place / f"{_FILES.get(name, name)}.jsonl", text)
    return place


def _records(frame: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a DataFrame: null for what is missing (NaN, NaT), dates as text.

    Raises: InputError: dates are what is trained on, in a form that nobody chose.
    """
    for column, kind in frame.dtypes.items():
        if column in ("prompt", "completion") and getattr(kind, "kind", "") in "Mm":
            raise InputError(
                f"{name}: {column} holds dates; give text, as in frame[{column!r}].astype(str)"
            )
    text = frame.to_json(orient="records", date_format="iso", default_handler=str)
    records: list[dict[str, Any]] = json.loads(text)
    return records


def _jsonl(rows: Iterable[Any], name: str) -> bytes:
    lines = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise InputError(
                f"{name}: row {number} is {type(row).__name__}; rows are dicts, as in "
                "[{'prompt': ..., 'completion': ...}]"
            )
        fields = []
        for key, value in row.items():
            # NaN is what to_dict("records") of a frame has where nothing is.
            field = {key: None if isinstance(value, float) and value != value else value}
            try:
                text = json.dumps(field, ensure_ascii=False, allow_nan=False, default=_of_array)
            except (TypeError, ValueError) as error:
                raise InputError(f"{name}: row {number}, {key!r}: {error}") from None
            fields.append(text[1:-1])
        lines.append(f"{{{', '.join(fields)}}}\n")
    if not lines:
        raise InputError(f"{name}: holds no row")
    return "".join(lines).encode("utf-8", "surrogatepass")


def _of_array(value: Any) -> Any:
    """An array as lists, its scalar as a number. Raises: TypeError: JSON has no form for it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"got {type(value).__name__}; give text, a number, a list or a dict")


def _write(path: Path, text: bytes) -> None:
    if path.is_file() and path.read_bytes() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)
