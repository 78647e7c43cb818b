"""Output directories: whole or absent through kills, full disks, second runs; carried files.

pytest tests/files/test_outputs.py        (MLXSTACKS_SOAK=1 kills ten times as often)
"""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlxstacks
from mlxstacks.errors import CheckpointError, TargetError
from mlxstacks.files import disk, outputs
from mlxstacks.files import side_files as side_files_module
from mlxstacks.files.outputs import (
    MARK,
    check_target,
    entries,
    fill_cache,
    new_mark,
    staged_directory,
    write_json,
)
from mlxstacks.files.shards import ShardWriter
from mlxstacks.files.side_files import clone_or_link, copy_side_files, side_files
from mlxstacks.resources import resource_dir
from tests.files import kill_worker
from tests.files.raw import entry, file_bytes, reflink_disk, small_disk


def build(target: Path, text: str = "new", **options: Any) -> None:
    with staged_directory(target, **options) as staged:
        (staged / "file").write_text(text)


@pytest.mark.parametrize("name", ["thesis.tex", "manifest.json", "a.safetensors", MARK])
def test_force_spares_what_carries_no_mark(tmp_path: Path, name: str) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / name).write_text('{"years": 3}')
    with pytest.raises(TargetError, match=r"mlxstacks did not write it .* remove it yourself$"):
        build(tmp_path / "thesis", force=True)
    assert (tmp_path / "thesis" / name).read_text() == '{"years": 3}'


def test_force_names_what_lies_beside_ours(tmp_path: Path) -> None:
    target = tmp_path / "out"
    build(target)
    (target / "notes" / "of").mkdir(parents=True)
    (target / "notes" / "of" / "mine").write_text("x")
    (target / "link").symlink_to(tmp_path)
    (target / ".DS_Store").touch()  # macOS puts it anywhere
    message = r"holds link, notes, not written there by mlxstacks.* move that elsewhere"
    with pytest.raises(TargetError, match=message):
        build(target, force=True)
    assert (target / "notes" / "of" / "mine").exists()
    shutil.rmtree(target / "notes")
    (target / "link").unlink()
    build(target, "newer", force=True)
    assert (target / "file").read_text() == "newer"


def test_file_that_came_while_the_new_was_written_stays(tmp_path: Path) -> None:
    target = tmp_path / "out"
    build(target)

    def write() -> None:
        with staged_directory(target, force=True):
            (target / "late.txt").write_text("x")

    with pytest.raises(TargetError, match=r"holds late\.txt"):
        write()
    assert names(target) == ["file", "late.txt"]
    assert names(tmp_path) == ["out"]


