"""The HTTP side with an engine that says what it is told to: the clients' words, who may ask, and
what hostile ones get. No model.

Run: pytest tests/serve/test_app.py
"""

import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from mlxstacks.errors import InputError
from mlxstacks.routing.generation import Prompt
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve import app as app_module
from mlxstacks.serve import web
from mlxstacks.serve.app import build_app
from mlxstacks.serve.requests import Ask, Begun, Event, Piece, Refused, Ticket, TokenLogprob
from mlxstacks.serve.run import api_key
from mlxstacks.serve.text import Part

BEGUN = Begun("routed", {"math": 0.5}, {"math": 0.5}, False, ("math",), (), 0.1, 12, 4)
CALL = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
HELLO = [Part("text", "Hel"), Part("text", "lo")]


def pieces(parts: Sequence[Part], index: int = 0, **last: Any) -> list[Event]:
    logprob = (TokenLogprob("x", -0.5, (("x", -0.5), ("y", -1.0))),)
    said: list[Event] = [Piece(index, (part,), logprob) for part in parts]
    return [*said, Piece(index, (), (), tokens=len(parts), **{"finish": "stop", **last})]


class Scripted:
    """Stands for `Engine`: `script` makes the events of an ask; asks are kept."""

    models: tuple[str, ...] = ("base-model", "math")
    is_alive = True

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.tickets: list[Ticket] = []
        self.counts, self.gauges = Counter(requests=3, refused_429=1), {"rows": 2}
        self.resident = {"math": 5}
        self.script: Callable[[Ask], list[Event]] = lambda ask: [BEGUN, *pieces(HELLO)]

    def encode(self, ask: Ask) -> Prompt:
        return Prompt((1, 2), 1)

    def submit(self, ticket: Ticket) -> None:
        self.asks.append(ticket.ask)
        self.tickets.append(ticket)
        for event in self.script(ticket.ask):
            ticket.deliver(event)


@contextmanager
def listening(engine: Any, key: str | None = None, **settings: Any) -> Iterator[str]:
    with listening_to(build_app(engine, ServeSettings(**settings), key)) as url:
        yield url


@contextmanager
def listening_to(app: Any) -> Iterator[str]:
    server = web.web_server(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Scripted, str]]:
    engine = Scripted()
    with listening(engine, body_bytes=100_000, most_tokens=1000) as url:
        yield engine, url


@pytest.fixture
def engine(served: tuple[Scripted, str]) -> Scripted:
    engine, _ = served
    engine.__init__()  # type: ignore[misc]
    return engine


@pytest.fixture
def url(served: tuple[Scripted, str]) -> str:
    return served[1]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def chat(client: openai.OpenAI) -> Callable[..., Any]:
    def ask(text: str = "hi", **fields: Any) -> Any:
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        return client.chat.completions.create(model="math", messages=messages, **fields)

    return ask


@pytest.fixture
def messages(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client.messages


# --- the clients' words ---------------------------------------------------------------------------


def test_openai_client_reads_an_answer(engine: Scripted, chat: Callable[..., Any]) -> None:
    engine.script = lambda ask: [
        BEGUN, *pieces(HELLO), *pieces([Part("reasoning", "hm"), *HELLO], 1, finish="length")
    ]  # fmt: skip
    answer = chat(n=2, logprobs=True, top_logprobs=2, seed=5, stop="x", max_tokens=7,
                  temperature=0.5, top_p=0.9, presence_penalty=0.25)  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == ["Hello", "Hello"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "length"]
    assert answer.choices[1].message.reasoning == "hm"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].token == "y"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (12, 5)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.mlxstacks["weights"] == {"math": 0.5}
    (ask,) = engine.asks
    assert (ask.n, ask.stop, ask.top_logprobs, ask.presence_penalty) == (2, ("x",), 2, 0.25)
    sampling = ask.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.temp, sampling.top_p) == (5, 7, 0.5, 0.9)


def test_openai_client_reads_a_stream(engine: Scripted, chat: Callable[..., Any]) -> None:
    engine.script = lambda ask: [
        BEGUN, *pieces([*HELLO, Part("tool", "", CALL)], finish="tool_calls")
    ]  # fmt: skip
    chunks = list(chat(stream=True, stream_options={"include_usage": True}, tools=[ADD]))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hello"
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.total_tokens == 15
    assert chunks[0].mlxstacks["route"] == "routed"


