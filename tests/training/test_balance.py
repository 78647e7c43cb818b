"""The balance of experts over a step: no padding, no split into batches turns its gradient.

Run: pytest tests/training/test_balance.py
"""

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.data import Batch, make_batch
from mlxstacks.data.rows import Row, row_of
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.moe_lora import MoELoRADelta
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.layers.targets import find_targets
from mlxstacks.training.boost import call_with_balance
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.modes import set_training_modes
from mlxstacks.training.step import GradientStep, StepGradients, cross_entropy_loss
from tests.training.tiny import VOCAB, hybrid_model, random_tokens

WEIGHT = 0.5
EXPERTS, K = 3, 16
# Logits of size one: of large ones rounding alone moves a softmax by more than 1e-6.
STD = 0.2


class Block(nn.Module):
    """A linear projection and a mixture of four, of which each token takes two."""

    def __init__(self) -> None:
        from mlx_lm.models.switch_layers import SwitchGLU

        super().__init__()
        self.o_proj, self.gate = nn.Linear(K, K), nn.Linear(K, 4, bias=False)
        self.switch_mlp = SwitchGLU(K, K, 4)

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.o_proj(x)
        scores = self.gate(x)
        chosen = mx.stop_gradient(mx.argsort(-scores, axis=-1)[..., :2])
        scores = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1)
        return x + (self.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2)


class Mixture(nn.Module):
    """A bigram model: no token sees another, so padding matters to the balance alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, K), nn.Linear(K, VOCAB)
        self.layers = [Block()]

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.out(self.layers[0](self.embed(tokens)))


def with_stacks(model: nn.Module, **changes: Any) -> nn.Module:
    """Random weights throughout, and on every projection a stack with nothing zero in it."""
    attach_stacks(model, find_targets(model))
    settings = {"rank": 2, "num_experts": EXPERTS, "router_noise": False, **changes}
    add_active(model, StackSettings.model_validate(settings), mx.random.key(0))
    rng = np.random.default_rng(0)
    drawn = [
        (name, mx.array(rng.normal(0, STD, value.shape).astype(np.float32)))
        for name, value in tree_flatten(model.trainable_parameters())
    ]
    model.load_weights(drawn, strict=False)
    set_training_modes(model)
    return model


def mixture(**changes: Any) -> nn.Module:
    model = Mixture()
    rng = np.random.default_rng(1)
    model.load_weights(
        [
            (name, mx.array(rng.normal(0, STD, value.shape).astype(np.float32)))
            for name, value in tree_flatten(model.parameters())
        ]
    )
    return with_stacks(model, **changes)


def rows_of(lengths: list[int], seed: int = 0, vocabulary: int = VOCAB) -> list[Row]:
    """Rows whose first token has no weight, as a prompt has none."""
    tokens = np.random.default_rng(seed).integers(1, vocabulary, sum(lengths)).tolist()
    ends = np.cumsum(lengths)
    return [
        row_of(tokens[end - n : end], [1.0, float(n == 2), *[1.0] * (n - 2)])
        for n, end in zip(lengths, ends, strict=True)
    ]


def gradients(
    model: nn.Module, batches: list[Batch], compiled: bool = False, checkpointed: bool = False
) -> StepGradients:
    loss = cross_entropy_loss(call_with_balance, WEIGHT)
    with checkpoint_layers(model) if checkpointed else nullcontext():
        return GradientStep(model, loss, compiled=compiled)(batches, 0, 0)


def agree(got: StepGradients, wanted: StepGradients, tolerance: float = 1e-5) -> None:
    assert got.parts["extra_loss"].item() == pytest.approx(wanted.parts["extra_loss"].item())
    assert got.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    expected = dict(tree_flatten(wanted.gradients))
    for name, value in tree_flatten(got.gradients):
        size = float(mx.max(mx.abs(expected[name])))
        error = float(mx.max(mx.abs(value - expected[name])))
        assert error <= tolerance * size + 1e-9, (name, error, size)


def balance_in_numpy(model: nn.Module, rows: list[Row]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients by router in float64, from what the routers read of each row by itself."""
    inputs: dict[int, list[np.ndarray]] = {}
    route = MoELoRADelta.route

    def noting(delta: MoELoRADelta, x: mx.array, *rest: Any) -> Any:
        inputs.setdefault(id(delta), []).append(np.array(x, np.float64).reshape(-1, x.shape[-1]))
        return route(delta, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MoELoRADelta, "route", noting)
        for row in rows:
            model(mx.array([row.tokens[:-1]]))
    total, by_router = 0.0, {}
    for path, layer in stacked_layers(model):
        assert layer.active is not None
        x = np.concatenate(inputs[id(layer.active)])
        logits = x @ np.array(layer.active.router, np.float64).T
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        f = np.bincount(np.argsort(-logits, axis=1)[:, :2].ravel(), minlength=EXPERTS) / len(x)
        total += EXPERTS * float(p.mean(0) @ f)
        by_logits = EXPERTS * p * (f - (p @ f)[:, None]) / len(x)
        by_router[f"{path}.active.router"] = by_logits.T @ x
    return total, by_router


