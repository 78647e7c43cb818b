"""Checkpointed layers: the same numbers to the bit, fewer bytes, nothing left behind.

Run: pytest tests/training/test_checkpointing.py
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from mlxstacks import base_model
from mlxstacks.layers.adapted import begin_step, take_balance
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.settings import StackSettings, TargetSettings
from mlxstacks.layers.targets import find_targets
from mlxstacks.training.checkpointing import checkpoint_layers
from tests.tiny_models import llama_config, qwen_moe_config

TOKENS = mx.array([[5, 3, 8, 1, 9, 2, 7, 4], [1, 2, 3, 4, 5, 6, 7, 8]])
SCALE = 2.0


def tiny(config: dict[str, Any], bits: int | None, keys: list[str], dropout: float = 0.0) -> Any:
    """A model with LoRA, weights from a fixed key."""
    model = base_model.build_model(config)
    key = mx.random.key(1)

    def draw(path: str, value: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        return 0.2 * mx.random.normal(value.shape, key=now)

    model.update(tree_map_with_path(draw, model.parameters()))
    if bits is not None:
        base_model.quantize(model, config, bits)
    base_model.attach_lora(model, len(model.layers), 4, SCALE, keys)
    model.update(tree_map_with_path(draw, model.trainable_parameters()))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module._p_1 = 1 - dropout
    model.train()
    return model


MODELS: dict[str, Callable[..., Any]] = {
    "hybrid float": lambda **more: tiny(
        qwen_moe_config(64), None, ["mlp.switch_mlp.down_proj", "linear_attn.in_proj_qkv"], **more
    ),
    "hybrid 4-bit": lambda **more: tiny(
        qwen_moe_config(64), 4, ["mlp.switch_mlp.up_proj", "self_attn.q_proj"], **more
    ),
    "dense 8-bit": lambda **more: tiny(llama_config(64), 8, ["self_attn.v_proj"], **more),
}


def loss(model: nn.Module, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def loss_and_gradients(model: nn.Module, seed: int = 3) -> tuple[mx.array, dict[str, mx.array]]:
    mx.random.seed(seed)
    value, gradients = nn.value_and_grad(model, loss)(model, TOKENS)
    found = dict(tree_flatten(gradients))
    mx.eval(value, found)
    return value, found


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    assert one.keys() == other.keys()
    return all(mx.array_equal(one[name], other[name]).item() for name in one)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_keep_every_bit(name: str, dropout: float) -> None:
    """With dropout, so that the draws of both computations have to be the same."""
    model = MODELS[name](dropout=dropout)
    plain, expected = loss_and_gradients(model)
    state = mx.random.state[0]
    assert any(mx.any(value != 0).item() for value in expected.values())
    with checkpoint_layers(model):
        value, found = loss_and_gradients(model)
        again = mx.random.state[0]
    assert value.item() == plain.item()
    assert same(found, expected)
    # The draws that follow are those of a run without checkpointing.
    assert mx.array_equal(state, again)


def test_dropout_is_really_drawn() -> None:
    """Else the test above would hold of a model without noise."""
    model = MODELS["dense 8-bit"](dropout=0.3)
    with checkpoint_layers(model):
        one, _ = loss_and_gradients(model, seed=3)
        other, _ = loss_and_gradients(model, seed=4)
    assert one.item() != other.item()


def stacked(layers: int) -> Any:
    """MoE-LoRA in training: its noise comes from a key that the step gives."""
    config = qwen_moe_config(64)
    config["text_config"]["num_hidden_layers"] = layers
    model = base_model.build_model(config)
    attach_stacks(model, find_targets(model, TargetSettings(projections=("down_proj", "q_proj"))))
    add_active(model, StackSettings(rank=2), mx.random.key(0))
    model.train()
    return model


def test_router_noise_of_a_stack_is_the_same_again() -> None:
    model = stacked(layers=2)
    begin_step(model, mx.random.key(5))
    plain, expected = loss_and_gradients(model)
    begin_step(model, mx.random.key(5))
    with checkpoint_layers(model):
        value, found = loss_and_gradients(model)
    assert value.item() == plain.item()
    assert same(found, expected)
    begin_step(model, mx.random.key(6))
    _, other = loss_and_gradients(model)
    assert not same(other, expected)


def test_compiled_step_agrees() -> None:
    model = MODELS["dense 8-bit"]()
    _, expected = loss_and_gradients(model)
    with checkpoint_layers(model):
        step = mx.compile(lambda tokens: nn.value_and_grad(model, loss)(model, tokens)[1])
        found = dict(tree_flatten(step(TOKENS)))
    for name, value in expected.items():
        # The compiler fuses and rounds differently.
        assert mx.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


class Layer(nn.Module):
    """Takes all that a layer may be called with, and returns more than an array."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.calls = 0

    def __call__(
        self, x: mx.array, mask: Any = None, cache: Any = None, *, offset: mx.array | None = None
    ) -> tuple[mx.array, dict[str, Any]]:
        self.calls += 1
        if cache is not None:
            cache.append(x)
        y = self.proj(x) if offset is None else self.proj(x) + offset
        if isinstance(mask, mx.array):
            y = mx.where(mask, y, 0)
        return mx.tanh(y), {"sum": y.sum(), "nothing": None, "mask": "causal"}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [Layer(), Layer()]

    def __call__(self, x: mx.array, **more: Any) -> mx.array:
        total = mx.array(0.0)
        for layer in self.layers:
            x, rest = layer(x, **more)
            assert rest["nothing"] is None
            assert rest["mask"] == "causal"
            total = total + rest["sum"]
        return x.sum() + total


