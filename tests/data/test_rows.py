"""Rows, loss masks, packing, batches and JSONL. Run: pytest tests/data/test_rows.py"""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.data import (
    ChatTokenizer,
    Row,
    batch_at,
    encode_messages,
    encode_record,
    make_batch,
    pack_rows,
    read_records,
)
from mlxstacks.data.rows import row_of
from mlxstacks.errors import InputError
from mlxstacks.nano.exports import ASSETS
from tests.data.train_rows import read_rows
from tools.nano.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 more?"},
    {"role": "assistant", "content": "It is 9."},
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ASSETS / "model")


def test_answers_and_their_end_marks_carry_the_loss(tokenizer) -> None:
    row = encode_messages(CHAT, tokenizer)
    counted = [token for token, weight in zip(row.tokens, row.weights, strict=True) if weight]
    assert tokenizer.decode(counted) == "5<|im_end|>It is 9.<|im_end|>"
    assert set(row.weights) == {0.0, 1.0}


def test_a_chat_is_the_template_text(tokenizer) -> None:
    row = encode_messages(CHAT, tokenizer)
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_prompt_weight_reaches_all_but_the_first_prompt_token(tokenizer) -> None:
    row = encode_messages(CHAT, tokenizer, prompt_weight=0.25)
    assert row.weights[0] == 0.0
    assert set(row.weights[1:]) == {0.25, 1.0}


def test_the_three_kinds_of_record(tokenizer) -> None:
    pair = encode_record({"prompt": "Hi", "answer": "Hello"}, tokenizer)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert pair == encode_record({"messages": messages}, tokenizer)
    assert pair == encode_record({"prompt": "Hi", "completion": "Hello"}, tokenizer)
    text = encode_record({"text": "one two"}, tokenizer)
    assert text.tokens[-1] == tokenizer.eos_token_id
    assert text.weights == (0.0, *[1.0] * (len(text.tokens) - 1))
    with pytest.raises(InputError, match="allowed: text"):
        encode_record({"question": "?"}, tokenizer)


def test_a_text_keeps_its_opening_mark_and_ends_once() -> None:
    """As in mlx-lm: models with <bos> are lost without it; an end mark that is there is enough."""

    class Marking:
        bos_token_id = 1
        eos_token_id = 9

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + [int(word) for word in text.split()]

    marking = cast(ChatTokenizer, Marking())
    assert encode_record({"text": "5 6"}, marking).tokens == (1, 5, 6, 9)
    assert encode_record({"text": "5 9"}, marking).tokens == (1, 5, 9)


def test_a_model_without_a_chat_template_is_told_at_the_row(tmp_path: Path) -> None:
    def missing(
        messages: list[dict[str, Any]], generate: bool, tools: Any, thinking: Any = None
    ) -> str:
        raise ValueError("tokenizer.chat_template is not set")  # as transformers raises

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(InputError, match=r"line 1: .*: tokenizer\.chat_template is not"):
        read_rows(path, Template(missing))


def test_rows_share_the_numbers_of_their_tokens() -> None:
    """Python makes a new object for each int above 256: 28 bytes a token, for millions of them."""
    one, other = (row_of([int("5000"), int("7000")], [1.0, 1.0]) for _ in range(2))
    assert one == other
    assert all(a is b for a, b in zip(one.tokens, other.tokens, strict=True))


def test_jsonl_errors_name_the_line(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n\n[1]\n")
    with pytest.raises(InputError, match=r"line 3.*list"):
        read_records(path)
    path.write_text('{"text": "a"}\n{oops\n')
    with pytest.raises(InputError, match="line 2: not JSON"):
        read_records(path)
    path.write_text("\n")
    with pytest.raises(InputError, match="no rows"):
        read_records(path)
    path.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert [r["text"] for r in read_records(path)] == ["a", "b"]


def test_a_line_without_an_end_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxstacks.data.json_rows.MAX_ROW_BYTES", 64)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "short"}\n' + "x" * 1000)
    with pytest.raises(InputError, match="line 2: 64 bytes or more"):
        read_records(path)


# --- templates and records of other kinds ---------------------------------------------------------


class Template:
    """A tokenizer of characters whose template is a function of the messages."""

    eos_token_id: int | None = 0

    def __init__(self, render: Any) -> None:
        self.render = render

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: Any = None,
        enable_thinking: bool | None = None,
    ) -> str:
        return self.render(messages, add_generation_prompt, tools, enable_thinking)


