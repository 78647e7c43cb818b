"""A sweep is its cells: each one a run of `train`, kept, measured, never made twice.

Run: pytest tests/studies/sweep/test_run.py
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxstacks.files.adapters import read_adapter
from mlxstacks.files.outputs import MARK, new_mark, write_json
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.guard.counting import compiler
from mlxstacks.studies.sweep import rank_sweep, worker
from mlxstacks.studies.sweep.cells import CellResult, cells_of, read_results
from mlxstacks.studies.sweep.rank_sweep import run
from mlxstacks.studies.train.run import run as train
from mlxstacks.study import child_process
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from tests.studies.conclusions import assert_its_files_give_edits_away
from tests.studies.sweep_cases import FATAL_RANK, Cells, adapters, sweep_settings
from tests.warm import WarmSubprocess

NAME = "rank-{}_seed-{}_layers-all_switch_mlp.down_proj"


@pytest.fixture(scope="module")
def swept(
    inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """Ranks 2 and 4, two seeds. One cell has a process of its own."""
    target = tmp_path_factory.mktemp("sweep") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "subprocess", WarmSubprocess)
        patch.setattr(child_process, "run_child", Cells((4, 1)))
        return target, run(sweep_settings(*inputs, target, seeds=(0, 1)))


def results_of(report: Result) -> list[CellResult]:
    """Of its cells, in their order."""
    kept = {r.cell.name: r for r in read_results(Path(str(report.directory)) / "cells").values()}
    return [kept[cell["name"]] for cell in report.data["cells"]]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds; those of `swept` are looked at."""
    monkeypatch.setattr(rank_sweep._Sweep, "plot_formats", ())


@pytest.fixture
def cells_here(monkeypatch: pytest.MonkeyPatch) -> Cells:
    """Cells run in this process."""
    cells = Cells()
    monkeypatch.setattr(child_process, "run_child", cells)
    return cells


def test_every_cell_is_there_and_nothing_is_left_over(swept: tuple[Path, Result]) -> None:
    target, report = swept
    names = {NAME.format(rank, seed) for rank in (2, 4) for seed in (0, 1)}
    assert set(adapters(target)) == names
    assert {cell["name"] for cell in report.data["cells"]} == names
    assert [p.name for p in target.parent.iterdir()] == ["out"]
    opened = Result.open(target)
    assert (opened.standing.status, opened.verdict) == ("no plan", report.verdict)
    assert opened.data["matrix"] == report.as_json()["data"]["matrix"]
    assert set(report.provenance) == {f"cells/{name}.json" for name in names}
    assert {"survival.png", "losses.svg"} <= {path.name for path in target.iterdir()}
    # The state of a run that is over is three times its adapter, and of no use.
    assert not list(target.rglob("checkpoint.safetensors"))


def test_a_cell_is_the_run_that_train_makes(swept: tuple[Path, Result], tmp_path: Path) -> None:
    """The cell of a process, here again."""
    target, report = swept
    name = NAME.format(4, 1)
    again = tmp_path / "again"
    made = train(_settings_of(target / "cells" / name, again))
    assert (again / "adapters.safetensors").read_bytes() == adapters(target)[name]
    [result] = [r for r in results_of(report) if r.cell.name == name]
    losses = [record["validation_loss"] for record in made.validation]
    assert [record["validation_loss"] for record in result.figures["validation"]] == losses
    assert len(losses) == 3
    assert result.figures.get("last_validation_loss") == made.validation[-1]["validation_loss"]
    assert result.figures.get("first_validation_loss") == made.first_validation_loss


def _settings_of(cell: Path, save_path: Path) -> Any:
    from mlxstacks.training.settings import TrainSettings

    values = Result.open(cell).settings
    return TrainSettings.model_validate(values | {"save_path": str(save_path)})


