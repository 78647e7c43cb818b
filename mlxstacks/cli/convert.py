"""Prints what `mlxstacks convert` did: tensors by kind, notes, and how to try the result."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.command_line import command_line
from mlxstacks.convert.report import ConvertReport
from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console


def render(console: "Console", report: ConvertReport) -> None:
    """A row for each kind of tensor, the notes, and where the model is."""
    rows: list[list[output.Cell]] = [
        [group.kind, group.stored, str(group.tensors), bytes_in_words(group.nbytes)]
        for group in report.groups
    ]
    console.print(output.table(["in the source", "written as", "tensors", "bytes"], rows))
    for note in report.notes:
        console.print(note, markup=False)
    size = bytes_in_words(report.written_bytes)
    if report.status == "planned":
        console.print(f"Would write {report.save_path}: {report.model_type}, {size}.", markup=False)
        return
    console.print(
        f"Wrote {report.save_path} in {report.seconds:.1f} s: {report.model_type}, {size}.",
        markup=False,
    )
    output.next_step(console, "Try it", command_line("mlxstacks chat", model=report.save_path))
