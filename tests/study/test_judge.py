"""Two arms are paired item by item; arms that answered other items are refused.

Run: pytest tests/study/test_judge.py
"""

from collections.abc import Callable
from typing import Any

import pytest

from mlxstacks.studies.confound.analysis import form_shift
from mlxstacks.study.answers import Answer, paired


def answers(*item_ids: str) -> list[Answer]:
    return [Answer(item_id, "law", 0, 0, "boxed", 2) for item_id in item_ids]


def test_pairs_keep_the_order_of_the_items() -> None:
    pairs = paired({"a1": answers("x", "y"), "a0": answers("x", "y")}, "a1", "a0")
    assert [(arm.item_id, control.item_id) for arm, control in pairs] == [("x", "x"), ("y", "y")]


@pytest.mark.parametrize("control", [("y", "x"), ("x",), ("x", "z"), ()])
@pytest.mark.parametrize("compare", [paired, form_shift])
def test_arms_that_answered_different_items_are_no_pairs(
    compare: Callable[..., Any], control: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError, match="a1 and a0 answered different items"):
        compare({"a1": answers("x", "y"), "a0": answers(*control)}, "a1", "a0")
