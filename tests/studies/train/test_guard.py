"""`mlxstacks train` asks the guard first: it runs, warns, reshapes or refuses.

Run: pytest tests/studies/train/test_guard.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.cli import run as run_cli
from mlxstacks.errors import ResourceLimitError
from mlxstacks.guard.counting import compiler
from mlxstacks.guard.run import Change, GuardReport, guard
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.setup import (
    GuardedRun,
    TrainSetup,
    asked_of,
    guarded,
    set_up,
    train_change,
)
from mlxstacks.training.settings import TrainSettings
from tests.studies.train_cases import settings_for, write_rows


def verdict(settings: TrainSettings, longest: int, float32: bool, validates: bool) -> GuardReport:
    model = str(settings.model)
    return guard(asked_of(settings, model, longest, validates=validates, in_float32=float32))


def predicted(settings: TrainSettings, setup: TrainSetup) -> GuardReport:
    longest, validates = max(setup.plan.widths), setup.validation is not None
    return verdict(settings, longest, setup.float32_base, validates)


@pytest.fixture(scope="module")
def needed(places: tuple[Path, Path]) -> int:
    """Predicted buffers of the run."""
    settings = settings_for(*places, Path("unused"))
    return predicted(settings, set_up(settings)).buffers


def limited(places: tuple[Path, Path], target: Path, limit: int, **changes: Any) -> TrainSettings:
    return settings_for(*places, target, **{"guard": "refuse", "resource_limit": limit, **changes})


def test_a_run_that_fits_says_what_it_will_need(
    places: tuple[Path, Path], needed: int, tmp_path: Path
) -> None:
    settings = limited(places, tmp_path / "out", 4 * needed, iters=2)
    run = train_run.run(settings)
    report = run.as_json()
    assert report["guard"]["outcome"] == "fits"
    assert report["guard"]["buffers"] == needed
    assert report["resources"]["largest_predicted_buffers"] == needed
    assert report["resources"]["refused_batches"] == 0
    assert not any("guard" in note for note in run.notes)


def test_guard_by_itself_says_the_same_of_the_same_settings(
    places: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what hangs on the data is given to it: how long the longest row is."""
    model, data = map(str, places)
    common = ["--model", model, "--layers", "0", "--keys", "down_proj", "--rank", "3", "--json"]
    code = run_cli([
        "train", *common, "--data", data, "--save-path", str(tmp_path / "out"), "--base", "stored",
        "--batch-size", "2", "--dry-run",
    ])  # fmt: skip
    plan = json.loads(capsys.readouterr().out)["data"]
    assert code == 0
    longest = max(plan["widths_tokens"]) - 1
    assert run_cli(["guard", *common, "--batch-size", "2", "--max-seq-length", str(longest)]) == 0
    found = json.loads(capsys.readouterr().out)["data"]
    assert found["buffers"] == plan["guard"]["buffers"]
    assert found["bytes"]["total_bytes"] == plan["guard"]["bytes"]


def test_from_half_the_limit_on_it_warns_and_runs(
    places: tuple[Path, Path], needed: int, tmp_path: Path
) -> None:
    settings = limited(places, tmp_path / "out", int(needed / 0.6), iters=2)
    report = train_run.run(settings)
    assert report.status == "trained"
    assert any(
        note.startswith("The guard warns: the buffers fit, but not") for note in report.notes
    )


def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(
    places: tuple[Path, Path], needed: int, tmp_path: Path
) -> None:
    settings = limited(places, tmp_path / "out", needed)
    with pytest.raises(ResourceLimitError) as refused:
        train_run.run(settings)
    message = str(refused.value)
    assert "the guard refuses this run: does not fit" in message
    assert f"{needed:,}" in message
    assert "--guard warn runs all the same" in message
    assert list(tmp_path.iterdir()) == []
    plan = train_run.run(settings, dry_run=True)
    assert plan.status == "planned"
    assert any("the guard refuses this run" in note for note in plan.notes)


@pytest.mark.parametrize("changes", [{"guard": "warn"}, {"force": True}, {"guard": "off"}], ids=str)
def test_it_runs_all_the_same_when_told_to(
    places: tuple[Path, Path], needed: int, tmp_path: Path, changes: dict[str, Any]
) -> None:
    report = train_run.run(limited(places, tmp_path / "out", needed, iters=2, **changes))
    assert report.status == "trained"
    warned = any("The guard warns: does not fit" in note for note in report.notes)
    assert warned == (changes.get("guard") != "off")


