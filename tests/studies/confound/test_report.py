"""What people see of a confound run: blocks, their columns, figures under the right names.

Run: pytest tests/studies/confound/test_report.py
"""

from dataclasses import replace
from typing import Any

import pytest

from mlxstacks.stats import ClusteredMean, Interval, share_note
from mlxstacks.studies.confound.report import blocks
from mlxstacks.studies.confound.verdict import Findings
from mlxstacks.study.document import Plot, Table, Text
from mlxstacks.study.render.words import format_cell
from tests.studies.confound_cases import POLICIES, case

MINED = {"table": {"all": {"both wrong": 200}}, "train": ["1"], "test": ["2", "3"]}
FUSES = {
    "refit": {
        "codes_that_differ": {"a1_and_a0": 0.25, "a0_and_unfused": 0.0383},
        "a1": {"total": {"correlation": 0.91, "artifact": 0.0123}},
        "a0": {"total": {"correlation": None, "artifact": 0.0123}},
    },
    "promote": {"codes_that_differ": {"a1_and_a0": 0.5, "a0_and_unfused": None}},
}
MATCHING = {
    "refit": {
        "target": 0.5, "scale": 4.0,
        "probes": [{"scale": 1.0, "moved": 3, "n": 40}, {"scale": 4.0, "moved": 21, "n": 40}],
    },
}  # fmt: skip


def shown(findings: Findings) -> dict[str, Any]:
    return {
        block.title if isinstance(block, Text) else block.id: block
        for block in blocks(findings, FUSES, MINED, POLICIES, MATCHING)
    }


def row(table: Table, name: str) -> dict[str, str | None]:
    cells = next(row for row in table.rows if row[0] == name)
    return {c.name: format_cell(v, c) for c, v in zip(table.columns, cells, strict=True)}


def small() -> Findings:
    return case(n=60, right=20, a1_refit=30, random_refit=2, moved_refit=2)


def test_every_block_is_there_in_reading_order() -> None:
    assert [*shown(small())] == [
        "arms", "gain", "arms-table", "claims", "parts", "nulls", "rules", "moved", "In words",
        "right", "forms", "mined", "subjects", "positions",
    ]  # fmt: skip


def test_a_column_shows_the_figure_of_its_name() -> None:
    findings = small()
    claim = findings.claims["refit"]
    claim = replace(
        claim, count=30, control_count=0, p_value=0.02,
        mcnemar=replace(claim.mcnemar, p_value=0.06),
        interval=Interval(0.312, 0.645, 0.95),
        clustered=ClusteredMean(0.5, 0.1, 0.9, 0.03, 3),
    )  # fmt: skip
    tables = shown(replace(findings, claims={**findings.claims, "refit": claim}))
    assert row(tables["claims"], "refit") == {
        "policy": "refit", "A1 - A0, points (95%)": "+50.00 (+31.20 to +64.50)",
        "over subjects, points (95%)": "+50.00 (+10.00 to +90.00)", "p (z)": "0.02",
        "p (McNemar)": "0.06", "largest p (Holm)": "below 0.0001",
        "outcome": "knowledge, clearly above every control",
    }  # fmt: skip
    against_random = row(tables["nulls"], "refit: random delta, as many moved")
    assert (against_random["A1"], against_random["against"]) == ("50.0%", "3.3%")
    assert against_random["gain, points (95%)"] == "+46.67 (+32.64 to +58.95)"
    guessing = row(tables["nulls"], "promote: guessing")
    assert (guessing["gain, points (95%)"], guessing["p"]) == ("-10.00 (-10.00 to -3.98)", "1")
    assert row(tables["rules"], "published: 5 points, p < 0.05 (z), one policy") == {
        "rule": "published: 5 points, p < 0.05 (z), one policy", "items": "60", "A1": "30",
        "A0": "0", "least passing count": "4", "p": "below 0.0001", "knowledge": "yes",
    }  # fmt: skip
    moved = row(tables["moved"], "refit")
    assert (moved["a1"], moved["a0"], moved["moved"]) == ("30", "0", "60")
    assert (moved["scale"], moved["moved in the search"]) == ("4", "21 of 40")
    assert (moved["searched for"], moved["probes"]) == ("50.0%", "2")
    arm = row(tables["arms-table"], "a1 refit")
    assert (arm["moved"], arm["lost"]) == ("30", "0")
    assert (arm["right"], arm["correlation"], arm["artifact"]) == ("30 of 60", "0.910", "1.23%")
    assert row(tables["arms-table"], "a0 refit")["correlation"] == "no delta"
    assert row(tables["arms-table"], "persona")["artifact"] == "not fused"
    assert row(tables["parts"], "refit")["gain"] == "+50.00"


def test_right_answers_in_both_forms_stand_side_by_side() -> None:
    second = {"a1_refit": 7, "shuffled_refit": 6}
    findings = case(n=60, right=20, a1_refit=30, moved_refit=2, second_form=second)
    tables = shown(findings)
    arm = row(tables["arms-table"], "a1 refit")
    assert (arm["right"], arm["right, second form"]) == ("30 of 60", "7 of 60")
    against = row(tables["nulls"], "refit, second form: shuffled answers")
    assert (against["A1"], against["against"]) == ("11.7%", "10.0%")
    assert "right, second form" not in row(shown(small())["arms-table"], "a1 refit")


def test_a_judgement_says_of_how_much_and_codes_are_counted() -> None:
    lines = shown(small())["In words"].paragraphs
    assert lines[0].startswith("Mined 200 items: both wrong 200. Set G: 1 to train, 2 to test.")
    assert any(line.startswith("refit: A1 - A0 is +50.00 points. That is ") for line in lines)
    assert [line for line in lines if line.startswith("Fused by ")] == [
        f"Fused by {way}, A1 differs from A0: {a1}; A0 from the unfused model: {a0}."
        for way, a1, a0 in (
            ("refit", "25.00% of the codes", "3.83% of the codes"),
            ("promote", "50.00% of the codes", "at other bits"),
        )
    ]


def test_positions_and_guessing_stand_next_to_the_arms() -> None:
    blocks = shown(small())
    picked: Table = blocks["positions"]
    assert [c.name for c in picked.columns] == ["arm", *"ABCDEFGHIJ", "by place"]
    assert row(picked, "right option")["A"] == "10%"
    assert {r[0] for r in picked.rows} >= {"persona", "a1 refit", "a0 unfused"}
    assert share_note(60) in picked.caption
    arms: Plot = blocks["arms"]
    assert arms.references == {"guessing": pytest.approx(10.0)}
    of_a1 = next(series for series in arms.series if series.label == "A1, trained")
    assert of_a1.y[arms.categories.index("a1 refit")] == 50.0
    assert of_a1.y[arms.categories.index("persona")] is None
