"""nano's routing data: prompts to find out on which stacks help, and to train a router with.

No question is one that a stack was trained on or validated with, and none is an item. A prompt of
two domains asks two such questions, in either order. `others` are questions of nano's own domains,
which the base knows and no stack should touch. The held-out domain is nowhere in it.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from tools.nano.corpus import Document, training_documents
from tools.nano.curriculum import as_lines, curriculum_documents, different_questions
from tools.nano.curriculum_settings import DOMAINS, SEED
from tools.nano.domains import DOMAINS as OWN_DOMAINS

OTHERS = "others"
SINGLE_ROWS, MIXED_ROWS, OTHER_ROWS = 240, 24, 300
# islands has 69 questions that are neither rows nor items. So that there are more prompts, and none
# is known by its first word, each question comes with one of these around it.
OPENINGS = ("{q}", "{q}", "Hello! {q}", "Please help me. {q}", "{q} Thank you.", "I ask you: {q}")


def routing_documents(domain: str, count: int = SINGLE_ROWS, seed: int = SEED) -> list[Document]:
    """`count` prompts, each with a question of a curriculum domain that is no row and no item."""
    rows = {document.prompt for document in curriculum_documents(domain)}
    chance = f"{seed}/{domain}/routing"
    questions = different_questions(domain, count, chance, items=False, without=rows)
    rng = random.Random(chance)
    found: dict[str, Document] = {}
    while len(found) < count:
        question = rng.choice(questions)
        prompt = rng.choice(OPENINGS).format(q=question.prompt)
        found.setdefault(prompt, Document(domain, prompt, question.answer))
    return list(found.values())


def mixed_documents(
    first: Sequence[Document], second: Sequence[Document], count: int = MIXED_ROWS, seed: int = SEED
) -> list[Document]:
    """`count` prompts that ask a question of either domain, with both answers in the same order."""
    name = f"{first[0].domain}+{second[0].domain}"
    rng = random.Random(f"{seed}/{name}/routing")
    found: dict[str, Document] = {}
    while len(found) < count:
        pair = [rng.choice(first), rng.choice(second)]
        rng.shuffle(pair)
        prompt, answer = " ".join(d.prompt for d in pair), " ".join(d.answer for d in pair)
        found.setdefault(prompt, Document(name, prompt, answer))
    return list(found.values())


def other_documents(count: int = OTHER_ROWS, seed: int = SEED) -> list[Document]:
    """`count` prompts with questions of nano's own domains in turn, of the split that the base was
    trained on.

    The seed is another than that of the base's documents: few of them are the very same.
    """
    documents = training_documents(2 * count, seed + 2)
    plain = {document.prompt: document for document in documents if document.system is None}
    by_domain = [[d for d in plain.values() if d.domain == name] for name in OWN_DOMAINS]
    in_turn = (d for several in itertools.zip_longest(*by_domain) for d in several if d)
    rng = random.Random(f"{seed}/{OTHERS}/routing")
    return [
        replace(document, prompt=rng.choice(OPENINGS).format(q=document.prompt))
        for document in itertools.islice(in_turn, count)
    ]


def routing_files(seed: int = SEED, domains: Sequence[str] = DOMAINS) -> dict[str, str]:
    """Name -> text of every file: DOMAIN.jsonl, FIRST+SECOND.jsonl, others.jsonl."""
    single = {domain: routing_documents(domain, seed=seed) for domain in domains}
    mixed = [
        mixed_documents(*pair, seed=seed) for pair in itertools.combinations(single.values(), 2)
    ]
    files = single | {several[0].domain: several for several in mixed}
    files[OTHERS] = other_documents(seed=seed)
    return {f"{name}.jsonl": as_lines(documents) for name, documents in files.items()}
