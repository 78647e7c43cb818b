"""Answers of an arm to multiple-choice items: each keeps the raw output and the rule that found the
letter in it, or the scores of the options.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mlxstacks.files.strict_json import STRICT, record_from
from mlxstacks.study.answer_log import AnswerLog, AnswersToItems
from mlxstacks.study.items import Item

LIKELIHOOD, TIE = "likelihood", "tie"


@dataclass(frozen=True, slots=True)
class Answer:
    """pick: the chosen option, None where no rule found one or two options tie (both wrong).

    text: the raw output of a generation. scores: of each option its log p in nats, or the mean over
    its tokens or characters where that decides.
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


_parse = partial(record_from, TypeAdapter(Answer))


def _is_of(answer: Answer, item: Item) -> bool:
    about = item.item_id, item.subject, item.answer_index, len(item.options)
    return (answer.item_id, answer.subject, answer.gold, answer.options) == about


class AnswerFile(AnswersToItems[Item, Answer]):
    """Answers of one arm to multiple-choice items."""

    def __init__(self, path: Path, header: dict[str, Any], items: Sequence[Item]) -> None:
        super().__init__(path, header, items, _parse, _is_of)


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
