"""Which format a row has: named in the settings, or found by its keys."""

from collections.abc import Callable
from typing import Any

from mlxstacks.data.examples import row_id_of
from mlxstacks.data.formats import FORMATS, Format, Raw, Reading
from mlxstacks.errors import InputError

# (row) -> (name of its format, what it says)
RowReader = Callable[[Raw], tuple[str, Reading]]


def row_reader(name: str, first_pair_only: bool = False) -> RowReader:
    """The reader of a format, or one that goes by the keys of each row (`auto`).

    first_pair_only: a conversation is read as its first question and answer, which is all that a
    template for pairs can hold.
    """
    if name != "auto":
        read = FORMATS[name].read
        return lambda row: (name, read(row))
    formats = {name: form for name, form in FORMATS.items() if form.automatic}
    if first_pair_only:
        formats["messages"] = FORMATS["messages"]
        del formats["chat"]
    by_keys: dict[frozenset[str], list[str]] = {}

    def read_auto(row: Raw) -> tuple[str, Reading]:
        # A column of a table that holds nothing for this row says nothing about its format.
        keys = frozenset(key for key, value in row.items() if value is not None)
        if keys not in by_keys:
            by_keys[keys] = _fitting(keys, formats)
        return _agreed(row, by_keys[keys])

    return read_auto


def _fitting(keys: frozenset[str], formats: dict[str, Format]) -> list[str]:
    # As mlx-lm reads a row: other columns beside a completion say nothing about its form, and a
    # text beside a conversation is what some template made of it.
    if {"prompt", "completion"} <= keys:
        return ["prompt_completion"]
    names = [name for name, form in formats.items() if form.fits(keys)]
    if "messages" in keys and "text" in names and len(names) > 1:
        names.remove("text")
    if not names:
        known = "; ".join(f"{name}: {form.describe()}" for name, form in formats.items())
        raise InputError(
            f"no format fits the keys {sorted(keys)}; write rows with the keys of one, such as "
            f"prompt and completion. Known are {known}"
        )
    return names


def _agreed(row: Raw, names: list[str]) -> tuple[str, Reading]:
    """The reading, if every format that fits the keys reads the row alike.

    Raises: InputError: two of them read different things; the settings must choose.
    """
    first = FORMATS[names[0]].read(row)
    for other in names[1:]:
        record = FORMATS[other].read(row).record
        if record != first.record and row_id_of(record) != row_id_of(first.record):
            raise InputError(
                f"the keys {sorted(row)} fit the formats {names[0]} ({_short(first.record)}) and "
                f"{other} ({_short(record)}); say which with the source's format, as in data: "
                f"{{sources: [{{path: ..., format: {other}}}]}}"
            )
    return names[0], first


def _short(record: dict[str, Any]) -> str:
    return ", ".join(f"{key} {str(value)[:30]!r}" for key, value in record.items())