def test_survival_is_what_a_fuse_reports(
    swept: tuple[Path, Result], inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    target, report = swept
    name = NAME.format(2, 0)
    [result] = [r for r in results_of(report) if r.cell.name == name]
    assert set(result.survival) == {"refit", "keep", "nearest", "promote"}
    for policy, found in result.survival.items():
        fused = fuse(
            FuseSettings(
                model=str(inputs[0]), adapter_path=(str(target / "cells" / name),),
                save_path=str(tmp_path / policy), requant=policy,
            )
        )  # fmt: skip
        assert fused.total is not None
        for key, value in fused.total.as_json().items():
            assert found[key] == pytest.approx(value, rel=1e-12), (policy, key)
        assert found["extra_bytes"] == fused.extra_bytes


def test_delta_in_steps_is_that_of_the_arrays(
    swept: tuple[Path, Result], inputs: tuple[Path, Path]
) -> None:
    """rms of scale * B @ A over all modules, in the mean of |scales|, by NumPy alone."""
    import mlx.core as mx

    target, report = swept
    base = mx.load(str(inputs[0] / "model.safetensors"))
    squares = weights = steps = groups = 0.0
    for module in read_adapter(target / "cells" / NAME.format(4, 0)).modules.values():
        delta = module.scale * np.array(module.lora_b) @ np.array(module.lora_a)  # (M, N, K)
        scales = np.abs(np.array(base[f"{module.path}.scales"].astype(mx.float32)))
        squares, weights = squares + float((delta**2).sum()), weights + delta.size
        steps, groups = steps + float(scales.sum()), groups + scales.size
    expected = (squares / weights) ** 0.5 / (steps / groups)
    [result] = [r for r in results_of(report) if r.cell.name == NAME.format(4, 0)]
    assert result.survival["refit"]["delta_over_step"] == pytest.approx(expected, rel=1e-5)


def test_matrix_has_means_and_intervals_over_seeds(swept: tuple[Path, Result]) -> None:
    _, report = swept
    assert [(row["rank"], row["cells"]) for row in report.data["matrix"]] == [
        (2, {"trained": 2}), (4, {"trained": 2}),
    ]  # fmt: skip
    for row in report.data["matrix"]:
        kept = row["survival"]["promote"]
        own = [
            r.survival["promote"]["survival"]
            for r in results_of(report)
            if r.cell.rank == row["rank"]
        ]
        assert kept["n"] == 2
        assert kept["mean"] == pytest.approx(np.mean(own))
        assert kept["low"] is not None
    loss = next(d for d in report.data["differences"] if d["what"] == "last_validation_loss")
    by_cell = {
        (r.cell.rank, r.cell.seed): r.figures.get("last_validation_loss")
        for r in results_of(report)
    }
    pairs = [float(by_cell[4, seed] or 0) - float(by_cell[2, seed] or 0) for seed in (0, 1)]
    assert loss["difference"]["mean"] == pytest.approx(np.mean(pairs))
    assert loss["finding"] in ("excludes 0", "holds 0")
    assert "all 4 cells trained" in report.verdict


def test_guard_is_asked_at_the_longest_row(swept: tuple[Path, Result]) -> None:
    for result in results_of(swept[1]):
        assert result.guard["outcome"] == "fits"
        assert result.guard["limit_buffers"] == 499_000
        assert 100 < result.guard["buffers"] < 5_000


def test_finished_cells_are_not_run_again(
    swept: tuple[Path, Result],
    inputs: tuple[Path, Path],
    tmp_path: Path,
    cells_here: Cells,
) -> None:
    """One more rank: only its cell runs; the others are carried over with their figures."""
    target = tmp_path / "out"
    shutil.copytree(swept[0], target)
    settings = sweep_settings(*inputs, target, ranks=(2, 4, 8), seeds=(0, 1), force=True)
    report = run(settings.model_copy(update={"seeds": (0,)}))
    assert cells_here.started == [(8, 0)]
    before, after = adapters(swept[0]), adapters(target)
    assert {name: after[name] for name in after if "rank-8" not in name} == {
        name: before[name] for name in before if "seed-0" in name
    }
    old = {r.cell: r.figures.get("seconds") for r in results_of(swept[1])}
    assert all(r.figures.get("seconds") == old[r.cell] for r in results_of(report) if r.cell in old)


def test_a_cell_whose_files_are_gone_is_trained_again(
    swept: tuple[Path, Result], inputs: tuple[Path, Path], tmp_path: Path, cells_here: Cells
) -> None:
    """Its result alone would end as `trained` in a sweep without its adapter."""
    target = tmp_path / "out"
    cells = work_path(target) / "cells"
    shutil.copytree(swept[0] / "cells", cells)
    write_json(cells.parent / MARK, new_mark())
    shutil.rmtree(cells / NAME.format(2, 1))
    report = run(sweep_settings(*inputs, target, seeds=(0, 1)))
    assert [result.status for result in results_of(report)] == ["trained"] * 4
    assert adapters(target) == adapters(swept[0])


def test_another_policy_is_measured_without_training(
    swept: tuple[Path, Result],
    inputs: tuple[Path, Path],
    tmp_path: Path,
    cells_here: Cells,
) -> None:
    target = tmp_path / "out"
    shutil.copytree(swept[0], target)
    settings = sweep_settings(
        *inputs, target, ranks=(2,), policies=("refit", "dequantize"), force=True
    )
    report = run(settings)
    [result] = results_of(report)
    [old] = [r for r in results_of(swept[1]) if r.cell == result.cell]
    assert result.survival["dequantize"]["survival"] == pytest.approx(1.0, abs=0.05)
    assert result.figures.get("seconds") == old.figures.get("seconds")
    assert adapters(target)[result.cell.name] == adapters(swept[0])[result.cell.name]


def test_half_an_adoption_is_not_taken_for_a_cell(
    inputs: tuple[Path, Path], tmp_path: Path, cells_here: Cells
) -> None:
    """A directory without a result: the process died while it carried cells over."""
    target = tmp_path / "out"
    for name in (NAME.format(2, 0), f".{NAME.format(2, 0)}.adopting"):
        (work_path(target) / "cells" / name).mkdir(parents=True)
    write_json(work_path(target) / MARK, new_mark())
    report = run(sweep_settings(*inputs, target, ranks=(2,), policies=("keep",)))
    assert [result.status for result in results_of(report)] == ["trained"]
    assert set(adapters(target)) == {NAME.format(2, 0)}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_counted_buffers_are_near_the_predicted_and_are_kept(
    inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    monkeypatch.setattr(child_process, "subprocess", WarmSubprocess)
    settings = sweep_settings(
        *inputs, target, ranks=(2,), policies=("keep",), train={"count_buffers": True}
    )
    counted = results_of(run(settings))[0].figures.get("counted_buffers")
    predicted = run(settings.model_copy(update={"force": True}), dry_run=True).data["cells"][0]
    assert counted is not None
    # The guard predicts a step without clipping that is evaluated once; ours is evaluated twice.
    assert counted == pytest.approx(predicted["predicted_buffers"], rel=0.15)
    more = settings.model_copy(update={"force": True, "policies": ("keep", "refit")})
    monkeypatch.setattr(child_process, "run_child", Cells())
    [again] = results_of(run(more))
    assert again.figures.get("counted_buffers") == counted
    assert set(again.survival) == {"keep", "refit"}


def test_a_cell_that_crashes_is_a_result(
    inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the published table: how far it came, and which checkpoints can be used."""
    monkeypatch.setattr(rank_sweep, "WORKER", "tests.studies.sweep_cases")
    monkeypatch.setattr(child_process, "subprocess", WarmSubprocess)
    target = tmp_path / "out"
    report = run(sweep_settings(*inputs, target))
    fine, dead = results_of(report)
    assert (fine.status, dead.status, dead.cell.rank) == ("trained", "crashed", FATAL_RANK)
    assert dead.reason == "killed by SIGABRT"
    assert dead.figures == {"step": 5, "saved_steps": [2, 4]}
    assert any("(after step 5; states saved at: 2, 4)" in note for note in report.notes)
    unfinished = target / "cells" / f"{dead.cell.name}.unfinished"
    assert (unfinished / "adapter" / "adapters.safetensors").is_file()
    assert "1 trained, 1 crashed (not all of rank 4)" in report.verdict
    assert report.failed_gate is None


def test_a_cell_that_diverges_is_a_result(
    inputs: tuple[Path, Path], tmp_path: Path, cells_here: Cells
) -> None:
    settings = sweep_settings(*inputs, tmp_path / "out", ranks=(2,), train={"scale": 1e30})
    report = run(settings)
    [result] = results_of(report)
    assert result.status == "failed"
    assert result.reason is not None
    assert "step" in result.reason
    assert "1 failed" in report.verdict
    assert any("failed" in note for note in report.notes)


@pytest.mark.parametrize(
    "words",
    [
        "[metal::malloc] Resource limit (499000) exceeded.",
        "[METAL] Command buffer execution failed: Insufficient Memory (00000008)",
    ],
)
def test_a_cell_without_memory_is_a_result(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(worker, "run", no_memory)
    specification = {"train": {"save_path": "/nowhere/out"}, "policies": []}
    found = worker.work(specification, lambda message: None)
    assert found == {"status": "failed", "reason": words}


def test_cells_that_the_guard_refuses_are_recorded_not_run(
    inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    report = run(sweep_settings(*inputs, target, resource_limit=100))
    assert [result.status for result in results_of(report)] == ["refused", "refused"]
    assert all("does not fit" in str(result.reason) for result in results_of(report))
    assert report.failed_gate is not None
    assert "every cell was refused" in report.failed_gate
    assert not adapters(target)


def test_the_guard_reshapes_when_told_to(
    inputs: tuple[Path, Path], tmp_path: Path, cells_here: Cells
) -> None:
    """Checkpointing needs fewer bytes; the cell runs with it, and the report says so."""
    plain = sweep_settings(*inputs, tmp_path / "out", ranks=(2,))
    [planned] = run(plain, dry_run=True).data["cells"]
    limit = int(planned["predicted_bytes"] / 0.905)
    settings = plain.model_copy(update={"guard": "reshape", "working_set_bytes": limit})
    report = run(settings)
    [result] = results_of(report)
    assert (result.status, result.guard["change"]) == ("trained", {"grad_checkpoint": True})
    assert result.guard["bytes"] < planned["predicted_bytes"]
    assert any("not like for like" in note for note in report.notes)


def test_a_plan_touches_nothing(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    shares: list[float] = []
    report = run(
        sweep_settings(*inputs, tmp_path / "out", seeds=(0, 1, 2)),
        dry_run=True, progress=lambda done, total, what="": shares.append(done / total),
    )  # fmt: skip
    # a larger rank takes longer
    assert 3 * shares[1] == pytest.approx(shares[3])
    assert 0 < shares[3] < 0.5
    assert (report.status, len(report.data["cells"])) == ("planned", 6)
    for cell in report.data["cells"]:
        assert cell["predicted_buffers"] > 100
        assert cell["least_seconds"] is not None
        # 2 layers x 4 experts x rank x (64 inputs + 64 outputs)
        assert cell["parameters"] == 2 * 4 * cell["rank"] * 128
    assert list(tmp_path.iterdir()) == []


def test_names_of_cells_are_theirs_alone(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    settings = sweep_settings(
        *inputs, tmp_path, seeds=(0, 1), layers=("0", "1", "0,1", "all"),
        projections=("down_proj", "up_proj+gate_proj", "+".join(["switch_mlp.down_proj"] * 12)),
    )  # fmt: skip
    names = [cell.name for cell in cells_of(settings)]
    assert len(set(names)) == len(names) == 2 * 2 * 4 * 3
    assert max(map(len, names)) <= 120
    assert not work_path(tmp_path / "out").exists()


def test_another_conclusion_than_the_cells_is_seen(swept: tuple[Path, Result]) -> None:
    assert_its_files_give_edits_away(swept[0], "matrix.0.means.last_validation_loss.mean")
