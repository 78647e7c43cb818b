"""Records as token rows: chat templates, and which tokens the loss counts.

A record is one JSON object: `messages` (and `tools`), or `prompt` and `completion` (or `answer`),
or `text`. Examples are encoded in the chat template of the tokenizer or in the alpaca template.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mlxstacks.data.chat import (
    REASONING_KEYS,
    Chat,
    is_known_role,
    open_chat,
    prompt_tokens,
    reasoning_of,
    split_reasoning,
    strings_of,
    writes_reasoning,
)
from mlxstacks.data.cleaning import says_something, strip_record
from mlxstacks.data.examples import Example, as_messages, make_example, turns_of
from mlxstacks.data.rows import Row, row_of
from mlxstacks.data.settings import DomainDataSettings, SourceSettings, Template
from mlxstacks.data.special_text import (
    check_ids,
    encode_text,
    foreign_markers,
    reasoning_tags,
    special_literals,
    special_tokens,
    template_text,
)
from mlxstacks.data.text_settings import PLAIN, Rendering, ThinkingMode
from mlxstacks.errors import InputError

# One prompt for every source; a row without input leaves that part empty.
ALPACA_TEMPLATE = "### Instruction:\n{prompt}\n\n### Input:\n{input}\n\n### Response:\n"


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


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: ChatTokenizer,
    prompt_weight: float = 0.0,
    tools: list[dict[str, Any]] | None = None,
    rendering: Rendering = PLAIN,
    limit: int | None = None,
) -> Row:
    """A chat as one row: every assistant turn and its end mark weigh 1, all else `prompt_weight`.

    limit: no more than so many tokens are made, the first ones.
    Laws: what stands before the last answer is the prompt that generation would give, with thinking
    as the turn has it, or as `rendering` says; a turn begins where the template with a generation
    prompt ends, or, where the template writes earlier turns otherwise than the last one (some drop
    their reasoning), at what the turn itself brings.
    """
    turns = [_as_trained(dict(m), tokenizer, rendering.thinking) for m in messages]
    chat = open_chat(turns, tokenizer, rendering, tools)
    tokens: list[int] = []
    weights: list[float] = []
    for text, is_answer in _parts(chat, rendering.thinking):
        left = None if limit is None else limit - len(tokens)
        if left == 0:  # each further answer costs two renderings of all that stands before it
            break
        ids = chat.encode(text, left)
        tokens += ids
        weights += [1.0 if is_answer else prompt_weight] * len(ids)
    return row_of(tokens, weights)


def _as_trained(turn: dict[str, Any], tokenizer: Any, mode: ThinkingMode) -> dict[str, Any]:
    """An assistant's turn with its reasoning under every key that templates look at, or, where it
    has none or none is wanted, without an empty block too.
    """
    if turn["role"] != "assistant":
        return turn
    plain = {key: value for key, value in turn.items() if key not in REASONING_KEYS}
    by_key = writes_reasoning(tokenizer) and any(turn.get(key) for key in REASONING_KEYS)
    reasoning = reasoning_of(turn if by_key else plain, tokenizer)
    if mode == "off" or not reasoning:
        block, rest = split_reasoning(turn["content"], tokenizer)
        return {**plain, "content": rest.lstrip("\n") if block else turn["content"]}
    return {**plain, **dict.fromkeys(REASONING_KEYS, reasoning)} if by_key else plain


def _parts(chat: Chat, mode: ThinkingMode) -> Iterator[tuple[str, bool]]:
    """(text, whether it is an answer) from the beginning of a chat to its end."""
    answers = [i for i, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
    thinking = {
        index: bool(reasoning_of(chat.turns[index], chat.tokenizer))
        if mode == "auto"
        else mode == "on"
        for index in answers
    }
    text = chat.text(enable_thinking=thinking[answers[-1]] if answers else None)
    done = 0
    for index in answers:
        prompt = chat.prompt(chat.turns[:index], thinking[index]) if index else chat.stand_in
        after = chat.text(chat.turns[: index + 1], thinking[index])
        if text.startswith(prompt) and text.startswith(after):
            # A line break after the end mark is not the model's to predict.
            start, end = len(prompt), len(prompt) + len(text[len(prompt) : len(after)].rstrip("\n"))
        else:
            start, end = _replaced_span(chat, index, text, thinking[index])
        before = text[done:start]
        if 0 < index == len(chat.turns) - 1 and not text.startswith(prompt):
            # The prompt itself, where the template writes the answer without the empty block that
            # it puts into the prompt, and the turns before alike.
            history = chat.text(chat.turns[:-1], thinking[index])
            if prompt.startswith(history) and text.startswith(history):
                before = prompt[done:] or before
        yield before, False
        yield text[start:end], True
        done = end
    yield text[done:], False


def _replaced_span(chat: Chat, index: int, text: str, thinks: bool) -> tuple[int, int]:
    """The part of the text that changes when the turn says something else, and its end mark."""
    other = {"role": "assistant", "content": chat.stand_in}
    turns = chat.turns
    changed = chat.text([*turns[:index], other, *turns[index + 1 :]], thinks)
    as_last = chat.text([*turns[:index], other], thinks)
    if chat.stand_in not in changed or chat.stand_in not in as_last:
        raise InputError("the chat template drops earlier turns: loss masks cannot be placed")
    start = _shared(text, changed)
    end = len(text) - _shared(text[start:][::-1], changed[start:][::-1])
    end_mark = as_last.rpartition(chat.stand_in)[2].rstrip("\n")
    return start, end + len(end_mark) * text.startswith(end_mark, end)


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one.startswith(other[least:middle], least):
            least = middle
        else:
            most = middle - 1
    return least


def encode_record(
    record: Mapping[str, Any],
    tokenizer: ChatTokenizer,
    prompt_weight: float = 0.0,
    rendering: Rendering = PLAIN,
    limit: int | None = None,
) -> Row:
    """One JSONL record as a row: chat rows count answers (and, by `prompt_weight`, the rest), text
    rows everything. limit: no more than so many tokens.
    """
    messages = as_messages(record)
    if messages is not None:
        tools = record.get("tools")
        return encode_messages(messages, tokenizer, prompt_weight, tools, rendering, limit)
    tokens = text_tokens(record["text"], tokenizer, rendering, limit)
    return row_of(tokens, [1.0] * len(tokens))


def text_tokens(
    text: str,
    tokenizer: ChatTokenizer,
    rendering: Rendering = PLAIN,
    limit: int | None = None,
) -> list[int]:
    """Text between the tokenizer's begin mark, if it has one, and its end mark; as in mlx-lm, an
    end mark that the text has is enough. limit: of all tokens, the first ones.
    """
    tokens, end = encode_text(text, tokenizer, rendering.allow_special, limit), end_mark(tokenizer)
    whole = [*begin_mark(tokenizer), *tokens, *(end if tokens[-1:] != end else [])]
    return whole[:limit]


def begin_mark(tokenizer: ChatTokenizer) -> list[int]:
    """The token that a tokenizer puts before a text of its own accord, if there is one."""
    token = getattr(tokenizer, "bos_token_id", None)
    if token is None or tokenizer.encode("", add_special_tokens=True)[:1] != [token]:
        return []
    check_ids([token], tokenizer)
    return [token]


def end_mark(tokenizer: ChatTokenizer) -> list[int]:
    mark = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    check_ids(mark, tokenizer)
    return mark


class RowNotes:
    """What a reader of training rows should know of how they were rendered: feed it every record,
    then print `lines`.
    """

    def __init__(self, tokenizer: Any, rendering: Rendering) -> None:
        self._tokenizer, self._rendering = tokenizer, rendering
        self._special = self._with_reasoning = self._without = self._by_key = 0
        self._literals: dict[str, None] = {}
        self._foreign: Counter[str] = Counter()
        self._with_foreign = 0
        self._roles: Counter[str] = Counter()

    def add(self, record: Mapping[str, Any]) -> None:
        """A record of one of the forms that `encode_record` takes."""
        tokenizer = self._tokenizer
        turns = as_messages(record) or ()
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        thoughts = [reasoning_of(turn, tokenizer) for turn in answers]
        literals = [x for text in strings_of(record) for x in special_literals(text, tokenizer)]
        # The tags of a reasoning block are read as what they are.
        blocks = sum(bool(split_reasoning(turn["content"], tokenizer)[0]) for turn in answers)
        tags = len(special_literals("".join(reasoning_tags(tokenizer)), tokenizer))
        if len(literals) > blocks * tags:
            self._special += 1
            self._literals |= dict.fromkeys(literals)
        foreign = {x for text in strings_of(record) for x in foreign_markers(text, tokenizer)}
        self._with_foreign += bool(foreign)
        self._foreign.update(foreign)
        self._with_reasoning += any(thoughts)
        self._without += bool(answers) and not any(thoughts)
        self._by_key += any(turn.get(key) for turn in answers for key in REASONING_KEYS)
        self._roles.update({turn["role"] for turn in turns})

    def lines(self, command: str = "") -> list[str]:
        """Sentences, none where rows and settings agree. command: before the options they name."""
        mode, source = self._rendering.thinking, template_text(self._tokenizer)
        lines = [
            f"{_rows(count)} with the role {role!r}, which the chat template does not name: it is "
            "written as it stands, and its text counts as prompt."
            for role, count in self._roles.most_common()
            if not is_known_role(role, source)
        ][:3]
        if self._special and not self._rendering.allow_special:
            shown = ", ".join(list(self._literals)[:3])
            lines.append(
                f"{_rows(self._special)} with text of special tokens ({shown}), which was read as "
                f"plain text; with {command}--allow-special they are tokens."
            )
        if self._with_foreign:
            shown = ", ".join(marker for marker, _ in self._foreign.most_common(3))
            lines.append(
                f"{_rows(self._with_foreign)} with markers of another chat template ({shown}), "
                "which are plain text to this model: write such rows as messages."
            )
        if self._with_reasoning and mode == "off":
            lines.append(
                f"{_rows(self._with_reasoning)} with reasoning, which is left out: thinking is off."
            )
        elif self._by_key and not writes_reasoning(self._tokenizer):
            lines.append(
                f"{_rows(self._by_key)} with {' or '.join(REASONING_KEYS)}, for which the chat "
                "template has no place: the reasoning is not trained."
            )
        if self._without and mode == "on" and "think" in source:
            lines.append(
                f"{_rows(self._without)} without reasoning, while thinking is on, which teaches "
                "the model to end its thoughts at once; --thinking auto or off."
            )
        return lines


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


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

    Raises: InputError: the template refuses a row, which is named, or no row is left.
    """
    tokens = special_tokens(tokenizer) if settings.strip_markers else ()
    rows: list[Row] = []
    ids: list[str] = []
    rendering, prompt_weight = Rendering.of(settings), float(settings.mask_prompt is False)
    notes = RowNotes(tokenizer, rendering)
    limit = None if max_tokens is None else max_tokens + 1  # one more says that a row is longer
    cut = empty = 0
    for example in examples:
        record = strip_record(example.record, tokens) if tokens else example.record
        if not says_something(record):
            empty += 1
            continue
        try:
            if settings.template == "alpaca" and "text" not in record:
                row = encode_alpaca(record, tokenizer, prompt_weight, rendering, limit)
            else:
                turns = turns_of(record)
                whole = record if turns is None else {**record, "messages": turns}
                row = encode_record(whole, tokenizer, prompt_weight, rendering, limit)
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
        cuts = f"; {cut} were cut to {max_tokens} tokens, maybe before the answer" if cut else ""
        raise InputError(
            f"none of {empty} rows has a token to learn from{cuts}"
            if empty
            else "there are no examples to encode"
        )
    return EncodedRows(rows, ids, cut, empty, tuple(notes.lines()))


