"""The store and its processes: two writers, readers beside a writer, writers killed at any moment.

pytest tests/files/test_store_processes.py        (MLXSTACKS_SOAK=1 kills ten times as often)
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxstacks.errors import StoreError
from mlxstacks.files.settings import StacksGcSettings, StacksRemoveSettings, StacksVerifySettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import collect_garbage, remove_domain
from mlxstacks.files.store_verify import verify_store
from tests.files import store_worker
from tests.files.router_cases import set_router
from tests.files.store_cases import BASE, ONE_EXPERT, add_domain, tree

ROOT = Path(__file__).parents[2]


@contextmanager
def worker(role: str, store: Path) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, store_worker.__file__, role, str(store)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def say(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def every_state(path: Path) -> list[dict[str, bytes]]:
    """The store with up to three domains and no router or one of up to three, byte for byte."""
    states = []
    for trained in range(4):
        store = Store.create(path / str(trained), "tiny", BASE)
        add_up_to(store, trained)
        if trained:
            set_router(store)
        for name in reversed(store_worker.NAMES[:trained]):
            states.append(tree(store.path))
            remove_domain(StacksRemoveSettings(store_path=str(store.path), domain=name))
            collect_garbage(StacksGcSettings(store_path=str(store.path), grace_seconds=0))
            store.refresh()
        for count in range(4):
            add_up_to(store, count)
            states.append(tree(store.path))
    return states


def add_up_to(store: Store, count: int) -> None:
    """The first domains, as many as `count`, where they are not there yet."""
    for index in range(len(store.manifest.domains), count):
        name = store_worker.NAMES[index]
        add_domain(store, name, seed=10 * index, projections=ONE_EXPERT)


def test_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    with worker("hold", store.path) as first:
        assert answer(first) == "ready"
        with pytest.raises(StoreError, match=f"process {first.pid} is changing it"):
            add_domain(store, "chat")
        with pytest.raises(StoreError, match="is changing it"):
            collect_garbage(StacksGcSettings(store_path=str(store.path)))
        assert Store.open(store.path).manifest.domains == ()  # a reader needs no lock
        say(first, "go")
        assert first.wait() == 0
    add_domain(store, "chat")


def test_the_lock_of_a_killed_writer_is_free(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    with worker("hold", store.path) as first:
        assert answer(first) == "ready"
        first.kill()
        first.wait()
    add_domain(store, "chat")


def test_two_changes_in_one_process_exclude_each_other(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    with store.change(), pytest.raises(StoreError, match=f"process {os.getpid()} is changing it"):
        add_domain(Store.open(store.path), "chat")


def test_readers_see_whole_states_while_a_writer_works(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    chance = random.Random(0)
    with worker("read", store.path) as reader:
        assert answer(reader) == "ready"
        for _ in range(8):
            store_worker.one_change(store.path, chance)
        say(reader, "stop")
        states = int(answer(reader))
        assert reader.wait() == 0
    assert states > 1


def test_a_reader_of_the_old_manifest_still_finds_its_files(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    add_domain(store, "chat", projections=ONE_EXPERT)
    old = Store.open(store.path)
    with store.change() as change:
        domains = change.manifest.domains[:0]
        change.manifest = type(change.manifest)("tiny", BASE, domains)
    collect_garbage(StacksGcSettings(store_path=str(store.path)))  # within the grace period
    for record in old.enabled_stacks():
        old.read_stack(record)
    collect_garbage(StacksGcSettings(store_path=str(store.path), grace_seconds=0))
    with pytest.raises(StoreError, match=r"missing.*open the store again"):
        old.read_stack(old.enabled_stacks()[0])


def test_killed_at_any_moment_the_store_is_a_whole_one(
    tmp_path: Path, campaign: Callable[[int], range]
) -> None:
    known = every_state(tmp_path / "reference")
    path = tmp_path / "store"
    Store.create(path, "tiny", BASE)
    chance = random.Random(0)
    manifests: list[bytes] = []
    left_over = 0
    wait_seconds = 0.1  # a change takes some 30 ms on an idle machine
    with worker("loop", path) as writers:
        for number in campaign(200):
            say(writers, str(number))
            pid = int(answer(writers))
            time.sleep(chance.random() * wait_seconds)
            os.kill(pid, signal.SIGKILL)
            assert answer(writers) == "dead"
            manifests.append((path / "manifest.json").read_bytes())
            checked = verify_store(StacksVerifySettings(store_path=str(path)))
            assert checked.problems == ()
            left_over += bool(checked.notes)
            stuck = len(set(manifests[-3:])) == 1
            wait_seconds = min(0.5, wait_seconds * (1.5 if stuck else 0.95))
            if chance.random() < 0.3:
                done = collect_garbage(StacksGcSettings(store_path=str(path), grace_seconds=0))
                assert done.strange == ()
                assert tree(path) in known
    # the kills met writers at work: the store changed, and half-done work lay about
    assert len(set(manifests)) > 1
    assert any(b'"router"' in manifest for manifest in manifests)
    assert left_over > 0
    collect_garbage(StacksGcSettings(store_path=str(path), grace_seconds=0))
    assert tree(path) in known
    store_worker.one_change(path, chance)
