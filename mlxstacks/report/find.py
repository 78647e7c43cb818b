"""Which results lie in the directories that were given.

A directory holds results itself, or, one level down, directories that do. Result files are known
by their names; what is inside is checked by who reads it.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.mark import read_mark
from mlxstacks.files.strict_json import MAX_JSON_BYTES, read_object
from mlxstacks.study.document import RESULT
from mlxstacks.study.render.words import clean

MANIFEST, STACK_REPORT, PAGE = "manifest.json", "stack_report.json", "report.json"
# File name -> what it holds where it does not say so itself by `kind`.
RESULT_FILES: dict[str, str] = {
    "fuse_report.json": "fuse",
    "train_report.json": "train",
    "analysis_report.json": "stacks analyse",
    "discover_report.json": "route discover",
    "route_evaluate_report.json": "route evaluate",
    "route_check_report.json": "route check",
    "eval_report.json": "eval",
    STACK_REPORT: "stack",
    MANIFEST: "store",
    RESULT: "",
}
# Of commands that write result.json now.
_FORMER_FILES = (
    "confound_report.json",
    "profile_report.json",
    "compare_report.json",
    "identity_report.json",
    "profile_report.json",
    "compare_report.json",
    "identity_report.json",
    "sweep_report.json",
)
_FORMER = "written by mlxstacks before 0.2, which writes result.json; run its command again"
_MOST_FILES = 60


@dataclass(frozen=True)
class Source:
    """One result. path: of its directory, as given. also: other results read with it (a store's
    manifest beside the report of its training). files: (name, bytes) of the directory.
    """

    path: str
    file: str
    kind: str
    sha256: str
    document: dict[str, Any]
    also: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: tuple[tuple[str, int], ...] = ()
    more_files: int = 0

    @property
    def name(self) -> str:
        """What the page calls the run."""
        return Path(self.path).resolve().name or self.path


@dataclass(frozen=True)
class Sources:
    """notes: what was passed over, and why."""

    found: tuple[Source, ...]
    notes: tuple[str, ...]


def find_sources(runs: Sequence[str]) -> Sources:
    """Every result of the runs, in their order, each once.

    Raises: InputError for a run that is not there or holds no result, and for a file that is
        damaged, too large, or of no known kind.
    """
    found: list[Source] = []
    notes: list[str] = []
    seen: set[Path] = set()
    for run in runs:
        path = user_path(run)
        files = [path] if path.is_file() else list(_results(path, notes))
        if not files:
            former = [name for name in _FORMER_FILES if (path / name).is_file()]
            raise InputError(
                f"{run}/{former[0]}: {_FORMER}"
                if former
                else f"{run}: holds no result, and no directory in it does; results are named "
                f"{', '.join(RESULT_FILES)}"
            )
        for file in files:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                found.append(_source(file))
    return Sources(tuple(found), tuple(notes))


def _results(directory: Path, notes: list[str]) -> Iterator[Path]:
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory or file; give one that a command wrote")
    own = list(_own_results(directory))
    yield from own
    if own:
        return
    for below in sorted(path for path in directory.iterdir() if path.is_dir()):
        if below.name.startswith("."):
            if below.name.endswith(".work"):
                notes.append(
                    f"{below.name[1:-5]}: is not finished ({below.name} holds what is done); run "
                    "its command again to go on."
                )
            continue
        results = list(_own_results(below))
        yield from results
        if not results and not (below / PAGE).is_file():
            former = [name for name in _FORMER_FILES if (below / name).is_file()]
            why = f"{former[0]}: {_FORMER}" if former else "it holds no result"
            notes.append(f"{below.name}: passed over, {why}.")


def _own_results(directory: Path) -> Iterator[Path]:
    """Of a trained store its manifest alone, which the report of the training is read with."""
    names = [name for name in RESULT_FILES if (directory / name).is_file()]
    if RESULT in names and not _is_ours(directory / RESULT):
        names.remove(RESULT)
    if MANIFEST in names and STACK_REPORT in names:
        names.remove(STACK_REPORT)
    yield from (directory / name for name in names)


def _is_ours(file: Path) -> bool:
    """Whether a file of this common name is a result, or was one: damaged, in a target of ours."""
    try:
        return {"kind", "schema_version", "seal"} <= _read(file)[1].keys()
    except InputError:
        return read_mark(file.parent) is not None


def _source(file: Path) -> Source:
    if file.name in _FORMER_FILES:
        raise InputError(f"{file}: {_FORMER}")
    if file.name not in RESULT_FILES:
        raise InputError(f"{file}: no known result; results are named {', '.join(RESULT_FILES)}")
    data, document = _read(file)
    also = {}
    beside = file.parent / STACK_REPORT
    if file.name == MANIFEST and beside.is_file():
        also[STACK_REPORT] = _read(beside)[1]
    kind = document.get("kind", RESULT_FILES[file.name])
    if not isinstance(kind, str):
        raise InputError(f"{file}: kind is {ascii(kind)[:60]}, text is needed")
    files = sorted(_files(file.parent))
    return Source(
        str(file.parent), file.name, kind, sha256(data).hexdigest(), document, also,
        tuple(files[:_MOST_FILES]), max(0, len(files) - _MOST_FILES),
    )  # fmt: skip


def _read(file: Path) -> tuple[bytes, dict[str, Any]]:
    try:
        # not waiting on a pipe that somebody laid there
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as opened:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("not a plain file")
            if about.st_size > MAX_JSON_BYTES:
                raise ValueError(f"{about.st_size:,} bytes, allowed: {MAX_JSON_BYTES:,}")
            data = opened.read(MAX_JSON_BYTES + 1)
        return data, read_object(data)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file}: not a result that can be read: {clean(str(error), 300)}; run its command "
            "again, or leave it out"
        ) from None


def _files(directory: Path) -> Iterator[tuple[str, int]]:
    """(name, bytes) of plain files, two levels deep; a link counts as what it is, not followed."""
    for path in directory.iterdir():
        if path.name.startswith("."):
            continue
        below = path.iterdir() if path.is_dir() and not path.is_symlink() else [path]
        for one in below:
            about = one.lstat()
            if stat.S_ISREG(about.st_mode):
                yield str(one.relative_to(directory)), about.st_size
