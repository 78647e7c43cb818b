"""The trainer core on a model of a few hundred weights. Run: pytest tests/training"""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstacks.data import Batch
from mlxstacks.errors import InputError
from mlxstacks.training.loop import (
    BestSnapshot,
    NonFiniteError,
    TrainingState,
    Validation,
    load_state,
    new_state,
    restore_best,
    save_state,
    train,
    trainable_weights,
)
from mlxstacks.training.settings import OptimizerSettings, SnapshotSettings
from mlxstacks.training.step import (
    GradientStep,
    MicroBatch,
    clip_by_global_norm,
    cross_entropy_loss,
)
from tests.training.tiny import VOCAB, TinyModel, batch_at, batches_at, weights_of

SETTINGS = OptimizerSettings(steps=12, learning_rate=1e-2, warmup_steps=3, log_every=4)
LOSS = cross_entropy_loss()


class StoppedError(Exception):
    pass


def test_overfitting_lowers_the_loss() -> None:
    losses: list[float] = []
    settings = SETTINGS.model_copy(update={"steps": 60, "learning_rate": 5e-2})
    train(TinyModel(), LOSS, batches_at, settings, on_step=lambda _, r: losses.append(r["loss"]))
    assert losses[0] == pytest.approx(np.log(VOCAB), abs=0.1)
    assert losses[-1] < 0.2
    assert len(losses) == 60


def test_a_record_is_of_all_steps_since_the_last_one() -> None:
    each = SETTINGS.model_copy(update={"log_every": 1})
    steps = train(TinyModel(), LOSS, batches_at, each).history
    records = train(TinyModel(), LOSS, batches_at, SETTINGS).history
    assert [record["step"] for record in records] == [4, 8, 12]
    for i, record in enumerate(records):
        part = steps[4 * i : 4 * i + 4]
        assert record["loss"] == pytest.approx(np.mean([step["loss"] for step in part]))
        assert record["tokens"] == sum(step["tokens"] for step in part)
        assert record["learning_rate"] == part[-1]["learning_rate"]


def test_interrupted_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    def validation() -> Validation:
        return Validation(lambda m: m.out.bias.sum().item(), 3, SnapshotSettings())

    whole = TinyModel()
    final = train(whole, LOSS, batches_at, SETTINGS, validation=validation())
    path = tmp_path / "state.safetensors"

    def stop_at_five(state: TrainingState, record: dict[str, float]) -> None:
        if state.step == 5:
            save_state(path, first, state, "run")
            raise StoppedError

    first = TinyModel()
    with pytest.raises(StoppedError):
        train(first, LOSS, batches_at, SETTINGS, validation=validation(), on_step=stop_at_five)
    second = TinyModel()
    resumed = train(
        second, LOSS, batches_at, SETTINGS, load_state(path, second, SETTINGS, "run"),
        validation=validation(),
    )  # fmt: skip
    assert resumed.step == final.step == 12
    assert weights_of(second) == weights_of(whole)
    pairs = zip(resumed.history, final.history, strict=True)
    assert all(a["loss"] == b["loss"] and a["step"] == b["step"] for a, b in pairs)
    for mine, theirs in zip(resumed.validation, final.validation, strict=True):
        assert mine["validation_loss"] == theirs["validation_loss"]
    assert resumed.best is not None
    assert final.best is not None
    assert resumed.best.step == final.best.step
    restore_best(second, resumed)
    restore_best(whole, final)
    assert weights_of(second) == weights_of(whole)


def test_patience_goes_on_counting_in_a_resumed_run(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 4})
    path = tmp_path / "state.safetensors"
    model, state = TinyModel(), new_state(settings)
    state.best = BestSnapshot(1.5, 2, dict(trainable_weights(model)), without_gain=3)
    save_state(path, model, state, "run")
    loaded = load_state(path, TinyModel(), settings, "run").best
    assert loaded is not None
    assert (loaded.loss, loaded.step, loaded.without_gain) == (1.5, 2, 3)


def test_a_state_of_other_settings_or_another_model_is_refused(tmp_path: Path) -> None:
    model, path = TinyModel(), tmp_path / "s.safetensors"
    state = train(model, LOSS, batches_at, SETTINGS)
    save_state(path, model, state, "one")
    with pytest.raises(InputError, match="other settings"):
        load_state(path, model, SETTINGS, "two")
    model.embed.freeze()
    with pytest.raises(InputError, match="not those that this model trains"):
        load_state(path, model, SETTINGS, "one")


