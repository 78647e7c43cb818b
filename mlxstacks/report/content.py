"""What a page says of a run, before it is HTML: words, tables, plots."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

# None: not measured. Text is plain, whatever it looks like.
Cell = str | int | float | None
Mark = Callable[[str], str]

# A longer table is cut, and says so; all of it is in the result file.
MOST_ROWS = 150


@dataclass(frozen=True)
class Table:
    """The first column names the row. hidden: rows that were left out. folded: shown on a click."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    folded: bool = False
    hidden: int = 0


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    note: str = "",
    folded: bool = False,
) -> Table:
    """A table of at most MOST_ROWS rows. Raises: ValueError for a row of another length."""
    listed = [tuple(row) for row in rows]
    if any(len(row) != len(columns) for row in listed):
        raise ValueError(f"{title}: a row has not {len(columns)} cells")
    kept = tuple(listed[:MOST_ROWS])
    return Table(title, tuple(columns), kept, note, folded, len(listed) - len(kept))


@dataclass(frozen=True)
class Plot:
    """name: of its files, after that of the run. alt: what it shows, for who cannot see it.

    draw: takes a matplotlib figure.
    """

    name: str
    title: str
    alt: str
    draw: Callable[[Any], None]
    caption: str = ""


@dataclass(frozen=True)
class Words:
    """Paragraphs under a title."""

    title: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Raw:
    """Text as it is, in a fixed pitch, folded."""

    title: str
    text: str


Block = Table | Plot | Words | Raw


@dataclass(frozen=True)
class Content:
    """What a result says. outcome: a few words for the summary; verdict: whole sentences."""

    outcome: str
    verdict: str
    blocks: tuple[Block, ...] = ()
