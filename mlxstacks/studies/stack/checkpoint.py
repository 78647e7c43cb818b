"""What lets `mlxstacks stack` resume, and how a domain that is done becomes part of the store.

A domain that is not done lives in `.NAME.work` next to the store NAME:

    run.json                  what the domain depends on, to be compared before it is continued
    rounds.json               rounds that are done, with the hashes of their stacks
    round-1.safetensors       the frozen stack of a round that was kept
    training-2.safetensors    the last saved state of the round under way
    bases.safetensors         directions that the domain keeps out of
    log.jsonl                 one JSON object a line
    replacement.json, details.json   of the whole run: see `replacement` and `details`

When it is done the store takes its stacks, split and row of the matrix in one change, and these
files go. Below: which store that is, a new one, one to resume, or one to replace.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import filelock
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import memory
from mlxstacks.data import split_ids
from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files.disk import target_errors, user_path
from mlxstacks.files.manifest import DomainRecord, Matrix, MatrixMode, StackRecord
from mlxstacks.files.outputs import (
    MARK,
    check_target,
    entries,
    refuse_built_in,
    release_lock,
    write_json,
)
from mlxstacks.files.stack_file import (
    StackFile,
    StackHeader,
    read_arrays,
    read_stack,
    write_arrays,
    write_stack,
)
from mlxstacks.files.store import Store, remember_places
from mlxstacks.files.store_commands import replaced_domain
from mlxstacks.files.store_files import FORMER_REPORT, MANIFEST, RESULT, own_entries
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.freezing import add_frozen, stack_tensors
from mlxstacks.layers.nullspace import NullBasis
from mlxstacks.layers.stack_files import header_of, pair_tensors, parts_of, places
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.studies.stack.geometry import overlaps
from mlxstacks.studies.stack.plan import DomainPlan, data_root
from mlxstacks.studies.stack.setup import StackSetup
from mlxstacks.studies.train.report import other_versions, versions
from mlxstacks.studies.train.setup import SaveTimer, steps_of
from mlxstacks.study.run_directory import (
    IDENTITY,
    LOG,
    append_log,
    check_same,
    claim_work,
    forget_log_lines,
    lock_work,
    plain,
    work_path,
)
from mlxstacks.training.boost import Parts, RoundRecord
from mlxstacks.training.continual import (
    Bases,
    DomainResult,
    MatrixRow,
    Served,
    protection_report,
)
from mlxstacks.training.loop import Record, TrainingState, load_state, save_state
from mlxstacks.training.metrics import Metrics
from mlxstacks.training.settings import StackRunSettings

ROUNDS, BASES = "rounds.json", "bases.safetensors"
# About the whole run, not the domain under way.
REPLACEMENT, DETAILS = "replacement.json", "details.json"
_VECTORS = "vectors"


class StackWork:
    """Held by one process at a time; `close` lets it go and leaves the files.

    read_only: look, without the lock and without making anything: for the other processes of a
        group, and for a dry run.
    Raises: TargetError when another process holds it or it cannot be written.
    """

    def __init__(self, target: Path, *, read_only: bool = False) -> None:
        self.path = work_path(target)
        self.target = target
        self._lock: filelock.FileLock | None = None
        if read_only:
            return
        self._lock = lock_work(target)
        claim_work(self.path)

    def close(self) -> None:
        """Let the directory go; without anything in it, it is removed."""
        if self._lock is not None:
            if self.path.is_dir() and not entries(self.path):
                shutil.rmtree(self.path)
            release_lock(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Forget the domain under way."""
        files = list(self.path.iterdir()) if self.path.is_dir() else []
        # run.json last: what a killed process left of the rest still has an owner
        for path in sorted(files, key=lambda path: (path.name == IDENTITY, path.name)):
            if path.name not in (REPLACEMENT, DETAILS, MARK):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    # --- which domain -----------------------------------------------------------------------------

    @property
    def identity(self) -> dict[str, Any] | None:
        """What the domain under way depends on; None where there is none."""
        return _read(self.path / IDENTITY)

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Resume the domain that is here, or begin this one.

        Raises: InputError listing what differs, where another one is here; or where nobody knows
            what is here.
        """
        before, now = self.identity, json.loads(json.dumps(identity))
        if before is None and any((self.path / n).exists() for n in (IDENTITY, ROUNDS, LOG)):
            raise InputError(
                f"{self.path / IDENTITY}: damaged or missing, so nobody knows which domain the "
                "work next to it belongs to; --no-resume removes that and trains the domain again "
                "(domains that are in the store stay)"
            )
        if before is not None:
            what = f"the unfinished domain {before.get('name')} (domains in the store stay)"
            check_same(self.path, what, before, now)
        write_json(self.path / IDENTITY, now)

    @property
    def replacement(self) -> str | None:
        """Of a run with --force: "pending" until the old store was replaced, then "done"."""
        record = _read(self.path / REPLACEMENT)
        return None if record is None else str(record.get("state"))

    def set_replacement(self, state: str | None) -> None:
        self._set(REPLACEMENT, None if state is None else {"state": state})

    @property
    def details(self) -> dict[str, Any]:
        """What the report says of the training of domains that are done, by name."""
        return _read(self.path / DETAILS) or {}

    def set_details(self, details: Mapping[str, Any] | None) -> None:
        self._set(DETAILS, details)

    def _set(self, name: str, value: Mapping[str, Any] | None) -> None:
        if value is None:
            (self.path / name).unlink(missing_ok=True)
        else:
            write_json(self.path / name, plain(value))

    # --- rounds -----------------------------------------------------------------------------------

    def rounds(self) -> list[RoundRecord]:
        """The rounds that are done."""
        return [RoundRecord(**r) for r in (_read(self.path / ROUNDS) or {"rounds": []})["rounds"]]

    def round_stack(self, number: int) -> StackFile | None:
        """The frozen stack of a round that is done; None where it was not kept.

        Raises: StoreError where the file is not what was written.
        """
        sha256 = (_read(self.path / ROUNDS) or {"files": {}})["files"].get(str(number))
        if sha256 is None:
            return None
        try:
            return read_stack(self.path / f"round-{number}.safetensors", sha256)
        except StoreError as error:
            raise StoreError(
                f"{error}\nthis is unfinished work; --no-resume trains the domain again"
            ) from None

    def add_round(
        self, record: RoundRecord, stack: tuple[Mapping[str, mx.array], StackHeader] | None
    ) -> None:
        """A round is done: its stack's file first, then the list that names it."""
        done = _read(self.path / ROUNDS) or {"rounds": [], "files": {}}
        if stack is not None:
            path = self.path / f"round-{record.number}.safetensors"
            # of a run that died before the list named it
            path.unlink(missing_ok=True)
            done["files"][str(record.number)] = write_stack(path, *stack)
        done["rounds"].append(plain(asdict(record)))
        write_json(self.path / ROUNDS, done)
        self.state_path(record.number).unlink(missing_ok=True)

    def state_path(self, number: int) -> Path:
        return self.path / f"training-{number}.safetensors"

    # --- protected directions ---------------------------------------------------------------------

    def bases(self) -> dict[str, NullBasis] | None:
        """The bases that were found when the domain began; None where it did not come so far, or
        where they are damaged: the same ones are found again.
        """
        path = self.path / BASES
        record = _read(path.with_suffix(".json"))
        if record is None or "projections" not in record:
            return None
        about, arrays = record["projections"], {}
        if record["sha256"] is not None:
            try:
                arrays = read_arrays(path, record["sha256"])
            except StoreError:
                return None
        return {
            name: NullBasis(
                arrays.get(f"{name}.{_VECTORS}", mx.zeros((figures["width"], 0))),
                figures["captured_energy"],
                figures["capacity"],
            )
            for name, figures in about.items()
        }

    def set_bases(self, bases: Mapping[str, NullBasis]) -> None:
        path = self.path / BASES
        path.unlink(missing_ok=True)
        arrays = {f"{n}.{_VECTORS}": b.vectors for n, b in bases.items() if b.vectors.shape[1]}
        sha256 = write_arrays(path, arrays) if arrays else None
        about = {
            name: {
                "width": int(np.shape(basis.vectors)[0]),
                "captured_energy": basis.captured_energy,
                "capacity": basis.capacity,
            }
            for name, basis in bases.items()
        }
        write_json(path.with_suffix(".json"), {"sha256": sha256, "projections": about})

    # --- log --------------------------------------------------------------------------------------

    def log(self, **record: Any) -> None:
        append_log(self.path, **record)

    def forget_log_after(self, number: int, step: int) -> None:
        """Drop lines of round `number` after `step` and of later rounds, and half-written ones."""
        forget_log_lines(
            self.path / LOG, lambda r: (r.get("round", 0), r.get("step", 0)) <= (number, step)
        )

    def hand_over_log(self, store: Store) -> None:
        """The lines about a domain that is done go into the store's log."""
        path = self.path / LOG
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for record in map(json.loads, lines):
            store.log(str(record.pop("event", "step")), **record)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


