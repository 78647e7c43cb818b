"""Answers of an arm, one JSON object a line, appended as they come: a killed run loses a batch.

The first line says which arm of which plan they are of, and a chain of digests shows what was
changed (answer_log.py). Each answer keeps the raw output and the
rule that found the letter in it, or the scores of the options.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.items import Item

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
Progress = Callable[..., None]


class AnswerFile:
    """Answers of one arm to a fixed list of items, in their order.

    header: what the answers are of; a file with another one is refused.
    """

    def __init__(self, path: Path, header: dict[str, Any], items: Sequence[Item]) -> None:
        self.path, self.items = path, items
        self._log = AnswerLog(path, header)

    def answers(self) -> list[Answer]:
        """Those written so far, whole lines only.

        Raises: InputError for answers of another arm or plan, to other items, or that were changed.
        """
        found = self._log.read(_answer)
        expected = [_about(item) for item in self.items[: len(found)]]
        if [(one.item_id, one.subject, one.gold, one.options) for one in found] != expected:
            raise self._log.other_items()
        return found

    def is_complete(self, count: int) -> bool:
        """Whether the first `count` items are answered."""
        return self.path.exists() and len(self.answers()) >= count

    def go_on(self, count: int, batch_size: int, answer: AnswerItems) -> list[Answer]:
        """Answer what is missing of the first `count` items, in the batches of a run that was never
        stopped; returns the answers to them.
        """
        found = self.answers()
        self._log.begin()
        while len(found) < count:
            # Batches lie where they always do: what a batch holds may move a last bit.
            start = len(found) // batch_size * batch_size
            new = answer(self.items[start : start + batch_size])[len(found) - start :]
            self._log.append(map(asdict, new))
            found += new
        return found[:count]

    def provenance(self, count: int) -> dict[str, Any]:
        """For a report that uses the first `count` answers, as they were last read or given."""
        return self._log.provenance(count)


def _answer(row: dict[str, Any]) -> Answer:
    """Raises: TypeError, KeyError or ValueError for what is no answer of ours."""
    found = Answer(**row | {"scores": tuple(row["scores"])})
    places = [] if type(found.options) is not int else range(found.options)
    if found.pick is not None and (type(found.pick) is not int or found.pick not in places):
        raise ValueError(f"item {str(found.item_id)[:40]!a}: pick is {str(found.pick)[:40]!a}")
    if not isinstance(found.rule, str) or not isinstance(found.text, str):
        raise ValueError(f"item {str(found.item_id)[:40]!a}: rule and text are texts")
    return found


def _about(item: Item) -> tuple[str, str, int, int]:
    return item.item_id, item.subject, item.answer_index, len(item.options)


def ask_missing(
    file: AnswerFile,
    count: int,
    batch_size: int,
    answer: AnswerItems,
    progress: Progress | None,
) -> list[Answer]:
    """The answers to the first `count` items of a file; only those that are missing are asked.

    progress: (done, count, name of the file), before each batch.
    Raises: InputError for a file of other answers.
    """
    done = len(file.answers())

    def told(items: Sequence[Item]) -> Sequence[Answer]:
        nonlocal done
        if progress:
            progress(done, count, file.path.stem)
        found = answer(items)
        done += len(found)
        return found

    return file.go_on(count, batch_size, told)


def in_form(answer: Answer) -> bool:
    """Whether it is in the form that was asked for: a box, or a likelihood without tie."""
    return answer.rule in ("boxed", LIKELIHOOD)
