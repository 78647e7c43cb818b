"""The model at its starting weights, on the layers that it shares with the model that trains.

Run: pytest tests/training/test_reference.py
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlxstacks import base_model
from mlxstacks.data import EncodedPairs, Row
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.freezing import freeze_active
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.settings import StackSettings, TargetSettings
from mlxstacks.layers.targets import find_targets
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.grpo import GroupBatch, GroupGradients, GroupObjective
from mlxstacks.training.loop import trainable_weights
from mlxstacks.training.modes import set_training_modes
from mlxstacks.training.preference import PairGradients, dpo_loss, pair_batch
from mlxstacks.training.reference import StartingModel, called_once, shared_layers
from mlxstacks.training.step import answer_log_p
from tests.tiny_models import llama_config
from tests.training.tiny import hybrid_model, random_tokens, with_lora

TOKENS = random_tokens(8, 7)
ROWS = [Row(tuple(map(int, row)), (0.0,) * 3 + (1.0,) * 4) for row in TOKENS]
PAIRS = EncodedPairs(ROWS[:4], ROWS[4:], 0, 0)


def dense() -> nn.Module:
    model = base_model.build_model(llama_config(64) | {"num_hidden_layers": 4})
    model.freeze()
    return with_lora(model, layers=(2, 3), dropout=0.2)


def hybrid() -> nn.Module:
    model = hybrid_model(4)
    model.freeze()
    return with_lora(model, layers=(2, 3), dropout=0.2)


def stacked() -> nn.Module:
    """A frozen stack on all layers, one that trains on the upper two; routers with noise."""
    model = hybrid_model(4)
    model.freeze()
    attach_stacks(model, find_targets(model, TargetSettings()))
    for number in range(2):
        add_active(model, StackSettings(rank=2, num_experts=3), mx.random.key(number))
        if number == 0:
            moved(model)
            freeze_active(model, "one", "one", mx.float32)
    for layer in model.layers[:2]:
        layer.freeze()
    return model


def moved(model: nn.Module) -> None:
    """As if it had been trained for a while."""
    model.update(tree_map(lambda a: a + 0.03, model.trainable_parameters()))


def gradients(model: nn.Module, head: Any, start: StartingModel) -> tuple[Any, np.ndarray]:
    known = np.full((2, 4), np.nan, np.float32)
    function = PairGradients(model, dpo_loss(0.5), head, None, start, known)
    batches = [pair_batch(PAIRS, [0, 2]), pair_batch(PAIRS, [3, 1])]
    found = function(batches, 0, 0)
    again = function(batches, 0, 0)  # now that it is known
    for (_, one), (_, other) in zip(*map(arrays, (found, again)), strict=True):
        assert mx.array_equal(one, other).item()
    return found, known


def arrays(found: Any) -> list[Any]:
    return [("loss", found.loss), *tree_flatten(found.gradients)]


@pytest.mark.parametrize("make", [dense, hybrid, stacked])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_shared_layers_change_no_bit(make: Callable[[], nn.Module], checkpointed: bool) -> None:
    with base_model.gated_delta_installed():
        model = make()
        head, _ = find_output_head(model)
        assert set_training_modes(model) == 2
        if checkpointed:
            checkpoint_layers(model, range(2, 4))
        start = StartingModel(model, head, trainable_weights(model))
        before = [type(module) for module in model.modules()]
        modes = [module.training for module in model.modules()]
        assert len(start.shared) == 2
        moved(model)
        found, known = gradients(model, head, start)
        start.shared = []
        apart, also = gradients(model, head, start)
        assert [type(module) for module in model.modules()] == before
        assert [module.training for module in model.modules()] == modes
        assert np.array_equal(known, also)
        for (name, one), (_, other) in zip(arrays(found), arrays(apart), strict=True):
            assert mx.array_equal(one, other).item(), name
            assert mx.abs(one).max().item() > 0 or "noise" in name
        # what the start gives is not what the model gives now, but what it gave then
        rows = pair_batch(PAIRS, [0, 1, 2, 3]).rows
        model.eval()
        now = answer_log_p(model, rows, head).sum(axis=1).reshape(2, 4)
        assert np.abs(now - known).max() > 1e-3
        model.update(tree_map(lambda a: a - 0.03, model.trainable_parameters()))
        then = answer_log_p(model, rows, head).sum(axis=1).reshape(2, 4)
        np.testing.assert_allclose(then, known, atol=1e-3)


def test_the_divergence_of_answers_is_measured_from_the_start() -> None:
    model = dense()
    head, _ = find_output_head(model)
    set_training_modes(model)
    model.eval()
    start = StartingModel(model, head, trainable_weights(model))
    objective = GroupObjective(0.2, 0.5)
    moved(model)
    rows = pair_batch(PAIRS, [0, 1]).rows
    batch = GroupBatch(rows, np.zeros(4, np.float32), np.array([1, -1, 1, -1], np.float32))
    found = GroupGradients(model, objective, head, start)([batch], 0, 0)
    assert batch.reference is not None
    given = GroupBatch(rows, batch.rewards, batch.advantages, start.log_p(rows))
    apart = GroupGradients(model, objective, head)([given], 0, 0)
    assert found.parts["divergence"].item() > 1e-5
    for (name, one), (_, other) in zip(arrays(found), arrays(apart), strict=True):
        assert mx.array_equal(one, other).item(), name


class Linked(nn.Module):
    """Its layers are linked by more than one array, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed = how, nn.Embedding(300, 8)
        self.layers = [nn.Linear(8, 8) for _ in range(4)]

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        first = None
        for _ in range(2 if self.how == "twice" else 1):
            for layer in self.layers:
                x = layer(x)
                first = x if first is None else first
        return x + first if self.how == "skipped" else x


class Pair(nn.Linear):
    def __call__(self, x: Any) -> Any:
        return super().__call__(x[0] if isinstance(x, tuple) else x), x


@pytest.mark.parametrize(("how", "shared"), [("plain", 2), ("skipped", 0), ("twice", 0)])
def test_layers_that_are_linked_otherwise_are_not_shared(how: str, shared: int) -> None:
    model = Linked(how)
    model.freeze()
    model.layers[2].unfreeze()
    assert len(shared_layers(model)) == shared
    model.embed.unfreeze()
    assert not shared_layers(model)


def test_a_second_call_takes_over_what_the_first_one_made() -> None:
    model = Linked("plain")
    with called_once(model.layers[:2]):
        first, second = model(mx.array([[1, 2]])), model(mx.array([[3, 4]]))
    assert mx.array_equal(first, second).item()
    assert not mx.array_equal(first, model(mx.array([[3, 4]]))).item()


def test_a_layer_that_returns_no_array_is_called_again() -> None:
    layer = Pair(4, 4)
    with called_once([layer]):
        layer(mx.ones((1, 4)))
        _, given = layer(mx.zeros((1, 4)))
    assert not given.any().item()
