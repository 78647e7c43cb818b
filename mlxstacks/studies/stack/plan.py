"""Which domains `mlxstacks stack` trains, their rows (read, split, encoded), with what; and whether
the store has them otherwise.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlxstacks.command_line import command_line
from mlxstacks.data import (
    Batch,
    DomainData,
    DomainDataSettings,
    EncodedRows,
    Row,
    data_notes,
    encode_examples,
    make_batch,
    pack_rows,
    read_domains,
)
from mlxstacks.errors import InputError
from mlxstacks.evaluate import VALIDATION_ROWS
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import DomainRecord, stack_name
from mlxstacks.files.store import Store, data_directories
from mlxstacks.studies.train.setup import optimizer_settings
from mlxstacks.study.document import counted
from mlxstacks.study.run_directory import what_differs
from mlxstacks.training.batches import BatchPlan, choose_widths
from mlxstacks.training.settings import (
    LOGGING,
    DomainSettings,
    OptimizerSettings,
    StackRunSettings,
)

# Validation on fewer says little: the verdict names them.
FEW_ROWS = 8
# Under this key of its data report a domain keeps the settings of its data, to read it again.
DATA_SETTINGS = "settings"
# Of the settings, what a trained stack does not depend on.
_NOT_OF_A_STACK = {
    "model", "data", "save_path", "domains", "validation_rows", "resume", "force", "guard",
    "resource_limit", "working_set_bytes", "save_every", "steps_per_report", "modes",
    "grad_checkpoint", "base", "sample_prompts", *LOGGING,
}  # fmt: skip
# Recorded of the machine that trained a domain; may differ when the command runs again.
_OF_THE_MACHINE = "base_in_float32"


@dataclass(frozen=True, eq=False)
class DomainRows:
    """A domain's rows as the model sees them.

    train: empty for a domain that is not trained now. validation: what the loss is measured on: at
    most VALIDATION_ROWS rows (`evaluated`), packed where that is asked for. samples: all validation
    rows, not packed. widths: of validation. cut, empty: training and validation rows that were cut
    to max_seq_length, or left out because no token of them counts.
    """

    name: str
    data: DomainData
    settings: DomainDataSettings
    train: list[Row]
    validation: list[Row]
    samples: list[Row]
    widths: tuple[int, ...]
    cut: int
    empty: int

    @property
    def evaluated(self) -> int:
        """Rows that the loss is measured on."""
        return len(self.samples[:VALIDATION_ROWS])

    def identity(self) -> dict[str, Any]:
        """What the rows are, wherever they were read from."""
        return {
            "template": self.settings.template,
            "mask_prompt": self.settings.mask_prompt,
            "train_rows": len(self.data.train),
            "train_ids_sha256": _ids_sha256(self.data.train),
            "validation_rows": len(self.data.validation),
            "validation_ids_sha256": _ids_sha256(self.data.validation),
        }

    def report(self) -> dict[str, Any]:
        """For the manifest: what was read and dropped, and the settings to read it again."""
        return {
            **self.data.report,
            "rows_cut": self.cut,
            "rows_empty": self.empty,
            "validation_rows_evaluated": self.evaluated,
            DATA_SETTINGS: self.settings.model_dump(mode="json"),
        }


def _ids_sha256(examples: Sequence[Any]) -> str:
    return hashlib.sha256("\n".join(example.row_id for example in examples).encode()).hexdigest()


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
    _round_plans: dict[int, BatchPlan] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        return self.settings.name

    def round_plan(self, number: int) -> BatchPlan:
        """Which rows the batches of a round have; every round has an order of its own."""
        if number not in self._round_plans:
            digest = hashlib.sha256(f"order/{self.seed}/{self.name}/{number}".encode()).digest()
            lengths = tuple(len(row.tokens) for row in self.rows.train)
            seed = int.from_bytes(digest[:8], "little")
            self._round_plans[number] = BatchPlan(lengths, self.widths, self.batch_size, seed)
        return self._round_plans[number]

    @property
    def tokens_per_round(self) -> int:
        """Tokens of the rows that a round sees, without padding: exact for whole epochs, else what
        its batches have on average.
        """
        plan = self.round_plan(1)
        batches = self.optimizer.steps * self.accumulation
        return round(batches * sum(plan.lengths) / plan.batches_per_epoch)

    def batches_at(self, number: int, step: int) -> Sequence[Batch]:
        batches = []
        for place in range(step * self.accumulation, (step + 1) * self.accumulation):
            rows, width = self.round_plan(number).batch(place)
            batches.append(make_batch([self.rows.train[row] for row in rows], width))
        return batches


# --- which domains --------------------------------------------------------------------------------


def data_root(settings: StackRunSettings) -> Path:
    """Where relative paths of sources begin: `data`, or the current directory."""
    return user_path(settings.data) if settings.data else Path()


def listed_domains(settings: StackRunSettings) -> list[DomainSettings]:
    """The domains that the settings name, each with its data and what the run says of rounds, rate
    and batches, these in whole steps.

    Raises: InputError: no domains, a directory or file that is missing, a file whose name cannot
        name a domain.
    """
    if not settings.domains and not settings.data:
        raise InputError("stack needs data (a directory with NAME.jsonl files) or domains")
    root = data_root(settings)
    if settings.data and not root.is_dir():
        raise InputError(
            f"{root}: no such directory; --data takes one with NAME.jsonl for each domain"
        )
    domains = list(settings.domains) or _every_file(root)
    files = {d.name: root / f"{d.name}.jsonl" for d in domains if d.data is None}
    missing = {name: f for name, f in files.items() if not (settings.data and f.is_file())}
    if missing:
        present = ", ".join(sorted(p.name for p in root.glob("*.jsonl"))) or "no .jsonl files"
        raise InputError(
            f"no data for {', '.join(missing)}: there is no {', '.join(map(str, missing.values()))}"
            f" (there: {present}); put it there, or name another in `domains`: "
            f'{{"name": "{next(iter(missing))}", "data": "FILE.jsonl"}}'
        )
    each = settings.grad_accumulation_steps
    complete = []
    for domain in domains:
        of_name = DomainDataSettings(sources=(f"{domain.name}.jsonl",))
        data = domain.data or of_name
        if data.validation_rows is None:
            data = data.model_copy(update={"validation_rows": settings.validation_rows})
        iters = domain.iters or settings.iters
        complete.append(domain.model_copy(update={
            "data": data.rendered_as(settings),
            "rounds": domain.rounds or settings.rounds,
            "learning_rate": domain.learning_rate or settings.learning_rate,
            "layers": domain.layers or settings.layers,
            "iters": iters and each * -(-iters // each),
        }))  # fmt: skip
    return complete


def _every_file(root: Path) -> list[DomainSettings]:
    files = sorted(path for path in root.glob("*.jsonl") if path.is_file())
    if not files:
        raise InputError(f"{root}: has no NAME.jsonl files; each would be a domain")
    problems, domains = [], []
    for path in files:
        try:
            domains.append(DomainSettings(name=path.stem))
        except ValidationError as error:
            problems.append(f"{path}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    if problems:
        raise InputError("\n".join(problems))
    return domains


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


# --- their rows -----------------------------------------------------------------------------------


def data_settings_of(record: DomainRecord) -> DomainDataSettings:
    """Where the rows of a domain in the store came from. Raises: InputError where it says not."""
    try:
        return DomainDataSettings.model_validate(record.data.get(DATA_SETTINGS))
    except ValidationError:
        raise InputError(
            f"the store does not say where the data of domain {record.name} came from; list it in "
            "`domains` with its data, or disable it"
        ) from None


def run_settings_of(record: DomainRecord) -> dict[str, Any]:
    """The settings of `stack` that a domain was trained with, but for its data and its place."""
    fields = StackRunSettings.model_fields.keys() - {"data"}  # which says there what rows they were
    return {key: value for key, value in record.settings.items() if key in fields}


def stored_data(store: Store, record: DomainRecord, data: str | None) -> DomainDataSettings:
    """Where the rows of a domain are now: the data settings of its training, with files in `data`,
    else where they were then, else in the current directory; of an imported one, NAME.jsonl in
    `data`.

    Raises: InputError: the store does not say, or a file is in none of these places.
    """
    if record.origin == "imported":
        if not data:
            raise InputError("it was imported, so the store does not know its data; give --data")
        settings = DomainDataSettings(sources=(f"{record.name}.jsonl",))
    else:
        settings = data_settings_of(record)
    roots = [user_path(data)] if data else [*data_directories(store), Path()]
    if placed := _placed(settings, roots):
        return placed
    files = [source.path for source in settings.sources if source.path is not None]
    raise InputError(nowhere(files, roots))


def nowhere(files: Sequence[str], roots: Sequence[Path]) -> str:
    """That no directory has all files of a domain, and what there is in the one that was named."""
    named = ", ".join(files)
    places = ", ".join(str(root.absolute()) for root in roots)
    if len(roots) == 1 and roots[0].is_file():
        return f"{places} is a file; give --data, a directory with {named}"
    there = sorted(path.name for path in roots[0].glob("*.jsonl")) if len(roots) == 1 else []
    beside = f", where {', '.join(there[:4])} {'is' if len(there) == 1 else 'are'}" if there else ""
    return f"{named} not there (in {places}{beside}); give --data, the directory they are in"


def _placed(settings: DomainDataSettings, roots: Sequence[Path]) -> DomainDataSettings | None:
    """With its files in the first directory that has all of them; None where none has."""
    for root in (root.absolute() for root in roots):  # as a path of a source, it is from the root
        sources = tuple(
            source.model_copy(update={"path": source.path and str(root / user_path(source.path))})
            for source in settings.sources
        )
        if all(source.path is None or Path(source.path).exists() for source in sources):
            return settings.model_copy(update={"sources": sources})
    return None


def read_rows_of(
    listed: Sequence[DomainSettings],
    settings: StackRunSettings,
    tokenizer: Any,
    store: Store | None,
    notes: list[str],
) -> dict[str, DomainRows]:
    """Rows of each domain that is trained or measured, in the store's order; a domain of the store
    keeps the split that it was trained with, and its files where they were then, if they are not
    in the data directory.

    Raises: InputError: a source that cannot be read, rows of a stored split that are gone, a domain
        without rows to train on or to validate with.
    """
    data = {domain.name: domain.data for domain in listed}
    records = store.manifest.domains if store else ()
    stored = {r.name: r for r in records if r.enabled and r.split is not None}
    root = data_root(settings)
    roots = [root, *(data_directories(store) if store else ())]
    wanted = dict[str, DomainDataSettings]()
    for name, record in stored.items():
        then = data_settings_of(record)
        wanted[name] = data.get(name) or _placed(then, roots) or then
    known = {record.name for record in records}
    wanted |= {name: d for name, d in data.items() if name not in known and d is not None}
    gone = [
        f"\n  {name}: {root / user_path(source.path)}"
        for name in stored
        for source in wanted[name].sources
        if source.path is not None and not (root / user_path(source.path)).exists()
    ]
    if gone:
        raise InputError(
            f"data of domains that are in the store is not there:{''.join(gone)}\n"
            "their validation rows are needed for the forgetting matrix and the protected "
            "directions. Put the files back, list the domains in `domains` with where they are "
            "now, or take a domain out with `mlxstacks stacks disable`. The store is unchanged"
        )
    splits = {
        name: store.read_json(record.split)
        for name, record in stored.items()
        if store is not None and record.split is not None
    }
    domains = read_domains(wanted, root, tokenizer=tokenizer, stored=splits)
    for name in (name for name in wanted if name not in stored):
        notes += data_notes(name, domains[name].report)
        held, rows = len(domains[name].validation), len(domains[name].train)
        if held < FEW_ROWS and wanted[name].validation_rows is None:
            notes.append(
                f"{name}: {held} {'row is' if held == 1 else 'rows are'} for validation and "
                f"{rows:,} to train on; --validation-rows sets another number."
            )
    return {
        name: _encoded(domains[name], wanted[name], name in stored, settings, tokenizer, notes)
        for name in wanted
    }


def _encoded(
    data: DomainData,
    about: DomainDataSettings,
    is_stored: bool,
    settings: StackRunSettings,
    tokenizer: Any,
    notes: list[str],
) -> DomainRows:
    longest = settings.max_seq_length
    if not data.validation or not (data.train or is_stored):
        raise InputError(
            f"domain {data.name}: {len(data.train)} rows to train on and {len(data.validation)} to "
            "validate with were read, it needs both; give it more data, or data.validation_rows "
            "for an exact number"
        )
    held = encode_examples(data.validation, tokenizer, about, longest)
    nothing = EncodedRows([], [], 0, 0)
    train = nothing if is_stored else encode_examples(data.train, tokenizer, about, longest)
    validation = held.rows[:VALIDATION_ROWS]
    cut, empty = held.cut + train.cut, held.empty + train.empty
    if cut:
        notes.append(f"{data.name}: cut to max_seq_length {longest}: {counted(cut, 'row')}.")
    if empty:
        notes.append(f"{data.name}: left out, with nothing to learn from: {counted(empty, 'row')}.")
    notes.extend(f"{data.name}: {note}" for note in dict.fromkeys((*held.notes, *train.notes)))
    rows = train.rows
    if settings.packing:
        validation, rows = pack_rows(validation, longest), pack_rows(rows, longest)
    widths = choose_widths([len(row.tokens) for row in validation], longest)
    return DomainRows(data.name, data, about, rows, validation, held.rows, widths, cut, empty)


# --- what is trained ------------------------------------------------------------------------------


def identity_of(
    settings: StackRunSettings, domain: DomainSettings, float32_base: bool, rows: DomainRows
) -> dict[str, Any]:
    """See `StackSetup.identity`; domain: with the run's settings filled in."""
    return {
        **settings.model_dump(mode="json", exclude=_NOT_OF_A_STACK),
        **domain.model_dump(mode="json", include={"rounds", "iters", "learning_rate", "layers"}),
        _OF_THE_MACHINE: float32_base,
        "data": rows.identity(),
    }