class RoundCheckpoints:
    """Keeps rounds in the work directory; see boost.Checkpoints.

    is_main: of the processes of a group the first one writes, all of them read.
    say: (share of the domain that is done, what). metrics: get the numbers of the log too.
    """

    def __init__(
        self,
        setup: StackSetup,
        work: StackWork,
        plan: DomainPlan,
        is_main: bool,
        say: Callable[[float, str], None],
        metrics: Metrics,
    ) -> None:
        self.setup, self.work, self.plan = setup, work, plan
        self.is_main, self.say, self.metrics = is_main, say, metrics
        self.rounds_all = plan.settings.rounds or setup.settings.rounds
        self.resumed_from: int | None = None
        settings = setup.settings
        self.save_timer = SaveTimer(steps_of(settings.save_every, settings.grad_accumulation_steps))

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
            self.setup.notes.extend(f"{self.plan.name}: {note}" for note in other_versions(log))
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
        optimizer = self.plan.optimizer
        last = state.step == optimizer.steps or state.stopped is not None
        if state.step % optimizer.log_every == 0 or last:
            rate = record["tokens"] / record["seconds"]
            named = {"balance_loss" if k == "extra_loss" else k: v for k, v in record.items()}
            peak = memory.counters().peak_bytes
            self._log("step", number, state.step, **named, tokens_per_second=rate, peak_bytes=peak)
        if not last:
            self.save_timer.save_if_due(
                state.step, lambda: self.save(self.setup.model, number, state)
            )
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
        stack, setup = None, self.setup
        if parts is not None:
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
            self.metrics.log(event, record | {"step": step}, None, f"{self.plan.name}-r{number}/")


