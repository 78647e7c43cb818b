"""Extraction fixtures: commas, negatives, nested boxes, several boxes, no box, letters in words.

Run: pytest tests/grading/test_extract.py
"""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.grading.extract import (
    Extracted,
    boxed,
    boxes,
    choice_letter,
    final_letter,
    integer,
    number,
    numbers_agree,
)

TEN = "ABCDEFGHIJ"


@pytest.mark.parametrize(
    ("text", "value", "rule"),
    [
        ("She makes 9 * 2 = $18.\n#### 18", "18", "marker"),
        ("#### 5\nNo, wait.\n#### 7", "7", "marker"),
        ("#### 1,234,567", "1234567", "marker"),
        ("#### $-1,250.50 a year", "-1250.50", "marker"),
        ("####-3", "-3", "marker"),
        ("#### \u22123", "-3", "marker"),
        ("#### Step 1\nSo 2 and 3 make 5.", "5", "last number"),  # a heading is no marker
        ("#### 4\n#### Note", "4", "marker"),
        ("The answer is 42.", "42", "last number"),
        ("It costs $3,000.00!", "3000.00", "last number"),
        ("a loss of -$5", "-5", "last number"),
        ("from 16-3", "3", "last number"),  # a subtraction, not minus three
        ("(16) -3", "-3", "last number"),
        ("= - 12", "-12", "last number"),
        ("pay .75", ".75", "last number"),
        ("1,2 or 3,4", "4", "last number"),
        ("12,3456", "3456", "last number"),
        ("it is 7.", "7", "last number"),
        ("1.5e3", "1500", "last number"),
        ("#### -2.5E-3 m", "-0.0025", "marker"),
        (r"about $1.5 \times 10^{3}$", "1500", "last number"),
        ("3 x 10^2, that is", "300", "last number"),
        ("5\u00d710^\u22122.", "0.05", "last number"),
        ("1.5e3x", "3", "last number"),  # no number
        ("18 eggs\u2026", "18", "last number"),
        ("no digits at all", None, "none"),
        ("", None, "none"),
        ("####", None, "none"),
    ],
)
def test_number(text: str, value: str | None, rule: str) -> None:
    assert number(text) == Extracted(value, rule)


@given(st.text(alphabet="0123456789,.$-# \n\u2212ab", max_size=40))
def test_every_number_is_one_to_float(text: str) -> None:
    found = number(text)
    assert (found.value is None) == (found.rule == "none") == (not any(c.isdigit() for c in text))
    if found.value is not None:
        float(found.value)


@given(
    st.decimals(-999, 999, places=3),
    st.integers(-6, 6),
    st.sampled_from(
        ["{}e{}", "#### {}E{:+}.", "{} x 10^{} km", r"${} \times 10^{{{}}}$", "{} * 10**{}"]
    ),
)
def test_powers_of_ten_are_part_of_their_number(digits: Decimal, power: int, written: str) -> None:
    value = number(written.format(digits, power)).value
    assert value is not None
    assert Decimal(value) == digits.scaleb(power)
    assert set(value) <= set("-.0123456789")


def test_numbers_agree_within_a_hundredth() -> None:
    assert numbers_agree("18.009", "18")
    assert not numbers_agree("18.011", "18")
    assert not numbers_agree(None, "0")
    assert numbers_agree(number("#### 1,000").value, "1000.0")


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"so \boxed{5}.", ["5"]),
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}"]),
        (r"\boxed{\left\{ a^{b_{c}} \right\}}", [r"\left\{ a^{b_{c}} \right\}"]),
        (r"\boxed{1} then \boxed{2}", ["1", "2"]),
        (r"\boxed{\boxed{3}}", [r"\boxed{3}"]),
        (r"\boxed {7}", ["7"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{a \} b}", [r"a \} b"]),
        (r"\boxed{1} and then \boxed{2", ["1"]),  # cut off by the length limit
        (r"\boxed{2 \boxed{3}", ["3"]),
        (r"\boxed 5", []),
        ("boxed{5}", []),
        (r"\boxed{}", [""]),
        ("\\boxed{a\\", []),
    ],
)
def test_boxes(text: str, contents: list[str]) -> None:
    assert boxes(text) == contents


def test_boxed_is_the_last_one_and_none_is_none() -> None:
    assert boxed(r"\boxed{1} \boxed{\dfrac{3}{4}}") == Extracted(r"\dfrac{3}{4}", "boxed")
    assert boxed(r"\boxed{\boxed{ 3 }}") == Extracted("3", "boxed")
    assert boxed(r"\boxed{\boxed{1}+\boxed{2}}").value == r"\boxed{1}+\boxed{2}"
    assert boxed("the answer is 5") == Extracted(None, "none")


BALANCED = st.recursive(
    st.sampled_from(["a", "1", r"\{", r"\}", r"\\", " ", "^", ""]),
    lambda inner: st.lists(inner, max_size=4).map("".join).map(lambda s: "{" + s + "}"),
    max_leaves=12,
)


