"""Multiple-choice items: read, checked, sampled over subjects.

A row has a `question`, `options` (two or more texts), `answer` (a letter), `answer_index` where it
is given, a subject (`category` or `subject`), an id (`question_id` or `id`; else its number, from
1): MMLU-Pro's form; and if wanted a `justification` of the answer, which rows to train on carry.
A row that is not an item is an error; nothing is left out silently.
"""

import hashlib
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.data.formats import answer_of, options_of
from mlxstacks.data.settings import MIX, SourceSettings, mix
from mlxstacks.data.sources import open_source
from mlxstacks.errors import InputError, in_lines
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import json_sha256

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_MOST_SHOWN = 8
# Name of the row of totals in every table of subjects.
TOTAL = "all"


@dataclass(frozen=True, slots=True)
class Item:
    """`options[answer_index]` is right; options are lettered from A on. justification: a line on
    why, or nothing.
    """

    item_id: str
    subject: str
    question: str
    options: tuple[str, ...]
    answer_index: int
    justification: str = ""

    @property
    def letters(self) -> str:
        return string.ascii_uppercase[: len(self.options)]

    def as_json(self) -> list[Any]:
        """Items without a justification as ever, so that their hash is the one of any version."""
        given = [self.item_id, self.subject, self.question, list(self.options), self.answer_index]
        return [*given, self.justification] if self.justification else given


def read_items(source: str, subjects: Sequence[str] = ()) -> list[Item]:
    """All items of a file, of a data set in the Hugging Face cache (its test split) or of a mix of
    published ones, in order.

    Raises: InputError listing every row that is no item, ids that occur twice, subjects that no
        item has.
    """
    problems: list[str] = []
    items: list[Item] = []
    for settings in item_sources(source):
        # Rows of a published set may have no subject: then it is the set.
        unsaid = {"category": settings.label} if settings.download else {}
        for number, (where, row) in enumerate(open_source(settings, Path.cwd()).rows, 1):
            if item := _item(where, {"id": str(number)} | unsaid | row, problems):
                items.append(item)
    twice = [name for name, count in Counter(i.item_id for i in items).items() if count > 1]
    if twice:
        problems.append(f"ids that occur twice: {', '.join(twice[:_MOST_SHOWN])}")
    known = sorted({item.subject for item in items})
    unknown = [subject for subject in subjects if subject not in known]
    if unknown and not problems:
        problems.append(f"no item of {', '.join(unknown)}; there are {', '.join(known)}")
    if problems:
        raise InputError(in_lines(f"{source}: not usable:", problems))
    return [item for item in items if not subjects or item.subject in subjects]


def item_sources(source: str) -> tuple[SourceSettings, ...]:
    """Where the items of a run are. Raises: InputError: a mix that there is not."""
    if source.startswith(MIX):
        try:
            return mix(source.removeprefix(MIX))
        except ValueError as error:
            raise InputError(str(error)) from None
    path = user_path(source)
    if not path.exists() and _HUB_ID.fullmatch(source) and not source.endswith((".jsonl", ".json")):
        return (SourceSettings(dataset=source, split="test"),)
    return (SourceSettings(path=str(path), split="test"),)


def _item(where: str, row: Mapping[str, Any], problems: list[str]) -> Item | None:
    """The item of a row; what is wrong with it goes to `problems`."""
    name = row.get("question_id", row.get("id"))
    subject = row.get("category", row.get("subject"))
    question, options, answer = row.get("question"), row.get("options"), row.get("answer")
    wrong = []
    if isinstance(name, bool) or not isinstance(name, int | str) or name == "":
        wrong.append("no question_id")
    if not isinstance(subject, str) or not subject.strip():
        wrong.append("no category")
    elif subject == TOTAL:
        wrong.append(f"category {TOTAL!r} is what tables call the sum of all: give it another name")
    if not isinstance(question, str) or not question.strip():
        wrong.append("no question")
    if isinstance(options, Mapping) or isinstance(answer, int):  # as ARC and MedMCQA have it
        try:
            listed = options_of(options)
            key = answer_of({"answer": answer}, listed)
        except InputError as error:
            wrong.append(str(error))
        else:
            options = list(listed.texts.values())
            answer = string.ascii_uppercase[list(listed.texts).index(key)] if key else None
    texts = list(options) if isinstance(options, list | tuple) else []
    if not 2 <= len(texts) <= len(string.ascii_uppercase) or not all(
        isinstance(text, str) and text for text in texts
    ):
        wrong.append(f"options is {options!r:.60}, need 2 to 26 texts")
    letters = string.ascii_uppercase[: len(texts)]
    index = letters.find(answer) if isinstance(answer, str) and len(answer) == 1 else -1
    if index < 0:
        wrong.append(f"answer is {answer!r:.40}, need a letter of its options")
    elif row.get("answer_index", index) != index:
        wrong.append(f"answer {answer} is option {index}, answer_index {row['answer_index']!r:.40}")
    justification = row.get("justification") or ""
    if not isinstance(justification, str):
        wrong.append(f"justification is {justification!r:.40}, need a text")
    if wrong:
        problems.append(f"{where}: {'; '.join(wrong)}")
        return None
    line = " ".join(str(justification).split())
    return Item(str(name), str(subject), str(question), tuple(texts), index, line)


def items_sha256(items: Iterable[Item]) -> str:
    """Hash of the items' whole contents in their order."""
    return json_sha256([json_sha256(item.as_json()) for item in items])


def by_subject(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Subject -> its items; subjects by name, items in their order."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(item.subject, []).append(item)
    return dict(sorted(groups.items()))


def shuffled(items: Iterable[Item], seed: int, purpose: str) -> list[Item]:
    """By a hash of seed, purpose and id: an item's place among others does not hang on which
    others there are.
    """

    def place(item: Item) -> bytes:
        return hashlib.sha256(f"{seed}/{purpose}/{item.item_id}".encode()).digest()

    return sorted(items, key=place)


def stratified_sample(items: Sequence[Item], count: int | None, seed: int) -> list[Item]:
    """`count` items, each subject in proportion to its share; all of them where there are fewer.

    Laws: subjects differ from their exact share by less than one item; the same seed gives the
    same items, in the order of the source.
    """
    if count is None or count >= len(items):
        return list(items)
    groups = by_subject(items)
    sizes = apportioned({name: len(group) for name, group in groups.items()}, count)
    chosen = {
        item.item_id
        for name, group in groups.items()
        for item in shuffled(group, seed, "sample")[: sizes[name]]
    }
    return [item for item in items if item.item_id in chosen]


def apportioned(counts: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` shared out in proportion to the counts, by largest remainders."""
    whole = sum(counts.values())
    sizes = {name: count * total // whole for name, count in counts.items()}
    by_rest = sorted(counts, key=lambda name: (-(counts[name] * total % whole), name))
    for name in by_rest[: total - sum(sizes.values())]:
        sizes[name] += 1
    return sizes
