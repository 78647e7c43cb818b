"""An agent's loop over the real engine: mlx-lm's parser finds the call in what the model says, the
client runs the tool, and its result comes back by the chat template. nano was never taught tools:
the text of its answers is forced.

Run: pytest tests/serve/test_agent.py
"""

from pathlib import Path

import pytest

from mlxstacks import base_model
from mlxstacks.nano.exports import nano_paths
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve.app import build_app
from mlxstacks.serve.engine import Engine
from tests.serve.agent_cases import anthropic_agent, made_to_call, openai_agent, with_tools
from tests.serve.serve_cases import nano_settings
from tests.serve.test_app import listening_to


def check_agents(settings: ServeSettings, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both clients' agents call the tool once, and hear what it gave."""
    engine = Engine(settings)
    engine.start()
    monkeypatch.setattr(base_model, "penalties", made_to_call(engine._tokenizer))
    try:
        with listening_to(build_app(engine, settings, None)) as url:
            for agent in (openai_agent, anthropic_agent):
                assert agent(url, model) == ['add {"a": 19, "b": 23}', "The sum is 42."]
    finally:
        engine.stop()
    assert engine.counts["cached_tokens"] > 0  # the second turn begins as the first


def test_tools_are_called_and_their_results_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_tools(nano_paths().model_path, tmp_path / "nano")
    check_agents(nano_settings(model=str(model)), "islands", monkeypatch)
