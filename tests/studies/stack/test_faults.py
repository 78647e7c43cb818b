"""`mlxstacks stack` when things go wrong: stopped, killed, NaN, full disk, data gone, drift.

Run: pytest tests/studies/stack/test_faults.py
"""

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files.settings import StacksGcSettings, StacksRemoveSettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import collect_garbage, remove_domain
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.studies.stack import checkpoint as stack_checkpoint
from mlxstacks.studies.stack import plan as stack_plan
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.continual import DriftError
from mlxstacks.training.loop import NonFiniteError
from tests.studies.stack.conftest import StoppedError
from tests.studies.stack_cases import (
    TWO,
    domain_of,
    domain_rows,
    hashes,
    log_of,
    settings_for,
    train_store,
    write_domains,
)
from tests.studies.train_cases import write_rows
from tests.warm import ended, start

Places = tuple[Path, Path]


# --- stopped --------------------------------------------------------------------------------------


def test_stopped_before_every_write_it_ends_with_the_same_bytes(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is stopped at its n-th file, for growing n, and goes on each time."""
    changes = {**TWO, "iters": 2, "learning_rate": 3e-3, "save_every": 1, "steps_per_report": 1}
    whole = train_store(places, tmp_path / "whole" / "store", **changes)
    assert len(whole.manifest.stacks) == 4
    settings = settings_for(*places, tmp_path / "store", **changes)
    plain, allowed, stops = os.replace, 0, 0

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal allowed
        if allowed == 0:
            raise StoppedError
        allowed -= 1
        plain(*args, **kwargs)

    monkeypatch.setattr(os, "replace", counted)
    for allowed in range(0, 200, 2):  # noqa: B007
        try:
            stack_run.run(settings)
            break
        except StoppedError:
            stops += 1
    assert stops >= 5
    assert hashes(tmp_path / "store") == hashes(whole.path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "whole"]
    steps = [e for e in log_of(tmp_path / "store") if e["event"] == "step"]
    assert [(e["domain"], e["round"], e["step"]) for e in steps] == [
        (e["domain"], e["round"], e["step"]) for e in log_of(whole.path) if e["event"] == "step"
    ]


def signs_of_life(target: Path) -> tuple[Any, ...]:
    files = [path for root in (work_path(target), target) for path in root.rglob("*")]
    return tuple(sorted((str(path), path.stat().st_mtime_ns) for path in files if path.is_file()))


def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    places: Places, whole: Store, tmp_path: Path, campaign: Callable[..., range]
) -> None:
    """kill -9, some time after the run has begun to write, until it was killed often enough. It
    saves and logs more often than the whole run, which is no other run.
    """
    changes = {**TWO, "save_every": 1, "steps_per_report": 1}
    target, wanted, duration = tmp_path / "store", hashes(whole.path), 2.0
    settings, chance = settings_for(*places, target, **changes).model_dump_json(), random.Random(0)
    kills, most = 0, len(campaign(100, usual=3))
    while kills < most:
        before = signs_of_life(target)
        process = start("stack", settings)
        while process.is_alive() and signs_of_life(target) == before:
            time.sleep(0.005)
        # The first at once, when the run has only begun: one kill at least meets it at work.
        time.sleep(chance.uniform(0, duration / 2) if kills else 0)
        process.kill()
        kills += ended(process) == -signal.SIGKILL
        if target.exists() and not work_path(target).exists():
            assert hashes(target) == wanted
            shutil.rmtree(target)
    assert ended(start("stack", settings)) == 0
    assert hashes(target) == wanted
    # What a killed writer left half-written is gc's.
    collect_garbage(StacksGcSettings(store_path=str(target), grace_seconds=0))
    assert [path.name for path in target.rglob(".*")] == [".lock"]
    assert [p.name for p in tmp_path.iterdir() if "work" in p.name] == []


def test_an_unfinished_domain_of_other_settings_is_refused_with_what_differs(
    places: Places, tmp_path: Path, stopped: Callable[..., None]
) -> None:
    settings = settings_for(*places, tmp_path / "store", **{**TWO, "domains": ("alpha",)})
    stopped_at(settings, stopped, 4)
    before = signs_of_life(tmp_path / "store")
    other = settings.model_copy(update={"learning_rate": 2e-2, "balance_weight": 0.1})
    with pytest.raises(InputError) as refused:
        stack_run.run(other)
    message = str(refused.value)
    assert "unfinished domain alpha" in message
    assert "learning_rate: was 0.01, now 0.02" in message
    assert "balance_weight: was 0.01, now 0.1" in message
    assert "--no-resume" in message
    assert "seed" not in message
    assert signs_of_life(tmp_path / "store") == before
    # How often it saves is no other run.
    stopped_at(settings.model_copy(update={"save_every": 1}), stopped, 5)
    fresh = stack_run.run(other.model_copy(update={"resume": False}))
    assert fresh.data["domains"]["alpha"]["resumed_from_step"] is None
    assert fresh.data["domains"]["alpha"]["steps"] == 12


def stopped_at(settings: Any, stopped: Callable[..., None], step: int) -> None:
    """Run until this step of the first domain is done and logged, and stop there."""
    stopped(
        settings, stack_checkpoint.RoundCheckpoints, "on_step",
        lambda checkpoints, number, state, record: state.step == step + 1,
    )  # fmt: skip


# --- what goes wrong while it runs ----------------------------------------------------------------


def test_a_loss_that_is_not_finite_leaves_the_store_as_it_was(
    places: Places, with_alpha: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the second domain."""
    domains = ("alpha", {"name": "beta", "iters": 4})
    settings = settings_for(*places, tmp_path / "store", **{**TWO, "domains": domains})
    before = hashes(tmp_path / "store")
    plain = stack_plan.DomainPlan.batches_at

    def poisoned(self: Any, number: int, step: int) -> Any:
        batches = plain(self, number, step)
        if number == 2 and step >= 2:
            batches[0].weights[:] = np.nan
        return batches

    with monkeypatch.context() as patch:
        patch.setattr(stack_plan.DomainPlan, "batches_at", poisoned)
        with pytest.raises(NonFiniteError, match=r"domain beta: step 3: the loss is nan.*--no-res"):
            stack_run.run(settings)
    assert hashes(tmp_path / "store") == before
    # The cause gone, it goes on at the step before.
    report = stack_run.run(settings)
    assert report.data["domains"]["beta"]["resumed_from_step"] == 4 + 2


def test_a_full_disk_while_freezing_loses_nothing(
    places: Places, with_alpha: Store, whole: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(*places, tmp_path / "store", **TWO)
    before = hashes(tmp_path / "store")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for where in ("work", "store"):
        with monkeypatch.context() as patch:
            if where == "work":
                patch.setattr("mlxstacks.files.shards.write_all", full)
            else:
                plain = stack_run.commit_domain

                def commit(*args: Any, plain: Any = plain) -> None:
                    patch.setattr("mlxstacks.files.shards.write_all", full)
                    plain(*args)

                patch.setattr(stack_run, "commit_domain", commit)
            with pytest.raises(TargetError, match="the disk is full"):
                stack_run.run(settings)
        assert hashes(tmp_path / "store") == before
    assert stack_run.run(settings).data["status"] == "trained"
    assert hashes(tmp_path / "store") == hashes(whole.path)


def test_data_that_is_gone_is_named_and_nothing_changes(
    places: Places, with_alpha: Store, tmp_path: Path
) -> None:
    data = write_domains(tmp_path / "data", ("alpha", "beta"))
    mine = (places[0], data)
    before = hashes(tmp_path / "store")
    (data / "alpha.jsonl").rename(tmp_path / "moved.jsonl")
    (tmp_path / "store" / "base.json").unlink()  # which says where its rows were
    settings = settings_for(*mine, tmp_path / "store", **{**TWO, "domains": ("beta",)})
    with pytest.raises(InputError) as refused:
        stack_run.run(settings)
    assert f"alpha: {data / 'alpha.jsonl'}" in str(refused.value)
    assert "Put the files back" in str(refused.value)
    assert hashes(tmp_path / "store") == before
    # Listed with its new place, it is the same data.
    moved = {"name": "alpha", "data": {"sources": str(tmp_path / "moved.jsonl")}}
    moved["data"]["validation_rows"] = 4  # type: ignore[index]
    again = settings_for(*mine, tmp_path / "store", **{**TWO, "domains": (moved, "beta")})
    assert stack_run.run(again).data["status"] == "trained"


def test_rows_of_a_stored_split_that_are_gone_are_counted(
    places: Places, with_alpha: Store, tmp_path: Path
) -> None:
    data = write_domains(tmp_path / "data", ("alpha", "beta"))
    write_rows(data / "alpha.jsonl", domain_rows("alpha", 20))
    with pytest.raises(InputError, match=r"domain alpha: \d of 20 training rows and \d of 4"):
        stack_run.run(settings_for(places[0], data, tmp_path / "store", **TWO))


def test_drift_of_a_frozen_stack_stops_the_run(
    places: Places, with_alpha: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something writes a little into a frozen stack while the next domain trains."""
    before = hashes(tmp_path / "store")
    plain = stack_checkpoint.RoundCheckpoints.round_done

    def touch(self: Any, record: Any, parts: Any) -> None:
        plain(self, record, parts)
        for _, layer in stacked_layers(self.setup.model):
            stacks = layer.stacks.stacks()
            first = stacks[0]
            changed = type(first)(
                first.id, first.shape, first.lora_a, first.lora_b * 1.01, first.router
            )
            layer.set_stacks([changed, *stacks[1:]])

    monkeypatch.setattr(stack_checkpoint.RoundCheckpoints, "round_done", touch)
    with pytest.raises(DriftError, match=r"alpha: was \d") as drift:
        stack_run.run(settings_for(*places, tmp_path / "store", **TWO))
    assert "nothing was added to the store" in str(drift.value)
    assert isinstance(drift.value, StoreError)
    assert hashes(tmp_path / "store") == before


def test_a_store_whose_losses_are_not_met_here_is_not_gone_on_with(
    places: Places, with_alpha: Store, tmp_path: Path
) -> None:
    """Losses far from the stored ones: other rows, base or evaluator. Nearby ones are rounding."""
    store = with_alpha
    with store.change() as change:
        rows: Any = {"prefix": {"alpha": {"alpha": domain_of(store, "alpha").final_loss + 0.1}}}
        change.manifest = replace(change.manifest, matrix=rows)
    with pytest.raises(StoreError, match="do not have the loss that they were stored with"):
        stack_run.run(settings_for(*places, tmp_path / "store", **TWO))
    with store.change() as change:
        rows = {"prefix": {"alpha": {"alpha": domain_of(store, "alpha").final_loss + 1e-6}}}
        change.manifest = replace(change.manifest, matrix=rows)
    report = stack_run.run(settings_for(*places, tmp_path / "store", **TWO))
    assert any("differ here by rounding" in note for note in report.notes)


def test_a_store_that_changes_during_the_training_is_not_written(
    places: Places, with_alpha: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = stack_run.commit_domain

    def commit(*args: Any) -> None:
        remove_domain(StacksRemoveSettings(store_path=str(tmp_path / "store"), domain="alpha"))
        plain(*args)

    domains = ({"name": "beta", "rounds": 1, "iters": 2},)
    settings = settings_for(*places, tmp_path / "store", **{**TWO, "domains": domains})
    with monkeypatch.context() as patch:
        patch.setattr(stack_run, "commit_domain", commit)
        with pytest.raises(StoreError, match="was changed while beta was trained"):
            stack_run.run(settings)
    assert Store.open(tmp_path / "store").manifest.domains == ()
    with pytest.raises(InputError, match="trained_on"):
        stack_run.run(settings)
    assert stack_run.run(settings.model_copy(update={"resume": False})).data["status"] == "trained"


def test_a_stack_too_large_for_float16_can_be_stored_as_bfloat16(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without training it again: the state was saved before it was frozen."""
    from mlxstacks.training import boost

    def huge(model: Any, state: Any) -> None:
        for _, layer in stacked_layers(model):
            assert layer.active is not None
            layer.active.lora_a = layer.active.lora_a * 1e7
            layer.active.lora_b = layer.active.lora_b * 1e-7

    settings = settings_for(*places, tmp_path / "store", **{**TWO, "domains": ("alpha",)})
    monkeypatch.setattr(boost, "restore_best", huge)
    with pytest.raises(InputError, match=r"too large for mlx.core.float16; store it as bfloat16"):
        stack_run.run(settings)
    stack = settings.stack.model_copy(update={"storage": "bfloat16"})
    report = stack_run.run(settings.model_copy(update={"stack": stack}))
    assert report.data["domains"]["alpha"]["resumed_from_step"] == 6


def test_two_runs_to_one_store_do_not_mix(places: Places, tmp_path: Path) -> None:
    with (
        filelock.FileLock(f"{work_path(tmp_path / 'store')}.lock"),
        pytest.raises(TargetError, match="is writing it"),
    ):
        stack_run.run(settings_for(*places, tmp_path / "store", **TWO))


# --- beginning anew -------------------------------------------------------------------------------


def test_force_replaces_a_store_when_the_first_new_domain_is_done(
    places: Places, with_alpha: Store, tmp_path: Path, stopped: Callable[..., None]
) -> None:
    before = hashes(with_alpha.path)
    changes = {**TWO, "rounds": 1, "domains": ("beta", "alpha"), "force": True}
    anew = settings_for(*places, tmp_path / "store", **changes)
    stopped_at(anew, stopped, 4)
    assert hashes(with_alpha.path) == before
    with pytest.raises(InputError, match="--force resumes it"):
        stack_run.run(anew.model_copy(update={"force": False}))
    # Stopped again, between the domains: --force now resumes what it made.
    second = lambda run, work, plan, expected: plan.name == "alpha"  # noqa: E731
    stopped(anew, stack_run._StackRun, "_domain", second)
    assert [d.name for d in Store.open(with_alpha.path).manifest.domains] == ["beta"]
    report = stack_run.run(anew)
    assert [d.name for d in Store.open(with_alpha.path).manifest.domains] == ["beta", "alpha"]
    assert report.data["domains"]["beta"]["resumed_from_step"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_work_that_the_store_has_taken_is_forgotten(
    places: Places, whole: Store, with_alpha: Store, tmp_path: Path, stopped: Callable[..., None]
) -> None:
    """Killed between the change of the store and the clearing of the work directory."""
    settings = settings_for(*places, tmp_path / "store", **TWO)
    stopped(settings, stack_checkpoint.StackWork, "hand_over_log")
    domains = Store.open(tmp_path / "store").manifest.domains
    assert [domain.name for domain in domains] == ["alpha", "beta"]
    assert stack_checkpoint.StackWork(tmp_path / "store", read_only=True).identity is not None
    stack_run.run(settings)
    assert hashes(tmp_path / "store") == hashes(whole.path)


def test_a_damaged_stack_of_the_store_is_named(
    places: Places, with_alpha: Store, tmp_path: Path
) -> None:
    store = with_alpha
    path = store.path / store.manifest.stacks[0].file.file
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=path.name):
        stack_run.run(settings_for(*places, tmp_path / "store", **TWO))


def test_the_report_is_plain_json(whole: Store) -> None:
    """Also where a loss was not finite: JSON has no word for NaN."""
    text = (whole.path / "result.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(word))
