"""What `mlxstacks stack` refuses, before anything is trained or written.

Run: pytest tests/studies/stack/test_bad_input.py
"""

import math
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import (
    CheckpointError,
    InputError,
    ResourceLimitError,
    StoreError,
    TargetError,
)
from mlxstacks.files.store import Store
from mlxstacks.studies.stack import run as stack_run
from tests.files.raw import change_between_samples
from tests.studies.stack_cases import domain_rows, hashes, settings_for
from tests.studies.train_cases import write_rows
from tests.tiny_models import write_llama

Places = tuple[Path, Path]
ONE: dict[str, Any] = {"domains": ("alpha",), "iters": 2, "rounds": 1, "keys": ("q_proj",)}


@pytest.fixture(scope="module")
def store(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Store:
    target = tmp_path_factory.mktemp("out") / "store"
    stack_run.run(settings_for(*places, target, **ONE))
    return Store.open(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/nowhere"}, "no such directory"),
        ({"data": "/nowhere"}, "/nowhere: no such directory; --data takes one"),
        ({"domains": ("alpha", "delta")}, r"no data for delta.*there: alpha.jsonl"),
        ({"layers": "0,7"}, "layer 7: the model has layers 0 to 1"),
        ({"keys": ("donw_proj",)}, "'donw_proj' matches no projection; close: down_proj"),
        ({"keys": ("mlp.gate",)}, "router of a mixture of experts is never adapted"),
        ({"stack": {"rank": 100}}, r"rank 100; allowed is 1 to 64"),
        ({"stack": {"rank": 2, "latent_dim": 100}}, "latent_dim 100 is above"),
        (
            {"stack": {"rank": 2, "switch_form": "per_expert"}, "keys": ()},
            r"per_expert needs layers by name: .* M parameters",
        ),
        ({"domains": ("alpha", "alpha-r1")}, "alpha-r1: also the name of another domain's stack"),
        ({"validation_rows": 24}, "24 rows|validation"),
    ],
    ids=str,
)
def test_bad_input_is_told_before_anything_is_written(
    places: Places, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    data = places[1]
    if changes.get("domains") == ("alpha", "alpha-r1"):
        data = tmp_path / "data"
        for name in ("alpha", "alpha-r1"):
            write_rows(data / f"{name}.jsonl", domain_rows("alpha"))
    changes = dict(changes)
    model, data = changes.pop("model", places[0]), changes.pop("data", data)
    settings = settings_for(model, data, tmp_path / "store", **{**ONE, **changes})
    with pytest.raises(InputError, match=f"(?s){message}"):
        stack_run.run(settings)
    assert [path.name for path in tmp_path.iterdir() if path.name != "data"] == []


def test_domains_without_usable_rows(places: Places, tmp_path: Path) -> None:
    data = tmp_path / "data"
    settings = settings_for(places[0], data, tmp_path / "store", **{**ONE, "domains": ()})
    data.mkdir()
    with pytest.raises(InputError, match=r"has no NAME\.jsonl files"):
        stack_run.run(settings)
    (data / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match=r"domain empty: .*no rows"):
        stack_run.run(settings)
    (data / "empty.jsonl").write_text('{"oops": 1}\n')
    with pytest.raises(InputError, match=r"domain empty: .*empty\.jsonl, line 1.*oops"):
        stack_run.run(settings)
    (data / "empty.jsonl").write_text("{oops\n")
    with pytest.raises(InputError, match=r"line 1: not JSON"):
        stack_run.run(settings)
    (data / "empty.jsonl").unlink()
    write_rows(data / "one.jsonl", domain_rows("alpha", 1))
    with pytest.raises(InputError, match="domain one: "):
        stack_run.run(settings)
    (data / "one.jsonl").rename(data / "no name.jsonl")
    with pytest.raises(InputError, match=r"no name\.jsonl: a domain's name becomes part of file"):
        stack_run.run(settings)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_neither_data_nor_domains(places: Places, tmp_path: Path) -> None:
    settings = settings_for(*places, tmp_path / "store", **{**ONE, "domains": ()})
    settings = settings.model_copy(update={"data": None})
    with pytest.raises(InputError, match=r"needs data .* or domains"):
        stack_run.run(settings)


def test_rows_without_an_answer_to_learn(places: Places, tmp_path: Path) -> None:
    questions = [{"messages": [{"role": "user", "content": f"word {i}?"}]} for i in range(9)]
    data = write_rows(tmp_path / "data" / "alpha.jsonl", questions).parent
    with pytest.raises(InputError, match="alpha"):
        stack_run.run(settings_for(places[0], data, tmp_path / "store", **ONE))


# --- the target -----------------------------------------------------------------------------------


def test_a_target_that_is_no_store(places: Places, tmp_path: Path) -> None:
    target = tmp_path / "store"
    target.write_text("a file")
    with pytest.raises(TargetError, match="is a file"):
        stack_run.run(settings_for(*places, target, **ONE))
    target.unlink()
    target.mkdir()
    (target / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(TargetError, match=r"holds thesis\.txt, but no store"):
            stack_run.run(settings_for(*places, target, **{**ONE, "force": force}))
    (target / "thesis.txt").rename(target / "manifest.json")
    with pytest.raises(StoreError, match=r"manifest\.json: damaged"):
        stack_run.run(settings_for(*places, target, **ONE))
    with pytest.raises(TargetError, match="holds data, model, but no store"):
        stack_run.run(settings_for(*places, places[1].parent, **ONE))


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"], ids=["too long", "a NUL"])
def test_a_target_that_cannot_be_a_path(places: Places, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="not a usable") as refused:
        stack_run.run(settings_for(*places, tmp_path / name, **ONE))
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": math.inf},
        {"clip_norm": math.inf},
        {"domains": ({"name": "alpha", "learning_rate": math.inf},)},
        {"stack": {"rank": 2, "alpha": math.inf}},
    ],
    ids=str,
)
def test_infinite_settings(places: Places, tmp_path: Path, changes: dict[str, Any]) -> None:
    """JSON has no word for them, and the manifest keeps the settings."""
    with pytest.raises(ValueError, match="finite number"):
        settings_for(*places, tmp_path / "store", **(ONE | changes))


