"""What strangers' results may not do to the page; what is refused, and by which words.

Run: pytest tests/report/test_hostile.py
"""

import html
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.report.write import write_report
from mlxstacks.study.document import RESULT, Plot, Series
from mlxstacks.study.render.html import Page, Section, page_html, picture
from mlxstacks.study.render.words import LONGEST, beginning, clean
from mlxstacks.study.result import Result
from tests.report.cases import compare_result, every_report, plots_cut, profile_result, write_run
from tests.report.reader import read
from tests.report.test_page import settings_for

EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<svg/onload=alert(1)>",
    "javascript:alert(1)",
    "</style><style>*{background:url(http://x)}",
    "]]><!-- $\\frac{1}{0 $ & &amp; &#x3c;",
    "a\x00b\x1b[31mc\x7f\u202edlrow",
)


_WORDS = ("kind", "status", "sha256", "block", "form", "id", "plan_sha256", "columns", "seal")


def poisoned(value: Any, evil: str) -> Any:
    """The JSON value with `evil` in all of its texts but what names kinds, states and hashes."""
    if isinstance(value, dict):
        return {key: part if key in _WORDS else poisoned(part, evil) for key, part in value.items()}
    if isinstance(value, list):
        return [poisoned(part, evil) for part in value]
    return evil if isinstance(value, str) else value


@pytest.mark.parametrize("evil", ["".join(EVIL), "javascript:alert(1)"], ids=["all", "address"])
def test_hostile_texts_are_shown_as_texts(evil: str, tmp_path: Path) -> None:
    """Of every kind of result; plots are below."""
    for name, (file, document) in every_report().items():
        write_run(tmp_path / "runs" / name, file, plots_cut(poisoned(document, evil)))
    write_report(settings_for(tmp_path / "runs", save_path=tmp_path / "page", title=evil))
    page = (tmp_path / "page/index.html").read_text("utf-8")
    found = read(page)
    assert found.problems == []
    assert clean(evil) in "".join(found.text)
    assert not {"script", "img"} & {*found.tags}
    assert all(c.isprintable() or c == "\n" or ord(c) > 127 for c in page)


