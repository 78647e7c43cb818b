"""The page of a result of every kind: whole, alike every time, nothing from outside.

Run: pytest tests/report/test_page.py
"""

import json
import re
import sys
from pathlib import Path

import pytest

from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.report.find import RESULT_FILES
from mlxstacks.report.kinds import KINDS
from mlxstacks.report.page import POLICY
from mlxstacks.report.runs import Run
from mlxstacks.report.settings import ReportSettings
from mlxstacks.report.style import STYLE
from mlxstacks.report.write import Report, write_report
from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.document import RESULT
from tests.report.cases import confound_report, every_report, fuse_report, write_every, write_run
from tests.report.reader import Reader, read


def settings_for(*runs: Path, save_path: Path, **changes: object) -> ReportSettings:
    values = {"runs": [str(run) for run in runs], "save_path": str(save_path), "formats": ["svg"]}
    return ReportSettings.model_validate(values | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report, str]:
    """Where the page of everything is, its report, its text."""
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("report")
    runs = write_every(directory / "runs")
    report = write_report(settings_for(runs, save_path=directory / "page"))
    return directory / "page", report, (directory / "page/index.html").read_text("utf-8")


@pytest.fixture(scope="module")
def reader(made: tuple[Path, Report, str]) -> Reader:
    return read(made[2])


def test_every_kind_is_known_and_made_here(made: tuple[Path, Report, str]) -> None:
    kinds = {run.source.kind for run in made[1].runs if run.source.file != RESULT}
    assert kinds == {*KINDS}
    assert {*RESULT_FILES.values()} <= {*KINDS, "", "stacks list"}


def test_the_page_is_sound_and_loads_nothing(
    made: tuple[Path, Report, str], reader: Reader
) -> None:
    assert reader.problems == []
    assert made[2].startswith('<!DOCTYPE html>\n<html lang="en">')
    assert f'content="{POLICY}"' in made[2].replace("&#x27;", "'")
    assert "http" not in re.sub(r"http-equiv", "", STYLE + made[2].partition("<body>")[0])
    assert made[1].page_bytes < 2_000_000


def test_it_is_made_for_dark_for_phones_and_for_print() -> None:
    for query in ("prefers-color-scheme: dark", "max-width: 40rem", "@media print"):
        assert query in STYLE


def test_what_scrolls_sideways_shows_it() -> None:
    """Shadows at the edges, of the page's own colours; all that scrolls has them."""
    rule = STYLE.partition(".scroll, pre, nav {")[2].partition("}")[0]
    assert rule.count("local") == rule.count("100% scroll") == 2
    assert STYLE.count("--edge: ") == 2
    for kind in (".scroll", "pre", "nav"):
        assert re.search(rf"^{re.escape(kind)} {{\s*--under: ", STYLE, re.MULTILINE)


def test_every_run_has_a_row_a_section_and_its_verdict_first(
    made: tuple[Path, Report, str], reader: Reader
) -> None:
    page, text = made[2], " ".join(reader.text)
    for run in made[1].runs:
        assert f'href="#{run.slug}"' in page
        section = page.partition(f'id="{run.slug}"')[2]
        assert 0 < section.index('class="verdict"') < section.index("<table")
        assert run.content.verdict[1:60] in text
        assert run.source.sha256 in page
    assert reader.tags["figure"] == sum(1 for name in made[1].figures if name.endswith(".svg"))
    assert reader.tags["caption"] == reader.tags["table"]


def test_null_is_said_to_be_not_measured(reader: Reader) -> None:
    assert "not measured" in reader.text


def test_every_plot_is_a_file_and_changes_with_light_and_dark(
    made: tuple[Path, Report, str],
) -> None:
    directory, report, page = made
    assert len(report.figures) > 15
    assert all((directory / "figures" / name).is_file() for name in report.figures)
    assert "var(--series-0)" in page
    assert "#0072b2" not in page.partition("<body>")[2]


def test_recipes_that_repeat_a_run_have_its_settings(made: tuple[Path, Report, str]) -> None:
    directory, report, _ = made
    for name, kind in (("fuse", "fuse"), ("confound", "confound"), ("sweep", "sweep")):
        path = directory / "recipes" / f"{name}.yaml"
        resolved = resolve(kind, {}, load_recipe(str(path)))
        again = resolved.settings.model_dump(mode="json")
        said = every_report()[name][1]["settings"]
        assert {key: again[key] for key in said if key not in ("save_path", "force")} == {
            key: value for key, value in said.items() if key not in ("save_path", "force")
        }
    assert report.runs[0].recipe is not None