def test_a_damaged_state_is_refused_wherever_a_bit_is_wrong(tmp_path: Path) -> None:
    """Cut off, or one bit flipped: in the length, in the header, in a tensor."""
    model, path = TinyModel(), tmp_path / "s.safetensors"
    save_state(path, model, train(model, LOSS, batches_at, SETTINGS), "one")
    whole = path.read_bytes()
    before = weights_of(model)
    load_state(path, model, SETTINGS, "one")
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(8), *range(8, header, 7), *range(header, len(whole), 97), len(whole) - 1]
    damaged = [whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :] for place in places]
    damaged += [whole[:length] for length in (0, 1, 8, 100, header, len(whole) - 1)]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(InputError, match=r"s\.safetensors: .*to start again"):
            load_state(path, model, SETTINGS, "one")
    assert weights_of(model) == before


def test_frozen_weights_stay_and_only_trainable_ones_are_saved(tmp_path: Path) -> None:
    model = TinyModel()
    model.embed.freeze()
    before = np.array(model.embed.weight)
    state = train(model, LOSS, batches_at, SETTINGS)
    assert np.array_equal(before, np.array(model.embed.weight))
    save_state(tmp_path / "s.safetensors", model, state, "run")
    names = set(mx.load(str(tmp_path / "s.safetensors")))
    assert "model.out.weight" in names
    assert "model.embed.weight" not in names


def test_masked_tokens_do_not_train() -> None:
    def masked(step: int, shift: int) -> list[Batch]:
        batch = batch_at(step)
        weights, tokens = batch.weights.copy(), batch.tokens.copy()
        weights[:, 3:] = 0
        tokens[:, 3:] = (step + shift) % VOCAB
        return [Batch(tokens, weights)]

    one, two = TinyModel(), TinyModel()
    train(one, LOSS, lambda step: masked(step, 0), SETTINGS)
    train(two, LOSS, lambda step: masked(step, 5), SETTINGS)
    assert weights_of(one) == weights_of(two)


def test_a_batch_without_loss_weight_is_refused() -> None:
    empty = Batch(np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="masked"):
        train(TinyModel(), LOSS, lambda _: [empty], SETTINGS)


# --- the loss is an argument ------------------------------------------------------------------


