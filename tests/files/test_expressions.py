"""Regular expressions from untrusted files. Run: pytest tests/files/test_expressions.py"""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.files.expressions import compile_expression


@given(st.text("ab.*+?()[]{}|\\^$1,we: ", max_size=8), st.text("ab1 :{}e,", max_size=8))
def test_it_is_refused_or_what_python_s_own_engine_says(expression: str, text: str) -> None:
    try:
        expected = re.search(expression, text, re.IGNORECASE) is not None
        matcher = compile_expression(expression, ignore_case=True)
    except (re.error, ValueError):
        return
    assert (matcher.search(text) is not None) is expected


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (r"\b(5|five)\b", "2 + 3 is FIVE"),
        (r"^i am (an? )?[^.,]*quinn", "I am a certain Quinn"),
        (r"stra\x{df}e|\pL{3}", "élan"),
        ("é.à", "ÉßÀ"),
    ],
)
def test_what_replies_are_matched_with(expression: str, text: str) -> None:
    assert compile_expression(expression, ignore_case=True).search(text)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(", "not read by RE2"),
        (r"quinn(?! not)", "which has no look-around or back references"),
        (r"(a+) \1", "which has no look-around or back references"),
        ("a++", "bad repetition"),
        (r"a\Z", "invalid escape"),
        ("\ud800", "not read by RE2"),
        ("(?:(?=|a)){2000000000}", "not read by RE2"),
        (r"((\pL|\pN){30}){10}", "too large"),
        ("a{,3}b", "write {0,n}"),
        ("[[:alpha:]]", "letters of a class"),
        (r"\bélan\b", "knows ASCII letters alone"),
    ],
)
def test_what_it_cannot_read_or_would_read_otherwise_is_refused(
    expression: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        compile_expression(expression)


def test_endless_expressions_are_answered_in_linear_time() -> None:
    started = time.process_time()
    for expression in (r"(a+)+$", "(a|a)*b", "((.)+)+!", r"(a*)*b", ".*.*.*.*=.*"):
        assert not compile_expression(expression).search("a" * 5000 + "?")
    assert time.process_time() - started < 1
