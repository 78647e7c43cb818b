"""Answers of an arm to a task, one JSON object a line, appended as they come: a killed run loses a
batch.

The first line says which arm, task and plan they are of. An answer keeps everything the arm gave:
log-likelihoods and lengths, or the raw text. Grading reads these files and needs no model.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlxstacks.errors import InputError
from mlxstacks.experiments.benchmarks.types import BenchItem, Replied, Scored
from mlxstacks.files.disk import target_errors

Of = Literal["texts", "letters", "replies", "reference"]
"""What the arm was asked: candidates as texts, as letters, without their first token; a reply."""


@dataclass(frozen=True, slots=True)
class Given:
    """The answer to one item. seconds: its share of its batch's wall time."""

    item_id: str
    answer: Scored | Replied
    seconds: float


AnswerItems = Callable[[Sequence[BenchItem]], Sequence[Scored] | Sequence[Replied]]


class AnswerFile:
    """Answers of one arm to a fixed list of items, in their order.

    Law: killed anywhere and gone on with, it holds what it would have held.
    """

    def __init__(
        self, path: Path, plan_sha256: str, task: str, arm: str, of: Of, items: Sequence[BenchItem]
    ) -> None:
        self.path, self.items, self.of = path, items, of
        self.header = {"plan_sha256": plan_sha256, "task": task, "arm": arm, "of": of}

    def answers(self) -> list[Given]:
        """Those written so far, whole lines only.

        Raises: InputError for answers of another arm or plan, or to other items.
        """
        return self._read()[0]

    @property
    def missing(self) -> int:
        """How many items have no answer yet."""
        return len(self.items) - len(self.answers())

    def go_on(
        self, batch_size: int, answer: AnswerItems, tick: Callable[[int], None] = lambda _: None
    ) -> None:
        """Answer what is missing, in the batches of a run that was never stopped.

        tick: is told how many more items have answers.
        Raises: ValueError for an arm that gives more or fewer answers than there are items.
        """
        found, end = self._read()
        with target_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if end == 0:
                self.path.write_bytes(_line(self.header))
            else:
                os.truncate(self.path, end)  # half a line of a run that was killed
        done = len(found)
        while done < len(self.items):
            # Batches lie where they always do: what a batch holds may move a last bit.
            start = done // batch_size * batch_size
            batch = self.items[start : start + batch_size]
            new = _timed(batch, answer)[done - start :]
            self._append(new)
            done += len(new)
            tick(len(new))

    def _append(self, new: Sequence[Given]) -> None:
        with target_errors(self.path), self.path.open("ab") as file:
            file.write(b"".join(_line(asdict(one)) for one in new))
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> tuple[list[Given], int]:
        """The answers, and the byte behind the last whole line."""
        if not self.path.exists():
            return [], 0
        lines = self.path.read_bytes().split(b"\n")[:-1]
        if not lines:
            return [], 0
        try:
            header, *rows = [json.loads(line) for line in lines]
            found = [_given(row, self.of) for row in rows]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{self.path}: damaged ({error}); remove it to answer again") from None
        if header != self.header:
            raise InputError(
                f"{self.path}: answers of another plan or arm; remove it to answer again"
            )
        if [one.item_id for one in found] != [i.item_id for i in self.items[: len(found)]] or (
            len(found) > len(self.items)
        ):
            raise InputError(f"{self.path}: answers to other items; remove it to answer again")
        return found, sum(len(line) + 1 for line in lines)


def _timed(batch: Sequence[BenchItem], answer: AnswerItems) -> list[Given]:
    started = time.monotonic()
    answers = answer(batch)
    if len(answers) != len(batch):
        raise ValueError(f"{len(answers)} answers to {len(batch)} items")
    seconds = round((time.monotonic() - started) / len(batch), 6)
    found: list[Given] = []
    for item, one in zip(batch, answers, strict=True):
        assert isinstance(one, Scored | Replied)
        found.append(Given(item.item_id, one, seconds))
    return found


def _given(row: dict[str, Any], of: Of) -> Given:
    answer = dict(row["answer"])
    if of == "replies":
        return Given(row["item_id"], Replied(**answer), row["seconds"])
    lists = {key: tuple(answer[key]) for key in ("sums", "tokens", "characters")}
    return Given(row["item_id"], Scored(**answer | lists), row["seconds"])


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
