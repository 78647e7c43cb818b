"""Every share that is an estimate has its interval in its cell, or its n below the table.

Run: pytest tests/report/test_shares.py
"""

import pytest

from mlxstacks.stats import share_note, wilson_interval
from mlxstacks.study.document import Column, Table
from mlxstacks.study.result import Result
from tests.report.cases import every_report

# Shares of a known whole, of weights or codes; rates of guessing; and ratios of two differences.
KNOWN = {
    "survival", "artifact", "codes changed", "at zero delta", "guessing", "chance", "effect",
    "largest of a step", "padding", "floor share", "gain share", "A0 / A1",
    "energy", "shortest to longest",
}  # fmt: skip


def bare_shares(table: Table) -> list[tuple[str, float]]:
    """(column, cell) of the estimates that stand alone."""
    if "n = " in table.caption:
        return []
    return [
        (column.name, cell)
        for row in table.rows
        for column, cell in zip(table.columns, row, strict=True)
        if column.kind == "share" and isinstance(cell, float) and not {column.name, row[0]} & KNOWN
    ]


def test_no_result_has_a_bare_estimate() -> None:
    bare = {
        (name, table.id): cells
        for name, (_, document) in every_report().items()
        for table in Result.from_json(document).blocks
        if isinstance(table, Table) and (cells := bare_shares(table))
    }
    assert bare == {}


def test_the_walk_sees_a_bare_share() -> None:
    columns = (Column(name="arm"), Column(name="share", kind="share"))
    bare = Table(id="t", title="t", columns=columns, rows=(("base", 0.5),))
    assert bare_shares(bare) == [("share", 0.5)]
    assert bare_shares(bare.model_copy(update={"caption": share_note(20)})) == []
    assert bare_shares(bare.model_copy(update={"rows": (("base", (0.5, 0.3, 0.7)),)})) == []
    assert bare_shares(bare.model_copy(update={"rows": (("chance", 0.5),)})) == []


@pytest.mark.parametrize("n", [1, 2, 19, 20, 131])
def test_the_note_holds_the_interval_of_every_share_of_n(n: int) -> None:
    width = float(share_note(n).partition("at most ")[2].partition(" ")[0])
    intervals = [wilson_interval(count, n) for count in range(n + 1)]
    widest = max(100 * (interval.high - interval.low) for interval in intervals)
    assert widest - 0.1 <= width <= widest + 0.12
    assert f"n = {n}" in share_note(n)
