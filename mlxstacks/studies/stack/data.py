"""Which domains `mlxstacks stack` is about, and their rows: read, split, encoded."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlxstacks.data import (
    DomainData,
    DomainDataSettings,
    EncodedRows,
    Row,
    data_notes,
    encode_examples,
    pack_rows,
    read_domains,
)
from mlxstacks.data.settings import SourceSettings
from mlxstacks.errors import InputError
from mlxstacks.evaluate import VALIDATION_ROWS
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.store import Store, data_directories
from mlxstacks.training.batches import choose_widths
from mlxstacks.training.settings import DomainSettings, StackRunSettings

# Under this key of its data report a domain keeps the settings of its data, to read it again.
DATA_SETTINGS = "settings"


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


def data_root(settings: StackRunSettings) -> Path:
    """Where relative paths of sources begin: `data`, or the current directory."""
    return user_path(settings.data) if settings.data else Path()


def listed_domains(settings: StackRunSettings) -> list[DomainSettings]:
    """The domains that the settings name, each with its data.

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
    missing = [d.name for d in domains if d.data is None and not _file_of(root, settings, d)]
    if missing:
        there = ", ".join(sorted(path.name for path in root.glob("*.jsonl"))) or "no .jsonl files"
        raise InputError(
            f"no data for {', '.join(missing)}: there is no "
            + ", ".join(str(root / f"{name}.jsonl") for name in missing)
            + f" (there: {there}); a domain takes data: sources, or a file of its name in `data`"
        )
    return [
        d.model_copy(update={"data": (d.data or _of_name(d.name, settings)).rendered_as(settings)})
        for d in domains
    ]


def _file_of(root: Path, settings: StackRunSettings, domain: DomainSettings) -> bool:
    return bool(settings.data) and (root / f"{domain.name}.jsonl").is_file()


def _of_name(name: str, settings: StackRunSettings) -> DomainDataSettings:
    return DomainDataSettings(sources=(f"{name}.jsonl",), validation_rows=settings.validation_rows)


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


def data_settings_of(record: DomainRecord) -> DomainDataSettings:
    """Where the rows of a domain in the store came from. Raises: InputError where it says not."""
    try:
        return DomainDataSettings.model_validate(record.data.get(DATA_SETTINGS))
    except ValidationError:
        raise InputError(
            f"the store does not say where the data of domain {record.name} came from; list it in "
            "`domains` with its data, or disable it"
        ) from None


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
    for root in roots:
        sources = tuple(_within(root, source) for source in settings.sources)
        if all(source.path is None or Path(source.path).exists() for source in sources):
            return settings.model_copy(update={"sources": sources})
    files = ", ".join(source.path for source in settings.sources if source.path is not None)
    places = ", ".join(str(root.absolute()) for root in roots)
    raise InputError(f"{files} not there (in {places}); give --data, the directory they are in")


def _within(root: Path, source: SourceSettings) -> SourceSettings:
    path = source.path and str(root / user_path(source.path))
    return source.model_copy(update={"path": path})


def read_rows_of(
    wanted: Mapping[str, DomainDataSettings],
    settings: StackRunSettings,
    tokenizer: Any,
    store: Store | None,
    notes: list[str],
) -> dict[str, DomainRows]:
    """Rows of each domain; a domain of the store keeps the split that it was trained with.

    Raises: InputError: a source that cannot be read, rows of a stored split that are gone, a domain
        without rows to train on or to validate with.
    """
    stored = {
        record.name: record
        for record in (store.manifest.domains if store else ())
        if record.name in wanted and record.split is not None
    }
    root = data_root(settings)
    _check_sources(wanted, stored, root)
    splits = {
        name: store.read_json(record.split)
        for name, record in stored.items()
        if store is not None and record.split is not None
    }
    domains = read_domains(wanted, root, tokenizer=tokenizer, stored=splits)
    for name in (name for name in wanted if name not in stored):
        notes += data_notes(name, domains[name].report)
    return {
        name: _encoded(domains[name], wanted[name], name in stored, settings, tokenizer, notes)
        for name in wanted
    }


def _check_sources(
    wanted: Mapping[str, DomainDataSettings], stored: Mapping[str, DomainRecord], root: Path
) -> None:
    """Domains of the store need their data too; say so where a file is gone."""
    gone = [
        f"{name}: {root / user_path(source.path)}"
        for name in stored
        for source in wanted[name].sources
        if source.path is not None and not (root / user_path(source.path)).exists()
    ]
    if gone:
        raise InputError(
            "\n  ".join(["data of domains that are in the store is gone:", *gone])
            + "\ntheir validation rows are needed for the forgetting matrix and the protected "
            "directions. Put the files back, list the domains in `domains` with where they are "
            "now, or take a domain out with `mlxstacks stacks disable`. The store is unchanged"
        )


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
        notes.append(f"{data.name}: {cut} rows were cut to max_seq_length {longest}.")
    if empty:
        notes.append(f"{data.name}: {empty} rows have nothing to learn from; left out.")
    notes.extend(f"{data.name}: {note}" for note in dict.fromkeys((*held.notes, *train.notes)))
    rows = train.rows
    if settings.packing:
        validation, rows = pack_rows(validation, longest), pack_rows(rows, longest)
    widths = choose_widths([len(row.tokens) for row in validation], longest)
    return DomainRows(data.name, data, about, rows, validation, held.rows, widths, cut, empty)
