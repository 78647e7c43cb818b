"""Which domains `mlxstacks stack` trains, with what, and whether the store has them otherwise."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.data import Batch, make_batch
from mlxstacks.errors import InputError
from mlxstacks.files.manifest import DomainRecord, stack_name
from mlxstacks.files.store import Store
from mlxstacks.studies.stack.data import DomainRows, data_settings_of
from mlxstacks.studies.stack.work import flat
from mlxstacks.studies.train.setup import MOST_DEFAULT_ITERS, steps_of
from mlxstacks.study.run_directory import what_differs
from mlxstacks.training.batches import BatchPlan, choose_widths
from mlxstacks.training.settings import DomainSettings, OptimizerSettings, StackRunSettings

# Of the settings, what a trained stack does not depend on.
_NOT_OF_A_STACK = {
    "model", "data", "save_path", "domains", "validation_rows", "resume", "force", "guard",
    "resource_limit", "working_set_bytes", "save_every", "steps_per_report", "modes",
    "grad_checkpoint", "base",
}  # fmt: skip
# Where a domain was trained and after what: told, not compared when the command runs again.
_OF_THE_MOMENT = {"base_in_float32"}


@dataclass(frozen=True, eq=False)
class DomainPlan:
    """A domain to train. settings: what the run says is filled in."""

    settings: DomainSettings
    rows: DomainRows
    widths: tuple[int, ...]
    batch_size: int
    accumulation: int
    seed: int
    optimizer: OptimizerSettings

    @property
    def name(self) -> str:
        return self.settings.name

    def round_plan(self, number: int) -> BatchPlan:
        """Which rows the batches of a round have; every round has an order of its own."""
        digest = hashlib.sha256(f"order/{self.seed}/{self.name}/{number}".encode()).digest()
        lengths = tuple(len(row.tokens) for row in self.rows.train)
        seed = int.from_bytes(digest[:8], "little")
        return BatchPlan(lengths, self.widths, self.batch_size, seed)

    def batches_at(self, number: int, step: int) -> Sequence[Batch]:
        plan, each = self._plans(number), self.accumulation
        batches = []
        for place in range(step * each, (step + 1) * each):
            rows, width = plan.batch(place)
            batches.append(make_batch([self.rows.train[row] for row in rows], width))
        return batches

    def _plans(self, number: int) -> BatchPlan:
        if number not in self._plan_of:
            self._plan_of[number] = self.round_plan(number)
        return self._plan_of[number]

    @cached_property
    def _plan_of(self) -> dict[int, BatchPlan]:
        return {}


def identity_of(
    settings: StackRunSettings, domain: DomainSettings, float32_base: bool, rows: DomainRows
) -> dict[str, Any]:
    """See `StackSetup.identity`; domain: with the run's settings filled in."""
    return {
        **settings.model_dump(mode="json", exclude=_NOT_OF_A_STACK),
        **domain.model_dump(mode="json", include={"rounds", "iters", "learning_rate"}),
        "base_in_float32": float32_base,
        "data": rows.identity(),
    }