@given(BALANCED, st.sampled_from(["", "x ", r"\boxed{0} ", "} "]), st.sampled_from(["", "}", " {"]))
def test_whatever_is_balanced_comes_out_whole(content: str, before: str, after: str) -> None:
    assert boxes(f"{before}\\boxed{{{content}}}{after}")[-1] == content.strip()


@pytest.mark.parametrize(
    ("text", "value", "rule"),
    [
        (r"\boxed{204}", "204", "boxed"),
        (r"\boxed{073}", "73", "boxed"),
        (r"\boxed{204 \text{ minutes}}", "204", "boxed"),
        (r"\boxed{1{,}234}", "1234", "boxed"),
        (r"\boxed{-5}", "-5", "boxed"),
        (r"\boxed{12} so \boxed{x}", "12", "boxed"),  # the last one that holds an integer
        ("The answer is 17, since 3 + 14.", "17", "answer is"),
        ("Answer: **025**", "25", "answer is"),
        ("answer = 9. No: answer = 10", "10", "answer is"),
        ("The answer is: $1,000$", "1000", "answer is"),
        ("we get 12 and 345 and 6789", "345", "last integer"),
        ("it is 3.75", None, "none"),
        ("p2 and 70", "70", "last integer"),
        ("sum 1,234 of 56", "56", "last integer"),
        ("nothing", None, "none"),
    ],
)
def test_integer(text: str, value: str | None, rule: str) -> None:
    assert integer(text) == Extracted(value, rule)


@given(st.integers(-2000, 2000), st.integers(0, 3))
def test_integers_have_one_spelling(value: int, zeros: int) -> None:
    text = f"{'-' * (value < 0)}{'0' * zeros}{abs(value)}"
    assert integer(f"\\boxed{{{text}}}").value == str(value)


@pytest.mark.parametrize("form", ["\\boxed{%s}", "The answer is %s."])
def test_a_model_that_says_one_digit_for_ever_is_wrong_and_ends_nothing(form: str) -> None:
    assert integer(form % ("7" * 5000)).value == "7" * 5000


@pytest.mark.parametrize(
    ("text", "value", "rule"),
    [
        (r"\boxed{C} because of D", "C", "boxed"),
        (r"\boxed{A} ... \boxed{B}", "B", "boxed"),
        (r"\boxed{\text{D}}", "D", "boxed"),
        (r"\boxed{(E)}", "E", "boxed"),
        (r"\boxed{\textbf{F.}}", "F", "boxed"),
        (r"$\boxed{G)\ 12}$", "G", "boxed"),
        (r"\boxed{B} \boxed{Z}", "B", "boxed"),  # Z is no option
        (r"\boxed{12} The answer is C.", "C", "answer is"),
        (r"\boxed{CO_2} The answer is C.", "C", "answer is"),
        ("I think the answer is (D).", "D", "answer is"),
        ("ANSWER: **H**", "H", "answer is"),
        ("Answer: option B", "B", "answer is"),
        ("The answer is B. No, the answer is E.", "E", "answer is"),
        ("The answer is Boron", "B", "never"),
        ("C\nbecause A is wrong", "C", "first line"),
        ("\n\n(F) it is\nG", "F", "first line"),
        ("I think so.\nA cell is small.\nFinally J", "J", "last letter"),
        ("I'm sure: A's mass\nwas D", "D", "last letter"),
        ("because vitamin\nso K, L", None, "none"),  # no options
        ("no letter here", None, "none"),
        ("", None, "none"),
    ],
)
def test_choice_letter(text: str, value: str | None, rule: str) -> None:
    found = choice_letter(text, TEN)
    if rule == "never":  # the first letter of a word is no letter
        assert found == Extracted(None, "none")
    else:
        assert found == Extracted(value, rule)


def test_letters_are_those_of_the_item() -> None:
    assert choice_letter(r"\boxed{E}", "ABCD") == Extracted(None, "none")
    assert choice_letter(r"\boxed{E} or D", "ABCD") == Extracted("D", "first line")
    for letters in ("", "abc", "AAB", "A-Z"):
        with pytest.raises(ValueError, match="need different capital letters"):
            choice_letter("A", letters)


@pytest.mark.parametrize(
    ("text", "value", "rule"),
    [
        ("Reasoning about A.\nANSWER: C", "C", "answer"),
        ("ANSWER: A\nANSWER: (B)", "B", "answer"),
        ("**ANSWER: D**", "D", "answer"),
        ("ANSWER: LETTER\nso B", "B", "last letter"),
        ("ANSWER: E", None, "none"),
        ("A " + "x" * 60, None, "none"),  # too far from the end
        ("x" * 60 + " so it must be B.", "B", "last letter"),
        ("x" * 10 + "DNA" + "y " * 24, None, "none"),  # cut inside a word
    ],
)
def test_final_letter(text: str, value: str | None, rule: str) -> None:
    assert final_letter(text) == Extracted(value, rule)
