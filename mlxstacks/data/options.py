"""Answer options of multiple-choice rows, and which of them is right."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxstacks.errors import InputError

OPTION_KEYS = ("options", "choices")
# Names for the key of the right option; the second row only where none of the first is there.
ANSWER_KEYS = (("answer_idx", "answer_index", "answerKey", "answer"), ("gold", "label"))
# What test sets without answers have in their place.
_NO_ANSWER = (None, "", -1)


@dataclass(frozen=True, slots=True)
class Options:
    """texts: key -> text, in order. lettered: the row had no keys, so these are A, B, C, ..."""

    texts: dict[str, str]
    lettered: bool

    def listed(self) -> str:
        return "\n".join(f"{key}. {text}" for key, text in self.texts.items())


def options_of(value: Any) -> Options:
    """From {key: text}, [texts], [{key or label, value or text}] or {text: [...], label: [...]}.

    Raises: InputError: anything else, an option that is no text, or a key that occurs twice.
    """
    keys: list[Any] = list(string.ascii_uppercase)
    lettered = False
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        keys, texts = value.get("label") or [], value["text"]
    elif isinstance(value, Mapping):
        # A column of structs has the keys of every row, without a text where a row has fewer.
        keys = [key for key, text in value.items() if text is not None]
        texts = [value[key] for key in keys]
    elif isinstance(value, list) and value and all(isinstance(o, Mapping) for o in value):
        keys = [o.get("key", o.get("label")) for o in value]
        texts = [o.get("value", o.get("text")) for o in value]
    elif isinstance(value, list) and len(value) <= len(keys):
        lettered, texts = True, value
        keys = keys[: len(value)]
    else:
        raise InputError(f"options is {type(value).__name__}, must be letters with texts or a list")
    if not texts or not all(isinstance(text, str | int | float) for text in texts):
        raise InputError("options must hold at least one text, and nothing but texts")
    keys = [str(key).strip() for key in keys]
    if len(keys) != len(texts) or len({key.upper() for key in keys}) < len(texts):
        raise InputError(f"options has {len(texts)} texts and the keys {keys}: each needs its own")
    return Options({key: str(text) for key, text in zip(keys, texts, strict=True)}, lettered)


def answer_of(record: Mapping[str, Any], options: Options) -> str | None:
    """The key of the right option; None where no answer key names one.

    An answer is a key, the text of an option or, as a number where no key is one, a place counted
    from 0. Keys that the row has win over places and texts.

    Raises: InputError: an answer that can mean two options, answers that disagree, or a number that
        names none.
    """
    given: dict[str, tuple[set[str], set[str]]] = {}
    for names in ANSWER_KEYS:
        values = {name: record[name] for name in names if record.get(name) not in _NO_ANSWER}
        given = {name: _named(name, value, options) for name, value in values.items()}
        if given:
            break
    named = [(keys, keys | texts) for keys, texts in given.values() if keys | texts]
    if not named:
        return None
    right = set.intersection(*(either for _, either in named))
    if len(right) > 1 and not options.lettered:
        right = right.intersection(*(keys for keys, _ in named if keys))
    if len(right) != 1:
        shown = ", ".join(f"{name} {record[name]!r}" for name in given)
        both = " and ".join(sorted({key for _, either in named for key in either}))
        raise InputError(f"{shown} can mean the options {both}; say which with one key of them")
    return right.pop()


def _named(name: str, value: Any, options: Options) -> tuple[set[str], set[str]]:
    """The options that one answer names by their key or place, and by their text."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{name} is {type(value).__name__}, must be a key, a text or a place")
    plain = str(value).strip()
    by_text = {key for key, text in options.texts.items() if text.strip() == plain}
    by_key = {key for key in options.texts if key.upper() == plain.strip("().").upper()}
    keys_are_numbers = any(key.isdecimal() for key in options.texts)
    if isinstance(value, int) and not keys_are_numbers and 0 <= value < len(options.texts):
        return {list(options.texts)[value]}, set()
    if not by_key | by_text and (isinstance(value, int) or plain.isdecimal()):
        raise InputError(
            f"{name} {value!r} is no key, no place counted from 0 and no text of the options "
            f"{', '.join(options.texts)}; give the key"
        )
    return by_key, by_text
