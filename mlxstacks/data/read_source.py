"""One source, read: rows in their format, cleaned; without repeats, drawn down to the cap."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from mlxstacks.data.cleaning import cut_answer, holds_code, reason_to_drop, strip_record
from mlxstacks.data.detect import row_reader
from mlxstacks.data.examples import Example, make_example
from mlxstacks.data.formats import FORMATS, Reading
from mlxstacks.data.settings import DomainDataSettings, SourceSettings
from mlxstacks.data.sources import open_source
from mlxstacks.errors import InputError


class SourceRows:
    """The usable rows of a source, in its order and with repeats; iterated once.

    Under a cap only the first 2 x cap rows are read.

    Raises:
        InputError: the source is not there; while iterating, a row that does not fit (file and line
            are named), and at the end, if no row is usable.
    """

    def __init__(
        self,
        source: SourceSettings,
        settings: DomainDataSettings,
        root: Path,
        special_tokens: Collection[str] = (),
    ) -> None:
        self.source, self.settings, self.special_tokens = source, settings, special_tokens
        self._opened = open_source(source, root)
        self._read = 0
        self._dropped: Counter[str] = Counter()
        self._changed: Counter[str] = Counter()
        self._formats: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Example]:
        read = row_reader(self.source.format, first_pair_only=self.settings.template == "alpaca")
        most = None if self.source.cap is None else 2 * self.source.cap
        for where, raw in islice(self._opened.rows, most):
            self._read += 1
            try:
                example = self._usable(where, *read(raw))
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            if example:
                yield example
        if self._read == self._dropped.total():
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._dropped.items())
            raise InputError(
                f"{self.source.label}: none of {self._read} rows is usable: {reasons}; check "
                "format, filter and minimum_characters"
            )

    def _usable(self, where: str, name: str, reading: Reading) -> Example | None:
        """The cleaned row, or None where it is dropped; both are counted."""
        self._formats[name] += 1
        record, changes = reading.record, [*reading.changes]
        if self.settings.strip_markers:
            stripped = strip_record(record, self.special_tokens)
            changes += ["markers_removed"] * (stripped != record)
            record = stripped
        reason = reason_to_drop(record, FORMATS[name], self.settings)
        if reason is None and self.source.filter == "code" and not holds_code(record):
            reason = "not_code"
        if reason is not None:
            self._dropped[reason] += 1
            return None
        record, was_cut = cut_answer(record, self.settings.answer_characters)
        self._changed.update([*changes, *["answer_cut"] * was_cut])
        return make_example(record, self.source.label, reading.passage, where)

    def report(self, repeated: int, kept: int) -> dict[str, Any]:
        """Plain JSON. repeated: rows with the content of another. kept: rows that are used."""
        dropped = dict(sorted(self._dropped.items()))
        return {
            "source": self.source.label,
            "split": self.source.split,
            "formats": dict(sorted(self._formats.items())),
            "rows_read": self._read,
            "dropped": dropped,
            "changed": dict(sorted(self._changed.items())),
            "duplicates": repeated,
            "not_drawn": self._read - sum(dropped.values()) - repeated - kept,
            "rows_kept": kept,
            "sha256": self._opened.sha256(),
        }


def read_source(
    source: SourceSettings,
    settings: DomainDataSettings,
    root: Path,
    special_tokens: Collection[str] = (),
) -> tuple[dict[str, Example], dict[str, Any]]:
    """Examples by row id, and the source's part of the report.

    Of what is usable among the rows that a cap lets read, `cap` are drawn by a hash of seed and
    row id.
    Law: the same rows in another order give the same examples, if no cap leaves rows unread.

    Raises:
        InputError: as `SourceRows`.
    """
    rows = SourceRows(source, settings, root, special_tokens)
    examples: dict[str, Example] = {}
    repeated = 0
    for example in rows:
        repeated += example.row_id in examples
        keep_one(examples, example)
    drawn = _draw(examples, source.cap, settings.seed if source.seed is None else source.seed)
    return drawn, rows.report(repeated, len(drawn))


def read_in_order(
    source: SourceSettings,
    settings: DomainDataSettings,
    root: Path,
    special_tokens: Collection[str] = (),
) -> tuple[list[Example], dict[str, Any]]:
    """As `read_source`, in the order of the source and with its repeats, where no cap draws."""
    if source.cap is not None:
        drawn, report = read_source(source, settings, root, special_tokens)
        return list(drawn.values()), report
    rows = SourceRows(source, settings, root, special_tokens)
    examples = list(rows)
    return examples, rows.report(0, len(examples))


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
