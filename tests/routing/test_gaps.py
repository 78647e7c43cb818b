"""The log of gap events and its groups: what is kept, how it is read after a crash, who is alike.

Run: pytest tests/routing/test_gaps.py
"""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError, TargetError
from mlxstacks.routing.gaps import GapEvent, GapLog, cluster_gaps, is_loss_gap, older, read_gaps
from mlxstacks.routing.settings import RouteGapsSettings
from mlxstacks.studies.route.gaps import run

SCORES = {"code": 0.04, "math": 0.11}


def event(text: str, feature: Sequence[float] | None) -> GapEvent:
    values = None if feature is None else np.array(feature, dtype=np.float32)
    return GapEvent("2026-01-01T00:00:00.000+00:00", text, SCORES, values)


def test_an_event_comes_back_as_it_was(tmp_path: Path) -> None:
    log = GapLog(tmp_path / "new" / "gaps.jsonl")
    feature = np.linspace(-2, 2, 64, dtype=np.float32)
    log.add("Schrei \N{BELL} \ud800 \N{SNOWMAN}", SCORES, feature)
    found = read_gaps(log.path)
    (kept,) = found.events
    assert kept.text == "Schrei \N{BELL} ? \N{SNOWMAN}"
    assert dict(kept.scores) == SCORES
    assert kept.feature is not None
    np.testing.assert_array_equal(kept.feature, feature.astype(np.float16).astype(np.float32))
    assert found.damaged == 0


def test_text_is_cut_or_left_out_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    before = os.umask(0)
    try:
        GapLog(path).add("x" * 5000, SCORES, None)
    finally:
        os.umask(before)
    former = {"time": "then", "text": None, "scores": SCORES, "feature": None, "router": "c" * 64}
    with path.open("a") as log:
        log.write(json.dumps(former) + "\n")
    first, second = read_gaps(path).events
    assert first.text == "x" * 500
    assert second.text is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    GapLog(path).add("y", SCORES, None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_a_torn_line_costs_itself_alone(tmp_path: Path, cut: int) -> None:
    log = GapLog(tmp_path / "gaps.jsonl")
    for text in ("one", "two"):
        log.add(text, SCORES, np.ones(4))
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    log.add("three", SCORES, np.ones(4))
    found = read_gaps(log.path)
    # without its line break alone the second is whole
    whole = ["one", "two", "three"] if cut == 1 else ["one", "three"]
    assert [e.text for e in found.events] == whole
    assert found.damaged == (0 if cut == 1 else 1)


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff", b"[]", b"{}", b"null", b'"x"', b"[" * 5000, b"1e999",
        json.dumps({"time": 1, "text": "", "scores": {}, "feature": None}).encode(),
        json.dumps({"time": "", "text": "", "scores": {"a": "x"}, "feature": None}).encode(),
        json.dumps({"time": "", "text": "", "scores": {"a": 1e999}, "feature": None}).encode(),
        json.dumps({"time": "", "text": "", "scores": {}, "feature": "A"}).encode(),
        json.dumps({"time": "", "text": "", "scores": {}, "feature": "AHw="}).encode(),  # infinite
    ],
)  # fmt: skip
def test_lines_that_are_no_events_are_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "gaps.jsonl"
    GapLog(path).add("first", SCORES, None)
    with path.open("ab") as file:
        file.write(line + b"\n")
    GapLog(path).add("good", SCORES, None)
    found = read_gaps(path)
    assert ([e.text for e in found.events], found.damaged) == (["first", "good"], 1)


def test_the_log_stays_within_its_bytes_and_keeps_the_newest(tmp_path: Path) -> None:
    log = GapLog(tmp_path / "gaps.jsonl", max_bytes=4000)
    for number in range(100):
        log.add(f"prompt {number}", SCORES, None)
        sizes = [p.stat().st_size for p in (log.path, older(log.path)) if p.exists()]
        assert sum(sizes) <= 4000
    texts = [e.text for e in read_gaps(log.path).events]
    assert texts == [f"prompt {number}" for number in range(100 - len(texts), 100)]
    assert len(texts) > 10
    log.path.unlink()
    assert read_gaps(log.path).events  # the older half alone


