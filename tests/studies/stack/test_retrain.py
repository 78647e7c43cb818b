"""`mlxstacks stacks retrain` and `stacks undo`: one domain replaced, the rest to the byte.

Run: pytest tests/studies/stack/test_retrain.py
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.settings import (
    StacksGcSettings,
    StacksRetrainSettings,
    StacksSwitchSettings,
    StacksUndoSettings,
    StacksVerifySettings,
)
from mlxstacks.files.store import Change, Store
from mlxstacks.files.store_commands import collect_garbage, disable_domain, undo_change
from mlxstacks.files.store_verify import verify_store
from mlxstacks.studies.stack import retrain
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.study.run_directory import work_path
from mlxstacks.training import boost
from mlxstacks.training.settings import StackRunSettings
from tests.studies.stack_cases import (
    TWO,
    domain_of,
    domain_rows,
    hashes,
    log_of,
    settings_for,
    write_domains,
)
from tests.studies.train_cases import write_rows

Places = tuple[Path, Path]


@pytest.fixture
def own(places: Places, whole: Store, tmp_path: Path) -> Callable[..., StacksRetrainSettings]:
    """Settings for alpha of a copy of the store of alpha and beta, with rows that are new."""
    shutil.copytree(whole.path, tmp_path / "store")
    data = write_domains(tmp_path / "data")
    write_rows(data / "alpha.jsonl", domain_rows("alpha", 24, start=100))

    def settings(**changes: Any) -> StacksRetrainSettings:
        values = {
            "store_path": str(tmp_path / "store"), "domain": "alpha", "model": str(places[0]),
            "data": str(data), "guard": "off",
        }  # fmt: skip
        return StacksRetrainSettings.model_validate(values | changes)

    return settings


def settings_of(settings: StacksRetrainSettings) -> StackRunSettings:
    """Of the run of `stack` behind it."""
    store = Store.open(settings.store_path or "")
    return retrain.stack_settings(store, domain_of(store, "alpha"), settings)


def test_one_domain_is_replaced_later_ones_are_marked_and_undo_takes_it_back(
    own: Callable[..., StacksRetrainSettings], whole: Store
) -> None:
    before = hashes(whole.path)
    result = retrain.run(own(moved_above=1e-6))
    store = Store.open(own().store_path or "")
    old, new = (domain_of(s, "alpha") for s in (whole, store))
    assert [d.name for d in store.manifest.domains] == ["alpha", "beta"]
    assert {s.file.sha256 for s in old.stacks}.isdisjoint(s.file.sha256 for s in new.stacks)
    assert {k: v for k, v in new.settings.items() if k != "data"} == {
        k: v for k, v in old.settings.items() if k != "data"
    }
    assert new.prefix_changed is None
    # the other domain: all its files and facts, and a mark
    after = hashes(store.path)
    assert all(after[file] == before[file] for file in before if file.startswith("s"))
    beta, beta_before = (domain_of(s, "beta") for s in (store, whole))
    assert beta.stacks == beta_before.stacks
    mark = beta.prefix_changed
    assert mark.retrained == ("alpha",)
    assert mark.loss_before == beta_before.final_loss
    assert mark.loss_after == store.manifest.matrix["prefix"]["beta"]["beta"] != mark.loss_before
    assert mark.moved
    assert any("beta was trained before alpha was trained again" in n for n in result.notes)
    seconds = result.data["domains"]["alpha"]["stage_seconds"]
    assert seconds.keys() == {"before", "directions", "training", "after"}
    assert [e["seconds"] for e in log_of(store.path) if e["event"] == "retrained"] == [seconds]
    trained = [{*e["seconds"]} for e in log_of(whole.path) if e["event"] == "trained"]
    assert trained == [{"directions", "training"}] * 2
    # undone, it is what it was; undone again, what it became
    undo = StacksUndoSettings(store_path=str(store.path))
    assert undo_change(undo, dry_run=True).status == "planned"
    assert undo_change(undo).domain == "alpha, beta"
    assert hashes(store.path)["manifest.json"] == before["manifest.json"]
    undo_change(undo)
    assert hashes(store.path)["manifest.json"] == after["manifest.json"]
    collect_garbage(StacksGcSettings(store_path=str(store.path), grace_seconds=0))
    with pytest.raises(StoreError, match="missing"):
        undo_change(undo)
    assert store.refresh() == Store.open(store.path).manifest


@pytest.mark.parametrize("moment", ["second round", "later domains", "the change"])
def test_stopped_anywhere_the_old_version_stays_and_the_next_run_ends_the_same(
    own: Callable[..., StacksRetrainSettings],
    whole: Store,
    stopped: Callable[..., None],
    places: Places,
    moment: str,
) -> None:
    """The store is whole at every moment; the work resumes to the bytes of one run."""
    target = Path(own().store_path or "")
    shutil.copytree(target, target.with_name("other"))
    retrain.run(own(store_path=str(target.with_name("other"))))
    owner, name, when = {
        "second round": (boost, "add_stack", lambda model, job, number: number == 2),
        "later domains": (stack_run, "serve_domains", None),
        "the change": (Change, "commit", None),
    }[moment]
    stack = settings_of(own())
    stopped(stack, owner, name, when, retrain="alpha", moved_above=0.01)
    assert {k: v for k, v in hashes(target).items() if k in hashes(whole.path)} == hashes(
        whole.path
    )
    assert verify_store(StacksVerifySettings(store_path=str(target))).problems == ()
    with pytest.raises(InputError, match="unfinished domain alpha"):
        stack_run.run(settings_for(*places, target, **{**TWO, "domains": ("gamma",)}))
    retrain.run(own())
    assert hashes(target) == hashes(target.with_name("other"))
    assert not work_path(target).exists()


def test_a_domain_that_cannot_be_trained_again_is_named(
    own: Callable[..., StacksRetrainSettings],
) -> None:
    with pytest.raises(InputError, match="no domain 'alfa'"):
        retrain.run(own(domain="alfa"))
    with pytest.raises(InputError, match="there are: alpha, beta"):
        retrain.run(own(domain=None))
    with pytest.raises(InputError, match=r"alpha\.jsonl not there"):
        retrain.run(own(data="nowhere"))
    disable_domain(StacksSwitchSettings(store_path=own().store_path, domain="alpha"))
    with pytest.raises(InputError, match="alpha is disabled"):
        retrain.run(own())
