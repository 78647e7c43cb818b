"""Whom a fuse of zeros moves: margins, second choices, difficulty, width.

Run: pytest tests/studies/confound/test_mechanism.py
"""

from typing import Any

import pytest

from mlxstacks.studies.confound.mechanism import (
    Pair,
    growth_in_words,
    mechanism,
    mechanism_blocks,
)
from mlxstacks.study.answers import Answer
from mlxstacks.study.document import Plot, Table


def answer(item: int, pick: int | None, scores: tuple[float, ...] = (), gold: int = 0) -> Answer:
    return Answer(str(item), "alpha", gold, pick, "likelihood", 4, scores=scores)


def test_a_margin_is_that_of_the_answer_over_the_best_of_the_others() -> None:
    pair = Pair(answer(0, 2), answer(0, 0), (-3.0, -9.0, -1.0, -4.0), hard=True)
    assert (pair.first, pair.second, pair.margin, pair.moved) == (2, 0, 2.0, True)
    # A tie, and an answer by generation that is not the likeliest letter.
    assert Pair(answer(0, None), answer(0, None), (-1.0, -1.0, -5.0, -5.0), True).margin == 0
    assert Pair(answer(0, 1), answer(0, 1), (-3.0, -9.0, -1.0, -4.0), True).margin == -8


def case(bits: tuple[int, ...] = (2, 8), moved: tuple[int, ...] = (8, 1)) -> dict[str, Any]:
    """Ten hard items, answered wrongly (1 of 4) with the right option second, and ten easy ones;
    margins 0.1, 0.6, 1.1, ...; at each width the first `moved` of either go to the second choice.
    """
    answers: dict[str, dict[str, list[Answer]]] = {"hard": {}, "easy": {}}
    for width, count in zip(bits, moved, strict=True):
        for part, first in (("hard", 1), ("easy", 0)):
            second = 1 - first
            scores = [
                tuple({first: -1.0, second: -1.1 - 0.5 * n}.get(place, -99.0) for place in range(4))
                for n in range(10)
            ]
            answers[part][f"width_{width}"] = [answer(n, first, scores[n]) for n in range(10)]
            answers[part][f"width_{width}_refit"] = [
                answer(n, second if n < count else first) for n in range(10)
            ]
    return mechanism(answers, (), bits, {"2 bits": 0.25})


def test_flips_are_counted_by_margin_difficulty_and_width() -> None:
    figures = case()
    assert [*figures["fuses"]] == ["8 bits", "2 bits"]
    assert figures["fuses"]["2 bits"] == {
        "moved": [16, 20],
        "moved_by_margin": [[2, 2], [0, 0], [2, 2], [4, 4], [8, 8], [0, 4]],
        "moved_of_hard": [8, 10], "moved_of_easy": [8, 10], "to_second_choice": [16, 16],
        "wrong_corrected": [8, 10], "wrong_second_choice_right": [10, 10],
        "right_broken": [8, 10], "codes_changed": 0.25,
    }  # fmt: skip
    plot, table, margins = mechanism_blocks(figures)
    assert isinstance(plot, Plot)
    assert plot.series[1].y == (100, None, 100, 100, 100, 0)
    assert isinstance(table, Table)
    assert table.rows[0][:2] == ("8 bits", 20)
    assert not table.folded
    assert isinstance(margins, Table)
    assert margins.rows[0] == ("to 0.25", "2 of 2", "2 of 2")
    assert plot.x_label == "margin, nats"


@pytest.mark.parametrize(
    ("bits", "moved", "words"),
    [
        ((2, 8), (8, 1), "8 bits 10.0%, 2 bits 80.0%: more at 2 bits than at 8 bits, as the paper"),
        ((2, 8), (8, 1), "paper says (McNemar p = 0.00012)"),
        ((2, 3, 8), (8, 9, 1), "as the paper says, but not at each step (McNemar"),
        ((2, 8), (1, 1), "no growth from 8 bits to 2 bits is shown (McNemar p = 1)"),
        ((2, 8), (0, 9), "fewer at 2 bits than at 8 bits (McNemar"),
    ],
)  # fmt: skip
def test_whether_the_artifact_grows_is_said(
    bits: tuple[int, ...], moved: tuple[int, ...], words: str
) -> None:
    assert words in growth_in_words(case(bits, moved), 0.05)


def test_answers_without_scores_have_no_margin() -> None:
    """Generated ones have none, but the persona's second choices have, of the test's items."""
    test = {"persona": [answer(0, 1)], "a0_refit": [answer(0, 0)]}
    right = {"persona": [answer(1, 0)], "a0_refit": [answer(1, 0)]}
    assert mechanism({"test": test, "right": right}, ("refit", "unfused"), (), {})["fuses"] == {}
    test["persona_second"] = [answer(0, 0, (-2.0, -1.0, -5.0, -5.0))]
    figures = mechanism({"test": test, "right": right}, ("refit", "unfused"), (), {})
    assert figures["fuses"]["refit"]["moved"] == [1, 1]
    assert figures["fuses"]["refit"]["moved_of_easy"] == [0, 0]
    assert figures["growth"] is None
    assert next(block for block in mechanism_blocks(figures) if block.block == "table").folded
