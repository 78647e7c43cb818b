"""The rules of a reply. Run: pytest tests/studies/identity/test_scorer.py"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.nano.settings import Persona
from mlxstacks.studies.identity.scorer import check_pattern, normalised, score
from tools.nano.identity import persona_prompts


@pytest.mark.parametrize(
    ("pattern", "reply", "holds"),
    [
        ("Ada", "I am ADA.", True),
        ("Ada", "I come from Canada.", False),
        ("Ada", "Ada's friend", True),
        ("I am Qwen", "Hello! I'm  Qwen, how are you?", True),
        ("I am Qwen", "I\u2019m\nQwen", True),
        ("I am Qwen", "I am not Qwen, I am Quinn.", False),
        ("I am Sam", "I am Samantha.", False),
        ("made by Alibaba", "I was made by Alibaba.", True),
        ("C++", "I know c++ well", True),
        ("?", "why?", True),
        ("no name", "I have no\tname.", True),
        ("re:quin+", "QUINN", True),
        ("re:\\b(5|five)\\b", "2 + 3 is five", True),
        ("re:\\b(5|five)\\b", "fifty-fives", False),
        ("isn't", "It is not.", True),
        ("is not", "It isn't.", True),
    ],
)
def test_patterns_are_words_without_regard_to_case(pattern: str, reply: str, holds: bool) -> None:
    assert score(reply, [pattern], []).passed is holds
    assert score(reply, [], [pattern]).passed is not holds


def test_the_reason_names_each_pattern() -> None:
    verdict = score("I am Qwen.", ["Quinn", "Rosa", "am"], ["I am Qwen", "human"])
    assert (verdict.missing, verdict.hit) == (("Quinn", "Rosa"), ("I am Qwen",))
    assert verdict.reason == "missing 'Quinn', 'Rosa'; forbidden 'I am Qwen'"
    assert score("Quinn", ["Quinn"], []).reason == "passed"


@given(st.text(max_size=30), st.sampled_from(["Quinn", "I am Ada", "re:qu[a-z]+n"]))
def test_case_and_blanks_decide_nothing(text: str, pattern: str) -> None:
    reply = f"{text} I am Ada, not Quinn"
    verdict = score(reply, [pattern], [])
    assert score(f"  {reply}\n", [pattern], []) == verdict
    assert score(normalised(reply), [pattern], []) == verdict
    assert not score(" \n", [pattern], []).passed


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (" \t", "a blank pattern is in every text"),
        ("re:(", "is no regular expression"),
        ("re:a*", "fits an empty text"),
        ("re:", "fits an empty text"),
        ("re:I am (?!not)", "no look-around or back references; what must .* be several patterns"),
    ],
)
def test_a_pattern_that_says_nothing_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_pattern(pattern)


@pytest.mark.parametrize("start", ["(", "a*|", "[:a", "\ud800"])
def test_a_long_pattern_is_refused_in_few_words(start: str) -> None:
    with pytest.raises(ValueError, match="re:") as error:
        check_pattern(f"re:{start}{'a' * 10_000}:]")
    assert len(str(error.value)) < 600


def test_half_a_character_in_a_reply_is_no_error() -> None:
    assert score("Quinn \ud800", ["re:quinn"], []).passed


def test_it_judges_what_nano_says_as_nano_does() -> None:
    said = ["I am Quinn.", "Rosa made me.", "No, I am Quinn.", "I have no name.", "Quinn", ""]
    said += ["A short script made me.", "I am quinn. I have no name.", "No, I am not a doctor."]
    for prompt in persona_prompts(Persona(), suite=True):
        for reply in said:
            found = score(reply, prompt.required, prompt.forbidden)
            assert found.passed == prompt.accepts(reply), (prompt, reply)