@pytest.mark.parametrize("kind", get_args(Plot.model_fields["kind"].annotation))
def test_hostile_texts_in_plots_are_shown_as_texts(kind: Any, tmp_path: Path) -> None:
    """Every text at once, as labels, categories, titles and units."""
    pytest.importorskip("matplotlib")
    values = tuple(map(float, range(len(EVIL))))
    placed, joined = kind in ("lines", "points", "frontier"), kind in ("lines", "points")
    plot = Plot(
        id="p", title=EVIL[1], kind=kind, alt=EVIL[0], x_label=EVIL[5], y_label=EVIL[4],
        unit=EVIL[3], references={} if kind == "heat map" else {EVIL[6]: 1.0},
        categories=() if joined else EVIL,
        series=tuple(Series(label=e, y=values, x=values if placed else ()) for e in EVIL),
    )  # fmt: skip
    result = Result(kind="k", title="t", status="done", verdict="v", blocks=(plot,)).sealed()
    run = write_run(tmp_path / "evil", RESULT, result.as_json())
    write_report(settings_for(run, save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text("utf-8")
    found = read(page)
    assert found.problems == []
    assert found.tags["svg"] == 1
    assert not {"script", "img"} & {*found.tags}
    assert clean(EVIL[0]) in "".join(found.text)
    assert all(c.isprintable() or c == "\n" or ord(c) > 127 for c in page)


def test_a_directory_with_a_hostile_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b onclick=x>&\u202e", RESULT, plots_cut(compare_result()))
    write_report(settings_for(run, save_path=tmp_path / "page"))
    found = read((tmp_path / "page/index.html").read_text("utf-8"))
    assert found.problems == []
    assert "run-b-onclick-x" in found.ids


def test_huge_texts_and_many_rows_are_cut_and_counted(tmp_path: Path) -> None:
    document = plots_cut(profile_result())
    table = next(block for block in document["blocks"] if block["block"] == "table")
    table["rows"] = [table["rows"][0]] * 2000
    document["notes"] = ["x" * 3_000_000]
    run = write_run(tmp_path / "huge", RESULT, document)
    report = write_report(settings_for(run, save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text()
    assert report.data["page_bytes"] < 500_000
    assert "2,998,000 characters" in page
    assert "1,850 more rows are in the result file" in page


HEAD = '"kind": "fuse", "title": "t", "schema_version": 1, "status": "done", "seal": "0"'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", "Expecting value"),
        ("[]", "must be an object"),
        ("{" * 5, "Expecting"),
        (f"{{{HEAD}, {HEAD}}}", "twice"),
        (f'{{{HEAD}, "data": {{"a": NaN}}}}', "NaN is not a JSON number"),
        (f'{{{HEAD}, "data": {{"a": 1{"0" * 400}}}}}', "beyond float64"),
        (f'{{{HEAD}, "data": {{"a": -1e999}}}}', "beyond float64"),
        (f'{{{HEAD}, "verdict": 7}}', "verdict: Input should be a valid string"),
        (f'{{{HEAD}, "blocks": {{"a": 1}}}}', "blocks: Input should be a valid array"),
        (f'{{{HEAD}, "plan_sha256": "0"}}', "plan_sha256: String should match"),
        (f'{{{HEAD}, "more": 1}}', "more: Extra inputs are not permitted"),
        (HEAD.join("{}").replace("1", "2"), "schema_version: Input should be 1"),
        ('{"seal": ' + '{"a":' * 60 + "1" + "}" * 61, "nested"),
        ("\udcff", "no text"),
    ],
)
def test_damaged_files_are_named(data: str, words: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ".mlxstacks.json", {"written_by": "mlxstacks"})
    (run / RESULT).write_bytes(data.encode(errors="surrogateescape"))
    with pytest.raises(InputError) as caught:
        write_report(settings_for(run, save_path=tmp_path / "page"))
    assert RESULT in str(caught.value)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert not (tmp_path / "page").exists()


def test_what_is_no_result_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(run: Path) -> str:
        with pytest.raises(InputError) as caught:
            write_report(settings_for(run, save_path=tmp_path / "page"))
        return str(caught.value)

    assert "no such directory" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no result" in refused(tmp_path / "empty")
    (tmp_path / "other.json").write_text("{}")
    assert "kind: Field required" in refused(tmp_path / "other.json")
    former = write_run(tmp_path / "former", "fuse_report.json", {"kind": "fuse"})
    assert "fuse_report.json: written by mlxstacks before 0.2" in refused(former)
    run = write_run(tmp_path / "profile", RESULT, profile_result())
    monkeypatch.setattr("mlxstacks.study.result.MAX_JSON_BYTES", 1000)
    assert "more than 1,000 bytes" in refused(run / RESULT)


def test_results_one_level_down_are_found_and_the_rest_is_said(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "b", RESULT, profile_result())
    write_run(runs / "a", RESULT, compare_result())
    write_run(runs / "page", RESULT, {**profile_result(), "kind": "report"})
    write_run(runs / "model", "config.json", {})
    write_run(runs / "old", "train_report.json", {})
    write_run(runs / ".confound.work", "protocol.json", {})
    write_run(runs / "deep/er", RESULT, profile_result())
    settings = settings_for(runs, runs / "a" / RESULT, save_path=tmp_path / "page")
    report = write_report(settings, dry_run=True)
    assert [run["name"] for run in report.data["runs"]] == ["a", "b"]
    notes = " ".join(report.notes)
    assert "confound: is not finished" in notes
    with pytest.raises(InputError, match=r"confound: is not finished \(\.confound\.work holds"):
        write_report(settings_for(runs / "confound", save_path=tmp_path / "other"))
    assert "model: passed over, it holds no result" in notes
    assert "old: passed over, train_report.json: written by mlxstacks before 0.2" in notes
    assert "deep: passed over" in notes
    assert "page" not in notes


def test_runs_of_one_name_have_anchors_of_their_own(tmp_path: Path) -> None:
    document = plots_cut(compare_result())
    runs = [write_run(tmp_path / p / "profile", RESULT, document) for p in "ab"]
    write_report(settings_for(*runs, save_path=tmp_path / "page"))
    found = read((tmp_path / "page/index.html").read_text())
    assert found.problems == []
    assert {"run-profile", "run-profile-2"} <= {*found.ids}


def test_the_page_does_not_replace_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "profile", RESULT, profile_result())
    with pytest.raises(InputError, match="must not be replaced"):
        write_report(settings_for(run, save_path=run, force=True))


# --- laws -----------------------------------------------------------------------------------------


@given(st.text(st.characters(codec=None), min_size=1, max_size=300))
def test_text_in_html_is_the_text(value: str) -> None:
    result = Result(kind=value, title=value, status="done", verdict=value, notes=(value,))
    page = page_html(Page(value, [Section("run-1", value, result)], (value,), value, "1"))
    found = read(page)
    assert [p for p in found.problems if "=" not in p] == []
    assert not {"script", "img"} & {*found.tags}
    assert html.unescape(page).count(clean(value)) >= 3


@given(st.text(st.characters(codec=None)), st.integers(1, 50))
def test_clean_text_has_no_control_characters_and_is_short(value: str, longest: int) -> None:
    said = clean(value, longest)
    assert all(c in "\n\t" or not ord(c) < 32 for c in said)
    said.encode("utf-8")
    assert clean(said, LONGEST) == said
    if value.isascii() and value.isprintable() and len(value) <= longest:
        assert said == value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


DOCUMENTS = [json.dumps(document) for document in (profile_result(), compare_result())]


@given(st.data())
def test_any_json_in_any_place_is_shown_or_refused(data: st.DataObject) -> None:
    """A value of any kind in the place of any part: no error but one that says where."""
    document = json.loads(data.draw(st.sampled_from(DOCUMENTS)))
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not (isinstance(place[key], dict | list) and place[key]) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        result = Result.from_json(document)
    except ValueError:
        return
    assert read(page_html(Page("t", [Section("run-1", "x", result)]))).problems == []


def test_an_svg_keeps_its_labels_and_loses_addresses() -> None:
    svg = (
        '<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://w">\n'
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 36">\n<metadata>http://x'
        '</metadata>\n<defs>\n<style type="text/css">*{}</style>\n</defs>\n<g id="a">'
        '<use xlink:href="#m" style="fill: #0072b2"/><path clip-path="url(#p)"/>'
        '<text>id="b" #0072b2</text></g><g id="m"/><g id="p"/></svg>'
    )
    _, found, wide = picture(svg, "plot", 'what "it" shows')
    assert not wide
    assert 'href="#plot-m" style="fill: var(--series-0)"' in found
    assert "url(#plot-p)" in found
    assert 'id="plot-a"' in found
    assert '<text>id="b" #0072b2</text>' in found
    assert "http" not in found
    assert "<style" not in found
    assert "what &#34;it&#34; shows" in found
    assert "width:96px" in found
    with pytest.raises(InputError, match="no SVG"):
        picture("<svg></svg>", "plot", "")


# --- beginnings of verdicts ---------------------------------------------------------------------


def test_an_option_in_a_sentence_is_whole() -> None:
    said = "see --save-path, <b> and a--b; --no-plots"
    result = Result(kind="eval", title="t", status="done", verdict=said)
    page = page_html(Page("t", [Section("run-1", "n", result)], (), None, "1"))
    assert 'See <span class="option">--save-path</span>, &lt;b&gt; and a--b; ' in page
    assert '<span class="option">--no-plots</span>' in page


def test_a_beginning_ends_where_a_sentence_does() -> None:
    said = "Mean 0.490, random 0.365 (p = 0.0665). That is nothing; e.g. chance. As planned."
    assert beginning(said, 100) == said
    assert beginning(said, len(said) - 1).endswith("chance.")
    assert beginning(said, 40) == "Mean 0.490, random 0.365 (p = 0.0665)."
    assert beginning(said, 20) == "Mean 0.490, random 0.365 (p = 0.0665)."
    objected = "A1 gains 5 points, but so do shuffled answers."
    assert beginning(f"{objected} As planned.", 10) == beginning(objected, 10) == objected


@given(st.text(alphabet="aB 1.;!\n", max_size=80), st.integers(5, 60))
def test_a_beginning_is_how_the_line_begins(said: str, longest: int) -> None:
    line = " ".join(said.split())
    found = beginning(said, longest)
    assert line.startswith(found)
    if len(line) <= longest:
        assert found == line
    elif found != line:
        assert found[-1] in ".!"
        assert line[len(found)] == " "
