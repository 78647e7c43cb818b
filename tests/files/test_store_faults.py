"""Full disks, read-only stores, manifests made to harm.

pytest tests/files/test_store_faults.py
"""

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import StoreError, TargetError
from mlxstacks.files import store_files
from mlxstacks.files.manifest import DomainRecord, check_name, parse_manifest
from mlxstacks.files.settings import StacksGcSettings, StacksVerifySettings
from mlxstacks.files.stack_file import ProjectionShape
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import collect_garbage
from mlxstacks.files.store_verify import verify_store
from mlxstacks.files.strict_json import json_sha256
from tests.files.raw import small_disk
from tests.files.store_cases import BASE, add_domain, header, make_store, tensors, tree

BIG = {"layers.0.q": ProjectionShape("linear", 1, 64, 1, 1.0, 8192, 8192)}


def add_big(store: Store) -> None:
    head = header("big", projections=BIG)
    with store.change() as change:
        record = change.add_stack(tensors(head), head)
        change.manifest = change.manifest.with_domain(DomainRecord("big", True, (record,)))


# --- disks -----------------------------------------------------------------------------------


def test_too_small_a_disk_is_refused_before_writing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as place:
        store = make_store(place / "store", ["chat"])
        before = tree(store.path)
        with pytest.raises(TargetError, match=r"\d+ bytes needed, \d+ free"):
            add_big(store)
        assert tree(store.path) == before
        assert verify_store(StacksVerifySettings(store_path=str(store.path))).problems == ()


@pytest.mark.parametrize("stage", ["stack", "split", "log", "manifest"])
def test_a_disk_that_fills_up_leaves_the_old_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The disk is full from this stage on; the stage before it still had room."""
    with small_disk(tmp_path / "disk", "4m") as place:
        store = make_store(place / "store", ["chat"])
        before = tree(store.path)
        monkeypatch.setattr(store_files, "require_space", lambda *_: None)
        filler = place / "filler"

        def fill() -> None:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))

        def fill_at(stage_now: str) -> None:
            if stage == stage_now:
                fill()

        def grow() -> None:
            with store.change() as change:
                fill_at("stack")
                head = header("code")
                record = change.add_stack(tensors(head, 3), head)
                fill_at("split")
                split = change.add_json("splits", "code", {"train": ["x" * 9000]})
                domain = DomainRecord("code", True, (record,), split=split)
                change.manifest = change.manifest.with_domain(domain)
                if stage == "log":  # whose next line then needs a new page
                    (store.path / "log.jsonl").write_bytes(b"x" * 4095 + b"\n")
                fill_at("log")
                fill_at("manifest")

        with pytest.raises(TargetError, match="the disk is full"):
            grow()
        filler.unlink()
        assert tree(store.path) == before
        assert Store.open(store.path).manifest == store.manifest
        add_domain(store, "code", seed=9)


def test_a_read_only_store_is_read_and_not_changed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "8m") as place:
        make_store(place / "store", ["chat"])
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        store = Store.open(place / "store")
        for record in store.enabled_stacks():
            store.read_stack(record)
        assert verify_store(StacksVerifySettings(store_path=str(store.path))).problems == ()
        with pytest.raises(TargetError, match="not writable"):
            add_domain(store, "code")
        gc = StacksGcSettings(store_path=str(store.path), grace_seconds=0)
        with pytest.raises(TargetError, match="not writable"):
            collect_garbage(gc)
        assert collect_garbage(gc, dry_run=True).removed == ()
        with pytest.raises(TargetError, match="not writable"):
            store.log("note")


@pytest.mark.parametrize("call", ["replace", "fsync", "unlink", "open"])
@pytest.mark.parametrize("moment", [1, 3, 6])
def test_an_error_of_the_system_leaves_a_whole_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, moment: int
) -> None:
    """The moment-th call of a change fails: the store is as before or as after."""
    store = make_store(tmp_path / "store", ["chat"])
    known = [store.manifest.domains]
    real, count = getattr(os, call), 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == moment:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(args[0]))
        return real(*args, **options)

    monkeypatch.setattr(os, call, failing)
    with contextlib.suppress(OSError, StoreError, TargetError):  # it may also go well
        add_domain(store, "code", seed=5)
    monkeypatch.undo()
    opened = Store.open(store.path)
    names = [domain.name for domain in opened.manifest.domains]
    assert names in (["chat"], ["chat", "code"])
    assert opened.manifest.domains[:1] == known[0]
    assert verify_store(StacksVerifySettings(store_path=str(store.path))).problems == ()


# --- manifests made to harm ------------------------------------------------------------------


def spoiled(store: Store, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """manifest.json with a change, and the checksum that goes with it."""
    value = store.manifest.as_json()
    value = change(value) or value
    return json.dumps({**value, "checksum": json_sha256(value)}).encode()


def file_of_first(value: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = value["domains"][0]["stacks"][0]["file"]
    return record


def set_file(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda value: file_of_first(value).update(file=name)


SHORT = "0" * 12


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store whose manifest is spoiled again and again."""
    return make_store(tmp_path_factory.mktemp("written") / "store", ["chat"], rounds=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_file("../../etc/passwd"), "file: String should match"),
        (set_file("/etc/passwd"), "file: String should match"),
        (set_file("stacks/../../x"), "file: String should match"),
        (set_file("stacks/.lock"), "file: String should match"),
        (set_file("stacks/a\nb-1"), "file: String should match"),
        (set_file("stacks/a\0b"), "file: String should match"),
        (set_file("stacks/" + "x" * 300), "file: String should match"),
        (set_file("manifest.json"), "file: String should match"),
        (set_file(f"stacks/chat-{SHORT}.safetensors"), "must end in the first 12 digits"),
        (lambda v: file_of_first(v).update(sha256="x"), "sha256: String should match"),
        (lambda v: file_of_first(v).update(nbytes=-1), "nbytes"),
        (lambda v: file_of_first(v).update(nbytes=2**80), "nbytes"),
        (lambda v: file_of_first(v).update(nbytes=1.5), "nbytes"),
        (lambda v: file_of_first(v).update(nbytes=True), "nbytes"),
        (lambda v: file_of_first(v).update(extra=1), "extra: Unexpected"),
        (lambda v: v.update(domains={}), "domains"),
        (lambda v: v.update(domains=v["domains"] * 2), "two domains named chat"),
        (lambda v: v["domains"][0].update(name="../x"), "name: String should match"),
        (lambda v: v["domains"][0].update(name="x"), "says domain chat, stands in x"),
        (lambda v: v["domains"][0].update(enabled="yes"), "enabled"),
        (
            lambda v: v["domains"][0].update(stacks=v["domains"][0]["stacks"] * 2),
            "two stacks named",
        ),
        (lambda v: v["domains"][0].update(losses=["1"]), "losses"),
        (lambda v: v["domains"][0].update(origin="found"), "origin"),
        (lambda v: v["domains"][0].update(split=file_of_first(v)), "must lie in splits/"),
        (lambda v: v.update(format_version=2), "format_version is 2, this version reads 1"),
        (lambda v: v.update(matrix={"prefix": {"chat": {"chat": "0"}}}), "matrix"),
        (lambda v: v.update(matrix={"prefix": {"x": {}}}), "names 'x', no domain"),
        (lambda v: v.pop("base_fingerprint") and None, "base_fingerprint: Field required"),
        (lambda v: v["domains"][0]["stacks"][0].update(name="CHAT"), "a domain and a stack named"),
        (lambda v: v["domains"][0]["stacks"][0].update(shared_sha256="0" * 64), "is not named"),
    ],
)
def test_a_hostile_manifest_is_refused(
    written: Store, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    store = written
    path = store.path / "manifest.json"
    path.write_bytes(spoiled(store, change))
    with pytest.raises(StoreError, match=message) as caught:
        Store.open(store.path)
    assert str(path) in str(caught.value)
    with pytest.raises(StoreError), store.change():
        pytest.fail("a damaged manifest must not be changed")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"checksum": "x"}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a": 1, "a": 2}',
        b'{"nbytes": ' + b"9" * 100_000 + b"}",
        b'{"loss": NaN}',
        b'{"loss": 1e999}',
    ],
    ids=range(11),
)
def test_what_is_no_manifest_is_refused(written: Store, data: bytes) -> None:
    (written.path / "manifest.json").write_bytes(data)
    with pytest.raises(StoreError, match=r"manifest.json: damaged"):
        Store.open(written.path)
    with pytest.raises(ValueError, match=r".+"):
        parse_manifest(data)