def test_an_empty_directory_becomes_a_store(places: Places, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    result = stack_run.run(settings_for(*places, tmp_path / "store", **ONE))
    assert result.data["status"] == "trained"


def test_a_store_without_its_manifest(places: Places, store: Store, tmp_path: Path) -> None:
    (tmp_path / "store" / "stacks").mkdir(parents=True)
    with pytest.raises(StoreError, match="restore it from a copy"):
        stack_run.run(settings_for(*places, tmp_path / "store", **ONE))


def test_a_store_of_another_base(places: Places, store: Store, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", bits=4, hidden_size=64)
    before = hashes(store.path)
    with pytest.raises(StoreError, match="were trained on model with fingerprint"):
        stack_run.run(settings_for(other, places[1], store.path, **ONE))
    assert hashes(store.path) == before


def test_a_base_that_changes_before_it_is_read(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path / "model", bits=None)
    guarded = stack_run.guarded

    def guarded_and_changed(*arguments: Any, **options: Any) -> Any:
        change_between_samples(model)
        return guarded(*arguments, **options)

    monkeypatch.setattr(stack_run, "guarded", guarded_and_changed)
    with pytest.raises(CheckpointError, match="changed during the run"):
        stack_run.run(settings_for(model, places[1], tmp_path / "store", **ONE))


def test_a_stored_domain_with_other_settings_is_an_error_that_lists_them(
    places: Places, store: Store
) -> None:
    before = hashes(store.path)
    changes: dict[str, Any] = {"seed": 7, "stack": {"rank": 3, "num_experts": 3}, "iters": 4}
    with pytest.raises(InputError) as refused:
        stack_run.run(settings_for(*places, store.path, **{**ONE, **changes}))
    message = str(refused.value)
    for line in ("seed: was 42, now 7", "stack.rank: was 2, now 3", "iters: was 2, now 4"):
        assert f"alpha: {line}" in message
    assert "learning_rate" not in message
    assert "stacks remove" in message
    assert hashes(store.path) == before


def test_a_stored_domain_with_more_rows_is_an_error_too(
    places: Places, store: Store, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "data" / "alpha.jsonl", domain_rows("alpha", 25)).parent
    with pytest.raises(InputError, match=r"alpha: data: alpha\.jsonl changed since"):
        stack_run.run(settings_for(places[0], data, store.path, **ONE))


def test_a_name_that_differs_in_case_only(places: Places, store: Store, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "data" / "Alpha.jsonl", domain_rows("beta")).parent
    write_rows(data / "alpha.jsonl", domain_rows("alpha"))
    settings = settings_for(places[0], data, store.path, **{**ONE, "domains": ("Alpha",)})
    with pytest.raises(InputError, match="the store has a domain alpha, and case does not count"):
        stack_run.run(settings)


# --- limits ---------------------------------------------------------------------------------------


def test_the_guard_is_asked_before_anything_is_trained(places: Places, tmp_path: Path) -> None:
    limits: dict[str, Any] = {**ONE, "resource_limit": 100, "guard": "refuse"}
    settings = settings_for(*places, tmp_path / "store", **limits)
    with pytest.raises(ResourceLimitError, match="guard refuses"):
        stack_run.run(settings)
    assert list(tmp_path.iterdir()) == []
    report = stack_run.run(settings.model_copy(update={"guard": "warn"}))
    assert any("The guard warns" in note for note in report.notes)
