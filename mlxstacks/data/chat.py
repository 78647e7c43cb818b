"""A chat as its template writes it, the same for rows to train on, for candidates and for prompts.

Whatever stands in messages and tools stays text (see special_text.py); the reasoning that begins an
assistant's turn, `<think>...</think>`, is read as the template's own.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlxstacks.data.special_text import (
    encode_marked,
    free_marks,
    mark_ends,
    mark_literals,
    reasoning_tags,
    special_literals,
    template_text,
    unescaped,
)
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError

Turns = list[dict[str, Any]]
# Keys under which data sets and templates have the reasoning of a turn.
REASONING_KEYS = ("reasoning_content", "thinking")
# Names of entries that a template reads in turns, calls and tools; no text of users.
_ENTRIES = frozenset(
    ("content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments",
     "description", "parameters", *REASONING_KEYS)
)  # fmt: skip
# Those that templates write as `<|role|>`.
_ROLES = (
    "system", "developer", "user", "assistant", "model", "tool", "function", "observation",
    "ipython", "environment",
)  # fmt: skip
_LONGEST_FAULT = 1000
# What Python raises inside a template, besides Jinja's own.
_TEMPLATE_FAULTS = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """turns, tools: as the template gets them. mark: inside each literal that is text; `stand_in`,
    like it, is in no text.
    """

    tokenizer: Any
    turns: Turns
    tools: Any
    mark: str
    stand_in: str

    def text(self, turns: Turns | None = None, enable_thinking: bool | None = None) -> str:
        """The template's text of these turns, or of all, with marks.

        enable_thinking: None leaves it to the template. Raises: as `render`.
        """
        return self.render(turns, enable_thinking, add_generation_prompt=False)

    def prompt(self, turns: Turns | None = None, enable_thinking: bool | None = None) -> str:
        """The text up to where an answer to these turns begins: what every answer follows."""
        return self.render(turns, enable_thinking, add_generation_prompt=True)

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """Ids of text with marks, or the first `limit` of them."""
        return encode_marked(text, self.mark, self.tokenizer, limit)

    def render(self, turns: Turns | None, enable_thinking: bool | None, **options: Any) -> str:
        """The same with further options of `apply_chat_template`.

        Raises: InputError: the template refuses the turns, fails over them, or never ends.
        """
        from jinja2 import TemplateError

        from mlxstacks.data.template_limits import limit_templates

        if self.tools is not None:
            options["tools"] = self.tools
        if enable_thinking is not None:
            options["enable_thinking"] = enable_thinking
        turns = self.turns if turns is None else turns
        limit_templates()
        try:
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, **options)
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            shown = str(error)[:_LONGEST_FAULT]  # a template can raise what it likes
            raise InputError(f"the chat template cannot be applied: {shown}") from error
        return unescaped(str(text), self.mark)


def open_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    rendering: Rendering,
    tools: list[dict[str, Any]] | None = None,
) -> Chat:
    """Messages with text content as a `Chat`."""
    turns = [dict(message) for message in messages]
    mark, stand_in = free_marks(list(strings_of([turns, tools])), 2)
    if rendering.allow_special:
        return Chat(tokenizer, turns, tools, mark, stand_in)

    def put(text: str) -> str:
        return mark_literals(text, tokenizer, mark)

    marked = [_marked_turn(turn, put, tokenizer) for turn in turns]
    chat = Chat(tokenizer, marked, _mapped(tools, put), mark, stand_in)
    return _with_ends_marked(chat)


def _with_ends_marked(chat: Chat) -> Chat:
    """The chat, or, where its template joins text and content into literals, `</think` and `>`, one
    with marks between them: in contents, then in roles, where that alone makes fewer literals.
    Roles that the template knows are its own to judge.

    Raises: InputError: as `render`, or a role that could make a literal cannot be marked.
    """
    source, mark = template_text(chat.tokenizer), chat.mark

    def put(text: str) -> str:
        return mark_ends(text, chat.tokenizer, mark)

    turns = [{**_mapped(turn, put, 3), "role": turn["role"]} for turn in chat.turns]
    chat = _with_fewer_literals(chat, replace(chat, turns=turns, tools=_mapped(chat.tools, put, 2)))
    unknown = {role for turn in chat.turns if not is_known_role(role := turn["role"], source)}
    # In each place: a template may change its case.
    marked = _with_roles(chat, {role: f"{mark}{mark.join(role)}{mark}" for role in unknown})
    try:
        return _with_fewer_literals(chat, marked)
    except InputError as error:  # looked up in a way that `is_known_role` does not see
        literals = _count_literals(chat)
        with suppress(InputError):
            if literals <= _count_literals(_with_roles(chat, dict.fromkeys(unknown, "user"))):
                return chat
        roles = ", ".join(sorted(repr(role.replace(mark, "")) for role in unknown))
        raise InputError(
            f"the roles {roles} could become special tokens: the chat template has no such quoted "
            f"names; allowed are those that it has, and {', '.join(_ROLES)}"
        ) from error


def _with_roles(chat: Chat, roles: Mapping[str, str]) -> Chat:
    turns = [{**turn, "role": roles.get(turn["role"], turn["role"])} for turn in chat.turns]
    return replace(chat, turns=turns)


def _with_fewer_literals(chat: Chat, marked: Chat) -> Chat:
    if (marked.turns, marked.tools) == (chat.turns, chat.tools):
        return chat
    is_fewer = _count_literals(marked).total() < _count_literals(chat).total()
    return marked if is_fewer else chat


def _count_literals(chat: Chat) -> Counter[str]:
    """How often the prompt has each literal of a special token."""
    return Counter(special_literals(chat.prompt(), chat.tokenizer))


def is_known_role(role: str, template: str) -> bool:
    """Whether templates write this role or this one has it, in any case, as a quoted literal."""
    name, source = role.lower(), template.lower()
    is_quoted = f"'{name}'" in source or f'"{name}"' in source
    return role in _ROLES or (is_quoted and re.fullmatch(r"[\w -]+", role) is not None)


def prompt_tokens(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    rendering: Rendering = PLAIN,
    limit: int | None = None,
) -> list[int]:
    """Ids of the prompt that an answer to `messages` follows, or the first `limit` of them."""
    chat = open_chat(messages, tokenizer, rendering)
    return chat.encode(chat.prompt(enable_thinking=rendering.enable_thinking), limit)


def content_mask(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    rendering: Rendering = PLAIN,
    limit: int | None = None,
) -> tuple[list[int], list[bool]]:
    """`prompt_tokens`, and which of them are the messages' content; all others are the template's.

    A token that joins the two is content where content begins, and the template's where it ends.
    Content that a template leaves out, or writes twice, is the template's.
    """
    chat = open_chat(messages, tokenizer, rendering)
    thinking = rendering.enable_thinking
    text = chat.prompt(enable_thinking=thinking)
    tokens = chat.encode(text, limit)
    is_content = [False] * len(tokens)
    for index, turn in enumerate(chat.turns):
        turns = [*chat.turns]
        turns[index] = {**turn, "content": chat.stand_in}
        before, *after = chat.prompt(turns, thinking).split(chat.stand_in)
        if len(after) == 1 and text.startswith(before) and text.endswith(after[0]):
            ends = (len(before), len(text) - len(after[0]))
            start, end = (_shared_ids(tokens, chat.encode(text[:e], limit)) for e in ends)
            is_content[start:end] = [True] * (end - start)
    return tokens, is_content


def _shared_ids(tokens: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two rows begin with in common."""
    pairs = zip(tokens, other, strict=False)
    most = min(len(tokens), len(other))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), most)


