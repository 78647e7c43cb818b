"""Rows, scored answers and prompts agree on where an answer begins, with reasoning and without.

Run: pytest tests/data/test_thinking.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from mlxstacks.arms.arm import encode_choices
from mlxstacks.data import DomainDataSettings, Rendering, Row, encode_messages
from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.text_settings import Thinking, ThinkingMode
from mlxstacks.routing.generation import encode_prompt
from mlxstacks.studies.benchmarks.arms import PromptEncoder
from mlxstacks.studies.benchmarks.settings import ArmSettings
from mlxstacks.study.items import Item
from tests.data.chat_tokenizers import chat_tokenizer
from tests.data.train_rows import read_rows

ASKED = [{"role": "user", "content": "What is 2 + 3?"}]
BLOCK = "<think>\n\n</think>\n\n"
TEMPLATES = ("opened", "closed", "forgetful")
MODES: tuple[ThinkingMode, ...] = ("auto", "on", "off")


def answer(content: str = "5", **reasoning: str) -> dict[str, str]:
    return {"role": "assistant", "content": content, **reasoning}


REASONED = {
    "reasoning_content": answer(reasoning_content="3 after 2"),
    "thinking": answer(thinking="3 after 2\n"),
    "inline": answer("<think>\n3 after 2\n</think>\n\n5"),
}


def parts(row: Row, name: str) -> tuple[str, str]:
    """(before the last answer, what the loss counts)."""
    tokenizer = chat_tokenizer(name)
    start = len(row.tokens) - next(
        (n for n, weight in enumerate(reversed(row.weights)) if not weight and n > 1), 0
    )
    counted = [t for t, w in zip(row.tokens, row.weights, strict=True) if w]
    return tokenizer.decode(row.tokens[:start]), tokenizer.decode(counted)


@pytest.mark.parametrize("name", TEMPLATES)
def test_plain_row_is_the_answer_behind_the_prompt_without_thinking(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    for turn in (answer(), answer(BLOCK + "5"), answer(reasoning_content=" \n")):
        row = encode_messages([*ASKED, turn], tokenizer)
        before, counted = parts(row, name)
        assert counted == "5<|im_end|>"
        assert before.endswith(f"<|im_start|>assistant\n{BLOCK}")
        prompt = encode_prompt(tokenizer, ASKED, Rendering("off"))
        assert row.tokens[: len(prompt.tokens)] == prompt.tokens


@pytest.mark.parametrize("form", REASONED)
@pytest.mark.parametrize("name", ["opened", "closed"])
def test_reasoning_and_answer_are_trained_behind_the_prompt_with_thinking(
    name: str, form: str
) -> None:
    tokenizer = chat_tokenizer(name)
    row = encode_messages([*ASKED, REASONED[form]], tokenizer)
    opening = "" if name == "opened" else "<think>\n"
    assert parts(row, name)[1] == f"{opening}3 after 2\n</think>\n\n5<|im_end|>"
    prompt = encode_prompt(tokenizer, ASKED, Rendering("on"))
    assert row.tokens[: len(prompt.tokens)] == prompt.tokens
    off = encode_messages([*ASKED, REASONED[form]], tokenizer, rendering=Rendering("off"))
    assert off == encode_messages([*ASKED, answer()], tokenizer)
    # The tags are tokens: those that begin and end thoughts.
    assert tokenizer.convert_tokens_to_ids("</think>") in row.tokens


def test_reasoning_that_the_template_has_no_place_for_does_not_open_a_thought() -> None:
    tokenizer = chat_tokenizer("forgetful")
    row = encode_messages([*ASKED, REASONED["thinking"]], tokenizer)
    assert row == encode_messages([*ASKED, answer()], tokenizer)
    inline = encode_messages([*ASKED, REASONED["inline"]], tokenizer)
    assert parts(inline, "forgetful")[1] == "3 after 2\n</think>\n\n5<|im_end|>"


@pytest.mark.parametrize("name", TEMPLATES)
def test_thinking_on_trains_every_row_behind_the_prompt_with_thinking(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    row = encode_messages([*ASKED, answer()], tokenizer, rendering=Rendering("on"))
    prompt = prompt_tokens(ASKED, tokenizer, Rendering("on"))
    assert list(row.tokens[: len(prompt)]) == prompt
    assert not any(row.weights[: len(prompt)])


def test_turns_before_the_last_are_as_the_template_writes_a_history() -> None:
    tokenizer = chat_tokenizer("opened")
    chat = [*ASKED, REASONED["inline"], {"role": "user", "content": "And 4 more?"}, answer("9")]
    row = encode_messages(chat, tokenizer)
    before, counted = parts(row, "opened")
    assert counted == "5<|im_end|>9<|im_end|>"
    prompt = encode_prompt(tokenizer, chat[:3], Rendering("off"))
    assert before == tokenizer.decode(prompt.tokens)
    later = [*chat[:3], answer("9", thinking="5 and 4")]
    assert parts(encode_messages(later, tokenizer), "opened")[1] == (
        "5<|im_end|>5 and 4\n</think>\n\n9<|im_end|>"
    )


def test_only_the_block_at_the_beginning_is_reasoning() -> None:
    tokenizer = chat_tokenizer("opened")
    end = tokenizer.convert_tokens_to_ids("</think>")
    said = "<think>\na </tool_call> b\n</think>\n\nc </think> d<think>e</think>"
    row = encode_messages([*ASKED, answer(said)], tokenizer)
    counted = [t for t, w in zip(row.tokens, row.weights, strict=True) if w]
    assert counted.count(end) == 1
    assert tokenizer.decode(counted) == said.removeprefix("<think>\n") + "<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("</tool_call>") not in counted
    asked = [{"role": "user", "content": said}]
    assert prompt_tokens(asked, tokenizer, Rendering("on")).count(end) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*TEMPLATES, "chatml", "gemma"])
def test_candidates_stand_behind_the_prompt_of_training(name: str, mode: ThinkingMode) -> None:
    tokenizer = chat_tokenizer(name)
    item = Item("1", "sums", ASKED[0]["content"], ("5", "6<|im_end|>"), 0)
    choices = encode_choices(item, tokenizer, Rendering(mode))
    before = tuple(prompt_tokens(ASKED, tokenizer, Rendering(mode).before_answer()))
    assert choices.context == before
    encoder = PromptEncoder(tokenizer, ArmSettings(chat="all", thinking=mode), None)
    context, [candidate] = encoder.context_and_candidates(item.question, ["6<|im_end|>"])
    assert context == before
    assert tokenizer.eos_token_id not in candidate
    row = encode_messages([*ASKED, answer("6")], tokenizer, rendering=Rendering(mode))
    assert row.tokens[: len(before)] == before


@pytest.mark.parametrize(
    ("name", "mode", "turn", "note"),
    [
        ("opened", "off", REASONED["inline"], "1 row with reasoning, which is left out"),
        ("opened", "on", answer(), "1 row without reasoning, while thinking is on"),
        ("forgetful", "auto", REASONED["thinking"], "1 row with reasoning_content or thinking"),
        ("opened", "auto", answer("a</think>b"), "1 row with text of special tokens (</think>)"),
        ("opened", "auto", REASONED["inline"], None),
        ("opened", "auto", answer(), None),
        ("opened", "on", REASONED["thinking"], None),
        ("chatml", "on", answer(), None),
    ],
)  # fmt: skip
def test_a_note_where_rows_and_settings_disagree(
    name: str, mode: ThinkingMode, turn: dict[str, str], note: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [*ASKED, turn]}) + "\n")
    found = read_rows(path, chat_tokenizer(name), thinking=mode).notes
    assert [line.startswith(note or "") for line in found] == [True] * (note is not None)


def test_the_setting_takes_what_yaml_and_older_recipes_write() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Thinking)
    values = [adapter.validate_python(v) for v in ("on", "off", "auto", True, False, None)]
    assert values == ["on", "off", "auto", "on", "off", "auto"]
    settings: list[type[BaseModel]] = [DomainDataSettings, ArmSettings]
    for model in settings:
        assert model.model_fields["thinking"].default == "auto"
    with pytest.raises(ValueError, match="'auto', 'on' or 'off'"):
        adapter.validate_python("yes")
