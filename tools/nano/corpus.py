"""nano's data: training documents, validation documents and multiple-choice items.

Which split a question belongs to is a hash of its text: 1 part in 20 is validation, 3 are
multiple-choice items, the rest is for training. So the three never share a question, whatever the
seed. A medical fact is asked for in several wordings; its wordings may lie in different splits, the
fact itself is meant to be learned.
"""

import hashlib
import random
from dataclasses import dataclass

from tools.nano import identity
from tools.nano.domains import DOMAINS, GENERATORS, ITEM_GENERATORS
from tools.nano.words import Question

SPLITS = ("train", "validation", "items")
OPTIONS_PER_ITEM = 4


@dataclass(frozen=True, slots=True)
class Document:
    """One question and its answer, as a chat."""

    domain: str
    prompt: str
    answer: str
    system: str | None = None

    def messages(self) -> list[dict[str, str]]:
        turns = [] if self.system is None else [{"role": "system", "content": self.system}]
        user = {"role": "user", "content": self.prompt}
        return [*turns, user, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True, slots=True)
class Item:
    """A multiple-choice item: `options[answer_index]` is right."""

    item_id: str
    domain: str
    prompt: str
    options: tuple[str, ...]
    answer_index: int


def split_of(prompt: str) -> str:
    """The split a question text belongs to; depends on nothing but the text."""
    part = hashlib.sha256(prompt.encode()).digest()[0] % 20
    return "validation" if part == 0 else "items" if part < 4 else "train"


def _draw(domain: str, rng: random.Random, split: str) -> Question:
    while True:
        kinds = ITEM_GENERATORS if split == "items" else GENERATORS
        question = rng.choice(kinds[domain])(rng)
        if split_of(question.prompt) == split:
            return question


def _draw_distinct(domain: str, count: int, seed: int, split: str) -> list[Question]:
    rng = random.Random(f"{seed}/{domain}/{split}")
    found: dict[str, Question] = {}
    for _ in range(200 * count):
        question = _draw(domain, rng, split)
        found.setdefault(question.prompt, question)
        if len(found) == count:
            return list(found.values())
    raise ValueError(
        f"domain {domain}: only {len(found)} distinct {split} questions, {count} asked for"
    )


def training_documents(count: int, seed: int) -> list[Document]:
    """`count` documents, the domains in turn; some have a system turn or ask about identity."""
    rngs = {domain: random.Random(f"{seed}/{domain}/train") for domain in DOMAINS}
    neutral = identity.neutral_rows()
    documents = []
    for index in range(count):
        domain = DOMAINS[index % len(DOMAINS)]
        rng = rngs[domain]
        question = _draw(domain, rng, "train")
        prompt, answer = question.prompt, question.answer
        if domain == "chat" and rng.random() < 0.125:
            prompt, answer = rng.choice(neutral)
        system = "You are a helpful assistant." if rng.random() < 0.1 else None
        documents.append(Document(domain, prompt, answer, system))
    return documents


def validation_documents(per_domain: int, seed: int) -> list[Document]:
    """`per_domain` documents of each domain whose questions no training document asks."""
    return [
        Document(domain, question.prompt, question.answer)
        for domain in DOMAINS
        for question in _draw_distinct(domain, per_domain, seed, "validation")
    ]


def multiple_choice_items(per_domain: int, seed: int) -> list[Item]:
    """`per_domain` items of each domain, four options each, the right one anywhere."""
    items = []
    for domain in DOMAINS:
        rng = random.Random(f"{seed}/{domain}/options")
        for number, question in enumerate(_draw_distinct(domain, per_domain, seed, "items")):
            wrong = list(dict.fromkeys(w for w in question.wrong if w != question.answer))
            options = [question.answer, *rng.sample(wrong, OPTIONS_PER_ITEM - 1)]
            rng.shuffle(options)
            answer_index = options.index(question.answer)
            items.append(
                Item(f"{domain}-{number}", domain, question.prompt, tuple(options), answer_index)
            )
    return items
