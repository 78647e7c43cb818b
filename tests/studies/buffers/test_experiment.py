"""The buffer experiment for real, in small: counted runs, a plan that is fixed, killed and resumed.

Run: pytest tests/studies/buffers/test_experiment.py   (Linux with a C++ compiler; else skipped)
"""

import json
from pathlib import Path

import pytest

from mlxstacks.errors import InputError
from mlxstacks.studies.buffers.run import run
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.study import child_process
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from tests.counting import available
from tests.studies.conclusions import assert_its_files_give_edits_away
from tests.studies.train_cases import write_tiny_model
from tests.warm import WarmSubprocess

needs_counting = pytest.mark.skipif(not available(), reason="no counting allocator here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("buffers") / "model")


@pytest.fixture(autouse=True)
def _warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting processes whose imports are done."""
    monkeypatch.setattr(child_process, "subprocess", WarmSubprocess)


def settings_for(model: Path, target: Path, **changes: object) -> BufferSettings:
    values = {
        "model": str(model), "save_path": str(target),
        "ranks": (2, 8), "layers": "all", "trainers": ("mlx-lm",), "checkpointing": ("off",),
        "order_seeds": (0, 1), "fixed_tokens": 12, "longest_tokens": 64, "steps": 4,
        "warmup_steps": 1,
    }  # fmt: skip
    return BufferSettings.model_validate(values | changes)


@needs_counting
def test_counts_are_real_and_an_interrupted_experiment_goes_on(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    settings = settings_for(model, target)

    def stop(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, progress=stop)
    records = work_path(target) / "arms.jsonl"
    before = records.read_bytes()
    assert before.count(b"\n") == 3
    records.write_bytes(before + b'{"half a li')
    with pytest.raises(InputError, match=r"differs in\n  steps: was 4, now 5"):
        run(settings_for(model, target, steps=5))

    report = run(settings)
    written = [json.loads(line) for line in (target / "arms.jsonl").read_text().splitlines()]
    assert [json.dumps(record) for record in written[:3]] == before.decode().splitlines()
    assert len(written) == report.data["arms"] == 2 * 2 * 2
    opened = Result.open(target)
    assert (opened.standing.status, opened.verdict) == ("confirmatory", report.verdict)
    assert set(report.provenance) == {"plan.json", "arms.jsonl"}
    # The loop over tokens holds buffers by the token, whatever the rank.
    assert report.data["analysis"]["controls"]["mlx-lm, checkpointing off"] > 0.05
    for record in written:
        assert all(peak > record["before"] for peak in record["peaks"])
        assert all(n > 1_000 for n in record["peak_bytes"])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert_its_files_give_edits_away(target, "analysis.controls.mlx-lm, checkpointing off")


@needs_counting
def test_the_plan_is_hashed_without_paths(model: Path, tmp_path: Path) -> None:
    one = run(settings_for(model, tmp_path / "one"), dry_run=True)
    two = run(settings_for(model, tmp_path / "two"), dry_run=True)
    other = run(settings_for(model, tmp_path / "one", margin=0.02), dry_run=True)
    assert one.plan_sha256 == two.plan_sha256 != other.plan_sha256
    assert str(tmp_path) not in json.dumps(one.plan)
    assert (one.plan or {})["hypothesis"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": (2, 65)}, "rank 65"),
        ({"layers": "0,5"}, "layer 5: the model has layers 0 to 1"),
        ({"projections": ("down_prj",)}, "close: "),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    model: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(settings_for(model, tmp_path / "out", **changes))
    assert list(tmp_path.iterdir()) == []
