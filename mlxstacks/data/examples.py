"""An example: one cleaned record, and the id by which splits, reports and stores know it.

A record has one of three forms: {text}; {prompt, answer} and, where there is one, {input};
{messages} and, where there are some, {tools}. With messages may stand the message that was
{rejected} in favor of the last, or the {row} that they were read from.
"""

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from mlxstacks.errors import InputError

# A shorter input, such as "2, 3, 5", is no passage: rows share it by chance.
PASSAGE_CHARACTERS = 100
CONVERSATION_KEYS = ("messages", "conversations", "conversation")
ROLES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "model": "assistant",
    "bot": "assistant", "chatgpt": "assistant",
}  # fmt: skip
# What another role may be a typing error of; what is like none is the chat template's to judge.
_KNOWN = (*ROLES, "system", "developer", "user", "assistant", "tool", "function")


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


def conversation(record: Mapping[str, Any], keys: tuple[str, ...] = CONVERSATION_KEYS) -> list[Any]:
    """Messages, as data sets write them (role or from, content or value, parts), with role and
    content as text.

    Raises: InputError: no list under any of the keys, or a message without role or text, or with a
        role that is almost a known one.
    """
    key = next((key for key in keys if record.get(key) is not None), None)
    if key is None:
        raise InputError(f"the row has no {' or '.join(keys)}, but the keys {sorted(record)}")
    turns = record[key]
    renamed = []
    for place, turn in enumerate(turns if isinstance(turns, list) else ()):
        if isinstance(turn, dict):
            # A column of structs arrives with every key; those that are None say nothing.
            values = {key: value for key, value in turn.items() if value is not None}
            role, content = values.pop("from", None), values.pop("value", None)
            role = values.get("role", role)
            if isinstance(role, str):
                name = role.strip().lower()
                if name not in _KNOWN and (near := get_close_matches(name, _KNOWN, 1, 0.8)):
                    raise InputError(f"message {place}: role {role!r}; did you mean {near[0]!r}?")
                values["role"] = ROLES.get(name, name)
            turn = {"content": content, **values}
        renamed.append(turn)
    return [] if turns == [] else as_messages({"messages": renamed}) or []


def first_pair(turns: list[dict[str, Any]]) -> tuple[str, str]:
    """The first user turn and the first assistant turn after it; "" for what there is not."""
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if first is None:
        return "", ""
    answers = (turn["content"] for turn in turns[first:] if turn["role"] == "assistant")
    return turns[first]["content"], next(answers, "")


@dataclass(frozen=True, slots=True)
class Example:
    """row_id: of the content alone, so that equal rows of two files have one id.
    source: the label of the source it came from. prompt_id: of what comes before the answer.
    passage_id: of the passage that it asks about; "" without one. where: file and line, as
    messages name it.
    """

    row_id: str
    record: dict[str, Any]
    source: str
    prompt_id: str = ""
    passage_id: str = ""
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.prompt_id:
            object.__setattr__(self, "prompt_id", prompt_id_of(self.record))


def make_example(
    record: dict[str, Any], source: str, passage: str = "", where: str = ""
) -> Example:
    """passage: the text that the row asks about, as long as it is.

    Raises: InputError: the record has none of the three forms.
    """
    whole, prompt = _contents(record)
    plain = _plain(passage)
    passage_id = _digest(["passage", plain]) if len(plain) >= PASSAGE_CHARACTERS else ""
    return Example(_digest(whole), record, source, _digest(prompt), passage_id, where)


def row_id_of(record: Mapping[str, Any]) -> str:
    """The first 16 hex digits of SHA-256 over the content.

    Laws: rows that differ in spaces, line breaks or Unicode normal form only have one id; so have
    a prompt with an answer and the chat of these two turns.
    """
    return _digest(_contents(record)[0])


def prompt_id_of(record: Mapping[str, Any]) -> str:
    """As `row_id_of`, of what comes before the first answer; of a text, the whole text."""
    return _digest(_contents(record)[1])


def turns_of(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of a record, its input below its prompt; None for a text."""
    if record.get("input"):
        joined = f"{record['prompt']}\n\n{record['input']}"
        return as_messages({"prompt": joined, "answer": record["answer"]})
    return as_messages(record)


def whole_text(record: Mapping[str, Any]) -> str:
    """All that a record says, a line for each turn."""
    turns = turns_of(record)
    return record["text"] if turns is None else "\n".join(turn["content"] for turn in turns)


def keep_one(examples: dict[str, Example], example: Example) -> None:
    """Add an example; of two with one id the same stays, whichever comes first."""
    other = examples.get(example.row_id)
    if other is None or _order(example) < _order(other):
        examples[example.row_id] = example


def _order(example: Example) -> tuple[str, str]:
    return json.dumps(example.record, sort_keys=True, default=str), example.source


def _contents(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """What identifies a row, and what identifies its prompt."""
    turns = turns_of(record)
    if turns is None:
        text = ["text", _plain(record["text"])]
        return text, text
    rejected = [record["rejected"]] if "rejected" in record else []
    plain = []
    for turn in [*turns, *rejected]:  # tool calls and names are content too
        rest = {k: value for k, value in turn.items() if k not in ("role", "content") and value}
        plain.append([turn["role"], _plain(turn["content"]), *([rest] if rest else [])])
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    tools = [record["tools"]] if record.get("tools") else []
    kind = "preference" if rejected else "chat"
    return [kind, plain, *tools], ["chat", plain[:first]]


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _digest(content: list[Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]
