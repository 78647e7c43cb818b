"""Answer options of multiple-choice rows, and which of them is right."""

import string
from collections.abc import Mapping
from typing import Any

from mlxstacks.errors import InputError

ANSWER_KEYS = ("answer_idx", "answer_index", "answer")


def options_of(value: Any) -> dict[str, str]:
    """Letter -> text, from {letter: text}, [texts] or [{key, value}].

    Raises: InputError: anything else.
    """
    if isinstance(value, Mapping):
        found = {str(key): text for key, text in value.items() if text is not None}
    elif isinstance(value, list) and value and all(isinstance(o, Mapping) for o in value):
        found = {str(o.get("key")): o.get("value") for o in value}
    elif isinstance(value, list) and len(value) <= len(string.ascii_uppercase):
        found = dict(zip(string.ascii_uppercase, value, strict=False))
    else:
        raise InputError(f"options is {type(value).__name__}, must be letters with texts or a list")
    if not found or not all(isinstance(text, str | int | float) for text in found.values()):
        raise InputError("options must hold at least one text, and nothing but texts")
    return {letter: str(text) for letter, text in found.items()}


def listed(options: Mapping[str, str]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in options.items())


def answer_of(record: Mapping[str, Any], options: Mapping[str, str]) -> str | None:
    """The letter of the right option, from a letter, a place counted from 0, or the option's text;
    None where none of the answer keys names an option.
    """
    for key in ANSWER_KEYS:
        value = record.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(options):
            return list(options)[value]
        if isinstance(value, str):
            letter = value.strip().strip("().").upper()
            by_letter = next((name for name in options if name.upper() == letter), None)
            same = (name for name, text in options.items() if text.strip() == value.strip())
            found = by_letter or next(same, None)
            if found:
                return found
    return None
