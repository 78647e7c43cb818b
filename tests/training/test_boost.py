"""The inner loop on a bigram model with one place for stacks, its losses scripted.

Run: pytest tests/training/test_boost.py
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.layers.attach import attach_stacks
from mlxstacks.layers.freezing import frozen_parts
from mlxstacks.layers.nullspace import null_basis
from mlxstacks.layers.settings import StackSettings, TargetSettings
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.targets import find_targets
from mlxstacks.training.boost import (
    DomainJob,
    RoundRecord,
    add_stack,
    boost_domain,
    call_with_balance,
    judge_round,
    round_seed,
)
from mlxstacks.training.loop import NonFiniteError, TrainingState, train, trainable_weights
from mlxstacks.training.settings import OptimizerSettings, SnapshotSettings
from mlxstacks.training.step import cross_entropy_loss
from tests.training.tiny import VOCAB, batches_at, weights_of

OPTIMIZER = OptimizerSettings(steps=12, learning_rate=5e-2, schedule="constant", log_every=4)
STACK = StackSettings(rank=2, num_experts=3, alpha=4.0)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Linear(16, 16)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.down_proj(x)


class SmallModel(nn.Module):
    """A bigram model with one decoder layer, as mlx-lm's models are shaped."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.layers = [OneLayer()]
        rng = np.random.default_rng(0)
        for module, shape in (
            (self.embed, (VOCAB, 16)), (self.out, (VOCAB, 16)),
            (self.layers[0].down_proj, (16, 16)),
        ):  # fmt: skip
            module.weight = mx.array(rng.normal(size=shape).astype(np.float32) * 0.3)
        self.out.bias, self.layers[0].down_proj.bias = mx.zeros(VOCAB), mx.zeros(16)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


@pytest.fixture
def model() -> nn.Module:
    made = SmallModel()
    attach_stacks(made, find_targets(made, TargetSettings()))
    return made


def place_of(model: nn.Module) -> StackedLayer:
    ((_, layer),) = stacked_layers(model)
    return layer


def scripted(values: list[float]) -> Any:
    """An evaluator that says these losses, one a call; more calls than that fail."""
    left: Iterator[float] = iter(values)
    return lambda model: next(left)


def job_of(**changes: Any) -> DomainJob:
    values: dict[str, Any] = {
        "name": "count", "paths": ("layers.0.down_proj",), "stack": STACK, "rounds": 1,
        "optimizer": OPTIMIZER, "every": 2, "batches_at": lambda number, step: batches_at(step),
        "loss_of": real_loss, "snapshot": SnapshotSettings(spike_threshold=0.1, patience=4),
    }  # fmt: skip
    return DomainJob(**values | changes)


def real_loss(model: nn.Module) -> float:
    """Mean loss on batches that are not trained on, in evaluation mode."""
    model.eval()
    batches = [batches_at(step)[0] for step in range(1000, 1004)]
    losses = [
        nn.losses.cross_entropy(model(mx.array(b.inputs)), mx.array(b.targets)).mean().item()
        for b in batches
    ]
    model.train()
    return float(np.mean(losses))


class Memory:
    """A checkpoints that forgets nothing and can stop the run."""

    def __init__(self) -> None:
        self.done: list[RoundRecord] = []
        self.parts: list[Any] = []
        self.saved: list[tuple[int, int]] = []
        self.weights: dict[int, dict[str, bytes]] = {}

    def rounds(self) -> list[RoundRecord]:
        return list(self.done)

    def load(self, model: nn.Module, number: int) -> TrainingState | None:
        return None

    def on_step(self, number: int, state: TrainingState, record: Any) -> None: ...

    def on_validation(self, number: int, state: TrainingState, record: Any) -> None: ...

    def save(self, model: nn.Module, number: int, state: TrainingState) -> None:
        self.saved.append((number, state.step))
        self.weights[number] = weights_of(model)

    def round_done(self, record: RoundRecord, parts: Any) -> None:
        self.done.append(record)
        self.parts.append(parts)


# --- the rules, by scripted losses ----------------------------------------------------------------


def test_a_spike_at_the_first_evaluation_falls_back_to_the_zeros(model: nn.Module) -> None:
    """1.02 -> 2.64, as published; the round ends as if it had not been."""
    checkpoints = Memory()
    (record,) = boost_domain(model, job_of(loss_of=scripted([1.02, 2.64, 1.02])), checkpoints)
    assert (record.steps, record.best_step, record.kept) == (2, 0, False)
    assert "more than 0.1 above its best" in (record.ended or "")
    assert record.last == "the round gained nothing"
    zeros = next(value for name, value in checkpoints.weights[1].items() if name.endswith("lora_b"))
    assert not any(zeros)
    assert place_of(model).stacks.ids == []
    assert place_of(model).active is None


