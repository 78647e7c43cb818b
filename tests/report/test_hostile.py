"""What strangers' results may not do to the page; what is refused, and by which words.

Run: pytest tests/report/test_hostile.py
"""

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.report import find
from mlxstacks.report.html import tag, text
from mlxstacks.report.svg import inline_svg
from mlxstacks.report.values import DamagedError, Value
from mlxstacks.report.write import write_report
from mlxstacks.study.render.words import LONGEST, clean
from tests.report.cases import confound_report, every_report, fuse_report, write_run
from tests.report.reader import read
from tests.report.test_page import settings_for

EVIL = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<svg/onload=alert(1)>",
    "javascript:alert(1)",
    "</style><style>*{background:url(http://x)}",
    "]]><!-- $\\frac{1}{0 $ & &amp; &#x3c;",
    "a\x00b\x1b[31mc\x7f\u202edlrow\ud800",
)


_WORDS = ("kind", "status", "sha256", "checksum", "block", "form", "id", "plan_sha256", "columns")


def poisoned(value: Any, evil: str) -> Any:
    """The JSON value with `evil` in all of its texts but what names kinds, states and hashes."""
    if isinstance(value, dict):
        return {key: part if key in _WORDS else poisoned(part, evil) for key, part in value.items()}
    if isinstance(value, list):
        return [poisoned(part, evil) for part in value]
    return evil if isinstance(value, str) else value


@pytest.mark.parametrize("evil", EVIL, ids=ascii)
def test_hostile_texts_are_shown_as_texts(evil: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path / "evil", "fuse_report.json", poisoned(fuse_report(), evil))
    runs = [run]
    named = confound_report()
    named["arms"] = {f"{evil} {k}": v for k, v in named["arms"].items()}
    named["verdict"] = named["notes"] = None
    if evil in EVIL[4:]:
        runs.append(write_run(tmp_path / "named", "confound_report.json", named))
    write_report(settings_for(*runs, save_path=tmp_path / "page", title=evil.replace("\ud800", "")))
    page = (tmp_path / "page/index.html").read_text("utf-8")
    found = read(page)
    assert found.problems == []
    assert clean(evil) in "".join(found.text)
    assert not {"script", "img"} & {*found.tags}
    assert all(c.isprintable() or c == "\n" or ord(c) > 127 for c in page)


def test_hostile_texts_in_every_kind(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evil = EVIL[1] + "\x1b[31m"
    for name, (file, document) in every_report().items():
        write_run(tmp_path / "runs" / name, file, poisoned(document, evil))
    write_report(settings_for(tmp_path / "runs", save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text("utf-8")
    found = read(page)
    assert found.problems == []
    assert "img" not in found.tags
    assert "\x1b" not in page


def test_a_directory_with_a_hostile_name(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b onclick=x>&\u202e", "fuse_report.json", fuse_report())
    report = write_report(settings_for(run, save_path=tmp_path / "page"))
    assert read((tmp_path / "page/index.html").read_text("utf-8")).problems == []
    assert report.runs[0].slug == "run-b-onclick-x"


def test_huge_texts_and_many_rows_are_cut_and_counted(tmp_path: Path) -> None:
    document = fuse_report()
    modules = document["stages"][0]["modules"]
    document["stages"][0]["modules"] = [{**modules[0], "module": f"m.{n}.x"} for n in range(2000)]
    document["notes"] = ["x" * 3_000_000]
    run = write_run(tmp_path / "huge", "fuse_report.json", document)
    report = write_report(settings_for(run, save_path=tmp_path / "page"))
    page = (tmp_path / "page/index.html").read_text()
    assert report.page_bytes < 500_000
    assert "2,998,000 characters" in page
    assert "1,851 more rows are in the result file" in page


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "Expecting value"),
        (b"[]", "must be an object"),
        (b'{"stages": [', "Expecting value"),
        (b"\xff\xfe", "utf-8"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"total": {"survival": NaN}, "stages": []}', "NaN is not a JSON number"),
        (b'{"total": {"survival": 1e999}, "stages": []}', "inf is no number"),
        (b'{"total": {"survival": "all"}}', "a number is needed"),
        (b'{"stages": {"a": 1}}', "a list is needed"),
        (b'{"verdict": 7}', "text is needed"),
        (b'{"kind": "fusion"}', "known are fuse"),
        (b'{"kind": 3}', "text is needed"),
        (b"{" * 5, "Expecting"),
        (b'{"settings":' + b'{"a":' * 60 + b"1" + b"}" * 61, "nested"),
    ],
)
def test_damaged_files_are_named(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/fuse_report.json").write_bytes(data)
    with pytest.raises(InputError) as caught:
        write_report(settings_for(tmp_path / "run", save_path=tmp_path / "page"))
    assert "fuse_report.json" in str(caught.value)
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
    assert "no known result" in refused(tmp_path / "other.json")
    run = write_run(tmp_path / "fuse", "fuse_report.json", fuse_report())
    monkeypatch.setattr(find, "MAX_JSON_BYTES", 1000)
    assert "allowed: 1,000" in refused(run)


def test_results_one_level_down_are_found_and_the_rest_is_said(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "b", "fuse_report.json", fuse_report())
    write_run(runs / "a", "fuse_report.json", fuse_report(zero=True))
    write_run(runs / "page", "report.json", {})
    write_run(runs / "model", "config.json", {})
    write_run(runs / ".confound.work", "protocol.json", {})
    write_run(runs / "deep/er", "fuse_report.json", fuse_report())
    settings = settings_for(runs, runs / "a/fuse_report.json", save_path=tmp_path / "page")
    report = write_report(settings, dry_run=True)
    assert [run.source.name for run in report.runs] == ["a", "b"]
    said = " ".join(report.notes)
    assert "confound: is not finished" in said
    assert "model: passed over" in said
    assert "deep: passed over" in said
    assert "page" not in said


def test_runs_of_one_name_have_anchors_of_their_own(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / p / "fuse", "fuse_report.json", fuse_report()) for p in "ab"]
    report = write_report(settings_for(*runs, save_path=tmp_path / "page"))
    assert [run.slug for run in report.runs] == ["run-fuse", "run-fuse-2"]
    assert read((tmp_path / "page/index.html").read_text()).problems == []


def test_the_page_does_not_replace_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "fuse", "fuse_report.json", fuse_report())
    with pytest.raises(InputError, match="must not be replaced"):
        write_report(settings_for(run, save_path=run, force=True))


