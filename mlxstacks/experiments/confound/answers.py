"""Answers of an arm, one JSON object a line, appended as they come: a killed run loses a batch.

The first line says which arm of which plan they are of. Each answer keeps the raw output and the
rule that found the letter in it, or the scores of the options.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.experiments.confound.items import Item
from mlxstacks.files.disk import target_errors

LIKELIHOOD, TIE = "likelihood", "tie"


@dataclass(frozen=True, slots=True)
class Answer:
    """pick: the chosen option, None where no rule found one or two options tie (both wrong).

    text: the raw output of a generation. scores: log-likelihood of each option, normalised.
    """

    item_id: str
    subject: str
    gold: int
    pick: int | None
    rule: str
    options: int
    text: str = ""
    scores: tuple[float, ...] = ()

    @property
    def correct(self) -> bool:
        return self.pick == self.gold


AnswerItems = Callable[[Sequence[Item]], Sequence[Answer]]


class AnswerFile:
    """Answers of one arm to a fixed list of items, in their order.

    header: what the answers are of; a file with another one is refused.
    """

    def __init__(self, path: Path, header: dict[str, Any], items: Sequence[Item]) -> None:
        self.path, self.header, self.items = path, header, items

    def answers(self) -> list[Answer]:
        """Those written so far, whole lines only.

        Raises: InputError for answers of another arm or plan, or to other items.
        """
        return self._read()[0]

    def is_complete(self, count: int) -> bool:
        """Whether the first `count` items are answered."""
        return self.path.exists() and len(self.answers()) >= count

    def go_on(self, count: int, batch_size: int, answer: AnswerItems) -> list[Answer]:
        """Answer what is missing of the first `count` items, in the batches of a run that was never
        stopped; returns the answers to them.
        """
        found, end = self._read()
        with target_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if end == 0:
                self.path.write_bytes(_line(self.header))
            else:
                os.truncate(self.path, end)  # half a line of a run that was killed
            while len(found) < count:
                # Batches lie where they always do: what a batch holds may move a last bit.
                start = len(found) // batch_size * batch_size
                new = answer(self.items[start : start + batch_size])[len(found) - start :]
                with self.path.open("ab") as file:
                    file.write(b"".join(_line(asdict(one)) for one in new))
                    file.flush()
                    os.fsync(file.fileno())
                found += new
        return found[:count]

    def _read(self) -> tuple[list[Answer], int]:
        """The answers, and the byte behind the last whole line."""
        if not self.path.exists():
            return [], 0
        lines = self.path.read_bytes().split(b"\n")[:-1]
        if not lines:
            return [], 0
        try:
            header, *rows = [json.loads(line) for line in lines]
            found = [_answer(row) for row in rows]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{self.path}: damaged ({error}); remove it to answer again") from None
        if header != self.header:
            raise InputError(
                f"{self.path}: answers of another plan or arm; remove it to answer again"
            )
        expected = [_about(item) for item in self.items[: len(found)]]
        if [(one.item_id, one.subject, one.gold, one.options) for one in found] != expected:
            raise InputError(f"{self.path}: answers to other items; remove it to answer again")
        return found, sum(len(line) + 1 for line in lines)


def _answer(row: dict[str, Any]) -> Answer:
    """Raises: TypeError, KeyError or ValueError for what `_line` has not written."""
    found = Answer(**row | {"scores": tuple(row["scores"])})
    places = [] if type(found.options) is not int else range(found.options)
    if found.pick is not None and (type(found.pick) is not int or found.pick not in places):
        raise ValueError(f"item {str(found.item_id)[:40]!a}: pick is {str(found.pick)[:40]!a}")
    if not isinstance(found.rule, str) or not isinstance(found.text, str):
        raise ValueError(f"item {str(found.item_id)[:40]!a}: rule and text are texts")
    return found


def _about(item: Item) -> tuple[str, str, int, int]:
    return item.item_id, item.subject, item.answer_index, len(item.options)


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
