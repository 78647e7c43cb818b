"""The trainer core on a model of a few hundred weights. Run: pytest tests/training"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.data import Batch
from mlxstacks.errors import InputError
from mlxstacks.training.loop import clip_by_global_norm, train, trainable_weights
from mlxstacks.training.settings import OptimizerSettings
from mlxstacks.training.state import load_state, save_state

VOCAB = 11
SETTINGS = OptimizerSettings(steps=12, learning_rate=1e-2, warmup_steps=3, log_every=4)


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.embed = nn.Embedding(VOCAB, 8)
        self.out = nn.Linear(8, VOCAB)
        self.embed.weight = mx.array(rng.normal(size=(VOCAB, 8)).astype(np.float32) * 0.1)
        self.out.weight = mx.array(rng.normal(size=(VOCAB, 8)).astype(np.float32) * 0.1)
        self.out.bias = mx.zeros(VOCAB)


def forward(model: TinyModel, tokens: mx.array) -> tuple[mx.array, mx.array]:
    return model.out(model.embed(tokens)), mx.array(0.0)


def batch_at(step: int) -> Batch:
    rng = np.random.default_rng(step)
    tokens = (rng.integers(0, VOCAB, (4, 1)) + np.arange(6)) % VOCAB
    return Batch(tokens.astype(np.int32), np.ones((4, 6), np.float32))


def weights_of(model: nn.Module) -> dict[str, bytes]:
    return {name: np.array(value).tobytes() for name, value in trainable_weights(model).items()}


def test_overfitting_lowers_the_loss() -> None:
    losses: list[float] = []
    settings = SETTINGS.model_copy(update={"steps": 60, "learning_rate": 5e-2})
    train(TinyModel(), forward, batch_at, settings, on_step=lambda _, r: losses.append(r["loss"]))
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=0.1)
    assert losses[-1] < 0.2
    assert len(losses) == 60


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = TinyModel()
    final = train(whole, forward, batch_at, SETTINGS)
    path = tmp_path / "state.safetensors"

    class StoppedError(Exception):
        pass

    def stop_at_five(state, record) -> None:
        if state.step == 5:
            save_state(path, first, state, "run")
            raise StoppedError

    first = TinyModel()
    with pytest.raises(StoppedError):
        train(first, forward, batch_at, SETTINGS, on_step=stop_at_five)
    second = TinyModel()
    resumed = train(second, forward, batch_at, SETTINGS, load_state(path, second, SETTINGS, "run"))
    assert resumed.step == final.step == 12
    assert weights_of(second) == weights_of(whole)
    pairs = zip(resumed.history, final.history, strict=True)
    assert all(a["loss"] == b["loss"] and a["step"] == b["step"] for a, b in pairs)


def test_a_state_of_other_settings_is_refused(tmp_path: Path) -> None:
    model = TinyModel()
    state = train(model, forward, batch_at, SETTINGS)
    save_state(tmp_path / "s.safetensors", model, state, "one")
    with pytest.raises(InputError, match="other settings"):
        load_state(tmp_path / "s.safetensors", model, SETTINGS, "two")


def test_frozen_weights_stay_and_only_trainable_ones_are_saved(tmp_path: Path) -> None:
    model = TinyModel()
    model.embed.freeze()
    before = np.array(model.embed.weight)
    state = train(model, forward, batch_at, SETTINGS)
    assert np.array_equal(before, np.array(model.embed.weight))
    save_state(tmp_path / "s.safetensors", model, state, "run")
    names = set(mx.load(str(tmp_path / "s.safetensors")))
    assert "model.out.weight" in names
    assert "model.embed.weight" not in names


def test_masked_tokens_do_not_train() -> None:
    def masked(step: int) -> Batch:
        batch = batch_at(step)
        weights = batch.weights.copy()
        weights[:, 3:] = 0
        tokens = batch.tokens.copy()
        tokens[:, 3:] = step % VOCAB
        return Batch(tokens, weights)

    def other(step: int) -> Batch:
        batch = masked(step)
        tokens = batch.tokens.copy()
        tokens[:, 3:] = (step + 5) % VOCAB
        return Batch(tokens, batch.weights)

    one, two = TinyModel(), TinyModel()
    train(one, forward, masked, SETTINGS)
    train(two, forward, other, SETTINGS)
    assert weights_of(one) == weights_of(two)


def test_a_batch_without_loss_weight_is_refused() -> None:
    empty = Batch(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="masked"):
        train(TinyModel(), forward, lambda _: empty, SETTINGS)


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    def broken(model: TinyModel, tokens: mx.array) -> tuple[mx.array, mx.array]:
        return forward(model, tokens)[0] * float("nan"), mx.array(0.0)

    with pytest.raises(FloatingPointError, match="step 1"):
        train(TinyModel(), broken, batch_at, SETTINGS)


def test_clipping_bounds_the_joint_norm() -> None:
    gradients = {"a": mx.array([3.0, 0.0]), "b": {"c": mx.array([[4.0]])}}
    clipped, norm = clip_by_global_norm(gradients, 1.0)
    assert norm.item() == pytest.approx(5.0)
    assert clipped["a"][0].item() == pytest.approx(0.6, abs=1e-5)
    same, _ = clip_by_global_norm(gradients, 10.0)
    assert same["b"]["c"].item() == 4.0


def test_learning_rate_rises_then_falls_to_its_final_share() -> None:
    rates = [SETTINGS.learning_rate_at(step) for step in range(SETTINGS.steps + 1)]
    assert rates[0] == pytest.approx(1e-2 / 3)
    assert max(rates) == pytest.approx(1e-2)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(1e-2 * SETTINGS.final_share)
