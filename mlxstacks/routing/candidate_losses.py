"""Losses of (pair, weights) candidates, in batches across prompts and across weights.

Candidates of equal weights share batches first: stacks that are off cost nothing there. What is
left over of each, less than a batch, is put together in mixed batches, where every sequence has its
own weights. Batches are of like length and of at most `batch_tokens` tokens.

Which candidates share a batch depends on what is asked for alone, never on what the cache knows:
a killed run that is started again makes the same batches, so the same bits on the same machine and
BLAS: another adds up products in another order.

They are kept on disk as they are made: what a killed run goes on with. A line is
`{"losses": [[pair, config, loss], ...]}`, the losses of one batch. It is appended in one write and
counts as a whole or not at all, so a resumed run makes the very batches that are missing, and ends
with the same bits. A key says all that a loss depends on:

    pair      base, the numbers it computes with, token ids and which of them count
    config    the stacks that are on, by the hashes of their files, with their weights

Threshold, soft domains and search are no part of it: they choose among losses. Nor is the list of
the store's domains, so what is known stays known when a domain is added.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import memory
from mlxstacks.data import Row, make_batch
from mlxstacks.errors import InputError
from mlxstacks.evaluate import evaluate_row_losses
from mlxstacks.files.disk import target_errors, write_all
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.layers.selection import base, routed
from mlxstacks.layers.stacked import set_mode
from mlxstacks.training.modes import evaluating

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
        records = [(pair, config, loss) for pair, config, loss in json.loads(line)["losses"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    right = all(
        isinstance(p, str) and isinstance(c, str) and isinstance(x, float) and math.isfinite(x)
        for p, c, x in records
    )
    return records if right else None


# --- batches --------------------------------------------------------------------------------------

# Tokens of a batch. A CPU is busy with so few, and its caches prefer fewer; a GPU wants more.
CPU_TOKENS, GPU_TOKENS = 2048, 8192
# What a token takes in a forward pass: some 60 arrays of the model's width in float32 at once
# (projections of a layer, of all chosen experts, their gates), and the share of memory for all.
ARRAYS_OF_WIDTH, SHARE_OF_MEMORY = 60, 8
LEAST_TOKENS = 512

# Domain -> weight, only those that count; equal ones as equal tuples, in the order of the store.
Weights = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """pair: its number. weights: () for the base."""

    pair: int
    weights: Weights


def candidate(pair: int, weights: Mapping[str, float]) -> Candidate:
    return Candidate(pair, tuple((domain, weight) for domain, weight in weights.items() if weight))


def choose_batch_tokens(width: int) -> int:
    """Tokens of a batch for a model of this hidden width, on this device."""
    device = memory.device()
    most = CPU_TOKENS if device.kind == "cpu" else GPU_TOKENS
    if device.memory_bytes is None:
        return most
    fits = device.memory_bytes // SHARE_OF_MEMORY // (4 * ARRAYS_OF_WIDTH * max(width, 1))
    return max(LEAST_TOKENS, min(most, fits))


def plan_batches(
    candidates: Sequence[Candidate], lengths: Sequence[int], batch_tokens: int
) -> list[list[int]]:
    """Positions in `candidates`, batch by batch, each once.

    lengths: tokens of each pair. A batch holds rows x longest row <= batch_tokens tokens, or one
    row. Batches of one set of weights follow each other.
    """
    groups: dict[Weights, list[int]] = {}
    for position, c in enumerate(candidates):
        groups.setdefault(c.weights, []).append(position)
    batches: list[list[int]] = []
    rest: list[int] = []
    for group in groups.values():
        *full, last = _cut(group, candidates, lengths, batch_tokens)
        batches += full
        rest += last
    if rest:
        batches += _cut(rest, candidates, lengths, batch_tokens)
    return batches


def _cut(
    positions: Iterable[int],
    candidates: Sequence[Candidate],
    lengths: Sequence[int],
    batch_tokens: int,
) -> list[list[int]]:
    """Rising by length, cut where the next row would be too much."""
    batches: list[list[int]] = [[]]
    for position in sorted(positions, key=lambda p: (lengths[candidates[p].pair], p)):
        length = lengths[candidates[position].pair]
        if batches[-1] and (len(batches[-1]) + 1) * length > batch_tokens:
            batches.append([])
        batches[-1].append(position)
    return batches


class CandidateLosses:
    """Losses of candidates on a model that has the stacks, from the cache where it knows them.

    rows: the pairs as tokens; every row has an answer token. stacks: domain -> hashes of its
    stacks. context: names base and numbers. dtype: as in `set_mode`. on_batch: called with the
    number of losses made, after each batch.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[Row],
        stacks: Mapping[str, Sequence[str]],
        context: str,
        cache: LossCache,
        *,
        batch_tokens: int,
        dtype: mx.Dtype | None = None,
        head: OutputHead | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        self._model, self._rows, self._stacks, self._cache = model, rows, stacks, cache
        self.batch_tokens, self._dtype, self._head = batch_tokens, dtype, head
        self._on_batch = on_batch
        self._keys = [pair_key(context, row) for row in rows]
        self._lengths = [len(row.tokens) for row in rows]
        self._config_keys: dict[Weights, str] = {}
        self._mode: Weights | None = None
        self.made = self.recalled = self.tokens = 0

    def __call__(self, candidates: Sequence[Candidate]) -> list[float]:
        """Loss of each: mean cross-entropy of the answer's tokens, in nats.

        The model is left in the mode `base`.
        Raises: InputError naming the domains at which a loss is NaN or Inf.
        """
        losses = [self._cache.get(self._keys[c.pair], self._config(c.weights)) for c in candidates]
        self.recalled += sum(loss is not None for loss in losses)
        self._mode = None  # others may have set one since
        try:
            with evaluating(self._model):
                for batch in plan_batches(candidates, self._lengths, self.batch_tokens):
                    missing = [position for position in batch if losses[position] is None]
                    if not missing:
                        continue
                    measured = self._measure([candidates[position] for position in missing])
                    for position, loss in zip(missing, measured, strict=True):
                        losses[position] = loss
                    if self._on_batch:
                        self._on_batch(len(missing))
        finally:
            # weights of so many sequences fit no other batch
            set_mode(self._model, base())
        return [loss for loss in losses if loss is not None]

    def _config(self, weights: Weights) -> str:
        if weights not in self._config_keys:
            self._config_keys[weights] = config_key(dict(weights), self._stacks)
        return self._config_keys[weights]

    def _measure(self, batch: Sequence[Candidate]) -> list[float]:
        self._set_weights(batch)
        rows = make_batch([self._rows[c.pair] for c in batch])
        losses: list[float] = evaluate_row_losses(self._model, rows, self._head).tolist()
        records = []
        for c, loss in zip(batch, losses, strict=True):
            if not math.isfinite(loss):
                on = " + ".join(domain for domain, _ in c.weights) or "no stacks"
                raise InputError(
                    f"the loss with {on} is {loss}: look at the stacks with `mlxstacks stacks "
                    "verify`, or try base: float32 (half floats overflow)"
                )
            records.append((self._keys[c.pair], self._config(c.weights), loss))
        self._cache.add(records)
        self.made += len(batch)
        self.tokens += rows.inputs.size
        return losses

    def _set_weights(self, batch: Sequence[Candidate]) -> None:
        """The model's mode for a batch: equal weights as (D,), others as (B, D)."""
        rows = list(dict.fromkeys(c.weights for c in batch))
        if len(rows) == 1 and rows[0] == self._mode:
            return
        self._mode = rows[0] if len(rows) == 1 else None
        if len(rows) > 1:
            rows = [c.weights for c in batch]
        names = list(dict.fromkeys(domain for weights in rows for domain, _ in weights))
        if not names:
            set_mode(self._model, base(), self._dtype)
            return
        table = np.array([[dict(row).get(name, 0.0) for name in names] for row in rows], np.float32)
        set_mode(self._model, routed(names, table[0] if len(rows) == 1 else table), self._dtype)
