"""Where rows come from: files and directories here, and Hugging Face data sets in the cache or, if
a source says so, of the hub; and one source read: rows in their format, cleaned, without repeats,
drawn down to the cap.

Rows stream: of a source that is capped, no more is read, or downloaded, than the cap needs. No code
of a data set runs.
"""

import csv
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mlxstacks.data import arrow_sets, hub_sets
from mlxstacks.data.cleaning import cut_answer, holds_code, reason_to_drop, strip_record
from mlxstacks.data.examples import Example, keep_one, make_example
from mlxstacks.data.formats import FORMATS, row_reader
from mlxstacks.data.json_rows import array_records, begins_array, numbered_records
from mlxstacks.data.settings import DomainDataSettings, SourceSettings, TrainDataSettings
from mlxstacks.errors import InputError

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
# Read where they are named themselves: in a directory of data they may be notes.
NAMED_SUFFIXES = (".csv", ".txt")
# Paragraphs of a text file make a row together until they are so long.
TEXT_CHARACTERS = 1000
_NOT_READ = (".tsv", ".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
VALIDATION_SPLITS = ("valid", "validation", "val", "dev")
KNOWN_SPLITS = ("train", "test", *VALIDATION_SPLITS, "eval")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


class NotCachedError(InputError):
    """A Hugging Face data set that is not on this machine. dataset: its id."""

    def __init__(self, message: str, dataset: str) -> None:
        super().__init__(message)
        self.dataset = dataset


@dataclass(frozen=True, slots=True)
class OpenSource:
    """rows: read once, in order. files: by name in reports (no path of this machine)."""

    rows: arrow_sets.Rows
    files: dict[str, Path]

    def sha256(self) -> dict[str, str]:
        """Of each file, by its name; reads them in pieces."""
        digests = {}
        for name, path in sorted(self.files.items()):
            with path.open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests


def train_data_settings(data: str | TrainDataSettings) -> TrainDataSettings:
    """A plain text stands for one source: a path or, where nothing is there, a data set of the hub
    as `owner/name`. Raises: InputError: it is empty.
    """
    if isinstance(data, TrainDataSettings):
        return data
    if not data:
        raise InputError("data is empty; give a file, a directory or the id of a data set")
    by_name = (*SUFFIXES, *NAMED_SUFFIXES, *_NOT_READ)
    is_file = data.lower().endswith(by_name) or os.path.exists(data)
    is_id = _HUB_ID.fullmatch(data) and not is_file
    source = SourceSettings(dataset=data) if is_id else SourceSettings(path=data)
    return TrainDataSettings(sources=(source,))


def train_data_paths(data: str | TrainDataSettings | None) -> list[str]:
    """Files and directories of the data, as they were written."""
    sources = train_data_settings(data).sources if data else ()
    return [source.path for source in sources if source.path]


def training_parts(
    source: SourceSettings, root: Path
) -> tuple[SourceSettings, SourceSettings | None]:
    """What to train on, and what the source itself has to validate with, if anything.

    In a directory as mlx-lm takes it these are train.jsonl and valid.jsonl; elsewhere the source,
    and a split that is named as one of VALIDATION_SPLITS. A source of another split has none.
    """
    if source.split != "train":
        return source, None
    held_out = source.model_copy(update={"cap": None})
    if source.path:
        path = _path_of(source, root)
        if path.is_dir() and os.path.lexists(path / "train.jsonl"):
            files = {name: str(Path(source.path, name)) for name in ("train.jsonl", "valid.jsonl")}
            # A link that leads nowhere is told by whoever reads it: it must not pass for none.
            has_own = os.path.lexists(path / "valid.jsonl")
            return (
                source.model_copy(update={"path": files["train.jsonl"]}),
                held_out.model_copy(update={"path": files["valid.jsonl"]}) if has_own else None,
            )
        if path.is_file():
            return source, None
    for split in VALIDATION_SPLITS:
        held_out = held_out.model_copy(update={"split": split})
        try:
            open_source(held_out, root)
        except InputError:
            continue
        return source, held_out
    return source, None


def open_source(source: SourceSettings, root: Path) -> OpenSource:
    """Find what a source names; a relative path is taken from `root`.

    Raises: InputError: it is not there (NotCachedError for a data set), cannot be downloaded, or
        holds no file of a known kind. Broken rows raise it later, while rows are read.
    """
    opened = _cached(source, source.dataset) if source.dataset else _local(source, root)
    return replace(opened, rows=_renamed(opened.rows, source.fields)) if source.fields else opened


def _renamed(rows: arrow_sets.Rows, fields: Mapping[str, str | list[str]]) -> arrow_sets.Rows:
    """Rows with the keys of `fields` alone; their columns are what a format knows them by."""
    used = {n for names in fields.values() for n in ([names] if isinstance(names, str) else names)}
    for where, row in rows:
        if absent := used - row.keys():
            raise InputError(
                f"{where}: fields names {', '.join(sorted(absent))}, the row has the keys "
                f"{', '.join(sorted(row))}"
            )
        yield where, {
            key: row[names] if isinstance(names, str) else [row[name] for name in names]
            for key, names in fields.items()
        }  # fmt: skip


def _local(source: SourceSettings, root: Path) -> OpenSource:
    path = _path_of(source, root)
    if path.is_dir() and arrow_sets.is_saved_set(path):
        rows, files = arrow_sets.saved_set(path, source.split)
        return OpenSource(rows, {f"{source.label}/{_inside(path, file)}": file for file in files})
    if path.is_dir():
        return _directory(path, source.split, source.label)
    if not path.is_file():
        raise InputError(
            f"{path}: a pipe or a device, and rows are read more than once; write them to a file"
            if path.exists()
            else f"{path}: no such file or directory; put the data there, or change the source"
        )
    if path.suffix.lower() in _NOT_READ:
        raise InputError(_not_read(path))
    return OpenSource(_file_rows(path), {source.label: path})


def _not_read(path: Path) -> str:
    """Why a file of another kind is not read, and what to do."""
    allowed = ", ".join((*SUFFIXES, *NAMED_SUFFIXES))
    return (
        f"{path}: {path.suffix} is not read; allowed are {allowed}: "
        "datasets.load_dataset(...).to_json(FILE) writes one"
    )


def _path_of(source: SourceSettings, root: Path) -> Path:
    """Raises: InputError: nothing can have this path."""
    try:
        path = root / Path(source.path or "").expanduser()
        path.exists()
    except RuntimeError as error:  # ~name of an unknown user
        raise InputError(f"{source.label!a}: not a usable path: {error}") from None
    except OSError as error:
        raise InputError(f"{source.label[:200]!a}: cannot be opened: {error.strerror}") from None
    return path


def _directory(path: Path, split: str, label: str, name: str | None = None) -> OpenSource:
    files = data_files(path, split, label, name)
    rows = chain.from_iterable(_file_rows(file) for file in files)
    return OpenSource(rows, {f"{label}/{_inside(path, file)}": file for file in files})


def _cached(source: SourceSettings, dataset: str) -> OpenSource:
    """A data set that `datasets` prepared once, else one whose files are in the hub cache; else, to
    be downloaded, one of the hub.
    """
    if not re.fullmatch(rf"[\w][\w.-]*|{_HUB_ID.pattern}", dataset, re.ASCII):
        raise InputError(f"{dataset!a}: not a Hugging Face id; give files and directories as path")
    prepared = arrow_sets.cached_set(dataset, source.name, source.split)
    if prepared is not None:
        rows, files = prepared
        return OpenSource(rows, {f"{source.label}/{file.name}": file for file in files})
    snapshot = arrow_sets.hub_snapshot(dataset)
    if source.download:
        return _downloaded(source, str(snapshot or dataset))
    if snapshot is None:
        raise NotCachedError(
            f"{dataset}: not in the cache of Hugging Face data sets, and nothing is downloaded "
            f"here; get it with `hf download --repo-type dataset {dataset}`, or with "
            "datasets.load_dataset, or by `download: true` in its source, or give the path of a "
            "file or directory that is there",
            dataset,
        )
    return _directory(snapshot, source.split, dataset, source.name)


def _downloaded(source: SourceSettings, repository: str) -> OpenSource:
    """Files come one by one, as their rows are read. repository: an id, or its directory here."""
    urls = hub_sets.split_files(repository, source.name, source.split, source.files)
    files: dict[str, Path] = {}

    def rows() -> arrow_sets.Rows:
        for url in urls:
            path = hub_sets.fetch(url)
            files[f"{source.label}/{hub_sets.name_of(url)}"] = path
            yield from _file_rows(path)

    return OpenSource(rows(), files)


def _file_rows(path: Path) -> arrow_sets.Rows:
    """Rows of one file, by its kind."""
    if path.suffix == ".parquet":
        return arrow_sets.parquet_rows(path)
    if path.suffix == ".arrow":
        return arrow_sets.arrow_rows([path], str(path))
    return (_text_rows if path.suffix.lower() in NAMED_SUFFIXES else _json_rows)(path)


def _text_rows(path: Path) -> arrow_sets.Rows:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            yield from (_csv_rows if path.suffix.lower() == ".csv" else _paragraphs)(path, lines)
    except csv.Error as error:
        raise InputError(f"{path}: not CSV: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8: {error}") from None


def _csv_rows(path: Path, lines: Iterator[str]) -> arrow_sets.Rows:
    """The first line names the columns, and shows whether commas, semicolons or tabs part them; a
    cell is text, an empty one null.
    """
    first = next(lines, "")
    reader = csv.DictReader(chain([first], lines), delimiter=max(",;\t", key=first.count))
    if twice := {n for n in reader.fieldnames or () if (reader.fieldnames or []).count(n) > 1}:
        raise InputError(f"{path}, line 1: {', '.join(sorted(twice))}: the column is there twice")
    for row in reader:
        place = f"{path}, line {reader.line_num}"
        if None in row:
            raise InputError(f"{place}: more cells than the {len(row) - 1} columns of line 1")
        yield place, {name: cell or None for name, cell in row.items()}


def _paragraphs(path: Path, lines: Iterable[str]) -> arrow_sets.Rows:
    """Whole paragraphs, which blank lines divide, TEXT_CHARACTERS and more of them a row."""
    paragraphs: list[str] = []
    first = 1
    for number, line in enumerate(chain(lines, ("",)), 1):
        text = "".join(paragraphs)
        if line == "" or (not line.strip() and len(text) >= TEXT_CHARACTERS):
            if text.strip():
                yield f"{path}, line {first}", {"text": text.strip()}
            paragraphs, first = [], number + 1
        else:
            paragraphs.append(line)


def _json_rows(path: Path) -> arrow_sets.Rows:
    try:
        # A line of a .jsonl file that holds a list is a mistake, not an array of rows.
        is_array = path.suffix != ".jsonl" and begins_array(path)
        for line, record in array_records(path) if is_array else numbered_records(path):
            yield f"{path}, line {line}", record
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def data_files(directory: Path, split: str, label: str, name: str | None = None) -> list[Path]:
    """Files of a split in a directory, in the order of their names.

    A file belongs to a split whose name is a part of its own (train-00000-of-00002.parquet,
    data/train.jsonl); where no file names any split, all of them are `train`.

    Raises: InputError: no file of a known kind, none of this split, or several configurations.
    """
    every = sorted(file for file in directory.rglob("*") if file.suffix in SUFFIXES)
    parts = {file: file.relative_to(directory).parts for file in every}
    files = [
        file
        for file in every
        if file.is_file()
        and file.name not in ("dataset_info.json", "dataset_infos.json")
        and not any(part.startswith(".") for part in parts[file])
        and (name is None or name in parts[file][:-1])
    ]
    if not files:
        where = f"{label}/{name}" if name else label
        message = f"{where}: holds no {', '.join(SUFFIXES)} file"
        others = {f.suffix.lower(): f for f in sorted(directory.rglob("*"), reverse=True)}
        if file := next((others[suffix] for suffix in NAMED_SUFFIXES if suffix in others), None):
            message += f"; {file.suffix} is read where it is named itself: {file}"
        elif unread := next((others[suffix] for suffix in _NOT_READ if suffix in others), None):
            message = _not_read(unread)
        raise InputError(message)
    named = [file for file in files if _names(file, directory, (split,))]
    if not named and split == "train" and not any(_names(f, directory) for f in files):
        named = files
    if not named:
        shown = ", ".join(_inside(directory, file) for file in files[:8])
        raise InputError(f"{label}: no file of split {split!r}; {directory} has {shown}")
    folders = sorted({_inside(directory, file.parent) for file in named})
    if len(folders) > 1 and name is None:
        raise InputError(
            f"{label}: split {split!r} is in several folders ({', '.join(folders[:8])}); "
            "choose one: give its path, or of a hub data set its name"
        )
    return named


def _names(file: Path, directory: Path, splits: Iterable[str] = KNOWN_SPLITS) -> bool:
    words = re.split(r"[/_.\-]", _inside(directory, file).lower())
    return any(split.lower() in words for split in splits)


def _inside(directory: Path, file: Path) -> str:
    return file.relative_to(directory).as_posix()


def read_source(
    source: SourceSettings,
    settings: DomainDataSettings,
    root: Path,
    special_tokens: Collection[str] = (),
) -> tuple[dict[str, Example], dict[str, Any]]:
    """Examples by row id, and the source's part of the report.

    Of what is usable among the rows that a cap lets read, `cap` are drawn by a hash of seed and
    row id.
    Law: the same rows in another order give the same examples, if no cap leaves rows unread.

    Raises: InputError: the source is not there, a row does not fit (file and line are named), or
        none is usable.
    """
    rows, report = _read_usable(source, settings, root, special_tokens)
    examples: dict[str, Example] = {}
    for example in rows:
        keep_one(examples, example)
    count = len(examples)
    if source.cap is not None and count > source.cap:
        seed = settings.seed if source.seed is None else source.seed
        order = sorted(examples, key=lambda row_id: keyed_hash(seed, "draw", row_id))
        examples = {row_id: examples[row_id] for row_id in order[: source.cap]}
    report |= {
        "duplicates": len(rows) - count,
        "not_drawn": count - len(examples),
        "rows_kept": len(examples),
    }
    return examples, report


def read_in_order(
    source: SourceSettings,
    settings: DomainDataSettings,
    root: Path,
    special_tokens: Collection[str] = (),
) -> tuple[list[Example], dict[str, Any]]:
    """As `read_source`, in the order of the source and with its repeats, where no cap draws."""
    if source.cap is None:
        return _read_usable(source, settings, root, special_tokens)
    drawn, report = read_source(source, settings, root, special_tokens)
    return list(drawn.values()), report


def _read_usable(
    source: SourceSettings, settings: DomainDataSettings, root: Path, tokens: Collection[str]
) -> tuple[list[Example], dict[str, Any]]:
    """The usable rows of a source, cleaned, in its order and with repeats, and its report; under a
    cap of the first 2 x cap rows.
    """
    opened = open_source(source, root)
    read = row_reader(source.format, first_pair_only=settings.template == "alpaca")
    formats, dropped, changed = Counter[str](), Counter[str](), Counter[str]()
    examples: list[Example] = []
    for where, row in islice(opened.rows, None if source.cap is None else 2 * source.cap):
        try:
            name, reading = read(row)
            formats[name] += 1
            record, changes = reading.record, [*reading.changes]
            if settings.strip_markers:
                record = strip_record(record, tokens)
                changes += ["markers_removed"] * (record != reading.record)
            reason = reason_to_drop(record, FORMATS[name], settings)
            if reason is None and source.filter == "code" and not holds_code(record):
                reason = "not_code"
            if reason is not None:
                dropped[reason] += 1
                continue
            record, was_cut = cut_answer(record, settings.answer_characters)
            changed.update([*changes, *["answer_cut"] * was_cut])
            examples.append(make_example(record, source.label, reading.passage, where))
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if not examples and not dropped:
        raise InputError(f"{source.label}: no rows")
    if not examples:
        reasons = ", ".join(f"{reason} ({count})" for reason, count in dropped.items())
        raise InputError(
            f"{source.label}: none of {dropped.total()} rows is usable: {reasons.replace('_', ' ')}"
        )
    report = {
        "source": source.label,
        "split": source.split,
        "formats": dict(sorted(formats.items())),
        "rows_read": formats.total(),
        "dropped": dict(sorted(dropped.items())),
        "changed": dict(sorted(changed.items())),
        "duplicates": 0,
        "not_drawn": 0,
        "rows_kept": len(examples),
        "sha256": opened.sha256(),
    }
    return examples, report


def keyed_hash(seed: int, purpose: str, text: str) -> int:
    """64 bits that look random, the same for the same arguments on every machine."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
