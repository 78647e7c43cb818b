"""The folder that compiled kernels are kept in: whose it is, what of it is whole, what is old.

What lies in it is loaded and run, so it has to be this user's alone. A file counts as whole when
its content has the hash that was written down; anything else is made again.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

KEPT_DAYS = 14
_DAY = 24 * 60 * 60
# Names that only the emulator gives: a chosen folder may hold other things.
_OURS = re.compile(r"tools-[0-9a-f]{24}|[0-9a-f]{24}\.json|[0-9a-f]{24,64}\.so|(build|draft)-\w{8}")


def cache_dir() -> Path:
    """$MLXSTACKS_TEST_CACHE, or a folder of this user's in the system's temporary folder.

    Raises: OSError when it cannot be made, or when somebody else may write there.
    """
    chosen = os.environ.get("MLXSTACKS_TEST_CACHE")
    named = f"mlxstacks-emulator-{os.getuid()}"
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / named
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Not where a link leads: the next one to look may be led elsewhere.
    seen = folder.lstat()
    wrong = None
    if not stat.S_ISDIR(seen.st_mode):
        wrong = "is a link or a file, not a folder"
    elif seen.st_uid != os.getuid():
        wrong = "belongs to someone else"
    elif seen.st_mode & 0o022:
        wrong = f"may be written by others (mode {stat.S_IMODE(seen.st_mode):o})"
    if wrong:
        advice = "set MLXSTACKS_TEST_CACHE to a folder of your own with mode 700"
        raise PermissionError(f"{folder} {wrong}; {advice}")
    return folder


def objects_dir() -> Path:
    """Where compiled kernels are. Raises: OSError."""
    folder = cache_dir() / "objects"
    folder.mkdir(exist_ok=True)
    return folder


def digest(parts: Sequence[str]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(f"{len(part)}:".encode() + part.encode())
    return total.hexdigest()[:24]


def content_hash(path: Path) -> str:
    """Raises: OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def state_of(paths: Sequence[Path]) -> str | None:
    """What these files are, for a comparison with what they were; None when one is missing.

    Times and places count: a precompiled header is refused when its sources have others.
    """
    lines = []
    for path in paths:
        try:
            lines.append(f"{content_hash(path)} {path.stat().st_mtime_ns} {path}\n")
        except OSError:
            return None
    return "".join(lines)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that appears complete or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="draft-", delete=False) as draft:
        draft.write(text)
    os.replace(draft.name, path)


def compiler_says(command: Sequence[str], depends_on: Sequence[str], text: str) -> tuple[int, str]:
    """Exit status of a compiler that reads `text`, and what it prints; asked once for each text.

    depends_on: what else decides the answer: options without temporary paths, texts included.
    """
    try:
        note = objects_dir() / f"{digest([_version(command[0]), *depends_on, text])}.json"
    except OSError:
        note = None
    if note is not None:
        with suppress(OSError, ValueError):
            seal, answer = note.read_text().split("\n", 1)
            if seal == digest([answer]):
                keep(note)
                code, printed = json.loads(answer)
                return code, printed
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    code, printed = done.returncode, done.stdout + done.stderr
    if note is not None and code >= 0:  # not one that was killed
        answer = json.dumps([code, printed])
        write_whole(note, f"{digest([answer])}\n{answer}")
    return code, printed


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def keep(path: Path) -> None:
    """Counts as used today."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > _DAY:
            os.utime(path)


def prune() -> None:
    """Once a day: removes what nobody has used for KEPT_DAYS."""
    stamp = cache_dir() / "pruned"
    now = time.time()
    with suppress(OSError):
        if now - stamp.stat().st_mtime < _DAY:
            return
    stamp.touch()
    for path in [*cache_dir().iterdir(), *objects_dir().iterdir()]:
        with suppress(OSError):  # another process may remove it, too
            if not _OURS.fullmatch(path.name) or now - path.stat().st_mtime < KEPT_DAYS * _DAY:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
