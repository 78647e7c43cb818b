"""The data of all domains of a run: read, cleaned, without duplicates, split without leaks.

A hash of their content, and nothing else, decides which rows are for validation.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.data.cleaning import move_rows
from mlxstacks.data.examples import Example, keep_one
from mlxstacks.data.settings import DomainDataSettings, SourceSettings, TrainDataSettings
from mlxstacks.data.sources import keyed_hash, read_in_order, read_source, training_parts
from mlxstacks.data.special_text import special_tokens
from mlxstacks.errors import InputError

SplitIds = Mapping[str, Sequence[str]]
PARTS = ("train", "validation")
Split = tuple[list[Example], list[Example]]


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
    *,
    tokenizer: Any = None,
    stored: Mapping[str, SplitIds] | None = None,
) -> dict[str, DomainData]:
    """Read, clean and split every domain.

    root: relative paths of sources are taken from here. tokenizer: its special tokens are
    stripped too.
    stored: domain -> split (as `split_ids` gives it) that is restored instead of made again.

    Laws: nothing depends on the order of domains, sources or rows (rows under a cap aside, which
    takes the first); no row of a validation set is in any training set, its own domain's or
    another's, and with split_by=prompt no prompt and no passage of it is.

    Raises: InputError: a source cannot be used, a part is empty, or a stored split lost rows.
    """
    stored = stored or {}
    for name, ids in stored.items():
        check_split(ids, name)
    tokens = special_tokens(tokenizer) if tokenizer is not None else ()
    examples: dict[str, dict[str, Example]] = {}
    reports: dict[str, dict[str, Any]] = {}
    only: dict[str, dict[str, set[str]]] = {}
    for name, settings in domains.items():
        examples[name], reports[name], only[name] = _read_domain(name, settings, root, tokens)
    modes = {name: settings.decontaminate for name, settings in domains.items()}
    fixed = {name: {*ids["train"], *ids["validation"]} for name, ids in stored.items()}
    moved = move_rows(examples, modes, domains, fixed)
    split = {
        name: apply_split(rows.values(), stored[name], name)
        if name in stored
        else _split_by_part(rows.values(), domains[name], name, only[name])
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
    some are held out as `read_domains` does it, but none of so few rows that their share is below
    one. Of mlx-lm's train.jsonl none are, unless validation_rows asks for them.

    Raises: InputError: a source cannot be used.
    """
    tokens = special_tokens(tokenizer) if tokenizer is not None else ()
    rows: dict[str, list[Example]] = {part: [] for part in PARTS}
    reports: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    hold_out = True
    for listed in settings.sources:
        parts: tuple[SourceSettings | None, SourceSettings | None] = training_parts(listed, root)
        if listed.part is not None:
            parts = (listed, None) if listed.part == "train" else (None, listed)
        hold_out &= parts[0] == listed or settings.validation_rows is not None
        for part, source in zip(PARTS, parts, strict=True):
            if source is not None:
                examples, report = read_in_order(source, settings, root, tokens)
                rows[part] += examples
                reports[part].append(report)
    train, validation = rows.values()
    enough = settings.validation_rows or settings.validation_fraction * len(train) >= 1
    if hold_out and enough and not validation:
        rows_read, different = len(train), _different(train, settings)
        train, validation = _divide_some(train, settings)
        if not train or not validation:
            if settings.validation_rows is not None:
                raise InputError(
                    f"validation_rows is {settings.validation_rows:,}; the sources have "
                    f"{rows_read:,} usable rows ({different}), and some have to be left to train on"
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
        repeated = {"repeated": source["duplicates"]} if source["duplicates"] else {}
        if counts := source["dropped"] | source["changed"] | repeated:
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
) -> tuple[dict[str, Example], dict[str, Any], dict[str, set[str]]]:
    """(examples by row id, report, part -> row ids that no source has for the other part)."""
    examples: dict[str, Example] = {}
    by_part: dict[str | None, set[str]] = {None: set(), **{part: set() for part in PARTS}}
    sources = []
    repeated = 0
    for source in settings.sources:
        try:
            rows, report = read_source(source, settings, root, tokens)
        except InputError as error:
            raise InputError(f"domain {name}: {error}") from error
        repeated += sum(row_id in examples for row_id in rows)
        by_part[source.part].update(rows)
        for example in rows.values():
            keep_one(examples, example)
        sources.append(report)
    total = repeated + sum(report["duplicates"] for report in sources)
    train, validation = (by_part[part] for part in PARTS)
    only = {"train": train - validation, "validation": validation - train}
    return (
        examples,
        {"sources": sources, "duplicates": total},
        {part: rows - by_part[None] for part, rows in only.items()},
    )


