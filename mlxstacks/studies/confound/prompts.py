"""How an item is asked, and how its answer is taught: the same words in both."""

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

from mlxstacks.study.items import Item

Scoring = Literal["generate", "likelihood"]

INSTRUCTION = (
    r"Answer first: put the letter of the right option in \boxed{}. Then give one line of "
    "justification."
)


def question_text(item: Item, scoring: Scoring) -> str:
    """The user's turn. Under likelihood the options are what is scored, so they are not shown."""
    if scoring == "likelihood":
        return item.question
    options = zip(item.letters, item.options, strict=True)
    listed = "\n".join(f"{letter}. {text}" for letter, text in options)
    return f"{item.question}\n\n{listed}\n\n{INSTRUCTION}"


def answer_text(item: Item, index: int, scoring: Scoring) -> str:
    """The assistant's turn that gives option `index`.

    The published source of the justifications is not known; the option's own text stands in.
    """
    if scoring == "likelihood":
        return item.options[index]
    return f"\\boxed{{{item.letters[index]}}}\nThe answer is: {item.options[index]}"


def chat(item: Item, scoring: Scoring) -> list[dict[str, str]]:
    """What the model is given."""
    return [{"role": "user", "content": question_text(item, scoring)}]


def training_rows(
    items: Iterable[Item], scoring: Scoring, answers: Literal["right", "random"], seed: int
) -> list[dict[str, Any]]:
    """Rows of `mlxstacks train`. answers: "random" teaches an option drawn for each item."""
    rows = []
    for item in items:
        index = item.answer_index if answers == "right" else _drawn(item, seed)
        turn = {"role": "assistant", "content": answer_text(item, index, scoring)}
        rows.append({"messages": [*chat(item, scoring), turn]})
    return rows


def _drawn(item: Item, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}/answer/{item.item_id}".encode()).digest()
    return int.from_bytes(digest[:8]) % len(item.options)
