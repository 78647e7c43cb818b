"""Where `mlxstacks stack` writes: a new store, one to go on with, or one to replace."""

import json
import os
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.disk import user_path
from mlxstacks.files.mark import refuse_built_in
from mlxstacks.files.outputs import check_target
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import REPORT, own_entries
from mlxstacks.studies.stack.work import StackWork
from mlxstacks.training.stack_settings import StackRunSettings


def check_store_place(target: Path, settings: StackRunSettings) -> None:
    """Raises: TargetError where no store can be: a file, other people's files, not writable."""
    inputs = [user_path(path) for path in (settings.model, settings.data) if path]
    inputs = [path for path in inputs if path.exists()]
    try:
        there = target.is_dir() and any(target.iterdir())
    except (OSError, ValueError) as error:  # too long; not ours to read; a NUL in the name
        raise TargetError(
            f"{str(target)[:200]!a}: not a usable target: {error.args[-1]}; choose another path"
        ) from None
    refuse_built_in(target)
    if there and not _is_store(target):
        names = ", ".join(sorted(path.name for path in target.iterdir())[:3])
        raise TargetError(
            f"{target}: holds {names}, but no store (no manifest.json); choose another save path"
        )
    anew = begins_anew(target, settings)
    # A store is gone on with: it may be there.
    if there and not anew and not (target / "manifest.json").exists():
        Store.open(target)
    check_target(target, force=anew, inputs=inputs, owned=own_entries, extends=not anew)
    if there and not os.access(target, os.W_OK | os.X_OK):
        raise TargetError(f"{target}: not writable; choose another save path")


def _is_store(target: Path) -> bool:
    return (target / "manifest.json").exists() or (target / "stacks").is_dir()


def begins_anew(target: Path, settings: StackRunSettings) -> bool:
    """Whether a store that is there is to be replaced: --force, and not done by a run that was
    stopped since.
    """
    state = StackWork(target, read_only=True).anew
    if state == "pending" and not settings.force and settings.resume:
        raise InputError(
            f"{target}: a run with --force that would replace this store is unfinished; --force "
            "goes on with it, --no-resume forgets it"
        )
    return settings.force and not (state == "done" and settings.resume)


def open_store(target: Path) -> Store | None:
    """The store to go on with; None where there is none. Raises: StoreError where it is damaged."""
    return Store.open(target) if target.is_dir() and any(target.iterdir()) else None


def read_report(target: Path) -> dict[str, Any]:
    """Domain -> what the report in a store says of it; nothing where there is none."""
    try:
        found = json.loads((target / REPORT).read_text(encoding="utf-8"))["domains"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}
