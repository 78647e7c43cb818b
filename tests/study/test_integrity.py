"""Files of outcomes that carry their digest. Run: pytest tests/studies/test_sealed.py"""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import MAX_JSON_BYTES, read_object
from mlxstacks.study.integrity import MOST_SEALED_BYTES, read_sealed, write_rows, write_sealed

VALUE: dict[str, Any] = {"plan_sha256": "a", "arms": {"base": {"acc": 0.1, "n": (1, None, "Bär")}}}
SAME = {"plan_sha256": "a", "arms": {"base": {"acc": 0.1, "n": [1, None, "Bär"]}}}


def test_what_was_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "harness" / "base.json"
    write_sealed(path, VALUE)
    assert read_sealed(path) == (SAME, path.read_bytes())
    write_sealed(path, {10: 1, 9: 2})  # type: ignore[dict-item]
    assert read_sealed(path)[0] == {"10": 1, "9": 2}


def test_what_is_larger_than_a_stranger_s_json_may_be_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_object.__defaults__ == (MAX_JSON_BYTES,)
    assert MOST_SEALED_BYTES > MAX_JSON_BYTES
    monkeypatch.setattr(read_object, "__defaults__", (100,))
    large = {"samples": "x" * 101}
    write_sealed(tmp_path / "base.json", large)
    assert read_sealed(tmp_path / "base.json")[0] == large


def test_no_value_can_be_changed_unseen(tmp_path: Path) -> None:
    """A bit of every byte: refused, or a blank that says nothing."""
    path = tmp_path / "base.json"
    write_sealed(path, VALUE)
    whole = path.read_bytes()
    refused = 0
    for place, byte in enumerate(whole):
        path.write_bytes(whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            found, _ = read_sealed(path)
        except InputError as error:
            refused += 1
            assert "base.json: " in str(error)  # noqa: PT017
            assert "remove it to make it again" in str(error)  # noqa: PT017
        else:
            assert found == SAME
    assert refused > len(json.dumps(VALUE))


def test_a_file_of_an_older_version_or_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    with pytest.raises(InputError, match=r"base\.json: No such file"):
        read_sealed(path)
    path.write_text(json.dumps(VALUE))
    with pytest.raises(InputError, match=r"carries no digest.*older version.*; ask again"):
        read_sealed(path, "ask again")


def test_rows_that_were_edited_are_made_again(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train.jsonl"
    data = write_rows(path, [{"text": "a"}, {"text": "ü"}])
    assert path.read_bytes() == data
    before = path.stat().st_mtime_ns
    write_rows(path, [{"text": "a"}, {"text": "ü"}])
    assert path.stat().st_mtime_ns == before
    path.write_bytes(data.replace(b"a", b"b"))
    assert write_rows(path, [{"text": "a"}, {"text": "ü"}]) == path.read_bytes() == data


def test_what_is_no_number_in_json_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    path.write_text('{"digest": "", "acc": NaN}')
    with pytest.raises(InputError, match=r"damaged \(NaN is not a JSON number"):
        read_sealed(path)
