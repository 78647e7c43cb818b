"""Numbers and strangers' texts as they may be printed."""

import re
import unicodedata
from collections.abc import Iterable

from mlxstacks.memory import bytes_in_words
from mlxstacks.report.content import Cell
from mlxstacks.report.values import Value

NOT_MEASURED = "not measured"
LONGEST = 2_000
# Marks that turn the direction of text, and invisible ones: what follows could look like ours.
_HIDDEN = {*"\u200b\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060"}
_HIDDEN |= {*"\u2066\u2067\u2068\u2069\ufeff"}

# The blank behind a sentence, a clause, a word.
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[^a-z])")
_CLAUSE_END = re.compile(r"(?<=;) ")
_WORD_END = re.compile(r" ")


def clean(text: str, longest: int = LONGEST) -> str:
    """Text that shows as what it is: control characters spelled out, the rest cut and counted.

    Laws: holds no control character but line break and tab; is at most `longest` characters and a
    remark long; leaves printable text of that length as it is.
    """
    cut = text[:longest]
    said = "".join(ascii(c)[1:-1] if _is_hidden(c) else c for c in cut)
    more = len(text) - len(cut)
    return f"{said} [... and {more:,} characters]" if more else said


def _is_hidden(character: str) -> bool:
    if character in "\n\t":
        return False
    # Cc control, Cs half a surrogate pair, Co private, Cn unassigned (U+FFFE is no XML character)
    return character in _HIDDEN or unicodedata.category(character) in ("Cc", "Cs", "Co", "Cn")


def short(text: str, longest: int) -> str:
    """One line of at most `longest` characters."""
    line = " ".join(clean(text, 10 * longest).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}\u2026"


def beginning(text: str, longest: int) -> str:
    """The first sentences, at most `longest` characters of them. One that is longer by itself ends
    at a semicolon, else behind a word, and then with three dots.

    Law: it is how the line begins, and no number or word is cut.
    """
    line = " ".join(clean(text, 10 * longest).split())
    if len(line) <= longest:
        return line
    for end in (_SENTENCE_END, _CLAUSE_END, _WORD_END):
        places = [found.start() for found in end.finditer(line, 0, longest + 1)]
        if places:
            cut = line[: places[-1]]
            return cut if end is _SENTENCE_END else f"{cut} \u2026"
    return short(line, longest)


def number(value: float | None, digits: int = 4) -> str | None:
    """Significant digits, thousands apart."""
    if value is None:
        return None
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def fixed(value: float | None, digits: int = 3, sign: bool = False) -> str | None:
    """Digits behind the point, as columns need them."""
    return None if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str | None:
    return None if share is None else f"{100 * share:.{digits}f}%"


def points(difference: float | None) -> str | None:
    """A difference of rates."""
    return None if difference is None else f"{100 * difference:+.2f}"


def p_value(value: float | None) -> str | None:
    if value is None:
        return None
    return "below 0.0001" if value < 1e-4 else f"{value:.2g}"


def nbytes(count: float | None) -> str | None:
    return None if count is None else bytes_in_words(int(count))


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


def listed(parts: Iterable[str], most: int = 40) -> str:
    found = list(parts)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