def _split_by_part(
    examples: Iterable[Example],
    settings: DomainDataSettings,
    name: str,
    only: Mapping[str, set[str]],
) -> Split:
    """`split_examples` of the rows that may be held out; other ones are trained on, but for those
    of a held-out prompt or passage. Law: what is held out does not depend on rows of part `train`.
    """
    rows = sorted(examples, key=lambda example: example.row_id)
    if not any(only.values()):
        return split_examples(rows, settings, name)
    may_be_held = [row for row in rows if row.row_id not in only["train"]]
    _, validation = divide(may_be_held, settings)
    held = _Content(validation)
    train = [
        row
        for row in rows
        if row.row_id not in only["validation"] and not held.holds(row, settings)
    ]
    if not train or not validation:
        empty = "validation" if train else "training"
        raise InputError(
            f"domain {name}: no {empty} row is left ({len(may_be_held)} of {len(rows)} rows may be "
            "held out); give its sources another part, or set validation_rows"
        )
    return train, validation


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
            counts[name]["validation_trained_on"] = len(validation) - len(kept)
            split[name] = (train, kept)
    held = {name: _Content(validation) for name, (_, validation) in split.items()}
    for name, (train, validation) in split.items():
        if name in stored:
            continue
        for other in sorted(held.keys() - {name}):
            kept = [row for row in train if not held[other].holds(row, domains[other])]
            counts[name][f"in_validation_of_{other}"] = len(train) - len(kept)
            train = kept
        if not train or not validation:
            part = "validation" if train else "training"
            raise InputError(
                f"domain {name}: every {part} row is also in another domain's data; give it rows "
                "of its own"
            )
        split[name] = (train, validation)
    return {
        name: {reason: count for reason, count in reasons.items() if count}
        for name, reasons in counts.items()
    }


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


def split_examples(examples: Iterable[Example], settings: DomainDataSettings, name: str) -> Split:
    """(train, validation), each in the order of row ids.

    Laws: independent of the order of `examples`; with validation_fraction a row's side does not
    depend on rows with other prompts, so a new source moves none (validation_rows counts rows, so
    it can, and there are never more); with split_by=prompt rows with one prompt, or one passage,
    are on one side. Where the fraction gives none of several rows, one is held out.

    Raises: InputError: a side would be empty.
    """
    rows = sorted(examples, key=lambda example: example.row_id)
    train, validation = _divide_some(rows, settings)
    if not train or not validation:
        empty = "validation" if train else "training"
        different = _different(rows, settings)
        if len({split_key(row, settings) for row in rows}) < 2:
            raise InputError(
                f"domain {name}: {different}; at least 2 are needed, one to train on and one to "
                "validate with"
            )
        name_set = "validation_rows" if settings.validation_rows else "validation_fraction"
        raise InputError(
            f"domain {name}: {name_set} {getattr(settings, name_set)} leaves no {empty} row of "
            f"{len(rows)} ({different}); set validation_rows to a number below "
            "that, another validation_fraction, or split_by: row"
        )
    return train, validation


