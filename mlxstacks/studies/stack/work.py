"""Where `mlxstacks stack` keeps a domain that is not done: `.NAME.work` beside the store NAME.

    run.json                  what the domain depends on, to be compared before it is continued
    rounds.json               rounds that are done, with the hashes of their stacks
    round-1.safetensors       the frozen stack of a round that was kept
    training-2.safetensors    the last saved state of the round under way
    bases.safetensors         directions that the domain keeps out of
    log.jsonl                 one JSON object a line
    anew.json, details.json   of the whole run: see `anew` and `details`

When the domain is done the store takes all of it in one change, and these files go. Below: which
store that is, a new one, one to go on with, or one to replace.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock
import mlx.core as mx
import numpy as np

from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files.disk import target_errors, user_path
from mlxstacks.files.outputs import (
    MARK,
    check_target,
    entries,
    refuse_built_in,
    release_lock,
    write_json,
)
from mlxstacks.files.stack_file import (
    StackFile,
    StackHeader,
    read_arrays,
    read_stack,
    write_arrays,
    write_stack,
)
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import FORMER_REPORT, MANIFEST, RESULT, own_entries
from mlxstacks.layers.nullspace import NullBasis
from mlxstacks.study.run_directory import (
    claim_work,
    lock_work,
    plain,
    what_differs,
    work_path,
)
from mlxstacks.training.boost import RoundRecord
from mlxstacks.training.settings import StackRunSettings

RUN, ROUNDS, LOG = "run.json", "rounds.json", "log.jsonl"
# About the whole run, not the domain under way.
ANEW, DETAILS = "anew.json", "details.json"
BASES = "bases.safetensors"
_VECTORS = "vectors"


class StackWork:
    """Held by one process at a time; `close` lets it go and leaves the files.

    read_only: look, without the lock and without making anything: for the other processes of a
        group, and for a dry run.
    Raises: TargetError when another process holds it or it cannot be written.
    """

    def __init__(self, target: Path, *, read_only: bool = False) -> None:
        self.path = work_path(target)
        self.target = target
        self._lock: filelock.FileLock | None = None
        if read_only:
            return
        self._lock = lock_work(target)
        claim_work(self.path)

    def close(self) -> None:
        """Let the directory go; without anything in it, it is removed."""
        if self._lock is not None:
            if self.path.is_dir() and not entries(self.path):
                shutil.rmtree(self.path)
            release_lock(self._lock)
            self._lock = None

    def clear(self) -> None:
        """Forget the domain under way."""
        files = list(self.path.iterdir()) if self.path.is_dir() else []
        # run.json last: what a killed process left of the rest still has an owner
        for path in sorted(files, key=lambda path: (path.name == RUN, path.name)):
            if path.name not in (ANEW, DETAILS, MARK):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    # --- which domain -----------------------------------------------------------------------------

    @property
    def identity(self) -> dict[str, Any] | None:
        """What the domain under way depends on; None where there is none."""
        return _read(self.path / RUN)

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Go on with the domain that is here, or begin this one.

        Raises: InputError listing what differs, where another one is here; or where nobody knows
            what is here.
        """
        before, now = self.identity, json.loads(json.dumps(identity))
        if before is None and any((self.path / name).exists() for name in (RUN, ROUNDS, LOG)):
            raise InputError(
                f"{self.path / RUN}: damaged or missing, so nobody knows which domain the work "
                "beside it belongs to; --no-resume removes that and begins the domain anew "
                "(domains that are in the store stay)"
            )
        if before is not None and (differences := what_differs(flat(before), flat(now))):
            lines = "".join(f"\n  {line}" for line in differences)
            raise InputError(
                f"{self.path}: holds the unfinished domain {before.get('name')}; what comes next "
                f"differs in{lines}\n"
                "give its settings to go on with it, or --no-resume to forget it and begin anew "
                "(domains that are in the store stay)"
            )
        write_json(self.path / RUN, now)

    @property
    def anew(self) -> str | None:
        """Of a run with --force: "pending" until the old store was replaced, then "done"."""
        record = _read(self.path / ANEW)
        return None if record is None else str(record.get("state"))

    def set_anew(self, state: str | None) -> None:
        if state is None:
            (self.path / ANEW).unlink(missing_ok=True)
        else:
            write_json(self.path / ANEW, {"state": state})

    @property
    def details(self) -> dict[str, Any]:
        """What the report says of the training of domains that are done, by name."""
        return _read(self.path / DETAILS) or {}

    def set_details(self, details: Mapping[str, Any] | None) -> None:
        if details is None:
            (self.path / DETAILS).unlink(missing_ok=True)
        else:
            write_json(self.path / DETAILS, plain(details))

    # --- rounds -----------------------------------------------------------------------------------

    def rounds(self) -> list[RoundRecord]:
        """The rounds that are done."""
        return [RoundRecord(**r) for r in (_read(self.path / ROUNDS) or {"rounds": []})["rounds"]]

    def round_stack(self, number: int) -> StackFile | None:
        """The frozen stack of a round that is done; None where it was not kept.

        Raises: StoreError where the file is not what was written.
        """
        sha256 = (_read(self.path / ROUNDS) or {"files": {}})["files"].get(str(number))
        if sha256 is None:
            return None
        try:
            return read_stack(self.path / f"round-{number}.safetensors", sha256)
        except StoreError as error:
            raise StoreError(
                f"{error}\nthis is unfinished work; --no-resume trains the domain again"
            ) from None

    def add_round(
        self, record: RoundRecord, stack: tuple[Mapping[str, mx.array], StackHeader] | None
    ) -> None:
        """A round is done: its stack's file first, then the list that names it."""
        done = _read(self.path / ROUNDS) or {"rounds": [], "files": {}}
        if stack is not None:
            path = self.path / f"round-{record.number}.safetensors"
            # of a run that died before the list named it
            path.unlink(missing_ok=True)
            done["files"][str(record.number)] = write_stack(path, *stack)
        done["rounds"].append(plain(record.as_json()))
        write_json(self.path / ROUNDS, done)
        self.state_path(record.number).unlink(missing_ok=True)

    def state_path(self, number: int) -> Path:
        return self.path / f"training-{number}.safetensors"

    # --- protected directions ---------------------------------------------------------------------

    def bases(self) -> dict[str, NullBasis] | None:
        """The bases that were found when the domain began; None where it did not come so far, or
        where they are damaged: the same ones are found again.
        """
        path = self.path / BASES
        record = _read(path.with_suffix(".json"))
        if record is None or "projections" not in record:
            return None
        about, arrays = record["projections"], {}
        if record["sha256"] is not None:
            try:
                arrays = read_arrays(path, record["sha256"])
            except StoreError:
                return None
        return {
            name: NullBasis(
                arrays.get(f"{name}.{_VECTORS}", mx.zeros((figures["width"], 0))),
                figures["captured_energy"],
                figures["capacity"],
            )
            for name, figures in about.items()
        }

    def set_bases(self, bases: Mapping[str, NullBasis]) -> None:
        path = self.path / BASES
        path.unlink(missing_ok=True)
        arrays = {f"{n}.{_VECTORS}": b.vectors for n, b in bases.items() if b.vectors.shape[1]}
        sha256 = write_arrays(path, arrays) if arrays else None
        about = {
            name: {
                "width": int(np.shape(basis.vectors)[0]),
                "captured_energy": basis.captured_energy,
                "capacity": basis.capacity,
            }
            for name, basis in bases.items()
        }
        write_json(path.with_suffix(".json"), {"sha256": sha256, "projections": about})

    # --- log --------------------------------------------------------------------------------------

    def log(self, **record: Any) -> None:
        """One line; what is not a number to JSON (NaN) becomes null."""
        with target_errors(self.path), (self.path / LOG).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(plain(record), ensure_ascii=False) + "\n")

    def forget_log_after(self, number: int, step: int) -> None:
        """Drop lines of round `number` after `step` and of later rounds, and half-written ones."""
        path = self.path / LOG
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if (record.get("round", 0), record.get("step", 0)) <= (number, step):
                kept.append(line)
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)

    def log_lines(self) -> list[dict[str, Any]]:
        path = self.path / LOG
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def flat(values: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys, so that a difference is told by its own name."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        pairs |= (
            flat(value, f"{start}{key}.") if isinstance(value, Mapping) else {start + key: value}
        )
    return pairs


