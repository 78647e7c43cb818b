"""The delta of one stack: noise, balance, layouts, checkpoints.

Run: pytest tests/layers/test_moe_lora.py
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks.layers.adapted import Dims, begin_step, take_balance
from mlxstacks.layers.gates import balance_loss
from mlxstacks.layers.moe_lora import MoELoRADelta, Rows
from mlxstacks.layers.stacked import StackedLayer
from tests.layers.build import (
    K,
    M,
    N,
    assert_close,
    dims_of,
    linear_base,
    normal,
    settings_of,
    switch_base,
    switch_rows,
    trained_delta,
)

FORMS = ("linear", "shared", "per_expert")


def rows_of(form: str, seed: int = 0) -> tuple[mx.array, Rows]:
    if form == "linear":
        return normal(seed, 2, 5, K), Rows()
    x, indices = switch_rows(seed, 2, 5, 2)
    return x, Rows(indices)


def sorted_rows(x: mx.array, indices: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Rows as mlx-lm sorts them, and the way back."""
    from mlx_lm.models.switch_layers import _gather_sort

    return _gather_sort(x, indices)


@pytest.mark.parametrize("form", FORMS)
def test_a_new_stack_gives_exactly_zero_in_training_too(form: str) -> None:
    delta = MoELoRADelta(dims_of(form), settings_of(form), mx.random.key(0))
    x, rows = rows_of(form)
    made, balance = delta(x, rows, mx.random.key(1))
    assert made.dtype == mx.float32
    assert not mx.any(made).item()
    assert balance is not None
    assert 0 < balance_loss(balance).item() <= 4


@pytest.mark.parametrize("base", ["linear", "q3", "q4", "switch", "q-switch"])
def test_loss_of_a_layer_with_a_new_stack_is_bit_equal(base: str) -> None:
    bases = {
        "linear": lambda: linear_base(0, 64, N),
        "q3": lambda: nn.QuantizedLinear.from_linear(linear_base(0, 64, N), 32, 3),
        "q4": lambda: nn.QuantizedLinear.from_linear(linear_base(0, 64, N), 32, 4),
        "switch": lambda: switch_base(0, 64, N),
        "q-switch": lambda: switch_base(0, 64, N).to_quantized(group_size=32, bits=4),
    }
    made = bases[base]()
    layer = StackedLayer(made)
    assert (layer.input_dims, layer.output_dims) == (64, N)
    layer.add_active(settings_of("linear"), mx.random.key(0))
    begin_step(layer, mx.random.key(1))
    if "switch" in base:
        _, indices = switch_rows(0, 2, 5, 2)
        x = normal(1, 2, 5, 1, 1, 64)
        assert mx.array_equal(layer(x, indices), made(x, indices))
        assert layer.num_experts == M
    else:
        x = normal(1, 3, 64).astype(mx.bfloat16)
        made.set_dtype(mx.bfloat16)
        assert layer(x).dtype == mx.bfloat16
        assert mx.array_equal(layer(x), made(x))
    assert layer.weight is made.weight


@pytest.mark.parametrize("form", FORMS)
def test_parameters_have_the_shapes_and_starts_of_the_table(form: str) -> None:
    delta = MoELoRADelta(dims_of(form), settings_of(form), mx.random.key(0))
    E, R = 4, 3
    wanted = {
        "lora_a": (M, E * R, K) if form == "per_expert" else (E, R, K),
        "lora_b": (M, N, E * R) if form == "per_expert" else (E, N, R),
        "router": (E, K),
        "noise": (E, K),
    }
    assert {k: v.shape for k, v in tree_flatten(delta.parameters())} == wanted
    a = np.array(delta.lora_a)
    assert np.abs(a).max() <= K**-0.5
    assert a.std() == pytest.approx(K**-0.5 / 3**0.5, rel=0.15)
    assert np.array(delta.router).std() == pytest.approx(0.02, rel=0.3)
    assert not np.array(delta.noise).any()


def test_gates_in_rank_space_equal_every_expert_made_in_full() -> None:
    delta = trained_delta()
    delta.eval()
    x = normal(3, 9, K)
    gates = np.array(delta.route(x)[0].gates, dtype=np.float64)
    a, b = (np.array(p, dtype=np.float64) for p in (delta.lora_a, delta.lora_b))
    outputs = np.einsum("enr,erk,tk->ten", b, a, np.array(x, dtype=np.float64))
    wanted = delta.settings.scale * np.einsum("te,ten->tn", gates, outputs)
    assert_close(delta(x)[0], wanted)


