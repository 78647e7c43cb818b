"""A result: what it refuses to hold, what it shows, and every change to it that has to be noticed.

Run: pytest tests/study/test_result.py
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.report.settings import ReportSettings
from mlxstacks.report.write import write_report
from mlxstacks.study.document import (
    RESULT,
    Cell,
    Column,
    Columns,
    Environment,
    Kind,
    Plot,
    Series,
    Standing,
    Table,
    Text,
    counted,
    plain_names,
)
from mlxstacks.study.render.markdown import to_markdown
from mlxstacks.study.render.words import format_cell
from mlxstacks.study.result import Result
from mlxstacks.study.write import write_result

PLAN = {"hypothesis": "Heads are likelier than tails.", "alpha": 0.05, "limit": 10}
ARMS = Table(
    id="arms",
    title="Heads by arm",
    columns=(
        Column(name="arm"),
        Column(name="n", kind="count"),
        Column(name="share", kind="share"),
    ),
    rows=(("control", 1000, (0.5, 0.4, 0.6)), ("loaded", 1000, (0.7, 0.6, 0.8))),
)
PLOT = Plot(
    id="shares", title="Shares", kind="intervals", categories=("control", "loaded"),
    series=(Series(label="heads", y=(0.5, 0.7), low=(0.4, 0.6), high=(0.6, 0.8)),),
    x_label="share of heads", alt="The loaded coin falls on heads more often.",
)  # fmt: skip


def coin(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "kind": "coin", "title": "Coins", "status": "done", "outcome": "loaded",
        "verdict": "The loaded coin falls on heads more often.",
        "standing": Standing(status="confirmatory"),
        "settings": {"model": "m", "seed": 0, "limit": 10}, "plan": PLAN,
        "plan_sha256": json_sha256(PLAN), "environment": {"seconds": 1.0},
        "data": {"p_value": 0.01, "shares": [0.5, 0.7]}, "blocks": (ARMS, PLOT),
    }  # fmt: skip
    return Result(**values | changes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run: plan, answers, an arm, and the result."""
    directory = tmp_path / "run"
    (directory / "answers").mkdir(parents=True)
    (directory / "plan.json").write_text(json.dumps(PLAN))
    for arm in ("control", "loaded"):
        (directory / "answers" / f"{arm}.jsonl").write_text('{"heads": true}\n')
    write_result(coin(), directory, directory)
    return directory


def test_one_of_a_thing_has_no_plural() -> None:
    assert [counted(n, "row") for n in range(3)] == ["0 rows", "1 row", "2 rows"]


def test_a_result_reads_back_as_it_was_written(run: Path) -> None:
    result = Result.open(run)
    assert result.standing == Standing(status="confirmatory")
    assert result.notes == ("Read again: 3 files behind it, as when it was made.",)
    assert {**result.as_json(), "notes": []} == json.loads((run / RESULT).read_text())
    assert set(result.provenance) == {"plan.json", "answers/control.jsonl", "answers/loaded.jsonl"}


def edit(*path: Any, value: Any = None) -> Callable[[Path], None]:
    """Put a value under a path of result.json; None removes what is there."""

    def change(run: Path) -> None:
        document = json.loads((run / RESULT).read_text())
        part = document
        for key in path[:-1]:
            part = part[key]
        if value is None:
            del part[path[-1]]
        else:
            assert part[path[-1]] != value
            part[path[-1]] = value
        (run / RESULT).write_text(json.dumps(document))

    return change


def replanned(run: Path) -> None:
    """The plan another one, in both places, and its hash computed again."""
    plan = {**PLAN, "alpha": 0.2}
    edit("plan", value=plan)(run)
    edit("plan_sha256", value=json_sha256(plan))(run)
    (run / "plan.json").write_text(json.dumps(plan))


