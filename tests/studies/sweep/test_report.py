"""Matrix, differences, verdict and blocks from results made up for the purpose.

Run: pytest tests/studies/sweep/test_report.py
"""

from pathlib import Path
from typing import Any

import pytest

from mlxstacks.keywords import said_in_python
from mlxstacks.studies.sweep.cells import Cell, CellResult, read_results, write_result
from mlxstacks.studies.sweep.report import concluded
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.study.document import Plot
from mlxstacks.study.result import Result


def made_up(
    losses: dict[tuple[int, int], float | None], points: tuple[str, ...] = ("all",)
) -> Result:
    """The result of cells with these last losses by (rank, seed); None: crashed."""
    ranks = tuple(sorted({rank for rank, _ in losses}))
    seeds = tuple(sorted({seed for _, seed in losses}))
    settings = SweepSettings(ranks=ranks, seeds=seeds, layers=points, policies=("refit", "promote"))
    results = [
        result(Cell(rank, seed, layers, "down_proj", None), loss)
        for layers in points
        for (rank, seed), loss in losses.items()
    ]
    return concluded(settings, results)


def result(cell: Cell, loss: float | None) -> CellResult:
    guard: dict[str, Any] = {"buffers": 900, "outcome": "fits", "verdict": "fits", "change": {}}
    if loss is None:
        return CellResult(cell, "crashed", {}, guard, "killed by SIGABRT", {"step": 3})
    curve = [{"step": s, "validation_loss": v} for s, v in ((0, 2.0), (10, loss))]
    figures = {
        "first_validation_loss": 2.0, "last_validation_loss": loss, "best_validation_loss": loss,
        "seconds": 1.5, "peak_bytes": 10**6, "counted_buffers": None, "validation": curve,
        "adapter_bytes": 100 * cell.rank,
    }  # fmt: skip
    fused = {"survival": 0.25, "correlation": 0.3, "delta_over_step": 0.01 * cell.rank}
    kept = {
        "refit": fused | {"extra_bytes": 0},
        "promote": fused | {"survival": 0.99, "correlation": 0.98, "extra_bytes": 2000},
    }
    return CellResult(cell, "trained", {"iters": 10}, guard, None, figures, kept)


def loss_difference(report: Result) -> Any:
    return next(d for d in report.data["differences"] if d["what"] == "last_validation_loss")


def test_a_paired_difference_is_shown_where_seeds_agree() -> None:
    """Seeds differ by far more than ranks do; pairs take that out."""
    report = made_up({(r, s): 1.0 + 0.3 * s - 0.05 * (r == 8) for r in (2, 8) for s in range(4)})
    found = loss_difference(report)
    assert found["difference"]["mean"] == pytest.approx(-0.05)
    assert (found["difference"]["n"], found["finding"]) == (4, "excludes 0")
    assert "which excludes 0" in report.verdict
    assert report.outcome == "loss of rank 8 against rank 2, 95% interval: lower"


def test_a_null_is_a_result() -> None:
    report = made_up(
        {(2, 0): 1.0, (8, 0): 1.1, (2, 1): 1.0, (8, 1): 0.9, (2, 2): 1.0, (8, 2): 1.01}
    )
    assert loss_difference(report)["finding"] == "holds 0"
    assert "undecided, so few seeds leave room for a difference of 0." in report.verdict
    assert report.outcome == "loss of rank 8 against rank 2, 95% interval: undecided"
    assert report.failed_gate is None


def test_one_seed_claims_nothing() -> None:
    report = made_up({(2, 0): 1.5, (8, 0): 0.5})
    assert loss_difference(report)["finding"] == "one seed"
    assert "one seed, so nothing follows from it" in report.verdict
    assert report.outcome == "loss of rank 8 against rank 2: one seed, so no interval"


def test_without_validation_rows_the_cause_and_the_remedy_are_told() -> None:
    found = [result(Cell(rank, 0, "all", "down_proj", None), 1.0) for rank in (2, 8)]
    for cell in found:
        cell.figures.update(last_validation_loss=None, validation=[])
    report = concluded(SweepSettings(ranks=(2, 8), policies=("refit", "promote")), found)
    assert report.outcome == "no validation loss to compare"
    assert "--data needs valid.jsonl beside train.jsonl" in report.verdict
    assert "data=... needs valid.jsonl" in said_in_python(report).verdict