def test_a_manifest_that_was_edited_by_hand_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"], rounds=1)
    path = store.path / "manifest.json"
    path.write_text(path.read_text().replace('"enabled": true', '"enabled": false'))
    with pytest.raises(StoreError, match="changed by something else than mlxstacks"):
        Store.open(store.path)


def test_a_huge_manifest_is_not_read_whole(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"], rounds=1)
    with (store.path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="allowed: 64000000"):
        Store.open(store.path)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"], rounds=1)
    manifest = store.path / "manifest.json"
    manifest.rename(tmp_path / "outside.json")
    manifest.symlink_to(tmp_path / "outside.json")
    with pytest.raises(StoreError, match="is a link"):
        Store.open(store.path)
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(StoreError, match="not a regular file"):
        Store.open(store.path)
    manifest.unlink()
    with pytest.raises(StoreError, match="missing, its stacks are there"):
        Store.open(store.path)
    (tmp_path / "outside.json").rename(manifest)
    (store.path / "stacks").rename(tmp_path / "stacks")
    (store.path / "stacks").symlink_to(tmp_path / "stacks")
    opened = Store.open(store.path)
    with pytest.raises(StoreError, match="stacks: is a link"):
        opened.read_stack(opened.enabled_stacks()[0])
    with pytest.raises(StoreError, match="stacks: is a link"):
        add_domain(opened, "code")
    done = collect_garbage(StacksGcSettings(store_path=str(store.path), grace_seconds=0))
    assert done.removed == ()
    assert len(list((tmp_path / "stacks").iterdir())) == 1


@pytest.mark.parametrize("name", ["log.jsonl", ".lock"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    (tmp_path / "precious").write_text("years")
    (store.path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(StoreError, match="is a link"):
        add_domain(store, "chat")
    assert (tmp_path / "precious").read_text() == "years"
    assert Store.open(store.path).manifest.domains == ()


@pytest.mark.parametrize(
    "name", ["", "..", ".x", "a/b", "a b", "é", "x" * 65, "a\n", "-x", "a\0"], ids=ascii
)
def test_names_that_files_cannot_have_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="allowed are 1 to 64 letters"):
        check_name(name)
    store = Store.create(tmp_path / "store", "tiny", BASE)
    before = tree(tmp_path)
    head = header(name)
    with pytest.raises(ValueError, match="allowed are"), store.change() as change:
        change.add_stack(tensors(head), head)
    with pytest.raises(ValueError, match="allowed are"), store.change() as change:
        change.add_json("splits", name, {})
    assert tree(tmp_path) == before
