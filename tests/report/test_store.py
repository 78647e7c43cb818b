"""The page of a store: the result of its training, else what its manifest says.

Run: pytest tests/report/test_store.py
"""

from pathlib import Path

import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.report.settings import ReportSettings
from mlxstacks.report.write import write_report
from mlxstacks.study.document import RESULT
from mlxstacks.study.integrity import of_bytes
from tests.report.cases import ROWS, every_report, write_run


def page_of(run: Path) -> str:
    pytest.importorskip("matplotlib")
    page = run.parent / "page"
    write_report(ReportSettings(runs=(str(run),), save_path=str(page), force=True))
    return " ".join((page / "index.html").read_text("utf-8").split())


def write_store(run: Path) -> Path:
    domains = tuple(DomainRecord(name, True, (), (2.0, 1.0), 1.0) for name in ("a", "b"))
    (run / "stacks").mkdir(parents=True)
    manifest = Manifest("base", "0" * 64, domains, {"ungated": ROWS}).document()
    return write_run(run, "manifest.json", manifest)


def test_a_store_without_a_training_is_shown_by_its_manifest(tmp_path: Path) -> None:
    page = page_of(write_store(tmp_path / "store"))
    assert "2 domains, 0 stacks; with every stack on, the loss of a moved by +0.500" in page
    assert "a lost most, +0.5000 to 1.5000" in page
    assert "Losses, ungated: every stack on" in page


def test_a_training_that_was_changed_is_marked(tmp_path: Path) -> None:
    run = write_store(tmp_path / "store")
    file = write_run(run, RESULT, every_report()["stack"][1]) / RESULT
    text = file.read_text()
    file.write_text(text.replace('"title": "', '"title": "Better ', 1))
    assert file.read_text() != text
    page = page_of(run)
    assert "EXPLORATORY" in page
    assert "result.json was changed after the run" in page


def test_a_training_is_marked_where_its_stacks_were_changed_since(tmp_path: Path) -> None:
    run = write_store(tmp_path / "store")
    (run / "stacks" / "a-r1.safetensors").write_bytes(b"1")
    training = every_report()["stack"][1]
    training["provenance"] = {"stacks/a-r1.safetensors": of_bytes(b"1")}
    assert "EXPLORATORY" not in page_of(write_run(run, RESULT, training))
    (run / "stacks" / "a-r1.safetensors").write_bytes(b"2")
    page = page_of(run)
    assert "stacks/a-r1.safetensors is not what the result was made from: it was changed" in page


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    run = write_store(tmp_path / "store")
    (run / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"manifest.json: damaged"):
        page_of(run)
