"""`mlxstacks align --method grpo`: what it learns, writes, resumes and refuses.

Run: pytest tests/studies/train/test_grpo.py
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.adapters import read_adapter
from mlxstacks.recipe.resolve import resolve
from mlxstacks.studies.train import align, grpo
from mlxstacks.studies.train import run as train_run
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.loop import NonFiniteError, trainable_weights
from mlxstacks.training.settings import AlignSettings
from tests.studies.train_cases import WORDS, settings_for, write_rows, write_tiny_model

# Half of the byte tokens earn something: the untrained model meets them at once.
EARLY = """
def early(answer, row):
    letters = [c for c in answer if ord(c) < 128]
    return sum(c < "@" for c in letters) / max(1, len(answer))

def broken(answer, row):
    return 1 / 0

def large(answer, row):
    return 1e6

def nothing(answer, row):
    return float("nan")
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its prompts."""
    directory = tmp_path_factory.mktemp("grpo")
    rows = [{"prompt": word, "answer": word, "extra": i} for i, word in enumerate(WORDS)]
    write_rows(directory / "data" / "train.jsonl", rows)
    write_rows(directory / "data" / "valid.jsonl", rows[:4])
    (directory / "own.py").write_text(EARLY)
    return write_tiny_model(directory / "model"), directory / "data"


def settings_of(places: tuple[Path, Path], target: Path, **changes: Any) -> AlignSettings:
    """Six short steps; the loss of the reference answers may rise."""
    values = settings_for(*places, target, steps_per_eval=3, iters=6, dropout=0.0, save_every=1)
    own = places[1].parent / "own.py"
    return AlignSettings(
        **values.model_dump(exclude_unset=True)
        | {"method": "grpo", "reward": (f"{own}:early",), "group_size": 4, "max_tokens": 6,
           "learning_rate": 1e-2, "max_seq_length": 256,
           "safeguards": {"max_nll_rise": None, "max_divergence": None}}
        | changes
    )  # fmt: skip


def weights(directory: Path) -> bytes:
    return (directory / "adapters.safetensors").read_bytes()


def stopping_after(step: int) -> Any:
    whole = train_run.TrainRun._on_step

    def stops(self: Any, state: Any, record: Any) -> None:
        whole(self, state, record)
        if state.step == step:
            raise KeyboardInterrupt

    return stops


def test_answers_earn_more(places: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = align.run(settings_of(places, target, iters=24, steps_per_eval=12, group_size=8))
    before, *_, after = result.data["validation"]
    assert after["reward"] > before["reward"] + 0.1
    assert before["gain"] == 0
    assert result.data["answers"] == 8 * (2 * 24 + 3 * 4)
    assert result.kind == Result.open(target).kind == "align"
    assert not Result.open(target).standing.reasons
    assert "Mean reward" in result.verdict
    assert list(result.table("validation")["step"]) == [0, 12, 24]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len(read_adapter(target).modules) == result.data["modules"]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_stopped_run_resumes_to_the_same_bytes(
    places: tuple[Path, Path], tmp_path: Path, updates: int
) -> None:
    align.run(settings_of(places, tmp_path / "whole", updates=updates))
    target = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_run.TrainRun, "_on_step", stopping_after(5))
        with pytest.raises(KeyboardInterrupt):
            align.run(settings_of(places, target, updates=updates))
    result = align.run(settings_of(places, target, updates=updates))
    # in the middle of a round nothing is saved
    assert result.data["resumed_from_step"] == (5 if updates == 1 else 4)
    assert weights(target) == weights(tmp_path / "whole")


def test_the_divergence_is_measured_from_the_start(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    result = align.run(settings_of(places, tmp_path / "out", steps_per_report=1))
    first, *_, last = result.data["history"]
    assert first["divergence"] == pytest.approx(0, abs=1e-6)
    assert last["divergence"] > 1e-4


def test_a_divergence_that_is_too_large_ends_the_run(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    guards = {"max_nll_rise": None, "max_divergence": 1e-4}
    result = align.run(settings_of(places, tmp_path / "out", safeguards=guards, learning_rate=0.1))
    assert "diverged by" in result.verdict
    assert result.data["step"] < 6


def test_references_that_become_unlikely_end_the_run(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    guards = {"max_nll_rise": 1e-4, "max_divergence": None}
    changes = {"safeguards": guards, "learning_rate": 0.1, "steps_per_eval": 1}
    result = align.run(settings_of(places, tmp_path / "out", **changes))
    assert "loss of the reference answers rose" in result.verdict
    assert result.data["best_step"] == 0


def test_a_wild_gradient_leaves_the_best_snapshot(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Advantages a million times too large, as of unscaled rewards, from the 13th step on."""
    target = tmp_path / "out"
    align.run(settings_of(places, tmp_path / "short", iters=12, steps_per_eval=12))
    plain, calls = grpo.advantages, [0]

    def scaled(rewards: Any) -> np.ndarray:
        calls[0] += 1
        found = plain(rewards)
        return found * np.float32(1e6 if calls[0] > 12 * 2 else 1.0)

    monkeypatch.setattr(grpo, "advantages", scaled)
    guards = {"max_nll_rise": None, "max_divergence": None}
    with pytest.raises(NonFiniteError, match="safeguards restored the best weights"):
        align.run(settings_of(places, target, iters=40, steps_per_eval=12, safeguards=guards))
    saved = read_adapter(work_path(target) / train_run.ADAPTER)
    short = read_adapter(tmp_path / "short")
    for path, module in short.modules.items():
        np.testing.assert_array_equal(np.asarray(module.lora_b), saved.modules[path].lora_b)


