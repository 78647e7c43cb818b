"""nano's curriculum: rows to train stacks on, and items to score what they learned.

A question's text alone decides by its hash whether it may be a row or an item, so the two never
meet, whatever the seeds. Which rows are kept for validation is decided where they are read, by
content again. All rows of a domain are different questions.
"""

import hashlib
import json
import random
from pathlib import Path

from mlxstacks.errors import InputError
from mlxstacks.nano.corpus import OPTIONS_PER_ITEM, Document, Item
from mlxstacks.nano.curriculum_domains import GENERATORS
from mlxstacks.nano.curriculum_settings import DOMAINS, HELD_OUT, ROWS, SEED
from mlxstacks.nano.words import Question

# Of 20 questions so many may be items.
ITEM_PARTS = 4
HELD_OUT_DIRECTORY = "held_out"
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


def _draw(domain: str, count: int, seed: int, items: bool) -> list[Question]:
    if domain not in GENERATORS:
        raise InputError(f"no curriculum domain {domain!r}; there are {', '.join(GENERATORS)}")
    rng = random.Random(f"{seed}/{domain}/{'items' if items else 'rows'}")
    found: dict[str, Question] = {}
    since = 0
    while len(found) < count:
        question = GENERATORS[domain](rng)
        since += 1
        if is_item(question.prompt) == items and question.prompt not in found:
            found[question.prompt], since = question, 0
        if since == GIVE_UP:
            what = "items" if items else "rows"
            raise InputError(f"{domain}: {count} {what} asked for, it has {len(found)}")
    return list(found.values())


def curriculum_files(count: int = ROWS, seed: int = SEED) -> dict[str, str]:
    """Relative path -> text of every file: one object with `messages` a line.

    The held-out domain lies in a directory of its own: a run over all files here leaves it out.
    """
    paths = {domain: f"{domain}.jsonl" for domain in DOMAINS}
    paths[HELD_OUT] = f"{HELD_OUT_DIRECTORY}/{HELD_OUT}.jsonl"
    return {
        path: "".join(
            json.dumps({"messages": document.messages()}) + "\n"
            for document in curriculum_documents(domain, count, seed)
        )
        for domain, path in paths.items()
    }


def write_curriculum(directory: Path, files: dict[str, str]) -> None:
    """Write what `curriculum_files` gives."""
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text, encoding="utf-8")
