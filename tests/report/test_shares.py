"""Every share that is an estimate has its n and its interval beside it, or a note below its table.

Run: pytest tests/report/test_shares.py
"""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from mlxstacks.cli.confound import render as render_confound
from mlxstacks.report.content import Table
from mlxstacks.report.find import RESULT_FILES
from mlxstacks.report.kinds import KINDS
from mlxstacks.report.results import content_of
from mlxstacks.report.values import Value
from mlxstacks.stats import share_note, wilson_interval
from mlxstacks.studies.confound.plan import arms_of
from mlxstacks.studies.confound.report import ConfoundReport
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.study.document import RESULT
from mlxstacks.study.result import Result
from tests.report.cases import every_report
from tests.studies import confound_cases

SHARE = re.compile(r"^[+-]?\d+(\.\d+)?%$")
# Shares of a known whole, of weights or codes; rates of guessing; and ratios of two differences.
KNOWN = {
    "survival", "artifact", "codes changed", "at zero delta", "guessing", "chance", "effect",
    "largest of a step", "padding", "energy", "protected", "energy held", "capacity used",
    "floor share", "content share", "A0 / A1",
}  # fmt: skip


def bare_shares(table: Table) -> list[tuple[str, str]]:
    """(column, cell) of the estimates that stand alone."""
    beside = any("95%" in column or "interval" in column for column in table.columns)
    counted = any(word in table.columns for word in ("right", "n", "items", "of", "passed"))
    noted = "n = " in (table.note or "")
    if (beside and (counted or "items" in table.title)) or noted:
        return []
    return [
        (column, cell)
        for row in table.rows
        for column, cell in zip(table.columns, row, strict=True)
        if isinstance(cell, str) and SHARE.match(cell) and not {column, row[0]} & KNOWN
    ]


def test_no_page_prints_a_bare_estimate() -> None:
    bare: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, (file, document) in every_report().items():
        if file == RESULT:
            content = content_of(Result.from_json(document), str)
        else:
            kind = KINDS[document.get("kind") or RESULT_FILES[file]]
            assert kind.content is not None
            content = kind.content(Value(document, file), str)
        tables = [block for block in content.blocks if isinstance(block, Table)]
        bare |= {(name, table.title): cells for table in tables if (cells := bare_shares(table))}
    assert bare == {}


def test_the_walk_sees_a_bare_share() -> None:
    bare = Table("t", ("arm", "right", "share"), (("base", "3", "50.0%"),))
    assert bare_shares(bare) == [("share", "50.0%")]
    assert bare_shares(replace(bare, columns=("arm", "95%", "share"))) != []
    assert bare_shares(replace(bare, note=share_note(20))) == []
    assert bare_shares(replace(bare, columns=("module", "bits", "survival"))) == []


@pytest.mark.parametrize("n", [1, 2, 19, 20, 131])
def test_the_note_holds_the_interval_of_every_share_of_n(n: int) -> None:
    said = float(share_note(n).partition("+-")[2].partition(" ")[0])
    intervals = [wilson_interval(count, n) for count in range(n + 1)]
    half = max(50 * (found.high - found.low) for found in intervals)
    assert half - 0.05 <= said <= half + 0.06
    assert f"n = {n}" in share_note(n)


def test_tables_of_a_terminal_have_n_and_an_interval_too() -> None:
    settings = ConfoundSettings(model="m", persona="p", items="i", policies=("refit",))
    findings = confound_cases.case(n=60, right=20, a1_refit=30, random_refit=2)
    mined = {"table": {"all": {"both wrong": 200}}, "train": range(140)}
    report = ConfoundReport(
        "done", "out", settings.model_dump(mode="json"), list(arms_of(settings)), {"n": 60},
        "0" * 64, [], findings=findings, mined=mined,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100, record=True)
    render_confound(console, report)
    assert share_note(60) in console.export_text()