def test_a_seed_that_crashed_at_one_rank_makes_no_pair() -> None:
    report = made_up({(2, 0): 1.0, (2, 1): 3.0, (8, 0): 0.8, (8, 1): None})
    assert loss_difference(report)["difference"]["n"] == 1
    assert loss_difference(report)["difference"]["mean"] == pytest.approx(-0.2)
    assert report.data["matrix"][1]["cells"] == {"trained": 1, "crashed": 1}
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
    assert len(report.data["matrix"]) == 8
    assert [
        d["layers"] for d in report.data["differences"] if d["what"] == "last_validation_loss"
    ] == [
        "0", "1", "0,1", "all",
    ]  # fmt: skip
    assert "[layers 0, down_proj]" in report.verdict
    assert "1 more points are in the report" in report.verdict


def test_results_of_cells_come_back(tmp_path: Path) -> None:
    cells = (Cell(2, 0, "all", "down_proj", None), Cell(8, 0, "all", "down_proj", 3))
    results = [result(cell, loss) for cell, loss in zip(cells, (1.0, None), strict=True)]
    for one in results:
        write_result(tmp_path, one)
    assert read_results(tmp_path) == {one.cell: one for one in results}


def test_blocks_show_runs_fuses_differences_and_every_cell() -> None:
    report = made_up({(r, s): 1.0 - 0.01 * r - 0.1 * s for r in (2, 8) for s in (0, 1)})
    assert [block.id for block in report.blocks if hasattr(block, "id")] == [
        "runs", "fused", "differences", "survival", "frontier-loss", "frontier-survival", "losses",
        "cells",
    ]  # fmt: skip
    runs = report.table("runs").set_index("rank")
    assert [*runs.columns] == [
        "cells", "before", "after", "after_low", "after_high", "best", "best_low", "best_high",
        "delta_per_step", "seconds", "peak_bytes", "buffers",
    ]  # fmt: skip
    shown = ["cells", "before", "delta_per_step", "peak_bytes", "buffers"]
    assert runs.loc[8, shown].tolist() == ["2 trained", 2.0, 0.08, 10**6, 900]
    assert runs.after[8] == pytest.approx(0.87)
    fused = report.table("fused").loc[1]
    assert fused[["rank", "policy", "survival", "more_bytes"]].tolist() == [
        2, "promote", 0.99, 2000,
    ]  # fmt: skip
    assert "Means over 2 seeds" in str(report)
    difference = report.table("differences").loc[0]
    assert difference["difference"] == pytest.approx(-0.06)
    assert (difference["low_rank"], difference["high_rank"]) == (2, 8)
    survival, size, fuse, losses = (b for b in report.blocks if isinstance(b, Plot))
    assert [(line.label, line.y) for line in survival.series] == [
        ("rank 2", (25.0, 99.0)), ("rank 8", (25.0, 99.0)),
    ]  # fmt: skip
    assert [line.label for line in losses.series] == ["rank 2", "rank 8"]
    assert losses.series[0].low == pytest.approx((2.0, 0.88))
    assert losses.series[0].y == pytest.approx((2.0, 0.93))
    assert size.categories == fuse.categories == ("rank 2", "rank 8")
    assert size.series[0].x == (200.0, 800.0)
    assert size.series[0].y == pytest.approx((0.93, 0.87))
    assert [(line.label, line.x, line.y) for line in fuse.series] == [
        ("refit", (0.0, 0.0), (25.0, 25.0)), ("promote", (2000.0, 2000.0), (99.0, 99.0)),
    ]  # fmt: skip


def test_nothing_trained_makes_no_plot_and_says_why() -> None:
    report = made_up({(2, 0): None})
    assert not [block for block in report.blocks if isinstance(block, Plot)]
    assert report.outcome == "no two ranks to compare"
    assert made_up({(2, 0): 1.0}).verdict.startswith("Rank 2, 1 seed: 1 cell trained.")
    [note] = report.notes
    assert note.startswith("rank-2_seed-0_layers-all_down_proj: crashed: killed by SIGABRT (after ")


def test_points_have_their_names_in_the_tables() -> None:
    report = made_up({(2, 0): 1.0, (8, 0): 0.9}, points=("0", "all"))
    runs = report.table("runs")
    assert runs["rank"].tolist()[:2] == [2, 8]
    assert set(runs["at"][:2]) == {"layers 0, down_proj"}
    assert report.table("differences")["at"].iloc[-1] == "layers all, down_proj"
