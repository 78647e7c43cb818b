"""The router in a store: set whole or not at all, kept by gc, checked, and shown.

pytest tests/files/test_store_router.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.manifest import parse_manifest
from mlxstacks.files.router_file import check_router
from mlxstacks.files.settings import (
    StacksDiffSettings,
    StacksGcSettings,
    StacksListSettings,
    StacksRemoveSettings,
    StacksSwitchSettings,
    StacksVerifySettings,
)
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import (
    collect_garbage,
    diff_stores,
    disable_domain,
    enable_domain,
    remove_domain,
)
from mlxstacks.files.store_verify import verify_store
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.stack.store_commands import list_store
from tests.files.router_cases import router_header, router_tensors, set_router
from tests.files.store_cases import add_domain, make_store, tree


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "store", ["chat", "code"], rounds=1)


def verify(store: Store) -> Any:
    return verify_store(StacksVerifySettings(store_path=str(store.path)))


def remove(store: Store, domain: str) -> Any:
    settings = StacksRemoveSettings(store_path=str(store.path), domain=domain, force=True)
    return remove_domain(settings)


def router_path(store: Store) -> Path:
    record = Store.open(store.path).manifest.router
    assert record is not None
    return store.path / record.file


def test_what_was_put_in_comes_out(store: Store) -> None:
    head = set_router(store, seed=3)
    found = Store.open(store.path).read_router()
    assert found.header == head
    for name, array in router_tensors(head, seed=3).items():
        assert mx.array_equal(found.tensors[name], array).item()
    assert router_path(store).parent.name == "routers"
    assert parse_manifest((store.path / "manifest.json").read_bytes()) == store.manifest


def test_a_store_without_a_router_is_as_before(store: Store) -> None:
    """Its manifest has no new key, and one written before the key existed is still read."""
    document = json.loads((store.path / "manifest.json").read_text())
    assert "router" not in document
    checksum = document.pop("checksum")
    assert checksum == json_sha256(document) == Store.open(store.path).manifest.checksum
    with pytest.raises(InputError, match=r"no router; `mlxstacks route train .*store` trains one"):
        store.read_router()


def test_a_new_router_replaces_the_old_one(store: Store) -> None:
    set_router(store, seed=1)
    old = router_path(store)
    set_router(store, seed=2)
    new = router_path(store)
    assert old != new
    assert old.exists(), "readers of the old manifest still find theirs"
    collect_garbage(StacksGcSettings(store_path=str(store.path), grace_seconds=0))
    assert not old.exists()
    assert new.exists()
    assert Store.open(store.path).read_router().header == router_header(store)


def test_a_router_that_does_not_fit_changes_nothing(store: Store) -> None:
    before = tree(store.path)
    for changes, message in (
        ({"base_fingerprint": "c" * 64}, "trained on tiny with fingerprint cccc"),
        ({"stacks": {"chat": ("a" * 64,), "code": ("b" * 64,)}}, "other stacks of chat, code"),
    ):
        with pytest.raises(StoreError, match=message):
            set_router(store, **changes)
    head = router_header(store)

    def change_store(drop: str | None, then: type[BaseException] | None) -> None:
        made = router_tensors(head)
        if drop is not None:
            del made[drop]
        with store.change() as change:
            change.set_router(made, head)
            if then is not None:
                raise then

    with pytest.raises(ValueError, match="'temperature': missing"):
        change_store("temperature", None)
    with pytest.raises(KeyboardInterrupt):
        change_store(None, KeyboardInterrupt)
    assert tree(store.path) == before
    assert Store.open(store.path).manifest.router is None


def test_notes_name_domains_that_only_one_side_has(store: Store) -> None:
    head = set_router(store)
    assert check_router(head, store) == []
    add_domain(store, "math", rounds=1, seed=50)
    settings = StacksSwitchSettings(store_path=str(store.path), domain="chat")
    disable_domain(settings)
    store.refresh()
    notes = check_router(head, store)
    assert [note.split(":")[0] for note in notes] == [
        "The router knows chat, which is disabled or has no stacks",
        "The router does not know math",
    ]
    enable_domain(settings)
    removed = remove(store, "code")
    assert "The router knows code, which is not in the store" in " ".join(removed.notes)
    assert Store.open(store.path).manifest.router is not None


def test_a_router_of_retrained_stacks_is_refused_but_no_damage(store: Store) -> None:
    head = set_router(store)
    remove(store, "code")
    store.refresh()
    add_domain(store, "code", rounds=1, seed=99)
    with pytest.raises(StoreError, match="trained for other stacks of code; `mlxstacks route tra"):
        check_router(head, store)
    checked = verify(store)
    assert checked.problems == ()
    assert "routed inference will not start" in " ".join(checked.notes)


def test_a_bad_router_file_is_named_and_the_rest_works(store: Store) -> None:
    set_router(store)
    assert verify(store).problems == ()
    assert verify(store).files == 5
    path = router_path(store)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [(p.file, p.kind) for p in verify(store).problems] == [(f"routers/{path.name}", "bytes")]
    with pytest.raises(StoreError, match="mlxstacks route train"):
        store.read_router()
    listing = list_store(StacksListSettings(store_path=str(store.path)))
    assert listing.data["router_header"] is None
    assert str(path) in " ".join(listing.notes)
    for record in store.enabled_stacks():
        store.read_stack(record)


def test_list_and_diff_show_the_router(store: Store, tmp_path: Path) -> None:
    other = make_store(tmp_path / "other", ["chat", "code"], rounds=1)
    head = set_router(store)
    listing = list_store(StacksListSettings(store_path=str(store.path)))
    assert listing.data["router_header"] == head.as_json()
    assert listing.data["router_header"]["domains"] == ["chat", "code"]
    both = StacksDiffSettings(store_path=str(store.path), other_path=str(other.path))
    assert store.manifest.router is not None
    found = [(d.what, d.field, d.first, d.second) for d in diff_stores(both).differences]
    assert found == [("router", "sha256", store.manifest.router.sha256, None)]
    set_router(other)
    assert diff_stores(both).equal


def test_a_router_outside_its_folder_is_refused(store: Store) -> None:
    set_router(store)
    record = store.manifest.router
    assert record is not None
    for file, message in (
        (record.file.replace("routers/", "stacks/"), "must lie in routers/"),
        (f"../{record.file}", "router.file: String should match"),
        ("routers/router-aaaaaaaaaaaa.safetensors", "must end in the first 12 digits"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(store.manifest, router=replace(record, file=file)).document()
