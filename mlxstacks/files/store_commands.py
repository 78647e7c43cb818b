"""The functions behind `mlxstacks stacks remove | disable | enable | gc | diff`."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import target_errors
from mlxstacks.files.manifest import DomainRecord, Manifest, Matrix, MatrixMode
from mlxstacks.files.router_file import check_router
from mlxstacks.files.settings import (
    StacksDiffSettings,
    StacksGcSettings,
    StacksRemoveSettings,
    StacksSwitchSettings,
)
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import temporaries, unnamed_files

Status = Literal["done", "planned", "nothing to do"]


@dataclass(frozen=True)
class StoreChanged:
    """One change of a store, made or planned. stacks: names of the stacks it touches; served: the
    stacks that are enabled afterwards.
    """

    status: Status
    action: str
    store_path: str
    domain: str
    stacks: tuple[str, ...]
    served: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Collected:
    """What gc removed or would remove. kept: files that nothing names, younger than the grace
    period. strange: entries that are not a store's, left alone.
    """

    status: Status
    store_path: str
    removed: tuple[str, ...]
    removed_bytes: int
    kept: tuple[str, ...]
    kept_bytes: int
    strange: tuple[str, ...]
    grace_seconds: int


def open_store(path: str | None) -> Store:
    """The store of a command. Raises: InputError where none was given, and as `Store.open`."""
    if path is None:
        raise InputError("no store given; `mlxstacks stack --save-path STORE` makes one")
    return Store.open(path)


def remove_domain(settings: StacksRemoveSettings, dry_run: bool = False) -> StoreChanged:
    """Take a domain and its stacks out of the manifest; their files stay until `gc`.

    Law: removing the domain that was added last restores the manifest from before it.
    Raises: InputError when later domains were trained on top of it, without `force`.
    """

    def edit(manifest: Manifest, domain: DomainRecord) -> tuple[Manifest, list[str]]:
        later = dependents(manifest, domain)
        notes = [_loss_of_ground(domain, later)] if later else []
        if later and not settings.force:
            raise InputError(
                f"{domain.name}: {notes[0]} --force removes it all the same, leaves their stacks "
                "as they are and drops from the matrix what was measured with it; `stacks disable` "
                "can be undone"
            )
        return without_domain(manifest, domain.name), notes

    return _change_domain(settings.store_path, settings.domain, "remove", edit, dry_run)


def disable_domain(settings: StacksSwitchSettings, dry_run: bool = False) -> StoreChanged:
    """Serve a domain's stacks no longer; `enable_domain` is the inverse."""

    def edit(manifest: Manifest, domain: DomainRecord) -> tuple[Manifest, list[str]]:
        later = dependents(manifest, domain)
        notes = [_loss_of_ground(domain, later)] if later else []
        return manifest.with_domain(replace(domain, enabled=False)), notes

    return _change_domain(settings.store_path, settings.domain, "disable", edit, dry_run)


def enable_domain(settings: StacksSwitchSettings, dry_run: bool = False) -> StoreChanged:
    """Serve a domain's stacks again, in their old place."""

    def edit(manifest: Manifest, domain: DomainRecord) -> tuple[Manifest, list[str]]:
        return manifest.with_domain(replace(domain, enabled=True)), []

    return _change_domain(settings.store_path, settings.domain, "enable", edit, dry_run)


def collect_garbage(settings: StacksGcSettings, dry_run: bool = False) -> Collected:
    """Remove files that no manifest has named for the grace period, and what dead writers left.

    Raises: StoreError when another process is changing the store; TargetError when it is read-only.
    """
    store = open_store(settings.store_path)
    if dry_run:
        return _collect(store, settings.grace_seconds, "planned")
    with store.change("gc"):
        return _collect(store, settings.grace_seconds, "done")


def _collect(store: Store, grace_seconds: int, status: Status) -> Collected:
    named = {record.file for record in store.manifest.files()}
    content, strange = unnamed_files(store.path, named)
    oldest = time.time() - grace_seconds
    old = [path for path in content if path.stat().st_mtime <= oldest]
    young = [path for path in content if path not in old]
    gone = [*old, *temporaries(store.path)]
    gone_bytes = _bytes_of(gone)
    if status == "done":
        with target_errors(store.path):
            for path in gone:
                os.unlink(path)
        if gone:
            store.log("gc", removed=[_inside(store, path) for path in gone], nbytes=gone_bytes)
    return Collected(
        status=status,
        store_path=str(store.path),
        removed=tuple(_inside(store, path) for path in gone),
        removed_bytes=gone_bytes,
        kept=tuple(_inside(store, path) for path in young),
        kept_bytes=_bytes_of(young),
        strange=tuple(_inside(store, path) for path in strange),
        grace_seconds=grace_seconds,
    )


