"""Files, arrays and directories as sources: streamed, named in every error.

Run: pytest tests/data/test_sources.py
"""

import hashlib
import json
import os
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlxstacks.data import json_rows
from mlxstacks.data.settings import DomainDataSettings, SourceSettings
from mlxstacks.data.sources import data_files, open_source, read_source
from mlxstacks.errors import InputError


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: str | Path, root: Path, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    return list(open_source(SourceSettings(path=str(path), **options), root).rows)


def test_a_relative_path_begins_at_the_root(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a" / "rows.jsonl", [{"text": "one"}, {"text": "two"}])
    opened = open_source(SourceSettings(path="a/rows.jsonl"), tmp_path)
    where = [f"{path}, line 1", f"{path}, line 2"]
    assert list(opened.rows) == [(where[0], {"text": "one"}), (where[1], {"text": "two"})]
    assert opened.sha256() == {"a/rows.jsonl": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert rows_of(path, Path("/nowhere"))[1][1] == {"text": "two"}


def test_lines_are_read_as_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n{broken\n')
    rows = open_source(SourceSettings(path=str(path)), tmp_path).rows
    assert len(list(islice(rows, 2))) == 2
    with pytest.raises(InputError, match=r"rows\.jsonl, line 3: not JSON"):
        next(rows)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b"", "no rows"),
        ("rows.jsonl", b"\n\n", "no rows"),
        ("rows.jsonl", b'["a"]\n', "line 1: got list, need an object"),
        ("rows.jsonl", b'{"text": "\xff"}\n', "line 1: not JSON"),
        (
            "rows.jsonl",
            b'{"a": 1}\n{"a": "\\uD800"}\n',
            r"line 2: \\ud800 is half a char",
        ),
        ("rows.json", b'[{"a": 1},\n{"\\udc00": 1}]', r"line 2: \\udc00 is half a char"),
        ("rows.json", b"[]", "the array is empty"),
        ("rows.json", b'[{"a": 1},\n 3]', "line 2: got int, need an object"),
        ("rows.json", b'[{"a": 1}\n {"a": 2}]', "line 2: not JSON .need , or ]"),
        ("rows.json", b'[{"a": 1},\n{"a":\n oops}]', "line 3: not JSON"),
        ("rows.json", b'[{"a": 1},\n', "line 2: not JSON"),
        ("rows.json", b'[{"a": 1}', "line 1: not JSON .need , or ]"),
        ("rows.json", b'[{"a": 1}] []', "text after the end"),
        ("rows.json", b'[{"a": "\xff"}]', "not UTF-8"),
        ("rows.json", b"[" * 100_000, "line 1: not JSON"),
        ("rows.json", b"", "no rows"),
    ],
    ids=str,
)
def test_broken_files_name_file_and_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name}.*{message}"):
        rows_of(name, tmp_path)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.jsonl: no such file.*put the data there"):
        open_source(SourceSettings(path="gone.jsonl"), tmp_path)
    with pytest.raises(InputError, match="not a usable path"):
        open_source(SourceSettings(path="~nobody-of-this-name/rows.jsonl"), tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
records = st.lists(st.dictionaries(st.text(max_size=4), values, max_size=3), min_size=1, max_size=6)


@given(records, st.integers(1, 40), st.sampled_from([None, 1, "\t"]), st.booleans())
def test_an_array_reads_as_json_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    chunk: int,
    indent: int | str | None,
    ascii_only: bool,
) -> None:
    """Whatever the size of the pieces in which the file is read."""
    path = tmp_path_factory.mktemp("array") / "rows.json"
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "CHUNK_BYTES", chunk)
        found = list(json_rows.array_records(path))
    assert [record for _, record in found] == rows
    lines = [line for line, _ in found]
    assert lines == sorted(lines)
    assert all(text.splitlines()[line - 1].lstrip("[ \t,").startswith("{") for line in lines)


def test_a_pipe_or_a_device_is_called_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in ("rows.jsonl", "/dev/null"):
        with pytest.raises(InputError, match="a pipe or a device, and rows are read more than"):
            open_source(SourceSettings(path=path), tmp_path)


def test_halves_that_belong_together_are_one_character(tmp_path: Path) -> None:
    for name, content in {
        "a.jsonl": r'{"a": "\ud83d\uDE00"}',
        "a.json": r'[{"a": "\ud83d\uDE00"}]',
    }.items():
        (tmp_path / name).write_text(content)
        assert [row for _, row in rows_of(name, tmp_path)] == [{"a": "\U0001f600"}]


