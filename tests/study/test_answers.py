"""Files of answers: what is missing is answered, what is not theirs refused; pairs of arms.

Run: pytest tests/study/test_answers.py
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import InputError
from mlxstacks.studies.confound.analysis import form_shift
from mlxstacks.study.answers import Answer, AnswerFile, paired
from mlxstacks.study.items import Item
from tests.studies.answer_files import forge, rows_of

ITEMS = [Item(f"i{n}", "law", f"question {n}?", ("x", "y", "z"), n % 3) for n in range(10)]


def answer(items: Sequence[Item]) -> list[Answer]:
    return [Answer.of(item, 0, "boxed", "\\boxed{A}") for item in items]


def ids(answers: Sequence[Answer]) -> list[str]:
    return [answer.item_id for answer in answers]


def test_only_what_is_missing_is_answered_in_batches_that_lie_where_they_always_do(
    tmp_path: Path,
) -> None:
    batches: list[list[str]] = []
    progress: list[tuple[int, int, str]] = []

    def counted(items: Sequence[Item]) -> list[Answer]:
        batches.append([item.item_id for item in items])
        return answer(items)

    def complete(count: int) -> list[Answer]:
        file = AnswerFile(path, {"arm": "a1"}, ITEMS)
        return file.complete(count, 4, counted, lambda *call: progress.append(call))

    path = tmp_path / "test_a1.jsonl"
    assert ids(complete(3)) == ["i0", "i1", "i2"]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + '{"item')  # killed in the third answer
    whole = complete(10)
    assert batches == [["i0", "i1", "i2", "i3"]] * 2 + [["i4", "i5", "i6", "i7"], ["i8", "i9"]]
    assert progress == [(n, count, "test_a1") for n, count in ((0, 3), (2, 10), (4, 10), (8, 10))]
    assert ids(whole) == [item.item_id for item in ITEMS]
    assert (complete(10), len(batches)) == (whole, 4)
    assert AnswerFile(path, {"arm": "a1"}, ITEMS).answers() == whole


def test_answers_of_another_plan_or_items_are_refused(tmp_path: Path) -> None:
    items, path = ITEMS[:5], tmp_path / "answers" / "test_a1.jsonl"
    file = AnswerFile(path, {"plan": "1"}, items)
    file.complete(5, 2, answer)
    with pytest.raises(InputError, match="another plan or arm"):
        AnswerFile(path, {"plan": "2"}, items).answers()
    with pytest.raises(InputError, match="answers to other items"):
        AnswerFile(path, {"plan": "1"}, items[::-1]).answers()
    whole, rows = path.read_bytes(), rows_of(path)
    forge(path, [rows[0], rows[1] | {"gold": 2}, *rows[2:]])
    with pytest.raises(InputError, match="answers to other items"):
        file.answers()
    path.write_bytes(whole.replace(b'"pick": 0', b'"pick": 1', 1))
    with pytest.raises(InputError, match="line 2: does not follow from the lines above it"):
        file.answers()


@pytest.mark.parametrize(
    "change",
    [{"pick": "A"}, {"pick": 77}, {"pick": True}, {"pick": -1}, {"scores": 5}, {"text": 1},
     {"options": "3"}, {"rule": None}, {"pikc": 1}],
)  # fmt: skip
def test_answers_that_nobody_gave_are_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    file = AnswerFile(tmp_path / "arm.jsonl", {"arm": "a"}, ITEMS[:2])
    file.complete(2, 2, answer)
    written = rows_of(file.path)
    written[2] |= change
    forge(file.path, written)
    with pytest.raises(InputError, match=r"line 3: damaged .* remove the file to answer again"):
        file.answers()


def test_pairs_keep_the_order_of_the_items() -> None:
    both = {"a1": answer(ITEMS[:2]), "a0": answer(ITEMS[:2])}
    assert [(a.item_id, b.item_id) for a, b in paired(both, "a1", "a0")] == [
        ("i0", "i0"), ("i1", "i1")
    ]  # fmt: skip


@pytest.mark.parametrize("places", [(1, 0), (0,), (0, 2), ()])
@pytest.mark.parametrize("compare", [paired, form_shift])
def test_arms_that_answered_different_items_are_no_pairs(
    compare: Callable[..., Any], places: tuple[int, ...]
) -> None:
    control = answer([ITEMS[place] for place in places])
    with pytest.raises(ValueError, match="a1 and a0 answered different items"):
        compare({"a1": answer(ITEMS[:2]), "a0": control}, "a1", "a0")
