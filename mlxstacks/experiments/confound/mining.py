"""Set G: the items that base and persona both get wrong, split within each subject; and items that
both get right, for the control.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.experiments.confound.answers import Answer
from mlxstacks.experiments.confound.items import (
    Item,
    by_subject,
    shuffled,
    stratified_sample,
)


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

    def as_json(self) -> dict[str, Any]:
        """Ids, to be kept: which item went where."""
        parts = {"train": self.train, "test": self.test, "right": self.right}
        ids = {name: [item.item_id for item in items] for name, items in parts.items()}
        return {"table": self.table, **ids}


OUTCOMES = ("both wrong", "fixed", "broken", "both right")


def outcome(base: Answer, persona: Answer) -> str:
    """fixed: only the persona is right; broken: only the base."""
    return OUTCOMES[2 * base.correct + persona.correct]


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
    found: dict[str, list[Item]] = {name: [] for name in OUTCOMES}
    table: dict[str, dict[str, int]] = {}
    for item, one, two in zip(items, base, persona, strict=True):
        if not item.item_id == one.item_id == two.item_id:
            raise ValueError(f"answers {one.item_id} and {two.item_id} to item {item.item_id}")
        kind = outcome(one, two)
        found[kind].append(item)
        for name in (item.subject, "all"):
            row = table.setdefault(name, dict.fromkeys(OUTCOMES, 0))
            row[kind] += 1
    train, test = split(found["both wrong"], train_share, seed)
    if not train or not test:
        counts = ", ".join(f"{name} {len(group)}" for name, group in found.items())
        raise InputError(
            f"nothing to test on: {len(train)} items to train and {len(test)} to test ({counts}); "
            "give more items, or harder ones"
        )
    wanted = min(right_items or len(test), len(found["both right"]))
    right = stratified_sample(found["both right"], wanted, seed) if wanted else []
    ordered = {name: table[name] for name in sorted(set(table) - {"all"})} | {"all": table["all"]}
    return Mined(train, test, shuffled(right, seed, "order"), ordered)


def split(items: Sequence[Item], share: float, seed: int) -> tuple[list[Item], list[Item]]:
    """(train, test) at random within each subject, both in a shuffled order.

    A subject's train part is rounded to the nearest item, halves up; what that leaves of a subject
    may be nothing.
    """
    train: list[Item] = []
    test: list[Item] = []
    for group in by_subject(items).values():
        drawn = shuffled(group, seed, "split")
        count = int(share * len(drawn) + 0.5)
        train += drawn[:count]
        test += drawn[count:]
    return shuffled(train, seed, "order"), shuffled(test, seed, "order")
