"""The rules of `mlxstacks route check`: texts, numbers, thoughts, repetition.

Run: pytest tests/studies/route/test_check.py
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlxstacks.errors import InputError
from mlxstacks.studies.route.check import (
    has_number,
    judge,
    missing_domains,
    repetition,
    run,
    split_thoughts,
)
from mlxstacks.studies.route.settings import CheckPrompt, RouteCheckSettings


def words(text: str) -> int:
    return len(text.split())


def judged(text: str, begins_in_thought: bool = False, **rules: Any) -> dict[str, Any]:
    check = CheckPrompt.model_validate({"name": "n", "prompt": "p", **rules})
    return judge(
        check, text, words, begins_in_thought=begins_in_thought, most_think_share=0.2,
        most_repetition=0.3,
    )  # fmt: skip


def test_one_of_the_expected_texts_is_enough() -> None:
    rules: dict[str, Any] = {"expect": ("[::-1]", "reversed(")}
    assert not judged("Use s[::-1].", **rules)["failed"]
    assert not judged("''.join(REVERSED(s))", **rules)["failed"]
    assert judged("Write a loop.", **rules)["failed"] == ["has none of [::-1], reversed("]


def test_forbidden_texts_are_marks_of_another_domain() -> None:
    found = judged("Consider each Permutation.", expect=("consider",), forbid=("permutation",))
    assert found["failed"] == ["has permutation"]


@pytest.mark.parametrize(
    ("text", "number", "has"),
    [
        ("It is 60 km/h.", 60, True), ("60km/h", 60, True), ("It is 60.", 60, True),
        ("$60", 60, True), ("1,000 mg", 1000, True), ("-5 degrees", -5, True),
        ("166.67 mg", 166.67, True), ("160 km/h", 60, False), ("1.60", 60, False),
        ("600", 60, False), ("x60", 60, False), ("sixty", 60, False), ("60,000", 60, False),
        ("2024-60", 60, True), ("", 0, False),
    ],
)  # fmt: skip
def test_numbers_stand_on_their_own(text: str, number: float, has: bool) -> None:
    assert has_number(text, number, 0.01) is has


def test_a_tolerance_takes_rounded_answers() -> None:
    rules: dict[str, Any] = {"number": 166.67, "tolerance": 0.5}
    assert not judged("about 167 mg", **rules)["failed"]
    assert judged("about 170 mg", **rules)["failed"] == ["lacks the number 166.67"]


@pytest.mark.parametrize(
    ("text", "inside", "said", "thought"),
    [
        ("plain", False, "plain", ""),
        ("<think>a b</think>c", False, "c", "a b"),
        ("x <think>a</think> y <think>b", False, "x  y ", "ab"),
        ("a b</think>c", False, "c", "a b"),
        ("a b</think>c", True, "c", "a b"),
        ("never closed", True, "", "never closed"),
        ("<|begin_of_thought|>a<|end_of_thought|>b", False, "b", "a"),
        ("a<|end_of_thought|>b", False, "b", "a"),
        ("<|START_THINKING|>a<|END_THINKING|>b", False, "b", "a"),
    ],
)
def test_thoughts_are_told_from_what_is_said(
    text: str, inside: bool, said: str, thought: str
) -> None:
    assert split_thoughts(text, inside) == (said, thought)


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " b"]), max_size=8), st.booleans())
def test_no_text_is_lost_between_marks(parts: list[str], inside: bool) -> None:
    text = "".join(parts)
    said, thought = split_thoughts(text, inside)

    def letters(text: str) -> list[str]:
        return sorted(text.replace("<think>", "").replace("</think>", ""))

    assert letters(said + thought) == letters(text)


def test_an_answer_that_is_thought_only_is_none() -> None:
    found = judged("It may be 60, so 60", begins_in_thought=True, number=60)
    assert found["failed"] == ["no answer outside of thoughts", "100% of it is thinking"]
    found = judged("<think>a</think> one two three four five 60", number=60)
    assert found["think_share"] == pytest.approx(1 / 7)
    assert not found["failed"]


def test_repetition_is_the_share_of_runs_seen_before() -> None:
    assert repetition("one two three") == 0
    assert repetition("a b c d e f g h") == 0
    # runs of four of "a b a b a b a b": abab baba abab baba abab
    assert repetition("a b a b a b a b") == pytest.approx(3 / 5)
    loop = "I am sure. " * 20
    assert repetition(loop) > 0.9
    assert any("repeats" in why for why in judged(loop, expect=("sure",))["failed"])


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_repetition_lies_between_none_and_all(letters: list[str]) -> None:
    share = repetition(" ".join(letters))
    assert 0 <= share < 1
    runs = [tuple(letters[i : i + 4]) for i in range(len(letters) - 3)]
    assert (share == 0) == (len(set(runs)) == len(runs))


def test_every_expected_domain_must_be_active() -> None:
    check = CheckPrompt(name="dose", prompt="p", domains=("medical", "math"))
    assert missing_domains(check, {"medical": 0.9, "math": 0.2}) == []
    assert missing_domains(check, {"medical": 0.9, "chat": 0.2}) == ["math"]


def test_a_check_without_prompts_says_what_writes_them() -> None:
    with pytest.raises(InputError, match="mlxstacks init --command 'route check'"):
        run(RouteCheckSettings(store_path="store", save_path="out"))


def test_settings_say_what_is_wrong() -> None:
    with pytest.raises(ValidationError, match="no rule"):
        CheckPrompt(name="n", prompt="p")
    with pytest.raises(ValidationError, match="occurs in every answer"):
        CheckPrompt(name="n", prompt="p", expect=(" ",))
    with pytest.raises(ValidationError, match="blank"):
        CheckPrompt(name="n", prompt=" ", number=1)
    one = CheckPrompt(name="n", prompt="p", number=1)
    with pytest.raises(ValidationError, match="n is there twice"):
        RouteCheckSettings(prompts=(one, one))
