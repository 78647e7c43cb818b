"""Parquet, saved and cached data sets.

Run: pytest tests/data/test_arrow_sets.py
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxstacks.data import arrow_sets
from mlxstacks.data.settings import SourceSettings
from mlxstacks.data.sources import open_source
from mlxstacks.errors import InputError

ROWS = [{"question": f"q{i}", "answer": f"a{i}", "empty": None} for i in range(1000)]
SNAPSHOT = "0" * 40


def read(root: Path = Path(), **source: Any) -> list[tuple[str, dict[str, Any]]]:
    return list(open_source(SourceSettings(**source), root).rows)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot directory of data set org/set in an empty hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    repo = tmp_path / "hub" / "datasets--org--set"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(SNAPSHOT)
    snapshot = repo / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_data_set_in_the_hub_cache_is_read_and_its_code_is_not_run(hub_cache: Path) -> None:
    (hub_cache / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (hub_cache / "test.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    (hub_cache / "set.py").write_text("raise SystemExit('code of a data set ran')\n")
    assert [row for _, row in read(dataset="org/set")] == ROWS
    opened = open_source(SourceSettings(dataset="org/set", split="test"), Path())
    assert list(opened.sha256()) == ["org/set/test.jsonl"]


@pytest.mark.usefixtures("hub_cache")
def test_a_data_set_that_is_not_cached_says_how_to_get_it() -> None:
    with pytest.raises(InputError, match=r"org/other: not in the cache.*nothing is downloaded.*hf"):
        read(dataset="org/other")


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/b/c", "", ".hidden", "a b"])
def test_only_ids_are_data_sets(name: str) -> None:
    with pytest.raises(ValueError, match=r"not a Hugging Face id|give path"):
        read(dataset=name)


def test_reading_lines_imports_none_of_it(tmp_path: Path) -> None:
    before = {"datasets", "pyarrow"} & set(sys.modules)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    assert read(tmp_path, path="rows.jsonl")
    assert {"datasets", "pyarrow"} & set(sys.modules) == before


def test_a_damaged_offset_is_not_followed(tmp_path: Path) -> None:
    import pyarrow

    table = pyarrow.table({"text": [f"row number {n}" for n in range(60)]})
    path = str(tmp_path / "a.arrow")
    with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    whole = (tmp_path / "a.arrow").read_bytes()
    offsets = np.array([0, 12, 24], np.int32).tobytes()
    (tmp_path / "a.arrow").write_bytes(
        whole.replace(offsets, np.array([0, 12, 2**31 - 1], np.int32).tobytes())
    )
    with pytest.raises(InputError, match=r"a\.arrow, rows 1 to 60: column 'text': "):
        read(tmp_path, path="a.arrow")


def test_parquet_rows_stream(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for name, rows in (("a", ROWS[:600]), ("b", ROWS[600:])):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"train-{name}.parquet")
    assert [row for _, row in read(tmp_path, path=".")] == ROWS
    found = read(tmp_path, path="train-b.parquet")
    assert found[1][0] == f"{tmp_path / 'train-b.parquet'}, row 2"
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"bad\.parquet: cannot be read as parquet"):
        read(tmp_path, path="bad.parquet")


def test_saved_sets(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select(range(3))}).save_to_disk(
        tmp_path / "two"
    )
    assert [row for _, row in read(tmp_path, path="one")] == ROWS
    assert [row for _, row in read(tmp_path, path="two", split="test")] == ROWS[:3]
    with pytest.raises(InputError, match="no split 'dev'; it has test, train"):
        read(tmp_path, path="two", split="dev")
    opened = open_source(SourceSettings(path="two"), tmp_path)
    assert list(opened.sha256()) == ["two/train/data-00000-of-00001.arrow"]
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as a saved data set"):
        read(tmp_path, path="one")


def test_media_are_neither_decoded_nor_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    text, place = datasets.Value("string"), {"bytes": datasets.Value("binary")}
    features = datasets.Features({"text": text, "image": {**place, "path": text}})
    picture = {"bytes": None, "path": "http://127.0.0.1:9/picture.png"}
    rows = datasets.Dataset.from_list([{"text": "a", "image": picture}], features=features)
    rows.save_to_disk(tmp_path / "saved")
    info = tmp_path / "saved" / "dataset_info.json"
    described = json.loads(info.read_text())
    described["features"]["image"] = {"_type": "Image"}
    info.write_text(json.dumps(described))
    for call in ("socket.socket.connect", "socket.getaddrinfo"):
        monkeypatch.setattr(call, _no_network)
    assert [row for _, row in read(tmp_path, path="saved")] == [{"text": "a", "image": picture}]


@pytest.mark.parametrize("name", ["../one/data-00000-of-00001.arrow", "/etc/passwd", "..", 3])
def test_a_saved_set_names_only_files_of_its_own(tmp_path: Path, name: object) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(InputError, match="is no name of a file in it"):
        read(tmp_path, path=".")


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path, hub_cache: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    os.mkfifo(tmp_path / "a.arrow")
    with pytest.raises(InputError, match=r"a\.arrow: not a regular file"):
        read(tmp_path, path=".")
    main = hub_cache.parents[1] / "refs" / "main"
    main.unlink()
    os.mkfifo(main)
    with pytest.raises(InputError, match=r"refs/main: not a regular file"):
        read(dataset="org/set")


@pytest.mark.parametrize("kind", ["text", "year", "zone"])
def test_a_value_that_python_cannot_hold_names_its_column(tmp_path: Path, kind: str) -> None:
    import pyarrow
    from pyarrow import parquet

    column = {
        "text": pyarrow.array([b"\xff"]).view(pyarrow.string()),
        "year": pyarrow.array([2**62], pyarrow.timestamp("us")),
        "zone": pyarrow.array([0], pyarrow.timestamp("us", tz="Mars/Phobos")),
    }[kind]
    parquet.write_table(pyarrow.table({"text": ["a"], "odd": column}), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"rows\.parquet, rows 1 to 1: column 'odd': "):
        read(tmp_path, path="rows.parquet")


def test_a_cached_set_is_read_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `load_dataset` prepares for an id lies in the cache as its files say here."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", _no_network)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    prepared = datasets.load_dataset(
        "json", data_files=str(tmp_path / "train.jsonl"), cache_dir=str(tmp_path / "made")
    )["train"]
    made = Path(prepared.cache_files[0]["filename"]).parent
    target = tmp_path / "cache" / "org___set" / "default" / "0.0.0" / SNAPSHOT
    target.parent.mkdir(parents=True)
    made.rename(target)
    (target / "json-train.arrow").rename(target / "set-train.arrow")
    info = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "set"}))
    assert [row for _, row in read(dataset="org/set")] == ROWS
    opened = open_source(SourceSettings(dataset="org/set"), Path())
    assert list(opened.sha256()) == ["org/set/set-train.arrow"]
    with pytest.raises(InputError, match="org/set: the cached data set cannot be read"):
        read(dataset="org/set", split="test")
    with pytest.raises(InputError, match="org/set: the cached data set cannot be read"):
        read(dataset="org/set", name="other")


def _no_network(*arguments: Any) -> None:
    raise AssertionError("the network was asked")


@pytest.mark.parametrize("kind", ["cell", "list", "runs", "dictionary"])
def test_a_small_file_does_not_become_gigabytes(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.setattr(arrow_sets, "_MOST_BYTES", 1 << 20)
    monkeypatch.setattr(arrow_sets, "_MOST_VALUES", 1 << 12)
    monkeypatch.setattr(arrow_sets, "_MOST_ROW_VALUES", 1 << 12)
    columns = {
        "cell": pa.array(["x" * 3_000_000, "y"]),
        "list": pa.array([[{"role": 0}] * 5000, []]),
        "runs": pa.array(np.zeros(100_000, np.int8)),
        "dictionary": pa.DictionaryArray.from_arrays(np.zeros(30_000, np.int8), ["y" * 1000]),
    }
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": columns[kind]}), file, compression="zstd")
    expected = "more than 4,096 values in a row" if kind == "list" else "1,000 times its file"
    with pytest.raises(InputError, match=rf"a\.parquet.*{expected}"):
        read(path=str(file))


def test_columns_of_many_numbers_and_of_categories_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names = [f"name {n}" for n in range(20_000)]
    columns = {
        "text": pa.array(["x"] * 600),
        "embedding": pa.array([np.zeros(5000, np.float32)] * 600),
        "kind": pa.DictionaryArray.from_arrays(np.arange(600, dtype=np.int32), names),
        "rare": pa.DictionaryArray.from_arrays(np.zeros(600, np.int8), ["a", "b" * 900_000]),
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = [row for _, row in read(path=str(tmp_path / "a.parquet"))]
    assert len(rows) == 600
    assert (rows[599]["kind"], rows[599]["rare"], len(rows[599]["embedding"])) == (
        "name 599",
        "a",
        5000,
    )


def test_a_damaged_row_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    bad = pa.array([b"x"] * 300 + [b"\xff"]).view(pa.string())
    parquet.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="rows 257 to 301: column 'text'"):
        read(path=str(tmp_path / "a.parquet"))