def _read(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


# --- the store ------------------------------------------------------------------------------------


def check_store_place(target: Path, settings: StackRunSettings) -> None:
    """Raises: TargetError where no store can be: a file, other people's files, not writable."""
    inputs = [user_path(path) for path in (settings.model, settings.data) if path]
    inputs = [path for path in inputs if path.exists()]
    try:
        is_filled = target.is_dir() and any(target.iterdir())
    except (OSError, ValueError) as error:  # too long; not ours to read; a NUL in the name
        raise TargetError(
            f"{str(target)[:200]!a}: not a usable target: {error.args[-1]}; choose another path"
        ) from None
    refuse_built_in(target)
    if is_filled and not _is_store(target):
        names = ", ".join(sorted(path.name for path in target.iterdir())[:3])
        raise TargetError(
            f"{target}: holds {names}, but no store (no manifest.json); choose another save path"
        )
    anew = begins_anew(target, settings)
    # A store is gone on with: it may be there.
    if is_filled and not anew and not (target / MANIFEST).exists():
        Store.open(target)
    check_target(target, force=anew, inputs=inputs, owned=own_entries, extends=not anew)
    if is_filled and not os.access(target, os.W_OK | os.X_OK):
        raise TargetError(f"{target}: not writable; choose another save path")


def _is_store(target: Path) -> bool:
    return (target / MANIFEST).exists() or (target / "stacks").is_dir()


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
    """Domain -> what the last run's result in a store says of it; nothing where there is none."""
    for name in (RESULT, FORMER_REPORT):
        document = _read(target / name) or {}
        domains = document.get("data", document).get("domains")
        if isinstance(domains, dict):
            return domains
    return {}
