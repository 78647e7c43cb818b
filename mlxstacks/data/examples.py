"""An example: one cleaned record, and the id by which splits, reports and stores know it.

A record has one of three forms: {text}; {prompt, answer} and, where there is one, {input};
{messages} and, where there are some, {tools}.
"""

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxstacks.data.messages import as_messages

# A shorter input, such as "2, 3, 5", is no passage: rows share it by chance.
PASSAGE_CHARACTERS = 100


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
    whole, before = _contents(record)
    plain = _plain(passage)
    passage_id = _digest(["passage", plain]) if len(plain) >= PASSAGE_CHARACTERS else ""
    return Example(_digest(whole), record, source, _digest(before), passage_id, where)


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


def _contents(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """What identifies a row, and what identifies its prompt."""
    turns = turns_of(record)
    if turns is None:
        text = ["text", _plain(record["text"])]
        return text, text
    plain = [_turn(turn) for turn in turns]
    first = next((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), len(turns))
    tools = [record["tools"]] if record.get("tools") else []
    return ["chat", plain, *tools], ["chat", plain[:first]]


def _turn(turn: Mapping[str, Any]) -> list[Any]:
    # Tool calls and names are content too; what is left are the role and the text.
    rest = {key: value for key, value in turn.items() if key not in ("role", "content") and value}
    return [turn["role"], _plain(turn["content"]), *([rest] if rest else [])]


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


_canonical = json.JSONEncoder(sort_keys=True, default=str).encode


def _digest(content: list[Any]) -> str:
    return hashlib.sha256(_canonical(content).encode("ascii")).hexdigest()[:16]
