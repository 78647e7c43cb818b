"""A result on a terminal, whatever its kind."""

import io
from typing import TYPE_CHECKING

from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import Document, Table, Text
from mlxstacks.study.render.terminal import console, table
from mlxstacks.study.render.words import format_cell

if TYPE_CHECKING:
    from rich.console import Console

# Of a longer table a terminal shows the first rows and the last ones, as how a training ended; the
# page has all.
FIRST_ROWS, LAST_ROWS = 30, 10


def print_result(console: "Console", result: Document) -> None:
    """Tables and texts in their order; then notes, what was written, the verdict, what is next."""
    for block in result.blocks:
        if isinstance(block, Table) and not block.folded:
            _print_table(console, block, result.standing.mark(block.title))
        elif isinstance(block, Text):
            console.print(f"{block.title}:", markup=False)
            for paragraph in block.paragraphs:
                console.print(paragraph, markup=False)
    for line in (*result.power, *result.notes):
        console.print(line, markup=False, style="dim")
    if written := _written(result):
        console.print(written, markup=False)
    for reason in result.standing.reasons:
        console.print(f"EXPLORATORY: {reason}", markup=False, style="bold")
    if result.verdict:
        console.print(f"Verdict: {result.verdict}", markup=False, style="bold")
    for name, command in result.next_steps.items():
        # In one line however narrow the terminal is, to be pasted.
        console.print(f"{name}: {command}", markup=False, soft_wrap=True)


def _print_table(console: "Console", block: Table, title: str) -> None:
    rows = [
        [format_cell(cell, column) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows
    ]
    caption, more = block.caption, len(rows) - FIRST_ROWS - LAST_ROWS
    if more > 0:
        rows[FIRST_ROWS:-LAST_ROWS] = [["...", *[""] * (len(block.columns) - 1)]]
        caption += f" {more:,} more rows at the dots: --json has all."
    console.print(table([column.name for column in block.columns], rows, title=title))
    if caption:
        console.print(f"{caption.strip()}\n", markup=False, style="dim")


def _written(result: Document) -> str:
    plan = ""
    if result.plan_sha256:
        standing = f", {result.standing.status}" if result.status == "done" else ""
        plan = f"Plan {result.plan_sha256[:16]}{standing}. "
    if result.status == "planned":
        would = f": would write {result.directory}" if result.directory else ""
        return f"{plan}Planned only{would}."
    seconds, peak = result.environment.seconds, result.environment.peak_bytes
    cost = f"{seconds:.0f} s, " if seconds is not None else ""
    cost += f"peak {bytes_in_words(peak)}. " if peak is not None else ""
    wrote = f"Wrote {result.directory}." if result.directory else ""
    return f"{plan}{cost}{wrote}".rstrip()


def result_text(result: Document, width: int = 100) -> str:
    """The same as text without colours."""
    printed = console()
    printed.file, printed.width = io.StringIO(), width
    print_result(printed, result)
    return printed.file.getvalue()
