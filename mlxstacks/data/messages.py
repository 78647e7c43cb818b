"""Chats as lists of messages: what a record of ours says, in the form that templates take."""

from collections.abc import Mapping
from typing import Any

from mlxstacks.errors import InputError


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