@settings(max_examples=12)
@given(st.data())
def test_padding_and_splits_leave_loss_and_gradient_as_they_are(data: st.DataObject) -> None:
    """Against NumPy, for the balance alone; in whole, against the rows in one batch."""
    lengths = data.draw(st.lists(st.integers(2, 12), min_size=1, max_size=5))
    rows = rows_of(lengths, data.draw(st.integers(0, 9)))
    sizes, left = [], len(rows)
    while left:
        sizes.append(data.draw(st.integers(1, left)))
        left -= sizes[-1]
    batches = []
    for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
        part = rows[start : start + size]
        longest = max(len(row.tokens) for row in part)
        batches.append(make_batch(part, longest + data.draw(st.integers(0, 40))))
    model = mixture()
    got = gradients(model, batches)
    agree(got, gradients(model, [make_batch(rows)]))

    balance, by_router = balance_in_numpy(model, rows)
    assert got.parts["extra_loss"].item() == pytest.approx(balance, rel=1e-5)
    task = cross_entropy_loss(lambda model, tokens: (model(tokens), None))
    without = dict(tree_flatten(GradientStep(model, task)(batches, 0, 0).gradients))
    for name, value in tree_flatten(got.gradients):
        added = np.array(value, np.float64) - np.array(without[name], np.float64)
        wanted = WEIGHT * by_router.get(name, np.zeros(1))
        size = np.abs(np.array(value)).max() + np.abs(wanted).max()
        assert np.abs(added - wanted).max() <= 1e-5 * size + 1e-9, name


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_law_holds_in_a_hybrid_model(checkpointed: bool) -> None:
    """Attention, recurrence and sorted experts, with and without checkpoints."""
    model = with_stacks(hybrid_model(), normalise_balance=True)
    tokens = random_tokens(3, 40).tolist()
    rows = [row_of(row[:n], [1.0] * n) for row, n in zip(tokens, (40, 25, 7), strict=True)]
    with base_model.gated_delta_installed():
        wanted = gradients(model, [make_batch([row]) for row in rows])
        for batches in ([make_batch(rows, 48)], [make_batch(rows[:2], 64), make_batch(rows[2:])]):
            agree(gradients(model, batches, checkpointed=checkpointed), wanted, 2e-4)


@pytest.mark.slow
def test_the_law_holds_in_a_compiled_step() -> None:
    """Slow: on a CPU each shape is built with the system's C++ compiler."""
    model, rows = mixture(), rows_of([9, 4])
    wanted = gradients(model, [make_batch(rows)])
    agree(gradients(model, [make_batch(rows, 12)], compiled=True), wanted)
    agree(gradients(model, [make_batch([row], 12) for row in rows], compiled=True), wanted)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_noise_is_part_of_the_gradient_of_a_step_in_parts(checkpointed: bool) -> None:
    """A second batch without weight changes no draw of the first, and no gradient."""
    model = mixture(router_noise=True)
    batch = make_batch(rows_of([9, 5]))
    empty = Batch(batch.tokens, np.zeros_like(batch.weights))
    agree(gradients(model, [batch, empty], checkpointed=checkpointed), gradients(model, [batch]))
