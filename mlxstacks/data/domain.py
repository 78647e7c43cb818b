"""The data of all domains of a run: read, cleaned, without duplicates, split without leaks."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.data.decontaminate import move_rows
from mlxstacks.data.examples import Example
from mlxstacks.data.markers import special_tokens
from mlxstacks.data.read_source import keep_one, read_in_order, read_source
from mlxstacks.data.settings import DomainDataSettings, TrainDataSettings
from mlxstacks.data.sources import training_parts
from mlxstacks.data.splits import (
    PARTS,
    SplitIds,
    apply_split,
    check_split,
    divide,
    split_examples,
)
from mlxstacks.errors import InputError


@dataclass(frozen=True, slots=True)
class DomainData:
    """Examples of a domain, a new split in the order of row ids, a stored one in its own.

    report: plain JSON; what was read, dropped, moved and kept, and the hash of every file.
    """

    name: str
    train: list[Example]
    validation: list[Example]
    report: dict[str, Any]


def split_ids(data: DomainData) -> dict[str, list[str]]:
    """The split as row ids, as it is stored."""
    return {part: [row.row_id for row in getattr(data, part)] for part in PARTS}


def read_domains(
    domains: Mapping[str, DomainDataSettings],
    root: Path,
    trained: Collection[str] | None = None,
    *,
    tokenizer: Any = None,
    stored: Mapping[str, SplitIds] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, DomainData]:
    """Read, clean and split every domain.

    root: relative paths of sources are taken from here. trained: domains that decontamination may
    move rows to; default: all that are read. tokenizer: its special tokens are stripped too.
    stored: domain -> split (as `split_ids` gives it) that is restored instead of made anew.
    progress: called with the label of each source before it is read.

    Laws: nothing depends on the order of domains, sources or rows (rows under a cap aside, which
    takes the first); no row of a validation set is in any training set, its own domain's or
    another's, and with split_by=prompt no prompt and no passage of it is.

    Raises:
        InputError: a source cannot be used, a part is empty, or a stored split lost rows.
    """
    stored = stored or {}
    for name, ids in stored.items():
        check_split(ids, name)
    tokens = special_tokens(tokenizer) if tokenizer is not None else ()
    examples: dict[str, dict[str, Example]] = {}
    reports: dict[str, dict[str, Any]] = {}
    for name, settings in domains.items():
        examples[name], reports[name] = _read_domain(name, settings, root, tokens, progress)
    modes = {name: settings.decontaminate for name, settings in domains.items()}
    fixed = {name: {*ids["train"], *ids["validation"]} for name, ids in stored.items()}
    moved = move_rows(examples, modes, domains if trained is None else trained, fixed)
    split = {
        name: apply_split(rows.values(), stored[name], name)
        if name in stored
        else split_examples(rows.values(), domains[name], name)
        for name, rows in examples.items()
    }
    left_out = _close_leaks(split, domains, stored)
    for name, (train, validation) in split.items():
        reports[name] |= {
            **moved[name],
            "left_out": left_out[name],
            "train_rows": len(train),
            "validation_rows": len(validation),
        }
    return {name: DomainData(name, *split[name], reports[name]) for name in domains}


def read_train_data(settings: TrainDataSettings, root: Path, tokenizer: Any = None) -> DomainData:
    """The rows of `mlxstacks train`: in the order of the sources, repeats too, as mlx-lm has them.

    Validation rows are those that the sources bring along (`training_parts`); where none does,
    some are held out as `read_domains` does it, or none of too few rows. Of mlx-lm's train.jsonl
    none are, unless validation_rows asks for them.

    Raises:
        InputError: a source cannot be used.
    """
    tokens = special_tokens(tokenizer) if tokenizer is not None else ()
    rows: dict[str, list[Example]] = {part: [] for part in PARTS}
    reports: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    hold_out = True
    for listed in settings.sources:
        parts = training_parts(listed, root)
        hold_out &= parts[0] == listed or settings.validation_rows is not None
        for part, source in zip(PARTS, parts, strict=True):
            if source is not None:
                examples, report = read_in_order(source, settings, root, tokens)
                rows[part] += examples
                reports[part].append(report)
    train, validation = rows.values()
    if hold_out and not validation:
        rows_read = len(train)
        train, validation = divide(train, settings)
        if not train or not validation:
            if settings.validation_rows is not None:
                raise InputError(
                    f"validation_rows is {settings.validation_rows:,}; the sources have "
                    f"{rows_read:,} usable rows, and some have to be left to train on"
                )
            train, validation = [*train, *validation], []
    trained = {row.row_id for row in train}
    report = {
        "sources": reports["train"],
        "validation_sources": reports["validation"],
        "train_rows": len(train),
        "validation_rows": len(validation),
        "validation_rows_trained_on": sum(row.row_id in trained for row in validation),
    }
    return DomainData("train", train, validation, report)


def data_notes(name: str, report: Mapping[str, Any]) -> list[str]:
    """What became of the rows of each source, where something did."""
    notes = []
    for source in [*report["sources"], *report.get("validation_sources", ())]:
        counts = {**source["dropped"], **source["changed"]}
        if counts:
            shown = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
            notes.append(
                f"{name}: {source['source']}: {source['rows_kept']:,} of {source['rows_read']:,} "
                f"rows are used ({shown.replace('_', ' ')})."
            )
    return notes


def _read_domain(
    name: str,
    settings: DomainDataSettings,
    root: Path,
    tokens: Collection[str],
    progress: Callable[[str], None] | None,
) -> tuple[dict[str, Example], dict[str, Any]]:
    found: dict[str, Example] = {}
    sources = []
    repeated = 0
    for source in settings.sources:
        if progress:
            progress(f"{name}: {source.label}")
        try:
            rows, report = read_source(source, settings, root, tokens)
        except InputError as error:
            raise InputError(f"domain {name}: {error}") from error
        repeated += sum(row_id in found for row_id in rows)
        for example in rows.values():
            keep_one(found, example)
        sources.append(report)
    total = repeated + sum(report["duplicates"] for report in sources)
    return found, {"sources": sources, "duplicates": total}


Split = tuple[list[Example], list[Example]]


def _close_leaks(
    split: dict[str, Split],
    domains: Mapping[str, DomainDataSettings],
    stored: Mapping[str, SplitIds],
) -> dict[str, dict[str, int]]:
    """Take out of each training set, in place, what another domain validates on; counts by reason.

    A stored split stays as it is, since a model was trained with it: there the row leaves the other
    domain's validation set instead.
    """
    counts: dict[str, dict[str, int]] = {name: {} for name in split}
    fixed = [split[name][0] for name in split if name in stored]
    trained = _Content(row for train in fixed for row in train)
    for name in split:
        if name not in stored:
            train, validation = split[name]
            kept = [row for row in validation if not trained.holds(row, domains[name])]
            _count(counts[name], "validation_trained_on", len(validation) - len(kept))
            split[name] = (train, kept)
    held = {name: _Content(validation) for name, (_, validation) in split.items()}
    for name, (train, validation) in split.items():
        if name in stored:
            continue
        for other in sorted(held.keys() - {name}):
            kept = [row for row in train if not held[other].holds(row, domains[other])]
            _count(counts[name], f"in_validation_of_{other}", len(train) - len(kept))
            train = kept
        if not train or not validation:
            part = "validation" if train else "training"
            raise InputError(
                f"domain {name}: every {part} row is also in another domain's data; give it rows "
                "of its own"
            )
        split[name] = (train, validation)
    return counts


class _Content:
    """Rows, their prompts and passages, that must not be met again."""

    def __init__(self, rows: Iterable[Example]) -> None:
        rows = list(rows)
        self.rows = {row.row_id for row in rows}
        self.prompts = {row.prompt_id for row in rows}
        self.passages = {row.passage_id for row in rows} - {""}

    def holds(self, row: Example, settings: DomainDataSettings) -> bool:
        """Whether the row is among them; with split_by=prompt, whether its prompt or passage is."""
        shared = row.prompt_id in self.prompts or row.passage_id in self.passages
        return row.row_id in self.rows or (settings.split_by == "prompt" and shared)


def _count(counts: dict[str, int], reason: str, number: int) -> None:
    if number:
        counts[reason] = number