def test_parts_of_a_loss_are_reported_beside_it() -> None:
    def forward(model: nn.Module, tokens: mx.array) -> tuple[mx.array, mx.array]:
        return model(tokens), mx.array(2.0)

    records: list[dict[str, float]] = []
    loss = cross_entropy_loss(forward, extra_weight=0.25)
    settings = SETTINGS.model_copy(update={"steps": 1})

    def halves(step: int) -> list[Batch]:
        whole = batch_at(step)
        return [Batch(whole.tokens[part], whole.weights[part]) for part in (slice(3), slice(3, 4))]

    train(TinyModel(), loss, halves, settings, on_step=lambda _, r: records.append(r))
    (record,) = records
    assert record["extra_loss"] == pytest.approx(2.0)
    assert record["loss"] == pytest.approx(record["task_loss"] + 0.5, abs=1e-6)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_accumulated_gradients_are_those_of_one_batch(sizes: tuple[int, ...]) -> None:
    """Also with different weights a row: the mean is over tokens, not over batches."""
    model, whole = TinyModel(), batch_at(0)
    weights = whole.weights.copy()
    weights[0, 2:] = 0
    ends = np.cumsum(sizes)
    parts = [
        Batch(whole.tokens[end - size : end], weights[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]
    step = GradientStep(model, LOSS)
    one = step([Batch(whole.tokens, weights)], seed=0, step=0)
    many = step(parts, seed=0, step=0)
    assert many.loss.item() == pytest.approx(one.loss.item(), abs=1e-6)
    for (name, a), (_, b) in zip(
        tree_flatten(one.gradients), tree_flatten(many.gradients), strict=True
    ):
        assert mx.allclose(a, b, atol=1e-7).item(), name


def test_gradients_are_those_of_finite_differences() -> None:
    model, batch = TinyModel(), batch_at(0)
    found = GradientStep(model, LOSS)([batch], seed=0, step=0)
    gradient = np.array(found.gradients["out"]["bias"])

    def loss_with(shift: float) -> float:
        logits = np.array(model(mx.array(batch.inputs)), dtype=np.float64)
        logits[..., 3] += shift
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return -np.take_along_axis(logits, batch.targets[..., None], -1).mean()

    numeric = (loss_with(1e-4) - loss_with(-1e-4)) / 2e-4
    assert gradient[3] == pytest.approx(numeric, abs=1e-5)


def test_the_key_of_a_batch_depends_on_seed_step_and_place_alone() -> None:
    seen: list[tuple[int, ...]] = []

    def loss(model: nn.Module, batch: MicroBatch) -> tuple[mx.array, dict[str, mx.array]]:
        seen.append(tuple(np.array(batch.key).tolist()))
        return LOSS(model, batch)

    step = GradientStep(TinyModel(), loss)
    halves = [Batch(b.tokens[:2], b.weights[:2]) for b in (batch_at(0), batch_at(1))]
    for seed, number in ((0, 0), (0, 1), (1, 0), (0, 0)):
        step(halves, seed, number)
    assert seen[:2] == seen[6:]
    assert len(set(seen)) == 6


@pytest.mark.slow
def test_a_compiled_step_gives_the_same_numbers() -> None:
    """Slow: on a CPU each shape is built with the system's C++ compiler."""
    plain, compiled = TinyModel(), TinyModel()
    train(plain, LOSS, batches_at, SETTINGS)
    train(compiled, LOSS, batches_at, SETTINGS, compiled=True)
    for name, value in trainable_weights(plain).items():
        assert mx.allclose(value, trainable_weights(compiled)[name], atol=1e-5).item(), name


# --- what is not finite -------------------------------------------------------------------------


def broken_at(step: int, in_gradient: bool) -> tuple[list[int], object]:
    """A loss that is NaN, or whose gradient alone is infinite, from the given call on."""
    calls = [0]

    def forward(model: nn.Module, tokens: mx.array) -> tuple[mx.array, None]:
        calls[0] += 1
        logits = model(tokens)
        if calls[0] < step:
            return logits, None
        if in_gradient:  # sqrt(0) is 0, its slope is not
            return logits + mx.sqrt(0.0 * mx.abs(model.out.bias)), None
        return logits * float("nan"), None

    return calls, cross_entropy_loss(forward)


@pytest.mark.parametrize(("in_gradient", "what"), [(False, "loss"), (True, "grad norm")])
def test_a_step_that_is_not_finite_is_not_taken(in_gradient: bool, what: str) -> None:
    model, reference = TinyModel(), TinyModel()
    train(reference, LOSS, batches_at, SETTINGS.model_copy(update={"steps": 4}))
    states: list[TrainingState] = []
    _, loss = broken_at(5, in_gradient)
    settings = SETTINGS.model_copy(update={"schedule": "constant"})
    constant = TinyModel()
    train(constant, LOSS, batches_at, settings.model_copy(update={"steps": 4}))
    with pytest.raises(NonFiniteError, match=f"step 5: the {what} is (nan|inf)"):
        train(model, loss, batches_at, settings, on_step=lambda s, _: states.append(s))  # type: ignore[arg-type]
    assert weights_of(model) == weights_of(constant)
    assert states[-1].step == 4
    assert all(np.isfinite(np.array(v)).all() for v in trainable_weights(model).values())


# --- clipping and learning rates ------------------------------------------------------------------


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


def test_each_step_is_taken_at_the_rate_of_its_number() -> None:
    rates: list[float] = []
    settings = SETTINGS.model_copy(update={"steps": 5})

    def on_step(state: TrainingState, record: dict[str, float]) -> None:
        assert record["learning_rate"] == pytest.approx(state.optimizer.learning_rate.item())
        rates.append(record["learning_rate"])

    train(TinyModel(), LOSS, batches_at, settings, on_step=on_step)
    assert rates == [settings.learning_rate_at(step) for step in range(5)]


def test_the_other_schedules() -> None:
    flat = SETTINGS.model_copy(update={"schedule": "constant"})
    assert [flat.learning_rate_at(step) for step in (3, 7, 100)] == [1e-2] * 3
    line = SETTINGS.model_copy(update={"schedule": "linear", "final_share": 0.0})
    rates = [line.learning_rate_at(step) for step in range(3, 13)]
    assert np.diff(rates) == pytest.approx([-1e-2 / 9] * 9)
    assert rates[-1] == 0.0
    assert line.learning_rate_at(1000) == 0.0
