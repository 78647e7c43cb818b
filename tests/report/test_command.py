"""`mlxstacks report` as a command: bare, planned, again.

Run: pytest tests/report/test_command.py
"""

import json
from pathlib import Path

import pytest

from mlxstacks.cli import run as command
from mlxstacks.recipe.table import command_named
from mlxstacks.study.document import RESULT
from tests.report.cases import fuse_report, write_run
from tests.report.reader import read


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_bare_report_makes_a_small_result_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["report", "--formats", "svg", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [run["name"] for run in found["data"]["runs"]] == ["fuse", "fuse-zero-delta"]
    assert found["data"]["runs"][1]["outcome"] == "no artifact"
    assert "were fused first" in found["notes"][0]
    page = Path("mlxstacks-out/report/index.html").read_text("utf-8")
    assert read(page).problems == []
    # again: over its own page, with what is there now, and not with the page itself
    assert command(["report", "--formats", "svg", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["data"]["runs"] == found["data"]["runs"]
    assert not any("fused first" in note for note in again["notes"])


def test_a_dry_run_touches_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["report", "--dry-run"]) == 0
    assert "would be" in capsys.readouterr().out
    assert command(["run", "report", "--dry-run"]) == 0
    assert not any(tmp_path.iterdir())


def test_an_unfinished_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mlxstacks-out/.confound-nano.work").mkdir(parents=True)
    assert command(["report"]) == 2
    assert "no finished result yet; confound-nano: the same command" in capsys.readouterr().err
    assert not Path("mlxstacks-out/fuse").exists()


def test_runs_are_given_by_position(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        write_run(Path(name), RESULT, fuse_report())
    assert command(["report", "two", "one", "--save-path", "page", "--formats", "svg"]) == 0
    assert "survival 50.0%" in " ".join(capsys.readouterr().out.split())
    found = json.loads(Path("page/result.json").read_text())
    page = Path("page/result.md").read_text()
    assert page.startswith("# Results")
    assert all(f"## {name}\n\n" in page for name in ("two", "one"))
    assert page.count("survival 50.0%") >= 2
    assert [run["path"] for run in found["data"]["runs"]] == ["two", "one"]
    assert command(["report", "two", "--save-path", "page"]) == 2
    assert "exists" in capsys.readouterr().err
    assert command(["report", "nowhere", "--save-path", "other"]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_the_row_names_what_is_there() -> None:
    row = command_named("report")
    assert row.arguments == {"runs": "RUN..."}
