"""Records and examples as token rows: templates, loss masks, cuts.

Run: pytest tests/data/test_encode.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.data import (
    DomainDataSettings,
    Row,
    encode_examples,
    encode_messages,
    encode_pairs,
    encode_record,
)
from mlxstacks.data.chat import Chat
from mlxstacks.data.examples import Example, make_example
from mlxstacks.data.rows import row_of
from mlxstacks.errors import InputError
from mlxstacks.nano.exports import ASSETS
from tests.data.chat_tokenizers import chat_tokenizer
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


@pytest.mark.parametrize("template", [None, "opened"])
def test_the_last_answers_of_a_pair_count_and_each_brings_its_own_reasoning(
    tokenizer: Any, template: str | None
) -> None:
    """With "opened", a template that writes reasoning_content."""
    tokens = tokenizer if template is None else chat_tokenizer(template)
    rejected = {"role": "assistant", "content": "Ten."}
    chosen = CHAT[-1] if template is None else {**CHAT[-1], "reasoning_content": "5 and 4"}
    record = {"messages": [*CHAT[:-1], chosen], "rejected": rejected}
    example = make_example(record, "a test")
    settings = DomainDataSettings(sources=("x",))
    pairs = encode_pairs([example], tokens, settings, 512)

    def counted(row: Row) -> str:
        ids = [token for token, weight in zip(row.tokens, row.weights, strict=True) if weight]
        return str(tokens.decode(ids))

    good, bad = counted(pairs.chosen[0]), counted(pairs.rejected[0])
    assert ("It is 9." in good, "5<|im_end|>" in good, "Ten." in bad) == (True, False, True)
    assert ("5 and 4" in good, "5 and 4" in bad) == (template is not None, False)
    other = {**record, "rejected": {"role": "assistant", "content": "Nine."}}
    assert make_example(other, "a test").row_id != example.row_id
    assert make_example(other, "a test").prompt_id == example.prompt_id


def test_rows_share_the_numbers_of_their_tokens() -> None:
    """Python makes a new object for each int above 256: 28 bytes a token, for millions of them."""
    one, other = (row_of([int("5000"), int("7000")], [1.0, 1.0]) for _ in range(2))
    assert one == other
    assert all(a is b for a, b in zip(one.tokens, other.tokens, strict=True))


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

    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' + json.dumps({"messages": CHAT}) + "\n")
    # the second as transformers raises it where a tokenizer has no template
    for fault in (TemplateError("roles must alternate"), ValueError("template is not set")):

        def strict(*_: Any, fault: Exception = fault) -> str:
            raise fault

        with pytest.raises(InputError, match=rf"line 2: the chat template .*: {fault}"):
            read_rows(path, Template(strict))


PAIR = {"prompt": "Name a colour.", "input": "red, blue", "answer": "Red."}


def about(**settings: Any) -> DomainDataSettings:
    return DomainDataSettings.model_validate({"sources": "x", **settings})


def example(record: dict[str, Any]) -> Example:
    return make_example(record, "x.jsonl")


def encoded(record: dict[str, Any], tokenizer: Any, **settings: Any) -> Row:
    (row,) = encode_examples([example(record)], tokenizer, about(**settings)).rows
    return row


def counted_text(row: Row, tokenizer: Any) -> str:
    return tokenizer.decode([t for t, w in zip(row.tokens, row.weights, strict=True) if w])


def test_the_chat_template_puts_the_input_below_the_prompt(tokenizer: Any) -> None:
    row = encoded(PAIR, tokenizer)
    plain = {"prompt": "Name a colour.\n\nred, blue", "answer": "Red."}
    assert row == encode_record(plain, tokenizer)
    assert counted_text(row, tokenizer) == "Red.<|im_end|>"
    assert encoded(PAIR, tokenizer, mask_prompt=True) == row
    unmasked = encoded(PAIR, tokenizer, mask_prompt=False)
    assert (unmasked.tokens, set(unmasked.weights[1:])) == (row.tokens, {1.0})


def test_the_alpaca_template(tokenizer: Any) -> None:
    row = encoded(PAIR, tokenizer, template="alpaca")
    text = (
        "### Instruction:\nName a colour.\n\n### Input:\nred, blue\n\n### Response:\nRed.<|im_end|>"
    )
    assert tokenizer.decode(row.tokens) == text
    assert counted_text(row, tokenizer) == "Red.<|im_end|>"
    assert row.tokens[-1] == tokenizer.eos_token_id
    unmasked = encoded(PAIR, tokenizer, template="alpaca", mask_prompt=False)
    assert (unmasked.tokens, set(unmasked.weights[1:])) == (row.tokens, {1.0})
    without = encoded({"prompt": "{p}", "answer": "Red."}, tokenizer, template="alpaca")
    assert "### Instruction:\n{p}\n\n### Input:\n\n\n### Response:\nRed." in tokenizer.decode(
        without.tokens
    )


def test_text_counts_whole_under_every_mask(tokenizer: Any) -> None:
    record = {"text": "one two three"}
    for settings in ({}, {"mask_prompt": True}, {"template": "alpaca"}):
        assert encoded(record, tokenizer, **settings) == encode_record(record, tokenizer)
    assert set(encode_record(record, tokenizer).weights[1:]) == {1.0}


class Beginning:
    """A tokenizer of characters that begins every text with token 1, as Llama's and Gemma's do."""

    bos_token_id = 1
    eos_token_id: int | None = 2
    all_special_tokens = ("</s>",)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        raise KeyError("role")


def test_texts_begin_as_the_tokenizer_begins_them() -> None:
    text = encoded({"text": "ab"}, Beginning())
    assert text == Row((1, 97, 98, 2), (0.0, 1.0, 1.0, 1.0))
    # as in mlx-lm, an end mark that is there is enough
    assert encoded({"text": "ab\x02"}, Beginning()) == text
    alpaca = encoded({"prompt": "p", "answer": "a"}, Beginning(), template="alpaca")
    assert (alpaca.tokens[0], alpaca.tokens[-2:]) == (1, (97, 2))
    assert sum(alpaca.weights) == 2
    assert alpaca.tokens.count(1) == alpaca.tokens.count(2) == 1


def test_special_tokens_in_a_row_are_text_no_more() -> None:
    record = {"text": "a</s>b"}
    assert encoded(record, Beginning()).tokens == (1, 97, 98, 2)
    kept = encoded(record, Beginning(), strip_markers=False)
    assert len(kept.tokens) == 2 + len("a</s>b")


def test_long_rows_are_cut_and_rows_without_loss_left_out(tokenizer: Any) -> None:
    examples = [
        example({"text": "one two three four five six"}),
        example({"prompt": "a very long question " * 9, "answer": "Red."}),
        example({"prompt": "q", "answer": "<|endoftext|>"}),
        example({"messages": [{"role": "assistant", "content": "<|endoftext|>"}]}),
        example({"text": "a"}),
    ]
    found = encode_examples(examples, tokenizer, about(), max_tokens=8)
    assert found.ids == [examples[0].row_id, examples[4].row_id]
    assert (found.cut, found.empty) == (2, 3)
    assert all(len(row.tokens) <= 8 for row in found.rows)
    with pytest.raises(InputError, match=r"none of 1 rows .* 1 were cut to 8 tokens"):
        encode_examples(examples[1:2], tokenizer, about(), max_tokens=8)
    with pytest.raises(InputError, match="no examples"):
        encode_examples([], tokenizer, about())


def test_what_a_template_refuses_is_named() -> None:
    row = example({"prompt": "p", "answer": "a"})
    with pytest.raises(InputError, match=rf"x\.jsonl, row {row.row_id}: .*role.*the row is"):
        encode_examples([row], Beginning(), about())
    chat = example({"messages": [{"role": "assistant", "content": "Hi"}]})
    with pytest.raises(InputError, match="does not fit template alpaca"):
        encode_examples([chat], Beginning(), about(template="alpaca"))


def test_a_cut_chat_is_rendered_no_further_than_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer costs renderings of all that stands before it: 10,000 turns took minutes."""
    tokenizer = chat_tokenizer("chatml")
    turns = [
        {"role": role, "content": "seven"} for _ in range(30) for role in ("user", "assistant")
    ]
    whole = encode_messages(turns, tokenizer)
    rendered: list[int] = []
    render = Chat.render

    def counting(chat: Chat, turns: Any, *arguments: Any, **options: Any) -> str:
        rendered.append(1)
        return render(chat, turns, *arguments, **options)

    monkeypatch.setattr(Chat, "render", counting)
    assert encode_messages(turns, tokenizer, limit=20).tokens == whole.tokens[:20]
    assert len(rendered) < 12
