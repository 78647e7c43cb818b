"""Set G: the items that base and persona both get wrong, split within each subject; and items that
both get right, for the control.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks import base_model
from mlxstacks.data import Rendering, encode_messages
from mlxstacks.errors import InputError
from mlxstacks.studies.confound.prompts import training_rows
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.study.answers import Answer
from mlxstacks.study.items import (
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

    @property
    def repeated(self) -> list[str]:
        """Ids of test items whose question is among those to train on, in another subject."""
        taught = {_words(item) for item in self.train}
        return [item.item_id for item in self.test if _words(item) in taught]

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
            same.setdefault(_words(item), []).append(item)
        for asked in same.values():
            side = train if len(asked) <= left else test
            side += asked
            left -= len(asked) if side is train else 0
    return shuffled(train, seed, "order"), shuffled(test, seed, "order")


def _words(item: Item) -> str:
    """The question, whatever its spaces and capitals."""
    return " ".join(item.question.casefold().split())


# --- lengths of the training rows -----------------------------------------------------------------
# The answer stands at the end of a row, and a row that is too long loses its end: a few tokens too
# many and there is nothing left to learn. That is known from the items alone, before any mining.


@dataclass(frozen=True)
class RowLength:
    """In tokens: of the whole row, and up to its answer."""

    tokens: int
    before_answer: int


def row_lengths(
    items: Sequence[Item], settings: ConfoundSettings, model: Path
) -> dict[str, RowLength]:
    """Of the row that would teach each item, by its id.

    Raises: InputError where of more than half of them no answer would be left.
    """
    _, tokenizer, _ = base_model.load(model, lazy=True)
    rows = training_rows(items, settings.scoring, settings.train_answers, settings.seed)
    found = {}
    for item, row in zip(items, rows, strict=True):
        encoded = encode_messages(row["messages"], tokenizer, rendering=Rendering.of(settings))
        before = next((n for n, weight in enumerate(encoded.weights) if weight), 0)
        found[item.item_id] = RowLength(len(encoded.tokens), before)
    most = settings.train.max_seq_length
    late = sum(one.before_answer >= most for one in found.values())
    if 2 * late > len(found):
        shortest = min(one.tokens for one in found.values())
        longest = max(one.tokens for one in found.values())
        raise InputError(
            f"train.max_seq_length is {most}, and in {late:,} of {len(found):,} items the answer "
            f"comes later: nothing of them would be learned. With scoring {settings.scoring} their "
            f"rows have {shortest:,} to {longest:,} tokens: give --set "
            f"train.max_seq_length={longest}"
        )
    return found


def length_notes(
    train: Sequence[Item], lengths: dict[str, RowLength], settings: ConfoundSettings
) -> list[str]:
    """What of the training rows is lost by `train.max_seq_length`; nothing where all fit."""
    most = settings.train.max_seq_length
    own = [lengths[item.item_id] for item in train]
    long = sum(one.tokens > most for one in own)
    empty = sum(one.before_answer >= most for one in own)
    if not long:
        return []
    words = (
        f"{long} of {len(own)} rows to train on are longer than train.max_seq_length ({most}) and "
        f"lost their end; {empty} of them have no answer left and taught nothing."
    )
    return [words]
