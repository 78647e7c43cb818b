"""Where the base of a store is found: beside it, where it was, by the cache of the hub.

Run: pytest tests/files/test_base_location.py
"""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.store import Store, base_name, find_base, remember_places
from mlxstacks.files.store_files import LOCATION


def write_model(directory: Path, value: float = 1.0) -> Path:
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), {"w": mx.full((2, 2), value)})
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return write_model(tmp_path / "home/models/tiny base")


def make_store(path: Path, model: Path, name: str | None = None) -> Store:
    base = fingerprint(open_checkpoint(model))
    path.parent.mkdir(parents=True, exist_ok=True)
    return Store.create(path, name or base_name(model), base)


def test_the_base_is_found_where_it_was_from_any_directory(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "home/work/store", model)
    remember_places(store, str(model))
    monkeypatch.chdir("/")
    notes: list[str] = []
    assert find_base(store, None, notes).directory == model
    assert notes == [f"The base of the store is {model}."]
    # the store goes elsewhere; then both go, together
    moved = Path(shutil.move(store.path, tmp_path / "elsewhere"))
    assert find_base(Store.open(moved), None).directory == model
    shutil.move(moved, store.path)
    both = Path(shutil.move(tmp_path / "home", tmp_path / "another home"))
    found = find_base(Store.open(both / "work/store"), None)
    assert found.directory == both / "models/tiny base"


def test_a_base_beside_the_store_needs_no_memory(tmp_path: Path, model: Path) -> None:
    store = make_store(tmp_path / "store", model, name="owner/tiny base")
    assert not (store.path / LOCATION).exists(), "as stores of earlier versions"
    with pytest.raises(InputError):
        find_base(store, None)
    beside = Path(shutil.copytree(model, tmp_path / "tiny base"))
    assert find_base(store, None).directory == beside


def test_another_model_of_that_name_is_not_taken(tmp_path: Path, model: Path) -> None:
    store = make_store(tmp_path / "store", model)
    impostor = write_model(tmp_path / model.name, 2.0)
    with pytest.raises(InputError) as error:
        find_base(store, None)
    message = str(error.value)
    assert f"{impostor}: another model, with fingerprint" in message
    assert message.endswith("give its directory or hub id with --model")
    with pytest.raises(StoreError, match="use that base"):
        find_base(store, str(impostor))
    remember_places(store, str(model))
    assert find_base(store, None).directory == model
    shutil.rmtree(model)
    with pytest.raises(InputError, match=f"{model}: not there"):
        find_base(store, None)


def test_no_place_names_the_home_directory(tmp_path: Path, model: Path) -> None:
    inside = make_store(tmp_path / "home/stores/one", model)
    remember_places(inside, str(model))
    assert json.loads((inside.path / LOCATION).read_text()) == {
        "path": "~/models/tiny base", "relative_path": "../../models/tiny base",
    }  # fmt: skip
    outside = make_store(tmp_path / "disk/two", model)
    remember_places(outside, str(model))
    assert json.loads((outside.path / LOCATION).read_text()) == {"path": "~/models/tiny base"}
    for store in (inside, outside):
        assert str(tmp_path) not in (store.path / "manifest.json").read_text()


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"path": 3, "relative_path": []}', '{"path": "~nobody-there/x"}',
     '{"path": "a\\u0000b", "relative_path": "/etc"}', json.dumps({"path": "x" * 5000})],
)  # fmt: skip
def test_a_strange_location_is_no_obstacle(tmp_path: Path, model: Path, content: str) -> None:
    store = make_store(tmp_path / "store", model)
    (store.path / LOCATION).write_text(content)
    with pytest.raises(InputError, match="not found here"):
        find_base(store, None)
    beside = Path(shutil.copytree(model, tmp_path / model.name))
    assert find_base(store, None).directory == beside


def test_a_hub_id_is_found_in_the_cache(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub/models--owner--tiny-4bit"
    assert (
        base_name(Path(shutil.copytree(model, repository / "snapshots/abc"))) == "owner/tiny-4bit"
    )
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    store = make_store(tmp_path / "store", model, name="owner/tiny-4bit")
    remember_places(store, "owner/tiny-4bit")
    assert not (store.path / LOCATION).exists()
    assert find_base(store, None).directory == repository / "snapshots/abc"
    assert base_name("owner/not-here") == "owner/not-here"
