"""Matrix, differences and verdict from results made up for the purpose; plots.

Run: pytest tests/studies/sweep/test_report.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.studies.sweep.cells import Cell, CellResult, read_results, write_result
from mlxstacks.studies.sweep.plots import write_plots
from mlxstacks.studies.sweep.report import SweepReport, report_of
from mlxstacks.studies.sweep.settings import SweepSettings


def made_up(
    losses: dict[tuple[int, int], float | None], points: tuple[str, ...] = ("all",)
) -> SweepReport:
    """A report of cells with these last losses by (rank, seed); None: crashed."""
    ranks = tuple(sorted({rank for rank, _ in losses}))
    seeds = tuple(sorted({seed for _, seed in losses}))
    settings = SweepSettings(ranks=ranks, seeds=seeds, layers=points, policies=("refit", "promote"))
    results = [
        result(Cell(rank, seed, layers, "down_proj", None), loss)
        for layers in points
        for (rank, seed), loss in losses.items()
    ]
    return report_of(settings, "out", results, [], 1.0)


def result(cell: Cell, loss: float | None) -> CellResult:
    guard: dict[str, Any] = {"buffers": 900, "outcome": "fits", "verdict": "fits", "change": {}}
    if loss is None:
        return CellResult(cell, "crashed", {}, guard, "killed by SIGABRT", {"step": 3})
    curve = [{"step": s, "validation_loss": v} for s, v in ((0, 2.0), (10, loss))]
    figures = {
        "first_validation_loss": 2.0, "last_validation_loss": loss, "best_validation_loss": loss,
        "seconds": 1.5, "peak_bytes": 10**6, "measured_buffers": None, "validation": curve,
    }  # fmt: skip
    fused = {"survival": 0.25, "correlation": 0.3, "delta_over_step": 0.01 * cell.rank}
    kept = {
        "refit": fused | {"extra_bytes": 0},
        "promote": fused | {"survival": 0.99, "correlation": 0.98, "extra_bytes": 2000},
    }
    return CellResult(cell, "trained", {"iters": 10}, guard, None, figures, kept)


def loss_difference(report: SweepReport) -> Any:
    return next(d for d in report.found if d.what == "last_validation_loss")


def test_a_paired_difference_is_shown_where_seeds_agree() -> None:
    """Seeds differ by far more than ranks do; pairs take that out."""
    report = made_up({(r, s): 1.0 + 0.3 * s - 0.05 * (r == 8) for r in (2, 8) for s in range(4)})
    found = loss_difference(report)
    assert found.difference.mean == pytest.approx(-0.05)
    assert (found.difference.n, found.finding) == (4, "shown")
    assert "rank matters here" in report.verdict


def test_a_null_is_a_result() -> None:
    report = made_up(
        {(2, 0): 1.0, (8, 0): 1.1, (2, 1): 1.0, (8, 1): 0.9, (2, 2): 1.0, (8, 2): 1.01}
    )
    assert loss_difference(report).finding == "not shown"
    assert "no effect of rank is shown" in report.verdict
    assert report.failed_gate is None


def test_one_seed_claims_nothing() -> None:
    report = made_up({(2, 0): 1.5, (8, 0): 0.5})
    assert loss_difference(report).finding == "not judged"
    assert "one seed, so nothing follows from it" in report.verdict


def test_a_seed_that_crashed_at_one_rank_makes_no_pair() -> None:
    report = made_up({(2, 0): 1.0, (2, 1): 3.0, (8, 0): 0.8, (8, 1): None})
    assert loss_difference(report).difference.n == 1
    assert loss_difference(report).difference.mean == pytest.approx(-0.2)
    assert report.rows[1].cells == {"trained": 1, "crashed": 1}
    assert "3 trained, 1 crashed (not all of rank 8)" in report.verdict


def test_survival_and_steps_are_told_from_low_to_high_rank() -> None:
    report = made_up({(2, 0): 1.0, (4, 0): 1.0, (8, 0): 1.0})
    assert "the delta is 0.020 to 0.080 of a quantization step" in report.verdict
    assert (
        "Fused by refit: correlation 0.30, survival 25%; promote: correlation 0.98, survival 99%"
        in (report.verdict)
    )
    assert "Predicted live buffers: 900, the same for every rank." in report.verdict


def test_points_are_compared_within_themselves() -> None:
    report = made_up({(2, 0): 1.0, (8, 0): 0.9}, points=("0", "1", "0,1", "all"))
    assert len(report.rows) == 8
    assert [d.point[0] for d in report.found if d.what == "last_validation_loss"] == [
        "0", "1", "0,1", "all",
    ]  # fmt: skip
    assert "[layers 0, down_proj]" in report.verdict
    assert "1 more points are in the report" in report.verdict


def test_the_report_is_json_and_results_come_back(tmp_path: Path) -> None:
    report = made_up({(2, 0): 1.0, (8, 0): None})
    document = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert (document["kind"], len(document["cells"]), len(document["matrix"])) == ("sweep", 2, 2)
    for one in report.results:
        write_result(tmp_path, one)
    assert read_results(tmp_path) == {one.cell: one for one in report.results}


def test_without_matplotlib_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    names, notes = write_plots(tmp_path, made_up({(2, 0): 1.0}))
    assert names == []
    assert "pip install 'mlxstacks[plots]'" in notes[0]
    assert list(tmp_path.iterdir()) == []


def test_nothing_trained_makes_no_plot(tmp_path: Path) -> None:
    assert write_plots(tmp_path, made_up({(2, 0): None})) == (
        [], ["No plots: no cell was trained."],
    )  # fmt: skip


def test_plots_show_every_rank_and_are_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report = made_up({(r, s): 1.0 - 0.01 * r for r in (2, 8) for s in (0, 1)}, ("0", "all"))
    names, notes = write_plots(tmp_path, report)
    assert (notes, sorted(names)) == ([], sorted(p.name for p in tmp_path.iterdir()))
    first = {name: (tmp_path / name).read_bytes() for name in names}
    assert first["survival.png"].startswith(b"\x89PNG")
    assert b"<svg" in first["losses.svg"]
    write_plots(tmp_path, report)
    assert {name: (tmp_path / name).read_bytes() for name in names} == first
