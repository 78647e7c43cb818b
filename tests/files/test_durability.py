"""What is said to last through a power cut: bytes are synced, then named, then the name is synced.

Run: pytest tests/files/test_durability.py
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.files import outputs
from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.files.shards import ShardWriter
from mlxstacks.routing.conversation import _write_once
from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.engine import Step, run_step
from mlxstacks.training.loop import new_state, save_state
from mlxstacks.training.settings import OptimizerSettings
from tests.files.store_cases import make_store
from tests.training.tiny import TinyModel

# (what was done, inode, size then); a name is given by rename, replace, link or exchange.
Calls = list[tuple[str, int, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every fsync and every naming from now on, in order."""
    recorded: Calls = []

    def record(what: str, about: os.stat_result) -> None:
        recorded.append((what, about.st_ino, about.st_size))

    def naming(call: Callable[..., Any]) -> Callable[..., Any]:
        def named(source: Any, *rest: Any) -> Any:
            about = os.lstat(source)
            result = call(source, *rest)
            record("name", about)
            return result

        return named

    fsync = os.fsync

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        record("sync", os.fstat(descriptor))

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, naming(getattr(os, name)))
    monkeypatch.setattr(outputs, "_exchange", naming(outputs._exchange))
    return recorded


def moments(calls: Calls, what: str, path: Path) -> list[int]:
    about = path.stat()
    size = about.st_size if path.is_file() else None
    return [
        moment
        for moment, (done, inode, then) in enumerate(calls)
        if (done, inode) == (what, about.st_ino) and size in (None, then)
    ]


def json_file(place: Path) -> list[Path]:
    write_json(place / "x.json", {"a": [1] * 9})
    return [place / "x.json"]


def state_of_training(place: Path) -> list[Path]:
    path = place / "state.safetensors"
    save_state(path, TinyModel(), new_state(OptimizerSettings(steps=1, learning_rate=0.1)), "run")
    return [path]


def conversation(place: Path) -> list[Path]:
    _write_once(place / "chat.jsonl", b"{}\n")
    return [place / "chat.jsonl"]


def store(place: Path) -> list[Path]:
    made = make_store(place / "store", ["chat"], rounds=1)
    files = [made.path / record.file for record in made.manifest.files()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    return [*files, made.path / "manifest.json"]


@pytest.mark.parametrize("write", [json_file, state_of_training, conversation, store])
def test_a_file_is_synced_then_named_then_its_name_is_synced(
    tmp_path: Path, calls: Calls, write: Callable[[Path], list[Path]]
) -> None:
    for path in write(tmp_path):
        synced, named = moments(calls, "sync", path), moments(calls, "name", path)
        assert min(synced) < min(named) < max(moments(calls, "sync", path.parent)), path


def test_the_files_of_a_store_last_before_the_manifest_names_them(
    tmp_path: Path, calls: Calls
) -> None:
    *files, manifest = store(tmp_path)
    named = min(moments(calls, "name", manifest))
    for path in files:
        assert min(moments(calls, "sync", path.parent)) < named


@pytest.mark.parametrize("before", ["absent", "exchanged", "renamed"])
def test_a_directory_is_synced_whole_before_it_has_its_name(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    target = tmp_path / "out"

    def build() -> None:
        with staged_directory(target, force=True) as staged:
            (staged / "inner").mkdir()
            (staged / "inner" / "file").write_text("x")

    if before != "absent":
        build()
    if before == "renamed":
        monkeypatch.setattr(outputs, "_exchange", lambda first, second: False)
    calls.clear()
    build()
    named = max(moments(calls, "name", target))
    for path in (target, *target.rglob("*")):
        assert min(moments(calls, "sync", path)) < named, path
    assert max(moments(calls, "sync", tmp_path)) > named


def test_outputs_of_a_step_are_synced_before_they_are_named(tmp_path: Path, calls: Calls) -> None:
    step = Step("count", lambda out: (out / "counts").write_bytes(b"1"), ("counts",))
    run_step(step, tmp_path, None)
    path = tmp_path / "counts"
    written, record = moments(calls, "name", path), moments(calls, "name", tmp_path / "steps.json")
    assert min(moments(calls, "sync", path)) < min(written)
    assert min(written) < min(record)


def test_a_closed_shard_and_appended_answers_are_synced(tmp_path: Path, calls: Calls) -> None:
    shard = tmp_path / "model.safetensors"
    with ShardWriter(shard, [("a", "U8", (4,))]) as writer:
        writer.write("a", b"abcd")
    assert moments(calls, "sync", shard)
    log = AnswerLog(tmp_path / "answers.jsonl", {"arm": "base"})
    log.read(dict)
    log.begin()
    log.append([{"answer": 1}])
    assert moments(calls, "sync", log.path)
    assert moments(calls, "sync", tmp_path)