def test_what_is_told_otherwise_gets_no_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store has its manifest. Without a mark, too, nothing stays of a run that failed."""
    for text in ("old", "new"):
        build(tmp_path / "out", text, force=True, owned=entries)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(outputs, "sync_tree", full)
    with pytest.raises(TargetError, match="the disk is full"):
        build(tmp_path / "out", force=True, owned=entries)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "new"


def test_nothing_is_written_into_the_package(tmp_path: Path) -> None:
    package = Path(mlxstacks.__file__).parent
    (tmp_path / "link").symlink_to(package / "assets" / "nano")
    for target in (package, package / "new", package / "assets" / "nano" / "store",
                   tmp_path / "link" / "store", resource_dir("recipes") / "new"):  # fmt: skip
        with pytest.raises(TargetError, match="comes with mlxstacks and is only read"):
            build(target, force=True)
    assert not (package / "new").exists()


def test_filled_cache_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path / "cache"))
    filled = tmp_path / "cache" / "nano-1" / "model"
    fill_cache(filled, (filled / "file").is_file, lambda place: write_json(place / "file", 1))
    for target in (filled, filled.parent, filled / "new", filled.parent / "new"):
        with pytest.raises(TargetError, match="comes with mlxstacks and is only read") as caught:
            build(target, force=True)
        assert str(caught.value).count(f"{target}") == 1
    build(tmp_path / "cache" / "mine")


def test_empty_directory_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(tmp_path / "out")
    assert names(tmp_path / "out") == ["file"]


def names(directory: Path) -> list[str]:
    """What is in a directory, but the mark."""
    return sorted(path.name for path in directory.iterdir() if path.name != MARK)


# --- the ordinary course ---------------------------------------------------------------------


def test_target_appears_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with staged_directory(target) as staged:
        assert staged.parent == target.parent
        assert staged.name.startswith(f".out.tmp-{os.getpid()}-")
        assert not target.exists()
        (staged / "sub").mkdir()
        (staged / "sub" / "file").write_text("x")
    assert names(target.parent) == ["out"]
    assert (target / "sub" / "file").read_text() == "x"
    mask = os.umask(0o022)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o777 & ~mask


@pytest.mark.parametrize("before", [[], ["out"]])
def test_error_in_the_block_leaves_what_was(tmp_path: Path, before: list[str]) -> None:
    if before:
        build(tmp_path / "out", "old")
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), staged_directory(tmp_path / "out", force=True):
            raise error
        assert names(tmp_path) == before
    assert not before or (tmp_path / "out" / "file").read_text() == "old"


def test_existing_target_needs_force(tmp_path: Path) -> None:
    target = tmp_path / "out"
    build(target, "old")
    with pytest.raises(TargetError, match=r"exists; .* --save-path .\S+/out-2 is free"):
        build(target)
    assert (target / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]
    build(target, "forced", force=True)
    assert (target / "file").read_text() == "forced"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_removes_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(outputs, "_exchange", lambda first, second: False)
    target = tmp_path / "out"
    with staged_directory(target) as staged:
        (staged / "stale").write_text("x")
    build(target, "newer", force=True)
    assert names(target) == ["file"]
    assert names(tmp_path) == ["out"]


def test_without_exchange_the_old_is_a_temporary_before_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run after a kill amid the removal would put half of it back."""
    monkeypatch.setattr(outputs, "_exchange", lambda first, second: False)
    build(tmp_path / "out", "old")
    remove_marked = outputs.remove_marked
    removed = []

    def recorded(path: Path) -> None:
        if path.exists():
            removed.append((re.sub("-.*", "", path.name), (path / "file").read_text()))
        remove_marked(path)

    monkeypatch.setattr(outputs, "remove_marked", recorded)
    build(tmp_path / "out", "new", force=True)
    assert removed == [(".out.tmp", "old")]


def test_exchange_works_where_it_is_tested(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if not outputs._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot exchange two directories in one step")
    assert names(tmp_path / "a") == []
    assert names(tmp_path / "b") == ["x"]
    assert not outputs._exchange(tmp_path / "a", tmp_path / "gone")


def test_link_to_the_target_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "out")
    build(tmp_path / "link")
    assert (tmp_path / "real" / "out" / "file").exists()
    build(tmp_path / "link", "again", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "out" / "file").read_text() == "again"


# --- refusals --------------------------------------------------------------------------------


def test_precious_directories_are_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work, model = tmp_path / "home", tmp_path / "work" / "here", tmp_path / "models" / "one"
    for directory in (home, work, model):
        directory.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    for target in (home, work, work.parent, Path(), Path("/"), model, model.parent, tmp_path):
        with pytest.raises(TargetError, match="must not be replaced"):
            build(target, force=True, inputs=[model])
        assert model.exists()
    build(Path("~/out"))
    assert (home / "out" / "file").exists()


def test_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "file" / "a" / "out"):
        with pytest.raises(TargetError, match="is a file, a directory is needed") as caught:
            build(target, force=True)
        assert str(tmp_path / "file") in str(caught.value)
    assert names(tmp_path) == ["file"]


def test_name_too_long_is_a_target_error(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="File name too long"):
        build(tmp_path / ("x" * 250))


