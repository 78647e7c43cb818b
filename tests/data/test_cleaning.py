"""Chat markers taken out of data, and nothing else; rows that read like another domain are moved.

Run: pytest tests/data/test_cleaning.py
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.data import DomainDataSettings, read_domains, split_ids
from mlxstacks.data.cleaning import KEYWORDS, detect_domain, keywords_in
from mlxstacks.data.special_text import MARKERS, special_tokens, strip_markers
from mlxstacks.nano.exports import ASSETS
from tools.nano.tokenizer import load_tokenizer

# Whole markers, their halves, and text around them.
PIECES = (
    *MARKERS,
    *map(str.upper, MARKERS),
    *(m[: len(m) // 2] for m in MARKERS),
    *(m[len(m) // 2 :] for m in MARKERS),
)
texts = st.lists(
    st.sampled_from([*PIECES, "</s>", "</", "s>", " ", "  ", "\n", "\t", "\r\n", "a", "<think>"]),
    max_size=30,
).map("".join)


def holds_marker(text: str, tokens: tuple[str, ...] = ()) -> bool:
    return any(marker.lower() in text.lower() for marker in (*MARKERS, *tokens))


def test_there_are_21_markers() -> None:
    assert len({marker.lower() for marker in MARKERS}) == 21


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


PLAIN = [f"Tell me about town number {i}, please." for i in range(40)]
CODE = [f"Write a python function that prints {i}." for i in range(10)]
MEDICAL = [f"The patient {i} has a chronic cough, why?" for i in range(5)]


def test_the_lists_have_the_published_lengths() -> None:
    assert {name: len(set(words)) for name, words in KEYWORDS.items()} == {
        "code": 29,
        "medical": 31,
        "math": 26,
    }
    assert all(word == word.lower() for words in KEYWORDS.values() for word in words)


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("A Python FUNCTION", "words", ["function", "python"]),
        ("python, python, python", "words", ["python"]),
        ("C++ and SQL", "words", ["c++", "sql"]),
        ("decode the stringent defence", "words", []),
        ("decode the stringent defence", "substrings", ["code", "def", "string"]),
    ],
)
def test_keywords(text: str, mode: Any, expected: list[str]) -> None:
    assert sorted(keywords_in(text, "code", mode)) == expected


def test_two_distinct_keywords_make_a_domain() -> None:
    assert detect_domain("one function", "words") == (None, [])
    assert detect_domain("a function and a function", "words") == (None, [])
    assert detect_domain("solve the equation", "words") == ("math", ["equation", "solve"])
    assert detect_domain("a patient with cancer and a python function", "words")[0] == "code"
    assert detect_domain("a symptom, symptoms", "words")[0] == "medical"


def write(root: Path, name: str, prompts: list[str]) -> None:
    rows = [{"instruction": prompt, "output": "Here is a long answer."} for prompt in prompts]
    (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, "chat", PLAIN + CODE + MEDICAL)
    write(tmp_path, "code", [f"Print {i} with bash in a loop." for i in range(40)] + CODE[:2])
    return tmp_path


def about(name: str, **more: Any) -> DomainDataSettings:
    return DomainDataSettings.model_validate(
        {"sources": f"{name}.jsonl", "validation_fraction": 0.3, **more}
    )


def test_nothing_moves_by_default(root: Path) -> None:
    read = read_domains({"chat": about("chat"), "code": about("code")}, root)
    assert "moved_to" not in read["chat"].report
    assert sum(map(len, (read["chat"].train, read["chat"].validation))) <= 55


def test_rows_of_a_trained_domain_move_and_are_reported(root: Path) -> None:
    domains = {"chat": about("chat", decontaminate="words"), "code": about("code")}
    read = read_domains(domains, root)
    chat, code = read["chat"], read["code"]
    assert chat.report["moved_to"] == {"code": 10}
    assert code.report["moved_from"] == {"chat": 10}
    # Medical rows stay: no such domain is trained.
    assert len(chat.train) + len(chat.validation) == 45
    # Two of the ten were in the code set already.
    assert len(code.train) + len(code.validation) == 50
    shown = chat.report["moved_rows"]
    assert [row["row_id"] for row in shown] == sorted(row["row_id"] for row in shown)
    assert shown[0]["to"] == "code"
    assert shown[0]["keywords"] == ["function", "python"]


def test_rows_of_a_stored_split_stay_where_they_were_trained(root: Path) -> None:
    alone = {"chat": about("chat", decontaminate="words")}
    stored = {"chat": split_ids(read_domains(alone, root)["chat"])}
    later = read_domains(alone | {"code": about("code")}, root, stored=stored)
    assert split_ids(later["chat"]) == stored["chat"]
    assert "moved_to" not in later["chat"].report
    # And rows that moved before a split was stored, move again.
    both = alone | {"code": about("code")}
    first = read_domains(both, root)
    stored = {name: split_ids(data) for name, data in first.items()}
    again = read_domains(both, root, stored=stored)
    assert {name: split_ids(data) for name, data in again.items()} == stored
