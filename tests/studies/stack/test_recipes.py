"""The recipes of `mlxstacks stack`: nano's is what the bare command runs, the others are published.

Run: pytest tests/studies/stack/test_recipes.py
"""

from pathlib import Path
from typing import Any

import pytest

from mlxstacks.layers.targets import find_targets, stack_size
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.training.settings import StackRunSettings
from tests.tiny_models import llama_config
from tools.nano.curriculum_settings import CurriculumTraining

PUBLISHED = {
    "stack-gemma-3-12b": {"rows": 16, "steps": 500, "rate": 1e-4, "directions": 64, "samples": 400},
    "stack-tinyllama-1.1b": {
        "rows": 16, "steps": 400, "rate": 2e-4, "directions": 32, "samples": 200,
    },
    "stack-qwen3.5-35b-a3b": {
        "rows": 16, "steps": 500, "rate": 1e-4, "directions": 64, "samples": 400,
    },
}  # fmt: skip


def settings_of(name: str) -> StackRunSettings:
    settings = resolve("stack", {}, load_recipe(name)).settings
    assert isinstance(settings, StackRunSettings)
    return settings


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_hyper_parameters(name: str) -> None:
    settings, told = settings_of(name), PUBLISHED[name]
    assert settings.iters is not None
    assert settings.null_space is not None
    found: dict[str, Any] = {
        "rows": settings.batch_size * settings.grad_accumulation_steps,
        "steps": settings.iters / settings.grad_accumulation_steps,
        "rate": settings.learning_rate,
        "directions": settings.null_space.directions,
        "samples": settings.null_space.samples,
    }
    assert found == told
    stack = settings.stack
    assert (stack.rank, stack.alpha, stack.num_experts, stack.top_k) == (16, 16.0, 4, 2)
    assert (stack.scale_rule, stack.scale) == ("rslora", 4.0)
    assert (settings.warmup, settings.lr_schedule, settings.max_seq_length) == (40, "linear", 512)
    assert (settings.beta1, settings.beta2, settings.weight_decay) == (0.9, 0.95, 0.01)
    assert (settings.spike_threshold, settings.patience, settings.min_loss_delta) == (0.1, 4, 0.002)
    assert settings.steps_per_eval / settings.grad_accumulation_steps == 50
    assert settings.clip_norm == 1.0


def test_the_order_of_domains_is_the_published_one() -> None:
    gemma = [domain.name for domain in settings_of("stack-gemma-3-12b").domains]
    assert gemma == ["chat", "code", "math", "medical", "reasoning"]
    tiny = [domain.name for domain in settings_of("stack-tinyllama-1.1b").domains]
    assert tiny == ["chat", "code", "medical", "math"]
    reasoning = settings_of("stack-gemma-3-12b").domains[-1]
    assert reasoning.iters == 600 * 4


def test_a_stack_of_tinyllama_has_the_published_size() -> None:
    """53.6 M numbers on 22 layers x 7 projections, from the shapes alone."""
    from mlxstacks import base_model

    config = llama_config(hidden_size=2048) | {
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "intermediate_size": 5632, "vocab_size": 32000,
    }  # fmt: skip
    model = base_model.build_model(config)
    settings = settings_of("stack-tinyllama-1.1b")
    size = stack_size(find_targets(model), settings.stack)
    assert size.parameters == 53_616_640
    assert size.frozen_bytes == pytest.approx(107e6, rel=0.01)


def test_the_bare_command_is_nanos_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bare = resolve("stack", {})
    assert bare.settings == resolve("stack", {}, load_recipe("stack")).settings
    assert bare.from_nano == ("model", "data")
    settings = bare.settings
    assert isinstance(settings, StackRunSettings)
    # What was measured to fit in the time.
    measured = CurriculumTraining()
    assert tuple(domain.name for domain in settings.domains) == measured.domains
    assert settings.layers == f"{measured.layers[0]}-{measured.layers[-1]}"
    for key in type(measured).model_fields:
        if key not in ("domains", "layers"):
            assert getattr(settings, key) == getattr(measured, key), key
    # With anything of one's own, nano's settings do not apply.
    own = resolve("stack", {"model": "m", "data": "d"}).settings
    assert own == StackRunSettings(model="m", data="d", save_path="mlxstacks-out/stack")
