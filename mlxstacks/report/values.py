"""Checked access to the JSON of a result, which a stranger may have written.

A part that is missing or null is no error: results of another version have other parts, and null
means "not measured". A part of another type than its key promises is one.
"""

import math
from collections.abc import Iterator
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.report.content import Cell
from mlxstacks.study.render.words import listed, number


class DamagedError(InputError):
    """A result file holds something else than a result of its kind."""


class Value:
    """A JSON value and where it stands. `value["a"]["b"]` never fails for what is not there.

    Laws: `number` is finite or None; a value of another type raises DamagedError naming file and
    key.
    """

    __slots__ = ("_value", "where")

    def __init__(self, value: Any, where: str) -> None:
        self._value, self.where = value, where

    def __getitem__(self, key: str) -> "Value":
        return Value(self._mapping().get(key), f"{self.where}.{ascii(key[:80])[1:-1]}")

    def __bool__(self) -> bool:
        """Whether it is there and holds something."""
        return self._value is not None and self._value != {} and self._value != []

    @property
    def raw(self) -> Any:
        """As parsed."""
        return self._value

    @property
    def is_mapping(self) -> bool:
        return isinstance(self._value, dict)

    @property
    def is_number(self) -> bool:
        return isinstance(self._value, int | float) and not isinstance(self._value, bool)

    @property
    def is_text(self) -> bool:
        return isinstance(self._value, str)

    def items(self) -> Iterator[tuple[str, "Value"]]:
        """Of an object, in the file's order; nothing where it is missing."""
        for key in self._mapping():
            yield key, self[key]

    def names(self) -> list[str]:
        return list(self._mapping())

    def each(self) -> list["Value"]:
        """Of a list; nothing where it is missing."""
        found = self._of(list, "a list") or []
        return [Value(one, f"{self.where}[{place}]") for place, one in enumerate(found)]

    @property
    def number(self) -> float | None:
        if self._value is None:
            return None
        if not self.is_number:
            raise self._wrong("a number")
        try:
            found = float(self._value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise DamagedError(
                f"{self.where}: {found} is no number that a result can hold; the file is damaged: "
                "run its command again, or leave it out"
            )
        return found

    @property
    def count(self) -> int | None:
        """A whole number."""
        found = self.number
        if found is not None and found != int(found):
            raise self._wrong("a whole number")
        return None if found is None else int(found)

    @property
    def text(self) -> str | None:
        found: str | None = self._of(str, "text")
        return found

    @property
    def flag(self) -> bool | None:
        found: bool | None = self._of(bool, "true or false")
        return found

    def texts(self) -> list[str]:
        """Of a list of texts."""
        return [one.text or "" for one in self.each()]

    def numbers(self) -> list[float | None]:
        """Of a list of numbers; None where one is null."""
        return [one.number for one in self.each()]

    def _mapping(self) -> dict[str, Any]:
        return self._of(dict, "an object") or {}

    def _of(self, kind: type, called: str) -> Any:
        if self._value is not None and not isinstance(self._value, kind):
            raise self._wrong(called)
        return self._value

    def _wrong(self, called: str) -> DamagedError:
        got = ascii(self._value)
        shown = got if len(got) <= 60 else f"{got[:60]}..."
        return DamagedError(
            f"{self.where}: got {shown}, {called} is needed; the file is damaged or of another "
            "version: run its command again, or leave it out"
        )


def bounds(found: Value, digits: int = 3, *, scale: float = 1.0, sign: bool = False) -> str | None:
    """`low to high` of an interval object; None where one of them is missing."""
    low, high = found["low"].number, found["high"].number
    if low is None or high is None:
        return None
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{scale * low:{form}} to {scale * high:{form}}"


def estimate(
    found: Value, key: str = "mean", digits: int = 3, *, scale: float = 1.0, sign: bool = False
) -> str | None:
    """`value (low to high)` of an object with `key`, low and high."""
    value = found[key].number if found else None
    if value is None:
        return None
    form = f"{'+' if sign else ''}.{digits}f"
    interval = bounds(found, digits, scale=scale, sign=sign)
    around = f" ({interval})" if interval else " (no interval)"
    return f"{scale * value:{form}}{around}"


def plain(value: Value) -> Cell:
    """Any JSON value as a cell."""
    raw = value.raw
    if raw is None or isinstance(raw, str):
        return raw
    if isinstance(raw, bool):
        return "yes" if raw else "no"
    if value.is_number:
        return number(value.number)
    if isinstance(raw, list):
        return listed(str(plain(one)) for one in value.each()) or "none"
    return listed(f"{name}: {plain(one)}" for name, one in value.items()) or "none"
