"""Set G: the items that base and persona both get wrong, split within each subject; and items that
both get right, for the control.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.study.answers import Answer
from mlxstacks.study.items import TOTAL, Item, by_subject, shuffled, stratified_sample

# Wrong and right of (base, persona): fixed, only the persona is right; broken, only the base.
OUTCOMES = ("both wrong", "fixed", "broken", "both right")


@dataclass(frozen=True)
class Mined:
    """train and test: parts of Set G. right: the control's items. table: how many items got which
    outcome, "both wrong" and so on, by subject and in all.

    test is in a shuffled order, so that its beginning is a fair subset.
    """

    train: list[Item]
    test: list[Item]
    right: list[Item]
    table: dict[str, dict[str, int]]

    @property
    def repeated(self) -> list[str]:
        """Ids of test items whose question is among those to train on, in another subject."""
        taught = {_normalised_question(item) for item in self.train}
        return [item.item_id for item in self.test if _normalised_question(item) in taught]

    @property
    def notes(self) -> list[str]:
        """What of the split takes from a result."""
        if not self.repeated:
            return []
        words = (
            f"{len(self.repeated)} of {len(self.test)} test items ask a question that is trained "
            f"on under another subject: {', '.join(self.repeated[:8])}."
        )
        return [words]

    def as_json(self) -> dict[str, Any]:
        """The table, and which item went where, by ids."""
        parts = {"train": self.train, "test": self.test, "right": self.right}
        ids = {name: [item.item_id for item in items] for name, items in parts.items()}
        return {"table": self.table, **ids}


def mine(
    items: Sequence[Item],
    base: Sequence[Answer],
    persona: Sequence[Answer],
    *,
    train_share: float,
    right_items: int | None,
    seed: int,
) -> Mined:
    """Set G and the control out of both models' answers to the same items.

    Laws: train and test are disjoint and together all that both get wrong; each subject is split
    on its own, its train part rounded to the nearest item.

    Raises: InputError where a part is empty.
    """
    groups: dict[str, list[Item]] = {name: [] for name in OUTCOMES}
    subjects = sorted({item.subject for item in items})
    table = {name: dict.fromkeys(OUTCOMES, 0) for name in (*subjects, TOTAL)}
    for item, by_base, by_persona in zip(items, base, persona, strict=True):
        if not item.item_id == by_base.item_id == by_persona.item_id:
            raise ValueError(
                f"answers {by_base.item_id} and {by_persona.item_id} to item {item.item_id}"
            )
        outcome = OUTCOMES[2 * by_base.correct + by_persona.correct]
        groups[outcome].append(item)
        table[item.subject][outcome] += 1
        table[TOTAL][outcome] += 1
    train, test = split(groups["both wrong"], train_share, seed)
    if not train or not test:
        counts = ", ".join(f"{name} {len(group)}" for name, group in groups.items())
        raise InputError(
            f"nothing to test on: {len(train)} items to train and {len(test)} to test ({counts}); "
            "give more items, or harder ones"
        )
    count = min(right_items or len(test), len(groups["both right"]))
    right = stratified_sample(groups["both right"], count, seed) if count else []
    return Mined(train, test, shuffled(right, seed, "order"), table)


def split(items: Sequence[Item], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(train, test) at random within each subject, both in a shuffled order.

    A subject's train part is rounded to the nearest item, halves up; what that leaves of a subject
    may be nothing. Items of one subject that ask the same question go to one side, for else the
    test would be taught word for word: MMLU-Pro has some hundred. That may make a train part a few
    items smaller.
    """
    train: list[Item] = []
    test: list[Item] = []
    for group in by_subject(items).values():
        # 0.7 x 165 is 115.5, though not in floats.
        left = int(round(share * len(group), 6) + 0.5)
        same: dict[str, list[Item]] = {}
        for item in shuffled(group, seed, "split"):
            same.setdefault(_normalised_question(item), []).append(item)
        for twins in same.values():
            side = train if len(twins) <= left else test
            side += twins
            left -= len(twins) if side is train else 0
    return shuffled(train, seed, "order"), shuffled(test, seed, "order")


def _normalised_question(item: Item) -> str:
    return " ".join(item.question.casefold().split())
