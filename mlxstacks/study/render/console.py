"""Results on a terminal: consoles that print no stranger's commands, tables that fit it."""

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from mlxstacks.study.document import Document
    from mlxstacks.study.document import Table as ResultTable

Cell = str | int | float | bool | None
# Of a longer table than this a terminal shows the first rows and the last ones, as how a training
# ended; the page has all.
WHOLE_ROWS, FIRST_ROWS, LAST_ROWS = 24, 12, 4
# Narrower than this a column of text is no longer read; words up to this length are not broken.
_LEAST_TEXT, _WHOLE_WORD = 12, 20
# Control characters (C0 but line break and tab, DEL, C1), half characters, and marks that turn the
# direction of text around: what follows could then be made to look like ours.
_COMMANDS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def print_result(console: "Console", result: "Document", in_python: bool = False) -> None:
    """Tables and texts in their order; then notes, what was written, the verdict, what is next.
    in_python: what is left out is had by a call, not by an option.
    """
    from mlxstacks.study.render.words import POWER, capital

    for block in result.shown_blocks:
        if block.block == "table" and not block.folded:
            _print_table(console, block, result, in_python)
        elif block.block == "text":
            console.print(f"{block.title}:", markup=False)
            for paragraph in block.paragraphs:
                console.print(paragraph, markup=False)
    folded = [b for b in result.shown_blocks if b.block == "table" and b.folded and b.rows]
    if folded and result.status == "done":
        names = ", ".join(block.id if in_python else block.title for block in folded)
        where = "result.table(ID)" if in_python else _all_rows(result)
        console.print(f"More tables, {where}: {names}.", markup=False, style="dim")
    for line in (*[f"{POWER}:"] * bool(result.power), *result.power, *result.notes):
        console.print(line, markup=False, style="dim")
    if written := _written(result):
        console.print(written, markup=False)
    for reason in result.standing.reasons:
        console.print(f"EXPLORATORY: {reason}", markup=False, style="bold")
    if result.verdict:
        verdict = result.verdict.removeprefix("EXPLORATORY. ")  # it stands above, with its reasons
        console.print(f"Verdict: {capital(verdict)}", markup=False, style="bold")
    for name, command in result.next_steps.items():
        # In one line however narrow the terminal is, to be pasted.
        console.print(f"{name}: {command}", markup=False, soft_wrap=True)


