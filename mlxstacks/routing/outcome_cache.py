"""Raw losses by content, kept on disk as they are made: what a killed run goes on with.

A line is `{"losses": [[pair, config, loss], ...]}`, the losses of one batch. It is appended in one
write and counts as a whole or not at all, so a resumed run makes the very batches that are missing,
and ends with the same bits. A key says all that a loss depends on:

    pair      base, the numbers it computes with, token ids and which of them count
    config    the stacks that are on, by the hashes of their files, with their weights

Threshold, soft domains and search are no part of it: they choose among losses. Nor is the list of
the store's domains, so what is known stays known when a domain is added.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlxstacks.data import Row
from mlxstacks.files.disk import target_errors, write_all
from mlxstacks.files.strict_json import json_sha256

DIGITS = 24
BASE_CONFIG = "base"
Record = tuple[str, str, float]


def pair_key(context: str, row: Row) -> str:
    """context: names base and numbers. row: a pair as tokens, with its loss weights."""
    digest = hashlib.sha256(f"{context}\n{row.tokens}\n{row.weights}".encode())
    return digest.hexdigest()[:DIGITS]


def config_key(weights: Mapping[str, float], stacks: Mapping[str, Sequence[str]]) -> str:
    """weights: domain -> weight of those that are on. stacks: domain -> hashes of its stacks."""
    on = sorted([list(stacks[domain]), weight] for domain, weight in weights.items() if weight)
    return json_sha256(on)[:DIGITS] if on else BASE_CONFIG


class LossCache:
    """Losses in memory, and in a file that only grows.

    path: written; None keeps nothing. known: files of earlier runs, only read.
    A line that is no such line (the torn last one of a killed run, a damaged disk) is left out, and
    its losses are made again. notes: how many there were.
    """

    def __init__(self, path: Path | None = None, known: Iterable[Path] = ()) -> None:
        self._path = path
        self._losses: dict[tuple[str, str], float] = {}
        self.notes: list[str] = []
        for file in known:
            self._read(file)
        if path is not None:
            end = self._read(path)
            with target_errors(path):
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                # what a killed run left of a line would spoil the next one
                os.ftruncate(self._file, end)
                self._end = end

    def get(self, pair: str, config: str) -> float | None:
        """The loss, or None where it is not known."""
        return self._losses.get((pair, config))

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, records: Sequence[Record]) -> None:
        """Keep the losses of a batch, in memory and on disk. Raises: TargetError: a full disk."""
        self._losses |= {(pair, config): loss for pair, config, loss in records}
        if self._path is None:
            return
        data = _line(records)
        with target_errors(self._path, len(data)):
            write_all(self._file, memoryview(data), self._end)
        self._end += len(data)

    def write(self, path: Path) -> None:
        """Every loss in a new file, a line a pair, sorted: equal losses give equal bytes."""
        by_pair: dict[str, list[Record]] = {}
        for (pair, config), loss in sorted(self._losses.items()):
            by_pair.setdefault(pair, []).append((pair, config, loss))
        path.write_bytes(b"".join(_line(records) for records in by_pair.values()))

    def close(self) -> None:
        if self._path is not None:
            os.close(self._file)
            self._path = None

    def _read(self, path: Path) -> int:
        """Take in a file; returns where its last whole line ends."""
        if not path.is_file():
            return 0
        end = wrong = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                records = _records(line)
                wrong += records is None
                self._losses |= {(pair, config): loss for pair, config, loss in records or ()}
        if wrong:
            self.notes.append(
                f"{path.name}: {wrong} lines cannot be read; their losses are made again."
            )
        return end


def _line(records: Sequence[Record]) -> bytes:
    text = json.dumps({"losses": [list(r) for r in records]}, separators=(",", ":"))
    return f"{text}\n".encode()


def _records(line: bytes) -> list[Record] | None:
    """The records of a line; None where it is none of ours."""
    try:
        found = json.loads(line)["losses"]
        records = [(pair, config, loss) for pair, config, loss in found]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    right = all(
        isinstance(p, str) and isinstance(c, str) and isinstance(x, float) and math.isfinite(x)
        for p, c, x in records
    )
    return records if right else None
