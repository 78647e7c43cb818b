"""Examples as token rows, in the chat template of the tokenizer or in the alpaca template."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlxstacks.data.cleaning import says_something, strip_record
from mlxstacks.data.encode import (
    ChatTokenizer,
    RowNotes,
    begin_mark,
    encode_messages,
    end_mark,
    text_tokens,
)
from mlxstacks.data.examples import Example, turns_of
from mlxstacks.data.markers import special_tokens
from mlxstacks.data.rows import Row, row_of
from mlxstacks.data.settings import DomainDataSettings
from mlxstacks.data.special_text import encode_text
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError

# One prompt for every source; a row without input leaves that part empty.
ALPACA_TEMPLATE = "### Instruction:\n{prompt}\n\n### Input:\n{input}\n\n### Response:\n"


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """rows[i] is the example ids[i]. cut: rows that were too long and lost their end. empty: rows
    left out, because no token of them has loss weight. notes: on how they were rendered.
    """

    rows: list[Row]
    ids: list[str]
    cut: int
    empty: int
    notes: tuple[str, ...] = ()


def encode_examples(
    examples: Iterable[Example],
    tokenizer: ChatTokenizer,
    settings: DomainDataSettings,
    max_tokens: int | None = None,
) -> EncodedRows:
    """Encode examples in their order.

    The loss counts answers and their end mark; with mask_prompt=False, and in plain text, every
    token. The tokenizer's own special tokens are stripped first (with strip_markers).

    Raises:
        InputError: the template refuses a row, which is named, or no row is left.
    """
    tokens = special_tokens(tokenizer) if settings.strip_markers else ()
    rows: list[Row] = []
    ids: list[str] = []
    notes = RowNotes(tokenizer, Rendering.of(settings))
    limit = None if max_tokens is None else max_tokens + 1  # one more says that a row is longer
    cut = empty = 0
    for example in examples:
        record = strip_record(example.record, tokens) if tokens else example.record
        if not says_something(record):
            empty += 1
            continue
        try:
            row = _encode(record, tokenizer, settings, limit)
            notes.add(record)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            where = example.where or f"{example.source}, row {example.row_id}"
            raise InputError(f"{where}: {error}; the row is {str(record)[:100]}") from error
        if max_tokens is not None and len(row.tokens) > max_tokens:
            row = Row(row.tokens[:max_tokens], row.weights[:max_tokens])
            cut += 1
        if any(row.weights):
            rows.append(row)
            ids.append(example.row_id)
        else:
            empty += 1
    if not rows:
        raise InputError(_nothing_left(empty, cut, max_tokens))
    return EncodedRows(rows, ids, cut, empty, tuple(notes.lines()))


def _encode(
    record: dict[str, Any],
    tokenizer: ChatTokenizer,
    settings: DomainDataSettings,
    limit: int | None,
) -> Row:
    prompt_weight = 1.0 if settings.mask_prompt is False else 0.0
    rendering = Rendering.of(settings)
    turns = turns_of(record)
    if turns is None:
        tokens = text_tokens(record["text"], tokenizer, rendering, limit)
        return row_of(tokens, [1.0] * len(tokens))
    if settings.template == "chat":
        tools = record.get("tools")
        return encode_messages(turns, tokenizer, prompt_weight, tools, rendering, limit)
    return encode_alpaca(record, tokenizer, prompt_weight, rendering, limit)


def encode_alpaca(
    record: dict[str, Any],
    tokenizer: ChatTokenizer,
    prompt_weight: float = 0.0,
    rendering: Rendering = PLAIN,
    limit: int | None = None,
) -> Row:
    """A row {prompt, input, answer} in the alpaca template, the end mark after the answer.

    limit: no more than so many tokens. Raises: InputError: the record is a longer conversation.
    """
    if "messages" in record:
        raise InputError("a conversation does not fit template alpaca; use template chat")
    prompt = ALPACA_TEMPLATE.format(prompt=record["prompt"], input=record.get("input", ""))
    allow = rendering.allow_special
    asked = [*begin_mark(tokenizer), *encode_text(prompt, tokenizer, allow, limit)]
    answer = [*encode_text(record["answer"], tokenizer, allow, limit), *end_mark(tokenizer)]
    weights = [prompt_weight] * len(asked) + [1.0] * len(answer)
    return row_of([*asked, *answer][:limit], weights[:limit])


def _nothing_left(empty: int, cut: int, max_tokens: int | None) -> str:
    if not empty:
        return "there are no examples to encode"
    cuts = f"; {cut} were cut to {max_tokens} tokens, maybe before the answer" if cut else ""
    return f"none of {empty} rows has a token to learn from{cuts}"
