"""Files of a run that processes of a group send each other, and those that patterns name."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath

from mlxstacks.files.disk import sync_directory, sync_tree
from mlxstacks.processes import dealing, gathered, sent_from
from mlxstacks.study.plan import PLAN
from mlxstacks.study.run_directory import IDENTITY

STEPS, SETTINGS, SOURCE = "steps.json", "settings.json", "source.json"
# What comes from other processes, until it is whole; and how much is sent at once.
_ARRIVED, _PIECE = ".arrived", 1 << 26


def found_files(directory: Path, patterns: Sequence[str]) -> list[Path]:
    """Files and directories that patterns name, but those of the engine; a name finds itself."""
    found: list[Path] = []
    for pattern in patterns:
        exact = directory / pattern
        found += [exact] if exact.exists() else sorted(directory.glob(pattern))
    return list(dict.fromkeys(path for path in found if not is_own(path.relative_to(directory))))


def is_own(path: PurePath) -> bool:
    """Whether a path in a work directory is the engine's."""
    own = (PLAN, SETTINGS, STEPS, SOURCE, IDENTITY)
    return path.parts[0].startswith(".") or str(path) in own


Listing = Mapping[str, tuple[int, int]]


def listed_files(work: Path, patterns: Sequence[str]) -> Listing:
    """Files of artifacts and provenance: size and time of the last change, by name."""
    found = found_files(work, patterns)
    files = [file for path in found for file in (path.rglob("*") if path.is_dir() else [path])]
    names = {file.relative_to(work): file.stat() for file in files if file.is_file()}
    return {
        str(name): (stat.st_size, stat.st_mtime_ns)
        for name, stat in names.items()
        if not any(part.startswith(".") for part in name.parts)
    }


def share_files(
    work: Path, artifacts: Sequence[str], provenance: Sequence[str], before: Listing | None = None
) -> None:
    """Files that processes of a group have are sent to those that lack them, or have less of what
    the result is made from: an answer log grows. Directories appear whole.

    before: only what was changed since then is sent, whatever the others have.
    """
    if (group := dealing()) is None:
        return
    now = listed_files(work, [*artifacts, *provenance])
    sources = {*map(str, found_files(work, provenance))}
    own = {
        name: (size if before is not None or str(work / name) in sources else 0, size)
        for name, (size, _) in now.items()
        if before is None or now[name] != before.get(name)
    }
    offers = gathered(own, group)
    arrived = work / _ARRIVED
    shutil.rmtree(arrived, ignore_errors=True)
    for name in sorted({name for offer in offers for name in offer}):
        held = [offer.get(name, (-1, 0)) for offer in offers]
        worth = [worth for worth, _ in held]
        owner = worth.index(max(worth))
        if min(worth) == worth[owner]:
            continue
        _, size = held[owner]
        with ExitStack() as files:
            source = target = None
            if group.rank() == owner:
                source = files.enter_context((work / name).open("rb"))
            elif worth[group.rank()] < worth[owner]:
                (arrived / name).parent.mkdir(parents=True, exist_ok=True)
                target = files.enter_context((arrived / name).open("wb"))
            for start in range(0, size, _PIECE):
                count = min(_PIECE, size - start)
                piece = sent_from(owner, source.read(count) if source else b"", count, group)
                if target:
                    target.write(piece)
    if arrived.exists():
        sync_tree(arrived)
        _move_in(arrived, work)
        shutil.rmtree(arrived)


def _move_in(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        there = target / path.name
        if path.is_dir() and there.is_dir():
            _move_in(path, there)
        else:
            path.replace(there)
    sync_directory(target)
