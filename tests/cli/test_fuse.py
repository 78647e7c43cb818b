"""What `mlxstacks fuse` prints of many modules. Run: pytest tests/cli/test_fuse.py"""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from mlxstacks.cli.fuse import render
from mlxstacks.fuse.fidelity import Fidelity
from mlxstacks.fuse.report import FuseReport, ModuleReport, StageReport

FIGURES = Fidelity(100, 0.2, 0.5, 0.5, 0.9, 0.8, 0.04, 0.2, 0.1)
VERDICT = "correlation 0.531 with the trained change, survival 52%, noise 0.83 times that change."


def report_of(correlations: list[float | None], status: str = "planned") -> FuseReport:
    """A module a layer; of a plan only estimates are known, as in a dry run."""
    modules = []
    for layer, correlation in enumerate(correlations):
        figures = replace(FIGURES, correlation=correlation, artifact=0.01 * layer)
        modules.append(
            ModuleReport(
                f"model.layers.{layer}.mlp.switch_mlp.down_proj", 0, "refit", 3, 3, "verified", 1,
                1, None if status == "planned" else figures, {"refit": figures},
            )
        )  # fmt: skip
    total = None if status == "planned" else FIGURES
    return FuseReport(
        status, "m", "out", {"requant": "auto"}, "0" * 64, "1" * 64, False, None,
        [StageReport("a", modules, total)], [], 0, 0, 0.5, {}, VERDICT, total=total,
    )  # fmt: skip


def printed(report: FuseReport, width: int = 80) -> str:
    stream = io.StringIO()
    render(Console(file=stream, width=width, highlight=False), report)
    return stream.getvalue()


def layers(text: str) -> list[int]:
    return [int(line.split()[0]) for line in text.splitlines() if " down_proj" in line]


@pytest.mark.parametrize("status", ["planned", "fused"])
def test_the_worst_of_many_modules_come_first(status: str) -> None:
    correlations: list[float | None] = [0.99 - 0.01 * ((7 * layer) % 40) for layer in range(40)]
    text = printed(report_of(correlations, status))
    ordered = sorted(range(40), key=lambda layer: correlations[layer] or 0.0)
    assert layers(text) == ordered[:16]
    assert "worst modules first" in text
    assert "24 more modules have a correlation at least as high" in text


def test_few_modules_are_sorted_too() -> None:
    assert layers(printed(report_of([0.9, 0.5, 0.7]))) == [1, 2, 0]


def test_without_a_delta_the_worst_are_those_that_changed_most() -> None:
    text = printed(report_of([None] * 20, "fused"))
    assert layers(text) == list(range(19, 3, -1))
    assert "4 more modules changed less" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_nothing_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    text = printed(report_of([0.9, 0.1234, 0.7], "fused"), width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.split()).endswith(f"Verdict: {VERDICT}")
    assert text.index("1 down_proj") < text.index("2 down_proj") < text.index("0 down_proj")
    for column in ("correlation", "survival", "noise", "artifact", "0.123"):
        assert column in text
    assert "\u2026" not in text