def split_reasoning(content: str, tokenizer: Any) -> tuple[str, str]:
    """The reasoning block that an assistant's content begins with, tags included, or "", and the
    rest of the content. Law: the two joined are the content.
    """
    begin, end = reasoning_tags(tokenizer)
    opening = re.match(rf"\s*{re.escape(begin)}", content)
    close = content.find(end, opening.end()) if opening else -1
    place = close + len(end) if close >= 0 else 0
    return content[:place], content[place:]


def reasoning_of(turn: Mapping[str, Any], tokenizer: Any) -> str:
    """What an assistant's turn thinks before it answers, "" for nothing."""
    given = next((turn[key] for key in REASONING_KEYS if isinstance(turn.get(key), str)), "")
    if given.strip():
        return str(given)
    block, _ = split_reasoning(turn["content"], tokenizer)
    begin, end = reasoning_tags(tokenizer)
    return block.strip().removeprefix(begin).removesuffix(end).strip()


def writes_reasoning(tokenizer: Any) -> bool:
    """Whether the chat template has a place for what stands under `REASONING_KEYS`."""
    source = template_text(tokenizer)
    return not source or re.search(rf"\b({'|'.join(REASONING_KEYS)})\b", source) is not None


def _marked_turn(turn: dict[str, Any], put: Callable[[str], str], tokenizer: Any) -> dict[str, Any]:
    marked = {key: _mapped(value, put) for key, value in turn.items()}
    if turn["role"] != "assistant" or not isinstance(turn["content"], str):
        return marked
    block, rest = split_reasoning(turn["content"], tokenizer)
    if block:
        begin, end = reasoning_tags(tokenizer)
        before, _, inner = block.removesuffix(end).partition(begin)
        marked["content"] = f"{before}{begin}{put(inner)}{end}{put(rest)}"
    return marked


def _mapped(value: Any, change: Callable[[str], str], levels: int = 0) -> Any:
    """JSON with each string changed, names of entries too. levels: of mappings from the outside in
    which the names that templates read stay.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key if levels > 0 and key in _ENTRIES else _mapped(key, change): _mapped(
                inner, change, levels - 1
            )
            for key, inner in value.items()
        }
    is_list = isinstance(value, list | tuple)
    return [_mapped(inner, change, levels) for inner in value] if is_list else value


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        for part in parts:
            yield from strings_of(part)