def test_patience_ends_a_round_and_the_best_weights_are_frozen(model: nn.Module) -> None:
    losses = [2.0, 1.5, 1.55, 1.56, 1.57, 1.58]
    checkpoints = Memory()
    (record,) = boost_domain(model, job_of(loss_of=scripted([*losses, 1.5])), checkpoints)
    assert (record.steps, record.best_step, record.kept) == (10, 2, True)
    assert record.ended == "4 evaluations in a row without a new best"
    assert (record.loss_before, record.loss_trained, record.loss_after) == (2.0, 1.5, 1.5)
    # The weights of step 2, not those of step 10.
    two = job_of(optimizer=OPTIMIZER.model_copy(update={"steps": 2}), loss_of=scripted([2, 1, 1]))
    other, until_two = SmallModel(), Memory()
    attach_stacks(other, find_targets(other, TargetSettings()))
    boost_domain(other, two, until_two)
    assert checkpoints.weights[1] == until_two.weights[1]


@pytest.mark.parametrize("keep", [False, True])
def test_the_plateau_rule_holds_from_round_1_on(model: nn.Module, keep: bool) -> None:
    losses = [2.0, 1.9995, 1.9995]
    job = job_of(loss_of=scripted(losses), rounds=3, every=100, keep_plateau_stack=keep)
    checkpoints = Memory()
    (record,) = boost_domain(model, job, checkpoints)
    assert record.kept is keep
    assert (checkpoints.parts[0] is not None) is keep
    assert record.last == "the round gained 0.00050, less than 0.002"
    assert len(place_of(model).stacks.ids) == int(keep)


def test_a_later_round_that_gains_enough_is_followed_by_another(model: nn.Module) -> None:
    losses = [2.0, 1.5, 1.5, 1.5, 1.4, 1.4, 1.4, 1.3999, 1.3999]
    job = job_of(loss_of=scripted(losses), rounds=5, every=100)
    records = boost_domain(model, job, Memory())
    assert [record.kept for record in records] == [True, True, False]
    assert [i.name for i in place_of(model).stacks.ids] == ["count-r1", "count-r2"]


@pytest.mark.parametrize(
    ("before", "after", "step", "keep", "kept", "last"),
    [
        (2.0, 1.9, 5, False, True, None),
        (2.0, 1.999, 5, False, False, "less than"),
        (2.0, 1.999, 5, True, True, "less than"),
        (2.0, 2.0, 0, True, False, "gained nothing"),
        (2.0, 2.1, 5, True, False, "gained nothing"),
        (2.0, math.nan, 5, True, False, "gained nothing"),
        (math.inf, 2.0, 5, True, False, "gained nothing"),
    ],
)
def test_which_rounds_are_kept(
    before: float, after: float, step: int, keep: bool, kept: bool, last: str | None
) -> None:
    found, why = judge_round(before, after, step, 0.002, keep)
    assert found is kept
    assert (why is None) == (last is None)
    assert (last or "") in (why or "")


# --- real training --------------------------------------------------------------------------------


def test_two_rounds_lower_the_loss_and_never_raise_it(model: nn.Module) -> None:
    optimizer = OPTIMIZER.model_copy(update={"steps": 60})
    records = boost_domain(model, job_of(rounds=2, optimizer=optimizer, every=10), Memory())
    first, second = records
    assert first.loss_after < first.loss_before - 0.1
    # A new stack is exactly zero.
    assert second.loss_before == first.loss_after
    assert second.loss_after <= second.loss_before
    assert records[-1].last is not None
    for record in records:
        for entry in record.history:
            assert entry["loss"] == pytest.approx(
                entry["task_loss"] + 0.01 * entry["balance_loss"], rel=1e-5
            )