# --- laws -----------------------------------------------------------------------------------------


@given(st.text(st.characters(codec=None), max_size=300))
def test_text_in_html_is_the_text(value: str) -> None:
    made = text(value)
    assert html.unescape(made) == clean(value)
    assert not {"<", ">", '"'} & {*made}
    found = read(str(tag("p", value, attributes={"title": value})))
    assert [p for p in found.problems if "title=" not in p] == []
    assert "".join(found.text).replace("\r", "\n") == clean(value)


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
READS: list[Callable[[Value], Any]] = [
    lambda v: v.number, lambda v: v.count, lambda v: v.text, lambda v: v.flag,
    lambda v: v.texts(), lambda v: v.numbers(), lambda v: list(v.items()), lambda v: v["a"]["b"],
]  # fmt: skip


@given(JSON, st.sampled_from(READS))
def test_any_value_is_read_or_named_as_damaged(value: Any, reads: Callable[[Value], Any]) -> None:
    refused = ""
    try:
        reads(Value(value, "file"))
    except DamagedError as error:
        refused = str(error)
    assert not refused or refused.startswith("file")


@given(st.data())
def test_any_json_in_any_place_is_shown_or_refused(data: st.DataObject) -> None:
    """A value of any kind in the place of any part: no error but InputError."""
    from mlxstacks.report.find import Source
    from mlxstacks.report.runs import run_of

    file, document = data.draw(st.sampled_from(list(every_report().values())))
    document = json.loads(json.dumps(document))
    place = document
    while True:
        key = data.draw(st.sampled_from(list(place)))
        if not (isinstance(place[key], dict) and place[key]) or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    kind = document.get("kind", find.RESULT_FILES[file])
    if isinstance(kind, str):
        refused = ""
        try:
            run_of(Source("run", file, kind, "0" * 64, document), "run")
        except InputError as error:
            refused = str(error)
        assert not refused or "run/" in refused


def test_an_svg_keeps_its_labels_and_loses_addresses() -> None:
    svg = (
        '<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://w">\n'
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 36">\n<metadata>http://x'
        '</metadata>\n<defs>\n<style type="text/css">*{}</style>\n</defs>\n<g id="a">'
        '<use xlink:href="#m" style="fill: #0072b2"/><path clip-path="url(#p)"/>'
        '<text>id="b" #0072b2</text></g><g id="m"/><g id="p"/></svg>'
    )
    found = inline_svg(svg, "plot", 'what "it" shows')
    assert 'href="#plot-m" style="fill: var(--series-0)"' in found
    assert "url(#plot-p)" in found
    assert 'id="plot-a"' in found
    assert '<text>id="b" #0072b2</text>' in found
    assert "http" not in found
    assert "<style" not in found
    assert "what &quot;it&quot; shows" in found
    assert "width:96px" in found
    with pytest.raises(InputError, match="no SVG"):
        inline_svg("<svg></svg>", "plot", "")