X = mx.arange(12.0).reshape(3, 4) / 10


def gradient(stack: Stack, **more: Any) -> tuple[mx.array, dict[str, mx.array]]:
    """By the weights and by the input."""

    def value(weights: Any, x: mx.array) -> mx.array:
        stack.update(weights)
        return stack(x, **more)

    by_weights, by_x = mx.grad(value, argnums=(0, 1))(stack.trainable_parameters(), X)
    found = dict(tree_flatten(by_weights))
    mx.eval(by_x, found)
    return by_x, found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mask": mx.array([True, False, True, True])},
        {"mask": "causal", "cache": None},
        {"offset": mx.full((3, 4), 0.25)},
    ],
    ids=["plain", "mask", "names", "keyword array"],
)
def test_masks_keywords_and_structured_results_pass(more: dict[str, Any]) -> None:
    stack = Stack()
    by_x, expected = gradient(stack, **more)
    for layer in stack.layers:
        layer.calls = 0
    with checkpoint_layers(stack):
        found_by_x, found = gradient(stack, **more)
    assert [layer.calls for layer in stack.layers] == [2, 2]
    assert same({"x": found_by_x, **found}, {"x": by_x, **expected})


def test_a_call_with_a_cache_is_made_once() -> None:
    """It changes its cache: computed again it would do so twice."""

    class Cache:
        length = 0

        def append(self, x: mx.array) -> None:
            self.length += 1

    stack, cache = Stack(), Cache()
    with checkpoint_layers(stack):
        gradient(stack, cache=cache)
    assert cache.length == len(stack.layers)


def test_frozen_layers_pass_the_gradient_on() -> None:
    stack = Stack()
    stack.layers[1].freeze()
    by_x, expected = gradient(stack)
    with checkpoint_layers(stack):
        found_by_x, found = gradient(stack)
    assert list(expected) == ["layers.0.proj.weight", "layers.0.proj.bias"]
    assert same({"x": found_by_x, **found}, {"x": by_x, **expected})


