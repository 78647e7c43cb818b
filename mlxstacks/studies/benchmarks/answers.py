"""Answers of an arm to a task, one JSON object a line, appended as they come: a killed run loses a
batch.

The first line says which arm, task and plan they are of, and a chain of digests shows what was
changed (answer_log.py). An answer keeps everything the arm gave:
log-likelihoods and lengths, or the raw text. Grading reads these files and needs no model.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied, Scored
from mlxstacks.study.answer_log import AnswerLog, chained

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
        header = {"plan_sha256": plan_sha256, "task": task, "arm": arm, "of": of}
        self._log = AnswerLog(path, header)

    def answers(self) -> list[Given]:
        """Those written so far, whole lines only.

        Raises: InputError for answers of another arm or plan, to other items, or that were changed.
        """
        found = self._log.read(partial(_given, of=self.of))
        ids = [item.item_id for item in self.items[: len(found)]]
        if [one.item_id for one in found] != ids:
            raise self._log.other_items()
        return found

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
        done = len(self.answers())
        self._log.begin()
        while done < len(self.items):
            # Batches lie where they always do: what a batch holds may move a last bit.
            start = done // batch_size * batch_size
            batch = self.items[start : start + batch_size]
            new = _timed(batch, answer)[done - start :]
            self._log.append(map(asdict, new))
            done += len(new)
            tick(len(new))

    def provenance(self, found: Sequence[Given]) -> dict[str, Any]:
        """For a report that uses all answers, `found` by `answers`.

        digest_without_seconds: what the digest would be with no wall times in the file; the same in
        another run.
        """
        rows = [{k: v for k, v in asdict(one).items() if k != "seconds"} for one in found]
        *_, (_, plain) = chained([self._log.header, *rows])
        return {**self._log.provenance(len(found)), "digest_without_seconds": plain}


def _timed(batch: Sequence[BenchItem], answer: AnswerItems) -> list[Given]:
    started = time.monotonic()
    answers = answer(batch)
    if len(answers) != len(batch):
        raise ValueError(f"{len(answers)} answers to {len(batch)} items")
    seconds = round((time.monotonic() - started) / len(batch), 6)
    given: list[Given] = []
    for item, one in zip(batch, answers, strict=True):
        assert isinstance(one, Scored | Replied)
        given.append(Given(item.item_id, one, seconds))
    return given


def _given(row: dict[str, Any], of: Of) -> Given:
    answer = dict(row["answer"])
    if of == "replies":
        return Given(row["item_id"], Replied(**answer), row["seconds"])
    lists = {key: tuple(answer[key]) for key in ("sums", "tokens", "characters")}
    return Given(row["item_id"], Scored(**answer | lists), row["seconds"])
