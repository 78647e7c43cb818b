"""Gradients and noise around frozen stacks. Run: pytest tests/layers/test_stacked.py"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks.layers.adapted import begin_step
from mlxstacks.layers.selection import base, subset
from mlxstacks.layers.stacked import StackedLayer, set_mode
from tests.layers.build import (
    K,
    active_of,
    assert_close,
    fill_active,
    linear_base,
    normal,
    random_stack,
    settings_of,
    stacked,
    switch_rows,
    trained_delta,
)


def square_stack(seed: int):
    """A frozen stack from K to K dims."""
    from mlxstacks.layers.adapted import Dims
    from mlxstacks.layers.freezing import frozen_stack
    from mlxstacks.layers.moe_lora import MoELoRADelta
    from mlxstacks.layers.selection import StackId

    delta = MoELoRADelta(Dims(K, K, None), settings_of("linear"), mx.random.key(seed))
    delta.lora_b = 0.1 * normal(seed, *delta.lora_b.shape)
    delta.router = normal(seed + 1, *delta.router.shape)
    return frozen_stack(delta, StackId(f"s{seed}", "chat"), mx.float32)


def deep_model(frozen: int) -> nn.Sequential:
    """Three projections in a row, no residual: the gradient of the first has one way only."""
    layers = [StackedLayer(linear_base(seed, K, K)) for seed in range(3)]
    for place, layer in enumerate(layers):
        layer.set_stacks([square_stack(10 * place + i) for i in range(frozen)])
        layer.add_active(settings_of("linear", router_noise=False), mx.random.key(place))
        fill_active(layer, place)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("frozen", [1, 3])
def test_gradient_of_an_early_active_b_equals_finite_differences(frozen: int) -> None:
    model = deep_model(frozen)
    x, weights = normal(5, 4, K), normal(6, 4, K)
    early = active_of(model.layers[0])

    def loss() -> mx.array:
        return mx.sum(model(x) * weights)

    gradient = nn.value_and_grad(model, loss)()[1]["layers"][0]["active"]["lora_b"]
    start = early.lora_b
    for seed in range(3):
        direction = normal(seed + 30, *start.shape)
        direction = direction / mx.sqrt(mx.sum(direction**2))
        step = 3e-3
        early.lora_b = start + step * direction
        above = loss().item()
        early.lora_b = start - step * direction
        below = loss().item()
        early.lora_b = start
        slope = (above - below) / (2 * step)
        assert mx.sum(gradient * direction).item() == pytest.approx(slope, rel=5e-3)
    # The truncated gradient, without the way through the frozen stacks, is another one.
    for layer in model.layers[1:]:
        add_to = layer.stacks.add_to
        layer.stacks.add_to = lambda y, x, rows, add=add_to: add(y, mx.stop_gradient(x), rows)
    truncated = nn.value_and_grad(model, loss)()[1]["layers"][0]["active"]["lora_b"]
    assert float(mx.max(mx.abs(truncated - gradient))) > 0.1 * float(mx.max(mx.abs(gradient)))


@pytest.mark.parametrize("form", ["linear", "shared", "per_expert"])
def test_gradient_to_x_flows_through_base_stacks_and_their_routers(form: str) -> None:
    layer = stacked(form, [random_stack(form, seed) for seed in range(2)])
    if form == "linear":
        x, arguments = normal(1, 4, K), []
    else:
        x, indices = switch_rows(1, 2, 3, 2)
        arguments = [indices]
    weights = normal(2, *layer(x, *arguments).shape)

    def loss(x: mx.array) -> mx.array:
        return mx.sum(layer(x, *arguments) * weights)

    gradient = mx.grad(loss)(x)
    direction = normal(3, *x.shape)
    step = 1e-3
    slope = (loss(x + step * direction) - loss(x - step * direction)).item() / (2 * step)
    assert mx.sum(gradient * direction).item() == pytest.approx(slope, rel=1e-2)


@pytest.mark.parametrize("bits", [3, 4])
def test_gradient_to_x_through_a_quantized_base_is_that_of_its_values(bits: int) -> None:
    quantized = nn.QuantizedLinear.from_linear(linear_base(0, 64, 20), 32, bits)
    values = mx.dequantize(quantized.weight, quantized.scales, quantized.biases, 32, bits)
    plain = linear_base(0, 64, 20)
    plain.weight = values
    layers = [StackedLayer(base_layer) for base_layer in (quantized, plain)]
    for layer in layers:
        layer.add_active(settings_of("linear"), mx.random.key(0))
        fill_active(layer, 1)
        layer.eval()
    x = normal(2, 5, 64)
    got, wanted = (mx.grad(lambda x, layer=layer: mx.sum(layer(x) ** 2))(x) for layer in layers)
    assert_close(got, wanted)


def test_only_the_active_stack_is_trained() -> None:
    layer = stacked("linear", [random_stack("linear")])
    layer.add_active(settings_of("linear"), mx.random.key(0))
    names = {name for name, _ in tree_flatten(layer.trainable_parameters())}
    assert names == {f"active.{leaf}" for leaf in ("lora_a", "lora_b", "router", "noise")}
    layer.unfreeze()
    layer.set_dtype(mx.bfloat16)
    # No cast or unfreeze of a model reaches a frozen stack.
    assert layer.stacks.stacks()[0].lora_a.dtype == mx.float32


def test_frozen_stacks_draw_nothing_in_training_mode() -> None:
    layer = stacked("linear", [random_stack("linear", seed) for seed in range(2)])
    x = normal(0, 5, K)
    layer.eval()
    still = layer(x)
    layer.train()
    for seed in range(3):
        begin_step(layer, mx.random.key(seed))
        assert mx.array_equal(layer(x), still)
    layer.add_active(settings_of("linear"), mx.random.key(0))
    begin_step(layer, mx.random.key(4))
    assert mx.array_equal(layer(x), still)


def test_float32_active_weights_on_a_bfloat16_base() -> None:
    base_layer = linear_base()
    base_layer.set_dtype(mx.bfloat16)
    layer = StackedLayer(base_layer)
    active = layer.add_active(settings_of("linear"), mx.random.key(0))
    active.lora_b = normal(1, *active.lora_b.shape)
    layer.eval()
    x = normal(2, 3, K).astype(mx.bfloat16)
    made = layer(x)
    assert made.dtype == mx.bfloat16
    delta = active(x)[0]
    assert delta.dtype == mx.float32
    assert mx.array_equal(made, base_layer(x) + delta.astype(mx.bfloat16))
    gradient = nn.value_and_grad(layer, lambda: mx.sum(layer(x).astype(mx.float32)))()[1]
    assert all(g.dtype == mx.float32 for _, g in tree_flatten(gradient))


def test_base_mode_leaves_out_the_active_stack_too() -> None:
    layer = stacked("linear", [random_stack("linear")])
    layer.add_active(settings_of("linear"), mx.random.key(0))
    fill_active(layer, 1)
    set_mode(layer, base())
    x = normal(2, 3, K)
    assert mx.array_equal(layer(x), layer.linear(x))


def test_new_stacks_are_served_in_the_mode_of_the_old_ones() -> None:
    chat, code = (random_stack("linear", seed, domain=d) for seed, d in ((1, "chat"), (2, "code")))
    layer = stacked("linear", [chat])
    mode = (subset(["chat"]), mx.float32)
    layer.select(*mode)
    layer.set_stacks([chat, code])
    assert layer.mode == mode
    x = normal(2, 3, K)
    alone = stacked("linear", [chat])
    alone.select(*mode)
    assert mx.array_equal(layer(x), alone(x))
    assert not mx.array_equal(layer(x), stacked("linear", [chat, code])(x))


def test_a_compiled_step_takes_its_noise_from_the_key_it_is_given() -> None:
    layer = StackedLayer(linear_base())
    layer.active = trained_delta()
    x = normal(0, 4, K)

    def forward(key: mx.array) -> mx.array:
        begin_step(layer, key)
        return layer(x)

    compiled = mx.compile(forward)
    first, second = compiled(mx.random.key(1)), compiled(mx.random.key(2))
    assert_close(first, forward(mx.random.key(1)))
    assert_close(second, forward(mx.random.key(2)))
    assert np.abs(np.array(first) - np.array(second)).max() > 1e-3


def test_a_second_active_stack_is_refused() -> None:
    layer = StackedLayer(linear_base())
    layer.add_active(settings_of("linear"), mx.random.key(0))
    with pytest.raises(ValueError, match="in training here"):
        layer.add_active(settings_of("linear"), mx.random.key(0))
