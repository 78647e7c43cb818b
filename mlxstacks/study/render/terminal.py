"""What a terminal can show: consoles that print no stranger's commands, tables that fit it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

Cell = str | int | float | bool | None


# Control characters (C0 but line break and tab, DEL, C1), half characters, and marks that turn the
# direction of text around: what follows could then be made to look like ours.
_COMMANDS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def console(stderr: bool = False) -> "Console":
    """A rich console without guessing: what is printed is neither highlighted nor emoji-fied."""
    return _console_class()(stderr=stderr, highlight=False, emoji=False)


@cache
def _console_class() -> "type[Console]":
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        """Prints no control characters but its own, and breaks no line that holds a command: what
        is broken cannot be pasted.
        """

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(safe(text), style)

        def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
            whole = any(isinstance(what, str) and holds_command(what) for what in objects)
            super().print(*objects, soft_wrap=whole if soft_wrap is None else soft_wrap, **options)

    return SafeConsole


def holds_command(text: str) -> bool:
    """Whether somebody may paste a part of a line of ours into a shell."""
    return "`mlx" in text


@dataclass(frozen=True)
class Table:
    """Plain cells that rich prints as a table or, on a terminal too narrow for it, row by row.

    Columns that hold only numbers (or nothing) are aligned right, and texts fold instead of being
    cut. Cells are plain text, never markup. `footer` is a last row, set apart (totals).
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str | None = None
    footer: Sequence[Cell] | None = None

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator["RenderableType"]:
        widths = [self._least_width(index) for index in range(len(self.columns))]
        # Three blanks between columns, one at each edge.
        if sum(widths) + 3 * len(widths) - 1 <= options.max_width:
            yield self._grid(widths)
        else:
            yield from self._records()

    def _all_rows(self) -> list[Sequence[Cell]]:
        return [*self.rows, self.footer] if self.footer is not None else [*self.rows]

    def _is_numeric(self, index: int) -> bool:
        return all(_is_number(row[index]) for row in self._all_rows())

    def _least_width(self, index: int) -> int:
        """Of a column of numbers the head may wrap between words, a number never; texts fold."""
        head = self.columns[index].split()
        cells = [cell_text(row[index]) for row in self._all_rows()]
        if self._is_numeric(index):
            return max(map(len, [*head, *cells]), default=1)
        words = [word for cell in cells for word in cell.split()]
        return max([*map(len, head), *(min(len(word), _LEAST_TEXT) for word in words)], default=1)

    def _grid(self, widths: Sequence[int]) -> "RenderableType":
        from rich import box
        from rich.table import Table as Grid
        from rich.text import Text

        title = Text(self.title) if self.title is not None else None  # may hold [brackets]
        grid = Grid(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(self.columns):
            justify: Literal["left", "right"] = "right" if self._is_numeric(index) else "left"
            grid.add_column(Text(column), justify=justify, overflow="fold", min_width=widths[index])
        for row in self.rows:
            grid.add_row(*[Text(cell_text(cell)) for cell in row])
        if self.footer is not None:
            grid.add_section()
            grid.add_row(*[Text(cell_text(cell), style="bold") for cell in self.footer])
        return grid

    def _records(self) -> "Iterator[RenderableType]":
        """The first cell of a row, below it the others by name."""
        from rich.padding import Padding
        from rich.text import Text

        if self.title is not None:
            yield Text(self.title, style="italic")
        for row in self._all_rows():
            yield Text(cell_text(row[0]), style="bold")
            pairs = zip(self.columns[1:], row[1:], strict=True)
            shown = [(name, cell) for name, cell in pairs if cell is not None and cell != ""]
            yield Padding(details(shown), (0, 0, 0, 2))
        yield Text("")


# Narrower than this a column of text is no longer read.
_LEAST_TEXT = 12


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    title: str | None = None,
    footer: Sequence[Cell] | None = None,
) -> Table:
    """The `Table` of these cells."""
    return Table(columns, [list(row) for row in rows], title, footer)


@dataclass(frozen=True)
class Details:
    """Names and values in two columns, without a head; on a terminal too narrow for that a line
    each.
    """

    pairs: Sequence[tuple[str, Cell]]

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator["RenderableType"]:
        from rich.table import Table as Grid
        from rich.text import Text

        names = max((len(name) for name, _ in self.pairs), default=0)
        if names + 1 + _LEAST_TEXT > options.max_width:
            for name, value in self.pairs:
                yield Text(f"{name}: {cell_text(value)}", overflow="fold")
            return
        grid = Grid(box=None, show_header=False, pad_edge=False)
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in self.pairs:
            grid.add_row(Text(name), Text(cell_text(value)))
        yield grid


def details(pairs: Mapping[str, Cell] | Iterable[tuple[str, Cell]]) -> Details:
    """The `Details` of these names and values."""
    return Details(list(pairs.items() if isinstance(pairs, Mapping) else pairs))


def _is_number(cell: Cell) -> bool:
    """Whether a cell belongs in a column of numbers: one with or without a unit, nothing, dots."""
    if cell is None or cell == "..." or isinstance(cell, int | float):
        return True
    number, _, unit = cell.partition(" ")
    digits = number.replace(",", "").rstrip("%x").lstrip("+-").replace(".", "", 1)
    return not cell or (digits.isdigit() and (not unit or unit.isalpha()))


def cell_text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    if isinstance(cell, int):
        return f"{cell:,}"
    # What a stranger's file says may hold commands to the terminal.
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in cell)


def setting(value: Any) -> Cell:
    """The value of a setting as a person writes it: items of a list with commas between, of a
    mapping by name; a mapping or model that is an item by its `name`, where it has one.
    """
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {cell_text(setting(inner))}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_item, value)) or None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _item(value: Any) -> str:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    if isinstance(name, str):
        return name
    shown = setting(value)
    return f"{shown:g}" if isinstance(shown, float) else str(shown)


def byte_parts(parts: Mapping[str, int | None]) -> str:
    """`weights 15.2 GB + adapter 408 MB = 15.6 GB`; no sum where one of them is unknown."""
    words = " + ".join(
        f"{name} {'unknown' if n is None else bytes_in_words(n)}"
        for name, n in parts.items()
        if n != 0
    )
    known = [n for n in parts.values() if n is not None]
    return words if len(known) < len(parts) else f"{words} = {bytes_in_words(sum(known))}"


def safe(text: str) -> str:
    """Text that cannot command a terminal: control characters are spelled out.

    Line breaks and tabs stay, and so do joiners and marks that scripts and emoji need.
    """
    return _COMMANDS.sub(lambda character: ascii(character[0])[1:-1], text)
