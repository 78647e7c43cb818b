"""What runs below the lowest trained layer, and in evaluation.

Run: pytest tests/training/test_modes.py
"""

from io import StringIO
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.training import modes
from mlxstacks.training.modes import evaluating, lowest_trained_layer, set_training_modes
from tests.training.tiny import hybrid_model, random_tokens, with_lora

TOKENS = mx.array(random_tokens(1, 9))


def test_the_lowest_trained_layer() -> None:
    assert lowest_trained_layer(with_lora(hybrid_model(4), layers=(2, 3))) == 2
    assert lowest_trained_layer(with_lora(hybrid_model(4))) == 0
    model = with_lora(hybrid_model(4), layers=(3,))
    model.language_model.model.embed_tokens.unfreeze()
    assert lowest_trained_layer(model) == 0


@pytest.mark.parametrize("has_kernel", [False, True])
def test_layers_below_are_in_eval_mode(monkeypatch: pytest.MonkeyPatch, has_kernel: bool) -> None:
    """With a kernel for inference the recurrence below uses it; without one it runs in chunks."""
    monkeypatch.setattr(modes, "_has_recurrent_kernel", lambda: has_kernel)
    model = with_lora(hybrid_model(4), layers=(2, 3))
    assert set_training_modes(model) == 2
    below, above = model.layers[0], model.layers[2]
    assert not below.training
    assert below.linear_attn.training is not has_kernel
    assert not below.linear_attn.in_proj_qkv.training
    assert above.training
    assert above.linear_attn.training
    assert not model.layers[1].self_attn.training


def test_evaluating_restores_every_mode() -> None:
    model = with_lora(hybrid_model(4), layers=(2, 3))
    set_training_modes(model)
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(m.training for m in model.modules() if "A_log" not in m)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert [module.training for module in model.modules()] == before


def test_evaluation_runs_in_chunks_where_there_is_no_kernel() -> None:
    """The same numbers as mlx-lm's loop over tokens, which the model would take by itself."""
    model = with_lora(hybrid_model(2))
    model.eval()
    loop = model(TOKENS)
    with base_model.gated_delta_installed(), evaluating(model):
        chunks = model(TOKENS)
    assert mx.allclose(loop, chunks, atol=1e-4).item()
    assert not mx.array_equal(loop, chunks).item()


def operations(outputs: Any) -> int:
    """Nodes of a graph that has not been evaluated."""
    text = StringIO()
    mx.export_to_dot(text, *[value for _, value in tree_flatten(outputs)])
    return text.getvalue().count("shape=rectangle")


def gradient_graph(model: nn.Module) -> int:
    def loss(weights: Any) -> mx.array:
        model.update(weights)
        return model(TOKENS).sum()

    weights = model.trainable_parameters()
    made = mx.grad(loss)(weights)
    model.update(weights)
    return operations(made)


def forward_graph(model: nn.Module) -> int:
    return operations([model(TOKENS)])


def test_no_gradient_is_built_below_the_lowest_trained_layer() -> None:
    """Two more layers below add what their forward pass has, and nothing else."""
    with base_model.gated_delta_installed():
        small, large = with_lora(hybrid_model(2)), with_lora(hybrid_model(4), layers=(2, 3))
        for model in (small, large):
            set_training_modes(model)
        added = gradient_graph(large) - gradient_graph(small)
        bare_small, bare_large = hybrid_model(2), hybrid_model(4)
        for model in (bare_small, bare_large):
            model.train()
        forward = forward_graph(bare_large) - forward_graph(bare_small)
        assert 0 < added <= forward
        full = gradient_graph(with_lora(hybrid_model(4))) - gradient_graph(small)
    assert full > 2 * forward
