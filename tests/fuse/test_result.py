"""The result of a fuse: its tables and plot, on a narrow terminal too, and its seal.

Run: pytest tests/fuse/test_result.py
"""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mlxstacks.files.side_files import SideFile
from mlxstacks.fuse.fidelity import Fidelity
from mlxstacks.fuse.report import Alternative, FuseReport, ModuleReport, StageReport, result_of
from mlxstacks.fuse.run import run_command
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.study.document import Plot, Table, Text
from mlxstacks.study.render.console import print_result
from mlxstacks.study.result import Result
from tests.tiny_models import random_adapter, write_llama

FIGURES = Fidelity(100, 0.2, 0.5, 0.5, 0.9, 0.8, 0.04, 0.2, 0.1)
VERDICT = "Correlation 0.531 with the trained change, survival 52%, noise 0.83 times that change."


def report_of(correlations: list[float | None], status: str = "planned") -> FuseReport:
    """A module a layer; of a plan only estimates are known, as in a dry run."""
    modules = []
    for layer, correlation in enumerate(correlations):
        figures = replace(FIGURES, correlation=correlation, artifact=0.01 * layer)
        modules.append(
            ModuleReport(
                f"model.layers.{layer}.mlp.switch_mlp.down_proj", 0, "refit", 3, 4, "verified", 1,
                2, None if status == "planned" else figures, {"refit": figures},
            )
        )  # fmt: skip
    total = None if status == "planned" else FIGURES
    return FuseReport(
        status, "m", "out", {"requant": "auto"}, "1" * 64, False, None,
        [StageReport("a", modules, total)], [{"name": "x", "how": "rewritten", "written_bytes": 9}],
        0, 9, 0.5, VERDICT, total=total,
        side_files=[SideFile("vision.safetensors", 5, "linked"), SideFile("a.py", reason="code")],
    )  # fmt: skip


def printed(result: Result, width: int = 80) -> str:
    stream = io.StringIO()
    print_result(Console(file=stream, width=width, highlight=False), result)
    return stream.getvalue()


def test_blocks() -> None:
    """Every figure has its column; the worst module and the total come first."""
    result = result_of(report_of([0.9, 0.1234, None], "fused"))
    blocks = [b.title if isinstance(b, Text) else b.id for b in result.blocks]
    ids = ["fidelity-plot-1", "fidelity-1", "weights-1", "estimates-1", "files", "Files"]
    assert blocks == ids
    fidelity = result.table("fidelity-1")
    figures = ["delta_per_step", "correlation", "survival", "noise", "artifact"]
    assert list(fidelity) == ["module", "policy", *figures]
    assert [*fidelity.module] == ["total of 3 modules", "1 down_proj", "0 down_proj", "2 down_proj"]
    assert fidelity.loc[1, figures].to_list() == [0.2, 0.1234, 0.5, 0.8, 0.01]
    weights = result.table("weights-1")
    assert list(weights) == [
        "module", "bits_before", "bits_after", "bytes_before", "bytes_after", "base",
        "codes_changed", "at_zero_delta",
    ]  # fmt: skip
    assert weights.loc[0, "bytes_before":].to_list() == [3, 6, "", 0.2, 0.1]
    assert weights.loc[1].to_list() == [
        "model.layers.1.mlp.switch_mlp.down_proj", 3, 4, 1, 2, "verified", 0.2, 0.1
    ]  # fmt: skip
    (plot,) = (block for block in result.blocks if isinstance(block, Plot))
    assert [series.y for series in plot.series] == [(0.1234, 0.9, None), (0.5, 0.5, 0.5)]
    assert result.outcome == "correlation 0.500, survival 50.0%, noise 0.8, artifact 4.0%"
    text = " ".join(printed(result).split())
    carried = "Other files carried along: 1; unchanged weights: vision.safetensors"
    assert f"{carried}; left out: a.py (code)." in text
    assert "Try it: mlxstacks chat --model out" in text


def test_a_control_shows_what_the_fuse_changed() -> None:
    report = replace(report_of([None] * 3, "fused"), zero_delta=True)
    result = result_of(report)
    (plot,) = (block for block in result.blocks if isinstance(block, Plot))
    assert [series.y for series in plot.series] == [(0.02, 0.01, 0.0), (0.1, 0.1, 0.1)]
    assert result.outcome == "the fuse alone moves weights by 4.0%"
    table = result.table("fidelity-1")
    assert [*table.columns] == ["module", "policy", "artifact"]
    assert [*table.module[1:]] == [f"{n} down_proj" for n in (2, 1, 0)]
    assert "<F,D>" not in str(result)


