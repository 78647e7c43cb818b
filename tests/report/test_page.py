"""The page of a result of every kind: whole, alike every time, nothing from outside.

Run: pytest tests/report/test_page.py
"""

import html
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.report.settings import ReportSettings
from mlxstacks.report.write import write_report
from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.document import RESULT, Columns, Standing, Table
from mlxstacks.study.render.html import POLICY, Page, Section, page_html, result_html
from mlxstacks.study.result import Result
from tests.report.cases import (
    compare_result,
    every_report,
    plots_cut,
    profile_result,
    write_every,
    write_run,
)
from tests.report.reader import Reader, read

STYLE = files("mlxstacks.study.render").joinpath("page.css").read_text("utf-8")


def settings_for(*runs: Path, save_path: Path, **changes: object) -> ReportSettings:
    values = {"runs": [str(run) for run in runs], "save_path": str(save_path), "formats": ["svg"]}
    return ReportSettings.model_validate(values | changes)


def first_run(result: Result) -> dict[str, Any]:
    run: dict[str, Any] = result.data["runs"][0]
    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, str]:
    """Where the page of everything is, its result, its text."""
    pytest.importorskip("matplotlib")
    directory = tmp_path_factory.mktemp("report")
    runs = write_every(directory / "runs")
    report = write_report(settings_for(runs, save_path=directory / "page"))
    return directory / "page", report, (directory / "page/index.html").read_text("utf-8")


@pytest.fixture(scope="module")
def reader(made: tuple[Path, Result, str]) -> Reader:
    return read(made[2])


def test_the_page_is_sound_and_loads_nothing(
    made: tuple[Path, Result, str], reader: Reader
) -> None:
    assert reader.problems == []
    assert made[2].startswith('<!DOCTYPE html>\n<html lang="en">')
    assert f'content="{POLICY}"' in made[2].replace("&#39;", "'")
    assert "http" not in re.sub(r"http-equiv", "", STYLE + made[2].partition("<body>")[0])
    assert made[1].data["page_bytes"] < 2_000_000


def test_the_style_is_for_dark_phones_and_print_and_shows_what_scrolls() -> None:
    """Shadows at the edges, of the page's own colours; all that scrolls has them."""
    for query in ("prefers-color-scheme: dark", "max-width: 40rem", "@media print"):
        assert query in STYLE
    rule = STYLE.partition(".scroll, pre, nav {")[2].partition("}")[0]
    assert rule.count("local") == rule.count("100% scroll") == 2
    assert STYLE.count("--edge: ") == 2
    for kind in (".scroll", "pre", "nav"):
        assert re.search(rf"^{re.escape(kind)} {{\s*--under: ", STYLE, re.MULTILINE)


def test_every_run_has_a_row_a_section_and_its_verdict_first(
    made: tuple[Path, Result, str], reader: Reader
) -> None:
    page, text = made[2], " ".join(reader.text)
    sections = page.split('<section class="run"')[1:]
    assert len(sections) == len(made[1].data["runs"]) == len(every_report())
    for run, section in zip(made[1].data["runs"], sections, strict=True):
        slug = re.search(r'id="([^"]+)"', section)
        assert slug is not None
        assert f'href="#{slug.group(1)}"' in page
        assert 0 < section.index('class="verdict"') < section.index("<table")
        assert run["verdict"][1:60] in text
        assert run["sha256"] in section
    assert reader.tags["figure"] == sum(name.endswith(".svg") for name in made[1].data["figures"])
    assert reader.tags["caption"] == reader.tags["table"]
    assert "not measured" in reader.text


def test_every_plot_is_a_file_and_changes_with_light_and_dark(
    made: tuple[Path, Result, str],
) -> None:
    directory, report, page = made
    kinds = {
        block["kind"]
        for _, document in every_report().values()
        for block in document["blocks"]
        if block["block"] == "plot"
    }
    assert len(report.data["figures"]) == len(kinds) == 4
    assert all((directory / "figures" / name).is_file() for name in report.data["figures"])
    assert "var(--series-0)" in page
    assert "#0072b2" not in page.partition("<body>")[2]


def test_recipes_that_repeat_a_run_have_its_settings(made: tuple[Path, Result, str]) -> None:
    for name, kind in (("fuse", "fuse"), ("confound", "confound"), ("sweep", "sweep")):
        path = made[0] / "recipes" / f"{name}.yaml"
        again = resolve(kind, {}, load_recipe(str(path))).settings.model_dump(mode="json")
        settings = every_report()[name][1]["settings"]
        assert {key: again[key] for key in settings if key not in ("save_path", "force")} == {
            key: value for key, value in settings.items() if key not in ("save_path", "force")
        }