def dependents(manifest: Manifest, domain: DomainRecord) -> list[DomainRecord]:
    """The domains that were trained while stacks of this one were on."""
    names = {stack.name for stack in domain.stacks}
    return [d for d in manifest.domains if d.name != domain.name and names & {*d.trained_on}]


def without_domain(manifest: Manifest, name: str) -> Manifest:
    """The manifest without a domain, and without what was measured with its stacks on.

    Dropped are its rows and columns, and of each domain trained on top of it the row in `ungated`
    and the entries of such domains in `prefix`. `isolated` had no other domain on.
    """
    domain = manifest.domain_named(name)
    assert domain is not None
    later = {d.name for d in dependents(manifest, domain)}
    matrix: Matrix = {}
    for mode, rows in manifest.matrix.items():
        kept = {
            row: {
                column: loss
                for column, loss in columns.items()
                if column != name and _still_true(mode, row, column, later)
            }
            for row, columns in rows.items()
            if row != name
        }
        kept = {row: columns for row, columns in kept.items() if columns}
        if kept:
            matrix[mode] = kept
    domains = tuple(d for d in manifest.domains if d.name != name)
    needed = {stack.shared_sha256 for d in domains for stack in d.stacks}
    shared = tuple(record for record in manifest.shared if record.sha256 in needed)
    return replace(manifest, domains=domains, matrix=matrix, shared=shared)


def _still_true(mode: MatrixMode, row: str, column: str, later: set[str]) -> bool:
    if mode == "ungated":
        return row not in later
    return mode == "isolated" or column not in later


def _change_domain(
    store_path: str | None,
    name: str | None,
    action: str,
    edit: Callable[[Manifest, DomainRecord], tuple[Manifest, list[str]]],
    dry_run: bool,
) -> StoreChanged:
    """Apply an edit to a domain; nothing is written where it changes nothing."""
    store = open_store(store_path)
    if name is None:
        known = ", ".join(domain.name for domain in store.manifest.domains) or "none"
        raise InputError(f"no domain given (there are: {known})")
    domain = store.domain_named(name)
    before = store.manifest
    after, notes = edit(before, domain)
    status: Status = "planned" if dry_run else "done"
    if after == before:
        status = "nothing to do"
    elif not dry_run:
        with store.change(action, domain=name) as change:
            # the manifest can be another one since it was read without the lock
            if change.manifest != before:
                domain = store.domain_named(name)
                after, notes = edit(change.manifest, domain)
            change.manifest = after
    notes = [*notes, *router_notes(Store(store.path, after))]
    return StoreChanged(
        status=status,
        action=action,
        store_path=str(store.path),
        domain=name,
        stacks=tuple(stack.name for stack in domain.stacks),
        served=tuple(stack.name for stack in after.enabled_stacks()),
        notes=tuple(notes),
    )


def _loss_of_ground(domain: DomainRecord, later: list[DomainRecord]) -> str:
    """What it means that a domain under others goes."""
    names = ", ".join(d.name for d in later)
    return (
        f"{names} {'was' if len(later) == 1 else 'were'} trained on top of it, with its stacks on; "
        "without them their losses are no longer the measured ones."
    )


def company_notes(manifest: Manifest) -> list[str]:
    """Domains that are served without stacks that were on while they were trained."""
    served = {stack.name for stack in manifest.enabled_stacks()}
    notes = []
    for domain in manifest.domains:
        absent = [name for name in domain.trained_on if name not in served]
        if domain.enabled and absent:
            notes.append(
                f"{domain.name} was trained on top of {', '.join(absent)}, not served now: its "
                "losses are not the measured ones"
            )
    return notes


def router_notes(store: Store) -> list[str]:
    """What to know about a store's router, in a store that may have changed since its training."""
    if store.manifest.router is None:
        return []
    try:
        return check_router(store.read_router().header, store)
    except StoreError as error:
        return [f"routed inference will not start: {error}"]


def _inside(store: Store, path: Path) -> str:
    return path.relative_to(store.path).as_posix()