def _divide_some(rows: Sequence[Example], settings: DomainDataSettings) -> Split:
    """`divide`; where the fraction gives none of several rows, one is held out."""
    train, validation = divide(rows, settings)
    if not validation and settings.validation_rows is None and len(rows) > 1:
        return divide(rows, settings.model_copy(update={"validation_rows": 1}))
    return train, validation


def divide(rows: Sequence[Example], settings: DomainDataSettings) -> Split:
    """(train, validation), each in the order of `rows`; either may be empty."""
    keys = [split_key(row, settings) for row in rows]
    if settings.split_by == "prompt":
        keys = _joined(rows, keys, settings.seed)
    rows_of, left = Counter(keys), settings.validation_rows
    held_out = set()
    if left is None:
        bound = settings.validation_fraction * 2**64
        held_out = {key for key in rows_of if _place(key, settings.seed) < bound}
    else:
        for key in sorted(rows_of, key=lambda key: _place(key, settings.seed)):
            if rows_of[key] <= left:
                held_out.add(key)
                left -= rows_of[key]
    parts: Split = ([], [])
    for row, key in zip(rows, keys, strict=True):
        parts[key in held_out].append(row)
    return parts


def _different(rows: Iterable[Example], settings: DomainDataSettings) -> str:
    what = "rows" if settings.split_by == "row" else "prompts or passages"
    return f"different {what}: {len({split_key(row, settings) for row in rows}):,}"


def split_key(example: Example, settings: DomainDataSettings) -> str:
    """What decides a row's side, and may not be on both: its passage or else its prompt, or all."""
    by_prompt = example.passage_id or example.prompt_id
    return by_prompt if settings.split_by == "prompt" else example.row_id


def _joined(rows: Sequence[Example], keys: Sequence[str], seed: int) -> list[str]:
    """The key of each row's group, of its keys the one with the lowest place. One prompt can have
    two keys: with its passage marked as one, and written into the prompt.
    """
    first: dict[str, str] = {}

    def group(key: str) -> str:
        while first.get(key, key) != key:
            key = first[key]
        return key

    by_prompt: dict[str, str] = {}
    for row, key in zip(rows, keys, strict=True):
        low, high = group(key), group(by_prompt.setdefault(row.prompt_id, key))
        if low != high:
            low, high = sorted((low, high), key=lambda key: _place(key, seed))
            first[high] = low
    return [group(key) for key in keys]


def _place(key: str, seed: int) -> int:
    return keyed_hash(seed, "split", key)


def apply_split(examples: Iterable[Example], ids: SplitIds, name: str = "") -> Split:
    """(train, validation) of a stored split, in its order. Rows that it does not know are left out.

    Raises: InputError: rows of the split are not there any more (how many is said), or `ids` is not
        a split.
    """
    which = f"domain {name}: " if name else ""
    check_split(ids, name)
    by_id = {example.row_id: example for example in examples}
    gone = {part: sum(row_id not in by_id for row_id in ids[part]) for part in PARTS}
    if any(gone.values()):
        raise InputError(
            f"{which}{gone['train']} of {len(ids['train'])} training rows and "
            f"{gone['validation']} of {len(ids['validation'])} validation rows of the stored split "
            "are gone: a source, its cap or a setting of the data has changed since; give the rows "
            "as they were, or train it again on these: "
            f"`mlxstacks stacks retrain STORE {name or 'DOMAIN'} --data ...`"
        )
    train, validation = ([by_id[row_id] for row_id in ids[part]] for part in PARTS)
    return train, validation


def check_split(ids: Any, name: str = "") -> None:
    """Raises InputError: not two lists of row ids with no id in both."""
    which = f"domain {name}: " if name else ""
    for part in PARTS:
        value = ids.get(part) if isinstance(ids, Mapping) else None
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise InputError(f"{which}a stored split needs {part} as a list of row ids")
    if set(ids["train"]) & set(ids["validation"]):
        raise InputError(f"{which}the stored split has rows on both sides")