@dataclass(frozen=True, eq=False)
class Retrained:
    """Around a domain that was trained again in its place. served: all domains, in order, that are
    in the model now. before: prefix losses of the domain (its new rows) and later ones with the
    stacks that are replaced. row: losses now, mode -> domain -> loss, prefix always.
    """

    served: list[Served]
    before: MatrixRow
    row: dict[MatrixMode, MatrixRow]
    moved_above: float


# --- into the store -------------------------------------------------------------------------------


def commit_domain(
    setup: StackSetup,
    target: Path,
    work: StackWork,
    plan: DomainPlan,
    result: DomainResult,
    bases: Bases,
    seconds: dict[str, float],
    retrained: Retrained | None = None,
) -> None:
    """Everything of the domain in one change of the store; the first one makes the store.

    seconds: of each stage, for the log: the manifest of two equal runs is equal.
    retrained: of a domain that takes the place of its former self.

    Raises: StoreError where the store is not what the domain was trained on any more.
    """
    store, pending = setup.store, work.replacement == "pending"
    if store is None:
        is_filled = target.is_dir() and any(target.iterdir())
        store = Store.create(
            target, setup.base_model, setup.base_fingerprint, force=pending and is_filled
        )
    assert setup.settings.model is not None
    remember_places(store, setup.settings.model, data_root(setup.settings))
    before = setup.store.manifest if setup.store else store.manifest
    event = "trained" if retrained is None else "retrained"
    with store.change(event, domain=plan.name, seconds=seconds) as change:
        if replace(change.manifest, code_version="") != replace(before, code_version=""):
            raise StoreError(
                f"{store.path}: was changed while {plan.name} was trained on it; nothing was "
                "added. Undo that change and run again to resume, or run with --no-resume to "
                "train the domain on the store as it is now"
            )
        shared = None
        if setup.latent and result.served.stacks:
            shared = change.add_shared("latent", pair_tensors(setup.latent)).sha256
        stacks: list[StackRecord] = []
        for round_ in result.records:
            file = work.round_stack(round_.number)
            if file is not None:
                header = replace(file.header, shared_sha256=shared)
                losses = round_.loss_before, round_.loss_after
                stacks.append(change.add_stack(file.tensors, header, *losses))
        identity = setup.identity(plan.settings)
        record = DomainRecord(
            name=plan.name,
            enabled=True,
            stacks=tuple(stacks),
            losses=result.losses,
            final_loss=result.losses[-1],
            settings=identity,
            settings_sha256=json_sha256(identity),
            data=plan.rows.report(),
            split=change.add_json("splits", plan.name, split_ids(plan.rows.data)),
            protected=_protected(setup, plan.name, bases) if bases else None,
            trained_on=tuple(name for served in setup.served for name in served.stacks),
        )
        rows: Matrix = {mode: {plan.name: row} for mode, row in result.row.items()}
        if retrained is not None:
            last = retrained.served[-1].domain
            rows = {mode: {**row, last: retrained.row[mode]} for mode, row in rows.items()}
            change.manifest = replaced_domain(
                change.manifest, record, rows, retrained.before, retrained.row["prefix"],
                retrained.moved_above,
            )  # fmt: skip
        else:
            matrix = {mode: dict(known) for mode, known in change.manifest.matrix.items()}
            for mode, row in rows.items():
                matrix.setdefault(mode, {}).update(row)
            change.manifest = replace(change.manifest.with_domain(record), matrix=matrix)
    if pending:
        work.set_replacement("done")
    work.hand_over_log(store)
    work.clear()


