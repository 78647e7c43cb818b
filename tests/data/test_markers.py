"""Chat markers taken out of data, and nothing else. Run: pytest tests/data/test_markers.py"""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.data.special_text import MARKERS, special_tokens, strip_markers
from mlxstacks.nano.exports import ASSETS
from tools.nano.tokenizer import load_tokenizer

# Whole markers, their halves, and text around them.
PIECES = (*MARKERS, *(m[: len(m) // 2] for m in MARKERS), *(m[len(m) // 2 :] for m in MARKERS))
texts = st.lists(
    st.sampled_from([*PIECES, "</s>", "</", "s>", " ", "  ", "\n", "\t", "\r\n", "a", "<think>"]),
    max_size=30,
).map("".join)


def holds_marker(text: str, tokens: tuple[str, ...] = ()) -> bool:
    return any(marker.lower() in text.lower() for marker in (*MARKERS, *tokens))


def test_there_are_21_markers() -> None:
    assert len({marker.lower() for marker in MARKERS}) == 21


@pytest.mark.parametrize("marker", MARKERS)
def test_each_marker_goes_in_any_case(marker: str) -> None:
    for written in (marker, marker.upper(), marker.lower(), marker.swapcase()):
        assert strip_markers(f"one{written}two") == "onetwo"


@given(texts)
def test_no_marker_is_left_and_a_second_pass_changes_nothing(text: str) -> None:
    tokens = ("</s>",)
    once = strip_markers(text, tokens)
    assert not holds_marker(once, tokens)
    assert strip_markers(once, tokens) == once


@given(st.text())
def test_a_text_without_markers_stays_as_it_is(text: str) -> None:
    assert strip_markers(text) == text


TABLE = "| a    | b |\r\n|------|---|\r\n| 1    | 2 |\r\n\r\n\r\n\ttabs,  and blanks  \n"


def test_only_markers_go() -> None:
    assert strip_markers(f"<|im_start|>{TABLE}<|im_end|>") == TABLE
    assert strip_markers("    return x[INST]\n") == "    return x\n"


def test_thoughts_are_content() -> None:
    text = "<think>\nhm\n</think>\n\nYes"
    assert strip_markers(text) == text


def test_deeply_nested_markers_go_in_one_scan() -> None:
    """Removing the inner ones pass by pass would take 20,000 passes over the text."""
    depth = 20_000
    assert strip_markers("<bo" * depth + "s>" * depth + "end") == "end"


def test_special_tokens_of_a_tokenizer() -> None:
    found = special_tokens(load_tokenizer(ASSETS / "model"))
    assert set(found) == {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    assert strip_markers("one<|endoftext|>two", found) == "onetwo"
    added = {
        2: _Token("<|vision|>", True),
        3: _Token("<tool_call>", False),
        4: _Token("<think>", True),
        5: _Token("!", True),
    }
    tokenizer = SimpleNamespace(all_special_tokens=["</s>"], added_tokens_decoder=added)
    assert special_tokens(tokenizer) == ("</s>", "<|vision|>")
    assert special_tokens(object()) == ()


class _Token:
    def __init__(self, text: str, special: bool) -> None:
        self.text, self.special = text, special

    def __str__(self) -> str:
        return self.text
