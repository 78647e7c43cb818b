"""Planted content: of every fact one wording is trained on and the other one in the test.

Run: pytest tests/studies/confound/test_planted_items.py
"""

import json
from collections import Counter
from pathlib import Path

from benchmarks.planted_items import RELATIONS, items
from mlxstacks.arms.set_g import split
from mlxstacks.study.items import read_items


def test_each_test_item_has_its_twin_in_training(tmp_path: Path) -> None:
    file = tmp_path / "planted.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in items(64, seed=0)))
    every = read_items(str(file))
    wrong = [item for number, item in enumerate(every) if number % 5]  # of Set G, some lack a twin
    train, test = split(wrong, 0.5, seed=0)
    taught = {item.subject: item for item in train}
    assert len(test) > 30
    for item in test:
        twin = taught[item.subject]
        assert twin.question != item.question
        assert twin.options[twin.answer_index] == item.options[item.answer_index]


def test_no_answer_is_likelier_than_another() -> None:
    rows = items(64, seed=0)[::2]
    right = Counter(row["options"]["ABCD".index(row["answer"])] for row in rows)
    assert len(right) == sum(len(relation[2]) for relation in RELATIONS)
    assert set(right.values()) == {2}