def encode_pair(
    prompt: str,
    answer: str,
    tokenizer: Any,
    template: Template,
    max_tokens: int,
    rendering: Rendering = PLAIN,
) -> Row | None:
    """A prompt and its answer as tokens, loss on the answer alone; None where none of it is left
    within max_tokens. Raises: InputError: the template refuses it.
    """
    settings = DomainDataSettings(
        sources=(SourceSettings(path="prompt"),), template=template, thinking=rendering.thinking,
        allow_special=rendering.allow_special,
    )  # fmt: skip
    example = make_example({"prompt": prompt, "answer": answer}, "the prompt")
    try:
        return encode_examples([example], tokenizer, settings, max_tokens).rows[0]
    except InputError as error:
        if "none of 1 rows" in str(error):
            return None
        raise


@dataclass(frozen=True, slots=True)
class EncodedPairs:
    """chosen[i] and rejected[i] answer one prompt. cut: answers that lost their end. empty: pairs
    left out, because an answer has no token left or both have the same.
    """

    chosen: list[Row]
    rejected: list[Row]
    cut: int
    empty: int
    notes: tuple[str, ...] = ()


def encode_pairs(
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    settings: DomainDataSettings,
    max_tokens: int,
) -> EncodedPairs:
    """Encode examples of the format `preference`: weights are 1 on the last answer and its end
    mark, 0 on earlier ones, which both rows share.

    Raises: InputError: as `encode_examples`, or no pair is left.
    """
    numbered = [replace(example, row_id=str(i)) for i, example in enumerate(examples)]
    chosen = encode_examples(numbered, tokenizer, settings, max_tokens)
    other = [replace(e, record=_with_rejected(e.record)) for e in numbered]
    rejected = encode_examples(other, tokenizer, settings, max_tokens)
    of_rejected = dict(zip(rejected.ids, rejected.rows, strict=True))
    pairs = [
        (last_answer(row), last_answer(of_rejected[i]))
        for i, row in zip(chosen.ids, chosen.rows, strict=True)
        if i in of_rejected and row.tokens != of_rejected[i].tokens
    ]
    if not pairs:
        raise InputError(
            f"none of {len(examples)} pairs has two different answers left within {max_tokens} "
            "tokens; raise max_seq_length"
        )
    good, bad = map(list, zip(*pairs, strict=True))
    cut, empty = chosen.cut + rejected.cut, len(examples) - len(pairs)
    return EncodedPairs(good, bad, cut, empty, chosen.notes)


