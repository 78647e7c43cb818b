"""What `mlxstacks stack` works on: base, projections, stored stacks, rows, the guard's word."""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.errors import InputError, ResourceLimitError, StoreError
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.files.store import Store, base_name
from mlxstacks.guard.run import GuardReport, guard
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.attach import check_per_expert
from mlxstacks.layers.freezing import add_frozen
from mlxstacks.layers.latent import LatentPair, latent_pairs
from mlxstacks.layers.output_head import OutputHead, find_output_head
from mlxstacks.layers.settings import TargetSettings, parse_layers
from mlxstacks.layers.stack_files import SharedPairs, attach_paths, parts_of
from mlxstacks.layers.targets import (
    Target,
    check_targets,
    find_targets,
    left_out_notes,
)
from mlxstacks.studies.stack.plan import (
    DomainPlan,
    DomainRows,
    check_names,
    identity_of,
    listed_domains,
    plan_domains,
    read_rows_of,
)
from mlxstacks.studies.train.setup import guard_settings, limit_is_assumed
from mlxstacks.study.run_directory import IDENTITY, recorded_fingerprint, work_path
from mlxstacks.training.continual import MatrixRow, Served, arrival_problems
from mlxstacks.training.modes import evaluating, prepare_base
from mlxstacks.training.settings import DomainSettings, StackRunSettings


@dataclass(frozen=True, eq=False)
class StackSetup:
    """store: the one to resume, None for a new one. rows: of every domain whose loss is
    measured. to_train: in order. served: domains whose stacks are in the model, in order.
    """

    settings: StackRunSettings
    model: nn.Module
    tokenizer: Any
    base_model: str
    base_directory: Path
    base_fingerprint: str
    float32_base: bool
    targets: list[Target]
    latent: MutableMapping[str, LatentPair]
    store: Store | None
    rows: dict[str, DomainRows]
    to_train: list[DomainPlan]
    served: list[Served]
    notes: list[str] = field(default_factory=list)

    def targets_of(self, domain: DomainSettings) -> list[Target]:
        """Those of the domain's layers; domain: with the run's settings filled in."""
        layers = parse_layers(domain.layers or self.settings.layers)
        return [target for target in self.targets if layers is None or target.layer in layers]

    def paths_of(self, domain: DomainSettings) -> tuple[str, ...]:
        return tuple(sorted(target.path for target in self.targets_of(domain)))

    @property
    def served_dtype(self) -> mx.Dtype | None:
        """Frozen stacks widened to the base's float32: exact, and much faster on a CPU."""
        return mx.float32 if self.float32_base else None

    @cached_property
    def head(self) -> OutputHead | None:
        """The model's, for a loss in pieces; found when it is first asked for."""
        head, note = find_output_head(self.model)
        self.notes.extend([note] if note else [])
        return head

    def loss_of(self, name: str) -> Any:
        """(model) -> validation loss of a domain, in nats per token: the one evaluator."""
        rows, size = self.rows[name], self.settings.batch_size

        def loss(model: nn.Module) -> float:
            with evaluating(model):
                return evaluate_mean_loss(model, rows.validation, size, rows.widths, head=self.head)

        return loss

    def identity(self, domain: DomainSettings) -> dict[str, Any]:
        """All that the domain's stacks depend on, but for base and earlier stacks."""
        return identity_of(self.settings, domain, self.float32_base, self.rows[domain.name])


