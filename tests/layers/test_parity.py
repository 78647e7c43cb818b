"""Equality with the published formulas, as PyTorch computed them once in float64.

tests/fixtures/moe_lora_parity.py made the numbers. Run: pytest tests/layers/test_parity.py
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.gates import balance_loss
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.moe_lora import MoELoRADelta
from mlxstacks.layers.nullspace import remove_directions
from mlxstacks.layers.packed import FrozenStack, StackShape
from mlxstacks.layers.selection import StackId, routed
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import StackedLayer
from tests.layers.build import assert_close, linear_base

FOLDER = Path(__file__).parents[1] / "fixtures" / "moe_lora"
CASES = json.loads((FOLDER / "settings.json").read_text())["cases"]


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "expected.npz") as arrays:
        return dict(arrays)


def settings_of(case: dict, **changes: object) -> StackSettings:
    values = {
        "rank": case["rank"],
        "alpha": case["alpha"],
        "scale_rule": "rslora" if case["rs_lora"] else "lora",
        "num_experts": case["num_experts"],
        "experts_per_token": case["top_k"],
    }
    return StackSettings.model_validate(values | changes)


def delta_of(expected: dict[str, np.ndarray], prefix: str, case: dict) -> MoELoRADelta:
    dims = Dims(case["input_dims"], case["output_dims"], None)
    delta = MoELoRADelta(dims, settings_of(case), mx.random.key(0))
    fill(delta, expected, prefix)
    return delta


def fill(delta: MoELoRADelta, expected: dict[str, np.ndarray], prefix: str) -> None:
    for name, leaf in (("lora_a", "a"), ("lora_b", "b"), ("router", "router"), ("noise", "noise")):
        value = mx.array(expected[f"{prefix}.{leaf}"])
        assert value.shape == delta[name].shape
        delta[name] = value


def noisy_forward(delta: MoELoRADelta, x: mx.array, eps: mx.array) -> tuple[mx.array, mx.array]:
    """The delta of a training pass with these normal numbers, and the balance loss."""
    delta.train()
    made, balance = delta(x, normal=eps)
    assert balance is not None
    return made, balance_loss(balance)


@pytest.mark.parametrize("name", CASES)
def test_forward_in_training_and_evaluation(name: str, expected: dict[str, np.ndarray]) -> None:
    delta = delta_of(expected, name, CASES[name])
    x, eps = mx.array(expected[f"{name}.x"]), mx.array(expected[f"{name}.eps"])
    assert_close(delta.route(x, eps)[0].gates, expected[f"{name}.gates"])
    made, balance = noisy_forward(delta, x, eps)
    assert_close(made, expected[f"{name}.delta"])
    assert_close(balance.reshape(1), expected[f"{name}.balance"])
    delta.eval()
    assert_close(delta(x)[0], expected[f"{name}.still"])


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_task_and_of_the_balance_loss(
    name: str, expected: dict[str, np.ndarray]
) -> None:
    delta = delta_of(expected, name, CASES[name])
    arrays = {key: mx.array(expected[f"{name}.{key}"]) for key in ("x", "eps", "weights")}

    def task(parameters: dict, x: mx.array) -> mx.array:
        delta.update(parameters)
        return mx.sum(noisy_forward(delta, x, arrays["eps"])[0] * arrays["weights"])

    def aux(parameters: dict, x: mx.array) -> mx.array:
        delta.update(parameters)
        return noisy_forward(delta, x, arrays["eps"])[1]

    parameters = delta.parameters()
    by_weight, by_x = mx.grad(task, argnums=(0, 1))(parameters, arrays["x"])
    assert_close(by_x, expected[f"{name}.task_x"])
    leaves = {"lora_a": "a", "lora_b": "b", "router": "router", "noise": "noise"}
    delta.update(parameters)
    of_aux, aux_by_x = mx.grad(aux, argnums=(0, 1))(parameters, arrays["x"])
    for leaf, short in leaves.items():
        assert_close(by_weight[leaf], expected[f"{name}.task_{short}"])
        if leaf in ("router", "noise"):
            wanted = expected[f"{name}.aux_{short}"]
            if CASES[name]["top_k"] == CASES[name]["num_experts"]:
                # Every expert is always chosen: the loss is constant and its gradient rounding.
                assert float(mx.max(mx.abs(of_aux[leaf]))) < 1e-6
                continue
            assert np.abs(wanted).max() > 1e-3
            assert_close(of_aux[leaf], wanted)
        else:
            assert float(mx.max(mx.abs(of_aux[leaf]))) == 0
    assert float(mx.max(mx.abs(aux_by_x))) == 0


def test_base_with_weighted_frozen_stacks_and_a_projected_active_one(
    expected: dict[str, np.ndarray],
) -> None:
    case = CASES["default"]
    arrays = {k.removeprefix("composed."): mx.array(v) for k, v in expected.items()
              if k.startswith("composed.")}  # fmt: skip
    base = linear_base(0, case["input_dims"], case["output_dims"])
    base.weight, base.bias = arrays["base"], mx.zeros(case["output_dims"])
    layer = StackedLayer(base)
    s = settings_of(case)
    shape = StackShape("linear", s.num_experts, s.rank, s.top_k, s.scale)
    layer.set_stacks([
        FrozenStack(StackId(f"s{j}", f"d{j}"), shape, arrays[f"{j}.a"], arrays[f"{j}.b"],
                    arrays[f"{j}.router"])
        for j in range(3)
    ])  # fmt: skip
    # The published weights may be negative; a threshold below them keeps all three.
    weights = np.array(arrays["domain"])
    layer.select(routed(["d0", "d1", "d2"], weights, threshold=-100.0, active=True))
    active = layer.add_active(s, mx.random.key(0))
    fill(active, expected, "composed.3")
    active.protect(arrays["v"])
    layer.eval()
    assert_close(layer(arrays["x"]), arrays["y"])
    dx = mx.grad(lambda x: mx.sum(layer(x) * arrays["upstream"]))(arrays["x"])
    assert_close(dx, arrays["dx"])
    delta = active(arrays["x"])[0]
    assert_close(remove_directions(delta, arrays["v"]), delta)


def test_latent_stack(expected: dict[str, np.ndarray]) -> None:
    case = CASES["default"]
    pair = LatentPair(mx.array(expected["latent.d_in"]), mx.array(expected["latent.d_out"]))
    settings = settings_of(case, rank=3, latent_dim=pair.dim)
    dims = Dims(case["input_dims"], case["output_dims"], None)
    delta = MoELoRADelta(dims, settings, mx.random.key(0), pair)
    fill(delta, expected, "latent")
    delta.eval()
    assert_close(delta(mx.array(expected["latent.x"]))[0], expected["latent.delta"])
