"""Records cleaned: markers out, answers cut, and why a record is not used.

Nothing else of a text changes: indentation, tables, line ends and blank space at both ends stay.
"""

import re
from collections.abc import Collection
from typing import Any

from mlxstacks.data.examples import turns_of
from mlxstacks.data.formats import Format
from mlxstacks.data.markers import strip_markers
from mlxstacks.data.settings import DomainDataSettings

# One of these occurs in nearly every piece of program code, and rarely in other text.
CODE_MARKS = (
    "```",
    "def ",
    "import ",
    "#include",
    "return ",
    "function ",
    "public class",
    "console.log",
    "std::",
    "SELECT ",
)


def strip_record(record: dict[str, Any], tokens: Collection[str] = ()) -> dict[str, Any]:
    """The record with markers and `tokens` taken out of its texts."""
    if "messages" in record:
        turns = [
            {**turn, "content": strip_markers(turn["content"], tokens)}
            for turn in record["messages"]
        ]
        return {**record, "messages": turns}
    return {key: strip_markers(value, tokens) for key, value in record.items()}


# Blank space inside a text that only lays it out: counted as one space, or as two line breaks.
_LAYOUT = re.compile(r"(?:\r?\n){3,}|\r\n|(?<=\S)[ \t]{2,}")


def counted_length(text: str) -> int:
    """Characters of a text without its layout: blank space at both ends is none, a run of blanks
    inside a line one, line breaks in a row two at most.

    Limits count so, because row ids do not depend on layout either.
    """
    body = text.strip()
    return len(body) - sum(map(_uncounted, _LAYOUT.finditer(body)))


def _uncounted(match: re.Match[str]) -> int:
    return len(match.group()) - (min(match.group().count("\n"), 2) or 1)


def cut_answer(record: dict[str, Any], characters: int | None) -> tuple[dict[str, Any], bool]:
    """The record with at most so many counted characters of answer, and whether it had more."""
    answer = record.get("answer", "")
    # Only a text with more characters can have more that count.
    if characters is None or len(answer) <= characters or counted_length(answer) <= characters:
        return record, False
    body = answer.lstrip()
    end = characters
    for match in _LAYOUT.finditer(body):
        if match.start() >= end:
            break
        end += _uncounted(match)
    return {**record, "answer": answer[: len(answer) - len(body) + end].rstrip()}, True


def reason_to_drop(
    record: dict[str, Any], form: Format, settings: DomainDataSettings
) -> str | None:
    """Why a cleaned record is not used, as reports count it; None for one that is."""
    if "messages" in record:
        return None if says_something(record) else "no_answer"
    least = 1 if form.own else max(1, settings.minimum_characters)
    if "text" in record:
        return None if counted_length(record["text"]) >= least else "text_too_short"
    for key, shortest in (("prompt", least), ("answer", 1 if form.short_answers else least)):
        length = counted_length(record[key])
        if length < shortest:
            return f"{key}_too_short" if length else f"no_{key}"
    return None


def says_something(record: dict[str, Any]) -> bool:
    """Whether there is text, or an answer, that a model could learn."""
    if "messages" not in record:
        return bool(record.get("answer", record.get("text", "")).strip())
    answers = (turn for turn in record["messages"] if turn["role"] == "assistant")
    return any(turn["content"].strip() or turn.get("tool_calls") for turn in answers)


def holds_code(record: dict[str, Any]) -> bool:
    """Whether one of the ten code marks occurs in the record's texts."""
    text = whole_text(record)
    return any(mark in text for mark in CODE_MARKS)


def whole_text(record: dict[str, Any]) -> str:
    """All that a record says, a line for each turn."""
    turns = turns_of(record)
    return record["text"] if turns is None else "\n".join(turn["content"] for turn in turns)
