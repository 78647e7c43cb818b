"""`mlxstacks stack` goes on: after another version, with damaged work, in a group, from a store.

Run: pytest tests/studies/stack/test_resume.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.store import Store
from mlxstacks.studies.stack import checkpoint as stack_checkpoint
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.studies.stack.setup import set_up
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.continual import DriftError
from tests.studies.stack_cases import (
    TWO,
    domain_of,
    hashes,
    log_of,
    settings_for,
    train_store,
    write_domains,
)

Places = tuple[Path, Path]
SHORT: dict[str, Any] = {**TWO, "iters": 4, "rounds": 1}
ALPHA: dict[str, Any] = {**SHORT, "domains": ("alpha",)}


@pytest.mark.parametrize(("moved", "drifts"), [(1e-6, False), (0.1, True)])
def test_a_loss_that_another_version_measured_may_differ_by_rounding(
    places: Places, tmp_path: Path, stopped: Callable[..., None], moved: float, drifts: bool
) -> None:
    """Every round is done, by a version that measured a little else; the store lacks the domain."""
    settings = settings_for(*places, tmp_path / "store", **ALPHA)
    stopped(settings, stack_run, "commit_domain")
    rounds = work_path(tmp_path / "store") / "rounds.json"
    document = json.loads(rounds.read_text())
    document["rounds"][0]["loss_after"] += moved
    rounds.write_text(json.dumps(document))
    if drifts:
        with pytest.raises(DriftError, match="alpha: was"):
            stack_run.run(settings)
        return
    stack_run.run(settings)
    store = Store.open(tmp_path / "store")
    assert [domain.name for domain in store.manifest.domains] == ["alpha"]


def test_other_versions_are_told_when_a_round_goes_on(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: Callable[..., None]
) -> None:
    settings = settings_for(*places, tmp_path / "store", **ALPHA)
    stopped(settings, stack_run, "train_domain")
    with monkeypatch.context() as patch:
        patch.setattr(stack_checkpoint, "versions", lambda: {"mlx": "0.0.1"})
        stopped(settings, stack_checkpoint.RoundCheckpoints, "round_done")
    report = stack_run.run(settings)
    assert any("alpha: The run began with mlx 0.0.1, now" in note for note in report.notes)
    again = stack_run.run(settings_for(*places, tmp_path / "store", **SHORT))
    assert not any("The run began with" in note for note in again.notes)
    rounds = [event for event in log_of(tmp_path / "store") if event["event"] == "round"]
    assert rounds
    assert all("mlx" in event["versions"] for event in rounds)


def test_damaged_directions_are_found_again(
    places: Places, whole: Store, with_alpha: Store, tmp_path: Path, stopped: Callable[..., None]
) -> None:
    settings = settings_for(*places, tmp_path / "store", **TWO)
    stopped(
        settings, stack_checkpoint.RoundCheckpoints, "load",
        lambda checkpoints, *_: checkpoints.plan.name == "beta",
    )  # fmt: skip
    bases = work_path(tmp_path / "store") / "bases.safetensors"
    data = bytearray(bases.read_bytes())
    data[-2] ^= 0x7F
    bases.write_bytes(data)
    stack_run.run(settings)
    assert hashes(tmp_path / "store") == hashes(whole.path)


def test_work_of_an_unknown_domain_is_not_gone_on_with(
    places: Places, tmp_path: Path, stopped: Callable[..., None]
) -> None:
    settings = settings_for(*places, tmp_path / "store", **ALPHA)
    stopped(settings, stack_run, "commit_domain")
    (work_path(tmp_path / "store") / "run.json").write_text('{"name": "al')
    with pytest.raises(InputError, match="nobody knows which domain"):
        stack_run.run(settings)
    stack_run.run(settings.model_copy(update={"resume": False}))
    assert Store.open(tmp_path / "store").manifest.domain_named("alpha") is not None


def test_the_processes_of_a_group_take_the_loss_of_the_first(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts that round differently would stop at different steps, and wait for each other."""
    monkeypatch.setattr(stack_run, "gathered", lambda number, group: [round(number, 2), -1.0])
    report = stack_run.run(settings_for(*places, tmp_path / "store", **ALPHA))
    (only,) = report.data["domains"]["alpha"]["rounds"]
    losses = [only["loss_before"], only["loss_trained"], only["loss_after"]]
    losses += [record["validation_loss"] for record in only["validation"]]
    losses += [rows["alpha"]["alpha"] for rows in report.data["matrix"].values()]
    assert losses == [round(loss, 2) for loss in losses]


def test_processes_that_do_not_see_the_work_are_refused(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_run, "gathered", lambda number, group: [number, 0])
    with pytest.raises(InputError, match="processes 1 do not see it"):
        stack_run.run(settings_for(*places, tmp_path / "store", **ALPHA))
    assert not (tmp_path / "store").exists()


def test_a_store_without_prefix_rows_is_compared_too(places: Places, tmp_path: Path) -> None:
    """A matrix that shows another mode alone; what the domain ended with is in its record."""
    modes: dict[str, Any] = {"modes": ("ungated",)}
    store = train_store(places, tmp_path / "store", **ALPHA, **modes)
    assert "prefix" not in store.manifest.matrix
    record = domain_of(store, "alpha")
    with store.change() as change:
        moved = replace(record, final_loss=record.final_loss + 0.1)
        change.manifest = change.manifest.with_domain(moved)
    with pytest.raises(StoreError, match="do not have the loss that they were stored with"):
        stack_run.run(settings_for(*places, tmp_path / "store", **(SHORT | modes)))


def test_directions_are_made_from_more_rows_than_the_loss(places: Places, tmp_path: Path) -> None:
    data = write_domains(tmp_path / "data", ("alpha",), count=260)
    changes = {**ALPHA, "validation_rows": 230}
    rows = set_up(settings_for(places[0], data, tmp_path / "store", **changes), None).rows["alpha"]
    assert len(rows.samples) == 230
    assert rows.evaluated == len(rows.validation) == 200
    assert rows.report()["validation_rows_evaluated"] == 200


def test_rows_to_validate_are_asked_for_in_whatever_form_a_domain_is_given(
    places: Places, tmp_path: Path
) -> None:
    named = {"name": "alpha", "data": str(places[1] / "alpha.jsonl")}
    for given, held in (
        (named, 8),
        (named | {"data": {"sources": [named["data"]], "validation_rows": 5}}, 5),
    ):
        changes = {**ALPHA, "domains": (given,), "validation_rows": 8}
        rows = set_up(settings_for(*places, tmp_path / "store", **changes), None).rows["alpha"]
        assert len(rows.validation) == held