@pytest.mark.parametrize("form", FORMS)
def test_evaluation_draws_nothing_and_training_does(form: str) -> None:
    delta = trained_delta(form)
    x, rows = rows_of(form)
    noisy = [delta(x, rows, mx.random.key(seed))[0] for seed in (1, 1, 2)]
    assert mx.array_equal(noisy[0], noisy[1])
    assert not mx.array_equal(noisy[0], noisy[2])
    with pytest.raises(ValueError, match="begin_step"):
        delta(x, rows)
    delta.eval()
    state = mx.random.state[0].tolist()
    still, balance = delta(x, rows)
    assert balance is None
    assert mx.array_equal(still, delta(x, rows, mx.random.key(5))[0])
    assert mx.random.state[0].tolist() == state


@pytest.mark.parametrize("form", ["shared", "per_expert"])
@pytest.mark.parametrize("chosen", [2, 3])
def test_sorted_and_unsorted_rows_agree_in_delta_and_balance(form: str, chosen: int) -> None:
    """gate_proj and up_proj see tokens unsorted and repeated rows sorted; both count alike."""
    delta = trained_delta(form, router_noise=False)
    x, indices = switch_rows(4, 2, 7, chosen)
    plain, plain_balance = delta(x, Rows(indices))
    rows, flat, back = sorted_rows(x, indices)
    made, made_balance = delta(rows, Rows(flat, True))
    unsorted = made[back].reshape(2, 7, chosen, 1, N)
    # The same products; the matrix product sums in another order for another number of rows.
    assert_close(unsorted, mx.broadcast_to(plain, unsorted.shape), 1e-6)
    assert made_balance is not None
    assert plain_balance is not None
    assert_close(balance_loss(made_balance), balance_loss(plain_balance), 1e-6)


@pytest.mark.parametrize("form", ["shared", "per_expert"])
def test_down_projection_rows_agree_sorted_and_unsorted(form: str) -> None:
    """down_proj has a row of its own for each (token, base expert)."""
    delta = trained_delta(form, router_noise=False)
    _, indices = switch_rows(4, 2, 5, 3)
    x = normal(6, 2, 5, 3, 1, K)
    plain, plain_balance = delta(x, Rows(indices))
    order = mx.argsort(indices.flatten())
    made, made_balance = delta(x.flatten(0, 2)[order], Rows(indices.flatten()[order], True))
    assert_close(made[mx.argsort(order)].reshape(plain.shape), plain, 1e-6)
    assert made_balance is not None
    assert plain_balance is not None
    assert_close(balance_loss(made_balance), balance_loss(plain_balance), 1e-6)


def test_balance_gradient_reaches_router_and_noise_and_nothing_else() -> None:
    delta = trained_delta()
    parameters = delta.parameters()

    def balance(parameters: dict, x: mx.array) -> mx.array:
        delta.update(parameters)
        _, sums = delta(x, key=mx.random.key(3))
        assert sums is not None
        return balance_loss(sums)

    by_weight, by_x = mx.grad(balance, argnums=(0, 1))(parameters, normal(1, 8, K))
    sizes = {name: float(mx.max(mx.abs(g))) for name, g in by_weight.items()}
    assert sizes["router"] > 0
    assert sizes["noise"] > 0
    assert sizes["lora_a"] == sizes["lora_b"] == 0
    assert float(mx.max(mx.abs(by_x))) == 0


def test_task_gradient_reaches_all_four() -> None:
    delta = trained_delta()
    parameters = delta.parameters()

    def task(parameters: dict) -> mx.array:
        delta.update(parameters)
        return mx.sum(delta(normal(1, 8, K), key=mx.random.key(3))[0] ** 2)

    for name, gradient in mx.grad(task)(parameters).items():
        assert float(mx.max(mx.abs(gradient))) > 0, name


def two_layers() -> nn.Sequential:
    model = nn.Sequential(
        StackedLayer(linear_base(0, K, K)), nn.ReLU(), StackedLayer(linear_base(1, K, N))
    )
    for index, layer in enumerate((model.layers[0], model.layers[2])):
        layer.add_active(settings_of("linear", dropout=0.2), mx.random.key(index))
        layer.active.lora_b = 0.3 * normal(index, *layer.active.lora_b.shape)
        layer.active.noise = 0.3 * normal(index + 5, *layer.active.noise.shape)
    return model