def test_undo_gives_everything_back() -> None:
    stack = Stack()
    before = dict(tree_flatten(stack.parameters()))
    made = checkpoint_layers(stack, [1])
    assert type(stack.layers[0]) is Layer
    assert type(stack.layers[1]) is not Layer
    assert isinstance(stack.layers[1], Layer)
    assert dict(tree_flatten(stack.parameters())).keys() == before.keys()
    # A second time changes nothing, and its end leaves the first in place.
    checkpoint_layers(stack, [1]).undo()
    assert type(stack.layers[1]) is not Layer
    made.undo()
    made.undo()
    assert [type(layer) for layer in stack.layers] == [Layer, Layer]


def test_mx_random_is_itself_again() -> None:
    before = {name: getattr(mx.random, name) for name in ("bernoulli", "normal", "uniform")}
    model = MODELS["dense 8-bit"](dropout=0.3)
    with checkpoint_layers(model):
        loss_and_gradients(model)
    assert all(getattr(mx.random, name) is value for name, value in before.items())


def test_evaluation_runs_the_layers_themselves() -> None:
    stack = Stack()
    with checkpoint_layers(stack):
        stack.eval()
        gradient(stack)
    assert [layer.calls for layer in stack.layers] == [1, 1]


def test_wrong_layers_are_named() -> None:
    with pytest.raises(ValueError, match=r"got layers \[2, -1\]; the model has layers 0 to 1"):
        checkpoint_layers(Stack(), [0, 2, -1])
    with pytest.raises(ValueError, match="Linear has no list `layers`"):
        checkpoint_layers(nn.Linear(2, 2))


# --- bytes ------------------------------------------------------------------------------------


@contextmanager
def under_mx_checkpoint(model: Any) -> Iterator[None]:
    """As mlx-lm's trainer does it."""
    from mlx_lm.tuner.trainer import grad_checkpoint

    own = type(model.layers[0])
    before = own.__call__
    grad_checkpoint(model.layers[0])
    try:
        yield
    finally:
        own.__call__ = before


def test_at_most_six_tenths_of_the_bytes_of_mx_checkpoint() -> None:
    """8 layers, 128 tokens, the loop over tokens: the bar of DESIGN, at half its tokens."""
    config = qwen_moe_config(64)
    config["text_config"] |= {
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "linear_key_head_dim": 48,
        "linear_value_head_dim": 48,
    }
    model = tiny(config, None, ["mlp.switch_mlp.down_proj"])
    tokens = mx.zeros((1, 129), mx.int32)

    def peak_bytes() -> int:
        mx.synchronize()
        mx.reset_peak_memory()
        value, gradients = nn.value_and_grad(model, loss)(model, tokens)
        mx.eval(value, gradients)
        return mx.get_peak_memory()

    with under_mx_checkpoint(model):
        theirs = peak_bytes()
    with checkpoint_layers(model):
        ours = peak_bytes()
    assert ours <= 0.6 * theirs, f"{ours:,} of {theirs:,} bytes: {ours / theirs:.2f}"


def test_balance_losses_keep_no_layer_alive() -> None:
    """Same gradients with them in the loss, to the bit, and less than half of the bytes."""
    model = stacked(layers=8)

    def with_balance(model: nn.Module, tokens: mx.array) -> mx.array:
        return loss(model, tokens) + 0.01 * take_balance(model).total

    def found() -> tuple[dict[str, mx.array], int]:
        begin_step(model, mx.random.key(5))
        mx.synchronize()
        mx.reset_peak_memory()
        before = mx.get_active_memory()  # other tests' fixtures are in it
        _, gradients = nn.value_and_grad(model, with_balance)(model, mx.zeros((1, 257), mx.int32))
        mx.eval(gradients)
        return dict(tree_flatten(gradients)), mx.get_peak_memory() - before

    with base_model.gated_delta_installed():
        plain, most = found()
        with checkpoint_layers(model):
            checkpointed, less = found()
    assert any(mx.any(plain[name]).item() for name in plain if name.endswith("router"))
    assert same(checkpointed, plain)
    assert less < 0.5 * most, f"{less:,} of {most:,} bytes"