def test_equal_results_give_equal_bytes(made: tuple[Path, Report, str], tmp_path: Path) -> None:
    first, _, page = made
    runs = first.parent / "runs"
    write_report(settings_for(runs / "confound", runs / "fuse", save_path=tmp_path / "a"))
    write_report(settings_for(runs / "confound", runs / "fuse", save_path=tmp_path / "b"))
    names = sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*.*"))
    assert "index.html" in names
    for name in names:
        if name != "report.json":  # holds the save path
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not re.search(r"20\d\d-\d\d-\d\d", page)


def test_what_is_exploratory_is_marked_everywhere(tmp_path: Path) -> None:
    document = confound_report()
    document["standing"] = {"status": "exploratory", "reasons": ["a1_refit: a subset, 3 of 60"]}
    run = write_run(tmp_path / "small", "confound_report.json", document)
    report = write_report(settings_for(run, save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text()
    section = page.partition('class="run"')[2]
    titles = re.findall(r"<(?:h2|caption)[^>]*>([^<]+)<", section)
    unmarked = {"Environment", "The plan", "Settings", "Files"}
    assert all("(EXPLORATORY)" in title for title in titles if title not in unmarked)
    assert all("EXPLORATORY" in t for t in re.findall(r"<title[^>]*>([^<]+)<", section))
    assert "a subset, 3 of 60" in page
    assert report.runs[0].standing == "EXPLORATORY"


def test_a_plan_that_is_not_the_one_that_was_hashed_is_exploratory(tmp_path: Path) -> None:
    document = confound_report()
    document["plan"]["hypothesis"] = "Something nicer."
    run = write_run(tmp_path / "moved", "confound_report.json", document)
    report = write_report(settings_for(run, save_path=tmp_path / "page"), dry_run=True)
    assert report.runs[0].standing == "EXPLORATORY"
    assert "has not the hash" in report.runs[0].reasons[0]
    assert not (tmp_path / "page").exists()


def test_answers_that_the_result_was_not_made_from_make_it_exploratory(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "run" / "answers" / "test_a1.jsonl", {"arm": "a1"})
    log.begin()
    log.append([{"item_id": "1", "pick": 0}])
    document = confound_report() | {
        "made_from": {
            "answers/test_a1.jsonl": log.made_from(1),
            "split.json": {"sha256": "0" * 64},
        }
    }
    run = write_run(tmp_path / "run", "confound_report.json", document)

    def shown() -> Run:
        report = write_report(settings_for(run, save_path=tmp_path / "page"), dry_run=True)
        return report.runs[0]

    assert shown().standing == "confirmatory"
    assert shown().notes[-2:] == (
        "Read again: 1 file of answers and outcomes beside the result, as it was when made.",
        "Not beside the result, so not held against it: split.json.",
    )
    log.path.write_bytes(log.path.read_bytes().replace(b'"pick": 0', b'"pick": 1'))
    assert shown().standing == "EXPLORATORY"
    assert (
        shown()
        .reasons[0]
        .startswith(
            "answers/test_a1.jsonl is not what the report was made from: line 2: does not follow"
        )
    )


def test_without_matplotlib_there_are_tables_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = write_run(tmp_path / "fuse", "fuse_report.json", fuse_report())
    report = write_report(settings_for(run, save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text()
    assert read(page).problems == []
    assert "<svg" not in page
    assert "Fidelity by module" in page
    assert "matplotlib is not installed" in page
    assert "matplotlib" in report.notes[0]


def test_a_planned_result_of_every_kind_can_be_shown(tmp_path: Path) -> None:
    """What a part that is missing looks like: nothing but a status."""
    for name, (file, document) in every_report().items():
        keys = ("kind", "title", "format_version")
        bare = {key: document[key] for key in keys if key in document}
        write_run(tmp_path / "runs" / name, file, {**bare, "status": "planned"})
    report = write_report(settings_for(tmp_path / "runs", save_path=tmp_path / "page"))
    assert {run.standing for run in report.runs} == {"planned only"}
    assert read((tmp_path / "page/index.html").read_text()).problems == []


def test_report_json_names_every_source(made: tuple[Path, Report, str]) -> None:
    found = json.loads((made[0] / "report.json").read_text())
    assert found["kind"] == "report"
    assert found["status"] == "done"
    assert len(found["runs"]) == len(made[1].runs)
    assert all(len(run["sha256"]) == 64 for run in found["runs"])
