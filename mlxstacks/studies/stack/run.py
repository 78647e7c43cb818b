"""`mlxstacks stack`: domain after domain on one frozen base, into a store.

A domain that is being trained lives in `.NAME.work` next to the store; when it is done the store
takes its stacks, its split and its row of the forgetting matrix in one change. Stopped at any
moment, even killed, the same command resumes and ends with the same manifest, hashes and losses.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import check_unchanged
from mlxstacks.files.disk import user_path
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import company_notes, router_notes
from mlxstacks.files.store_files import LOG, METRICS
from mlxstacks.layers.selection import ungated
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.processes import current_group, gathered, size_and_rank, wait_for_all
from mlxstacks.studies.stack.checkpoint import (
    Retrained,
    RoundCheckpoints,
    StackWork,
    check_store,
    commit_domain,
    read_report,
    replaces_store,
    stack_hashes,
)
from mlxstacks.studies.stack.plan import DomainPlan
from mlxstacks.studies.stack.report import done_result, planned_result, round_details
from mlxstacks.studies.stack.samples import answered_samples
from mlxstacks.studies.stack.setup import (
    StackSetup,
    check_arrival,
    guarded,
    serve_domains,
    set_up,
    with_trained,
)
from mlxstacks.studies.train.run import set_wired_limit, silence_stdout
from mlxstacks.studies.train.setup import compiles, steps_of
from mlxstacks.study.result import Result
from mlxstacks.study.write import write_result
from mlxstacks.training.boost import DomainJob
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.continual import (
    Bases,
    DomainResult,
    MatrixRow,
    capacity_warning,
    full_projections,
    measure_row,
    protected_bases,
    stages,
    train_domain,
)
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.metrics import Metrics, check_logger, write_csv
from mlxstacks.training.settings import SnapshotSettings, StackRunSettings

Progress = Callable[..., None]


def run(
    settings: StackRunSettings,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    retrain: str | None = None,
    moved_above: float = 0.0,
) -> Result:
    """Train the domains that the store at `settings.save_path` does not have yet; or again the one
    that is named `retrain`, on the stacks before it, in its place (retrain.py).

    moved_above: nats per token by which the prefix loss of a later domain must change to be marked.

    Under `mlx.launch` each process takes its part of every batch; the first one writes and speaks.

    Raises:
        InputError: model, data, projections or target cannot be used, the store has a domain with
            other settings, or the work directory holds another unfinished domain.
        ResourceLimitError: the guard predicts that it does not fit.
        StoreError: the store is damaged or of another base; DriftError: frozen stacks changed.
        NonFiniteError: NaN or Inf in a step; the state before it is saved.
    """
    if settings.save_path is None:
        raise InputError("stack needs save_path")
    started = time.monotonic()
    target = user_path(settings.save_path)
    check_store(target, settings)
    check_logger(settings)
    resumes = not replaces_store(target, settings) and target.is_dir() and any(target.iterdir())
    group = current_group()
    progress = progress if size_and_rank(group)[1] == 0 else None
    if progress and not dry_run:
        progress(0, 1, "reading the data")
    setup = set_up(settings, Store.open(target) if resumes else None, retrain)
    predicted = guarded(setup, size_and_rank(group)[0], plan_only=dry_run)
    planned = planned_result(setup, target, predicted)
    if dry_run:
        return planned
    with ExitStack() as stack:
        stack.callback(base_model.install_gated_delta())
        stack_run = _StackRun(setup, target, planned, progress, group, stack, started)
        stack_run.retrain, stack_run.moved_above = retrain, moved_above
        return stack_run.run()


class _StackRun:
    """before: of a domain that is trained again and those after it, prefix losses that were."""

    retrain: str | None = None
    moved_above: float = 0.0

    def __init__(
        self,
        setup: StackSetup,
        target: Path,
        planned: Result,
        progress: Progress | None,
        group: mx.distributed.Group | None,
        stack: ExitStack,
        started: float,
    ) -> None:
        self.setup, self.target, self.planned = setup, target, planned
        self.domains = {name: dict(domain) for name, domain in planned.data["domains"].items()}
        self.settings, self.model = setup.settings, setup.model
        self.group = group
        self.is_main = size_and_rank(group)[1] == 0
        self.progress, self.started = progress, started
        self.before: MatrixRow = {}
        self.seconds: dict[str, float] = {}  # by stage, of the domain that comes next
        self.domains_done, self.domains_all = 0, max(1, len(setup.to_train))
        if not self.is_main:
            silence_stdout()
        self.metrics = Metrics(self.settings if self.is_main else None, setup.notes)
        stack.callback(self.metrics.finish)
        set_wired_limit(setup.notes)
        if setup.to_train:
            self._say(0, "loading the model")
            mx.eval(self.model.parameters())
            check_unchanged(setup.base_directory, setup.base_fingerprint)
        mx.reset_peak_memory()  # of training, not of widening the base
        set_mode(self.model, ungated(), setup.served_dtype)
        if self.settings.grad_checkpoint:
            stack.enter_context(checkpoint_layers(self.model))
        self.losses = {name: self._loss_of(name) for name in setup.rows}

    def run(self) -> Result:
        work = StackWork(self.target, read_only=not self.is_main)
        try:
            if self.is_main:
                self._tidy(work)
            wait_for_all(self.group)
            # Every process has to see the work of the first one, and later its store.
            blind = [
                str(rank)
                for rank, sees in enumerate(gathered(int(work.path.is_dir()), self.group))
                if not sees
            ]
            if blind:
                raise InputError(
                    f"{work.path}: processes {', '.join(blind)} do not see it; put save_path where "
                    "every process reads and the first one writes"
                )
            self._recall(work)
            expected = self._arrive() if self.setup.to_train else {}
            if self.retrain is not None:
                self._take_out(expected)
            while self.setup.to_train:
                plan = self.setup.to_train[0]
                expected[plan.name] = self._domain(work, plan, expected).prefix_loss
                wait_for_all(self.group)
            self.metrics.finish()
            result = done_result(
                self.planned, self.setup, self.domains, time.monotonic() - self.started,
                size_and_rank(self.group)[0],
            )  # fmt: skip
            if self.is_main:
                # Not the manifest: `stacks disable` and `import` change it, not what was trained.
                stacks = self.target.glob("stacks/*")
                write_csv(self.target / LOG, self.target / METRICS)
                result = write_result(result, self.target, self.target, sources=stacks)
                work.clear()
                work.set_replacement(None)
                work.set_details(None)
            wait_for_all(self.group)
            return result
        finally:
            work.close()

    # --- before the first domain ------------------------------------------------------------------

    def _tidy(self, work: StackWork) -> None:
        """Forget what the settings say to forget, and work that the store has taken already."""
        if not self.settings.resume:
            work.clear()
            work.set_replacement(None)
        if replaces_store(self.target, self.settings):
            if work.replacement is None:
                work.clear()
                work.set_details(None)
            work.set_replacement("pending")
        elif work.identity is not None and self.setup.store is not None:
            name = str(work.identity.get("name"))
            hashes = stack_hashes(self.setup.store, name)
            known = self.setup.store.manifest.domain_named(name) is not None
            if known and work.identity.get("replaces") != hashes:
                work.hand_over_log(self.setup.store)
                work.clear()

    def _recall(self, work: StackWork) -> None:
        """What the training of stored domains said, from this run before it was stopped, or from
        the report of an earlier one.
        """
        earlier = read_report(self.target) | work.details
        for name, known in self.domains.items():
            details = earlier.get(name)
            if details and known["status"] == "stored":
                kept = [r["loss_after"] for r in details.get("rounds", []) if r.get("kept")]
                if kept == known["losses"][1:]:
                    known.update({**details, "status": "stored"})

    def _arrive(self) -> MatrixRow:
        """Prefix losses of the store's domains as this process measures them: from here on they
        may not move at all. Raises: as `check_arrival`.
        """
        served, store = self.setup.served, self.setup.store
        if store is None or not served:
            return {}
        start = time.monotonic()
        measured = measure_row(
            self.model, served, self.losses, ["prefix"], self.setup.served_dtype,
            lambda mode, domain, loss: self._say(0, f"measuring {domain} as it is"),
        )["prefix"]  # fmt: skip
        self.seconds["before"] = time.monotonic() - start
        check_arrival(store, measured, self.setup.notes, self.retrain)
        return measured

    def _take_out(self, expected: MatrixRow) -> None:
        """Leave the stacks before the domain that is trained again; `expected` loses the rest."""
        domains = [served.domain for served in self.setup.served]
        place = domains.index(self.retrain or "")
        self.before = {name: expected.pop(name) for name in domains[place:] if name in expected}
        served = self.setup.served[:place]
        self.setup = replace(self.setup, served=served)
        names = {name for entry in served for name in entry.stacks}
        for _, layer in stacked_layers(self.model):
            if any(stack_id.name not in names for stack_id in layer.stacks.ids):
                layer.set_stacks([s for s in layer.stacks.stacks() if s.id.name in names])

    # --- one domain -------------------------------------------------------------------------------

    def _domain(self, work: StackWork, plan: DomainPlan, expected: MatrixRow) -> DomainResult:
        start = time.monotonic()
        identity, store = self.setup.identity(plan.settings), self.setup.store
        # Not how stacks are stored: one that does not fit float16 can be frozen as bfloat16 without
        # training it again.
        identity["stack"] = {k: v for k, v in identity["stack"].items() if k != "storage"}
        names = {name for entry in self.setup.served for name in entry.stacks}
        earlier = [s for s in store.enabled_stacks() if s.name in names] if store else []
        if store is not None and self.retrain is not None:
            identity["replaces"] = stack_hashes(store, plan.name)
        if self.is_main:
            work.begin({
                "name": plan.name, "base_fingerprint": self.setup.base_fingerprint, **identity,
                "trained_on": {stack.name: stack.file.sha256 for stack in earlier},
            })  # fmt: skip
        wait_for_all(self.group)
        stages, self.seconds = self.seconds, {}
        bases = self._bases(work, plan)
        stages["directions"] = time.monotonic() - start
        self._say(0, f"{plan.name}, the first step")
        checkpoints = RoundCheckpoints(
            self.setup, work, plan, self.is_main, self._say, self.metrics
        )
        try:
            result = train_domain(
                self.model, self._job(plan, bases), checkpoints, self.setup.served, self.losses,
                self.settings.modes, expected, dtype=self.setup.served_dtype, group=self.group,
                on_loss=lambda mode, domain, loss: self._say(1, f"{mode} loss of {domain}"),
            )  # fmt: skip
        except NonFiniteError as error:
            raise NonFiniteError(
                f"domain {plan.name}: {error}. The store is as it was and the state before this "
                f"step is saved in {work.path}; change what made it (a lower learning_rate, a "
                "broken row) and run again with --no-resume: domains in the store stay"
            ) from error
        seconds = time.monotonic() - start
        stages["training"] = seconds - stages["directions"]
        projections = len(self.setup.targets_of(plan.settings))
        details = round_details(
            result.records, bases, projections, seconds, checkpoints.resumed_from
        )
        retrained = self._retrained(work, result) if self.retrain is not None else None
        if retrained is not None:
            stages["after"] = time.monotonic() - start - seconds
        if self.is_main and self.settings.sample_prompts:
            self._say(1, f"answers after {plan.name}")
            served = [*self.setup.served, result.served]
            begun = time.monotonic()
            details["samples"] = answered_samples(self.setup, served, self.settings.sample_prompts)
            stages["answers"] = time.monotonic() - begun
        details["stage_seconds"] = {stage: round(value, 3) for stage, value in stages.items()}
        self.domains[plan.name] |= details
        if self.is_main:
            work.set_details({**work.details, plan.name: details})
            self._say(1, f"{plan.name}: overlap with earlier domains, and into the store")
            commit_domain(
                self.setup, self.target, work, plan, result, bases, details["stage_seconds"],
                retrained,
            )  # fmt: skip
        wait_for_all(self.group)
        store = store or Store.open(self.target)
        store.refresh()
        self.setup = with_trained(self.setup, store, result.served)
        if retrained is not None:
            self.setup = replace(self.setup, served=retrained.served)
            self.setup.notes.extend([*company_notes(store.manifest), *router_notes(store)])
        self.domains_done += 1
        return result

    def _retrained(self, work: StackWork, result: DomainResult) -> Retrained:
        """Later domains back on top of a domain that was trained again, and every loss now.

        Raises: InputError where training gained nothing: the store keeps what it has.
        """
        store, name = self.setup.store, result.served.domain
        assert store is not None
        if not result.served.stacks:
            if self.is_main:
                work.clear()
            raise InputError(
                f"domain {name}: training it again gained nothing, so the store keeps the stacks "
                "that it has; give more rows, --iters or another --learning-rate"
            )
        place = [domain.name for domain in store.manifest.domains].index(name)
        later = serve_domains(
            self.model, store, store.manifest.domains[place + 1 :], self.setup.latent
        )
        served = [*self.setup.served, result.served, *later]
        row = measure_row(
            self.model, served, self.losses, [*dict.fromkeys(["prefix", *self.settings.modes])],
            self.setup.served_dtype, lambda mode, d, loss: self._say(1, f"{mode} loss of {d}"),
        )  # fmt: skip
        return Retrained(served, self.before, row, self.moved_above)

    def _bases(self, work: StackWork, plan: DomainPlan) -> Bases:
        """The directions to keep out of, from the work directory or found now."""
        settings = self.settings.null_space
        if settings is None or not any(served.stacks for served in self.setup.served):
            return {}
        if self.is_main and work.bases() is None:
            self._say(0, f"directions to keep out of for {plan.name}")
            samples = {name: rows.samples for name, rows in self.setup.rows.items()}
            steps = stages(self.setup.served, plan.name, samples, settings)
            work.set_bases(protected_bases(self.model, steps, settings, self.settings.seed))
        wait_for_all(self.group)
        bases = work.bases() or {}
        if warning := capacity_warning(bases):
            self.setup.notes.append(f"{plan.name}: {warning}")
        paths = self.setup.paths_of(plan.settings)
        if len(full_projections(bases, paths)) == len(paths):
            raise InputError(
                f"domain {plan.name}: null_space.directions {settings.directions} protects every "
                "output direction of every projection, so nothing can be trained; lower it, or "
                "set null_space to null"
            )
        return bases

    def _job(self, plan: DomainPlan, bases: Bases) -> DomainJob:
        settings = self.settings
        return DomainJob(
            name=plan.name,
            paths=self.setup.paths_of(plan.settings),
            stack=settings.stack,
            rounds=plan.settings.rounds or settings.rounds,
            optimizer=plan.optimizer,
            every=steps_of(settings.steps_per_eval, settings.grad_accumulation_steps),
            batches_at=plan.batches_at,
            loss_of=self.losses[plan.name],
            snapshot=SnapshotSettings(
                spike_threshold=settings.spike_threshold, patience=settings.patience
            ),
            min_loss_delta=settings.min_loss_delta,
            keep_plateau_stack=settings.keep_plateau_stack,
            balance_weight=settings.balance_weight,
            seed=settings.seed,
            bases=bases,
            latent=self.setup.latent,
            compiled=compiles(settings.compile_step),
            head=self.setup.head,
        )

    def _loss_of(self, name: str) -> Callable[[nn.Module], float]:
        """The first process's: hosts may round differently, and all have to stop, keep and judge
        alike.
        """
        measure = self.setup.loss_of(name)
        return lambda model: gathered(measure(model), self.group)[0]

    def _say(self, share: float, what: str) -> None:
        """share: of the domain under way that is done."""
        if self.progress:
            self.progress(self.domains_done + min(share, 0.999), self.domains_all, what)
