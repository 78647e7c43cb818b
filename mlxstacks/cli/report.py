"""`mlxstacks report`: which results, then the page; and what is printed about it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.errors import InputError
from mlxstacks.recipe.resolve import OUT
from mlxstacks.report.settings import ReportSettings

if TYPE_CHECKING:
    from mlxstacks.study.result import Result

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
) -> "Result":
    """The page of the runs given, or of all under ./mlxstacks-out; of a small one that is made
    first where there is none. With `dry_run` nothing is made.

    Raises: InputError: see `write_report`.
    """
    from mlxstacks.report.write import planned_report, write_report

    notes: list[str] = []
    if not settings.runs:
        if not _has_results(OUT):
            if dry_run:
                return planned_report(settings, notes=[_WOULD_MAKE])
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
        return any(directory.glob("*/result.json"))


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