def test_processes_share_a_log(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    program = (
        "import sys; from mlxstacks.routing.gaps import GapLog\n"
        "log = GapLog(sys.argv[1], max_bytes=30_000)\n"
        "for n in range(100): log.add(sys.argv[2] + str(n), {'a': 0.1}, None)"
    )
    workers = [
        subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in ("x", "y")
    ]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    found = read_gaps(path)
    assert found.damaged == 0
    assert {"x99", "y99"} <= {e.text for e in found.events}


def test_what_cannot_be_written_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TargetError, match="link"):
        GapLog(tmp_path / "link").add("x", SCORES, None)
    (tmp_path / "file").touch()
    with pytest.raises(TargetError):
        GapLog(tmp_path / "file" / "gaps.jsonl").add("x", SCORES, None)
    with pytest.raises(TargetError):
        GapLog(tmp_path).add("x", SCORES, None)
    log = GapLog(tmp_path / "gaps.jsonl")
    for scores, feature in [({"a": float("nan")}, None), (SCORES, np.array([1, np.inf]))]:
        with pytest.raises(ValueError, match="finite"):
            log.add("x", scores, feature)
    assert not log.path.exists()


def test_a_log_that_is_not_there_says_who_writes_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no log of gaps"):
        read_gaps(tmp_path / "gaps.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        read_gaps(tmp_path / "pipe")


def test_a_feature_beyond_float16_keeps_its_direction(tmp_path: Path) -> None:
    log = GapLog(tmp_path / "gaps.jsonl")
    log.add("x", SCORES, np.array([3e6, -4e6]))
    feature = read_gaps(log.path).events[0].feature
    assert feature is not None
    np.testing.assert_allclose(feature / np.linalg.norm(feature), [0.6, -0.8], atol=1e-3)


# --- when it is a gap -----------------------------------------------------------------------------


def test_the_loss_test_asks_for_a_hundredth() -> None:
    assert is_loss_gap(2.0, 1.9950)
    assert is_loss_gap(2.0, 2.0)
    assert not is_loss_gap(2.0, 1.98)
    # exactly the threshold is an improvement that counts, in numbers that are exact
    assert not is_loss_gap(1.0, 0.75, 0.25)


# --- groups ---------------------------------------------------------------------------------------


def test_two_kinds_of_prompts_are_two_groups() -> None:
    rng = np.random.default_rng(0)
    kinds = {"song": np.eye(16)[0], "poem": np.eye(16)[1]}
    events = [
        event(f"{kind} {n}", kinds[kind] + 0.05 * rng.normal(size=16))
        for n in range(9)
        for kind in (("song", "poem") if n < 4 else ("song",))
    ]
    events += [event("alone", np.eye(16)[5]), event("no feature", None), event("other", [1.0, 0])]
    found = cluster_gaps(events)
    assert [len(cluster.events) for cluster in found] == [9, 4, 1, 1]
    assert {text.split()[0] for text in found[0].prompts(20)} == {"song"}
    assert {text.split()[0] for text in found[1].prompts(20)} == {"poem"}
    assert found[0].cohesion > 0.95
    assert found[0].mean_scores() == pytest.approx({"math": 0.11, "code": 0.04})


def test_what_two_routers_log_shares_no_group(tmp_path: Path) -> None:
    log = GapLog(tmp_path / "gaps.jsonl")
    for number in range(6):
        log.add(f"prompt {number}", SCORES, np.ones(4), router="ab"[number % 2])
    events = read_gaps(log.path).events
    found = cluster_gaps(events)
    assert [{e.router for e in cluster.events} for cluster in found] == [{"a"}, {"b"}]
    assert [cluster.as_json(1, 3)["router"] for cluster in found] == ["a", "b"]


def test_features_that_all_point_one_way_are_told_apart_by_centring() -> None:
    events = [event(str(n), np.eye(8)[n % 2] + 10) for n in range(10)]
    assert [len(c.events) for c in cluster_gaps(events)] == [10]
    assert [len(c.events) for c in cluster_gaps(events, centre=True)] == [5, 5]


points = st.lists(
    st.lists(st.floats(-1, 1, width=16), min_size=3, max_size=3), min_size=1, max_size=12
)


@given(points)
def test_groups_are_a_partition_around_their_centres(vectors: list[list[float]]) -> None:
    """Laws: every event is in one group; members are within the cosine of the centre; centres are
    not within it of each other; the same events give the same groups.
    """
    events = [event(str(n), vector) for n, vector in enumerate(vectors)]
    found = cluster_gaps(events)
    assert sorted(e.text or "" for c in found for e in c.events) == sorted(
        map(str, range(len(events)))
    )
    sizes = [len(c.events) for c in found]
    assert sizes == sorted(sizes, reverse=True)

    def cosine(a: GapEvent, b: GapEvent) -> float:
        assert a.feature is not None
        assert b.feature is not None
        lengths = float(np.linalg.norm(a.feature)) * float(np.linalg.norm(b.feature))
        return float(a.feature @ b.feature) / lengths if lengths > 1e-12 else 0.0

    for cluster in found:
        assert all(cosine(cluster.events[0], e) > 0.8 - 1e-4 for e in cluster.events[1:])
    centres = [c.events[0] for c in found]
    for i, a in enumerate(centres):
        assert all(cosine(a, b) <= 0.8 + 1e-4 for b in centres[:i])
    again = cluster_gaps(events)
    assert [[e.text for e in c.events] for c in again] == [
        [e.text for e in c.events] for c in found
    ]


# --- the command ----------------------------------------------------------------------------------


def write_log(path: Path, count: int = 6) -> None:
    log = GapLog(path)
    for number in range(count):
        log.add(f"Sing [song] {number}", SCORES, np.array([1.0, 0.01 * number]))
    log.add("What is wine?", SCORES, np.array([0.0, 1.0]))
    log.add("no vector", SCORES, None)


def test_a_domain_is_proposed_from_so_many_events(tmp_path: Path) -> None:
    write_log(tmp_path / "gaps.jsonl")
    settings = RouteGapsSettings(log_path=str(tmp_path / "gaps.jsonl"), minimum_events=7)
    assert "no domain is proposed: the largest group has 6" in run(settings).verdict
    enough = run(settings.model_copy(update={"minimum_events": 6}))
    assert [*enough.table("groups")["events"]] == [6, 1]
    assert "1 group has 6 events or more" in enough.verdict
    document = enough.data
    assert [c["propose_domain"] for c in document["clusters"]] == [True, False]
    assert (document["events"], document["events_without_feature"]) == (8, 1)


@pytest.mark.parametrize("kind", ["json", "fifo", "rotated"])
def test_a_file_of_somebody_else_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "notes"
    foreign = older(path) if kind == "rotated" else path
    if kind == "fifo":
        os.mkfifo(foreign)
    else:
        foreign.write_text('{"mine": 1}\n')
    foreign.chmod(0o644)
    log = GapLog(path, max_bytes=300)
    if kind == "rotated":
        log.add("x", SCORES, None)
    with pytest.raises(TargetError, match="something else than a log of gaps"):
        log.add("y", SCORES, None)
    assert stat.S_IMODE(foreign.stat().st_mode) == 0o644
    assert kind == "fifo" or foreign.read_text() == '{"mine": 1}\n'


def test_processes_that_rotate_the_log_do_not_wait_for_each_other(tmp_path: Path) -> None:
    code = (
        "import sys; from mlxstacks.routing.gaps import GapLog\n"
        "log = GapLog(sys.argv[1], max_bytes=600)\n"
        "for number in range(60): log.add(f'prompt {number}', {'a': 0.5}, None)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "gaps.jsonl")]
    writers = [subprocess.Popen(command) for _ in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
