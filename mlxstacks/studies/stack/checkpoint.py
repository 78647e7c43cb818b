"""What lets `mlxstacks stack` go on after a stop: states, rounds, log; and how a domain that is
done becomes part of the store: stacks, split, row of the matrix, in one change.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxstacks import memory
from mlxstacks.data import split_ids
from mlxstacks.errors import StoreError, TargetError
from mlxstacks.files.disk import target_errors
from mlxstacks.files.manifest import DomainRecord, StackRecord
from mlxstacks.files.store import Change, Store, remember_places
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.freezing import add_frozen, stack_tensors
from mlxstacks.layers.stack_files import header_of, pair_tensors, parts_of, places
from mlxstacks.studies.stack.data import data_root
from mlxstacks.studies.stack.plan import DomainPlan
from mlxstacks.studies.stack.report import protected_json
from mlxstacks.studies.stack.setup import StackSetup
from mlxstacks.studies.stack.work import LOG, StackWork
from mlxstacks.studies.train.run import other_versions, versions
from mlxstacks.studies.train.setup import steps_of
from mlxstacks.training.boost import Parts, RoundRecord
from mlxstacks.training.continual import Bases, DomainResult
from mlxstacks.training.loop import Record, TrainingState, load_state, save_state


class RoundKeeper:
    """Keeps rounds in the work directory; see boost.Keeper.

    is_main: of the processes of a group the first one writes, all of them read.
    say: (share of the domain that is done, what).
    """

    def __init__(
        self,
        setup: StackSetup,
        work: StackWork,
        plan: DomainPlan,
        is_main: bool,
        say: Callable[[float, str], None],
    ) -> None:
        self.setup, self.work, self.plan = setup, work, plan
        self.is_main, self.say = is_main, say
        self.rounds_all = plan.settings.rounds or setup.settings.rounds
        self.resumed_from: int | None = None

    def rounds(self) -> list[RoundRecord]:
        records = self.work.rounds()
        for record in records:
            file = self.work.round_stack(record.number)
            if file is not None:
                add_frozen(self.setup.model, parts_of(file, self.setup.latent))
        if records:
            self.resumed_from = sum(record.steps for record in records)
        return records

    def load(self, model: nn.Module, number: int) -> TrainingState | None:
        path = self.work.state_path(number)
        state = None
        if path.exists():
            state = load_state(path, model, self.plan.optimizer, self._run_id(number))
            self.resumed_from = (self.resumed_from or 0) + state.step
        if self.is_main:
            self.work.forget_log_after(number, state.step if state else -1)
        log = self.work.path / LOG
        if self.is_main and log.exists():
            notes, changed = self.setup.notes, other_versions(log)
            notes.extend(f"{self.plan.name}: {note}" for note in changed)
        event = "resumed" if state else "round"
        self._log(event, number, state.step if state else 0, versions=versions())
        return state

    def save(self, model: nn.Module, number: int, state: TrainingState) -> None:
        if not self.is_main:
            return
        path = self.work.state_path(number)
        try:
            with target_errors(path):
                save_state(path, model, state, self._run_id(number))
        except RuntimeError as error:  # MLX's word for a full disk
            raise TargetError(
                f"{path}: cannot be written: {error}; make room on this disk and run again: the "
                "store and the state saved before are as they were"
            ) from error

    def on_step(self, number: int, state: TrainingState, record: Record) -> None:
        settings, optimizer = self.setup.settings, self.plan.optimizer
        last = state.step == optimizer.steps or state.stopped is not None
        if state.step % optimizer.log_every == 0 or last:
            rate = record["tokens"] / record["seconds"]
            named = {"balance_loss" if k == "extra_loss" else k: v for k, v in record.items()}
            peak = memory.counters().peak_bytes
            self._log("step", number, state.step, **named, tokens_per_second=rate, peak_bytes=peak)
        every = steps_of(settings.save_every, settings.grad_accumulation_steps)
        if state.step % every == 0 and not last:
            self.save(self.setup.model, number, state)
        done = (number - 1 + state.step / optimizer.steps) / self.rounds_all
        loss = record.get("task_loss", record["loss"])
        self.say(done, f"{self.plan.name} {number}/{self.rounds_all}, loss {loss:.3f}")

    def on_validation(self, number: int, state: TrainingState, record: Record) -> None:
        best = state.best.loss if state.best else None
        rest = {key: value for key, value in record.items() if key != "step"}
        self._log("validation", number, state.step, **rest, best_validation_loss=best)

    def round_done(self, record: RoundRecord, parts: Parts | None) -> None:
        if not self.is_main:
            return
        stack = None
        if parts is not None:
            setup = self.setup
            header = header_of(
                parts, {path: places(setup.model)[path].dims for path in parts},
                setup.settings.stack, round_number=record.number, base_model=setup.base_model,
                base_fingerprint=setup.base_fingerprint,
                data_sha256={
                    key.removesuffix("_ids_sha256"): value
                    for key, value in self.plan.rows.identity().items()
                    if key.endswith("_sha256")
                },
            )  # fmt: skip
            stack = (stack_tensors(parts), header)
        self.work.add_round(record, stack)
        figures = {
            key: getattr(record, key) for key in ("kept", "loss_before", "loss_after", "last")
        }
        self._log("frozen", record.number, record.steps, **figures)

    def _run_id(self, number: int) -> str:
        return f"{self.plan.name}/{number}"

    def _log(self, event: str, number: int, step: int, /, **record: Any) -> None:
        if self.is_main:
            self.work.log(event=event, domain=self.plan.name, round=number, step=step, **record)


# --- into the store -------------------------------------------------------------------------------


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
        is_filled = target.is_dir() and any(target.iterdir())
        store = Store.create(
            target, setup.base_model, setup.base_fingerprint,
            force=pending and is_filled,
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
        trained_on=tuple(name for served in setup.served for name in served.stacks),
    )


def hand_over_log(work: StackWork, store: Store) -> None:
    """The lines about a domain that is done go into the store's log."""
    for line in work.log_lines():
        store.log(str(line.pop("event", "step")), **line)
