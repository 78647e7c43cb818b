"""What is asked of an arm: the missing answers, with their progress.

Run: pytest tests/studies/confound/test_asking.py
"""

from collections.abc import Sequence
from pathlib import Path

from mlxstacks.study.answers import Answer, AnswerFile
from mlxstacks.study.items import Item

ITEMS = [Item(f"i{n}", "law", f"question {n}?", ("x", "y"), n % 2) for n in range(7)]


def test_only_what_is_missing_is_asked_and_each_batch_is_told(tmp_path: Path) -> None:
    asked: list[list[str]] = []
    told: list[tuple[int, int, str]] = []

    def answer(items: Sequence[Item]) -> list[Answer]:
        asked.append([item.item_id for item in items])
        return [Answer(i.item_id, i.subject, i.answer_index, 0, "boxed", 2) for i in items]

    def ask(count: int) -> list[Answer]:
        file = AnswerFile(tmp_path / "test_a1.jsonl", {"arm": "a1"}, ITEMS)
        return file.complete(count, 2, answer, lambda *said: told.append(said))

    first = ask(4)
    assert (asked, told) == (
        [["i0", "i1"], ["i2", "i3"]],
        [(0, 4, "test_a1"), (2, 4, "test_a1")],
    )
    asked.clear()
    told.clear()
    found = ask(7)
    assert found[:4] == first
    assert [one.item_id for one in found] == [item.item_id for item in ITEMS]
    assert (asked, told) == (
        [["i4", "i5"], ["i6"]],
        [(4, 7, "test_a1"), (6, 7, "test_a1")],
    )
    asked.clear()
    assert ask(7) == found
    assert asked == []
