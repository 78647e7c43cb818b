"""A `Result` on the page, whatever its kind."""

from collections.abc import Callable
from pathlib import Path

from mlxstacks.errors import InputError
from mlxstacks.report.content import Block, Content, Plot, Words, table
from mlxstacks.study import document as documents
from mlxstacks.study.render.figures import draw_plot
from mlxstacks.study.render.words import format_cell
from mlxstacks.study.result import Result


def result_of(document: dict[str, object], file: str) -> Result:
    """What a file holds, beside what lies around it. Raises: InputError: it is no result."""
    try:
        return Result.from_json(document).checked(Path(file).parent)
    except ValueError as error:
        raise InputError(f"{file}: damaged, or of another version: {error}") from None


def content_of(result: Result, mark: Callable[[str], str]) -> Content:
    """The blocks of a result as the page's. mark: what becomes of a title."""
    return Content(
        result.outcome or result.status,
        result.verdict,
        tuple(_block(b, mark) for b in result.blocks),
    )


def _block(block: documents.Block, mark: Callable[[str], str]) -> Block:
    title = mark(block.title)
    if isinstance(block, documents.Plot):
        marked = block.model_copy(update={"title": title})
        return Plot(block.id, title, mark(block.alt), draw_plot(marked))
    if isinstance(block, documents.Text):
        return Words(title, block.paragraphs)
    rows = [
        [format_cell(cell, column) for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows
    ]
    columns = [column.name for column in block.columns]
    return table(title, columns, rows, note=block.caption, folded=block.folded)