def stack_hashes(store: Store, domain: str) -> dict[str, str]:
    """Stack -> SHA-256 of a domain's stacks in the store."""
    record = store.manifest.domain_named(domain)
    return {} if record is None else {stack.name: stack.file.sha256 for stack in record.stacks}


def _protected(setup: StackSetup, domain: str, bases: Bases) -> dict[str, Any]:
    """What was protected, and how much of what the new stacks write other domains write too."""
    assert setup.settings.null_space is not None
    served = {path: layer.stacks.stacks() for path, layer in stacked_layers(setup.model)}
    found = overlaps(served, domain, setup.settings.null_space.directions)
    return {**protection_report(bases), "overlap": found}


def check_store(target: Path, settings: StackRunSettings) -> None:
    """Raises: TargetError where no store can be: a file, other people's files, not writable."""
    inputs = [user_path(path) for path in (settings.model, settings.data) if path]
    inputs = [path for path in inputs if path.exists()]
    try:
        is_filled = target.is_dir() and any(target.iterdir())
    except (OSError, ValueError) as error:  # too long; not ours to read; a NUL in the name
        raise TargetError(
            f"{str(target)[:200]!a}: not a usable target: {error.args[-1]}; choose another path"
        ) from None
    refuse_built_in(target)
    if is_filled and not ((target / MANIFEST).exists() or (target / "stacks").is_dir()):
        names = ", ".join(sorted(path.name for path in target.iterdir())[:3])
        raise TargetError(
            f"{target}: holds {names}, but no store (no manifest.json); choose another save path"
        )
    replaces = replaces_store(target, settings)
    # A store that is resumed may be there.
    if is_filled and not replaces and not (target / MANIFEST).exists():
        Store.open(target)
    check_target(target, force=replaces, inputs=inputs, owned=own_entries, extends=not replaces)
    if is_filled and not os.access(target, os.W_OK | os.X_OK):
        raise TargetError(f"{target}: not writable; choose another save path")


def replaces_store(target: Path, settings: StackRunSettings) -> bool:
    """Whether a store that is there is to be replaced: --force, and not done by a run that was
    stopped since.
    """
    state = StackWork(target, read_only=True).replacement
    if state == "pending" and not settings.force and settings.resume:
        raise InputError(
            f"{target}: a run with --force that would replace this store is unfinished; --force "
            "resumes it, --no-resume forgets it"
        )
    return settings.force and not (state == "done" and settings.resume)


def read_report(target: Path) -> dict[str, Any]:
    """Domain -> what the last run's result in a store says of it; nothing where there is none."""
    for name in (RESULT, FORMER_REPORT):
        document = _read(target / name) or {}
        domains = document.get("data", document).get("domains")
        if isinstance(domains, dict):
            return domains
    return {}