def _bytes_of(paths: list[Path]) -> int:
    return sum(path.lstat().st_size for path in paths)


@dataclass(frozen=True)
class Difference:
    """One fact on which the stores differ. what: domain, stack, matrix, router, base or order; None
    stands for what a store does not have.
    """

    what: str
    name: str
    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class StoreDiff:
    """Every difference. equal_stacks: names of stacks whose bytes are the same in both."""

    store_path: str
    other_path: str
    equal_stacks: tuple[str, ...]
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


def diff_stores(settings: StacksDiffSettings) -> StoreDiff:
    """Compare two stores: base, domains and their settings, stacks, router, matrix.

    Raises: as `open_store`.
    """
    if settings.other_path is None:
        raise InputError("two stores are needed: mlxstacks stacks diff STORE OTHER")
    first, second = open_store(settings.store_path), open_store(settings.other_path)
    a, b = first.manifest, second.manifest
    theirs = {stack.name: stack.file.sha256 for stack in b.stacks}
    return StoreDiff(
        store_path=str(first.path),
        other_path=str(second.path),
        equal_stacks=tuple(s.name for s in a.stacks if theirs.get(s.name) == s.file.sha256),
        differences=(
            *_base(a, b), *_domains(a, b), *_stacks(a, b), *_matrix(a, b), *_router(a, b)
        ),
    )  # fmt: skip


def _base(a: Manifest, b: Manifest) -> Iterator[Difference]:
    for field in ("base_model", "base_fingerprint", "code_version", "format_version"):
        yield from _unequal("base", "", field, getattr(a, field), getattr(b, field))


def _domains(a: Manifest, b: Manifest) -> Iterator[Difference]:
    first = {domain.name: domain for domain in a.domains}
    second = {domain.name: domain for domain in b.domains}
    for name in dict.fromkeys([*first, *second]):
        if name in first and name in second:
            yield from _domain(first[name], second[name])
        else:
            yield Difference("domain", name, "present", name in first, name in second)
    both = [[name for name in side if name in first and name in second] for side in (first, second)]
    yield from _unequal("order", "", "domains", both[0], both[1])


def _domain(a: DomainRecord, b: DomainRecord) -> Iterator[Difference]:
    for field in ("enabled", "origin", "losses", "final_loss", "settings", "data", "protected",
                  "trained_on"):  # fmt: skip
        mine, other = getattr(a, field), getattr(b, field)
        if isinstance(mine, dict) and isinstance(other, dict):
            for key in dict.fromkeys([*mine, *other]):
                yield from _unequal(
                    "domain", a.name, f"{field}.{key}", mine.get(key), other.get(key)
                )
        else:
            yield from _unequal("domain", a.name, field, mine, other)
    splits = [None if d.split is None else d.split.sha256 for d in (a, b)]
    yield from _unequal("domain", a.name, "split", *splits)


def _stacks(a: Manifest, b: Manifest) -> Iterator[Difference]:
    first = {stack.name: stack for stack in a.stacks}
    second = {stack.name: stack for stack in b.stacks}
    for name in dict.fromkeys([*first, *second]):
        mine, other = first.get(name), second.get(name)
        if mine is None or other is None:
            yield Difference("stack", name, "present", mine is not None, other is not None)
            continue
        yield from _unequal("stack", name, "sha256", mine.file.sha256, other.file.sha256)
        for field in ("domain", "round", "parameters", "loss_before", "loss_after"):
            yield from _unequal("stack", name, field, getattr(mine, field), getattr(other, field))


def _router(a: Manifest, b: Manifest) -> Iterator[Difference]:
    hashes = [None if m.router is None else m.router.sha256 for m in (a, b)]
    yield from _unequal("router", "", "sha256", *hashes)


def _matrix(a: Manifest, b: Manifest) -> Iterator[Difference]:
    first, second = _entries(a), _entries(b)
    for key in dict.fromkeys([*first, *second]):
        mode, row, column = key
        yield from _unequal(
            "matrix", mode, f"{column} after {row}", first.get(key), second.get(key)
        )


def _entries(manifest: Manifest) -> dict[tuple[str, str, str], float]:
    return {
        (mode, row, column): loss
        for mode, rows in manifest.matrix.items()
        for row, columns in rows.items()
        for column, loss in columns.items()
    }


def _unequal(what: str, name: str, field: str, first: Any, second: Any) -> Iterator[Difference]:
    if first != second:
        yield Difference(what, name, field, first, second)
