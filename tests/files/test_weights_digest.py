"""The digest of a model's bytes: what it covers, and the file that remembers it.

Run: pytest tests/files/test_weights_digest.py
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from mlxstacks.errors import CheckpointError
from mlxstacks.files import checkpoint as checkpoint_module
from mlxstacks.files.checkpoint import (
    CACHE_NAME,
    check_unchanged,
    fingerprint,
    linking,
    open_checkpoint,
)
from tests.files.raw import change_between_samples, sampled_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return sampled_model(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache file of an empty cache, into which files go however new they are."""
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoint_module, "CLOCK_STEP_NS", -(2**62))
    monkeypatch.setattr(checkpoint_module, "_known", {})
    return tmp_path / "cache" / CACHE_NAME


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are read."""
    names: list[str] = []
    read = checkpoint_module._tensor_sha256

    def read_and_note(info: checkpoint_module.TensorInfo) -> str:
        names.append(info.name)
        return read(info)

    monkeypatch.setattr(checkpoint_module, "_tensor_sha256", read_and_note)
    return names


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_known", {})


def print_of(model: Path) -> str:
    return fingerprint(open_checkpoint(model))


def test_a_known_state_is_not_read_again(
    model: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(model)
    first = fingerprint(checkpoint)
    assert sorted(reads) == ["large", "small"]
    assert cache.stat().st_mode & 0o777 == 0o600
    forget_process(monkeypatch)
    monkeypatch.setattr(checkpoint_module, "read_range", None)
    monkeypatch.setattr(checkpoint_module, "read_header", None)
    assert fingerprint(checkpoint) == first
    assert len(reads) == 2


def test_a_byte_between_samples_with_mtime_put_back_is_seen(model: Path, cache: Path) -> None:
    before, sampled = print_of(model), fingerprint(open_checkpoint(model), like="0" * 64)
    change_between_samples(model, keep_mtime=True)
    assert print_of(model) != before
    assert fingerprint(open_checkpoint(model), like=sampled) == sampled
    with pytest.raises(CheckpointError, match="changed during the run"):
        check_unchanged(model, before)


def test_a_file_changed_just_now_is_not_remembered(
    model: Path, cache: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "CLOCK_STEP_NS", 3600 * 10**9)
    assert print_of(model) == print_of(model)
    assert len(reads) == 4
    assert not cache.exists()


@pytest.mark.parametrize("changed", [False, True])
def test_a_link_of_our_own_leaves_the_digest_known(
    changed: bool, model: Path, cache: Path, reads: list[str], tmp_path: Path
) -> None:
    before, file = print_of(model), model / "model.safetensors"
    with linking([file]):
        (tmp_path / "link").hardlink_to(file)
        if changed:
            change_between_samples(model)
    assert (print_of(model) == before) is not changed
    assert len(reads) == (4 if changed else 2)


def test_a_copy_and_a_moved_model_have_the_same_fingerprint(model: Path, cache: Path) -> None:
    before = print_of(model)
    moved = model.rename(model.with_name("moved"))
    (moved / "model.safetensors").rename(moved / "model-other.safetensors")
    assert print_of(moved) == before
    assert len(json.loads(cache.read_text())) == 2


def hurt(cache: Path, name: str) -> None:
    """Damage the cache file, or poison it in a way that nobody may believe."""
    states = json.loads(cache.read_text())
    poisoned = json.dumps(dict.fromkeys(states, "0" * 64))
    contents = {
        "no JSON": b"\xff{",
        "a list": b"[]",
        "nested": b'{"a":' * 9000,
        "no digests": json.dumps(dict.fromkeys(states, "0" * 63)).encode(),
        "numbers": json.dumps(dict.fromkeys(states, 7)).encode(),
        "huge": poisoned.encode() + b" " * (1 << 20),
    }
    cache.write_bytes(contents.get(name, poisoned.encode()))
    if name == "open to others":
        cache.chmod(0o666)
    if name == "a link":
        cache.rename(cache.with_name("elsewhere"))
        cache.symlink_to("elsewhere")
    if name in ("a directory", "a pipe"):
        cache.unlink()
        make = Path.mkdir if name == "a directory" else os.mkfifo
        make(cache)


@pytest.mark.parametrize(
    "name",
    [
        "no JSON", "a list", "nested", "no digests", "numbers", "huge", "open to others", "a link",
        "a directory", "a pipe",
    ],
)  # fmt: skip
def test_a_bad_cache_file_is_not_believed(
    model: Path, cache: Path, reads: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = print_of(model)
    forget_process(monkeypatch)
    hurt(cache, name)
    assert print_of(model) == before
    assert len(reads) == 4


def test_a_cache_that_cannot_be_written_costs_one_hash_a_process(
    model: Path, cache: Path, reads: list[str]
) -> None:
    cache.parent.write_text("a file where the directory should be")
    assert print_of(model) == print_of(model)
    assert len(reads) == 2


def test_the_newest_entries_stay(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "MAX_ENTRIES", 2)
    states = []
    for _ in range(3):
        print_of(model)
        states.append(list(json.loads(cache.read_text()))[-1])
        os.utime(model / "model.safetensors")
    assert list(json.loads(cache.read_text())) == states[1:]


def test_two_processes_at_once_lose_no_entry(tmp_path: Path, cache: Path, model: Path) -> None:
    models = [sampled_model(tmp_path / f"model{i}") for i in range(2)]
    code = (
        "import sys; from mlxstacks.files import checkpoint as w; w.CLOCK_STEP_NS = -2**62\n"
        "from mlxstacks.files.checkpoint import fingerprint, open_checkpoint\n"
        "print(fingerprint(open_checkpoint(sys.argv[1])))"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        for path in models
    ]
    assert {child.communicate()[0].strip() for child in children} == {print_of(model)}
    assert len(json.loads(cache.read_text())) == 3


def test_the_cache_file_is_written_by_one_at_a_time(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "_LOCK_SECONDS", 0)
    cache.parent.mkdir()
    with filelock.FileLock(f"{cache}.lock"):
        before = print_of(model)
        assert not cache.exists()
    forget_process(monkeypatch)
    assert print_of(model) == before
    assert cache.exists()


def test_a_tensor_of_many_chunks_has_the_same_digest(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = model / "model.safetensors"
    content = large.read_bytes()
    large.write_bytes(content[:-70_000] + bytes(i % 251 for i in range(70_000)))
    before = print_of(model)
    forget_process(monkeypatch)
    cache.unlink()
    monkeypatch.setattr(checkpoint_module, "_CHUNK_BYTES", 4001)
    assert print_of(model) == before


@pytest.mark.parametrize("changes", [1, 99])
def test_a_model_that_goes_on_changing_while_it_is_read_is_refused(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """Once may be a link that another process makes, which changes ctime alone."""
    before = print_of(model)
    forget_process(monkeypatch)
    cache.unlink()
    read, times = checkpoint_module._tensor_sha256, itertools.count()

    def read_and_change(info: checkpoint_module.TensorInfo) -> str:
        if (time_ns := next(times)) < changes:
            os.utime(model / "model.safetensors", ns=(0, time_ns))
        return read(info)

    monkeypatch.setattr(checkpoint_module, "_tensor_sha256", read_and_change)
    if changes == 1:
        assert print_of(model) == before
        return
    with pytest.raises(CheckpointError, match="changed each time it was read"):
        print_of(model)
    assert not cache.exists()


def test_another_header_than_the_opened_one_is_refused(model: Path, cache: Path) -> None:
    checkpoint = open_checkpoint(model)
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"small"', b'"smalL"'))
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        fingerprint(checkpoint)
