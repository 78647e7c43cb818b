"""The session benchmark answers nano's held-out prompts and prints the figures that RESULTS.md has.

Run: pytest tests/routing/test_routed_session.py
"""

import json

import pytest

from benchmarks import routed_session


def test_a_session_loads_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--prompts", "4", "--runs", "4", "--stacks", "2", "--max-tokens", "1"]
    monkeypatch.setattr("sys.argv", ["routed_session", *options])
    routed_session.main()
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]
    assert row["prompts"] == 4
    assert 1 <= row["routed_to_a_stack"] <= 4
    assert row["loads"] >= 1
    assert row["hit_rate"] < 1
    assert row["router_ms_median"] > 0 < row["load_ms_median"]


def test_labels_are_hits_where_they_were_used_last() -> None:
    assert routed_session.label_hits(["a", "b", "a", "c", "b"], 2) == 1 / 5
