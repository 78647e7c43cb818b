"""`mlxstacks train`: one LoRA on the trainer core, as an adapter that mlx-lm loads.

The run lives in `.NAME.work` next to its target until it is done; stopped at any moment, even
killed, the same command resumes from the last saved state and ends with the same bytes.
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks import base_model, memory
from mlxstacks.data import make_batch, train_data_paths
from mlxstacks.errors import InputError
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.files.adapters import WEIGHTS
from mlxstacks.files.checkpoint import check_unchanged
from mlxstacks.files.disk import mlx_write_errors, user_path
from mlxstacks.files.lora_modules import CONFIG, MERGE_READY_KEY, LoraModule, mlx_config
from mlxstacks.files.outputs import check_target, entries, staged_directory, write_json
from mlxstacks.files.side_files import clone_or_link
from mlxstacks.files.store_files import METRICS
from mlxstacks.guard.counting import counter
from mlxstacks.layers.attach import lora_tensors
from mlxstacks.layers.merge_ready import as_stored
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.processes import current_group, gathered, size_and_rank, wait_for_all
from mlxstacks.studies.train.report import TrainReport, other_versions, planned, result_of, versions
from mlxstacks.studies.train.setup import (
    GuardedRun,
    RowsOf,
    SaveTimer,
    StackOfStore,
    compiles,
    guarded,
    set_up,
    steps_of,
    with_start,
)
from mlxstacks.study.integrity import MOST_BYTES
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import (
    LOG,
    RECIPE,
    STATE,
    RunDirectory,
    run_id,
    work_path,
    write_recipe,
)
from mlxstacks.study.write import write_result
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.loop import (
    NonFiniteError,
    Record,
    TrainingState,
    Validation,
    load_state,
    new_state,
    restore_best,
    save_state,
    train,
    trainable_weights,
)
from mlxstacks.training.metrics import Metrics, check_logger, write_csv
from mlxstacks.training.modes import evaluating, set_training_modes
from mlxstacks.training.settings import SnapshotSettings, TrainSettings
from mlxstacks.training.step import cross_entropy_loss

ADAPTER = "adapter"

Progress = Callable[..., None]


def run(
    settings: TrainSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> TrainReport:
    """Train, and write adapter, result, log, recipe and state to `settings.save_path`.

    Under `mlx.launch` each process takes its part of every batch; the first one writes and speaks.

    Raises:
        InputError: model, data, projections or target cannot be used, or the work directory holds
            a run of another recipe.
        ResourceLimitError: the guard predicts that it does not fit.
        NonFiniteError: NaN or Inf in a step; the state before it is saved.
    """
    return train_with(TrainRun, settings, dry_run, progress)[0]


def run_command(
    settings: TrainSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """`mlxstacks train`: the same as `run`, and what it wrote as `result.json`."""
    return train_with(TrainRun, settings, dry_run, progress)[1]


def train_with(
    kind: "type[TrainRun]",
    settings: TrainSettings,
    dry_run: bool,
    progress: Progress | None,
    active: StackOfStore | None = None,
) -> tuple[TrainReport, Result]:
    """A run of that kind, or its plan. active: see `set_up`. Raises: as `run`."""
    if settings.save_path is None:
        raise InputError(f"{kind.command} needs save_path")
    started = time.monotonic()
    target = user_path(settings.save_path)
    store = None if active is None else active.plan()["store_path"]
    start = getattr(settings, "resume_adapter_file", None)
    read = (settings.model, start, store, *train_data_paths(settings.data))
    inputs = [user_path(path) for path in read if path]
    check_target(target, force=settings.force, inputs=inputs)
    check_logger(settings)
    processes, rank = size_and_rank(current_group())
    progress = progress if rank == 0 else None
    if progress and not dry_run:
        progress(0, 1, "reading the data")
    guarded_run, plan = kind.prepare(settings, target, processes, dry_run, active)
    if dry_run:
        return plan, kind.result_of(plan)
    with ExitStack() as stack:
        stack.callback(base_model.install_gated_delta())
        return kind(guarded_run, plan, progress, stack, started).run()


class TrainRun:
    """A training and its files; subclasses change what it trains on and what comes of it.

    written: files of what was trained. keeps_state: next to them the state, to train on from.
    """

    command = "train"
    result_of = staticmethod(result_of)
    rows_of: RowsOf | None = None
    in_one_process = False
    written: tuple[str, ...] = (WEIGHTS, CONFIG)
    keeps_state = True

    @classmethod
    def prepare(
        cls,
        settings: TrainSettings,
        target: Path,
        processes: int,
        plan_only: bool,
        active: StackOfStore | None,
    ) -> tuple[GuardedRun, TrainReport]:
        """The run as it may go on, and its plan."""
        settings = with_start(settings)
        setup = set_up(settings, cls.rows_of, active)
        run = guarded(settings, setup, processes, plan_only=plan_only, rows_of=cls.rows_of)
        return run, planned(settings, run, target)

    def __init__(
        self,
        guarded_run: GuardedRun,
        plan: TrainReport,
        progress: Progress | None,
        stack: ExitStack,
        started: float,
    ) -> None:
        settings, setup = guarded_run.settings, guarded_run.setup
        self.settings, self.setup, self.plan = settings, setup, plan
        self.target = Path(plan.save_path)
        self.model, self.guard = setup.model, guarded_run.watch()
        self.counter = counter() if settings.count_buffers else None
        self.counted_buffers = 0
        self.group = current_group()
        self.is_main = size_and_rank(self.group)[1] == 0
        self.progress, self.step = progress, 0
        if not self.is_main:
            silence_stdout()
        self.metrics = Metrics(settings if self.is_main else None, setup.notes)
        stack.callback(self.metrics.finish)
        self.identity = self._identity()
        self.work: RunDirectory | None = None
        self.stack, self.begun, self.resumed_from = stack, started, 0
        self.save_timer = SaveTimer(
            steps_of(self.settings.save_every, self.settings.grad_accumulation_steps)
        )

    def _identity(self) -> dict[str, Any]:
        """All that the trained weights depend on."""
        return self.setup.identity(self.settings)

    def _load(self) -> None:
        """Read the base, and make the model ready to train."""
        setup = self.setup
        self._say("loading the model")
        set_wired_limit(setup.notes)
        mx.eval(self.model.parameters())
        if setup.base_fingerprint:
            check_unchanged(setup.base_directory, setup.base_fingerprint)
        mx.reset_peak_memory()  # of training, not of widening the base
        self.head, note = find_output_head(self.model)
        setup.notes.extend([note] if note else [])
        lowest = set_training_modes(self.model)
        if self.settings.grad_checkpoint:
            trained = range(lowest, len(self.model.layers))
            self.stack.enter_context(checkpoint_layers(self.model, trained))
        self.loading_seconds = time.monotonic() - self.begun
        self.started = time.monotonic()

    def run(self) -> tuple[TrainReport, Result]:
        if self.in_one_process and self.group is not None:
            raise InputError(
                f"{self.command}, as it is set, runs in one process; start it without mlx.launch"
            )
        if self.is_main:
            resume = self.settings.resume
            self.work = RunDirectory(self.target, self.identity, resume=resume)
        try:
            if self.work is not None:  # another run to it may have ended since the first look
                check_target(self.target, force=self.settings.force)
            self._load()
            wait_for_all(self.group)
            state = self._train(self._state())
            self.metrics.finish()
            if self.settings.keep == "best":
                restore_best(self.model, state)
            best = state.best
            self._ended(state)
            report = replace(
                self.plan,
                status="stopped" if state.stopped else "trained",
                reason=state.stopped,
                kept="best" if self.settings.keep == "best" and best else "last",
                step=state.step,
                best_step=best.step if best else None,
                validation=state.validation,
                history=state.history,
                figures={
                    "loading_seconds": round(self.loading_seconds, 3),
                    "seconds": round(time.monotonic() - self.started, 3),
                    "resumed_from_step": self.resumed_from,
                    "processes": size_and_rank(self.group)[0],
                    "resources": self.guard.report() if self.guard else None,
                    "peak_bytes": memory.counters().peak_bytes,
                    **({"counted_buffers": self.counted_buffers} if self.counter else {}),
                    **self._figures(),
                },
            )
            result = self.result_of(report)
            if self.work is not None:
                result = self._write_target(self.work, result)
                self.work.remove()
            wait_for_all(self.group)
            return report, result
        finally:
            if self.work is not None:
                self.work.close()

    # --- the run ----------------------------------------------------------------------------------

    def _state(self) -> TrainingState:
        """A new state, or the saved one with its weights in the model.

        Raises: InputError where the processes of a group do not have the same.
        """
        path, optimizer = work_path(self.target) / STATE, self.setup.optimizer
        resumed = path.exists()
        state = new_state(optimizer)
        if resumed:
            state = load_state(path, self.model, optimizer, run_id(self.identity))
        steps = gathered(state.step, self.group)
        if len(set(steps)) > 1:
            raise InputError(
                f"{path}: the processes would resume from steps {steps}; only some see this "
                "file. Put it where each of them reads it, or start again with --no-resume"
            )
        self.resumed_from = self.step = state.step
        if self.work is not None:
            self.work.forget_log_after(state.step if resumed else -1)
        if resumed and self.work is not None:
            self.setup.notes.extend(other_versions(self.work.path / LOG))
        self._log("resumed" if resumed else "started", state.step, versions=versions())
        return state

    def _train(self, state: TrainingState) -> TrainingState:
        settings, setup = self.settings, self.setup
        validation = None
        if setup.validation_rows:
            keep = SnapshotSettings(
                patience=settings.patience, spike_threshold=settings.spike_threshold
            )
            every = steps_of(settings.steps_per_eval, settings.grad_accumulation_steps)
            validation = Validation(self._validation_loss, every, keep)
        hooks = self._hooks(state)
        try:
            loss = cross_entropy_loss(head=self.head)
            return train(
                self.model, loss, self._batches_at, setup.optimizer, state,
                validation=validation, group=self.group, compiled=compiles(settings.compile_step),
                seed=settings.seed, on_validation=self._on_validation, on_step=self._on_step,
                **hooks,
            )  # fmt: skip
        except NonFiniteError as error:
            self._save(state)
            work = work_path(self.target)
            kept = f", its adapter, the best so far, in {work / ADAPTER}"
            kept = "; the store is as it was" if self.setup.active else kept
            raise NonFiniteError(
                f"{error}. The state before it is saved in {work}{kept}"
            ) from error

    def _ended(self, state: TrainingState) -> None:
        """What to do with the weights that are kept, before it is told."""

    def _figures(self) -> dict[str, Any]:
        """Further figures of the report."""
        return {}

    def _hooks(self, state: TrainingState) -> dict[str, Any]:
        """Further arguments of `train`."""
        return {}

    def _batches_at(self, step: int) -> list[Any]:
        plan, each = self.setup.plan, self.settings.grad_accumulation_steps
        if step == self.resumed_from:
            compiles_step = compiles(self.settings.compile_step)
            self._say(f"{'compiling ' if compiles_step else ''}the first step")
        if self.counter is not None:
            self.counter.reset()
        batches = []
        for place in range(step * each, (step + 1) * each):
            rows, width = plan.batch(place)
            if self.guard is not None:
                self.guard.check(width - 1)
            batches.append(self._batch(rows, width))
        return batches

    def _batch(self, rows: list[int], width: int) -> Any:
        return make_batch([self.setup.train.rows[row] for row in rows], width)

    def _validation_loss(self, model: Any) -> float:
        self._say("validating")
        with evaluating(model):
            loss = evaluate_mean_loss(
                model, self.setup.validation_rows, self.settings.batch_size,
                self.setup.plan.widths, head=self.head,
            )  # fmt: skip
        # The first process's: hosts may round differently, and all have to stop together.
        return gathered(loss, self.group)[0]

    def _on_step(self, state: TrainingState, record: Record) -> None:
        if self.counter is not None:
            self.counted_buffers = max(self.counted_buffers, self.counter.peak)
        last = state.step == self.setup.optimizer.steps or state.stopped is not None
        if state.step % self.setup.optimizer.log_every == 0 or last:
            rate = record["tokens"] / record["seconds"]
            peak = memory.counters().peak_bytes
            self._log("step", state.step, **record, tokens_per_second=rate, peak_bytes=peak)
        if last:
            self._save(state)
        else:
            self.save_timer.save_if_due(state.step, lambda: self._save(state))
        self.step = state.step
        self._say(f"loss {record['loss']:.3f}")

    def _say(self, what: str) -> None:
        if self.progress:
            self.progress(self.step, self.setup.optimizer.steps, what)

    def _on_validation(self, state: TrainingState, record: Record) -> None:
        record = {key: value for key, value in record.items() if key != "step"}
        best = state.best.loss if state.best else None
        self._log("validation", state.step, **record, best_validation_loss=best)

    # --- files ------------------------------------------------------------------------------------

    def _log(self, event: str, step: int, /, **record: Any) -> None:
        if self.work is not None:
            self.work.log(event=event, step=step, **record)
            self.metrics.log(event, record, step)

    def _save(self, state: TrainingState) -> None:
        """The state, then the adapter of its best weights."""
        if self.work is None:
            return
        save_state(self.work.state_path, self.model, state, run_id(self.identity))
        # also what a version without marks left there: all of a work directory is ours
        with staged_directory(self.work.path / ADAPTER, force=True, owned=entries) as directory:
            use_best = self.settings.keep == "best" and state.best is not None
            weights = state.best.weights if use_best and state.best else None
            self._write_adapter(directory, weights or trainable_weights(self.model))
        self._log("saved", state.step)

    def _write_adapter(self, directory: Path, tensors: dict[str, mx.array]) -> None:
        """adapters.safetensors and adapter_config.json, as mlx-lm reads them."""
        ordered = dict(sorted(lora_tensors(self.model, tensors).items()))
        if tensors.keys() != ordered.keys():
            raise AssertionError("what trains is not what an adapter holds")
        ordered = dict(sorted(as_stored(self.model, ordered).items()))
        with mlx_write_errors(directory / WEIGHTS):
            base_model.save_arrays(directory / WEIGHTS, ordered)
        # Shapes are all that the config needs; a copy of the numbers can be gigabytes.
        scale, number = self.setup.lora.scale, np.zeros((), np.float32)
        modules = {
            t.path: LoraModule(
                t.path, np.broadcast_to(number, ordered[f"{t.path}.lora_a"].shape),
                np.broadcast_to(number, ordered[f"{t.path}.lora_b"].shape), "F32", scale,
            )
            for t in self.setup.targets
        }  # fmt: skip
        config = mlx_config(modules, self.settings.model, self.setup.base_fingerprint)
        if self.settings.merge_ready is not None:
            config[MERGE_READY_KEY] = self.settings.merge_ready
        write_json(directory / CONFIG, config)

    def _write_target(self, work: RunDirectory, result: Result) -> Result:
        with staged_directory(self.target, force=self.settings.force) as directory:
            self._write_adapter(directory, trainable_weights(self.model))
            # A log can still grow, a state is only ever replaced.
            clone_or_link(work.path / LOG, directory / LOG, copy=True)
            if self.keeps_state:
                clone_or_link(work.path / STATE, directory / STATE)
            write_csv(directory / LOG, directory / METRICS)
            write_recipe(directory, self.command, self.settings)
            names = (*self.written, LOG, METRICS, RECIPE)
            files = [path for name in names if (path := directory / name).exists()]
            # No larger one is read again by who checks.
            small = [path for path in files if path.stat().st_size <= MOST_BYTES]
            return write_result(result, directory, self.target, sources=small)


def silence_stdout() -> None:
    """For the rest of this process: one of a group speaks for all of them."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def set_wired_limit(notes: list[str]) -> None:
    """On a Mac, let MLX wire the recommended working set, as mlx-lm does; elsewhere nothing."""
    limit = memory.device().working_set_bytes
    if limit and mx.metal.is_available():
        mx.set_wired_limit(limit)
        notes.append(f"Wired memory limit: {memory.bytes_in_words(limit)}, as mlx-lm sets it.")