def set_up(
    settings: StackRunSettings, store: Store | None, retrained: str | None = None
) -> StackSetup:
    """Load lazily (nothing of the base is read yet), choose, read, compare with the store, attach.

    retrained: a domain of the store whose rows are read anew, to train it again.

    Raises: InputError for whatever cannot be used: model, projections, rank, data, a domain that
        the store has with other settings. StoreError: a store of another base, a damaged file.
    """
    if settings.model is None:
        raise InputError("stack needs model")
    notes: list[str] = []
    listed = listed_domains(settings)
    others = store  # without the domain that is trained again
    if store is not None and retrained is not None:
        rest = tuple(d for d in store.manifest.domains if d.name != retrained)
        others = Store(store.path, replace(store.manifest, domains=rest))
    check_names(listed, others)
    checkpoint = open_checkpoint(resolve_model(settings.model))
    if store is not None:
        recorded: str | None = store.manifest.base_fingerprint
    else:
        run = work_path(user_path(settings.save_path or "")) / IDENTITY
        recorded = recorded_fingerprint(run, "base_fingerprint", resume=settings.resume)
    base_fingerprint = fingerprint(checkpoint, recorded)
    if store is not None:
        store.check_base(base_fingerprint)
    model, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
    targets = choose_targets(model, settings)
    notes += [] if settings.keys else left_out_notes(model, targets)
    in_float32 = prepare_base(model, settings.base, notes, checkpointed=settings.grad_checkpoint)
    targets = find_targets(model, _target_settings(settings))  # widened modules are new ones
    rows = read_rows_of(listed, settings, tokenizer, others, notes)
    to_train = plan_domains(listed, rows, settings, others, notes)
    latent: dict[str, LatentPair] = {}
    try:
        if settings.stack.latent_dim is not None:
            dims = {target.path: target.dims for target in targets}
            latent = dict(latent_pairs(dims, settings.stack.latent_dim, base_fingerprint))
        served = (
            [] if store is None else serve_domains(model, store, store.manifest.domains, latent)
        )
        attach_paths(model, [target.path for target in targets])
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error
    return StackSetup(
        settings, model, tokenizer, base_name(settings.model), checkpoint.directory,
        base_fingerprint, in_float32, targets, latent, store, rows, to_train, served, notes,
    )  # fmt: skip


def choose_targets(model: nn.Module, settings: StackRunSettings) -> list[Target]:
    """The projections to train on. Raises: InputError for layers, names, rank that do not fit."""
    stack = settings.stack
    try:
        targets = find_targets(model, _target_settings(settings))
        for layers in _layers_of(settings):  # each domain needs a place
            find_targets(model, _target_settings(settings, layers))
        check_per_expert(targets, stack, layers_were_named="layers" in settings.model_fields_set)
        check_targets(targets, stack.rank if stack.latent_dim is None else 1)
    except ValueError as error:
        raise InputError(str(error)) from error
    return targets


def _layers_of(settings: StackRunSettings) -> list[str]:
    """Of each domain, or of the run."""
    return [domain.layers or settings.layers for domain in settings.domains] or [settings.layers]


def _target_settings(settings: StackRunSettings, layers: str | None = None) -> TargetSettings:
    """layers: in place of those of all domains together."""
    named = [layers] if layers else _layers_of(settings)
    numbers = parse_layers("all" if "all" in named else ",".join(named))
    return TargetSettings(layers=numbers, projections=settings.keys or None)


def serve_domains(
    model: nn.Module,
    store: Store,
    domains: Sequence[DomainRecord],
    latent: MutableMapping[str, LatentPair],
) -> list[Served]:
    """Put the stacks of those domains of the store that are enabled into the model; latent pairs
    that it has replace ours, so that stacks on equal pairs can be packed.
    """
    pairs, served = SharedPairs(store), []
    try:
        for domain in domains:
            if not domain.enabled:
                continue
            for record in domain.stacks:
                file = store.read_stack(record)
                stored = pairs.of(file.header)
                attach_paths(model, file.header.projections)
                add_frozen(model, parts_of(file, stored))
                latent.update(
                    (path, pair)
                    for path, pair in stored.items()
                    if path in latent and pair.dim == latent[path].dim
                )
            served.append(Served(domain.name, tuple(record.name for record in domain.stacks)))
    except InputError:
        raise
    except ValueError as error:
        raise StoreError(f"{store.path}: {error}") from error
    return served


def with_trained(setup: StackSetup, store: Store, served: Served) -> StackSetup:
    """The setup after a domain was trained and stored."""
    rest = [plan for plan in setup.to_train if plan.name != served.domain]
    return replace(setup, store=store, to_train=rest, served=[*setup.served, served])


def stored_prefix(manifest: Manifest) -> MatrixRow:
    """The latest prefix loss of each domain: its column is constant, so any row would do. What it
    ended with is the same, for a matrix that does not show this mode.
    """
    rows = manifest.matrix.get("prefix", {})
    losses: MatrixRow = {d.name: d.final_loss for d in manifest.domains if d.final_loss is not None}
    for domain in manifest.domains:
        losses |= rows.get(domain.name, {})
    return losses


