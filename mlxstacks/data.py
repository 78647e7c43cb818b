"""Rows for training and scoring: reading JSONL, loss masks, packing and padded batches.

A row is a list of token ids with one loss weight per token: `weights[i]` is how much the loss
counts the prediction **of** token i. The first token of a row is never predicted, so its weight is
always 0.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlxstacks.errors import InputError


class ChatTokenizer(Protocol):
    """What this module needs of a tokenizer; mlx-lm's and transformers' have it."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool = ...,
        add_generation_prompt: bool = ...,
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and the loss weight of each."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.weights):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.weights)} loss weights")
        if self.weights and self.weights[0] != 0:
            raise ValueError(
                "the first token of a row is never predicted: its loss weight must be 0"
            )


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` (B, T) int32, `weights` (B, T) float32; padding, on the right, has weight 0."""

    tokens: np.ndarray
    weights: np.ndarray

    @property
    def inputs(self) -> np.ndarray:
        return self.tokens[:, :-1]

    @property
    def targets(self) -> np.ndarray:
        return self.tokens[:, 1:]

    @property
    def target_weights(self) -> np.ndarray:
        return self.weights[:, 1:]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, blank lines skipped.

    Raises:
        InputError: a line is not a JSON object, or the file holds none.
    """
    records = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: not JSON ({error.msg})") from error
            if not isinstance(record, dict):
                raise InputError(
                    f"{path}, line {number}: got {type(record).__name__}, need an object"
                )
            records.append(record)
    if not records:
        raise InputError(f"{path}: no rows; each line must be one JSON object")
    return records


def as_messages(record: Mapping[str, Any]) -> list[dict[str, str]] | None:
    """Messages of a record with `messages`, or `prompt` and an answer; None for `text`.

    Raises:
        InputError: none of the three forms.
    """
    if "messages" in record:
        return list(record["messages"])
    answer = next((record[key] for key in ("answer", "completion") if key in record), None)
    if "prompt" in record and answer is not None:
        user = {"role": "user", "content": record["prompt"]}
        return [user, {"role": "assistant", "content": answer}]
    if "text" in record:
        return None
    raise InputError(
        f"a row has the keys {sorted(record)}; "
        "allowed: text | prompt and answer (or completion) | messages"
    )


def encode_messages(
    messages: Sequence[Mapping[str, str]], tokenizer: ChatTokenizer, prompt_weight: float = 0.0
) -> Row:
    """A chat as one row: every assistant turn and its end mark weigh 1, all else `prompt_weight`.

    Law: the template's text is unchanged; a turn begins where the template with a generation prompt
    ends.
    """
    turns = [dict(message) for message in messages]
    text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    tokens: list[int] = []
    weights: list[float] = []
    done = 0
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before: str = tokenizer.apply_chat_template(
            turns[:index], tokenize=False, add_generation_prompt=True
        )
        after: str = tokenizer.apply_chat_template(
            turns[: index + 1], tokenize=False, add_generation_prompt=False
        )
        if not text.startswith(before) or not text.startswith(after):
            raise InputError(
                "the chat template rewrites earlier turns: loss masks cannot be placed"
            )
        # A line break after the end mark is not the model's to predict.
        answer = text[len(before) : len(after)].rstrip("\n")
        for part, weight in ((text[done : len(before)], prompt_weight), (answer, 1.0)):
            ids = tokenizer.encode(part, add_special_tokens=False)
            tokens += ids
            weights += [weight] * len(ids)
        done = len(before) + len(answer)
    rest = tokenizer.encode(text[done:], add_special_tokens=False)
    return _row(tokens + rest, weights + [prompt_weight] * len(rest))


def encode_record(
    record: Mapping[str, Any], tokenizer: ChatTokenizer, prompt_weight: float = 0.0
) -> Row:
    """One JSONL record as a row: chat rows count answers only, text rows everything."""
    messages = as_messages(record)
    if messages is not None:
        return encode_messages(messages, tokenizer, prompt_weight)
    tokens = tokenizer.encode(record["text"], add_special_tokens=False)
    if tokenizer.eos_token_id is not None:
        tokens = [*tokens, tokenizer.eos_token_id]
    return _row(tokens, [1.0] * len(tokens))


def _row(tokens: Sequence[int], weights: Sequence[float]) -> Row:
    return Row(tuple(tokens), (0.0, *weights[1:]) if tokens else ())


def pack_rows(rows: Iterable[Row], length: int) -> list[Row]:
    """Rows laid end to end in rows of at most `length` tokens; a longer one is cut.

    Law: every token that is kept keeps its weight, except that the first of a packed row gets 0.
    """
    packed: list[Row] = []
    tokens: list[int] = []
    weights: list[float] = []
    for row in rows:
        if tokens and len(tokens) + len(row.tokens) > length:
            packed.append(_row(tokens, weights))
            tokens, weights = [], []
        tokens += row.tokens[: length - len(tokens)]
        weights += row.weights[: length - len(weights)]
    if tokens:
        packed.append(_row(tokens, weights))
    return packed


def make_batch(rows: Sequence[Row], length: int | None = None, pad_token: int = 0) -> Batch:
    """Rows padded on the right to the longest of them, or to `length` (longer rows are cut)."""
    longest = length or max(len(row.tokens) for row in rows)
    tokens = np.full((len(rows), longest), pad_token, dtype=np.int32)
    weights = np.zeros((len(rows), longest), dtype=np.float32)
    for index, row in enumerate(rows):
        kept = min(len(row.tokens), longest)
        tokens[index, :kept] = row.tokens[:kept]
        weights[index, :kept] = row.weights[:kept]
    return Batch(tokens, weights)


def batch_at(
    rows: Sequence[Row], step: int, batch_size: int, seed: int, length: int | None = None
) -> Batch:
    """The batch of a training step: a function of its arguments alone.

    Every epoch is a fresh permutation of all rows; a batch may span two epochs.
    """
    chosen = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, offset = divmod(position, len(rows))
        chosen.append(rows[_permutation(len(rows), seed, epoch)[offset]])
    return make_batch(chosen, length)


_last_permutation: dict[tuple[int, int, int], list[int]] = {}


def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    key = (count, seed, epoch)
    if key not in _last_permutation:
        if len(_last_permutation) > 8:
            _last_permutation.clear()
        order = list(range(count))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        _last_permutation[key] = order
    return _last_permutation[key]
