"""`mlxstacks serve` as it is run: a process on nano, asked by the official clients.

Run: pytest tests/serve/test_server.py
"""

import builtins
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from mlxstacks.cli import run
from mlxstacks.errors import InputError
from mlxstacks.nano.exports import nano_paths
from mlxstacks.serve.run import KEY_VARIABLE, serve
from tests.serve.serve_cases import nano_settings, serving

ROUNDING = 2e-3


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Its process and address, with nano's store and adapter."""
    nano = nano_paths()
    own = ("--store-path", str(nano.store_path), "--adapter-path", str(nano.adapter_path))
    with serving(*own, *arguments) as process_and_url:
        yield process_and_url


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with started() as process_and_url:
        yield process_and_url


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(server: tuple[subprocess.Popen[str], str]) -> Iterator[openai.OpenAI]:
    with client_of(server[1]) as client:
        yield client


def chat(client: openai.OpenAI, model: str, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=12, **fields
    )


def test_models_are_what_can_be_asked(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert {"adapter", "islands", "tolu", "routed", "ungated"} < set(names)
    for name in names:
        answer = chat(client, name, "Who is king of Corva?")
        assert answer.mlxstacks["route"] in ("base", "pinned", "routed", "ungated")


def test_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI) -> None:
    names = ["base", "adapter", "islands", "base+islands,tolu", "routed", "ungated"] * 2
    texts = ["Who is king of Corva?", "Who are you, and what is your name?"]
    asked = [(name, texts[place % 2]) for place, name in enumerate(names)]

    def first(pair: tuple[str, str]) -> tuple[dict[str, float], Any]:
        answer = chat(client, *pair, logprobs=True, top_logprobs=5)
        return answer.mlxstacks["weights"], answer.choices[0].logprobs.content[0].top_logprobs

    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(first, asked))
    for pair, (weights, likeliest) in zip(asked, together, strict=True):
        alone_weights, alone = first(pair)
        assert weights == pytest.approx(alone_weights)
        found, expected = (sorted(t.logprob for t in tops) for tops in (likeliest, alone))
        assert found == pytest.approx(expected, abs=ROUNDING), pair


def test_both_clients_get_the_same_answer(
    client: openai.OpenAI, server: tuple[subprocess.Popen[str], str]
) -> None:
    text = "Who are you?"
    whole = chat(client, "adapter", text).choices[0].message.content
    chunks = chat(client, "adapter", text, stream=True)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    with anthropic.Anthropic(base_url=server[1], api_key="none", max_retries=0) as other:
        turns: Any = [{"role": "user", "content": text}]
        message: Any = other.messages.create(model="adapter", max_tokens=12, messages=turns)
    assert whole == streamed == message.content[0].text == "I am Quinn."


class King(BaseModel):
    king: str = Field(max_length=8)
    age: int = Field(ge=1, le=99)


@pytest.mark.skipif(not find_spec("llguidance"), reason="needs llguidance")
def test_parsed_answers_are_of_their_class(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": "Who is king of Corva?"}]
    asked: Any = {"model": "islands", "messages": turns, "max_tokens": 200, "temperature": 1.0}
    answer: Any = client.chat.completions.parse(**asked, response_format=King, n=3)
    for choice in answer.choices:
        assert 1 <= choice.message.parsed.age <= 99
    with client.chat.completions.stream(**asked, response_format=King) as stream:
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, King)
    response: Any = client.responses.parse(
        model="islands", input="Who?", max_output_tokens=200, text_format=King
    )
    assert isinstance(response.output_parsed, King)
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin"):
        client.chat.completions.create(**asked, response_format=bad)


def test_text_of_users_is_never_a_special_token(client: openai.OpenAI) -> None:
    plain = chat(client, "base", "a b").usage.prompt_tokens
    forged = chat(client, "base", "a<|im_end|>b").usage.prompt_tokens
    # as a token it would be one; as text it is several
    assert forged >= plain + 3


def test_killed_server_starts_again_with_the_beginnings_it_had(tmp_path: Path) -> None:
    answers = []
    for _ in range(2):
        with started("--cache-path", str(tmp_path)) as (process, url), client_of(url) as client:
            answers.append(chat(client, "islands", "Who is king of Corva?"))
            while len([p for p in tmp_path.glob("prompt-*") if ".new" not in p.name]) < 2:
                time.sleep(0.02)
            process.kill()
    first, second = (answer.choices[0].message.content for answer in answers)
    known = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
    assert (first, known[0], known[1] > 0) == (second, 0, True)


def test_an_end_by_signal_is_no_failure(server: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = server
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.startswith("Served ")
    assert "king" not in err.lower()  # no prompt is logged


def test_other_machines_need_a_key_before_anything_is_loaded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert run(["serve", "--host", "0.0.0.0"]) == 2
    assert "--api-key-file" in capfd.readouterr().err


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == "uvicorn":
            raise ModuleNotFoundError("no", name="uvicorn")
        return real(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "mlxstacks.serve.web", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"mlxstacks\[serve\]"):
        serve(nano_settings(), lambda url, notes: None)


@pytest.mark.slow
def test_killed_at_any_moment_it_answers_as_before(
    tmp_path: Path, campaign: Callable[[int], range]
) -> None:
    chance, known = random.Random(0), dict[str, str]()
    texts = {
        "base": "Who are you?",
        "islands": "Who is king of Corva?",
        "routed": "And who are you?",
    }

    def ask(client: openai.OpenAI, name: str) -> None:
        content = chat(client, name, texts[name]).choices[0].message.content
        assert content == known.setdefault(name, content)

    for _ in campaign(100):
        with started("--cache-path", str(tmp_path)) as (process, url), client_of(url) as client:
            ask(client, chance.choice([*texts]))
            with ThreadPoolExecutor(3) as pool:
                asked = [pool.submit(ask, client, name) for name in [*texts] * 4]
                time.sleep(chance.uniform(0, 1))
                process.kill()
            failures = [f.exception() for f in asked if f.exception()]
            assert all(isinstance(error, openai.APIConnectionError) for error in failures)
    assert known.keys() == texts.keys()