def test_reshape_makes_the_cheapest_change(places: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = places[0], tmp_path / "data"
    write_rows(data / "train.jsonl", [{"text": "abcd " * 20}] * 2)

    def needs(**changes: Any) -> int:
        settings = settings_for(model, data, Path("unused"), **changes)
        setup = set_up(settings)
        total = predicted(settings, setup).nbytes.total
        assert total is not None
        return total

    plain, checkpointed = needs(), needs(grad_checkpoint=True)
    limit = int((plain + checkpointed) / 2 / 0.9)
    assert checkpointed < 0.9 * limit < plain
    changes: dict[str, Any] = {"iters": 1, "guard": "refuse", "working_set_bytes": limit}
    with pytest.raises(ResourceLimitError, match="--guard reshape makes that change"):
        train_run.run(settings_for(model, data, tmp_path / "out", **changes))
    settings = settings_for(model, data, tmp_path / "out", **{**changes, "guard": "reshape"})
    report = train_run.run(settings)
    assert report.settings["grad_checkpoint"] is False
    assert report.plan["guard"]["change"] == {"grad_checkpoint": True}
    assert report.plan["guard"]["bytes"] == checkpointed
    assert "Reshaped by the guard: grad_checkpoint: true." in report.notes


def test_a_run_that_no_change_can_save_is_refused_under_reshape_too(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ResourceLimitError, match="does not fit"):
        train_run.run(limited(places, tmp_path / "out", 10, guard="reshape"))


def test_what_a_run_keeps_beside_its_step_is_counted(places: tuple[Path, Path]) -> None:
    settings = settings_for(*places, Path("unused"))
    setup = set_up(settings)
    adapter = 4 * setup.parameters
    longest = max(setup.plan.widths)
    bare = verdict(settings, longest, setup.float32_base, False)
    best = verdict(settings, longest, setup.float32_base, True)
    several = settings.model_copy(update={"grad_accumulation_steps": 2})
    both = verdict(several, longest, setup.float32_base, True)
    totals = [report.nbytes.total or 0 for report in (bare, best, both)]
    assert totals[1] == totals[0] + adapter
    assert totals[2] == pytest.approx(totals[1] + adapter, rel=0.01)
    assert best.buffers == bare.buffers + 2 * len(setup.targets)
    assert bare.nbytes.adapter == adapter
    assert sum(vars(both.nbytes).values()) == totals[2]


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_live_buffers_are_counted_beside_the_prediction(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = settings_for(*places, tmp_path / "out", iters=4, count_buffers=True, guard="warn")
    report, result = train_run.train_with(train_run.TrainRun, settings, False, None)
    assert report.plan["guard"] is not None
    predicted, counted = report.plan["guard"]["buffers"], report.figures["counted_buffers"]
    assert counted > 0.8 * predicted  # of the process, which holds arrays of other tests
    assert f"{counted:,} live buffers" in str(result)
    plain = settings.model_copy(update={"count_buffers": False})
    setup = set_up(settings)
    assert setup.identity(settings) == setup.identity(plain)


def test_a_limit_that_no_device_named_is_no_reason_to_refuse(
    places: tuple[Path, Path], needed: int
) -> None:
    settings = settings_for(*places, Path("unused"))
    setup = set_up(settings)
    report = predicted(settings, setup)
    unknown = replace(report.limit, known=False, nbytes=None, buffers=1)
    watch = GuardedRun(settings, setup, replace(report, limit=unknown)).watch()
    assert watch is not None
    assert watch.check(10) == report.buffers
    assert watch.report()["refused_batches"] == 1


def test_a_batch_beyond_the_line_is_refused_before_it_is_launched(
    places: tuple[Path, Path], needed: int
) -> None:
    settings = limited(places, Path("unused"), 2 * needed)
    found = guarded(settings, set_up(settings))
    watch = found.watch()
    assert watch is not None
    longest = max(found.setup.plan.widths) - 1
    assert watch.check(longest) == needed
    with pytest.raises(ResourceLimitError, match="a batch of rows of"):
        watch.check(2 * longest)


def test_the_change_of_rows_counts_the_token_that_is_only_a_target(
    places: tuple[Path, Path], needed: int
) -> None:
    settings = settings_for(*places, Path("unused"))
    setup = set_up(settings)
    report = predicted(settings, setup)
    shorter = Change("shorter rows", {"max_seq_length": 40}, needed, None)
    assert train_change(replace(report, change=shorter)) == {"max_seq_length": 41}


def test_typed_it_ends_with_the_exit_code_of_a_gate(
    places: tuple[Path, Path],
    work_dir: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    where = ["--model", str(places[0]), "--data", str(places[1])]
    arguments = ["train", *where, "--resource-limit", "100", "--json"]
    assert run_cli(arguments) == 3
    document = json.loads(capfd.readouterr().out)
    assert document["error"]["kind"] == "ResourceLimitError"
    assert document["error"]["exit_code"] == 3
    assert list(work_dir.iterdir()) == []