def _print_table(
    console: "Console", block: "ResultTable", result: "Document", in_python: bool
) -> None:
    from mlxstacks.study.render.words import format_cell

    rows = [
        [format_cell(cell, column) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows
    ]
    caption, more = block.caption, len(rows) - FIRST_ROWS - LAST_ROWS
    if len(rows) > WHOLE_ROWS:
        rows[FIRST_ROWS:-LAST_ROWS] = [["...", *[""] * (len(block.columns) - 1)]]
        where = f"result.table({block.id!r})" if in_python else _all_rows(result)
        caption += f" {more:,} more rows at the dots: {where} has all."
    console.print(table([column.name for column in block.columns], rows, title=block.title))
    if caption:
        console.print(f"{caption.strip()}\n", markup=False, style="dim")


def _all_rows(result: "Document") -> str:
    """Where the rows are that a terminal leaves out."""
    if result.directory and result.status == "done":
        page = Path(result.directory) / "result.md"
        return str(page) if page.is_file() else "--json"
    return "--json"


def _written(result: "Document") -> str:
    plan = ""
    if result.tested_plan:
        standing = f", {result.standing.status}" if result.status == "done" else ""
        plan = f"Plan {result.tested_plan[:16]}{standing}. "
    if result.status == "planned":
        would = f": would write {result.directory}" if result.directory else ""
        return f"{plan}Planned only{would}."
    seconds, peak = result.environment.seconds, result.environment.peak_bytes
    cost = f"{seconds:.0f} s, " if seconds is not None else ""
    cost += f"peak {bytes_in_words(peak)}. " if peak is not None else ""
    wrote = f"Wrote {result.directory}." if result.directory else ""
    return f"{plan}{cost}{wrote}".rstrip()


def result_text(result: "Document", width: int = 100) -> str:
    """The same as text without colours, in Python."""
    text = io.StringIO()
    printed = _console_class()(
        file=text, width=width, highlight=False, emoji=False, force_terminal=False,
        force_jupyter=False,
    )  # fmt: skip
    print_result(printed, result, in_python=True)
    return text.getvalue()


# --- consoles and tables --------------------------------------------------------------------------


def console(stderr: bool = False) -> "Console":
    """A rich console without guessing: what is printed is neither highlighted nor emoji-fied."""
    return _console_class()(stderr=stderr, highlight=False, emoji=False, force_jupyter=False)


@cache
def _console_class() -> "type[Console]":
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        """Prints no control characters but its own, and breaks no line that holds a command: what
        is broken cannot be pasted. A file gets no blanks at the ends of lines.
        """

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(safe(text), style)

        def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
            if soft_wrap is None:
                soft_wrap = any(isinstance(what, str) and holds_command(what) for what in objects)
            if self.is_terminal:
                super().print(*objects, soft_wrap=soft_wrap, **options)
                return
            with self.capture() as captured:
                super().print(*objects, soft_wrap=soft_wrap, **options)
            lines = captured.get().split("\n")
            self.file.write("\n".join(line.rstrip(" ") for line in lines))

    return SafeConsole


def write(text: str, end: str = "\n", *, error: bool = False, label: str = "") -> None:
    """Text as it is, but `safe`, on stdout or stderr, at once. A stderr that takes no more (a log
    on a full disk) is given up; the work goes on. label: stands before it and may have colours.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        stream.write(label + safe(text) + end)
        stream.flush()
    except OSError:
        if not error:
            raise
        sys.stderr = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115


def holds_command(text: str) -> bool:
    """Whether somebody may paste a part of a line of ours into a shell."""
    return "`mlx" in text


# Behind an estimate; where room is short it goes to a line of its own.
_INTERVAL = re.compile(r" (\([^()]+ to [^()]+\))$")


@dataclass(frozen=True)
class Table:
    """Plain cells that rich prints as a table or, on a terminal too narrow for it, row by row.

    Columns that hold only numbers (or nothing) are aligned right, and texts fold instead of being
    cut. Cells are plain text, never markup.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str | None = None

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator["RenderableType"]:
        from rich import box
        from rich.padding import Padding
        from rich.table import Table as Grid
        from rich.text import Text

        texts = [[cell_text(cell) for cell in row] for row in self.rows]
        places = range(len(self.columns))
        widths, full = self._least_widths(texts), self._widths(self.columns, texts)
        # Three blanks between columns, two where room is short; one at each edge.
        gap, heads, room = 3, list(self.columns), options.max_width - 2 * len(places)
        if self.title is not None:  # a table may be narrower than its title
            yield Text(self.title, style="italic")
        if sum(widths) > room:
            for row in self.rows:
                yield Text(cell_text(row[0]), style="bold")
                pairs = zip(self.columns[1:], row[1:], strict=True)
                shown = [(name, cell) for name, cell in pairs if cell is not None and cell != ""]
                yield Padding(details(shown), (0, 0, 0, 2))
            yield Text("")
            return
        if sum(full) + 3 * len(places) - 1 > options.max_width:
            gap, heads = 2, [_breakable(head) for head in heads]
            texts = [[_INTERVAL.sub(r"\n\1", text) for text in row] for row in texts]
            most = self._widths(heads, texts)
            # Heads of numbers wrap first.
            most = [widths[n] if self._is_numeric(n) else most[n] for n in places]
            full = _shared_out(widths, most, room)
            texts = [list(map(_folded_at_dots, row, full)) for row in texts]
        grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, gap - 2))
        for n in places:
            justify: Literal["left", "right"] = "right" if self._is_numeric(n) else "left"
            # rich narrows what has no width of its own, and then cuts numbers too
            grid.add_column(Text(heads[n]), justify=justify, overflow="fold", width=full[n])
        for row in texts:
            grid.add_row(*map(Text, row))
        yield grid

    def _is_numeric(self, index: int) -> bool:
        return all(_is_number(row[index]) for row in self.rows)

    def _widths(self, heads: Sequence[str], texts: Sequence[Sequence[str]]) -> list[int]:
        """Of each column the longest line."""
        columns = zip(heads, *texts, strict=True)
        return [
            max(len(line) for text in column for line in text.split("\n")) for column in columns
        ]

    def _least_widths(self, texts: Sequence[Sequence[str]]) -> list[int]:
        """Of a column of numbers the head may wrap between words, a number never; texts fold."""
        least = []
        for n, (head, *cells) in enumerate(zip(self.columns, *texts, strict=True)):
            words = [len(word) for word in _breakable(head).split()]
            if self._is_numeric(n):
                words += map(len, cells)
            else:
                words += [
                    min(len(w), _WHOLE_WORD if w.isalpha() else _LEAST_TEXT)
                    for cell in cells
                    for w in cell.split()
                ]
            least.append(max(words, default=1))
        return least


def _shared_out(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths of columns: what is left of the room goes to the narrowest that want more."""
    widths = list(least)
    for _ in range(room - sum(least)):
        wanting = [n for n, width in enumerate(widths) if width < most[n]]
        if not wanting:
            break
        widths[min(wanting, key=widths.__getitem__)] += 1
    return widths


def _folded_at_dots(text: str, width: int) -> str:
    """A path that is longer than the column, as of a module behind its layer or of a file, in lines
    that end with a whole name, or at an underscore.
    """
    if len(text) <= width or " " in text.lstrip("0123456789").lstrip():
        return text
    cut = max(text.rfind(mark, 0, width) for mark in "./") + 1 or text.rfind("_", 0, width) + 1
    if cut <= 0:
        return text
    return f"{text[:cut]}\n{_folded_at_dots(text[cut:], width)}"


def _breakable(head: str) -> str:
    """With a blank where a narrow column may break it: `delta /step`."""
    return re.sub(r"(?<=\w)/", " /", head)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, title: str | None = None
) -> Table:
    """The `Table` of these cells."""
    return Table(columns, [list(row) for row in rows], title)


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