EDITS: dict[str, Callable[[Path], Any]] = {
    "verdict": edit("verdict", value="They are the same."),
    "outcome": edit("outcome", value="same"),
    "a figure": edit("data", "shares", value=[0.987, 0.987]),
    "a p-value": edit("data", "p_value", value=1e-9),
    "a cell of a table": edit("blocks", 0, "rows", 1, 2, value=[0.987, 0.9, 1.0]),
    "a row of a table": edit("blocks", 0, "rows", 1),
    "a point of a plot": edit("blocks", 1, "series", 0, "y", value=[0.987, 0.987]),
    "the model": edit("settings", "model", value="another"),
    "the seed": edit("settings", "seed", value=1),
    "the limit": edit("settings", "limit"),
    "the plan": edit("plan", "alpha", value=0.2),
    "the plan's hash": edit("plan_sha256", value="0" * 64),
    "the plan and its file and hash": replanned,
    "one file of the provenance": edit("provenance", "answers/loaded.jsonl"),
    "the provenance": edit("provenance", value={}),
    "the seal": edit("seal", value="0" * 64),
    "the environment": edit("environment", "seconds", value=2.0),
    "plan.json": lambda run: (run / "plan.json").write_text("{}"),
    "plan.json removed": lambda run: (run / "plan.json").unlink(),
    "answers": lambda run: (run / "answers/loaded.jsonl").write_text('{"heads": false}\n'),
    "answers removed": lambda run: (run / "answers/loaded.jsonl").unlink(),
}


@pytest.mark.parametrize("name", EDITS)
def test_no_edit_goes_unmarked(run: Path, name: str) -> None:
    EDITS[name](run)
    result = Result.open(run)
    assert result.standing.status == "exploratory"
    assert result.standing.reasons


def test_a_page_marks_what_was_edited(run: Path, tmp_path: Path) -> None:
    edit("verdict", value="They are the same.")(run)
    settings = ReportSettings(runs=(str(run),), save_path=str(tmp_path / "page"), formats=())
    report = write_report(settings)
    assert [one["standing"] for one in report.data["runs"]] == ["EXPLORATORY"]
    page = (tmp_path / "page/index.html").read_text()
    assert "Heads by arm (EXPLORATORY)" in page


def test_what_is_exploratory_says_so_in_every_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def note(directory: Path, plots: Any, formats: Any) -> tuple[list[str], list[str]]:
        drawn.extend(plot.title for plot in plots.values())
        return [], []

    monkeypatch.setattr("mlxstacks.study.write.write_figures", note)
    part = coin(standing=Standing(status="exploratory", reasons=("a part",)))
    assert "Heads by arm (EXPLORATORY)" in str(write_result(part, tmp_path, tmp_path, ("png",)))
    assert Result.open(tmp_path).standing == part.standing
    assert "EXPLORATORY" not in str(write_result(coin(), tmp_path, tmp_path, ("png",)))
    assert drawn == ["Shares (EXPLORATORY)", "Shares"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be an object"),
        ("a pipe", "not a regular file"),
        ("{", "Expecting"),
        ('{"kind": "coin", "title": "x", "status": "done", "odd": 1}', "odd: Extra inputs"),
        ('{"kind": "coin", "title": "x", "status": "done", "schema_version": 2}', "schema_version"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, text: str, message: str) -> None:
    if message == "not a regular file":
        os.mkfifo(tmp_path / RESULT)
    else:
        (tmp_path / RESULT).write_text(text)
    with pytest.raises(InputError, match=f"{RESULT}: no result that can be read: .*{message}"):
        Result.open(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Table(id="a", title="", columns=ARMS.columns, rows=((1,),)),
            "row 0 has 1 cells of 3",
        ),
        (
            lambda: PLOT.model_validate(PLOT.model_dump() | {"categories": ("a",)}),
            "and 1 categories",
        ),
        (lambda: Table.of("t", "", {"a": "text", "p": "p"}, [("x", 1.2)]), r"1\.2 is no p \(p\)"),
        (lambda: Table.of("t", "", {"a": "share"}, [((0.5, 0.9, 0.4),)]), r"0\.4\) is no share"),
        (lambda: Table.of("t", "", {"a": "share"}, [((0.1, 0.2, 0.3),)]), r"row 0: \(0\.1.* is no"),
        (lambda: Table.of("t", "", {"a": "count"}, [(73.5,)]), r"73\.5 is no count"),
        (
            lambda: Plot(
                id="p",
                title="",
                kind="intervals",
                categories=("a",),
                alt="",
                series=(Series.of_intervals("s", [(3, 0, 2)]),),
            ),
            r"series s: 3\.0 is outside of 0\.0 to 2\.0",
        ),
        (lambda: Table.of("t", "", {"a": "count"}, [((0.2, 0.1, 0.3),)]), "is no count"),
        (lambda: coin(blocks=(ARMS, ARMS)), "the id 'arms'"),
        (lambda: Text(title="", paragraphs=(float("nan"),)), "valid string"),
        (lambda: ARMS.model_validate(ARMS.model_dump() | {"id": "../up"}), "match pattern"),
        (lambda: PLOT.model_validate(PLOT.model_dump() | {"form": "{:999999999}"}), "form"),
        (lambda: PLOT.model_validate(PLOT.model_dump() | {"limits": (1, 0)}), r"limits \(1, 0\)"),
    ],
)
def test_a_block_that_cannot_be_shown_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make()


