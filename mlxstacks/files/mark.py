"""The mark in what mlxstacks wrote, and the one rule of what it may replace or remove.

`.mlxstacks.json` lies in every directory that a command writes:

    written_by    "mlxstacks": without this field nothing is replaced, whatever the files are called
    files         every file and directory beside it, as relative paths; not there while unfinished
    bare_run      whether the next bare run may replace the directory
    built_in      whether it belongs to the cache of what comes with mlxstacks

What is not in `files` is somebody else's, and stays.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.errors import TargetError
from mlxstacks.resources import NAMES, resource_dir

MARK = ".mlxstacks.json"
_WRITER = "mlxstacks"
_MOST_BYTES = 64_000_000
# macOS leaves one in every directory that Finder shows.
_OF_THE_SYSTEM = ".DS_Store"
# The mark, or what a run that was killed while it wrote one left of it.
_MARK_OR_PART = re.compile(rf"{re.escape(MARK)}|\.{re.escape(MARK)}\.tmp-\d+-[0-9a-f]{{8}}")
_PACKAGE = Path(__file__).resolve().parent.parent

# A directory -> what in it may go, as relative paths; None where nothing shows that it is ours.
Owned = Callable[[Path], Collection[str] | None]


def new_mark(files: Collection[str] | None = None, **fields: bool) -> dict[str, Any]:
    """The content of a mark; without `files` that of a directory that is not finished."""
    listed = {} if files is None else {"files": sorted(files)}
    return {"written_by": _WRITER, **listed, **fields}


def read_mark(directory: Path) -> dict[str, Any] | None:
    """The mark of a directory; None where there is none of ours."""
    path = directory / MARK
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        mark = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return mark if isinstance(mark, dict) and mark.get("written_by") == _WRITER else None


def entries(directory: Path) -> list[str]:
    """Everything below a directory but its mark, as relative paths; links are not followed."""
    return sorted(
        path
        for parent, folders, files in os.walk(directory)
        for name in (*folders, *files)
        if name != _OF_THE_SYSTEM
        and not _MARK_OR_PART.fullmatch(
            path := os.path.relpath(os.path.join(parent, name), directory)
        )
    )


def listed_entries(directory: Path) -> Collection[str] | None:
    """What the mark of a finished directory lists; None where there is no such mark."""
    files = (read_mark(directory) or {}).get("files")
    return set(map(str, files)) if isinstance(files, list) else None


def check_replaceable(target: Path, owned: Owned = listed_entries) -> None:
    """Raises: TargetError where a directory is not marked as ours, or naming what else it holds."""
    ours = owned(target)
    if ours is None:
        remove = command_line("rm -r", target)
        raise TargetError(
            f"{target}: holds {_listed(entries(target))} and does not say that mlxstacks wrote it "
            f"(a field in {MARK}; earlier versions left none), so --force does not replace it; "
            f"choose another target, or look at it and remove it yourself: {remove}"
        )
    others = [path for path in entries(target) if path not in ours]
    # of a directory that is not ours, not what lies in it as well
    others = [path for path in others if os.path.dirname(path) not in others]
    if others:
        raise TargetError(
            f"{target}: holds {_listed(others)}, which mlxstacks did not write there, so --force "
            "does not replace it; move that elsewhere, or choose another target"
        )


def check_claimable(directory: Path) -> None:
    """Of a work directory, which is ours as a whole and is removed as a whole.

    Raises: TargetError where somebody else's files lie under its name.
    """
    if directory.is_symlink() or not directory.is_dir():
        if os.path.lexists(directory):
            raise TargetError(f"{directory}: is no directory; a run needs the name, so remove it")
        return
    if entries(directory) and read_mark(directory) is None and not _old_work(directory):
        raise TargetError(
            f"{directory}: a run keeps its work there, and mlxstacks did not write what it holds "
            f"({_listed(entries(directory))}); move that elsewhere, or choose another save path"
        )


def _old_work(directory: Path) -> bool:
    """Work of a version that left no mark: unfinished runs of it can be gone on with."""
    for name in ("run.json", "anew.json"):
        try:
            if isinstance(json.loads((directory / name).read_bytes()), dict):
                return True
        except (OSError, ValueError, RecursionError):
            continue
    return False


def remove_marked(directory: Path) -> None:
    """Remove a directory of ours, its mark last: what a kill or another user leaves of it can be
    removed later. What carries no mark stays.
    """
    if directory.is_symlink() or not directory.is_dir():
        return
    inside = [path for path in directory.iterdir() if not _is_mark(path)]
    if inside and read_mark(directory) is None:
        return
    for path in inside:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    if all(map(_is_mark, directory.iterdir())):
        shutil.rmtree(directory, ignore_errors=True)


def _is_mark(path: Path) -> bool:
    return _MARK_OR_PART.fullmatch(path.name) is not None and not path.is_dir()


def refuse_built_in(target: Path) -> None:
    """Raises: TargetError for a path inside the installed package or the cache of what it makes."""
    try:
        target = Path(os.path.realpath(target))
    except ValueError:  # a NUL in the name: no path at all, as whoever opens it will say
        return
    roots = [_PACKAGE, *(resource_dir(name).resolve() for name in NAMES)]
    inside = [root for root in roots if target.is_relative_to(root)]
    inside += [
        place for place in (target, *target.parents) if (read_mark(place) or {}).get("built_in")
    ]
    if inside:
        raise TargetError(
            f"{target}: {inside[0]} comes with mlxstacks and is only read; choose another target"
        )


def _listed(paths: Collection[str]) -> str:
    shown = ", ".join(sorted(paths)[:3]) or "nothing"
    return shown + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
