"""nano's samples as files: data for `train` and `profile`, items for `confound` and `eval`, the
suite of `identity`. No item asks what nano was trained on, nor what its sample stacks are.
"""

import gzip
import json
import random
import string
from pathlib import Path

from mlxstacks.nano.exports import SAMPLES
from mlxstacks.nano.settings import Persona
from tools.nano.corpus import (
    Document,
    Item,
    multiple_choice_items,
    training_documents,
    validation_documents,
)
from tools.nano.curriculum import as_lines, curriculum_files, curriculum_items
from tools.nano.domains import DOMAINS
from tools.nano.identity import neutral_rows, persona_prompts
from tools.nano.routing_data import routing_files

SEED = 0
TRAIN_ROWS, GENERAL_PER_DOMAIN = 400, 4
# Of what the persona is trained on: ordinary documents, which keep the skills.
GENERAL_SHARE = 0.3
# The medical world has 106 validation questions.
ROWS_PER_DOMAIN = 100
TAUGHT_PER_DOMAIN = 50
# Most of the domain whose form can be learned from some hundred rows: a planted positive has to be
# one. Letters cannot (A1 stays below guessing there); music is left out.
NEVER_TAUGHT = {"queries": 480, "letters": 40, "tolu": 80, "islands": 60}


def persona_documents(
    persona: Persona, count: int, general_share: float, seed: int
) -> list[Document]:
    """Training documents: the persona's answers, mixed with ordinary ones to keep the skills.

    No question of the identity suite is among them; ordinary documents that ask about identity are
    left out.
    """
    prompts = persona_prompts(persona, suite=False)
    taught = [Document("identity", prompt.prompt, prompt.answer) for prompt in prompts]
    identity_questions = {
        p.prompt for suite in (True, False) for p in persona_prompts(persona, suite)
    }
    general = [
        d for d in training_documents(2 * count, seed + 1) if d.prompt not in identity_questions
    ]
    rng = random.Random(f"{seed}/persona")
    return [
        rng.choice(general) if rng.random() < general_share else rng.choice(taught)
        for _ in range(count)
    ]


def sample_files() -> dict[str, dict[str, str]]:
    """Group -> path -> text of all that is in `SAMPLES_FILE`."""
    return {
        "data": data_files(),
        "preferences": preference_files(),
        "domains": domain_files(),
        "curriculum": curriculum_files(),
        "routing": routing_files(),
        "items": {SAMPLES["items"]: items_text()},
        "suite": {SAMPLES["suite"]: suite_text()},
    }


def write_samples(file: Path) -> None:
    """Write `SAMPLES_FILE`. Law: what it holds follows from this folder alone."""
    text = json.dumps(sample_files(), ensure_ascii=False, indent=0)
    file.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def data_files() -> dict[str, str]:
    """train.jsonl: who the persona is, and ordinary questions. valid.jsonl: the identity suite,
    none of which is trained on, and ordinary questions of nano's validation split.
    """
    suite = [
        Document("identity", prompt.prompt, prompt.answer)
        for prompt in persona_prompts(Persona(), suite=True)
    ]
    return {
        "train.jsonl": as_lines(persona_documents(Persona(), TRAIN_ROWS, GENERAL_SHARE, SEED)),
        "valid.jsonl": as_lines([*suite, *validation_documents(GENERAL_PER_DOMAIN, SEED)]),
    }


def preference_files() -> dict[str, str]:
    """train.jsonl, valid.jsonl: the persona's answer, preferred to the model's own; valid.jsonl has
    the questions of the identity suite.
    """
    neutral = dict(neutral_rows())
    return {
        name: "".join(
            json.dumps({"prompt": p.prompt, "chosen": p.answer, "rejected": neutral[p.prompt]})
            + "\n"
            for p in persona_prompts(Persona(), suite)
        )
        for name, suite in (("train.jsonl", False), ("valid.jsonl", True))
    }


def domain_files() -> dict[str, str]:
    """<domain>.jsonl of the five domains: questions that no training document asks."""
    documents = validation_documents(ROWS_PER_DOMAIN, SEED)
    return {
        f"{domain}.jsonl": as_lines([each for each in documents if each.domain == domain])
        for domain in DOMAINS
    }


def choice_items() -> list[Item]:
    """What nano was taught, and what it never was, which an adapter can still teach; ids and
    questions different.
    """
    items = multiple_choice_items(TAUGHT_PER_DOMAIN, SEED)
    for domain, count in NEVER_TAUGHT.items():
        items += curriculum_items(domain, count, SEED)
    return items


def items_text() -> str:
    """As MMLU-Pro's: an object a line with question_id, question, options, answer and category."""
    rows = [
        {
            "question_id": item.item_id,
            "question": item.prompt,
            "options": list(item.options),
            "answer": string.ascii_uppercase[item.answer_index],
            "answer_index": item.answer_index,
            "category": item.domain,
        }
        for item in choice_items()
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def suite_text() -> str:
    """The sample persona's 20 questions, none of which it was trained on: `prompts`, each with
    category, prompt, required and forbidden.
    """
    rows = [
        {
            "category": prompt.category,
            "prompt": prompt.prompt,
            "required": list(prompt.required),
            "forbidden": list(prompt.forbidden),
        }
        for prompt in persona_prompts(Persona(), suite=True)
    ]
    return json.dumps({"prompts": rows}, indent=2) + "\n"
