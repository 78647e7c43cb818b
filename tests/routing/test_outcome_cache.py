"""Losses on disk: keys by content, whole lines or none, the same bytes for the same losses.

Run: pytest tests/routing/test_outcome_cache.py
"""

import json
from pathlib import Path

import pytest

from mlxstacks.data.rows import row_of
from mlxstacks.routing.candidate_losses import BASE_CONFIG, LossCache, config_key, pair_key

ROW = row_of([1, 2, 3, 4], [0, 0, 1, 1])
STACKS = {"a": ["aa", "ab"], "b": ["ba"], "c": ["ca"]}


def test_pair_key_holds_tokens_weights_and_context() -> None:
    key = pair_key("base", ROW)
    assert key == pair_key("base", row_of([1, 2, 3, 4], [0, 0, 1, 1]))
    others = [
        pair_key("other", ROW),
        pair_key("base", row_of([1, 2, 3, 5], [0, 0, 1, 1])),
        pair_key("base", row_of([1, 2, 3, 4], [0, 0, 0, 1])),
    ]
    assert len({key, *others}) == 4


def test_config_key_holds_hashes_and_weights_only() -> None:
    key = config_key({"a": 1.0, "b": 0.2}, STACKS)
    assert key == config_key({"b": 0.2, "a": 1.0}, STACKS)
    assert key == config_key({"a": 1.0, "b": 0.2, "c": 0.0}, STACKS)
    # a domain more, or another name for the same stacks
    assert key == config_key({"a": 1.0, "b": 0.2}, {**STACKS, "d": ["da"]})
    assert key == config_key({"x": 1.0, "b": 0.2}, {"x": ["aa", "ab"], "b": ["ba"]})
    assert key != config_key({"a": 1.0, "b": 0.3}, STACKS)
    assert key != config_key({"a": 1.0, "b": 0.2}, {**STACKS, "b": ["bb"]})
    assert key != config_key({"a": 1.0, "b": 0.2}, {**STACKS, "a": ["ab", "aa"]})
    assert config_key({}, STACKS) == config_key({"a": 0.0}, STACKS) == BASE_CONFIG


def test_what_was_added_is_there_for_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    cache = LossCache(path)
    cache.add([("p", "x", 0.1), ("p", "y", 1 / 3)])
    cache.add([("q", "x", 2.5)])
    cache.close()
    again = LossCache(path)
    assert [again.get("p", "x"), again.get("p", "y"), again.get("q", "x")] == [0.1, 1 / 3, 2.5]
    assert again.get("q", "y") is None
    assert again.notes == []
    again.close()


@pytest.mark.parametrize("kept", range(0, 60, 7))
def test_a_torn_last_line_counts_as_none_and_spoils_nothing(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "losses.jsonl"
    cache = LossCache(path)
    cache.add([("p", "x", 0.125)])
    whole = path.stat().st_size
    cache.add([("q", "x", 1.5), ("q", "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy", 2.5)])
    cache.close()
    assert path.stat().st_size - whole > 60
    path.write_bytes(path.read_bytes()[: whole + kept])
    again = LossCache(path)
    assert (len(again), again.get("p", "x"), again.get("q", "x")) == (1, 0.125, None)
    again.add([("q", "x", 1.5)])
    again.close()
    third = LossCache(path)
    assert (len(third), third.get("q", "x")) == (2, 1.5)
    assert third.notes == []
    third.close()


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    good = json.dumps({"losses": [["p", "x", 1.0]]})
    bad = ['{"losses": [["p", "y", NaN]]}', '{"losses": [["p", "z"]]}', "\0\0\0", "[1]", "{}"]
    bad += ['{"losses": [[1, "y", 2.0]]}', '{"losses": [["p", "y", "2"]]}', '{"losses": 3}']
    path.write_text("\n".join([*bad, good]) + "\n")
    cache = LossCache(known=[path])
    assert (len(cache), cache.get("p", "x")) == (1, 1.0)
    assert cache.notes == ["losses.jsonl: 8 lines cannot be read; their losses are made again."]


def test_the_final_file_does_not_depend_on_the_order_of_work(tmp_path: Path) -> None:
    records = [("p", "x", 0.1), ("q", "x", 0.2), ("p", "y", 0.3), ("r", "base", 0.4)]
    one, other = LossCache(), LossCache()
    one.add(records)
    for record in reversed(records):
        other.add([record])
    one.write(tmp_path / "one")
    other.write(tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert len(LossCache(known=[tmp_path / "one"])) == 4


def test_known_files_are_only_read(tmp_path: Path) -> None:
    known, path = tmp_path / "known", tmp_path / "work"
    before = LossCache(known)
    before.add([("p", "x", 1.0)])
    before.close()
    data = known.read_bytes()
    cache = LossCache(path, [known, tmp_path / "absent"])
    assert cache.get("p", "x") == 1.0
    cache.add([("p", "y", 2.0)])
    cache.close()
    assert known.read_bytes() == data
    assert len(LossCache(known=[path])) == 1