def test_bytes_and_fidelity_are_drawn_for_each_number_of_bits() -> None:
    """A module that reached its target with fewer bits stays there: 4 bits for one, 6 for two."""
    tried = {f"promote-{bits}": replace(FIGURES, correlation=0.1 * bits) for bits in (4, 5, 6)}
    tried["nearest"] = replace(FIGURES, correlation=0.3)
    modules = [
        ModuleReport(f"layers.{n}.down_proj", 0, f"promote-{bits}", 3, bits, "verified", 300,
                     100 * bits, replace(FIGURES, correlation=0.1 * bits), tried)
        for n, bits in enumerate((4, 6, 6))
    ]  # fmt: skip
    report = replace(
        report_of([0.5], "fused"), stages=[StageReport("a", modules, FIGURES)], extra_bytes=700,
        alternative=Alternative("dequantize", 0.99, 0.97, 2000),
    )  # fmt: skip
    plot = next(b for b in result_of(report).blocks if isinstance(b, Plot) and b.id == "bytes-plot")
    assert plot.categories == (
        "at most 3 bits", "at most 4 bits", "at most 5 bits", "this fuse", "dequantize",
    )  # fmt: skip
    estimated, measured = plot.series
    assert estimated.x == (0.0, 300.0, 500.0, 700.0, 2700.0)
    assert estimated.y[:3] == pytest.approx((0.3, 0.4, 1.4 / 3))
    assert (estimated.y[3], measured.y[3], estimated.y[4]) == (None, 0.5, 0.97)
    assert "at most 5 bits 500 bytes 0.467" in plot.alt


def test_a_plan_says_that_its_figures_are_estimates() -> None:
    result = result_of(report_of([0.9, 0.5, 0.7]))
    assert [*result.table("fidelity-1").correlation] == [0.5, 0.7, 0.9]
    assert result.status == "planned"
    assert "estimates from a sample of rows" in printed(result)
    assert "Planned only: would write out." in printed(result)
    assert "Try it" not in printed(result)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    result = result_of(report_of([0.9, 0.1234, 0.7], "fused"))
    text = printed(result.model_copy(update={"next_steps": {}}), width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).endswith(f"Verdict: {VERDICT}")
    for column in ("correlation", "survival", "noise", "artifact", "0.123"):
        assert column in text
    assert "\u2026" not in text


def test_names_are_as_short_as_they_can_be_told_apart() -> None:
    paths = ["model.layers.0.self_attn.o_proj", "model.layers.0.linear_attn.o_proj", "lm_head"]
    modules = [ModuleReport(path, 0, "keep", 3, 3, "verified", 1, 1, FIGURES, {}) for path in paths]
    report = replace(report_of([0.5], "fused"), stages=[StageReport("a", modules, None)])
    (table,) = (
        b for b in result_of(report).blocks if isinstance(b, Table) and b.id == "fidelity-1"
    )
    names = {row[0] for row in table.rows}
    assert names == {"0 self_attn.o_proj", "0 linear_attn.o_proj", "lm_head"}


def test_result_lies_sealed_beside_the_weights(tmp_path: Path) -> None:
    """An edit of it, or of the config, shows; the shards are not read for it."""
    model = write_llama(tmp_path / "model")
    adapter = random_adapter(model, ["mlp.down_proj"], directory=tmp_path / "adapter")
    settings = FuseSettings(
        model=str(model), adapter_path=(str(adapter),), save_path=str(tmp_path / "out")
    )
    os.mkfifo(model / "result.json")  # a stranger's: neither waited for nor taken for a fuse's
    planned = run_command(settings, dry_run=True)
    assert planned.status == "planned"
    assert not any("result of a fuse" in note for note in planned.notes)
    result = run_command(settings)
    opened = Result.open(tmp_path / "out")
    assert (result.seal, result.standing.reasons) == (opened.seal, ())
    assert not opened.standing.reasons
    assert {*opened.provenance} == {"config.json", "model.safetensors.index.json"}
    assert "itself the result of a fuse" in " ".join(
        run_command(
            settings.model_copy(
                update={"model": str(tmp_path / "out"), "save_path": str(tmp_path / "again"),
                        "allow_base": True}
            ),
            dry_run=True,
        ).notes
    )  # fmt: skip
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bits": 1}))
    assert "config.json" in Result.open(tmp_path / "out").standing.reasons[0]