def test_equal_results_give_equal_bytes(made: tuple[Path, Result, str], tmp_path: Path) -> None:
    first, _, page = made
    runs = first.parent / "runs"
    write_report(settings_for(runs / "compare", runs / "fuse", save_path=tmp_path / "a"))
    write_report(settings_for(runs / "compare", runs / "fuse", save_path=tmp_path / "b"))
    names = sorted(str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*.*"))
    assert "index.html" in names
    for name in names:
        if name not in (RESULT, "result.md"):  # of the report itself: seconds, save path
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert not re.search(r"20\d\d-\d\d-\d\d", page)


def test_rows_that_results_share_stand_side_by_side() -> None:
    """By the row's name, in the first result's order; tables with other columns stay apart. What
    differs is said.
    """

    def section(name: str, columns: Columns, rows: Any, status: Any = "no plan") -> Section:
        standing = Standing(status=status, reasons=("why",) * (status == "exploratory"))
        document = Result(kind="fuse", title="Fuse", status="done", standing=standing,
                          blocks=(Table.of("t", "T", columns, rows, caption="Of t."),),
                          settings={"model": name, "save_path": name, "seed": 1})  # fmt: skip
        return Section(name, name, document)

    columns: Columns = {"row": "text", "n": "count"}
    page = Page("T", [
        section("one", columns, [("b", 1), ("a", 2)]),
        section("other", {"row": "text", "m": "count"}, [("a", 9)]),
        section("two", columns, [("a", 3), ("c", 4)], "exploratory"),
    ])  # fmt: skip
    (view,) = page.beside
    assert view["rows"] == [
        ["b", "one", "1"], ["a", "one", "2"], ["a", "two (EXPLORATORY)", "3"],
        ["c", "two (EXPLORATORY)", "4"],
    ]  # fmt: skip
    assert view["note"] == "Of t. Settings that differ: model. Not in all: b, c."
    assert page_html(page).count('id="beside"') == 1
    assert 'id="beside"' not in page_html(Page("T", page.runs[:2]))


def test_tables_of_another_meaning_do_not_stand_side_by_side() -> None:
    """Comparisons by another measure or of another arm share budgets and other plain tables."""
    results = [
        compare_result(), compare_result(primary="ungated"), compare_result("rank-2"),
        compare_result(),
    ]  # fmt: skip
    page = Page("T", [Section(str(n), str(n), Result.from_json(r)) for n, r in enumerate(results)])
    runs = {view["title"]: {row[1] for row in view["rows"]} for view in page.beside}
    assert runs["Arms, by task loss"] == {"0", "2", "3"}
    assert runs["boosted - control, paired by seed"] == {"0", "3"}
    assert not {"Arms, by ungated", "rank-2 - control, paired by seed"} & {*runs}


def test_what_is_exploratory_is_marked_everywhere(tmp_path: Path) -> None:
    document = plots_cut(profile_result(), ["lines"])
    document["standing"] = {"status": "exploratory", "reasons": ["a subset, 3 of 60"]}
    run = write_run(tmp_path / "small", RESULT, document)
    report = write_report(settings_for(run, save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text()
    section = page.partition('class="run"')[2]
    titles = re.findall(r"<(?:h2|caption)[^>]*>([^<]+)<", section)
    unmarked = {"Environment", "The plan", "Settings", "Files"}
    assert all("(EXPLORATORY)" in title for title in titles if title not in unmarked)
    assert all("EXPLORATORY" in t for t in re.findall(r"<title[^>]*>([^<]+)<", section))
    assert "a subset, 3 of 60" in page
    assert first_run(report)["standing"] == "EXPLORATORY"


def test_a_plan_that_is_not_the_one_that_was_hashed_is_exploratory(tmp_path: Path) -> None:
    document = profile_result()
    document["plan"]["hypothesis"] = "Something nicer."
    run = write_run(tmp_path / "moved", RESULT, document)
    report = write_report(settings_for(run, save_path=tmp_path / "page"), dry_run=True)
    assert first_run(report)["standing"] == "EXPLORATORY"
    assert "has not the hash" in first_run(report)["reasons"][0]
    assert not (tmp_path / "page").exists()


def test_answers_that_the_result_was_not_made_from_make_it_exploratory(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "run" / "answers" / "test_a1.jsonl", {"arm": "a1"})
    log.begin()
    log.append([{"item_id": "1", "pick": 0}])
    provenance = {"answers/test_a1.jsonl": log.provenance(1)}
    run = write_run(tmp_path / "run", RESULT, {**profile_result(), "provenance": provenance})

    def shown() -> dict[str, Any]:
        settings = settings_for(run, save_path=tmp_path / "page")
        return first_run(write_report(settings, dry_run=True))

    assert shown()["standing"] == "confirmatory"
    log.path.write_bytes(log.path.read_bytes().replace(b'"pick": 0', b'"pick": 1'))
    assert shown()["standing"] == "EXPLORATORY"
    assert "line 2: does not follow" in shown()["reasons"][0]


def test_without_matplotlib_there_are_tables_and_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = write_run(tmp_path / "profile", RESULT, profile_result())
    report = write_report(settings_for(run, save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text()
    assert read(page).problems == []
    assert "<svg" not in page
    assert "Shared layers, by how many are taken" in page
    assert "matplotlib is not installed" in page
    assert "matplotlib" in report.notes[0]


def test_a_planned_result_of_every_kind_can_be_shown(tmp_path: Path) -> None:
    """What a part that is missing looks like: nothing but a head."""
    for name, (file, document) in every_report().items():
        head = {key: document[key] for key in ("kind", "title")}
        write_run(tmp_path / "runs" / name, file, {**head, "status": "planned"})
    report = write_report(settings_for(tmp_path / "runs", save_path=tmp_path / "page"))
    assert {run["standing"] for run in report.data["runs"]} == {"planned only"}
    assert read((tmp_path / "page/index.html").read_text()).problems == []


def test_the_report_is_a_result_that_no_other_page_shows(made: tuple[Path, Result, str]) -> None:
    own = Result.open(made[0])
    assert (own.kind, own.status) == ("report", "done")
    assert own.data["runs"] == made[1].data["runs"]
    assert len(own.data["runs"]) == len(every_report())
    assert all(len(run["sha256"]) == 64 for run in own.data["runs"])
    settings = settings_for(made[0].parent / "runs", save_path=made[0].parent / "x")
    again = write_report(settings, dry_run=True)
    assert {run["kind"] for run in again.data["runs"]} == {run["kind"] for run in own.data["runs"]}


def layout_of(pages: Mapping[int, str], directory: Path) -> dict[str, Any]:
    """Pages by width in pixels -> how many texts a browser lays out, and what overflows or
    overlaps; all of them in one start of Chromium.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here")
    frames = "".join(
        f'<iframe width="{width}" height="900" frameborder="0" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for width, page in pages.items()
    )
    script = (Path(__file__).parent / "layout.js").read_text()
    file = directory / "frames.html"
    file.write_text(f"<!DOCTYPE html><meta charset=utf-8><script>{script}</script>{frames}")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={directory / 'profile'}", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    found = re.search(r"LAYOUT (\{.*\}) END", done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    layout: dict[str, Any] = json.loads(html.unescape(found[1]))
    return layout


def test_nothing_overflows_or_overlaps_in_a_browser(
    made: tuple[Path, Result, str], tmp_path: Path
) -> None:
    """On a phone, a tablet and a desk, details laid open; a broken page shows that faults are
    found.
    """
    page = re.sub(r"<meta http-equiv[^>]*>", "", made[2]).replace("<details>", "<details open>")
    broken = (
        '<body style="margin:0"><div style="width:900px">wide</div><p>under</p>'
        '<p style="margin-top:-2.2em">over</p><table class="scroll" style="width:1px"><tbody>'
        "<tr><th>a name of one word on each of its lines</th></tr></tbody></table></body>"
    )
    layout = layout_of({390: page, 768: page, 1280: page, 500: broken}, tmp_path)
    wider, overlap, squeezed = layout.pop("500")["problems"]
    assert wider == "the page is 400 pixels wider than 500"
    assert overlap == '"over" over "under"'
    assert squeezed.startswith('"a name of one word on each of its lines" in ')
    assert {*layout} == {"390", "768", "1280"}
    assert all(found["texts"] > 500 for found in layout.values())
    assert [found["problems"] for found in layout.values()] == [[], [], []]


def test_a_notebook_shows_a_result_with_its_plots() -> None:
    pytest.importorskip("matplotlib")
    result = Result.from_json(compare_result())
    result = result.model_copy(update={"next_steps": {"Try it": "ms.generate(prompt='?')"}})
    shown = result_html(result)
    found = read(shown)
    assert found.problems == []
    assert "Try it: <code>ms.generate(prompt=&#39;?&#39;)</code>" in shown
    # A notebook that is not trusted shows images, but no <svg> and no <style>.
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', shown)
    assert len(images) == sum(block.block == "plot" for block in result.blocks)
    assert "<svg" not in shown
    for image in images:
        file = b64decode(image).decode()
        assert ElementTree.fromstring(file).tag == "{http://www.w3.org/2000/svg}svg"
        assert {*re.findall(r"var(\(--[\w-]+)", file)} >= {"(--ink", "(--page"}
        assert file.count("--ink: #") == 2  # light and dark
    assert "To repeat it" not in shown
    assert result._repr_html_() == shown
