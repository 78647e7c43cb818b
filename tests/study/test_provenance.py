"""A report's digests against the files beside it.

Run: pytest tests/study/test_provenance.py
"""

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.study import integrity as provenance_module
from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.integrity import Checked, check_provenance, of_bytes
from tests.studies.answer_files import forge, rows_of

ROWS = [{"item_id": str(place), "pick": 0} for place in range(4)]


@pytest.fixture
def made(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Of a directory with answers, of which a report uses the first three, and a split."""
    log = AnswerLog(tmp_path / "answers" / "a1.jsonl", {"arm": "a1"})
    log.begin()
    log.append(ROWS)
    (tmp_path / "split.json").write_bytes(b"{}")
    return {"answers/a1.jsonl": log.provenance(3), "split.json": of_bytes(b"{}")}


def test_what_was_not_touched_is_the_same(tmp_path: Path, made: dict[str, Any]) -> None:
    assert check_provenance(tmp_path, made) == Checked(2, (), ())
    (tmp_path / "split.json").unlink()
    assert check_provenance(tmp_path, made) == Checked(1, (), ("split.json",))


def test_what_was_changed_is_named(tmp_path: Path, made: dict[str, Any]) -> None:
    path = tmp_path / "answers" / "a1.jsonl"
    whole = path.read_bytes()

    def other() -> str:
        (found,) = check_provenance(tmp_path, made).other
        return found

    path.write_bytes(whole.replace(b'"pick": 0', b'"pick": 1', 1))
    assert other() == (
        "answers/a1.jsonl is not what the result was made from: line 2: does not follow from the "
        "lines above it, so it was changed, or lines were removed, added or moved"
    )
    header, *rows = rows_of(path)
    forge(path, [header, *rows])
    assert other().endswith("it holds other answers")
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    assert other().endswith("it holds 2 of 3 answers")
    path.write_bytes(b"")
    assert other().endswith("it holds 0 of 3 answers")
    path.write_bytes(whole)
    (tmp_path / "split.json").write_bytes(b"{ }")
    assert other() == "split.json is not what the result was made from: it was changed"


def test_a_stranger_s_report_reads_nothing_but_its_own_plain_files(tmp_path: Path) -> None:
    inside = tmp_path / "run"
    inside.mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(b"x")
    (inside / "link").symlink_to(secret)
    (inside / "circle").symlink_to(inside / "circle")
    os.mkfifo(inside / "pipe")
    entry = of_bytes(b"x")
    for name in ("../secret", str(secret), "link", "circle", "pipe", ".", "a\x00b"):
        found = check_provenance(inside, {name: entry})
        assert (found.same, len(found.other)) == (0, 1), name
    (inside / "file").write_bytes(b"x")
    for wrong in ({}, 3, {"answers": -1}, {"answers": "1"}, {"answers": True}, {"sha256": None}):
        assert len(check_provenance(inside, {"file": wrong}).other) == 1, wrong
    assert check_provenance(inside, {"file": entry, "f" * 5000: entry}).same == 1
    assert check_provenance(inside, dict.fromkeys(map(str, range(5001)), entry)).other


def test_lines_behind_the_answers_that_were_used_must_follow_too(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    path = tmp_path / "answers" / "a1.jsonl"
    path.write_bytes(path.read_bytes() + b"ab\n")
    (found,) = check_provenance(tmp_path, made).other
    assert "line 6: does not follow" in found


def test_one_file_under_many_names_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance_module, "_MOST_BYTES_IN_ALL", 250)
    (tmp_path / "file").write_bytes(b"x" * 100)
    names = [f"{'./' * times}file" for times in range(4)]
    found = check_provenance(tmp_path, dict.fromkeys(names, of_bytes(b"x" * 100)))
    assert found.same == 2
    assert [name in said for name, said in zip(names[2:], found.other, strict=True)] == [True] * 2
    assert "more than 250 bytes of files" in found.other[0]


def test_a_large_file_of_short_lines_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"ab\n" * 300_000)
    tracemalloc.start()
    try:
        found = check_provenance(tmp_path, {"file": {"answers": 1, "digest": ""}})
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
    assert len(found.other) == 1