def with_other_company(manifest: Manifest) -> set[str]:
    """Trained domains whose earlier stacks are not those that they were trained on: one was
    removed, disabled, or enabled again since.
    """
    names: set[str] = set()
    before: list[str] = []
    for domain in manifest.domains:
        if not domain.enabled:
            continue
        if domain.origin == "trained" and tuple(before) != domain.trained_on:
            names.add(domain.name)
        before += [stack.name for stack in domain.stacks]
    return names


def check_arrival(
    store: Store, measured: MatrixRow, notes: list[str], but_for: str | None = None
) -> None:
    """Compare the prefix losses that this process measures with a store's.

    but_for: a domain whose rows may be new ones.
    Raises: StoreError where they are not those of the store, and no rounding explains it.
    """
    stored = stored_prefix(store.manifest)
    stored.pop(but_for or "", None)
    wrong, rounding = arrival_problems(stored, measured)
    changed = with_other_company(store.manifest)
    for name in sorted(changed):
        notes.append(
            f"{name} was trained on other stacks than those before it now; its loss with these "
            f"is {measured[name]:.4f}."
        )
    wrong = [line for line in wrong if line.partition(":")[0] not in changed]
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise StoreError(
            f"{store.path}: domains do not have the loss that they were stored with:{lines}\n"
            "the base, its settings (`base`), or the rows are not those of the store; nothing "
            "was changed"
        )
    if rounding:
        notes.append(
            "Losses of stored domains differ here by rounding (another device or version): "
            + "; ".join(rounding)
        )


# --- the guard ------------------------------------------------------------------------------------


def guarded(
    setup: StackSetup, processes: int = 1, *, plan_only: bool = False
) -> GuardReport | None:
    """What the guard says of the longest batch in the last round, when all other stacks are frozen;
    None where nothing is trained, or it is off.

    plan_only: a refusal is a note too.
    Raises: ResourceLimitError where it refuses and the settings do not want otherwise.
    """
    settings = setup.settings
    if settings.guard == "off" or not setup.to_train:
        return None
    rounds = sum(plan.settings.rounds or settings.rounds for plan in setup.to_train)
    report = guard(asked_of(
        settings,
        str(resolve_model(settings.model or "")),
        max(max(plan.widths) for plan in setup.to_train),
        layers=",".join(map(str, sorted({target.layer for target in setup.targets}))),
        domains=len(setup.served) + len(setup.to_train),
        stacks=rounds + sum(len(served.stacks) for served in setup.served),
        processes=processes,
        in_float32=setup.float32_base,
    ))  # fmt: skip
    if report.outcome == "fits":
        return report
    may_run = settings.guard == "warn" or limit_is_assumed(report)
    if report.outcome == "tight" or may_run:
        setup.notes.append(f"The guard warns: {report.verdict}.")
        return report
    advice = f"\ncheapest change: {report.change.words}" if report.change else ""
    refusal = (
        f"the guard refuses this run: {report.verdict}{advice}\n--guard warn runs all the same"
    )
    if not plan_only:
        raise ResourceLimitError(refusal)
    setup.notes.append(refusal)
    return report


def asked_of(
    settings: StackRunSettings,
    model: str,
    longest_row_tokens: int,
    *,
    layers: str,
    domains: int,
    stacks: int,
    processes: int = 1,
    in_float32: bool = False,
) -> GuardSettings:
    """What the guard is asked of a run. domains, stacks: how many there are at the end; the guard
    takes all for stacks of this run's shape, on its projections.
    """
    space = settings.null_space
    widths = 0 if space is None or domains < 2 else space.directions
    if space is not None and space.scope == "cumulative":
        widths *= domains - 1
    return guard_settings(
        settings, model, longest_row_tokens, processes, in_float32, frozen_stacks=stacks - 1,
        directions=widths, layers=layers, adapter_copies=1,  # the best weights so far
        force=settings.guard == "warn",
    )  # fmt: skip