def test_rounding_and_a_mean_of_counts_can_be_shown() -> None:
    columns: Columns = {"p": "p", "n": ("count", 1), "share": "share"}
    Table.of("t", "", columns, [(1 + 1e-15, 16.5, (0.3, 0.1 + 0.2, 0.3))])


@pytest.mark.parametrize(
    ("kind", "digits", "cell", "shown"),
    [
        ("text", None, "a", "a"), ("count", None, 1234, "1,234"), ("share", None, 0.1234, "12.3%"),
        ("share", 2, 0.1234, "12.34%"), ("points", None, -0.05, "-5.0"),
        ("points", 2, (0.05, 0.01, 0.09), "+5.00 (+1.00 to +9.00)"),
        ("share", None, (0.1, 0.2), "10.0 to 20.0%"), ("p", None, 0.0123, "0.012"),
        ("p", None, 1e-9, "below 0.0001"), ("bytes", None, 1_500_000, "1.5 MB"),
        ("seconds", None, 2.5, "2.5 s"), ("number", 3, 0.5, "0.500"),
        ("change", None, 0.5, "+0.5000"), ("count", None, 1234.4, "1,234"),
        ("number", None, None, None),
        ("count", None, True, "yes"),
    ],
)  # fmt: skip
def test_a_cell_reads_as_its_column_says(
    kind: Kind, digits: int | None, cell: Any, shown: str | None
) -> None:
    assert format_cell(cell, Column(name="x", kind=kind, digits=digits)) == shown


def test_a_terminal_shows_how_a_long_table_ends() -> None:
    rows = [(step, step / 8) for step in range(100)]
    table = Table.of("t", "Validation", {"step": "count", "loss": ("number", 4)}, rows)
    result = Result(
        kind="train", title="Training", status="done", blocks=(table,), plan_sha256="0" * 64,
        standing=Standing(status="confirmatory"),
    )  # fmt: skip
    text = str(result)
    shown = [
        line.split()[0] for line in text.splitlines() if re.match(r" *(\d+ .*\.|\.\.\.)", line)
    ]
    assert shown[:-1] == [*map(str, range(12)), "...", *map(str, range(96, 100))]
    assert "84 more rows at the dots" in text
    short = table.model_copy(update={"rows": table.rows[:24]})
    assert "..." not in str(result.model_copy(update={"blocks": (short,)}))
    assert f"Plan {'0' * 16}, confirmatory." in text