def test_too_small_a_disk_is_refused_before_anything(tmp_path: Path) -> None:
    free = disk.free_bytes(tmp_path)
    with pytest.raises(TargetError, match=rf"{10 * free} bytes needed, \d+ free"):
        build(tmp_path / "deep" / "out", needed_bytes=10 * free)
    assert check_target(tmp_path / "a" / "out", needed_bytes=1) == tmp_path / "a" / "out"
    assert names(tmp_path) == []


def test_read_only_disk_is_a_target_error(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as place:
        (place / "old").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        for target in (place / "out", place / "a" / "b"):
            with pytest.raises(TargetError, match="not writable"):
                build(target)
        with pytest.raises(TargetError, match="not writable"):
            write_json(place / "x.json", {})
        with pytest.raises(TargetError, match="not writable"):
            ShardWriter(place / "x", [])


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_denied_mkdir_is_a_target_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(TargetError, match="not writable"):
        build(tmp_path / "out")
    assert names(tmp_path) == []


# --- a disk that fills up --------------------------------------------------------------------


def write_shard(staged: Path) -> None:
    with ShardWriter(staged / "x", [("a", "U8", (2 << 20,))]) as writer:
        writer.write("a", bytes(2 << 20))


FILLS: dict[str, Callable[[Path, Path], Any]] = {
    "shard": lambda staged, big: write_shard(staged),
    "copy": lambda staged, big: clone_or_link(big, staged / "x"),
    "side files": lambda staged, big: copy_side_files(
        big.parent, staged, side_files(big.parent, [])
    ),
    "json": lambda staged, big: write_json(staged / "x.json", "x" * (2 << 20)),
    "others": lambda staged, big: (staged / "x").write_bytes(bytes(2 << 20)),
}


@pytest.mark.parametrize("fill", FILLS)
def test_disk_that_fills_up_leaves_the_old(tmp_path: Path, fill: str) -> None:
    (tmp_path / "source").mkdir()
    big = tmp_path / "source" / "big.json"
    big.write_bytes(b" " * (2 << 20))
    with small_disk(tmp_path / "disk") as place:
        build(place / "out", "old")
        with (
            pytest.raises(TargetError, match=r"the disk is full .*\d+ free"),
            staged_directory(place / "out", force=True, needed_bytes=1000) as staged,
        ):
            FILLS[fill](staged, big)
        assert names(place) == ["out"]
        assert (place / "out" / "file").read_text() == "old"


def test_errors_of_other_files_are_not_blamed_on_the_target(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), staged_directory(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", "somewhere else")


# --- two runs, dead runs ---------------------------------------------------------------------


def test_second_run_to_one_target_names_the_first(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mlxstacks.files.outputs import staged_directory\n"
        "with staged_directory(Path(sys.argv[1])) as staged:\n"
        "    (staged / 'file').write_text('first')\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        with pytest.raises(TargetError, match=f"process {first.pid} is writing it"):
            build(tmp_path / "out", force=True)
        build(tmp_path / "other")
        first.stdin.write("\n")
    assert first.returncode == 0
    assert names(tmp_path) == ["other", "out"]
    assert (tmp_path / "out" / "file").read_text() == "first"


def test_threads_to_one_target_exclude_each_other(tmp_path: Path) -> None:
    inside, most, refused, lock = 0, 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most, refused
        for _ in range(20):
            try:
                with staged_directory(tmp_path / "out", force=True) as staged:
                    with lock:
                        inside += 1
                        most = max(most, inside)
                    (staged / "file").write_text("x")
                    with lock:
                        inside -= 1
            except TargetError:
                with lock:
                    refused += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert refused < 80
    assert names(tmp_path) == ["out"]


def test_temporaries_of_dead_runs_go_and_others_stay(tmp_path: Path) -> None:
    for name in (".out.tmp-123-0123abcd", ".out.tmp-99999-deadbeef"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        write_json(tmp_path / name / MARK, new_mark())
    (tmp_path / ".out.tmp-7-01234567").mkdir()  # died before it wrote the mark
    kept = [
        ".out.tmp-123-01234567",  # by its name alone
        ".out.tmp-1-0123abcd.tmp-2-0123abcd",  # of a target named out.tmp-1-0123abcd
        ".out2.tmp-123-0123abcd",
        ".out.tmp-mine",
        "out.tmp-123-0123abcd",
    ]
    for name in kept:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    build(tmp_path / "out")
    assert names(tmp_path) == sorted([*kept, "out"])


def test_old_directory_is_put_back_where_the_new_never_came(tmp_path: Path) -> None:
    (tmp_path / ".out.old-01234567").mkdir()
    (tmp_path / ".out.old-01234567" / "file").write_text("old")
    (tmp_path / ".out.tmp-1-01234567").mkdir()
    with pytest.raises(TargetError, match="exists"):
        build(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "old"


@pytest.mark.parametrize("way", ["exchange", "rename"])
def test_killed_at_any_moment_the_target_is_whole(
    tmp_path: Path, campaign: Callable[[int], range], way: str
) -> None:
    target = tmp_path / "out"
    chance = random.Random(0)
    versions: list[int | None] = []
    start = time.perf_counter()
    for version in range(5):
        kill_worker.write_version(target, version)
    wait_seconds = (time.perf_counter() - start) / 5
    with subprocess.Popen(
        [sys.executable, kill_worker.__file__, str(target), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        for number in campaign(250):
            if chance.random() < 0.2 and target.exists():
                shutil.rmtree(target)
            worker.stdin.write(f"{number * 1_000_000}\n")
            worker.stdin.flush()
            pid = int(worker.stdout.readline())
            time.sleep(chance.random() * 2 * wait_seconds)
            os.kill(pid, signal.SIGKILL)
            assert worker.stdout.readline() == "dead\n"
            versions.append(kill_worker.read_version(target))
            # a busy machine writes more slowly than it did above; then the kill waits longer
            stuck = len(set(versions[-3:])) == 1
            wait_seconds = min(0.5, wait_seconds * (1.5 if stuck else 0.95))
            aside = list(tmp_path.glob(".out.old-*"))
            assert way == "rename" or not aside
            if versions[-1] is None and aside:
                assert kill_worker.read_version(aside[0]) is not None
        worker.stdin.close()
    # the kills met the writer at work, and the target changed
    assert len(set(versions)) > len(versions) / 10
    kill_worker.write_version(target, 7)
    assert kill_worker.read_version(target) == 7
    assert names(tmp_path) == ["out"]


# --- JSON ------------------------------------------------------------------------------------


def test_json_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"b": 1, "a": "é"})
    assert path.read_text() == '{\n  "b": 1,\n  "a": "é"\n}\n'
    write_json(path, {"b": 1, "a": 2}, sort_keys=True)
    assert path.read_text() == '{\n  "a": 2,\n  "b": 1\n}\n'
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON compliant"):
            write_json(path, [bad])
    assert json.loads(path.read_text()) == {"a": 2, "b": 1}
    write_json(path, [float("inf")], allow_nan=True)
    assert json.loads(path.read_text()) == [float("inf")]
    assert names(tmp_path) == ["x.json"]
    with pytest.raises(TargetError, match="No such file"):
        write_json(tmp_path / "gone" / "x.json", {})


# --- carrying files over ---------------------------------------------------------------------


def test_link_follows_the_links_of_a_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_bytes(b"weights")
    (tmp_path / "shard").symlink_to("blobs/0123")
    if clone_or_link(tmp_path / "shard", tmp_path / "out") == "linked":
        assert (tmp_path / "out").samefile(tmp_path / "blobs" / "0123")
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "out").read_bytes() == b"weights"


def test_copy_is_independent_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    assert clone_or_link(tmp_path / "a", tmp_path / "b", copy=True) == "copied"
    (tmp_path / "a").write_bytes(b"changed")
    assert (tmp_path / "b").read_bytes() == b"weights"


def test_other_file_system_is_copied_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    with small_disk(tmp_path / "disk") as place:
        assert clone_or_link(tmp_path / "a", place / "b") == "copied"
        assert (place / "b").read_bytes() == b"weights"
        assert clone_or_link(place / "b", place / "c") == "linked"


def test_clone_shares_blocks_and_not_writes(tmp_path: Path) -> None:
    with reflink_disk(tmp_path / "disk") as place:
        (place / "a").write_bytes(bytes(1 << 20))
        assert clone_or_link(place / "a", place / "b") == "cloned"
        assert not (place / "a").samefile(place / "b")
        with (place / "b").open("r+b") as file:
            file.write(b"changed")
        assert (place / "a").read_bytes() == bytes(1 << 20)
        assert (place / "b").read_bytes().startswith(b"changed")


def test_file_system_without_links_is_copied_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(side_files_module, "clone", lambda source, destination: False)
    monkeypatch.setattr(os, "link", refused)
    (tmp_path / "a").write_bytes(b"weights")
    assert clone_or_link(tmp_path / "a", tmp_path / "b") == "copied"


@pytest.mark.parametrize("copy", [True, False])
def test_carrying_never_overwrites_and_names_a_missing_source(tmp_path: Path, copy: bool) -> None:
    (tmp_path / "a").write_bytes(b"weights")
    (tmp_path / "b").write_bytes(b"precious")
    with pytest.raises(TargetError, match="File exists"):
        clone_or_link(tmp_path / "a", tmp_path / "b", copy)
    assert (tmp_path / "b").read_bytes() == b"precious"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("gone", "link", "loop"):
        with pytest.raises(CheckpointError, match="cannot be carried over"):
            clone_or_link(tmp_path / name, tmp_path / "c", copy)


CARRIED = {
    "tokenizer.model": b"\n\x0e\n\x05<unk>",
    "README.md": b"# card",
    "LICENSE": b"Apache",
    "a.tiktoken": b"a",
    "vision.gguf": b"GGUF",
    "mtp.safetensors": file_bytes({"mtp.fc.weight": entry("U8", [1], 0, 1)}, b"x"),
    "optiq/mtp.safetensors": file_bytes({"mtp.fc.weight": entry("U8", [1], 0, 1)}, b"y"),
    "additional_chat_templates/tool.jinja": b"x",
    "adapters/adapter_config.json": b"{}",
    "draft/config.json": b"{}",
    "draft/model.safetensors": file_bytes("{}"),
}
LEFT = {
    "modeling.py": (b"x", "code"),
    "draft/evil.py": (b"x", "code"),
    "RUN": (b"#!/bin/sh", "a script"),
    "tool": (b"\x7fELF", "a program"),
    "pytorch_model.bin": (b"x", "may be a pickle"),
    "pytorch_model.bin.index.json": (b"{}", "an index of pickles"),
    "x.NPZ": (b"x", "may be a pickle"),
    "weights.dat": (b"\x80\x04\x95", "a pickle"),
    "state": (b"PK\x03\x04data.pkl", "a zip archive"),
    "torn.safetensors": (b"\x99", "header length"),
    "adapters.safetensors": (file_bytes("{}"), "an adapter, which loaders would apply again"),
    ".secret": (b"x", "hidden"),
}


def test_everything_beside_the_shards_is_carried_but_code_and_pickles(tmp_path: Path) -> None:
    source, target = tmp_path / "model", tmp_path / "out"
    (source / ".cache" / "huggingface").mkdir(parents=True)
    (source / "fused").mkdir()
    contents = CARRIED | {name: content for name, (content, _) in LEFT.items()}
    contents |= dict.fromkeys(("config.json", "model.safetensors.index.json"), b"{}")
    contents |= {"fuse_report.json": b"{}", "fused/.mlxstacks.json": b"{}", "result.json": b"{}"}
    for name, content in contents.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(content)
    (source / "model.safetensors").write_bytes(file_bytes("{}"))
    (source / "elsewhere").symlink_to(tmp_path)
    os.mkfifo(source / "pipe")
    reasons = {name: reason for name, (_, reason) in LEFT.items()} | {
        ".cache": "hidden",
        "elsewhere": "a link to a folder",
        "fused": "an output of mlxstacks",
        "pipe": "not a regular file",
    }
    files = side_files(source, [source / "model.safetensors"])
    assert {f.name for f in files if f.reason is None} == CARRIED.keys()
    assert {f.name for f in files if f.reason is not None} == reasons.keys()
    for file in files:
        assert file.reason is None or reasons[file.name] in file.reason
    done = copy_side_files(source, target, files)
    assert [(f.name, f.reason) for f in done] == [(f.name, f.reason) for f in files]
    written = {p.relative_to(target).as_posix(): p for p in target.rglob("*") if p.is_file()}
    assert {name: path.read_bytes() for name, path in written.items()} == CARRIED
    for file in done:  # what people edit never shares its bytes with the source
        linked = file.how == "linked"
        assert not linked or file.name.endswith((".safetensors", ".gguf"))
        if file.how is not None:
            assert linked == (os.stat(source / file.name).st_nlink > 1)


def test_side_files_follow_the_links_of_a_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / "blob").write_text("x")
    (tmp_path / "source" / "tokenizer.json").symlink_to("../blob")
    (tmp_path / "source" / "broken.json").symlink_to("../gone")
    (tmp_path / "source" / "loop.json").symlink_to("loop.json")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f").write_text("{}")
    (tmp_path / "source" / "vocab.json").symlink_to("../blobs/0f")
    (tmp_path / "source" / "same.json").symlink_to("tokenizer_config.json")
    (tmp_path / "source" / "tokenizer_config.json").write_text("{}")
    files = side_files(tmp_path / "source", [])
    names = ["same.json", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    assert [file.name for file in files if file.reason is None] == names
    links = {file.name: file.link for file in files if file.link}
    assert links == {"tokenizer.json": str((tmp_path / "blob").resolve())}
    done = copy_side_files(tmp_path / "source", tmp_path / "target", files)
    assert {file.name: file.link for file in done if file.link} == links
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == names
    assert not (tmp_path / "target" / "tokenizer.json").is_symlink()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_file_system_that_holds_no_files_is_refused() -> None:
    for name in ("/proc/out", "/proc/self/out"):
        with pytest.raises(TargetError, match=r"/proc/out: 0 free|not writable"):
            check_target(Path(name))


def test_a_target_that_no_file_system_takes_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("x" * 300, "x" * 5000, "a\0b", "\ud800"):
        with pytest.raises(TargetError, match=r"not a usable (target|path)"):
            check_target(tmp_path / name)
    # from Python 3.13 on a circle of links resolves to itself, and is then no directory
    with pytest.raises(TargetError, match=r"not a usable target|a directory is needed"):
        check_target(tmp_path / "loop" / "x")
    with pytest.raises(TargetError, match="not a usable path"):
        check_target(Path("~nobody-of-this-name/x"))


def test_json_may_name_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    value = {"path": os.fsdecode(b"bad-\xff"), "word": "\u00fc"}
    write_json(tmp_path / "a.json", value)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == value


def test_a_side_file_of_its_owner_alone_stays_so(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "model" / "merges.txt").symlink_to(tmp_path / "secret")
    copy_side_files(tmp_path / "model", tmp_path / "out", side_files(tmp_path / "model", []))
    assert stat.S_IMODE((tmp_path / "out" / "merges.txt").stat().st_mode) == 0o600
