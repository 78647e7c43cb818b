"""One source, read: rows in their format, cleaned, without repeats, drawn down to the cap."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from mlxstacks.data.cleaning import cut_answer, holds_code, reason_to_drop, strip_record
from mlxstacks.data.detect import row_reader
from mlxstacks.data.examples import Example, make_example
from mlxstacks.data.formats import FORMATS
from mlxstacks.data.settings import DomainDataSettings, SourceSettings
from mlxstacks.data.sources import open_source
from mlxstacks.errors import InputError


@dataclass(slots=True)
class _Counts:
    read: int = 0
    cut_answers: int = 0
    duplicates: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)


def read_source(
    source: SourceSettings,
    settings: DomainDataSettings,
    root: Path,
    special_tokens: Collection[str] = (),
) -> tuple[dict[str, Example], dict[str, Any]]:
    """Examples by row id, and the source's part of the report.

    Under a cap only the first 2 x cap rows are read; of what is usable among them, `cap` are drawn
    by a hash of seed and row id.
    Law: the same rows in another order give the same examples, if no cap leaves rows unread.

    Raises:
        InputError: the source is not there, a row does not fit (file and line are named), or no
            row is usable.
    """
    opened = open_source(source, root)
    counts = _Counts()
    found = _usable(source, settings, opened.rows, counts, special_tokens)
    if not found:
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.dropped.items())
        raise InputError(
            f"{source.label}: none of {counts.read} rows is usable: {reasons}; check format, "
            "filter and minimum_characters"
        )
    drawn = _draw(found, source.cap, settings.seed if source.seed is None else source.seed)
    report = {
        "source": source.label,
        "split": source.split,
        "formats": dict(sorted(counts.formats.items())),
        "rows_read": counts.read,
        "dropped": dict(sorted(counts.dropped.items())),
        "duplicates": counts.duplicates,
        "not_drawn": len(found) - len(drawn),
        "answers_cut": counts.cut_answers,
        "rows_kept": len(drawn),
        "sha256": opened.sha256(),
    }
    return drawn, report


def _usable(
    source: SourceSettings,
    settings: DomainDataSettings,
    rows: Any,
    counts: _Counts,
    special_tokens: Collection[str],
) -> dict[str, Example]:
    read = row_reader(source.format, first_pair_only=settings.template == "alpaca")
    found: dict[str, Example] = {}
    for where, raw in islice(rows, None if source.cap is None else 2 * source.cap):
        counts.read += 1
        try:
            name, record = read(raw)
            if settings.strip_markers:
                record = strip_record(record, special_tokens)
            reason = reason_to_drop(record, FORMATS[name], settings)
            if reason is None and source.filter == "code" and not holds_code(record):
                reason = "not_code"
            if reason is None:
                record, was_cut = cut_answer(record, settings.answer_characters)
                example = make_example(record, source.label)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        counts.formats[name] += 1
        if reason is not None:
            counts.dropped[reason] += 1
            continue
        counts.cut_answers += was_cut
        counts.duplicates += example.row_id in found
        keep_one(found, example)
    return found


def keep_one(found: dict[str, Example], example: Example) -> None:
    """Add an example; of two with one id the same stays, whichever comes first."""
    other = found.get(example.row_id)
    if other is None or _order(example) < _order(other):
        found[example.row_id] = example


def _order(example: Example) -> tuple[str, str]:
    return json.dumps(example.record, sort_keys=True, default=str), example.source


def _draw(found: dict[str, Example], cap: int | None, seed: int) -> dict[str, Example]:
    if cap is None or len(found) <= cap:
        return found
    chosen = sorted(found, key=lambda row_id: keyed_hash(seed, "draw", row_id))[:cap]
    return {row_id: found[row_id] for row_id in chosen}


def keyed_hash(seed: int, purpose: str, text: str) -> int:
    """64 bits that look random, the same for the same arguments on every machine."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