def test_a_terminal_a_data_frame_and_a_figure(run: Path) -> None:
    result = Result.open(run)
    text = str(result)
    assert "50.0% (40.0 to 60.0)" in text
    assert text.endswith(f"Verdict: {result.verdict}\n")
    frame = pytest.importorskip("pandas") and result.table("arms")
    assert frame["share"].tolist() == [0.5, 0.7]
    assert frame["share_high"].tolist() == [0.6, 0.8]
    pytest.importorskip("matplotlib")
    (axes,) = result.plot("shares").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["control", "loaded"]
    assert result.table().equals(frame)
    with pytest.raises(InputError, match=r"no table 'arm'; .*'arms'"):
        result.table("arm")


def test_columns_of_numbers_are_numbers_whatever_the_page_says(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    columns: Columns = {"arm": "text", "right": "text", "correlation": "number"}
    rows: list[tuple[Cell, ...]] = [("a", "5 of 8", 0.5), ("b", "1 of 1,020", "not fused")]
    table = Table.of("arms", "Arms", columns, rows)
    frame = Result.open(run).model_copy(update={"blocks": (table,)}).table("arms")
    assert (frame["right"].tolist(), frame["right_of"].tolist()) == ([5, 1], [8, 1020])
    assert frame["correlation"].mean() == 0.5
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"no plot: matplotlib is not installed; pip install"):
        Result.open(run).plot("shares")


def test_every_block_of_an_exploratory_result_is_marked() -> None:
    pytest.importorskip("matplotlib")
    standing = Standing(status="exploratory", reasons=("a subset, 3 of 60",))
    result = coin(standing=standing, blocks=(ARMS, PLOT, Text(title="In words", paragraphs=())))
    assert result.plot().get_suptitle() == "Shares (EXPLORATORY)"
    for text in (str(result), to_markdown(result, ["shares.png"]).replace("\\", "")):
        assert "Heads by arm (EXPLORATORY)" in text
        assert "In words (EXPLORATORY)" in text
    assert text.count("(EXPLORATORY)") == 3  # the alt of the picture
    assert result._repr_html_().count("(EXPLORATORY)") >= 4


def test_numbers_of_arrays_are_pythons_own_and_nan_is_no_value() -> None:
    rows: list[Any] = [
        ("a", np.int64(3), (np.float32(0.5), 0.25, np.nan)),
        ("b", np.nan, (np.nan, 1.0)),
    ]
    table = Table.of("t", "T", {"x": "text", "n": "count", "s": "share"}, rows)
    assert table.rows == (("a", 3, 0.5), ("b", None, None))
    data = {
        "a": np.arange(2),
        "b": {np.str_("c"): float("nan")},
        "d": mx.array([0.5]),
        "e": Path("f"),
    }
    result = coin(data=data)
    assert result.data == {"a": [0, 1], "b": {"c": None}, "d": [0.5], "e": "f"}
    assert Result.from_json(result.as_json()) == result
    for value in (math.inf, np.array([math.inf]), {1}, object()):
        with pytest.raises(ValidationError, match=r"data\.a.* cannot be written to JSON"):
            coin(data={"a": value})
    cells: list[Any] = [(1, 2, 3, 4), (1,), {"a": 1}, ("a", "b")]
    for cell in cells:
        with pytest.raises(ValidationError, match="is no cell; give text"):
            Table.of("t", "T", {"x": "text", "n": "count"}, [("a", cell)])