def reasoning(
    messages: list[dict[str, Any]], generate: bool, tools: Any, thinking: Any = None
) -> str:
    """As Qwen3's: the last answer gets a think block, earlier ones lose theirs."""
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    text = f"<tools>{json.dumps(tools)}</tools>" if tools else ""
    for index, message in enumerate(messages):
        content = message["content"]
        if message.get("tool_calls"):
            content += f"<call>{message['tool_calls'][0]['name']}</call>"
        if message["role"] == "assistant" and index > last:
            content = f"<think>\n\n</think>\n\n{content}"
        text += f"<{message['role']}>{content}<end>\n"
    opening = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
    return text + (f"<assistant>{opening}" if generate else "")


def counted(row: Row) -> str:
    return "".join(chr(t) for t, w in zip(row.tokens, row.weights, strict=True) if w)


def test_every_turn_counts_where_the_template_rewrites_earlier_ones() -> None:
    tokenizer = Template(reasoning)
    row = encode_messages(CHAT, tokenizer)
    assert "".join(map(chr, row.tokens)) == reasoning(CHAT, False, None)
    assert counted(row) == "5<end>It is 9.<end>"


def test_a_chat_may_begin_with_the_assistant() -> None:
    row = encode_messages([{"role": "assistant", "content": "Hi"}, *CHAT[1:2]], Template(reasoning))
    assert counted(row).endswith("Hi<end>")
    assert "What" not in counted(row)


def test_tools_reach_the_template_and_calls_count_as_answers() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [CHAT[1], call, {"role": "tool", "content": "5"}, CHAT[2], CHAT[3], CHAT[4]]
    record = {"messages": messages, "tools": [{"name": "add"}]}
    row = encode_record(record, Template(reasoning))
    text = "".join(map(chr, row.tokens))
    assert text.startswith('<tools>[{"name": "add"}]</tools><user>')
    assert counted(row) == "<call>add</call><end>5<end>It is 9.<end>"


def test_a_template_that_drops_turns_is_refused() -> None:
    def forgetful(
        messages: list[dict[str, Any]], generate: bool, tools: Any, thinking: Any = None
    ) -> str:
        return f"<{messages[-1]['role']}>{messages[-1]['content']}<end>"

    with pytest.raises(InputError, match="drops earlier turns"):
        encode_messages(CHAT, Template(forgetful))


def test_content_in_parts_becomes_text(tokenizer) -> None:
    parts = [{"type": "text", "text": "Hi "}, "there"]
    answer = {"role": "assistant", "content": "Hello"}
    whole = encode_record({"prompt": "Hi there", "completion": "Hello"}, tokenizer)
    messages = [{"role": "user", "content": parts}, answer]
    assert encode_record({"messages": messages}, tokenizer) == whole


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "Hi"}, "list with at least one message"),
        ({"messages": [{"content": "Hi"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 0: content is int"),
        ({"messages": [{"role": "user"}]}, "message 0: content is NoneType"),
        ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, "parts that are not text"),
        ({"prompt": ["Hi"], "completion": 5}, "prompt is list, must be text"),
        ({"text": 7}, "text is int, must be text"),
    ],
    ids=str,
)
def test_a_broken_row_names_file_and_line(
    tokenizer, tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b"}\n\n' + json.dumps(record) + "\n")
    with pytest.raises(InputError, match=rf"rows\.jsonl, line 3: .*{message}"):
        read_rows(path, tokenizer)


def test_what_a_template_raises_names_file_and_line(tmp_path: Path) -> None:
    from jinja2 import TemplateError

    def strict(
        messages: list[dict[str, Any]], generate: bool, tools: Any, thinking: Any = None
    ) -> str:
        raise TemplateError("roles must alternate")

    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"messages": CHAT}) + "\n")
    with pytest.raises(InputError, match=r"line 2: the chat template .*: roles must alternate"):
        read_rows(path, Template(strict))


