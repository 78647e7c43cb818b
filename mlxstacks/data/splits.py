"""Which rows are for validation: by a hash of content, so that nothing else decides it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxstacks.data.examples import Example
from mlxstacks.data.read_source import keyed_hash
from mlxstacks.data.settings import DomainDataSettings
from mlxstacks.errors import InputError

SplitIds = Mapping[str, Sequence[str]]
PARTS = ("train", "validation")


def split_examples(
    examples: Iterable[Example], settings: DomainDataSettings, name: str
) -> tuple[list[Example], list[Example]]:
    """(train, validation), each in the order of row ids.

    Laws: independent of the order of `examples`; with validation_fraction a row's side does not
    depend on rows with other prompts, so a new source moves none (validation_rows counts rows, so
    it can, and there are never more); with split_by=prompt rows with one prompt, or one passage,
    are on one side.

    Raises:
        InputError: a side would be empty.
    """
    rows = sorted(examples, key=lambda example: example.row_id)
    train, validation = divide(rows, settings)
    if not train or not validation:
        empty = "validation" if train else "training"
        keys = {split_key(row, settings) for row in rows}
        what = "rows" if settings.split_by == "row" else "prompts or passages"
        wanted = (
            f"validation_rows {settings.validation_rows}"
            if settings.validation_rows
            else f"validation_fraction {settings.validation_fraction}"
        )
        raise InputError(
            f"domain {name}: {wanted} leaves no {empty} row of {len(rows)} ({len(keys)} different "
            f"{what}); set validation_rows to a number below that, another validation_fraction, or "
            "split_by: row"
        )
    return train, validation


def divide(
    rows: Sequence[Example], settings: DomainDataSettings
) -> tuple[list[Example], list[Example]]:
    """(train, validation), each in the order of `rows`; either may be empty."""
    keys = [split_key(row, settings) for row in rows]
    if settings.split_by == "prompt":
        keys = _joined(rows, keys, settings.seed)
    held_out = _validation_keys(Counter(keys), settings)
    parts: tuple[list[Example], list[Example]] = ([], [])
    for row, key in zip(rows, keys, strict=True):
        parts[key in held_out].append(row)
    return parts


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


def _validation_keys(sizes: Mapping[str, int], settings: DomainDataSettings) -> set[str]:
    """sizes: rows of each key."""
    if settings.validation_rows is None:
        bound = settings.validation_fraction * 2**64
        return {key for key in sizes if _place(key, settings.seed) < bound}
    chosen: set[str] = set()
    left = settings.validation_rows
    for key in sorted(sizes, key=lambda key: _place(key, settings.seed)):
        if sizes[key] <= left:
            chosen.add(key)
            left -= sizes[key]
    return chosen


def _place(key: str, seed: int) -> int:
    return keyed_hash(seed, "split", key)


def apply_split(
    examples: Iterable[Example], ids: SplitIds, name: str = ""
) -> tuple[list[Example], list[Example]]:
    """(train, validation) of a stored split, in its order. Rows that it does not know are left out.

    Raises:
        InputError: rows of the split are not there any more (how many is said), or `ids` is not a
            split.
    """
    which = f"domain {name}: " if name else ""
    check_split(ids, name)
    found = {example.row_id: example for example in examples}
    gone = {part: sum(row_id not in found for row_id in ids[part]) for part in PARTS}
    if any(gone.values()):
        raise InputError(
            f"{which}{gone['train']} of {len(ids['train'])} training rows and "
            f"{gone['validation']} of {len(ids['validation'])} validation rows of the stored split "
            "are gone: a source, its cap or a setting of the data has changed since; bring it "
            "back, or remove the domain and train it again"
        )
    train, validation = ([found[row_id] for row_id in ids[part]] for part in PARTS)
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
