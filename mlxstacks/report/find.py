"""Which results lie in the directories that were given.

A directory holds a result itself, or, one level down, directories that do.
"""

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import read_mark
from mlxstacks.files.strict_json import MAX_JSON_BYTES, read_object
from mlxstacks.regular_files import check_regular
from mlxstacks.report.conclude_again import check_conclusion
from mlxstacks.study.document import RESULT
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.result import CHANGED, Result
from mlxstacks.study.run_directory import work_path

MANIFEST = "manifest.json"
# Of commands before 0.2, each in a form of its own.
_FORMER_FILES = (
    "fuse_report.json", "train_report.json", "sweep_report.json", "analysis_report.json",
    "discover_report.json", "route_evaluate_report.json", "route_check_report.json",
    "confound_report.json", "identity_report.json", "eval_report.json", "profile_report.json",
    "compare_report.json", "stack_report.json",
)  # fmt: skip
_FORMER = "written by mlxstacks before 0.2, which writes result.json; run its command again"
_MOST_FILES = 60


@dataclass(frozen=True)
class Source:
    """One result. path: of its directory, as given. files: (name, bytes) of the directory."""

    path: str
    file: str
    sha256: str
    result: Result
    files: tuple[tuple[str, int], ...] = ()
    more_files: int = 0

    @property
    def name(self) -> str:
        """What the page calls the run."""
        return Path(self.path).resolve().name or self.path


def find_sources(runs: Sequence[str]) -> tuple[list[Source], list[str]]:
    """Every result of the runs, in their order, each once; and what was passed over, and why.

    Raises: InputError for a run that is not there or holds no result, and for a file that is
        damaged, too large, or of another version.
    """
    sources: dict[Path, Source] = {}
    notes: list[str] = []
    for run in runs:
        path = user_path(run)
        files = [path] if path.is_file() else list(_results(path, notes))
        if not files:
            former = _former(path)
            raise InputError(
                f"{path / former}: {_FORMER}"
                if former
                else f"{run}: holds no result, and no directory in it does; a result is named "
                f"{RESULT}"
            )
        for file in files:
            if file.resolve() not in sources:
                sources[file.resolve()] = _source(file)
    return list(sources.values()), notes


def _results(directory: Path, notes: list[str]) -> Iterator[Path]:
    if not directory.is_dir():
        if (work := work_path(directory)).is_dir():
            raise InputError(
                f"{directory}: is not finished ({work.name} holds what is done); run its command "
                "again to resume it"
            )
        raise InputError(f"{directory}: no such directory or file; give one that a command wrote")
    if file := _result_in(directory):
        yield file
        return
    for below in sorted(path for path in directory.iterdir() if path.is_dir()):
        if below.name.startswith("."):
            if below.name.endswith(".work"):
                notes.append(
                    f"{below.name[1:-5]}: is not finished ({below.name} holds what is done); run "
                    "its command again to resume it."
                )
        elif file := _result_in(below):
            if file.name == MANIFEST or _head_of(file).get("kind") != "report":
                yield file
        else:
            former = _former(below)
            why = f"{former}: {_FORMER}" if former else "it holds no result"
            notes.append(f"{below.name}: passed over, {why}.")


def _result_in(directory: Path) -> Path | None:
    """A file of the common name that is a result, or was one: damaged, in a target of ours. Of a
    store that was not trained here, as one of imported stacks, its manifest.
    """
    file = directory / RESULT
    if file.is_file():
        head = _head_of(file)
        is_result = {"kind", "schema_version", "seal"} <= head.keys()
        if is_result or (not head and read_mark(directory) is not None):
            return file
    return directory / MANIFEST if (directory / MANIFEST).is_file() else None


def _head_of(file: Path) -> dict[str, Any]:
    """The document; nothing of one that cannot be read."""
    try:
        check_regular(file)
        with file.open("rb") as opened:
            return read_object(opened.read(MAX_JSON_BYTES + 1))
    except (OSError, ValueError):
        return {}


def _former(directory: Path) -> str | None:
    return next((name for name in _FORMER_FILES if (directory / name).is_file()), None)


def _source(file: Path) -> Source:
    if file.name in _FORMER_FILES:
        raise InputError(f"{file}: {_FORMER}")
    if file.name == MANIFEST:
        # Imports MLX, which no other result needs.
        from mlxstacks.studies.stack.store_commands import store_result

        try:
            result = store_result(file.parent)
        except StoreError as error:
            raise InputError(str(error)) from None
    else:
        written = Result.read(file)
        result = written.checked(file.parent)
        # Of an edited document with its files as they were the words are drawn again as well.
        added = result.standing.reasons[len(written.standing.reasons) :]
        if set(added) <= {CHANGED}:
            result = check_conclusion(result, file.parent)
    files = sorted(_files(file.parent))
    return Source(
        str(file.parent), file.name, file_sha256(file), result, tuple(files[:_MOST_FILES]),
        max(0, len(files) - _MOST_FILES),
    )  # fmt: skip


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of plain files, two levels deep; a link counts as what it is, not followed."""
    for path in directory.iterdir():
        if path.name.startswith("."):
            continue
        below = path.iterdir() if path.is_dir() and not path.is_symlink() else [path]
        for file in below:
            about = file.lstat()
            if stat.S_ISREG(about.st_mode):
                yield str(file.relative_to(directory)), about.st_size
