"""Whether what the adapter is taught fits into `train.max_seq_length`.

The answer stands at the end of a row, and a row that is too long loses its end: a few tokens too
many and there is nothing left to learn. That is known from the items alone, so before any mining.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxstacks import base_model
from mlxstacks.data import Rendering, encode_messages
from mlxstacks.errors import InputError
from mlxstacks.studies.confound.items import Item
from mlxstacks.studies.confound.prompts import training_rows
from mlxstacks.studies.confound.settings import ConfoundSettings


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
