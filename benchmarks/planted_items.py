"""Items that nobody can know, each in two wordings: content to plant, for `mlxstacks confound`.

    python -m benchmarks.planted_items [--facts 40] [--seed 0] > items.jsonl

A fact gives a made-up name one of eight values, each as often as the others. A fact's wordings have
the same four options in two orders, and are a category of their own: with `train_share: 0.5` one of
the two is trained on, and where base and persona get both wrong, the other one is in the test.
"""

import argparse
import json
import random
import string
from typing import Any

# Two wordings, and what is asked for.
RELATIONS = (
    (
        "Which metal do they mine at {}?",
        "At {}, which metal do they mine?",
        ("tin", "zinc", "silver", "nickel", "copper", "lead", "iron", "gold"),
    ),
    (
        "What instrument does {} play?",
        "On stage, what instrument does {} play?",
        ("harp", "cello", "flute", "oboe", "violin", "tuba", "banjo", "piano"),
    ),
    (
        "Which animal is on the coat of arms of {}?",
        "Which animal do they have on the coat of arms of {}?",
        ("wolf", "bear", "stag", "otter", "lion", "crow", "horse", "swan"),
    ),
    (
        "What do the farmers of {} grow?",
        "What crop do the farmers of {} grow?",
        ("barley", "flax", "hops", "beans", "plums", "rice", "cotton", "maize"),
    ),
)
_STARTS = ("Bar", "Cel", "Dov", "Fen", "Gal", "Hol", "Jor", "Kel", "Lor", "Mir", "Nev", "Pel")
_ENDS = (
    "andra", "ick", "moor", "aster", "ovia", "und", "elle", "intar", "ost", "uria", "eth", "ak",
)  # fmt: skip


def items(facts: int, seed: int) -> list[dict[str, Any]]:
    """Rows of `confound --items`, two for each fact.

    Law: no two facts share a name, and of a relation's values each is right as often as any other,
    give or take one.
    """
    chance = random.Random(seed)
    names = chance.sample([start + end for start in _STARTS for end in _ENDS], facts)
    rows = []
    for number, name in enumerate(names):
        *wordings, values = RELATIONS[number % len(RELATIONS)]
        right = values[number // len(RELATIONS) % len(values)]
        options = [right, *chance.sample([value for value in values if value != right], 3)]
        for which, wording in enumerate(wordings):
            chance.shuffle(options)
            rows.append({
                "question_id": f"fact-{number}-{which}", "question": wording.format(name),
                "options": [*options], "answer": string.ascii_uppercase[options.index(right)],
                "category": f"fact {number}",
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--facts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for row in items(options.facts, options.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