def test_a_line_without_end_is_counted_and_refused_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", 1000)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n \n' + " " * 3_000 + "x" * 300_000 + "\n\n" + '{"a": 2}')
    tracemalloc.start()
    assert json_rows.count_rows(path) == 3
    with pytest.raises(InputError, match="line 3: 1,000 bytes or more"):
        rows_of(path, tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 100_000


def test_an_array_is_read_in_pieces(tmp_path: Path) -> None:
    """An error far behind does not matter to who reads only the first rows."""
    path = tmp_path / "rows.json"
    path.write_text("[" + ",\n".join('{"text": "abc"}' for _ in range(200_000)) + ", oops")
    rows = open_source(SourceSettings(path="rows.json"), tmp_path).rows
    assert len(list(islice(rows, 10))) == 10


def test_a_broken_element_does_not_pull_in_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(json_rows, "CHUNK_BYTES", 100)
    read: list[int] = []
    original = json_rows._Text._read

    def counted(self: Any, least: int = 1) -> bool:
        read.append(least)
        return original(self, least)

    monkeypatch.setattr(json_rows._Text, "_read", counted)
    path = tmp_path / "rows.json"
    path.write_text('[{"a": oops, "b": "' + "x" * 100_000 + '"}]')
    with pytest.raises(InputError, match="line 1: not JSON"):
        rows_of(path, tmp_path)
    assert sum(read) < 5000


# --- directories ----------------------------------------------------------------------------------


def test_files_of_a_split_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("train-00001-of-00002", "train-00000-of-00002", "test-00000-of-00001"):
        write_lines(tmp_path / "d" / f"{name}.jsonl", [{"text": name}])
    write_lines(tmp_path / "d" / ".cache" / "train.jsonl", [{"text": "hidden"}])
    (tmp_path / "d" / "dataset_infos.json").write_text("{}")
    found = [row["text"] for _, row in rows_of("d", tmp_path)]
    assert found == ["train-00000-of-00002", "train-00001-of-00002"]
    opened = open_source(SourceSettings(path="d", split="test"), tmp_path)
    assert list(opened.sha256()) == ["d/test-00000-of-00001.jsonl"]


def test_files_that_name_no_split_are_train(tmp_path: Path) -> None:
    write_lines(tmp_path / "one.jsonl", [{"text": "1"}])
    write_lines(tmp_path / "two.jsonl", [{"text": "2"}])
    assert len(data_files(tmp_path, "train", "d")) == 2
    with pytest.raises(InputError, match=r"no file of split 'test'; .* has one.jsonl, two.jsonl"):
        data_files(tmp_path, "test", "d")


def test_a_file_of_another_split_is_never_train(tmp_path: Path) -> None:
    write_lines(tmp_path / "validation.jsonl", [{"text": "1"}])
    with pytest.raises(InputError, match="no file of split 'train'"):
        data_files(tmp_path, "train", "d")


def test_several_configurations_need_a_choice(tmp_path: Path) -> None:
    for name in ("en", "de"):
        write_lines(tmp_path / name / "train.jsonl", [{"text": name}])
    with pytest.raises(InputError, match=r"in several folders .de, en."):
        data_files(tmp_path, "train", "d")
    assert data_files(tmp_path, "train", "d", "de") == [tmp_path / "de" / "train.jsonl"]
    with pytest.raises(InputError, match=r"d/fr: holds no \.jsonl"):
        data_files(tmp_path, "train", "d", "fr")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no \.jsonl, \.json, \.parquet, \.arrow file"):
        rows_of("empty", tmp_path)


# --- settings -------------------------------------------------------------------------------------


def test_a_plain_path_is_a_source() -> None:
    by_path = DomainDataSettings.model_validate({"sources": "a.jsonl"})
    assert by_path.sources == (SourceSettings(path="a.jsonl"),)
    both = DomainDataSettings.model_validate({"sources": ["a.jsonl", {"dataset": "x/y"}]})
    assert [source.label for source in both.sources] == ["a.jsonl", "x/y"]
    assert DomainDataSettings.model_validate(both.model_dump(mode="json")) == both


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{}]}, "give path .* or dataset"),
        ({"sources": [{"path": "a", "dataset": "b"}]}, "give path .* or dataset"),
        ({"sources": [{"path": "a", "name": "b"}]}, "name goes with dataset"),
        ({"sources": [{"path": "a", "cap": 0}]}, "greater than or equal to 1"),
        ({"sources": [{"path": "a", "format": "alpacca"}]}, "alpaca"),
        ({"sources": [{"path": "a", "format": "chat"}], "template": "alpaca"}, "format messages"),
        ({"sources": "a", "validation_fraction": 1}, "less than 1"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DomainDataSettings.model_validate(settings)


@pytest.mark.parametrize("name", ["rows.tsv", "rows.jsonl.GZ"])
def test_a_format_that_is_not_read_says_which_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("prompt,completion\na,b\n")
    for path in (name, "."):
        with pytest.raises(InputError, match=r"not read; allowed are \.jsonl, .*, \.txt: "):
            open_source(SourceSettings(path=path), tmp_path)
    (tmp_path / name).rename(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"arrow file; \.txt is read where it is named .*/a\.txt$"):
        open_source(SourceSettings(path="."), tmp_path)


def test_columns_of_csv_are_keys_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('\ufeffprompt,completion,system\n"a, ""b""\nc",d,\ne,f,g\n')
    assert [*open_source(SourceSettings(path="rows.csv"), tmp_path).rows] == [
        (f"{file}, line 3", {"prompt": 'a, "b"\nc', "completion": "d", "system": None}),
        (f"{file}, line 4", {"prompt": "e", "completion": "f", "system": "g"}),
    ]
    for between in ";\t":
        file.write_text(f"prompt{between}completion\na, b{between}c, d\n")
        assert [*open_source(SourceSettings(path="rows.csv"), tmp_path).rows] == [
            (f"{file}, line 2", {"prompt": "a, b", "completion": "c, d"})
        ]
    for nothing in ("", "prompt,completion\n"):
        file.write_text(nothing)
        with pytest.raises(InputError, match=r"rows\.csv: no rows$"):
            read_source(
                SourceSettings(path="rows.csv"), DomainDataSettings(sources=("rows.csv",)), tmp_path
            )
    file.write_text("prompt,prompt,completion\na,b,c\n")
    with pytest.raises(InputError, match="line 1: prompt: the column is there twice"):
        [*open_source(SourceSettings(path="rows.csv"), tmp_path).rows]
    file.write_text("prompt,completion\na,b\nc,d,e\n")
    with pytest.raises(InputError, match=r"rows\.csv, line 3: more cells than the 2 columns"):
        [*open_source(SourceSettings(path="rows.csv"), tmp_path).rows]
