"""A trained domain becomes part of a store: stacks, split, row of the matrix, in one change."""

from dataclasses import replace
from pathlib import Path

from mlxstacks.data import split_ids
from mlxstacks.errors import StoreError
from mlxstacks.files.base_location import remember_places
from mlxstacks.files.manifest import DomainRecord, StackRecord
from mlxstacks.files.store import Change, Store
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.stack_files import pair_tensors
from mlxstacks.studies.stack.data import data_root
from mlxstacks.studies.stack.plan import DomainPlan
from mlxstacks.studies.stack.report import protected_json
from mlxstacks.studies.stack.setup import StackSetup
from mlxstacks.studies.stack.work import StackWork
from mlxstacks.training.continual import DomainResult
from mlxstacks.training.protect import Bases


def commit_domain(
    setup: StackSetup,
    target: Path,
    work: StackWork,
    plan: DomainPlan,
    result: DomainResult,
    bases: Bases,
) -> None:
    """Everything of the domain in one change of the store; the first one makes the store.

    Raises: StoreError where the store is not what the domain was trained on any more.
    """
    store, pending = setup.store, work.anew == "pending"
    if store is None:
        there = target.is_dir() and any(target.iterdir())
        store = Store.create(
            target, setup.base_model, setup.base_fingerprint,
            force=pending and there,
        )  # fmt: skip
    assert setup.settings.model is not None
    remember_places(store, setup.settings.model, data_root(setup.settings))
    before = setup.store.manifest if setup.store else store.manifest
    with store.change("trained", domain=plan.name) as change:
        if replace(change.manifest, code_version="") != replace(before, code_version=""):
            raise StoreError(
                f"{store.path}: was changed while {plan.name} was trained on it; nothing was "
                "added. Undo that change and run again to go on, or run with --no-resume to "
                "train the domain on the store as it is now"
            )
        record = _record(setup, change, work, plan, result, bases)
        matrix = {mode: dict(rows) for mode, rows in change.manifest.matrix.items()}
        for mode, row in result.row.items():
            matrix.setdefault(mode, {})[plan.name] = row
        change.manifest = replace(change.manifest.with_domain(record), matrix=matrix)
    if pending:
        work.set_anew("done")
    hand_over_log(work, store)
    work.clear()


def _record(
    setup: StackSetup,
    change: Change,
    work: StackWork,
    plan: DomainPlan,
    result: DomainResult,
    bases: Bases,
) -> DomainRecord:
    shared = None
    if setup.latent and result.served.stacks:
        shared = change.add_shared("latent", pair_tensors(setup.latent)).sha256
    stacks: list[StackRecord] = []
    for record in result.records:
        file = work.round_stack(record.number)
        if file is None:
            continue
        header = replace(file.header, shared_sha256=shared)
        stacks.append(change.add_stack(file.tensors, header, record.loss_before, record.loss_after))
    identity = setup.identity(plan.settings)
    return DomainRecord(
        name=plan.name,
        enabled=True,
        stacks=tuple(stacks),
        losses=result.losses,
        final_loss=result.losses[-1],
        settings=identity,
        settings_sha256=json_sha256(identity),
        data=plan.rows.report(),
        split=change.add_json("splits", plan.name, split_ids(plan.rows.data)),
        protected=protected_json(bases),
        trained_on=tuple(name for one in setup.served for name in one.stacks),
    )


def hand_over_log(work: StackWork, store: Store) -> None:
    """The lines about a domain that is done go into the store's log."""
    for line in work.log_lines():
        store.log(str(line.pop("event", "step")), **line)
