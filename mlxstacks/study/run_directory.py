"""Where a long run keeps what it needs to go on: `.NAME.work` beside the target NAME.

    run.json                 what the run depends on, to be compared before it is continued
    checkpoint.safetensors   the last saved state
    log.jsonl                one JSON object a line
    adapter/                 the adapter as it was at that state, for use by hand

At the end all of it moves into the target as a whole; until then the target is what it was.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from mlxstacks.errors import InputError, OtherRunError
from mlxstacks.files.disk import target_errors
from mlxstacks.files.outputs import (
    MARK,
    acquire_lock,
    check_claimable,
    new_mark,
    read_mark,
    release_lock,
    remove_marked,
    write_json,
)
from mlxstacks.files.side_files import clone_or_link

if TYPE_CHECKING:
    from pydantic import BaseModel

STATE, LOG, IDENTITY = "checkpoint.safetensors", "log.jsonl", "run.json"
RECIPE = "recipe.yaml"


class RunDirectory:
    """Held by one process at a time; `close` lets it go and leaves the files.

    identity: all that the result depends on, as JSON values.
    resume: go on from what is there; otherwise it is removed.
    Raises: TargetError when another process holds it or it cannot be written; InputError, listing
        what differs, when it holds a state of another identity.
    """

    def __init__(self, target: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self.path = work_path(target)
        self.identity = dict(identity)
        self._lock = lock_work(target)
        try:
            if not resume:
                claim_work(self.path)
                remove_marked(self.path)
            self._check_identity()
            claim_work(self.path)
            write_json(self.path / IDENTITY, self.identity)
        except BaseException:
            self.close()
            raise

    @property
    def state_path(self) -> Path:
        return self.path / STATE

    def log(self, **record: Any) -> None:
        append_log(self.path, **record)

    def forget_log_after(self, step: int) -> None:
        """Drop lines of steps that the saved state does not know."""
        forget_log_lines(self.path / LOG, lambda record: record["step"] <= step)

    def remove(self) -> None:
        """The run is over and its files are in the target."""
        remove_marked(self.path)
        self.close()

    def close(self) -> None:
        if self._lock.is_locked:
            release_lock(self._lock)

    def _check_identity(self) -> None:
        if not self.state_path.exists():
            return
        try:
            before = json.loads((self.path / IDENTITY).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            before = None
        if not isinstance(before, dict):
            raise InputError(
                f"{self.path / IDENTITY}: damaged or missing, so nobody knows which run the state "
                "next to it belongs to; --no-resume removes both and begins again"
            )
        now = json.loads(json.dumps(self.identity))
        check_same(self.path, "the state of another run", before, now)


def append_log(work: Path, **record: Any) -> None:
    """One line of the log; what is not a number to JSON (NaN) becomes null."""
    with target_errors(work), (work / LOG).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(plain(record), ensure_ascii=False) + "\n")


def forget_log_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the other lines, and what is no line of a log, as the half-written last one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if is_kept(json.loads(line)):
                kept.append(line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(temporary, path)


def work_path(target: Path) -> Path:
    return target.parent / f".{target.name}.work"


def lock_work(target: Path) -> filelock.FileLock:
    """Be the one run to `target`. Raises: TargetError: another one is, or the place cannot be
    written, or what lies under the name of its work directory is not ours.
    """
    work = work_path(target)
    with target_errors(work):
        check_claimable(work)
        work.parent.mkdir(parents=True, exist_ok=True)
    return acquire_lock(work.with_name(f"{work.name}.lock"), target)


def claim_work(work: Path) -> None:
    """Make a work directory, or go on with what is there; call only under its lock."""
    with target_errors(work):
        work.mkdir(exist_ok=True)
        if read_mark(work) is None:
            write_json(work / MARK, new_mark())


def discard(directory: Path) -> None:
    """Remove a directory that may not be there. It loses its name first: a kill half-way leaves
    nothing that could be taken for the whole. What cannot be removed stays until the next call.
    """
    gone = directory.with_name(f".{directory.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if directory.exists():
        directory.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def keep_parts(
    work: Path, directory: Path, directories: Iterable[str], files: Iterable[str]
) -> None:
    """Directories (those that are there) and files, under their names.

    Linked, not moved: until the target is there the work directory stays whole. Left out are
    hidden files: locks, and what a killed run left of a model.
    """
    for name in directories:
        if (work / name).is_dir():
            shutil.copytree(
                work / name, directory / name,
                copy_function=lambda old, new: clone_or_link(Path(old), Path(new)),
                ignore=lambda _, names: [name for name in names if name.startswith(".")],
            )  # fmt: skip
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        clone_or_link(work / name, directory / name)


def write_recipe(directory: Path, command: str, settings: "BaseModel") -> None:
    """recipe.yaml: `mlxstacks run` on it makes the same run again, on any machine that has what it
    names. What is none is written too: not every default is.
    """
    from mlxstacks.study.repeat import recipe_of

    text = recipe_of(command, settings.model_dump(mode="json")).text
    (directory / RECIPE).write_text(text, encoding="utf-8")


def recorded_fingerprint(path: Path, *keys: str, resume: bool = True) -> str | None:
    """A model's fingerprint in a JSON file of a run that goes on, for `fingerprint` to be like: an
    earlier version's run is compared in its own way. keys: the way to it.

    None for a run that begins, and for a file that is damaged, which is told elsewhere.
    """
    if not resume:
        return None
    try:
        value: Any = json.loads(path.read_bytes())
        for key in keys:
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def run_id(identity: Mapping[str, Any]) -> str:
    """A short name of an identity, but for its `rows` (see `what_differs`), for its state file."""
    named = {key: value for key, value in identity.items() if key != "rows"}
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]


def check_same(
    directory: Path, what: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """what: that the directory holds otherwise. Raises: OtherRunError with every difference."""
    if differences := what_differs(before, now):
        lines = "".join(f"\n  {line}" for line in differences)
        raise OtherRunError(
            f"{directory}: holds {what}; it differs in{lines}\n"
            "give its settings to resume it, or --no-resume to remove it and begin again"
        )


def what_differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: was x, now y` of every key whose value is another one; of objects in objects
    `key.inner`. Of hashes only that they differ.

    `rows`, how many there are, is for people: hashes tell rows apart, and earlier versions did not
    count them.
    """
    missing = object()
    lines = []
    for key in sorted({*before, *now}):
        old, new = before.get(key, missing), now.get(key, missing)
        if key == "rows" and missing in (old, new):
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += [f"{key}.{line}" for line in what_differs(old, new)]
        elif old != new and _is_hash(old) and _is_hash(new):
            name = key if "." in key else key.removesuffix("_sha256").replace("_", " ")
            lines.append(f"{name}: has changed")
        elif old != new:
            texts = ["not there" if value is missing else json.dumps(value) for value in (old, new)]
            letters = enumerate(zip(*texts, strict=False))
            at = next((at for at, (a, b) in letters if a != b), min(map(len, texts)))
            was, is_now = (_around(text, at) for text in texts)
            lines.append(f"{key}: was {was}, now {is_now}")
    return lines


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(full:)?[0-9a-f]{64}", value) is not None


def _around(text: str, at: int) -> str:
    """80 characters of it, those about the place `at` among them."""
    start = max(0, at - 40) if len(text) > 80 and at > 60 else 0
    end = start + 80
    return f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"


def plain(value: Any) -> Any:
    """The value with NaN and Infinity as None: JSON has no word for them."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list | tuple) else value