def test_a_round_goes_on_where_it_was_stopped(model: nn.Module) -> None:
    """The checkpoints gives back the state and the weights of a step in the middle."""

    class StoppedError(Exception):
        pass

    class Stopping(Memory):
        held: Any = None

        def on_step(self, number: int, state: TrainingState, record: Any) -> None:
            if number == 2 and state.step == 5:
                self.held = (state, trainable_weights(stopped))
                raise StoppedError

        def load(self, model: nn.Module, number: int) -> TrainingState | None:
            if number != 2 or self.held is None:
                return None
            state: TrainingState
            state, weights = self.held
            self.held = None
            model.load_weights(list(weights.items()), strict=False)
            return state

    whole, stopped = Memory(), SmallModel()
    job = job_of(rounds=2, min_loss_delta=0.0)
    boost_domain(model, job, whole)
    attach_stacks(stopped, find_targets(stopped, TargetSettings()))
    checkpoints = Stopping()
    with pytest.raises(StoppedError):
        boost_domain(stopped, job, checkpoints)
    place_of(stopped).drop_active()
    checkpoints.on_step = lambda *args: None  # type: ignore[method-assign]
    boost_domain(stopped, job, checkpoints)
    assert [replace(r, seconds=0, history=[], validation=[]) for r in checkpoints.done] == [
        replace(r, seconds=0, history=[], validation=[]) for r in whole.done
    ]
    for name in ("count-r1", "count-r2"):
        mine, theirs = (frozen_parts(m, name)["layers.0.down_proj"] for m in (stopped, model))
        for leaf, value in mine.tensors().items():
            assert np.array(value).tobytes() == np.array(theirs.tensors()[leaf]).tobytes()


def test_what_was_trained_is_what_is_frozen_under_protected_directions(model: nn.Module) -> None:
    """The basis acts in training, in evaluation and in the frozen stack."""
    basis = null_basis(np.random.default_rng(0).normal(size=(8, 16)), 5)
    job = job_of(bases={"layers.0.down_proj": basis}, min_loss_delta=0.0)
    seen: list[float] = []

    def loss(model: nn.Module) -> float:
        active = place_of(model).active
        if active is not None:
            x = mx.random.normal((6, 16), key=mx.random.key(1))
            active.eval()
            delta, _ = active(x)
            active.train()
            seen.append(mx.abs(delta @ basis.vectors).max().item())
        return real_loss(model)

    (record,) = boost_domain(model, replace(job, loss_of=loss), Memory())
    assert record.kept
    assert max(seen) < 1e-5
    part = frozen_parts(model, "count-r1")["layers.0.down_proj"]
    lora_b = part.lora_b.astype(mx.float32)
    assert mx.abs(lora_b).max().item() > 0.01
    assert mx.abs(basis.vectors.T @ lora_b).max().item() < 1e-3 * mx.abs(lora_b).max().item()
    assert record.loss_after == pytest.approx(record.loss_trained, abs=1e-3)


def test_nan_stops_before_the_step_and_the_state_is_saved(model: nn.Module) -> None:
    def poisoned(number: int, step: int) -> Any:
        batches = batches_at(step)
        if step == 3:
            batches[0].weights[:] = np.nan
        return batches

    checkpoints = Memory()
    with pytest.raises(NonFiniteError, match="step 4"):
        boost_domain(model, job_of(batches_at=poisoned), checkpoints)
    assert checkpoints.saved == [(1, 3)]
    assert checkpoints.done == []


def test_first_weights_and_noise_depend_on_seed_domain_and_round_alone(model: nn.Module) -> None:
    def first_weights(job: DomainJob, number: int) -> bytes:
        add_stack(model, job, number)
        active = place_of(model).active
        assert active is not None
        place_of(model).drop_active()
        return np.array(active.lora_a).tobytes()

    job = job_of()
    seen = {
        (name, seed, number): (first_weights(changed, number), round_seed(changed, number))
        for name in ("a", "b")
        for seed in (0, 1)
        for number in (1, 2)
        for changed in [replace(job, name=name, seed=seed)]
    }
    assert len({weights for weights, _ in seen.values()}) == 8
    assert len({seed for _, seed in seen.values()}) == 8
    boost_domain(model, job, Memory())
    assert first_weights(replace(job, name="a", seed=0), 1) == seen["a", 0, 1][0]


def test_the_balance_loss_reaches_routers_and_only_them(model: nn.Module) -> None:
    """Trained on the balance alone, lora_a and lora_b stay as they are."""
    add_stack(model, job_of(), 1)
    before = {name: np.array(value) for name, value in trainable_weights(model).items()}

    def only_balance(model: nn.Module, tokens: mx.array) -> Any:
        logits, extra = call_with_balance(model, tokens)
        return mx.stop_gradient(logits), extra

    settings = OPTIMIZER.model_copy(update={"steps": 3, "weight_decay": 0.0})
    train(model, cross_entropy_loss(only_balance, 1.0), batches_at, settings)
    moved = {
        name.rpartition(".")[2]: not np.array_equal(before[name], np.array(value))
        for name, value in trainable_weights(model).items()
    }
    assert moved == {"lora_a": False, "lora_b": False, "router": True, "noise": True}


def test_one_expert_has_no_balance_to_report(model: nn.Module) -> None:
    stack = StackSettings(rank=2, num_experts=1)
    (record,) = boost_domain(model, job_of(stack=stack), Memory())
    assert "balance_loss" not in record.history[-1]
