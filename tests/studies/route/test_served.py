"""Random stacks of equal norm: what they share with the real ones, and what they do not.

Run: pytest tests/studies/route/test_served.py
"""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.studies.route.served import (
    add_random_stacks,
    expert_norms,
    random_name,
    random_stack,
)
from tests.layers.build import normal, stacked
from tests.layers.build import random_stack as trained_stack

FORMS = ("linear", "shared", "per_expert")


def dense_norms(stack: FrozenStack) -> np.ndarray:
    """|B_e A_e| by the products themselves, in float64, experts last."""
    a, b = np.array(stack.lora_a, np.float64), np.array(stack.lora_b, np.float64)
    experts, rank = stack.shape.num_experts, stack.shape.rank
    if stack.shape.form != "per_expert":
        return np.array([np.linalg.norm(b[e] @ a[e]) for e in range(experts)])
    parts = [slice(e * rank, (e + 1) * rank) for e in range(experts)]
    return np.array(
        [[np.linalg.norm(b[m][:, p] @ a[m][p]) for p in parts] for m in range(a.shape[0])]
    )


@pytest.mark.parametrize("form", FORMS)
def test_norms_are_those_of_the_products(form: str) -> None:
    stack = trained_stack(form, seed=3)
    np.testing.assert_allclose(np.array(expert_norms(stack)), dense_norms(stack), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_expert_has_the_norm_of_the_real_one(form: str) -> None:
    stack = trained_stack(form, seed=1)
    drawn = random_stack(stack, mx.random.key(0))
    np.testing.assert_allclose(dense_norms(drawn), dense_norms(stack), rtol=1e-5)
    assert drawn.shape == stack.shape
    for name, array in drawn.tensors().items():
        assert array.shape == stack.tensors()[name].shape
        assert not mx.allclose(array, stack.tensors()[name]).item()
    assert drawn.id.domain == random_name("chat")


def test_half_precision_keeps_norms_to_its_rounding() -> None:
    stack = trained_stack("linear", seed=2)
    half = replace(
        stack, lora_a=stack.lora_a.astype(mx.float16), lora_b=stack.lora_b.astype(mx.float16)
    )
    drawn = random_stack(half, mx.random.key(4))
    assert drawn.lora_a.dtype == drawn.lora_b.dtype == mx.float16
    assert drawn.router is not None
    assert drawn.router.dtype == mx.float32
    np.testing.assert_allclose(dense_norms(drawn), dense_norms(half), rtol=2e-3)


def test_router_has_the_same_spread_and_other_directions() -> None:
    stack = replace(trained_stack("linear", seed=5), router=0.07 * normal(8, 4, 4096))
    drawn = random_stack(stack, mx.random.key(1))
    assert stack.router is not None
    assert drawn.router is not None
    assert mx.std(drawn.router).item() == pytest.approx(mx.std(stack.router).item(), rel=0.05)
    cosine = mx.sum(drawn.router * stack.router) / mx.linalg.norm(drawn.router.flatten())
    assert abs((cosine / mx.linalg.norm(stack.router.flatten())).item()) < 0.05


def test_an_expert_without_a_delta_stays_without() -> None:
    stack = trained_stack("shared", seed=6)
    lora_b = mx.concatenate([mx.zeros_like(stack.lora_b[:1]), stack.lora_b[1:]])
    drawn = random_stack(replace(stack, lora_b=lora_b), mx.random.key(2))
    norms = dense_norms(drawn)
    assert norms[0] == 0
    assert (norms[1:] > 0).all()
    assert np.isfinite(np.array(drawn.lora_b)).all()


def test_a_stack_of_one_expert_has_no_router() -> None:
    stack = trained_stack("linear", seed=7, num_experts=1, experts_per_token=1)
    drawn = random_stack(stack, mx.random.key(3))
    assert drawn.router is None
    np.testing.assert_allclose(dense_norms(drawn), dense_norms(stack), rtol=1e-5)


def test_every_module_and_stack_and_seed_has_draws_of_its_own() -> None:
    def controls(seed: int) -> list[mx.array]:
        stacks = [replace(trained_stack("linear", s), id=StackId(f"s{s}", "chat")) for s in (1, 2)]
        model = nn.Sequential(*(stacked("linear", stacks) for _ in range(2)))
        add_random_stacks(model, {"s1": "1" * 64, "s2": "2" * 64}, ["chat"], seed)
        return [s.lora_a / mx.std(s.lora_a) for _, layer in stacked_layers(model)
                for s in layer.stacks.stacks() if s.id.domain == random_name("chat")]  # fmt: skip

    drawn = controls(0) + controls(1)
    assert len(drawn) == 8
    for place, one in enumerate(drawn):
        for other in drawn[:place]:
            assert not mx.allclose(one, other, atol=1e-3).item()
    assert all(map(mx.array_equal, drawn[:4], controls(0)))


def test_the_key_decides_all() -> None:
    stack = trained_stack("per_expert", seed=8)
    one, same, other = (random_stack(stack, mx.random.key(k)) for k in (5, 5, 6))
    assert mx.array_equal(one.lora_b, same.lora_b).item()
    assert not mx.array_equal(one.lora_b, other.lora_b).item()