def test_headers_say_route_weights_and_loads(
    engine: Scripted, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    """And the log how many tokens in which time."""
    caplog.set_level("INFO", "mlxstacks.serve")
    for stream in (False, True):
        raw = client.chat.completions.with_raw_response.create(
            model="math", messages=[{"role": "user", "content": "hi"}], stream=stream
        )
        found = [raw.headers[f"x-mlxstacks-{name}"] for name in ("route", "weights", "loaded")]
        assert found == ["routed", "math=0.5", "math"]
        if stream:
            list(raw.parse())
    assert sum(": done, 2 tokens in " in line for line in caplog.messages) == 2
    assert [model.id for model in client.models.list()] == ["base-model", "math"]
    assert client.models.retrieve("math").id == "math"


def test_agent_loop_hands_results_of_tools_to_the_template(
    engine: Scripted, chat: Callable[..., Any], messages: Any
) -> None:
    called: list[Event] = [BEGUN, *pieces([Part("tool", "", CALL)], finish="tool_calls")]
    engine.script = lambda ask: called if len(ask.messages) == 1 else [BEGUN, *pieces(HELLO)]
    talk: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    message = chat(messages=talk, tools=[ADD]).choices[0].message
    (call,) = message.tool_calls
    talk += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    assert chat(messages=talk, tools=[ADD]).choices[0].message.content == "Hello"
    _, assistant, result = engine.asks[-1].messages
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert result == {"role": "tool", "content": "3", "tool_call_id": call.id}

    tool = {"name": "add", "input_schema": {"type": "object"}}
    turns: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    answer = messages.create(model="math", max_tokens=9, messages=turns, tools=[tool])
    (use,) = answer.content
    assert (answer.stop_reason, use.name, use.input) == ("tool_use", "add", {"a": 1, "b": 2})
    turns.append({"role": "assistant", "content": answer.content})
    block = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
    turns.append({"role": "user", "content": [block]})
    answer = messages.create(model="math", max_tokens=9, messages=turns, tools=[tool])
    assert answer.content[0].text == "Hello"
    last = engine.asks[-1]
    assert [turn["role"] for turn in last.messages] == ["user", "assistant", "tool"]
    assert last.tools is not None
    assert last.tools[0]["function"]["name"] == "add"


def test_anthropic_client_reads_a_stream(engine: Scripted, messages: Any) -> None:
    parts = [Part("reasoning", "hm"), *HELLO, Part("tool", "", CALL)]
    engine.script = lambda ask: [BEGUN, *pieces(parts, finish="tool_calls")]
    turns = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    with messages.stream(model="math", max_tokens=9, messages=turns, system="be") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "Hello"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert final.content[2].input == {"a": 1, "b": 2}
    assert (final.usage.output_tokens, final.usage.cache_read_input_tokens) == (4, 4)
    assert engine.asks[0].messages[0] == {"role": "system", "content": "be"}

    engine.script = lambda ask: [BEGUN, *pieces(HELLO, stop_text="END")]
    answer = messages.create(model="math", max_tokens=9, messages=turns, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")


def test_responses_hold_messages_and_calls(engine: Scripted, client: openai.OpenAI) -> None:
    parts = [Part("reasoning", "hm"), *HELLO, Part("tool", "", CALL)]
    engine.script = lambda ask: [BEGUN, *pieces(parts, finish="tool_calls")]
    tool: Any = {"type": "function", "strict": None, **ADD["function"]}  # type: ignore[dict-item]
    talk: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}]
    fields: Any = {"model": "math", "tools": [tool], "instructions": "be", "max_output_tokens": 9}
    answer = client.responses.create(input=talk, **fields)
    with client.responses.stream(input=talk, **fields) as stream:
        deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert "".join(deltas) == "Hello"
    for one in (answer, streamed):
        assert one.output_text == "Hello"
        message, call = list[Any](one.output)
        assert (message.type, call.type, one.status) == ("message", "function_call", "completed")
        assert (call.name, call.arguments) == ("add", CALL["arguments"])
        assert one.usage is not None
        assert (one.usage.input_tokens, one.usage.output_tokens) == (12, 4)
    talk += [
        *answer.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    engine.script = lambda ask: [BEGUN, *pieces([], finish="length")]
    last = client.responses.create(input=talk, **fields)
    assert (last.status, last.output_text) == ("incomplete", "")
    turns = engine.asks[-1].messages
    assert [t["role"] for t in turns] == ["system", "user", "assistant", "assistant", "tool"]
    assert turns[3]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}
    assert (turns[4]["content"], engine.asks[-1].sampling.max_tokens) == ("3", 9)
    for strange in ({"previous_response_id": "resp_1"}, {"text": {"format": {"type": "x"}}}):
        with pytest.raises(openai.BadRequestError):
            client.responses.create(model="math", input="hi", extra_body=strange)


