"""`mlxstacks report`: which results, then the page; and what is printed about it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.errors import InputError
from mlxstacks.memory import bytes_in_words
from mlxstacks.recipe.resolve import OUT
from mlxstacks.report.settings import ReportSettings

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.report.write import Report

_MADE_FIRST = (
    f"Nothing was under ./{OUT} yet, so nano's sample adapter and its zero-delta control were "
    "fused first."
)

_WOULD_MAKE = (
    f"Nothing is under ./{OUT} yet: nano's sample adapter and its zero-delta control would be "
    "fused first."
)


def run(
    settings: ReportSettings,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "Report":
    """The page of the runs given, or of all under ./mlxstacks-out; of a small one that is made
    first where there is none. With `dry_run` nothing is made.

    Raises: InputError: see `write_report`.
    """
    from mlxstacks.report.write import planned, write_report

    notes: list[str] = []
    if not settings.runs:
        if not _has_results(OUT):
            if dry_run:
                return planned(settings, notes=[_WOULD_MAKE])
            _make_results(progress)
            notes.append(_MADE_FIRST)
            output.note(_MADE_FIRST)
        settings = settings.model_copy(update={"runs": (str(OUT),)})
    return write_report(settings, dry_run=dry_run, notes=notes)


def _has_results(directory: Path) -> bool:
    from mlxstacks.report.find import find_sources

    try:
        return bool(find_sources([str(directory)]).found)
    except InputError:
        # a damaged result is no absent one: it is named when the page is made
        return any(directory.glob("*/*_report.json"))


def _make_results(progress: Callable[..., None] | None) -> None:
    """A fuse of nano's adapter and its control, where bare runs of `fuse` write as well."""
    from mlxstacks.files.outputs import mark_bare
    from mlxstacks.fuse.run import run as fuse
    from mlxstacks.fuse.settings import FuseSettings
    from mlxstacks.nano.exports import nano_paths

    paths = nano_paths()
    for name, zero in (("fuse", False), ("fuse-zero-delta", True)):
        target = OUT / name
        fuse(
            FuseSettings(
                model=str(paths.model_path), adapter_path=(str(paths.adapter_path),),
                save_path=str(target), zero_delta=zero,
            ),
            progress=progress,
        )  # fmt: skip
        mark_bare(target)


def render(console: "Console", report: "Report") -> None:
    """A line a run: outcome and standing; then what was written."""
    rows: list[list[output.Cell]] = [
        [run.source.name, run.kind.title.lower(), run.content.outcome, run.standing]
        for run in report.runs
    ]
    console.print(output.table(["run", "kind", "outcome", "standing"], rows))
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    if report.status == "planned":
        console.print(f"Planned only: would write {report.save_path}.", markup=False)
        return
    console.print(
        f"Wrote {report.save_path}/index.html ({bytes_in_words(report.page_bytes)}), "
        f"{len(report.figures)} files of plots, recipes, report.json.",
        markup=False,
    )