def plan_domains(
    listed: Sequence[DomainSettings],
    rows: Mapping[str, DomainRows],
    settings: StackRunSettings,
    store: Store | None,
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
            differences = _differences(domain, record, rows[domain.name], settings)
            problems += [f"{domain.name}: {line}" for line in differences]
    if problems and store is not None:
        remove = command_line("mlxstacks stacks remove", store.path, "NAME")
        raise InputError(
            "\n  ".join([f"{store.path} has domains that were trained otherwise:", *problems])
            + "\ngive the settings and data that they were trained with; or, to train one again, "
            f"first `{remove}`; or list new domains only; or --force to replace the whole store"
        )
    return plans


def _differences(
    domain: DomainSettings, record: DomainRecord, rows: DomainRows, settings: StackRunSettings
) -> list[str]:
    """What the domain's training would have otherwise; else files whose rows of before are all
    there still, but among others.
    """
    iters = domain.iters or record.settings.get("iters")
    now = identity_of(settings, domain.model_copy(update={"iters": iters}), False, rows)
    before = {**record.settings, _OF_THE_MACHINE: False}
    known = {sha256 for _, sha256 in _files(record.data)}
    return what_differs(before, now) or [
        f"data: {name} changed since; its new rows would not be used"
        for name, sha256 in _files(rows.data.report)
        if sha256 not in known
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
    each, per_epoch = settings.grad_accumulation_steps, -(-len(lengths) // settings.batch_size)
    rate = domain.learning_rate or settings.learning_rate
    of_domain = settings.model_copy(update={"iters": domain.iters, "learning_rate": rate})
    betas = {"beta1": settings.beta1, "beta2": settings.beta2}
    optimizer = optimizer_settings(of_domain, per_epoch, []).model_copy(update=betas)
    complete = domain.model_copy(update={"iters": optimizer.steps * each})
    return DomainPlan(complete, rows, widths, settings.batch_size, each, settings.seed, optimizer)