def test_completions_take_the_prompt_as_it_is(engine: Scripted, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="base", prompt="Once <|im_end|>", logprobs=1)
    assert (answer.choices[0].text, engine.asks[0].text) == ("Hello", "Once <|im_end|>")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1]
    stream = client.completions.create(model="base", prompt="Once", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "Hello"


class King(BaseModel):
    name: str


def test_schemas_come_from_every_client(
    engine: Scripted, client: openai.OpenAI, messages: Any
) -> None:
    said = [Part("text", '{"name":'), Part("text", '"Gus"}')]
    engine.script = lambda ask: [BEGUN, *pieces(said)]
    turns: Any = [{"role": "user", "content": "Who?"}]
    chat = client.chat.completions.parse(model="math", messages=turns, response_format=King)
    assert chat.choices[0].message.parsed == King(name="Gus")
    response = client.responses.parse(model="math", input="Who?", text_format=King)
    assert response.output_parsed == King(name="Gus")
    message = messages.parse(model="math", max_tokens=9, messages=turns, output_format=King)
    assert message.parsed_output == King(name="Gus")
    free: Any = {"type": "json_object"}
    client.chat.completions.create(model="math", messages=turns, response_format=free)
    *schemas, last = [json.loads(ask.sampling.schema or "") for ask in engine.asks]
    assert [schema["properties"]["name"]["type"] for schema in schemas] == ["string"] * 3
    assert last == {"type": "object"}


def test_refusals_have_the_clients_own_errors(
    engine: Scripted, chat: Callable[..., Any], messages: Any
) -> None:
    turns = [{"role": "user", "content": "hi"}]
    for status, name in ((400, "BadRequestError"), (404, "NotFoundError"), (429, "RateLimitError"),
                         (503, "InternalServerError")):  # fmt: skip
        refusal: list[Event] = [Refused(status, "why")]
        engine.script = lambda ask, refusal=refusal: refusal  # type: ignore[misc]
        with pytest.raises(getattr(openai, name), match="why"):
            chat()
        with pytest.raises(anthropic.APIStatusError, match="why") as error:
            messages.create(model="math", max_tokens=9, messages=turns)
        assert error.value.status_code == status
    engine.script = lambda ask: [BEGUN, *pieces(HELLO)[:1], Refused(500, "it broke")]
    with pytest.raises(openai.APIError, match="it broke"):
        list(chat(stream=True))
    with pytest.raises(openai.InternalServerError, match="it broke"):
        chat()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 0}, {"temperature": -1}, {"max_tokens": 1001}, {"top_logprobs": 21},
        {"stop": ["x"] * 17}, {"logit_bias": {"1": 5}}, {"extra_body": {"adapters": "math"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {"response_format": {"type": "grammar"}},
        {"tools": [{"type": "function"}]}, {"tool_choice": "required", "tools": [ADD]},
        {"messages": []}, {"messages": [{"role": "<|im_end|>", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "/x"}]}]},
        {"messages": [{"role": "user", "content": "x"}] * 2001},
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    engine: Scripted, chat: Callable[..., Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(**fields)
    assert not engine.asks
    assert engine.counts["refused_400"] == 1


# --- who may ask, and how much --------------------------------------------------------------------


def exchange(url: str, data: bytes, *, seconds: float = 10) -> bytes:
    """All that comes back until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        received = bytearray()
        try:
            while chunk := connection.recv(65_536):
                received += chunk
        except ConnectionError:
            pass
        return bytes(received)


def post(body: bytes, path: str = "/v1/chat/completions", **headers: str) -> bytes:
    fields = {
        "host": "127.0.0.1", "content_type": "application/json", "connection": "close",
        "content_length": str(len(body)), **headers,
    }  # fmt: skip
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"{", b'{"a":1}', b"\xff\xfe", b"[" * 50_000,
        b'{"model":"m","messages":' + b'[{"a":' * 3000, b'{"model": NaN}',
        b'{"model":"m","model":"n","messages":[]}', b'{"seed":' + b"9" * 5000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
    ],
)  # fmt: skip
def test_hostile_body_is_refused(engine: Scripted, url: str, body: bytes) -> None:
    for api in app_module.APIS:
        assert exchange(url, post(body, api.path)).startswith(b"HTTP/1.1 400"), body[:50]
    assert not engine.asks


def test_bodies_and_heads_have_a_size(engine: Scripted, url: str) -> None:
    head = post(b"", content_length="200000")
    assert exchange(url, head).startswith(b"HTTP/1.1 413")  # before any of it came
    chunked = post(b"", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
    endless = chunked + b"1000\r\n" + b"a" * 4096 + b"\r\n"
    assert exchange(url, endless + (b"1000\r\n" + b"a" * 4096 + b"\r\n") * 30).startswith(
        b"HTTP/1.1 413"
    )
    many = b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 10_000
    assert b"200" not in exchange(url, many)[:20]


def test_without_a_key_only_this_machine_by_its_own_name(engine: Scripted, url: str) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'
    assert exchange(url, post(body)).startswith(b"HTTP/1.1 200")
    assert exchange(url, post(body, host="evil.example")).startswith(b"HTTP/1.1 403")
    # what a page of another site can send without asking
    assert exchange(url, post(body, content_type="text/plain")).startswith(b"HTTP/1.1 415")
    assert len(engine.asks) == 1


def test_slow_clients_are_let_go(
    engine: Scripted, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.2)
    began = time.monotonic()
    assert exchange(url, b"") == b""  # nothing was ever said
    assert exchange(url, b"GET /health HTT") == b""
    assert exchange(url, post(b"half", content_length="100")).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - began < 5
    assert not engine.asks


def test_client_that_goes_ends_its_request(engine: Scripted, url: str) -> None:
    for stream in ("false", "true"):
        engine.script = lambda ask: [BEGUN, *pieces(HELLO)[:-1]]
        body = f'{{"model":"m","stream":{stream},"messages":[{{"role":"user","content":"x"}}]}}'
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(post(body.encode()))
            while not engine.tickets:
                time.sleep(0.01)
            assert not engine.tickets[0].is_over
        for _ in range(300):
            if engine.tickets[0].is_over:
                break
            time.sleep(0.01)
        assert engine.tickets.pop().is_over, stream


def test_key_is_asked_for_everywhere_but_at_health() -> None:
    engine, key = Scripted(), "0123456789abcdef"
    body = b'{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"x"}]}'
    with listening(engine, key) as url:
        for path in ("/v1/chat/completions", "/v1/messages"):
            for given in ({}, {"authorization": f"Bearer {key}x"}, {"x_api_key": key[:-1]},
                          {"authorization": key}, {"authorization": "Bearer \xe9"}):  # fmt: skip
                assert exchange(url, post(body, path, **given)).startswith(b"HTTP/1.1 401")
            assert not engine.asks
            for given in ({"authorization": f"Bearer {key}"}, {"x_api_key": key}):
                answer = exchange(url, post(body, path, host="any.example", **given))
                assert answer.startswith(b"HTTP/1.1 200")
            engine.asks.clear()
        for path in ("/v1/models", "/metrics", "/nothing"):
            get = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
            assert exchange(url, get).startswith(b"HTTP/1.1 401")
        get = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert exchange(url, get).startswith(b"HTTP/1.1 200")
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            assert client.models.list().data


def test_other_machines_need_a_key(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLXSTACKS_API_KEY", raising=False)
    assert api_key(ServeSettings()) is None
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.com"):
        with pytest.raises(InputError, match="other machines"):
            api_key(ServeSettings(host=host))
    file = tmp_path / "key"
    file.write_text("k" * 20 + "\nsecond line\n")
    assert api_key(ServeSettings(host="0.0.0.0", api_key_file=str(file))) == "k" * 20
    file.write_text("short\n")
    with pytest.raises(InputError, match="5 characters") as error:
        api_key(ServeSettings(api_key_file=str(file)))
    assert "short" not in str(error.value)
    monkeypatch.setenv("MLXSTACKS_API_KEY", "e" * 16)
    assert api_key(ServeSettings(host="0.0.0.0")) == "e" * 16


def test_metrics_are_prometheus_text(engine: Scripted, url: str) -> None:
    get = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    lines = exchange(url, get).decode().splitlines()
    assert "mlxstacks_requests_total 3" in lines
    assert 'mlxstacks_refused_total{status="429"} 1' in lines
    assert "mlxstacks_rows 2" in lines
    assert 'mlxstacks_resident_bytes{name="math"} 5' in lines


# --- what else there is ---------------------------------------------------------------------------


def test_page_loads_nothing_from_elsewhere(engine: Scripted, url: str) -> None:
    answer = exchange(url, b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    head, _, page = answer.decode().partition("\r\n\r\n")
    assert "default-src 'none'" in head
    assert not re.search(r"https?://|src=|href=|innerHTML", page)


def test_what_is_not_served_is_said_in_json(url: str) -> None:
    for head in (b"GET /v1/embeddings", b"GET /v1/messages"):
        request = head + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        status, body = exchange(url, request).split(b"\r\n\r\n", 1)
        assert status.split()[1] in (b"404", b"405")
        message = json.loads(body)["error"]["message"]
        assert b"model_not_found" not in body
        assert "is not served; there are: " in message
        assert "POST /v1/chat/completions" in message
