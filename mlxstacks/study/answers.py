"""Answers of an arm, one JSON object a line, appended as they come: a killed run loses a batch.

The first line says which arm of which plan they are of, and a chain of digests shows what was
changed (answer_log.py). Each answer keeps the raw output and the rule that found the letter in it,
or the scores of the options.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mlxstacks.files.strict_json import STRICT, record_from
from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.items import Item

LIKELIHOOD, TIE = "likelihood", "tie"


@dataclass(frozen=True, slots=True)
class Answer:
    """pick: the chosen option, None where no rule found one or two options tie (both wrong).

    text: the raw output of a generation. scores: log-likelihood of each option.
    """

    __pydantic_config__ = STRICT

    item_id: str
    subject: str
    gold: int
    pick: int | None
    rule: str
    options: int
    text: str = ""
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.pick is not None and self.pick not in range(self.options):
            raise ValueError(f"pick is {self.pick}, of {self.options} options")

    @classmethod
    def of(
        cls, item: Item, pick: int | None, rule: str, text: str = "", scores: Sequence[float] = ()
    ) -> "Answer":
        """An answer to an item."""
        about = item.item_id, item.subject, item.answer_index
        return cls(*about, pick, rule, len(item.options), text, tuple(scores))

    @property
    def correct(self) -> bool:
        return self.pick == self.gold

    @property
    def in_form(self) -> bool:
        """Whether it is in the form that was asked for: a box, or a likelihood without tie."""
        return self.rule in ("boxed", LIKELIHOOD)


def read_answers(log: AnswerLog) -> list[Answer]:
    """Those written so far. Raises: as `AnswerLog.read`."""
    return log.read(_parse)


AnswerItems = Callable[[Sequence[Item]], Sequence[Answer]]
Progress = Callable[..., None]
_parse = partial(record_from, TypeAdapter(Answer))


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
        answers = read_answers(self._log)
        about = [(a.item_id, a.subject, a.gold, a.options) for a in answers]
        if about != [
            (item.item_id, item.subject, item.answer_index, len(item.options))
            for item in self.items[: len(answers)]
        ]:
            raise self._log.other_items()
        return answers

    def complete(
        self, count: int, batch_size: int, answer: AnswerItems, progress: Progress | None = None
    ) -> list[Answer]:
        """The answers to the first `count` items; only those that are missing are asked for, in the
        batches of a run that was never stopped.

        progress: (done, count, name of the file), before each batch. Raises: as `answers`.
        """
        answers = self.answers()
        self._log.begin()
        while len(answers) < count:
            if progress:
                progress(len(answers), count, self.path.stem)
            # Batches lie where they always do: what a batch holds may move a last bit.
            start = len(answers) // batch_size * batch_size
            new = answer(self.items[start : start + batch_size])[len(answers) - start :]
            self._log.append(map(asdict, new))
            answers += new
        return answers[:count]


def paired(
    answers: Mapping[str, Sequence[Answer]], arm: str, control: str
) -> list[tuple[Answer, Answer]]:
    """(answer of the arm, answer of its control) to each item, in order.

    Raises: ValueError for arms that answered different items: such pairs are no pairs.
    """
    of_arm, of_control = answers[arm], answers[control]
    if [answer.item_id for answer in of_arm] != [answer.item_id for answer in of_control]:
        raise ValueError(
            f"{arm} and {control} answered different items ({len(of_arm):,} and "
            f"{len(of_control):,} answers); only the same ones can be compared"
        )
    return list(zip(of_arm, of_control, strict=True))
