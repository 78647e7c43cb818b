"""nano's curriculum: rows to train stacks on, and items to score what they learned.

A question's text alone decides by its hash whether it may be a row or an item, so the two never
meet, whatever the seeds. Which rows are kept for validation is decided where they are read, by
content again. All rows of a domain are different questions.
"""

import hashlib
import json
import random
from collections.abc import Collection, Iterable
from functools import cache

from mlxstacks.errors import InputError
from mlxstacks.nano.settings import HELD_OUT, HELD_OUT_DIRECTORY
from tools.nano.corpus import OPTIONS_PER_ITEM, Document, Item
from tools.nano.curriculum_domains import GENERATORS
from tools.nano.curriculum_settings import DOMAINS, ROWS, SEED
from tools.nano.words import Question

# Of 20 questions so many may be items.
ITEM_PARTS = 4
# So many draws without a new question: there is none left.
GIVE_UP = 10_000


def is_item(prompt: str) -> bool:
    """Whether a question is for items only; depends on nothing but its text."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 20 < ITEM_PARTS


def curriculum_documents(domain: str, count: int = ROWS, seed: int = SEED) -> list[Document]:
    """`count` different questions with their answers, none of which is ever an item.

    Raises: InputError for an unknown domain, or more rows than it has questions.
    """
    questions = _draw(domain, count, seed, items=False)
    return [Document(domain, question.prompt, question.answer) for question in questions]


def curriculum_items(domain: str, count: int, seed: int = SEED) -> list[Item]:
    """`count` multiple-choice items of four options, the right one anywhere.

    The right option also is the answer to expect of a greedy reply. Raises: as above.
    """
    chance = random.Random(f"{seed}/{domain}/options")
    items = []
    for number, question in enumerate(_draw(domain, count, seed, items=True)):
        wrong = list(dict.fromkeys(w for w in question.wrong if w != question.answer))
        options = [question.answer, *chance.sample(wrong, OPTIONS_PER_ITEM - 1)]
        chance.shuffle(options)
        place = options.index(question.answer)
        items.append(Item(f"{domain}-{number}", domain, question.prompt, tuple(options), place))
    return items


@cache  # the rows of a domain are asked for again by its routing data and its samples
def _draw(domain: str, count: int, seed: int, items: bool) -> tuple[Question, ...]:
    what = "items" if items else "rows"
    found = different_questions(domain, count, f"{seed}/{domain}/{what}", items=items)
    if len(found) < count:
        raise InputError(f"{domain}: {count} {what} asked for, it has {len(found)}")
    return tuple(found)


def different_questions(
    domain: str, count: int, chance: str, *, items: bool, without: Collection[str] = ()
) -> list[Question]:
    """`count` questions that differ, or all there are where there are fewer.

    chance: seed of the draws. items: of those that are for items, or of the others. without: texts
    of questions that are not wanted. Raises: InputError for an unknown domain.
    """
    if domain not in GENERATORS:
        raise InputError(f"no curriculum domain {domain!r}; there are {', '.join(GENERATORS)}")
    rng = random.Random(chance)
    found: dict[str, Question] = {}
    since = 0
    while len(found) < count and since < GIVE_UP:
        question = GENERATORS[domain](rng)
        since += 1
        text = question.prompt
        if is_item(text) == items and text not in without and text not in found:
            found[text], since = question, 0
    return list(found.values())


def curriculum_files(count: int = ROWS, seed: int = SEED) -> dict[str, str]:
    """Relative path -> text of every file: one object with `messages` a line.

    The held-out domain lies in a directory of its own: a run over all files here leaves it out.
    """
    paths = {domain: f"{domain}.jsonl" for domain in DOMAINS}
    paths[HELD_OUT] = f"{HELD_OUT_DIRECTORY}/{HELD_OUT}.jsonl"
    return {
        path: as_lines(curriculum_documents(domain, count, seed)) for domain, path in paths.items()
    }


def as_lines(documents: Iterable[Document]) -> str:
    """One object with `messages` a line."""
    return "".join(json.dumps({"messages": each.messages()}) + "\n" for each in documents)