def test_lines_that_are_not_text_are_named(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match="line 2: not JSON"):
        read_rows(path, tokenizer)
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "none.jsonl", tokenizer)


def test_long_rows_are_cut_and_empty_ones_left_out_and_both_counted(
    tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    question = {"messages": [{"role": "user", "content": "only a question"}]}
    chat = {"prompt": "one two three four five six seven", "completion": "eight"}
    lines = [{"text": "one two three four five six seven"}, question, chat, {"text": "a b"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    encoded = read_rows(path, tokenizer, max_tokens=6)
    assert [len(row.tokens) <= 6 for row in encoded.rows] == [True, True]
    assert (len(encoded.rows[0].tokens), encoded.cut, encoded.empty) == (6, 2, 1)
    path.write_text(json.dumps(question) + "\n")
    with pytest.raises(InputError, match="none of 1 rows is usable: 1 no_answer"):
        read_rows(path, tokenizer)


def test_with_the_prompt_counted_a_question_alone_is_a_row(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n")
    (row,) = read_rows(path, tokenizer, mask_prompt=False).rows
    assert set(row.weights[1:]) == {1.0}


# --- packing and batches --------------------------------------------------------------------------

rows_strategy = st.lists(
    st.lists(st.integers(1, 99), min_size=1, max_size=12).map(
        lambda tokens: Row(tuple(tokens), (0.0, *[1.0] * (len(tokens) - 1)))
    ),
    min_size=1,
    max_size=20,
)


@given(rows_strategy, st.integers(12, 40))
def test_packing_keeps_every_token_and_weight_in_order(rows: list[Row], length: int) -> None:
    packed = pack_rows(rows, length)
    assert all(len(row.tokens) <= length for row in packed)
    assert [t for row in packed for t in row.tokens] == [t for row in rows for t in row.tokens]
    assert [w for row in packed for w in row.weights] == [w for row in rows for w in row.weights]


def test_rows_longer_than_the_length_are_cut() -> None:
    long_row = Row(tuple(range(10)), (0.0, *[1.0] * 9))
    assert [len(row.tokens) for row in pack_rows([long_row, long_row], 6)] == [6, 6]


def test_padding_lies_on_the_right_without_weight() -> None:
    batch = make_batch([Row((1, 2, 3), (0.0, 1.0, 1.0)), Row((4,), (0.0,))], pad_token=9)
    assert batch.tokens.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch.inputs.tolist() == [[1, 2], [4, 9]]
    assert batch.targets.tolist() == [[2, 3], [9, 9]]
    assert batch.target_weights.tolist() == [[1, 1], [0, 0]]


def test_batches_are_a_function_of_the_step_and_cover_every_epoch() -> None:
    rows = [Row((i, i), (0.0, 1.0)) for i in range(10)]
    steps = [batch_at(rows, step, 4, seed=1).tokens[:, 0] for step in range(5)]
    order = np.concatenate(steps)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10].tolist() != order[10:].tolist()
    assert np.array_equal(steps[3], batch_at(rows, 3, 4, seed=1).tokens[:, 0])
    assert not np.array_equal(order[:4], batch_at(rows, 0, 4, seed=2).tokens[:, 0])


def test_malformed_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1"):
        Row((1, 2), (0.0,))
    with pytest.raises(ValueError, match="never predicted"):
        Row((1, 2), (1.0, 1.0))
