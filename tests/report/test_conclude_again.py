"""A conclusion drawn again: what differs, and what is not ours to read. Run: pytest tests/report

That each study draws its own again is held next to its runs (tests/studies/conclusions.py).
"""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.recipe.table import COMMANDS, Command
from mlxstacks.report import conclude_again
from mlxstacks.report.conclude_again import check_conclusion
from mlxstacks.report.find import find_sources
from mlxstacks.study.document import RESULT, Environment
from mlxstacks.study.result import Result
from tests.report.cases import sweep_result, write_run

ROWS = [{"mean": 0.3, "n": 3}, {"mean": None, "n": 0}]
DATA = {"rows": ROWS, "words": "as it is"}
HERE = Environment(versions={"mlxstacks": version("mlxstacks")})


def checked(
    monkeypatch: pytest.MonkeyPatch, directory: Path, drawn: Any = None, **about: Any
) -> Result:
    """A result whose files give `drawn`; an exception is raised."""
    head = {
        "kind": "coin", "title": "Coin", "status": "done", "verdict": "It falls.", "data": DATA,
        "environment": HERE, "provenance": {"answers.json": {}},
    }  # fmt: skip

    def draw(result: Result, copy: Path) -> Result:
        assert [path.name for path in copy.iterdir()] == ["answers.json"]
        assert copy.resolve() != directory.resolve()
        if isinstance(drawn, Exception):
            raise drawn
        return Result(**{**head, "verdict": "It fell.", "data": drawn or {}})

    coin = Command(help="", settings="", function="", conclude_again="coin")
    monkeypatch.setitem(COMMANDS, "coin", coin)
    monkeypatch.setattr(conclude_again, "load", {"coin": draw}.get)
    for name in ("answers.json", "more.json"):
        (directory / name).write_text("[]")
    return check_conclusion(Result(**{**head, **about}), directory)


def data(mean: Any, n: int = 3, **more: Any) -> dict[str, Any]:
    return {**DATA, "rows": [{"mean": mean, "n": n}, ROWS[1]], **more}


@pytest.mark.parametrize("drawn", [DATA, data(0.3 + 1e-8), data(0.3, words="other words")])
def test_the_same_figures_are_shown_as_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drawn: Any
) -> None:
    result = checked(monkeypatch, tmp_path, drawn)
    assert (result.verdict, result.standing.reasons) == ("It fell.", ())
    assert result.notes == ("Conclusion drawn again from its files: the same figures.",)


@pytest.mark.parametrize(
    ("drawn", "named"),
    [
        (data(0.31), "rows.0.mean"),
        (data(0.3 + 1e-6), "rows.0.mean"),
        (data("0.3"), "rows.0.mean"),
        (data(0.3, n=4), "rows.0.n"),
        ({**DATA, "rows": ROWS[:1]}, "rows"),
        ({**DATA, "rows": {"0": 1}}, "rows"),
        (data(0.3, more=1), "more"),
        ({"rows": ROWS}, "words"),
        ({}, "rows, words"),
    ],
)
def test_other_figures_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drawn: Any, named: str
) -> None:
    result = checked(monkeypatch, tmp_path, drawn)
    assert result.standing.status == "exploratory"
    assert result.standing.reasons == (f"other figures follow from its files: {named}",)


def test_files_of_which_nothing_follows_are_told_without_what_is_in_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [reason] = checked(monkeypatch, tmp_path, ZeroDivisionError("secret")).standing.reasons
    assert reason == (
        "conclusion not drawn again: its files do not have what it takes (ZeroDivisionError)"
    )


@pytest.mark.parametrize("drawn", [data(0.31), ValueError()])
def test_another_version_may_have_computed_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drawn: Any
) -> None:
    older = Environment(versions={"mlxstacks": "0.0.1"})
    result = checked(monkeypatch, tmp_path, drawn, environment=older)
    assert (result.verdict, result.standing.reasons) == ("It falls.", ())
    assert result.notes == (
        "Conclusion not drawn again: it was made by mlxstacks 0.0.1, this is another.",
    )


def test_a_kind_without_a_command_is_noted_and_a_plan_has_no_conclusion(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = checked(monkeypatch, tmp_path, kind="Sweep")
    assert other.notes == ("Conclusion not drawn again: no command is called Sweep.",)
    for about in ({"kind": "fuse"}, {"status": "planned"}):
        assert checked(monkeypatch, tmp_path, **about).notes == ()


@pytest.mark.parametrize("how", ["pipe", "link", "named link", "many cells"])
def test_nothing_but_plain_files_that_are_named_is_read(tmp_path: Path, how: str) -> None:
    """A stranger's sweep with something else among its cells: neither waited for nor shown."""
    (secret := tmp_path / "secret.json").write_text('{"secret": "hunter2"}')
    result = Result.from_json(sweep_result()).model_copy(update={"environment": HERE})
    if how == "named link":
        entry = {"cells/zzz.json": {"sha256": "0" * 64}}
        result = result.model_copy(update={"provenance": entry})
    if how == "many cells":
        settings = {**result.settings, "ranks": [*range(1, 2000)], "seeds": [*range(3000)]}
        result = result.model_copy(update={"settings": settings})
    run = write_run(tmp_path / "run", RESULT, result.as_json())
    (run / "cells").mkdir()
    if how == "pipe":
        os.mkfifo(run / "cells" / "zzz.json")
    else:
        (run / "cells" / "zzz.json").symlink_to(secret)
    [source], _ = find_sources([str(run)])
    assert "hunter2" not in str(source.result)
    assert source.result.standing.status == "exploratory"
