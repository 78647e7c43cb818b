"""The table of equal and unequal answers, by text, number and algebra.

Run: pytest tests/grading/test_equivalence.py
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.grading.equivalence import (
    SymbolicChecker,
    as_number,
    equivalent,
    installed,
    normalised,
    symbolic_checker,
)
from mlxstacks.grading.extract import boxed

MATH_500 = Path(__file__).parents[3] / "shared" / "data" / "bench_math500.jsonl"


@pytest.mark.parametrize(
    ("gold", "answer", "rule"),
    [
        (r"\frac{1}{2}", r"\dfrac{1}{2}", "text"),
        (r"\frac{1}{2}", r"\tfrac12", "text"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", "text"),
        (r"\text{Evelyn}", "Evelyn", "text"),
        (r"\mathrm{(A)}", "(A)", "text"),
        ("5", r"x = 5", "text"),
        ("36^\\circ", "36", "text"),
        (r"10,\!080", "10080", "text"),
        ("1,234,567", "1234567", "text"),
        (r"\$18.90", "18.90", "text"),
        ("$7$", "7.", "text"),
        ("3", "3}", "text"),
        (r"50\%", "50%", "text"),
        (r"\{1, 2\}", r"\left\{1,2\right\}", "text"),
        ("-4", "\u22124", "text"),
        (".5", "0.5", "text"),
        (r"\pi r", r"\pi  r", "text"),
        ("10080", r"10\,080", "text"),
        ("1, 2", "1,2", "text"),
        ("(1, 234)", "(1,234)", "text"),
        ("3 x", "3x", "text"),
        (r"50\%", "50", "numeric"),
        ("0.5", r"\frac{1}{2}", "numeric"),
        (r"\frac{1}{3}", "0.3333", "numeric"),
        (r"-\frac{3}{4}", "-0.75", "numeric"),
        ("2/5", "0.4", "numeric"),
        ("0.0000672", "6.72/100000", "numeric"),
        ("7", "7.0", "numeric"),
        # unequal
        ("5", "6", "unequal without algebra"),
        ("0.0000672", "0", "unequal without algebra"),
        (r"\frac{1}{3}", "0.33", "unequal without algebra"),
        ("12", "1,2", "unequal without algebra"),
        ("11", "1 1", "unequal without algebra"),
        ("11/2", "1 1/2", "unequal without algebra"),
        ("1.5", "1. 5", "unequal without algebra"),
        ("1234", "1, 234", "unequal without algebra"),
        ("3612", r"36^\circ 12", "unequal without algebra"),
        ("(1,2)", "(12)", "unequal without algebra"),
        ("1", "1/0", "unequal without algebra"),
        (r"\pi x", r"\pix", "unequal without algebra"),
        ("5", "", "unequal without algebra"),
        ("5", r"\text{}", "unequal without algebra"),
        ("nan", "1", "unequal without algebra"),
        ("1_0", "10", "unequal without algebra"),
        ("[1,2)", "(1,2]", "unequal without algebra"),
        ("2k", "k+k", "unequal without algebra"),  # only algebra knows
    ],
)
def test_without_algebra(gold: str, answer: str, rule: str) -> None:
    assert equivalent(gold, answer) == (rule != "unequal without algebra", rule)


@given(
    st.integers(0, 9999),
    st.integers(0, 9999),
    st.lists(st.sampled_from([" ", r"\ ", r"\quad ", r"\text{ }", "$ $", "\n"]), min_size=1),
)
def test_two_numbers_are_never_one(left: int, right: int, between: list[str]) -> None:
    two = f"{left}{''.join(between)}{right}"
    assert not equivalent(f"{left}{right}", two)[0]
    assert equivalent(f"{left} {right}", two) == (True, "text")


LATEX = st.lists(
    st.sampled_from(
        [r"\frac", r"\dfrac", r"\tfrac", "{", "}", "1", "2", "3", ",", ".", " ", "x", "=", "-",
         r"\left(", r"\right)", r"\text{ab}", r"\{", r"\}", r"\%", "$", r"\pi ", r"\sqrt", "^", "/",
         r"\!", r"\quad ", "\\", "\0"],
    ),
    max_size=12,
).map("".join)  # fmt: skip


@given(LATEX)
def test_normalised_is_a_fixed_point_and_answers_equal_themselves(latex: str) -> None:
    once = normalised(latex)
    assert normalised(once) == once
    assert equivalent(latex, latex)[0] == bool(once)


def test_the_third_rule_is_asked_only_when_needed_and_said() -> None:
    asked: list[tuple[str, str]] = []

    def algebra(gold: str, answer: str) -> bool | None:
        asked.append((gold, answer))
        return {"k+k": True, "3k": False}.get(answer)

    assert equivalent("5", "5", algebra) == (True, "text")
    assert equivalent("5", "6", algebra) == (False, "unequal")
    assert asked == []
    assert equivalent("2k", "k+k", algebra) == (True, "symbolic")
    assert equivalent("2k", "3k", algebra) == (False, "unequal")
    assert equivalent("2k", "?", algebra) == (False, "undecided")
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12.0), ("-0.5", -0.5), (r"\frac{3}{4}", 0.75), (r"-\frac{3}{4}", -0.75),
        (r"\frac{-3}{4}", -0.75), ("3/4", 0.75), ("50%", 50.0), ("1/0", None), ("1e5", None),
        ("inf", None), ("x", None), ("", None), ("1_0", None), ("\u0661", None), ("9" * 400, None),
    ],
)  # fmt: skip
def test_as_number(text: str, value: float | None) -> None:
    assert as_number(text) == value


@pytest.mark.skipif(installed() is None, reason="math-verify is not installed")
def test_algebra() -> None:
    """One worker for all questions; one that hangs is ended and the next is answered."""
    with symbolic_checker(seconds=120) as equal:
        assert isinstance(equal, SymbolicChecker)
        table = [
            (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", True),
            ("x^2+2x+1", "(x+1)^2", True),
            ("(3,4)", "(4,3)", False),
            ("[1,2)", "(1,2]", False),
            (r"\{1,2\}", r"\{2,1\}", True),
            ("x", "y", False),
        ]
        for gold, answer, expected in table:
            assert equal(gold, answer) is expected, (gold, answer)
        assert equal("2", "") is None
        assert equal("1" * 500, "2") is None
        worker = equal._worker._process
        equal.seconds = 0.5
        assert equal("2", "9^{9^{9^9}}") is None
        assert worker is not None
        assert worker.poll() is not None  # ended
        equal.seconds = 120
        assert equivalent("2k", "k+k", equal) == (True, "symbolic")
        assert (equal.asked, equal.undecided) == (len(table) + 4, 3)
        last = equal._worker._process
    assert last is not None
    assert last.poll() is not None


@pytest.mark.skipif(not MATH_500.exists(), reason="needs ../shared/data")
def test_all_solutions_of_math_500_are_right() -> None:
    rows = [json.loads(line) for line in MATH_500.read_text().splitlines()]
    assert len(rows) == 500
    for row in rows:
        answer = boxed(row["solution"]).value
        assert equivalent(row["answer"], str(answer)) == (True, "text"), (row["answer"], answer)
