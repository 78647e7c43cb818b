"""`mlxstacks serve` on a real model, asked by the official clients. Run: make test-real"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serve_cases import nano_settings, serving
from tests.tiny_models import random_adapter

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

TURNS: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def url(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    adapter = random_adapter(
        real_model / "dense", ["self_attn.q_proj", "mlp.down_proj"], rank=4, std=0.01,
        num_layers=30, directory=tmp_path_factory.mktemp("serve") / "noise",
    )  # fmt: skip
    with serving("--model", str(real_model / "dense"), "--adapter-path", str(adapter)) as (_, url):
        yield url


def test_each_request_in_company_is_answered_as_alone(url: str) -> None:
    """Chat, stream, two answers, log probabilities and a schema: the base's, and the adapter's."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    other = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def chat(model: str, **fields: Any) -> Any:
        return client.chat.completions.create(
            **{"model": model, "messages": TURNS, "max_tokens": 8, **fields}
        )

    def whole(model: str) -> str:
        return chat(model).choices[0].message.content

    def stream(model: str) -> str:
        chunks = chat(model, stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    def two(model: str) -> list[str]:
        drawn = chat(model, n=2, temperature=1.0, seed=3)
        return [choice.message.content for choice in drawn.choices]

    def logprobs(model: str) -> list[tuple[str, float]]:
        told = chat(model, logprobs=True, top_logprobs=1).choices[0].logprobs.content
        return [(token.token, token.logprob) for token in told]

    def schema(model: str) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        answer = chat(model, response_format=form, max_tokens=40).choices[0].message.content
        assert json.loads(answer)["city"] in ("Paris", "Rome")
        return answer

    def message(model: str) -> str:
        answer = other.messages.create(model=model, max_tokens=8, messages=TURNS)
        with other.messages.stream(model=model, max_tokens=8, messages=TURNS) as events:
            assert "".join(events.text_stream) == answer.content[0].text
        return answer.content[0].text

    kinds: list[Callable[[str], Any]] = [whole, stream, two, logprobs, message]
    kinds += [schema] if find_spec("llguidance") else []
    with client, other, ThreadPoolExecutor(12) as pool:
        asked = [(kind, model) for kind in kinds for model in ("base", "noise")]
        together = list(pool.map(lambda pair: pair[0](pair[1]), asked))
        alone = [kind(model) for kind, model in asked]
    for (kind, model), found, expected in zip(asked, together, alone, strict=True):
        if kind is logprobs:
            (texts, found), (same, numbers) = zip(*found, strict=True), zip(*expected, strict=True)
            assert texts == same
            expected = pytest.approx(numbers, abs=2e-3)
        assert found == expected, (kind.__name__, model)
    said = dict(zip([(kind.__name__, model) for kind, model in asked], alone, strict=True))
    for model in ("base", "noise"):
        assert said["whole", model] == said["stream", model] == said["message", model]
        assert "".join(text for text, _ in said["logprobs", model]) == said["whole", model]
        assert len(set(said["two", model])) == 2
    assert "Paris" in said["whole", "base"]
    assert said["logprobs", "base"] != said["logprobs", "noise"]


def test_tools_are_called_and_their_results_are_read(
    real_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 was not taught tools either: what it says is forced."""
    from tests.serve.agent_cases import with_tools
    from tests.serve.test_agent import check_agents

    model = with_tools(real_model / "dense", tmp_path / "dense")
    settings = nano_settings(model=str(model), store_path=None, adapter_path=[])
    check_agents(settings, "base", monkeypatch)
