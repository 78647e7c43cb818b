"""Conversations as data sets write them: `messages` or `conversations`, role or from, parts."""

from collections.abc import Mapping
from typing import Any

from mlxstacks.data.messages import as_messages
from mlxstacks.errors import InputError

CONVERSATION_KEYS = ("messages", "conversations", "conversation")
ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
}


def conversation(record: Mapping[str, Any], keys: tuple[str, ...] = CONVERSATION_KEYS) -> list[Any]:
    """Messages with role (user, assistant, system, ...) and content as text.

    Raises:
        InputError: no list under any of the keys, or a message without role or text.
    """
    key = next((key for key in keys if record.get(key) is not None), None)
    if key is None:
        raise InputError(f"the row has no {' or '.join(keys)}, but the keys {sorted(record)}")
    turns = record[key]
    # A data set column of structs arrives with every key; those that are None say nothing.
    renamed = [_renamed(turn) for turn in turns] if isinstance(turns, list) else turns
    messages = as_messages({"messages": renamed}) if renamed != [] else []
    assert messages is not None  # a record with messages is no text
    return messages


def first_pair(turns: list[dict[str, Any]]) -> tuple[str, str]:
    """The first user turn and the first assistant turn after it; "" for what there is not."""
    asked = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if asked is None:
        return "", ""
    answers = (turn["content"] for turn in turns[asked:] if turn["role"] == "assistant")
    return turns[asked]["content"], next(answers, "")


def _renamed(turn: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    named = {key: value for key, value in turn.items() if value is not None}
    role = named.pop("from", None)
    value = named.pop("value", None)
    role = named.get("role", role)
    if isinstance(role, str):
        named["role"] = ROLES.get(role.strip().lower(), role.strip().lower())
    return {"content": value, **named}
