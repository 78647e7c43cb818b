"""`mlxstacks generate`: one prompt, a file of prompts, standard input.

Run: pytest tests/cli/test_generate.py
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.cli import answers, output
from mlxstacks.errors import StoreError
from mlxstacks.routing.conversation import Conversation
from tests.cli.conftest import Run
from tests.routing.engine_cases import Places, write_places


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("generate"))


@pytest.fixture
def generate(places: Places, command: Run, work_dir: Path) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        return command("generate", "--model", str(places.model), "--store-path", str(places.store),
                       "--max-tokens", "4", *arguments)  # fmt: skip

    return call


def typed(monkeypatch: pytest.MonkeyPatch, text: str, tty: bool = False) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    monkeypatch.setattr(sys, "stdin", Stream(text))


def rows(path: Path, *values: Any) -> str:
    path.write_text("".join(f"{v if isinstance(v, str) else json.dumps(v)}\n" for v in values))
    return str(path)


def test_answer_alone_goes_to_stdout(generate: Run) -> None:
    code, out, err = generate("seven apples", "--pin", "tolu")
    assert code == 0, err
    assert "pinned: tolu | loaded tolu" in err
    assert "pinned" not in out
    _, document, err = generate("seven apples", "--pin", "tolu", "--json")
    assert out.strip() not in err
    [answer] = json.loads(document)["answers"]
    assert (answer["mode"], answer["tokens"]) == ("pinned", 4)
    assert output.safe(answer["text"]).strip() == out.strip()


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_standard_input_is_the_prompt(
    generate: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    typed(monkeypatch, "seven\napples\n")
    code, out, err = generate(*arguments, "--json")
    assert code == 0, err
    assert json.loads(out)["answers"][0]["prompt"] == "seven\napples"


def test_rows_are_answered_in_order(generate: Run, tmp_path: Path) -> None:
    said = [("system", "be brief"), ("user", "a"), ("assistant", "b"), ("user", "river"),
            ("assistant", "as in a row of training data")]  # fmt: skip
    chat = [{"role": role, "content": content} for role, content in said]
    mark = "\ufeff"  # some editors begin a file with it
    file = rows(tmp_path / "p.jsonl", f'{mark}{{"prompt": "seven"}}', "", {"messages": chat})
    code, out, err = generate("--prompts", file, "--routed", "--system-prompt", "x", "--json")
    assert code == 0, err
    first, second = json.loads(out)["answers"]
    assert [first["prompt"], first["line"]] == ["seven", 1]
    assert [second["prompt"], second["line"]] == ["river", 3]
    assert set(first["route"]["scores"]) == {"islands", "letters", "tolu"}
    assert second["prompt_tokens"] > len("be brief" + "river")
    code, out, _ = generate("--prompts", file)
    assert (code, out.count("> seven"), out.count("> river")) == (0, 1, 1)


def test_modes_are_compared(generate: Run) -> None:
    code, out, err = generate("seven apples", "--compare", "--json")
    assert code == 0, err
    found = json.loads(out)["answers"]
    assert [answer["mode"] for answer in found] == ["base", "ungated", "routed"]
    assert [answer["route"]["mode"] for answer in found] == ["base", "ungated", "routed"]
    code, out, _ = generate("seven apples", "--compare")
    assert [line for line in out.splitlines() if line in ("base:", "ungated:", "routed:")] == [
        "base:", "ungated:", "routed:",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: got list"),
        ({"prompt": " "}, "line 2: the prompt is empty"),
        ('{"prompt": "a \\ud800"}', "line 2: \\ud800 is half a character"),
        ({"prompt": 7}, "line 2: prompt is int"),
        ({"text": "x"}, "line 2: a row has the keys ['text']"),
        ({"messages": []}, "line 2: messages must be a list"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: the last message is of"),
        ({"prompt": "x" * 1100}, "line 2: the prompt has at least 1,0"),
    ],
)
def test_rows_that_are_none_are_named_before_anything_is_answered(
    generate: Run, tmp_path: Path, row: Any, message: str
) -> None:
    code, out, err = generate("--prompts", rows(tmp_path / "p.jsonl", {"prompt": "ok"}, row))
    assert (code, message in err, out) == (2, True, ""), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["  "], "the prompt is empty"),
        (["x" * 1100], "context is 1,024"),
        (["x", "--prompts", "y"], "not both"),
        (["x", "--json-schema", '{"type": "object"}'], "a schema itself; write it to a file"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_prompts_that_cannot_be_answered(generate: Run, arguments: list[str], message: str) -> None:
    code, out, err = generate(*arguments)
    assert (code, message in err, out) == (2, True, ""), err


def test_row_that_fails_costs_no_other_row(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Conversation.ask

    def ask(self: Conversation, text: str, **options: Any) -> Any:
        if text == "river":
            raise StoreError("the set is \x1b[2Jtoo large")
        return own(self, text, **options)

    monkeypatch.setattr(Conversation, "ask", ask)
    file = rows(tmp_path / "p.jsonl", {"prompt": "seven"}, {"prompt": "river"}, {"prompt": "stone"})
    code, out, err = generate("--prompts", file, "--json")
    assert (code, "\x1b" in err) == (1, False), err
    document = json.loads(out)
    assert ["error" in answer for answer in document["answers"]] == [False, True, False]
    assert "line 2: the set" in document["answers"][1]["error"]
    assert document["failure"].startswith("1 of 3 answers; the first: ")
    assert generate("river")[0] == 1


def test_input_without_an_end_is_refused(generate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_CHARACTERS", 50)
    typed(monkeypatch, "x" * 60)
    code, out, err = generate()
    assert (code, "more than 50 characters" in err, out) == (2, True, ""), err


def test_terminal_without_a_prompt_is_told_so(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "", tty=True)
    code, _, err = generate()
    assert (code, "give a PROMPT" in err) == (2, True)


def test_bare_run_asks_nano(command: Run, work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "")
    code, out, err = command("generate", "--max-tokens", "3")
    assert (code, "asking nano" in err) == (0, True), err
    assert out.strip()


def test_thinking_is_switched_on_off_or_left_alone(generate: Run) -> None:
    found = {
        flag: json.loads(generate("seven", *flag.split(), "--json")[1])
        for flag in ("", "--thinking", "--no-thinking")
    }
    assert [f["settings"]["thinking"] for f in found.values()] == ["auto", "on", "off"]
    texts = [f["answers"][0]["text"] for f in found.values()]
    assert texts[1] != texts[2] == texts[0]  # the test's template writes another mark


def test_drawn_answers_repeat_with_their_seed(generate: Run) -> None:
    said = [
        json.loads(generate("seven", "--temp", "2", "--seed", seed, "--json")[1])["answers"][0]
        for seed in ("1", "1", "2")
    ]
    assert said[0]["text"] == said[1]["text"] != said[2]["text"]


def test_rows_answered_before_an_interrupt_are_not_lost(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Conversation.ask

    def ask(self: Conversation, question: str, **options: Any) -> Any:
        if question == "second":
            raise KeyboardInterrupt
        return given(self, question, **options)

    monkeypatch.setattr(Conversation, "ask", ask)
    file = rows(tmp_path / "p.jsonl", {"prompt": "first"}, {"prompt": "second"})
    code, out, err = generate("--prompts", file, "--json")
    document = json.loads(out)
    assert (code, document["interrupted"], "Interrupted" in err) == (130, True, True)
    assert [answer["prompt"] for answer in document["answers"]] == ["first"]
    file = rows(tmp_path / "q.jsonl", {"prompt": "second"})
    code, out, _ = generate("--prompts", file, "--json")  # there is nothing to keep
    assert (code, json.loads(out)["error"]["message"]) == (130, "interrupted")
