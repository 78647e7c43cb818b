"""Rows for training and scoring: reading JSONL, loss masks, packing and padded batches.

A record is one JSON object: `messages` (and `tools`), or `prompt` and `completion` (or `answer`),
or `text`.

A row is a list of token ids with one loss weight per token: `weights[i]` is how much the loss
counts the prediction **of** token i. The first token of a row is never predicted, so its weight is
always 0.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
        messages: list[dict[str, Any]],
        *,
        tokenize: bool = ...,
        add_generation_prompt: bool = ...,
        tools: list[dict[str, Any]] | None = ...,
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


@dataclass(frozen=True, slots=True)
class RowFile:
    """Rows of a JSONL file. cut: how many were too long. empty: how many are left out because no
    token of them has loss weight. sha256: of the file.
    """

    rows: list[Row]
    cut: int
    empty: int
    sha256: str


def read_rows(
    path: Path, tokenizer: ChatTokenizer, prompt_weight: float = 0.0, max_tokens: int | None = None
) -> RowFile:
    """Encode every record of a JSONL file; rows longer than `max_tokens` lose their end.

    Raises:
        InputError: a line is broken (file and line are named), or no row is left.
    """
    from jinja2 import TemplateError  # of a chat template; where there is none, ValueError

    rows: list[Row] = []
    cut = empty = 0
    for number, record in numbered_records(path):
        try:
            row = encode_record(record, tokenizer, prompt_weight)
        except (ValueError, TemplateError, TypeError, KeyError) as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        if max_tokens is not None and len(row.tokens) > max_tokens:
            row = Row(row.tokens[:max_tokens], row.weights[:max_tokens])
            cut += 1
        if any(row.weights):
            rows.append(row)
        else:
            empty += 1
    if not rows:
        raise InputError(
            f"{path}: none of {empty} rows has a token to learn from"
            + (f", {cut} were cut to {max_tokens} tokens" if cut else "")
            + "; a chat row needs an assistant's turn, a text row two tokens"
        )
    return RowFile(rows, cut, empty, hashlib.sha256(path.read_bytes()).hexdigest())


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, blank lines skipped.

    Raises:
        InputError: a line is not a JSON object, or the file holds none.
    """
    return [record for _, record in numbered_records(path)]


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line of a JSONL file. Raises: as `read_records`."""
    number = found = 0
    try:
        lines = path.open("rb")
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; give a file with a JSON object a line"
        ) from None
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            found += 1
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
                reason = getattr(error, "msg", str(error))
                raise InputError(f"{path}, line {number}: not JSON ({reason})") from error
            if not isinstance(record, dict):
                raise InputError(
                    f"{path}, line {number}: got {type(record).__name__}, need an object"
                )
            yield number, record
    if not found:
        raise InputError(f"{path}: no rows; each line must be one JSON object")


def as_messages(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Messages of a record with `messages`, or `prompt` and an answer; None for `text`.

    Content in parts becomes their text. Raises:
        InputError: none of the three forms, or a value of the wrong kind.
    """
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise InputError("messages must be a list with at least one message")
        return [_message(message, place) for place, message in enumerate(messages)]
    answer = next((record[key] for key in ("answer", "completion") if key in record), None)
    if "prompt" in record and answer is not None:
        user = {"role": "user", "content": record["prompt"]}
        return [_message(user, 0), _message({"role": "assistant", "content": answer}, 1)]
    if isinstance(record.get("text"), str):
        return None
    if "text" in record:
        raise InputError(f"text is {type(record['text']).__name__}, must be a string")
    raise InputError(
        f"a row has the keys {sorted(record)}; "
        "allowed: text | prompt and answer (or completion) | messages"
    )


def _message(message: Any, place: int) -> dict[str, Any]:
    """One message as templates take it: a role, and text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"message {place} has no role; it needs role and content")
    content = message.get("content")
    if isinstance(content, list):
        parts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise InputError(f"message {place} has parts that are not text")
        content = "".join(parts)
    is_call = content is None and message.get("tool_calls")
    if not isinstance(content, str) and not is_call:
        raise InputError(
            f"message {place}: content is {type(content).__name__}, must be text (or tool_calls)"
        )
    return {**message, "content": content or ""}


# (messages, add_generation_prompt=False) -> the template's text.
Render = Callable[..., str]
# Stands for an answer while its place in the text is looked for; no real text holds it.
_MARK = "\ue000"


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    prompt_weight: float = 0.0,
    tools: list[dict[str, Any]] | None = None,
) -> Row:
    """A chat as one row: every assistant turn and its end mark weigh 1, all else `prompt_weight`.

    Laws: the template's text is unchanged; a turn begins where the template with a generation
    prompt ends, or, where the template writes earlier turns otherwise than the last one (some drop
    their reasoning), at what the turn itself brings.
    """
    options: dict[str, Any] = {} if tools is None else {"tools": tools}
    template: Render = tokenizer.apply_chat_template
    render = partial(template, tokenize=False, add_generation_prompt=False, **options)
    turns = [dict(message) for message in messages]
    text = render(turns)
    tokens: list[int] = []
    weights: list[float] = []
    done = 0
    for index, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        start, end = _answer_span(render, turns, index, text)
        for part, weight in ((text[done:start], prompt_weight), (text[start:end], 1.0)):
            ids = tokenizer.encode(part, add_special_tokens=False)
            tokens += ids
            weights += [weight] * len(ids)
        done = end
    rest = tokenizer.encode(text[done:], add_special_tokens=False)
    return _row(tokens + rest, weights + [prompt_weight] * len(rest))


def _answer_span(
    render: Render, turns: list[dict[str, Any]], index: int, text: str
) -> tuple[int, int]:
    """Where in the text of a chat the assistant's turn `index` and its end mark stand."""
    before = render(turns[:index], add_generation_prompt=True) if index else _MARK
    after = render(turns[: index + 1])
    if not text.startswith(before) or not text.startswith(after):
        return _replaced_span(render, turns, index, text)
    # A line break after the end mark is not the model's to predict.
    return len(before), len(before) + len(text[len(before) : len(after)].rstrip("\n"))


def _replaced_span(
    render: Render, turns: list[dict[str, Any]], index: int, text: str
) -> tuple[int, int]:
    """The part of the text that changes when the turn says something else, and its end mark."""
    other = {"role": "assistant", "content": _MARK}
    changed = render([*turns[:index], other, *turns[index + 1 :]])
    as_last = render([*turns[:index], other])
    if _MARK not in changed or _MARK not in as_last:
        raise InputError("the chat template drops earlier turns: loss masks cannot be placed")
    start = _shared(text, changed)
    end = len(text) - _shared(text[start:][::-1], changed[start:][::-1])
    end_mark = as_last.rpartition(_MARK)[2].rstrip("\n")
    return start, end + len(end_mark) * text.startswith(end_mark, end)


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def encode_record(
    record: Mapping[str, Any], tokenizer: ChatTokenizer, prompt_weight: float = 0.0
) -> Row:
    """One JSONL record as a row. Chat rows count answers and, by `prompt_weight`, the rest; text
    rows everything, after what the tokenizer puts before a text (`<bos>`), to an end mark.
    """
    messages = as_messages(record)
    if messages is not None:
        return encode_messages(messages, tokenizer, prompt_weight, record.get("tools"))
    tokens, end = tokenizer.encode(record["text"], add_special_tokens=True), tokenizer.eos_token_id
    if end is not None and tokens[-1:] != [end]:
        tokens = [*tokens, end]
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
