"""From tokens to parts: stop texts however they are cut, reasoning, calls of tools.

Run: pytest tests/serve/test_text.py
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks import base_model
from mlxstacks.serve.naming import UnknownModelError, is_loopback, parse_model
from mlxstacks.serve.text import AnswerText, Part, StopText


@given(
    st.lists(st.text("ab<", max_size=4), max_size=8),
    st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3),
)
def test_stop_text_ends_an_answer_wherever_pieces_are_cut(
    pieces: list[str], stops: list[str]
) -> None:
    finder = StopText(stops)
    said = "".join([*(finder.feed(piece) for piece in pieces), finder.flush()])
    text = "".join(pieces)
    # the one that is whole first ends the answer
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if ends:
        assert finder.found is not None
        assert said == text[: text.find(finder.found)]
        assert text.find(finder.found) <= max(place for _, place in ends)
    else:
        assert (said, finder.found) == (text, None)


class Spelled:
    """A detokenizer whose tokens are characters."""

    def __init__(self) -> None:
        self.last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = chr(token)

    def finalize(self) -> None:
        self.last_segment = ""


def parse_json(text: str, tools: Any = None) -> Any:
    return json.loads(text)


def answer_text(inside: bool = False, stops: tuple[str, ...] = ()) -> AnswerText:
    tokenizer: Any = SimpleNamespace(
        has_thinking=True, think_start="<think>", think_end="</think>", has_tool_calling=True,
        tool_call_start="<call>", tool_call_end="</call>", structural_markers=[],
        response_transitions={}, response_initial_state=None, tool_parser=parse_json,
        detokenizer=Spelled(),
    )  # fmt: skip
    return AnswerText(tokenizer, base_model.text_machine(tokenizer), inside, stops, [])


def parts_of(text: str, answer: AnswerText) -> list[Part]:
    """All parts, those of a kind that follow each other joined."""
    parts: list[Part] = []
    for part in [*(p for c in text for p in answer.feed(ord(c))), *answer.finish()]:
        if parts and part.call is None and parts[-1].call is None and parts[-1].kind == part.kind:
            parts[-1] = Part(part.kind, parts[-1].text + part.text)
        else:
            parts.append(part)
    return parts


def test_thoughts_and_calls_are_parts_of_their_own() -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    parts = parts_of(f"hm</think>So <call>{call}</call><call>{call}</call> b<", answer_text(True))
    added = {"name": "add", "arguments": '{"a": 1}'}
    assert parts == [
        Part("reasoning", "hm"), Part("text", "So "), Part("tool", "", added),
        Part("tool", "", added), Part("text", " b<"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ['{"name": "add"', "[1, 2]", "{}", '{"name": 1}', "[" * 9999])
def test_what_is_no_call_stays_text(text: str) -> None:
    answer = answer_text()
    assert parts_of(f"<call>{text}</call>", answer) == [Part("text", text)]
    assert answer.calls == 0


def test_stop_text_ends_inside_of_thoughts_too() -> None:
    answer = answer_text(True, ("STOP",))
    assert parts_of("one STOP two", answer) == [Part("reasoning", "one ")]
    assert answer.stopped == "STOP"


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("base", "base"), ("org/model", "base"), ("routed", "routed"), ("ungated", "ungated"),
        ("math", ("math",)), ("base+math", ("math",)), ("math,chat,math", ("math", "chat")),
        ("org/model+chat,math", ("chat", "math")), ("default_model", "base"),
    ],
)  # fmt: skip
def test_model_names_what_answers(model: str, wanted: str | tuple[str, ...]) -> None:
    assert parse_model(model, "org/model", ("math", "chat")) == wanted


@given(st.one_of(st.text(max_size=20), st.sampled_from(["/etc", "../x", "a/b", "base+", "math,"])))
def test_model_that_names_nothing_is_refused(model: str) -> None:
    if model not in ("base", "org/model", "math", "base+math", "routed", "ungated"):
        with pytest.raises(UnknownModelError):
            parse_model(model, "org/model", ("math",))
    with pytest.raises(UnknownModelError, match="there are: base, org/model, math, and sets"):
        parse_model("gpt-4", "org/model", ("math",), ())  # a server without a store has no routes


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True), ("localhost:80", True), ("[::1]:80", True), ("::1", True),
        ("127.9.9.9:1", True), ("", False), ("0.0.0.0", False), ("evil.example:80", False),
        ("localhost.evil.example", False), ("127.0.0.1.evil.example", False), ("[::]:80", False),
    ],
)  # fmt: skip
def test_loopback_is_this_machine_alone(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside
