"""`mlxstacks align`: what it learns, writes, resumes and refuses.

Run: pytest tests/studies/train/test_align.py
"""

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks.errors import AdapterError, InputError
from mlxstacks.files.adapters import read_adapter
from mlxstacks.studies.train import align
from mlxstacks.studies.train import run as train_run
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.reference import StartingModel
from mlxstacks.training.settings import AlignSettings, SafeguardSettings
from tests.studies.train_cases import WORDS, settings_for, write_data, write_rows, write_tiny_model


def pairs(count: int, shift: int = 0) -> list[dict[str, Any]]:
    """Prompts of two words: the first is chosen, the second rejected."""
    found = []
    for index in range(count):
        first, second = (WORDS[(index * k + shift + k) % len(WORDS)] for k in (1, 3))
        if first != second:
            prompt = f"{first} {second} {index}"
            found.append({"prompt": prompt, "chosen": first, "rejected": second})
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its pairs."""
    directory = tmp_path_factory.mktemp("align")
    write_rows(directory / "data" / "train.jsonl", pairs(20))
    write_rows(directory / "data" / "valid.jsonl", pairs(8))
    return write_tiny_model(directory / "model"), directory / "data"


def settings_of(places: tuple[Path, Path], target: Path, **changes: Any) -> AlignSettings:
    """Eight short steps of a rate that learns, measured on what is trained; the loss of the chosen
    answers may rise.
    """
    values = settings_for(*places, target, steps_per_eval=3).model_dump(exclude_unset=True)
    values |= {"learning_rate": 3e-3, "safeguards": {"max_nll_rise": None}}
    return AlignSettings(**values | changes)


def weights(directory: Path) -> bytes:
    return (directory / "adapters.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["dpo", "orpo"])
def test_the_chosen_answers_become_likelier(
    places: tuple[Path, Path], tmp_path: Path, method: str
) -> None:
    target = tmp_path / "out"
    result = align.run(settings_of(places, target, method=method, iters=16, steps_per_eval=8))
    before, *_, after = result.data["validation"]
    assert after["validation_loss"] < before["validation_loss"]
    assert after["likelier"] >= before["likelier"]
    assert (before["margin"], method) in ((0.0, "dpo"), (None, "orpo"))
    if method == "dpo":
        assert before["validation_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert after["margin_low"] < after["margin"] < after["margin_high"]
        assert after["margin"] > 0
    assert result.kind == Result.open(target).kind == "align"
    assert not Result.open(target).standing.reasons
    assert list(result.table("validation")["step"]) == [0, 8, 16]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(read_adapter(target).modules) == result.data["modules"]


@pytest.mark.parametrize("stop", [2, 5, 8])
def test_a_stopped_run_resumes_to_the_same_bytes(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Before, at and after the sixth step, from which on pairs were met before. What the start gave
    them is not computed again.
    """
    write_rows(tmp_path / "pairs" / "train.jsonl", pairs(20)[:12])
    write_rows(tmp_path / "pairs" / "valid.jsonl", pairs(8))
    places = places[0], tmp_path / "pairs"
    align.run(settings_of(places, tmp_path / "whole", save_every=1, iters=10, dropout=0.0))
    whole, step = weights(tmp_path / "whole"), train_run.TrainRun._on_step

    def stops(self: Any, state: Any, record: Any) -> None:
        step(self, state, record)
        if state.step == stop:
            raise KeyboardInterrupt

    target = tmp_path / "out"
    stopped = settings_of(places, target, save_every=1, iters=10, dropout=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(train_run.TrainRun, "_on_step", stops)
        with pytest.raises(KeyboardInterrupt):
            align.run(stopped)
    scored, log_p = list[Any](), StartingModel.log_p

    def noted(self: Any, rows: Any) -> Any:
        scored.append(len(rows.tokens) // 2)
        return log_p(self, rows)

    monkeypatch.setattr(StartingModel, "log_p", noted)
    result = align.run(stopped)
    assert result.data["resumed_from_step"] == stop
    assert weights(target) == whole
    assert sum(scored) == max(0, 12 - 2 * stop)


def test_a_reward_a_million_times_too_large_leaves_the_best_snapshot(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad steps after step 3: what is written is what a run of three steps writes. All pairs are
    met by then: others would be scored in other batches, and some BLAS rounds by the batch.
    """
    write_rows(tmp_path / "pairs" / "train.jsonl", pairs(20)[:6])
    write_rows(tmp_path / "pairs" / "valid.jsonl", pairs(8))
    places = places[0], tmp_path / "pairs"
    align.run(settings_of(places, tmp_path / "three", iters=3))
    call = align.PairGradients.__call__

    def poisoned(self: Any, batches: Any, seed: int, step: int) -> Any:
        found = call(self, batches, seed, step)
        if step < 3:
            return found
        return align_gradients(found, 1e6)

    monkeypatch.setattr(align.PairGradients, "__call__", poisoned)
    result = align.run(settings_of(places, tmp_path / "poisoned", iters=8))
    assert result.data["safeguards"] == {"skipped": 5, "restored": 1, "capped": 0}
    with pytest.raises(NonFiniteError, match=r"restored the best weights 3 times"):
        align.run(settings_of(places, tmp_path / "lost", iters=20))
    # Rows that a run meets are scored together at the start: with other rows a last bit may differ.
    three = mx.load(str(tmp_path / "three" / "adapters.safetensors"))
    for directory in (tmp_path / "poisoned", work_path(tmp_path / "lost") / train_run.ADAPTER):
        written = mx.load(str(directory / "adapters.safetensors"))
        assert written.keys() == three.keys()
        assert all(mx.allclose(written[k], three[k], rtol=0, atol=1e-6).item() for k in three)


def align_gradients(found: Any, factor: float) -> Any:
    from mlx.utils import tree_map

    scaled = tree_map(lambda g: factor * g, found.gradients)
    return type(found)(factor * found.loss, found.parts, scaled)


def test_a_rising_loss_of_the_chosen_answers_ends_the_run(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = align.measured_scores
    calls = [0]

    def worse(model: Any, batch: Any, head: Any) -> Any:
        calls[0] += 1
        scores = real(model, batch, head)
        return scores._replace(chosen=scores.chosen - 0.01 * calls[0] * scores.chosen_tokens)

    monkeypatch.setattr(align, "measured_scores", worse)
    limits = SafeguardSettings(max_nll_rise=0.02)
    result = align.run(settings_of(places, tmp_path / "out", safeguards=limits))
    assert "rose by more than 0.02 nats per token" in result.verdict
    assert (result.data["status"], result.data["step"]) == ("stopped", 3)
    assert result.data["best_step"] == 0
    assert "No evaluation was better" in result.verdict


def test_training_goes_on_from_an_adapter(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Rank, scale and projections are its own, and the reference is the model with it on."""
    start = tmp_path / "start"
    data = write_data(tmp_path / "rows")
    changes: dict[str, Any] = {"layers": "1", "keys": ("q_proj", "switch_mlp.down_proj")}
    train_run.run(settings_for(places[0], data, start, rank=3, scale=4.0, **changes))
    values = settings_of(places, tmp_path / "out").model_dump(exclude_unset=True)
    del values["rank"], values["scale"]
    values["resume_adapter_file"] = str(tmp_path / "adapters.safetensors")
    with pytest.raises(InputError, match=r"adapters\.safetensors: not there"):
        align.run(AlignSettings(**values))
    values["resume_adapter_file"] = str(start / "adapters.safetensors")
    result = align.run(AlignSettings(**values))
    first, last = read_adapter(start), read_adapter(tmp_path / "out")
    assert last.modules.keys() == first.modules.keys()
    assert {m.scale for m in last.modules.values()} == {4.0}
    assert {m.rank for m in last.modules.values()} == {3}
    assert result.data["validation"][0]["margin"] == pytest.approx(0, abs=1e-4)
    assert weights(start) != weights(tmp_path / "out")
    recipe = (tmp_path / "out" / "recipe.yaml").read_text()
    assert "rank: 3" in recipe
    with pytest.raises(InputError, match=r"rank is 2, and that of .* is 3; leave rank out"):
        align.run(settings_of(places, tmp_path / "no", resume_adapter_file=str(start)))
    with pytest.raises(AdapterError, match="not there"):
        align.run(
            AlignSettings(
                **values
                | {
                    "resume_adapter_file": str(tmp_path / "gone"),
                    "save_path": str(tmp_path / "no"),
                }
            )
        )


def test_train_takes_an_adapter_to_start_from_too(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two runs of four steps, the second at a rate that changes next to nothing."""
    data, start = write_data(tmp_path / "rows"), tmp_path / "start"
    first = train_run.run(settings_for(places[0], data, start, keep="last", iters=4))
    again = settings_for(
        places[0], data, tmp_path / "again", learning_rate=1e-9, resume_adapter_file=str(start),
        iters=1,
    )  # fmt: skip
    second = train_run.run(again)
    assert second.validation[0]["validation_loss"] == pytest.approx(
        first.validation[-1]["validation_loss"], rel=1e-5
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "p", "chosen": "a", "rejected": "a "}], "equal answers"),
        ([{"prompt": "p", "chosen": "a", "rejected": " "}], "no rejected"),
        ([{"prompt": "p", "chosen": "a"}], "no rejected"),
        ([{"prompt": "p", "completion": "a"}], "chosen"),
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}], "validation_rows is 1"),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(
    places: tuple[Path, Path], tmp_path: Path, rows: list[Any], message: str
) -> None:
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    with pytest.raises(InputError, match=message):
        align.run(settings_of((places[0], file), tmp_path / "out"))


def test_val_batches_bound_the_pairs_that_validate(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    plan = align.run(settings_of(places, tmp_path / "out", val_batches=2), dry_run=True)
    assert plan.data["validation_rows"] == 4


def test_answers_cut_to_the_same_tokens_are_left_out(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    rows = [*pairs(8), {"prompt": "red " * 30, "chosen": "blue", "rejected": "green"}]
    file = write_rows(tmp_path / "pairs.jsonl", rows)
    plan = align.run(
        settings_of((places[0], file), tmp_path / "out", max_seq_length=40), dry_run=True
    )
    assert any("with nothing to compare: 1 pair" in note for note in plan.notes)
    assert plan.status == "planned"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge_ready": "grid", "dropout": 0.0}, "merge_ready grid is of train"),
        ({"mask_prompt": False}, "mask_prompt False is of train"),
        ({"compile_step": "on"}, "compile_step on is of train"),
        ({"beta": 0}, "prefers nothing"),
        ({"resume_adapter_file": "x", "keys": ("q_proj",)}, "leave out keys"),
        ({"safeguards": {"max_los": 1}}, "max_los"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    places: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(places, tmp_path / "out", **changes)
