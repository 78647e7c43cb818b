"""A JSONL file as token rows, as `mlxstacks train` reads it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from mlxstacks.data.encode import ChatTokenizer, RowNotes, encode_record
from mlxstacks.data.json_lines import numbered_records
from mlxstacks.data.rows import Row
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError


@dataclass(frozen=True, slots=True)
class RowFile:
    """Rows of a JSONL file. cut: how many were too long. empty: how many are left out because no
    token of them has loss weight. sha256: of the file. notes: on how they were rendered.
    """

    rows: list[Row]
    cut: int
    empty: int
    sha256: str
    notes: tuple[str, ...] = ()


def read_rows(
    path: Path,
    tokenizer: ChatTokenizer,
    prompt_weight: float = 0.0,
    max_tokens: int | None = None,
    rendering: Rendering = PLAIN,
) -> RowFile:
    """Encode every record of a JSONL file; rows longer than `max_tokens` lose their end.

    Raises:
        InputError: a line is broken (file and line are named), or no row is left.
    """
    from jinja2 import TemplateError  # of a chat template; where there is none, ValueError

    rows: list[Row] = []
    notes = RowNotes(tokenizer, rendering)
    limit = None if max_tokens is None else max_tokens + 1  # one more says that a row is longer
    cut = empty = 0
    for number, record in numbered_records(path):
        try:
            row = encode_record(record, tokenizer, prompt_weight, rendering, limit)
            notes.add(record)
        except (ValueError, TemplateError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        if max_tokens is not None and len(row.tokens) > max_tokens:
            row = Row(row.tokens[:max_tokens], row.weights[:max_tokens])
            cut += 1
        if any(row.weights):
            rows.append(row)
        else:
            empty += 1
    if not rows:
        raise InputError(
            f"{path}: none of {empty} rows has a token to learn from"
            + (f", {cut} were cut to {max_tokens} tokens" if cut else "")
            + "; a chat row needs an assistant's turn, a text row two tokens"
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return RowFile(rows, cut, empty, digest, tuple(notes.lines()))