def test_starting_weights_come_back_after_the_reference_is_scored(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = grpo.GrpoRun._round, []

    def watched(self: Any, number: int) -> Any:
        before = {name: np.array(value) for name, value in trainable_weights(self.model).items()}
        groups = whole(self, number)
        after = trainable_weights(self.model)
        seen.append(all(np.array_equal(before[name], np.array(after[name])) for name in after))
        return groups

    monkeypatch.setattr(grpo.GrpoRun, "_round", watched)
    align.run(settings_of(places, tmp_path / "out", iters=2))
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "raises ZeroDivisionError"),
        ("large", "must be a number from 0 to 1"),
        ("nothing", "is nan, must be a number"),
        ("missing", "has no function missing; it has early"),
    ],
)
def test_rewards_that_cannot_be_used_are_refused(
    places: tuple[Path, Path], tmp_path: Path, name: str, words: str
) -> None:
    own = places[1].parent / "own.py"
    with pytest.raises(InputError, match=words):
        align.run(settings_of(places, tmp_path / "out", reward=(f"{own}:{name}",)))
    assert not (tmp_path / "out").exists()


def test_a_changed_reward_is_another_run(places: tuple[Path, Path], tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(EARLY)
    settings = settings_of(places, tmp_path / "out", reward=(f"{own}:early",))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_run.TrainRun, "_on_step", stopping_after(2))
        with pytest.raises(KeyboardInterrupt):
            align.run(settings)
    own.write_text(EARLY.replace('"@"', '"A"'))
    with pytest.raises(InputError, match="reward"):
        align.run(settings)


def test_prompts_that_leave_no_room_are_counted(places: tuple[Path, Path], tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_rows(data / "train.jsonl", [{"prompt": "red " * 99}, {"prompt": "red"}, {"prompt": "b"}])
    write_rows(data / "valid.jsonl", [{"prompt": "green"}])
    changes = {"reward": ("pattern=.*",), "iters": 1, "val_batches": 1}
    result = align.run(settings_of((places[0], data), tmp_path / "out", **changes))
    assert any("without room for 6 tokens" in note for note in result.notes)
    assert result.data["validation"][0]["reference_loss"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "grpo"}, "grpo needs a reward"),
        ({"method": "dpo", "reward": ["math"]}, "reward: of method grpo alone"),
        ({"method": "dpo", "group_size": 4}, "group_size: of method grpo alone"),
        ({"method": "grpo", "reward": ["math"], "dropout": 0.1}, "dropout with grpo"),
        ({"method": "grpo", "reward": ["math"], "max_tokens": 4096}, "no room for a prompt"),
        ({"method": "dpo", "beta": 0}, "prefers nothing"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve("align", {"model": "m", "data": "d", "save_path": "out", **options})


def test_the_dry_run_tells_the_plan(places: tuple[Path, Path], tmp_path: Path) -> None:
    result = align.run(settings_of(places, tmp_path / "out", guard="warn"), dry_run=True)
    assert result.status == "planned"
    assert result.data["train_rows"] == len(WORDS)
    assert json.loads(result.model_dump_json())["kind"] == "align"
    assert not (tmp_path / "out").exists()
    assert mx.default_device() is not None


def test_the_guard_counts_the_drawing_apart(places: tuple[Path, Path], tmp_path: Path) -> None:
    plans = [
        align.run(settings_of(places, tmp_path / "out", guard="warn", group_size=n), dry_run=True)
        for n in (4, 8)
    ]
    few, many = (plan.data["guard"]["drawing"] for plan in plans)
    assert few["tokens"] == max(plans[0].data["widths_tokens"])
    assert 0 < few["buffers"] < many["buffers"] < plans[0].data["guard"]["buffers"]
    assert few["nbytes"] < many["nbytes"]
    assert "answers are drawn with" in " ".join(str(plans[0]).split())
