"""The real files, where they are beside the repository: every row is an item, and what is odd is
known. Run: pytest tests/studies/benchmarks/test_tasks_real.py
"""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from mlxstacks.data import read_records
from mlxstacks.studies.benchmarks.analysis import GradingTools, grade
from mlxstacks.studies.benchmarks.items import AskedTask, open_task, sample_items
from mlxstacks.studies.benchmarks.tasks import TASKS

DATA = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public data is not here")

ITEMS = {
    "hellaswag": 500, "arc_easy": 500, "arc_challenge": 500, "truthfulqa_mc1": 500,
    "humaneval": 164, "gsm8k": 660, "math500": 500, "aime2024": 30, "medqa": 1273, "medmcqa": 727,
    "mmlu_pro": 7261,
}  # fmt: skip


@cache
def real(name: str) -> AskedTask:
    return open_task(TASKS[name], str(DATA))


@pytest.mark.parametrize("name", ITEMS)
def test_every_row_is_an_item(name: str) -> None:
    data = real(name)
    assert len(data.items) == ITEMS[name]
    assert len({item.item_id for item in data.items}) == ITEMS[name]
    assert all(item.prompt.strip() for item in data.items)
    for item in data.items:
        if data.task.kind == "likelihood":
            assert isinstance(item.gold, int)
            assert 0 <= item.gold < len(item.candidates)
            assert all(len(text.strip()) == len(text) - 1 for text in item.candidates)
    whole = ITEMS[name] == data.task.items
    assert whole == (not any("not comparable" in note for note in data.notes))


def test_what_is_odd_about_them() -> None:
    for name in ITEMS:
        repeats = [note for note in real(name).notes if "word for word" in note]
        expected = ["91 items the same as an earlier one, word for word"] * (name == "mmlu_pro")
        assert repeats == expected
        assert not any("always tie" in note for note in real(name).notes)


def test_where_the_right_answer_stands() -> None:
    """No place holds it much more often than chance; of TruthfulQA the first one least of all."""
    for name in ("hellaswag", "arc_easy", "arc_challenge"):
        places = Counter(item.gold for item in real(name).items)
        assert all(105 <= places[place] <= 145 for place in range(4))
    items = real("truthfulqa_mc1").items
    expected = sum(1 / len(item.candidates) for item in items)
    first = sum(item.gold == 0 for item in items)
    assert abs(first - expected) < 4 * (expected * (1 - expected / len(items))) ** 0.5
    assert sum(item.gold == len(item.candidates) - 1 for item in items) < 0.4 * len(items)
    reference = open_task(TASKS["truthfulqa_mc1"], str(DATA), reference=True).items
    assert all(item.gold == 0 for item in reference)
    assert [item.item_id for item in reference] == [item.item_id for item in items]


def test_the_published_solutions_are_right() -> None:
    """The grader on the data's own solutions, without algebra: it takes all of them."""
    for name, file, key in (
        ("gsm8k", "gsm8k_test.jsonl", "answer"),
        ("math500", "bench_math500.jsonl", "solution"),
    ):
        rows = read_records(DATA / file)
        found = [
            grade(TASKS[name], item, row[key], GradingTools())
            for item, row in zip(real(name).items, rows, strict=True)
        ]
        assert all(one.correct for one in found), name


def test_the_sample_of_mmlu_pro_has_every_subject() -> None:
    items = real("mmlu_pro").items
    drawn = sample_items(items, 200, 0)
    assert len(drawn) == 200
    assert len({item.stratum for item in drawn}) == 14
    assert len({item.stratum for item in sample_items(items, 200, 0, first=True)}) < 14


def test_the_names_of_the_files_are_those_of_the_data() -> None:
    """All bench files but AIME 2025, which is none of the twelve, belong to a task."""
    known = {name for task in TASKS.values() for name in task.files}
    there = {path.name for path in DATA.glob("bench_*.jsonl")}
    assert there - known == {"bench_aime25.jsonl"}