def completed(domains: list[DomainSettings], settings: StackRunSettings) -> list[DomainSettings]:
    """Domains with what the run says of rounds, rate and batches, these in whole steps."""
    each = settings.grad_accumulation_steps
    complete = []
    for domain in domains:
        iters = domain.iters or settings.iters
        update = {
            "rounds": domain.rounds or settings.rounds,
            "learning_rate": domain.learning_rate or settings.learning_rate,
            "iters": iters and each * -(-iters // each),
        }
        complete.append(domain.model_copy(update=update))
    return complete


def check_names(listed: Sequence[DomainSettings], store: Store | None) -> None:
    """Domains and stacks are selected by name alike, on file systems that ignore case."""
    stored = [record.name for record in store.manifest.domains] if store else []
    names = list(dict.fromkeys([*stored, *(domain.name for domain in listed)]))
    stacks = {stack_name(name, number).casefold() for name in names for number in range(1, 100)}
    problems = [
        f"{name}: also the name of another domain's stack; choose another name"
        for name in names
        if name.casefold() in stacks
    ]
    problems += [
        f"{name}: the store has a domain {old}, and case does not count; choose another name"
        for old in stored
        for name in names
        if name != old and name.casefold() == old.casefold()
    ]
    if problems:
        raise InputError("\n".join(problems))


def wanted_data(listed: Sequence[DomainSettings], store: Store | None) -> dict[str, Any]:
    """Domain -> settings of its data: those to train and those to measure, in the store's order."""
    mine = {domain.name: domain.data for domain in listed}
    wanted = {}
    for record in store.manifest.domains if store else ():
        if record.enabled and record.split is not None:
            wanted[record.name] = mine.get(record.name) or data_settings_of(record)
    known = {record.name for record in store.manifest.domains} if store else set()
    return wanted | {name: data for name, data in mine.items() if name not in known}


def plan_domains(
    listed: Sequence[DomainSettings],
    rows: Mapping[str, DomainRows],
    settings: StackRunSettings,
    store: Store | None,
    in_float32: bool,
    notes: list[str],
) -> list[DomainPlan]:
    """Plans of the domains that the store does not have; those it has must be the same.

    Raises: InputError listing what differs of every domain that the store has otherwise.
    """
    plans: list[DomainPlan] = []
    problems: list[str] = []
    for domain in listed:
        record = store.manifest.domain_named(domain.name) if store else None
        if record is None:
            plans.append(_plan(domain, rows[domain.name], settings))
        elif record.origin == "imported":
            problems.append(f"{domain.name}: was imported, with another stack")
        elif domain.name not in rows:
            notes.append(f"{domain.name} is disabled in the store; it stays as it is.")
        else:
            if plans:
                notes.append(f"{domain.name} is in the store already, before {plans[0].name}.")
            problems += _differences(domain, record, rows[domain.name], settings, in_float32)
    if problems and store is not None:
        remove = command_line("mlxstacks stacks remove", store.path, "NAME")
        raise InputError(
            "\n  ".join([f"{store.path} has domains that were trained otherwise:", *problems])
            + "\ngive the settings and data that they were trained with; or, to train one again, "
            f"first `{remove}`; or list new domains only; or "
            "--force to begin the whole store anew"
        )
    return plans


def _differences(
    domain: DomainSettings,
    record: DomainRecord,
    rows: DomainRows,
    settings: StackRunSettings,
    in_float32: bool,
) -> list[str]:
    iters = domain.iters or record.settings.get("iters")
    now = identity_of(
        settings, domain.model_copy(update={"iters": iters}), in_float32, rows
    )  # fmt: skip
    before = {key: value for key, value in record.settings.items() if key not in _OF_THE_MOMENT}
    now = {key: value for key, value in now.items() if key not in _OF_THE_MOMENT}
    differences = what_differs(flat(before), flat(now))
    if not differences:
        differences = _changed_files(record.data, rows.data.report)
    return [f"{record.name}: {line}" for line in differences]


def _changed_files(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Files whose rows of before are all there still, but with something else beside them."""
    old = {sha256 for _, sha256 in _files(before)}
    return [
        f"data: {name} changed since; its new rows would not be used"
        for name, sha256 in _files(now)
        if sha256 not in old
    ]


def _files(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        item
        for source in report.get("sources", [])
        for item in sorted(source.get("sha256", {}).items())
    ]


def _plan(domain: DomainSettings, rows: DomainRows, settings: StackRunSettings) -> DomainPlan:
    lengths = [len(row.tokens) for row in rows.train]
    widths = choose_widths(lengths, settings.max_seq_length)
    each = settings.grad_accumulation_steps
    per_epoch = -(-len(lengths) // settings.batch_size)
    iters = domain.iters or max(each, min(per_epoch, MOST_DEFAULT_ITERS))
    steps = -(-iters // each)
    optimizer = OptimizerSettings(
        steps=steps,
        learning_rate=domain.learning_rate or settings.learning_rate,
        warmup_steps=settings.warmup,
        schedule=settings.lr_schedule,
        final_share=0.0,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        clip_norm=settings.clip_norm,
        log_every=steps_of(settings.steps_per_report, each),
    )
    complete = domain.model_copy(update={"iters": steps * each})
    return DomainPlan(complete, rows, widths, settings.batch_size, each, settings.seed, optimizer)