def test_the_page_on_studies_shows_every_kind_as_it_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs/howto/study.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]*\| `([^`]+)` \| (.+) \|$", page, re.M)
    assert [kind for kind, *_ in rows] == [*get_args(Kind)]
    for kind, value, printed in rows:
        cell = value if kind == "text" else float(value)
        assert format_cell(cell, Column(name="c", kind=kind)) == printed
    for kind in get_args(Plot.model_fields["kind"].annotation):
        assert re.search(rf"^\| [^|]*`{kind}`", page, re.M), kind


def test_rows_of_a_table_may_be_a_data_frame() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"n": [1, 2], "x": ["p", "q"]})
    assert Table.of("t", "T", {"x": "text", "n": "count"}, frame).rows == (("p", 1), ("q", 2))
    with pytest.raises(ValueError, match="rows are a series; give a data frame"):
        Table.of("t", "T", {"n": "count"}, frame.n)
    for row, message in (
        (("a", "12"), "'12' is no count .n.: it is text"),
        ("ab", "'ab' is no row; a row is a tuple"),
        ({"x": 1}, "no n; it has x"),
    ):
        with pytest.raises(ValueError, match=message):
            Table.of("t", "T", {"x": "text", "n": "count"}, [row])


def test_columns_of_numbers_are_numeric() -> None:
    pytest.importorskip("pandas")
    columns: Any = {"arm": "text", "loss": ("number", 4), "none": "share", "rows": "count"}
    table = Table.of("t", "T", columns, [("a", None, None, 1), ("b", 0.5, None, 2)])
    kinds = coin(blocks=(table,)).table().dtypes.map(str)
    assert kinds.tolist()[1:] == ["float64", "float64", "int64"]


@given(st.lists(st.tuples(st.text(max_size=9), st.sampled_from(["share", "bytes"])), max_size=6))
def test_plain_names_are_identifiers_and_differ(columns: list[tuple[str, Any]]) -> None:
    names = plain_names([Column(name=name, kind=kind) for name, kind in columns])
    assert all(name.isidentifier() for name in names)
    assert len({*names}) == len(columns)


def test_no_bound_of_an_interval_takes_the_place_of_a_column() -> None:
    for columns in (("loss", "loss low"), ("loss low", "loss")):
        cells = {"loss": (1.0, 0.0, 2.0), "loss low": 7.0}
        table = Table.of("t", "T", dict.fromkeys(columns, "number"), [cells])
        frame = Result(kind="k", title="T", status="done", blocks=(table,)).table()
        assert frame.iloc[0].to_dict() == {
            "loss": 1.0, "loss_low": 7.0, "loss_low_2": 0.0, "loss_high": 2.0
        }  # fmt: skip


def test_plain_names_in_any_language() -> None:
    columns = [
        Column(name=name, kind="number") for name in ("λ", "σ²", "Größe", "损失", "50 %", "a௰b")
    ]
    assert plain_names(columns) == ["λ", "σ2", "größe", "损失", "column_50_percent", "a_b"]
    points = [Column(name=name, kind="points") for name in ("points", "95%", "gain, points (95%)")]
    assert plain_names(points) == ["difference", "interval", "gain"]


def test_plain_names_hold_the_unit() -> None:
    headers = {
        "p (Holm)": "p",
        "A1 - A0, points (95%)": "points",
        "size": "bytes",
        "bytes": "bytes",
    }
    columns = [Column.model_validate({"name": n, "kind": k}) for n, k in headers.items()]
    assert plain_names(columns) == ["p_holm", "a1_minus_a0", "size_bytes", "bytes"]


@given(st.text(max_size=60))
def test_no_text_of_a_result_is_read_as_markdown(text: str) -> None:
    table = ARMS.model_copy(update={"rows": ((text, 1, 0.5),), "title": text, "caption": text})
    standing = Standing(status="exploratory", reasons=(text,))
    lines = to_markdown(coin(
        verdict=text, title=text, blocks=(table,), plan={"hypothesis": text}, notes=(text,),
        power=(text,), standing=standing, question=text,
    )).splitlines()  # fmt: skip
    (row,) = [line for line in lines if line.endswith("| 1 | 50.0% |")]
    unescaped = row.replace("\\\\", "")
    assert unescaped.count("|") - unescaped.count("\\|") == 4
    bare = "\n".join(lines).replace("\\\\", "")
    assert not re.search(r"(?<!\\)[<$&\[\]]", bare)


def test_markdown_says_what_was_asked_and_how_it_stands() -> None:
    result = coin(
        question="Is it fair?", power=("100 tosses find 14 points",), notes=("Tossed by hand.",),
        standing=Standing(status="confirmatory"), plan_sha256="0" * 64, plan={"n": 100},
    )  # fmt: skip
    text = to_markdown(result)
    assert "**Question.** Is it fair?\n" in text
    assert ", fixed before the first answer: confirmatory.\n" in text
    assert "## Power, as planned\n\n- 100 tosses find 14 points\n" in text
    assert text.endswith("## Notes\n\n- Tossed by hand.\n")
    assert "Power, as planned:\n100 tosses" in str(result)
    assert "<h3>Power, as planned</h3><ul><li>100 tosses" in result._repr_html_()


def test_a_foreign_file_of_the_same_name_is_passed_over(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / RESULT).write_text('{"accuracy": 0.5}')
    settings = ReportSettings(runs=(str(tmp_path),), save_path=str(tmp_path / "page"), formats=())
    report = write_report(settings)
    assert [one["name"] for one in report.data["runs"]] == ["run"]
    assert any(note.startswith("other: passed over") for note in report.notes)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("- a", "\\- a"), ("+ a", "\\+ a"), ("1. a", "1\\. a"), ("12) a", "12\\) a"),
        ("---", "\\---"), ("===", "\\==="), ("-0.5 of it", "-0.5 of it"), ("1.5 a", "1.5 a"),
    ],
)  # fmt: skip
def test_no_line_of_markdown_begins_a_list_or_a_rule(text: str, shown: str) -> None:
    result = Result(kind="k", title="t", status="done", verdict="v",
                    blocks=(Text(title="x", paragraphs=(text,)),))  # fmt: skip
    assert to_markdown(result).splitlines()[-1] == shown


def test_a_result_is_one_line_in_a_prompt_and_shows_its_plots_in_a_notebook() -> None:
    pytest.importorskip("matplotlib")
    series = (Series(label="share", y=(0.5,)),)
    plot = Plot(id="shares", title="Heads", kind="intervals", categories=("coin",), series=series,
                alt="Half.")  # fmt: skip
    table = Table.of("arms", "Arms", {"arm": "text"}, [("coin",)])
    result = Result(kind="coin", title="Coin", status="done", outcome="fair", verdict="Fair.",
                    blocks=(table, plot))  # fmt: skip
    assert repr(result) == "<Result of coin: fair; tables: arms; plots: shares>"
    figure: Any = result.plot("shares")
    png, about = figure._repr_png_()
    assert (png[:4], about) == (b"\x89PNG", {"alt": "Half."})


def test_a_notebook_gets_the_verdict_first_and_no_more_plots_than_it_bears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    from mlxstacks.study.render import html

    def draw(plot: Plot) -> str:
        path = "<path/>" * (20_000 if "large" in plot.id else 5)
        return f'<svg viewBox="0 0 9 9">{path}</svg>'

    monkeypatch.setattr(html, "svg_of", draw)
    monkeypatch.setattr(html, "png_of", lambda plot: bytes(150_000))
    plots = [
        Plot(id=id, title=id, kind="lines", series=(), alt=f"Alt of {id}.")
        for id in ("small", "large", "second", "large-2", "third")
    ]
    table = Table.of("arms", "Arms", {"arm": "text"}, [("coin",)])
    result = Result(kind="coin", title="Coin", status="done", verdict="The coin is fair.",
                    blocks=(table, *plots))  # fmt: skip
    shown = result._repr_html_()
    assert shown.index("The coin is fair.") < shown.index("<img") < shown.index("<table")
    assert shown.count("data:image/svg+xml;base64,") == 2
    assert shown.count("data:image/png;base64,") == 1
    assert 'alt="Alt of large."' in shown
    assert "Not drawn here: large-2, third" in shown
    assert len(shown) < 400_000


def test_a_page_says_of_which_model_it_speaks() -> None:
    result = Result(
        kind="x", title="X", status="done",
        settings={"model": "cache/nano-1/model-3bit", "seed": 1},
        environment=Environment(versions={"mlxstacks": "0.2.0"}),
    )  # fmt: skip
    line = "nano, the built-in model (model-3bit), seed 1, mlxstacks 0.2.0"
    assert f"# X\n\n{line}\n" in to_markdown(result).replace("\\", "")
    assert line in result._repr_html_()
