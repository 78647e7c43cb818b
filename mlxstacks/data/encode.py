"""Records as token rows: chat templates, and which tokens the loss counts.

A record is one JSON object: `messages` (and `tools`), or `prompt` and `completion` (or `answer`),
or `text`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mlxstacks.data.messages import as_messages
from mlxstacks.data.rows import Row, row_of
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
    return row_of(tokens + rest, weights + [prompt_weight] * len(rest))


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
    """One JSONL record as a row: chat rows count answers (and, by `prompt_weight`, the rest), text
    rows everything.
    """
    messages = as_messages(record)
    if messages is not None:
        return encode_messages(messages, tokenizer, prompt_weight, record.get("tools"))
    tokens = text_tokens(record["text"], tokenizer)
    return row_of(tokens, [1.0] * len(tokens))


def text_tokens(text: str, tokenizer: ChatTokenizer) -> list[int]:
    """Text between the tokenizer's begin mark, if it has one, and its end mark; as in mlx-lm, an
    end mark that the text has is enough.
    """
    tokens, end = tokenizer.encode(text, add_special_tokens=False), end_mark(tokenizer)
    return [*begin_mark(tokenizer), *tokens, *(end if tokens[-1:] != end else [])]


def begin_mark(tokenizer: ChatTokenizer) -> list[int]:
    """The token that a tokenizer puts before a text of its own accord, if there is one."""
    token = getattr(tokenizer, "bos_token_id", None)
    if token is None or tokenizer.encode("", add_special_tokens=True)[:1] != [token]:
        return []
    return [token]


def end_mark(tokenizer: ChatTokenizer) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
