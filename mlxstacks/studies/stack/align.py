"""`mlxstacks align --store-path`: the last stack of a domain, trained in place of an adapter.

It is put on the stacks that it was trained on, frozen as they were then, keeps out of the
directions that it kept out of, and starts from its stored numbers in float32; its router draws no
noise. At the end it is frozen under its name and every domain is measured again; the store takes it
in one change, if the losses of earlier domains are exactly what they were.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import __version__
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import Manifest, MatrixMode
from mlxstacks.files.outputs import refuse_built_in
from mlxstacks.files.store import Store, base_name, find_base
from mlxstacks.files.store_commands import (
    company_notes,
    dependents,
    replaced_domain,
    router_notes,
)
from mlxstacks.files.store_files import PREVIOUS, read_manifest
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.delta_rows import protect_active
from mlxstacks.layers.freezing import freeze_active, stack_tensors
from mlxstacks.layers.selection import ungated
from mlxstacks.layers.stack_files import SharedPairs, attach_paths, parts_of, places
from mlxstacks.layers.stacked import set_mode
from mlxstacks.layers.targets import Target
from mlxstacks.studies.stack.plan import read_rows_of, run_settings_of
from mlxstacks.studies.stack.setup import StackSetup, asked_of, check_arrival, choose_targets
from mlxstacks.studies.train import align
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import IDENTITY, recorded_fingerprint, work_path
from mlxstacks.training.continual import (
    MatrixRow,
    Served,
    check_prefix,
    measure_row,
    protected_bases,
    stages,
)
from mlxstacks.training.settings import AlignSettings, StackRunSettings, TrainSettings

# Of the identity of a run: the checksum of the manifest that it began with.
_STORE = "store_sha256"


def run(
    settings: AlignSettings, *, dry_run: bool = False, progress: Callable[..., None] | None = None
) -> Result:
    """`mlxstacks align`: an adapter, or with a store a stack of it.

    Raises: as `studies.train.align.run`, and as `ActiveStack`.
    """
    if settings.store_path is None:
        return align.run(settings, dry_run=dry_run, progress=progress)
    active = ActiveStack(settings)
    return align.run(active.settings, dry_run=dry_run, progress=progress, active=active)


class ActiveStack:
    """settings: of the run, with the store's base. name: of the stack. below: stacks that it trains
    on, by name in order. served: every domain that is enabled. company: those that it trains with,
    the last being its own.

    Raises: InputError for a domain without a stack that could be trained where it was.
    """

    def __init__(self, settings: AlignSettings) -> None:
        self.store = store = Store.open(str(settings.store_path))
        refuse_built_in(store.path)
        # A run that was stopped after its change of the store, but before its result was written.
        begun = recorded_fingerprint(
            work_path(user_path(str(settings.save_path))) / IDENTITY, _STORE, resume=settings.resume
        )
        if begun not in (None, store.manifest.checksum) and (store.path / PREVIOUS).exists():
            before = read_manifest(store.path, PREVIOUS)
            self.store = Store(store.path, before) if before.checksum == begun else store
        domains = self.store.manifest.domains
        if not domains:
            raise InputError(f"{store.path}: has no domain yet; `mlxstacks stack` trains one")
        self.domain = domain = self.store.domain_named(settings.domain or domains[-1].name)
        if domain.origin != "trained":
            raise InputError(
                f"{domain.name} was imported, not trained here: align its adapter "
                "(--resume-adapter-file), remove it and import what comes of that"
            )
        if not domain.enabled:
            raise InputError(f"{domain.name} is disabled: `mlxstacks stacks enable` it first")
        if not domain.stacks:
            raise InputError(f"{domain.name} has no stack: its training gained nothing")
        self.name = domain.stacks[-1].name
        served = [stack.name for stack in self.store.enabled_stacks()]
        if gone := [name for name in domain.trained_on if name not in served]:
            raise InputError(
                f"{domain.name} was trained on top of {', '.join(gone)}, not served now: enable "
                f"what is disabled, or train {domain.name} again (`mlxstacks stacks retrain`)"
            )
        wanted = {*domain.trained_on, *(stack.name for stack in domain.stacks[:-1])}
        self.below = [name for name in served if name in wanted]
        self.served = [
            Served(d.name, tuple(stack.name for stack in d.stacks)) for d in domains if d.enabled
        ]
        self.place = [entry.domain for entry in self.served].index(domain.name)
        earlier = [entry for entry in self.served[: self.place] if {*entry.stacks} <= wanted]
        self.company = [*earlier, self.served[self.place]]
        self.notes: list[str] = []
        base = find_base(self.store, settings.model, self.notes).directory
        self.settings = settings.model_copy(update={"model": str(base)})
        run = StackRunSettings.model_validate(
            {**run_settings_of(domain), "model": str(base), "data": settings.stored_data}
        )
        if self.below and run.null_space and run.stack.projector_mode == "train_only":
            raise InputError(
                f"{domain.name} kept out of directions in training alone (projector_mode "
                "train_only), so what is trained would not be what is scored; train it again with "
                "projector_mode folded"
            )
        quiet = {"router_noise": False, "dropout": settings.dropout}
        self.run = run.model_copy(update={"stack": run.stack.model_copy(update=quiet)})

    def plan(self) -> dict[str, Any]:
        """What will be done, as JSON. marked: domains that were trained with the stack as it is."""
        return {
            "store_path": str(self.store.path), "domain": self.domain.name, "stack": self.name,
            "trains_on": self.below, "stack_bytes": self.domain.stacks[-1].file.nbytes,
            "unchanged": [entry.domain for entry in self.served[: self.place]],
            "marked": [d.name for d in dependents(self.store.manifest, self.domain)],
        }  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """What the trained weights depend on, beside the settings of the run."""
        return {_STORE: self.store.manifest.checksum, "stack": self.name}

    def asked_of(self, settings: TrainSettings, longest_row_tokens: int) -> GuardSettings:
        """What the guard is asked of a run with these rows."""
        of_run = {
            "batch_size", "grad_accumulation_steps", "grad_checkpoint", "compile_step",
            "resource_limit", "working_set_bytes",
        }  # fmt: skip
        layers = sorted({target.layer for target in self.setup.targets})
        asked = asked_of(
            self.run.model_copy(update={key: getattr(settings, key) for key in of_run}),
            str(settings.model), longest_row_tokens, layers=",".join(map(str, layers)),
            domains=len(self.company), stacks=1 + len(self.below),
            in_float32=self.setup.float32_base,
        )  # fmt: skip
        return asked.model_copy(update={"force": settings.force or settings.guard == "warn"})

    # --- on a model -------------------------------------------------------------------------------

    def attach(
        self, model: nn.Module, tokenizer: Any, base: Path, in_float32: bool, notes: list[str]
    ) -> list[Target]:
        """Put all stacks that are served on a model, and the active one, whose projections are
        returned. Reads the domains' rows. Raises: InputError where they are gone; StoreError.
        """
        notes += self.notes
        targets = choose_targets(model, self.run)
        rows = read_rows_of([], self.run, tokenizer, self.store, notes)
        self.setup = StackSetup(
            self.run, model, tokenizer, base_name(base), base,
            self.store.manifest.base_fingerprint, in_float32, targets, {}, self.store, rows, [],
            self.served, notes,
        )  # fmt: skip
        pairs = SharedPairs(self.store)
        files = {s.name: self.store.read_stack(s) for s in self.store.enabled_stacks()}
        self.header = files[self.name].header
        self.parts = {name: parts_of(f, pairs.of(f.header)) for name, f in files.items()}
        attach_paths(model, (path for parts in self.parts.values() for path in parts))
        self._serve(self.parts)
        for path, part in self.parts[self.name].items():
            active = places(model)[path].add_active(
                self.run.stack, mx.random.key(0), part.shape.latent
            )
            active.update({leaf: a.astype(mx.float32) for leaf, a in part.tensors().items()})
            active.freeze(recurse=False, keys="noise")  # a frozen stack has none
        set_mode(model, ungated(), self.setup.served_dtype)
        return targets

    def _serve(self, names: Collection[str]) -> None:
        """These frozen stacks, in the store's order."""
        for path, layer in places(self.setup.model).items():
            of_path = (parts.get(path) for name, parts in self.parts.items() if name in names)
            layer.set_stacks([part for part in of_path if part is not None])

    def begin(self, say: Callable[[str], None]) -> None:
        """Measure every domain as the store has it, then leave what the active stack trains on.

        Raises: StoreError where a domain does not have the loss that it was stored with.
        """
        self.before = self._losses(self.served, ["prefix"], say)["prefix"]
        check_arrival(self.store, self.before, self.setup.notes)
        self._serve(self.below)
        self.loss_before = self.loss()
        *earlier, own = self.company
        space = self.run.null_space
        if space is not None and any(entry.stacks for entry in earlier):
            say("finding the directions to keep out of")
            samples = {name: rows.samples for name, rows in self.setup.rows.items()}
            steps = stages(earlier, own.domain, samples, space)
            bases = protected_bases(self.setup.model, steps, space, self.run.seed)
            paths = bases.keys() & self.parts[self.name].keys()
            protect_active(self.setup.model, {path: bases[path] for path in paths})

    def _losses(
        self, served: Sequence[Served], modes: Sequence[MatrixMode], say: Callable[[str], None]
    ) -> dict[MatrixMode, MatrixRow]:
        losses = {name: self.setup.loss_of(name) for name in self.setup.rows}
        return measure_row(
            self.setup.model, served, losses, modes, self.setup.served_dtype,
            lambda mode, domain, loss: say(f"measured {domain}, {mode}"),
        )  # fmt: skip

    def loss(self) -> float:
        """Validation loss of the stack's domain as it is now, nats per token."""
        return float(self.setup.loss_of(self.domain.name)(self.setup.model))

    # --- into the store ---------------------------------------------------------------------------

    def finish(
        self, how: dict[str, Any], most_rise: float | None, say: Callable[[str], None]
    ) -> dict[str, Any]:
        """Freeze, measure, and replace the stack in the store; what came of it, as JSON.

        how: it was trained, for the manifest. most_rise: of its domain's own loss.
        Raises: DriftError; InputError: frozen, it lost too much, or does not fit its dtype;
            StoreError: the store was changed meanwhile. The store then is as it was.
        """
        name, manifest = self.domain.name, self.store.manifest
        try:
            self.parts[self.name] = freeze_active(
                self.setup.model, self.name, name, getattr(mx, self.run.stack.storage)
            )
        except ValueError as error:
            raise InputError(f"{error}\nThe store is as it was") from error
        self._serve(self.parts)
        modes, plan = [*dict.fromkeys(["prefix", *manifest.matrix])], self.plan()
        is_matrix = self.company == self.served or plan["marked"]
        last = row = self._losses(self.served, modes if is_matrix else ["prefix"], say)
        if self.company != self.served:
            row = self._losses(self.company, modes, say)
        loss = row["prefix"][name]
        earlier = {d: loss for d, loss in self.before.items() if d in plan["unchanged"]}
        check_prefix(earlier, last["prefix"])
        if most_rise is not None and loss - self.loss_before > most_rise:
            raise InputError(
                f"{self.name}, frozen: the validation loss of {name} rose from "
                f"{self.loss_before:.4f} to {loss:.4f}, by more than {most_rise:g}; the store is "
                "as it was"
            )
        *rest, old = self.domain.stacks
        how = {
            "stack": self.name, "from_sha256": old.file.sha256, "loss_before": self.loss_before,
            "loss_after": loss, "prefix_unchanged": plan["unchanged"], **how,
        }  # fmt: skip
        header = replace(self.header, code_version=__version__)
        store = Store(self.store.path, manifest)
        with store.change("aligned", domain=name, stack=self.name) as change:
            stack = change.add_stack(
                stack_tensors(self.parts[self.name]), header, old.loss_before, loss
            )
            domain = replace(
                self.domain, stacks=(*rest, stack), losses=(*self.domain.losses[:-1], loss),
                final_loss=loss, aligned=(*self.domain.aligned, how),
            )  # fmt: skip
            rows = {mode: {name: row[mode]} for mode in manifest.matrix}
            if plan["marked"]:
                for mode in rows:
                    rows[mode][self.served[-1].domain] = last[mode]
            after = replaced_domain(manifest, domain, rows, self.before, last["prefix"], 0.0)
            if _content(change.manifest) == _content(manifest):
                change.manifest = after
            elif _content(change.manifest) != _content(after):
                raise StoreError(
                    f"{store.path}: was changed while {self.name} was trained; nothing was "
                    "replaced. Undo that change and run again to resume, or run with --no-resume "
                    "to train on the store as it is now"
                )
        self.setup.notes.extend([*company_notes(store.manifest), *router_notes(store)])
        losses = {d: {"before": self.before[d], "after": last["prefix"][d]} for d in self.before}
        losses[name] = {"before": self.loss_before, "after": loss}
        return plan | {"sha256": stack.file.sha256, "losses": losses}


def _content(manifest: Manifest) -> Manifest:
    """But for the version that wrote it."""
    return replace(manifest, code_version="")