def gradients_of(model: nn.Module, checkpointed: bool) -> tuple[mx.array, list]:
    """Loss and gradients with noise and dropout on, the balance returned beside the output."""
    begin_step(model, mx.random.key(11))

    def with_balance(layer: nn.Module):
        def call(x: mx.array) -> tuple[mx.array, mx.array]:
            y = layer(x)
            return y, take_balance(layer).total

        return nn.utils.checkpoint(layer, call) if checkpointed else call

    def loss(x: mx.array) -> mx.array:
        total = mx.array(0.0)
        for layer in model.layers:
            x, balance = with_balance(layer)(x)
            total = total + balance
        return mx.sum(x**2) + 0.1 * total

    value, gradient = nn.value_and_grad(model, loss)(normal(2, 6, K))
    return value, tree_flatten(gradient)


def test_checkpointed_gradients_equal_plain_ones_with_noise_on() -> None:
    model = two_layers()
    value, plain = gradients_of(model, checkpointed=False)
    again, recomputed = gradients_of(model, checkpointed=True)
    assert value.item() == again.item()
    assert len(plain) == 8
    for (name, left), (other, right) in zip(plain, recomputed, strict=True):
        assert name == other
        assert float(mx.max(mx.abs(left))) > 0, name
        assert mx.array_equal(left, right), name


def test_each_layer_has_its_own_noise_and_recomputation_leaves_none_behind() -> None:
    model = two_layers()
    gradients_of(model, checkpointed=True)
    begin_step(model, mx.random.key(11))
    assert not take_balance(model).sums
    keys = [model.layers[i]._step.key for i in (0, 2)]
    assert not mx.array_equal(*keys)


@pytest.mark.parametrize("rs_lora", [True, False])
def test_one_expert_equals_mlx_lm_lora_on_a_linear(rs_lora: bool) -> None:
    from mlx_lm.tuner.lora import LoRALinear

    rule = "rslora" if rs_lora else "lora"
    layer = StackedLayer(linear_base())
    delta = layer.add_active(
        settings_of("linear", num_experts=1, scale_rule=rule, alpha=7.0), mx.random.key(0)
    )
    assert sorted(delta.parameters()) == ["lora_a", "lora_b"]
    theirs = LoRALinear.from_base(layer.linear, r=3, scale=delta.settings.scale)
    theirs.lora_a = mx.contiguous(delta.lora_a[0].T)
    theirs.lora_b = 0.3 * normal(4, 3, N)
    delta.lora_b = mx.contiguous(theirs.lora_b.T)[None]
    x = normal(1, 2, 9, K)
    assert mx.array_equal(layer(x), theirs(x))
    assert not take_balance(layer).sums


@pytest.mark.parametrize("is_sorted", [False, True])
def test_one_expert_equals_mlx_lm_lora_on_a_switch_to_the_bit(is_sorted: bool) -> None:
    from mlx_lm.tuner.lora import LoRASwitchLinear

    layer = StackedLayer(switch_base())
    delta = layer.add_active(settings_of("per_expert", num_experts=1), mx.random.key(0))
    delta.lora_b = 0.3 * normal(4, *delta.lora_b.shape)
    theirs = LoRASwitchLinear.from_base(layer.linear, r=3, scale=delta.settings.scale)
    theirs.lora_a, theirs.lora_b = delta.lora_a, delta.lora_b
    x, indices = switch_rows(2, 2, 5, 2)
    if is_sorted:
        x, indices, _ = sorted_rows(x, indices)
    assert mx.array_equal(layer(x, indices, is_sorted), theirs(x, indices, is_sorted))


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="experts_per_token"):
        settings_of("linear", experts_per_token=5)
    assert settings_of("linear", num_experts=1).top_k == 1
    with pytest.raises(ValueError, match="latent_dim"):
        settings_of("per_expert", latent_dim=8)
    with pytest.raises(ValueError, match="rank 21"):
        MoELoRADelta(Dims(K, N, None), settings_of("linear", rank=21), mx.random.key(0))
    with pytest.raises(ValueError, match="indices"):
        trained_delta("per_expert")(normal(0, 3, K), key=mx.random.key(0))
