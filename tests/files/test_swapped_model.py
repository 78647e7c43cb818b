"""A model of which a byte was changed where samples do not look is another model, to everything
that is bound to it; what earlier versions bound by samples stays usable and says so.

Run: pytest tests/files/test_swapped_model.py
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxstacks import base_model
from mlxstacks.errors import AdapterError, CheckpointError, OtherBaseError
from mlxstacks.files.adapters import read_adapter, write_adapter
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.lora_modules import FINGERPRINT_KEY, Adapter
from mlxstacks.files.settings import StacksImportSettings, StacksListSettings, StacksVerifySettings
from mlxstacks.files.stack_adapters import import_adapter
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.store_verify import verify_store
from mlxstacks.fuse import run as fuse_run
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.stack_files import serve
from mlxstacks.studies.stack.store_commands import list_store
from tests.files.raw import change_between_samples
from tests.tiny_models import random_adapter, write_llama

SAMPLED = "0" * 64  # any: of the kind that earlier versions wrote


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("swapped")
    write_llama(directory / "model", bits=None)
    random_adapter(directory / "model", ["self_attn.q_proj"], directory=directory / "adapter")
    return directory


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "model", tmp_path / "model"))


def print_of(model: Path, like: str | None = None) -> str:
    return fingerprint(open_checkpoint(model), like)


def marked(written: Path, base: str, save_path: Path | None = None) -> Adapter:
    """The adapter, trained on the base with this fingerprint."""
    adapter = read_adapter(written / "adapter")
    adapter = replace(adapter, config={**adapter.config, FINGERPRINT_KEY: base})
    if save_path is not None:
        write_adapter(adapter, save_path)
    return adapter


def test_a_store_refuses_a_swapped_model(model: Path, tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "model", print_of(model))
    assert find_base(store, str(model)).directory == model
    change_between_samples(model, keep_mtime=True)
    with pytest.raises(OtherBaseError, match="use that base"):
        find_base(store, str(model))
    loaded = base_model.load(model, lazy=True)[0]
    with pytest.raises(OtherBaseError, match="use that base"):
        serve(loaded, store, base_fingerprint=print_of(model, store.manifest.base_fingerprint))
    settings = StacksVerifySettings(store_path=str(store.path), model=str(model))
    assert verify_store(settings).base == "another"


def test_an_old_store_is_readable_and_marked(model: Path, tmp_path: Path) -> None:
    sampled = print_of(model, like=SAMPLED)
    store = Store.create(tmp_path / "store", "model", sampled)
    notes: list[str] = []
    find_base(store, str(model), notes)
    listed = list_store(StacksListSettings(store_path=str(store.path))).notes
    settings = StacksVerifySettings(store_path=str(store.path), model=str(model))
    verified = verify_store(settings)
    assert verified.base == "same"
    for told in (notes, listed, verified.notes):
        assert sum("bound weakly" in note for note in told) == 1
    change_between_samples(model)
    find_base(store, str(model))
    config = model / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    with pytest.raises(OtherBaseError, match="use that base"):
        find_base(store, str(model))


def test_an_old_adapter_is_readable_and_marked(model: Path, written: Path, tmp_path: Path) -> None:
    marked(written, print_of(model, like=SAMPLED), tmp_path / "old")
    settings = FuseSettings(
        model=str(model), adapter_path=(str(tmp_path / "old"),), save_path=str(tmp_path / "fused")
    )
    report = fuse_run.run(settings, dry_run=True)
    assert any("old: bound weakly" in note for note in report.notes)
    assert report.base_fingerprint == print_of(model)


def test_an_old_adapter_comes_into_a_new_store(model: Path, written: Path, tmp_path: Path) -> None:
    marked(written, print_of(model, like=SAMPLED), tmp_path / "old")
    Store.create(tmp_path / "store", "model", print_of(model))
    settings = StacksImportSettings(
        store_path=str(tmp_path / "store"), adapter_path=str(tmp_path / "old"), domain="a"
    )
    unseen = import_adapter(settings, dry_run=True)
    assert unseen.base == "not verifiable"
    assert any("--model can compare" in note for note in unseen.notes)
    settings = settings.model_copy(update={"model": str(model)})
    compared = import_adapter(settings)
    assert compared.base == "verified by samples"
    assert any("bound weakly" in note for note in compared.notes)
    marked(written, SAMPLED, tmp_path / "strange")
    strange = {"adapter_path": str(tmp_path / "strange"), "domain": "b"}
    with pytest.raises(AdapterError, match="--allow-base"):
        import_adapter(settings.model_copy(update=strange))


def test_a_model_that_changes_during_a_fuse_is_refused(
    model: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = fuse_run.write_shards

    def write_and_change(*arguments: Any, **options: Any) -> Any:
        result = write(*arguments, **options)
        change_between_samples(model)
        return result

    monkeypatch.setattr(fuse_run, "write_shards", write_and_change)
    settings = FuseSettings(
        model=str(model), adapter_path=(str(written / "adapter"),), save_path=str(tmp_path / "out")
    )
    with pytest.raises(CheckpointError, match="changed during the run"):
        fuse_run.run(settings)
    assert not (tmp_path / "out").exists()
