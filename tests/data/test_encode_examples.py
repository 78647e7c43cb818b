"""Examples as token rows: templates, loss masks, cuts.

Run: pytest tests/data/test_encode_examples.py
"""

from typing import Any

import pytest

from mlxstacks.data import DomainDataSettings, Row, encode_examples, encode_record
from mlxstacks.data.chat import Chat
from mlxstacks.data.encode import encode_messages
from mlxstacks.data.examples import Example, make_example
from mlxstacks.errors import InputError
from mlxstacks.nano.exports import ASSETS
from tests.data.chat_tokenizers import chat_tokenizer
from tools.nano.tokenizer import load_tokenizer

PAIR = {"prompt": "Name a colour.", "input": "red, blue", "answer": "Red."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ASSETS / "model")


def about(**settings: Any) -> DomainDataSettings:
    return DomainDataSettings.model_validate({"sources": "x", **settings})


def example(record: dict[str, Any]) -> Example:
    return make_example(record, "x.jsonl")


def encoded(record: dict[str, Any], tokenizer: Any, **settings: Any) -> Row:
    (row,) = encode_examples([example(record)], tokenizer, about(**settings)).rows
    return row


def counted(row: Row, tokenizer: Any) -> str:
    return tokenizer.decode([t for t, w in zip(row.tokens, row.weights, strict=True) if w])


def test_the_chat_template_puts_the_input_below_the_prompt(tokenizer: Any) -> None:
    row = encoded(PAIR, tokenizer)
    plain = {"prompt": "Name a colour.\n\nred, blue", "answer": "Red."}
    assert row == encode_record(plain, tokenizer)
    assert counted(row, tokenizer) == "Red.<|im_end|>"
    assert encoded(PAIR, tokenizer, mask_prompt=True) == row
    unmasked = encoded(PAIR, tokenizer, mask_prompt=False)
    assert (unmasked.tokens, set(unmasked.weights[1:])) == (row.tokens, {1.0})


def test_the_alpaca_template(tokenizer: Any) -> None:
    row = encoded(PAIR, tokenizer, template="alpaca")
    text = (
        "### Instruction:\nName a colour.\n\n### Input:\nred, blue\n\n### Response:\nRed.<|im_end|>"
    )
    assert tokenizer.decode(row.tokens) == text
    assert counted(row, tokenizer) == "Red.<|im_end|>"
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