def _with_rejected(record: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in record.items() if key != "rejected"}
    return {**rest, "messages": [*record["messages"][:-1], record["rejected"]]}


def last_answer(row: Row) -> Row:
    """The row with weight on the last run of tokens that have some."""
    end = max(i for i, weight in enumerate(row.weights) if weight) + 1
    start = next((i for i in range(end - 1, -1, -1) if not row.weights[i]), -1) + 1
    weights = (0.0,) * start + (1.0,) * (end - start) + (0.0,) * (len(row.weights) - end)
    return Row(row.tokens, weights)


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
    before = [*begin_mark(tokenizer), *encode_text(prompt, tokenizer, allow, limit)]
    answer = [*encode_text(record["answer"], tokenizer, allow, limit), *end_mark(tokenizer)]
    weights = [prompt_weight] * len(before) + [1.0] * len(answer)
    return row_of([*before, *answer][:limit], weights[:limit])


# --- prompts to be answered and rewarded ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """prompts[i]: token ids up to where an answer begins. rows[i]: columns of the row, its
    `messages` before the answer, and the `reference` answer or None. references: those answers as
    rows with weight on the answer. too_long: prompts left out, which leave no room for an answer.
    """

    prompts: list[tuple[int, ...]]
    rows: list[dict[str, Any]]
    references: list[Row]
    too_long: int


def encode_prompts(
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    settings: DomainDataSettings,
    max_tokens: int,
    answer_tokens: int,
) -> EncodedPrompts:
    """Encode examples of the format `prompt`, in the chat template of the tokenizer.

    max_tokens: of a prompt and its answer together; answer_tokens: kept free for the answer.
    Raises: InputError: no prompt is left, or the template refuses one, which is named.
    """
    prompts: list[tuple[int, ...]] = []
    rows: list[dict[str, Any]] = []
    answered: list[Example] = []
    too_long = 0
    most = max_tokens - answer_tokens
    for example in examples:
        turns, reference = example.record["messages"], None
        if turns[-1]["role"] == "assistant":
            turns, reference = turns[:-1], turns[-1]["content"]
        try:
            ids = prompt_tokens(turns, tokenizer, Rendering.of(settings), most + 1)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{example.where or example.source}: {error}") from error
        if len(ids) > most:
            too_long += 1
            continue
        prompts.append(tuple(ids))
        rows.append({**example.record["row"], "messages": turns, "reference": reference})
        if reference is not None:
            answered.append(replace(example, row_id=str(len(prompts))))
    if not prompts:
        raise InputError(
            f"none of {len(examples)} prompts leaves room for {answer_tokens} tokens of answer "
            f"within {max_tokens}; lower max_tokens, or raise max_seq_length"
        )
    references = []
    if answered:
        encoded = encode_examples(answered, tokenizer, settings, max_tokens)
        references = [last_answer(row) for row in encoded.rows]
    return EncodedPrompts(prompts, rows, references, too_long)
