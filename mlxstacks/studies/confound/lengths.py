"""Lengths of the rows to train on, and what of them is lost.

The answer stands at the end of a row, and a row that is too long loses its end: a few tokens too
many and there is nothing left to learn. That is known from the items alone, before any mining.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mlxstacks import base_model
from mlxstacks.arms.arm import training_rows
from mlxstacks.data import Rendering, encode_messages
from mlxstacks.errors import InputError
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.study.items import Item


class RowLength(NamedTuple):
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
    lengths = {}
    for item, row in zip(items, rows, strict=True):
        encoded = encode_messages(row["messages"], tokenizer, rendering=Rendering.of(settings))
        before = next((n for n, weight in enumerate(encoded.weights) if weight), 0)
        lengths[item.item_id] = RowLength(len(encoded.tokens), before)
    most = settings.train.max_seq_length
    late = sum(length.before_answer >= most for length in lengths.values())
    if 2 * late > len(lengths):
        shortest, longest = (end(lengths.values()).tokens for end in (min, max))
        raise InputError(
            f"train.max_seq_length is {most}, and in {late:,} of {len(lengths):,} items the answer "
            f"comes later: nothing of them would be learned. With scoring {settings.scoring} their "
            f"rows have {shortest:,} to {longest:,} tokens: give --set "
            f"train.max_seq_length={longest}"
        )
    return lengths


def length_notes(
    train: Sequence[Item], lengths: dict[str, RowLength], settings: ConfoundSettings
) -> list[str]:
    """What of the training rows is lost by `train.max_seq_length`; nothing where all fit."""
    most = settings.train.max_seq_length
    trained = [lengths[item.item_id] for item in train]
    long = sum(length.tokens > most for length in trained)
    if not long:
        return []
    empty = sum(length.before_answer >= most for length in trained)
    words = (
        f"{long} of {len(trained)} rows to train on are longer than train.max_seq_length ({most}) "
        f"and lost their end; {empty} of them have no answer left and taught nothing."
    )
    return [words]
