"""nano's items as a file in MMLU-Pro's form: what it was taught, and what it never was.

The second half, the curriculum's domains, is what an adapter can still teach: an experiment on
items that the base gets wrong needs some of which it knows nothing. No item asks a question that
nano was trained on, nor one that its sample stacks are.
"""

import json
import string

from mlxstacks.nano.corpus import Item, multiple_choice_items
from mlxstacks.nano.curriculum import curriculum_items

FILE = "items.jsonl"
SEED = 0
TAUGHT_PER_DOMAIN = 50
# Most of the domain whose form can be learned from some hundred rows: a planted positive has to be
# one. Letters cannot (A1 stays below guessing there); music is left out.
NEVER_TAUGHT = {"queries": 480, "letters": 40, "tolu": 80, "islands": 60}


def choice_items() -> list[Item]:
    """All of them, ids and questions different."""
    items = multiple_choice_items(TAUGHT_PER_DOMAIN, SEED)
    for domain, count in NEVER_TAUGHT.items():
        items += curriculum_items(domain, count, SEED)
    return items


def items_text() -> str:
    """The file: one object a line with question_id, question, options, answer and category."""
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
