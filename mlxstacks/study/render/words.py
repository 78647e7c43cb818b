"""Numbers and strangers' texts as they may be printed."""

import re
import unicodedata
from collections.abc import Iterable
from pathlib import PurePath

from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import Cell, Column, Document

NOT_MEASURED = "not measured"
# Of a cell of a table: nothing to measure there, or not measured.
NO_VALUE = "\u2013"
# A run that was cut has less power than its plan.
POWER = "Power, as planned"
LONGEST = 2_000
# Marks that turn the direction of text, and invisible ones: what follows could look like ours.
_HIDDEN = {*"\u200b\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2060"}
_HIDDEN |= {*"\u2066\u2067\u2068\u2069\ufeff"}

# The blank behind a sentence.
_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[^a-z])")


def clean(text: str, longest: int = LONGEST) -> str:
    """Text that shows as what it is: control characters spelled out, the rest cut and counted.

    Laws: holds no control character but line break and tab; is at most `longest` characters and a
    remark long; leaves printable text of that length as it is.
    """
    shown = "".join(ascii(c)[1:-1] if _is_hidden(c) else c for c in text[:longest])
    more = len(text) - longest
    return f"{shown} [... and {more:,} characters]" if more > 0 else shown


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
    """The first sentences, at most `longest` characters of them, but one at least.

    Law: it is how the line begins, and no sentence is cut: what limits it may stand at its end.
    """
    line = " ".join(clean(text, 10 * longest).split())
    ends = [match.start() for match in _SENTENCE_END.finditer(line)]
    if len(line) <= longest or not ends:
        return line
    return line[: max((end for end in ends if end <= longest), default=ends[0])]


def capital(text: str) -> str:
    """With a capital at its beginning, but for a symbol, as in `p = 0.03`."""
    return text if text[1:2] == " " else text[:1].upper() + text[1:]


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


def nbytes(count: float | None) -> str | None:
    return None if count is None else bytes_in_words(int(count))


def made_of(result: Document) -> str:
    """Model, seed and version in one line; "" where none is known."""
    model, seed = result.settings.get("model"), result.settings.get("seed")
    version = result.environment.versions.get("mlxstacks")
    parts = []
    if isinstance(model, str):
        path = PurePath(model)
        is_nano = path.parent.name.startswith("nano-")
        parts.append(f"nano, the built-in model ({path.name})" if is_nano else path.name)
    parts += [f"seed {seed}"] if isinstance(seed, int) else []
    parts += [f"mlxstacks {version}"] if version else []
    return ", ".join(parts)


def listed(parts: Iterable[str], most: int = 40) -> str:
    every = list(parts)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def format_cell(cell: Cell, column: Column) -> str | None:
    """A cell of a result's table as text; None: no value."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, tuple):
        *value, low, high = (_format_number(part, column).removesuffix("%") for part in cell)
        unit = "%" if column.kind == "share" else ""
        return f"{value[0]}{unit} ({low} to {high})" if value else f"{low} to {high}{unit}"
    return _format_number(cell, column)


def _format_number(value: float, column: Column) -> str:
    match column.kind:
        case "count":
            # of a mean of counts its digits where it is no whole one
            return f"{value:,.{(column.digits or 0) if value % 1 else 0}f}"
        case "change":
            return f"{value:+.{4 if column.digits is None else column.digits}f}"
        case "share":
            return f"{100 * value:.{1 if column.digits is None else column.digits}f}%"
        case "points":
            return f"{100 * value:+.{1 if column.digits is None else column.digits}f}"
        case "p":
            return "below 0.0001" if value < 1e-4 else f"{value:.2g}"
        case "bytes":
            return bytes_in_words(int(value))
        case "seconds":
            return f"{value:,.0f} s" if abs(value) >= 1000 else f"{value:.3g} s"
    if column.digits is not None:
        return f"{value:.{column.digits}f}"
    return number(value) or ""
