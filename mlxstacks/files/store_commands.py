"""The functions behind `mlxstacks stacks remove | disable | enable | gc | diff`."""

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import target_errors
from mlxstacks.files.manifest import DomainRecord, Manifest, Matrix, PrefixChange
from mlxstacks.files.router_file import check_router
from mlxstacks.files.settings import (
    StacksDiffSettings,
    StacksGcSettings,
    StacksRemoveSettings,
    StacksSwitchSettings,
    StacksUndoSettings,
)
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import PREVIOUS, file_of, read_manifest, temporaries, unnamed_files

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


def open_store(path: str | None, *, blocks: bool = True) -> Store:
    """The store of a command. Raises: InputError where none was given, and as `Store.open`."""
    if path is None:
        raise InputError("no store given; `mlxstacks stack --save-path STORE` makes one")
    return Store.open(path, blocks=blocks)


def remove_domain(settings: StacksRemoveSettings, dry_run: bool = False) -> StoreChanged:
    """Take a domain and its stacks out of the manifest; their files stay until `gc`.

    Law: removing the domain that was added last restores the manifest from before it.
    Raises: InputError when later domains were trained on top of it, without `force`.
    """

    def edit(manifest: Manifest, domain: DomainRecord) -> Manifest:
        notes = _loss_of_ground(manifest, domain)
        if notes and not settings.force:
            raise InputError(
                f"{domain.name}: {notes[0]} --force removes it all the same, leaves their stacks "
                "as they are and drops from the matrix what was measured with it; `stacks disable` "
                "can be undone"
            )
        return without_domain(manifest, domain.name)

    return _change_domain(settings.store_path, settings.domain, "remove", edit, dry_run)


def disable_domain(settings: StacksSwitchSettings, dry_run: bool = False) -> StoreChanged:
    """Serve a domain's stacks no longer; `enable_domain` is the inverse."""

    def edit(manifest: Manifest, domain: DomainRecord) -> Manifest:
        return manifest.with_domain(replace(domain, enabled=False))

    return _change_domain(settings.store_path, settings.domain, "disable", edit, dry_run)


def enable_domain(settings: StacksSwitchSettings, dry_run: bool = False) -> StoreChanged:
    """Serve a domain's stacks again, in their old place."""

    def edit(manifest: Manifest, domain: DomainRecord) -> Manifest:
        return manifest.with_domain(replace(domain, enabled=True))

    return _change_domain(settings.store_path, settings.domain, "enable", edit, dry_run)


def undo_change(settings: StacksUndoSettings, dry_run: bool = False) -> StoreChanged:
    """Put back the manifest from before the last change, whatever that was.

    Law: undone twice, the manifest is what it was.
    Raises: InputError: nothing was changed yet. StoreError: a file of that manifest is not there
        any more (`gc` removed it). Nothing is changed then.
    """
    store = open_store(settings.store_path)
    if not (store.path / PREVIOUS).exists():
        raise InputError(f"{store.path}: no {PREVIOUS}, so there is no change to undo")

    def earlier(now: Manifest) -> Manifest:
        before = read_manifest(store.path, PREVIOUS)
        if before.base_fingerprint != now.base_fingerprint:
            raise StoreError(f"{store.path / PREVIOUS}: of another base; remove it")
        for record in before.files():
            file_of(store.path, record)
        return before

    now, after = store.manifest, earlier(store.manifest)
    status: Status = "planned" if dry_run else "done"
    if after == now:
        status = "nothing to do"
    elif not dry_run:
        with store.change("undo") as change:
            now, after = change.manifest, earlier(change.manifest)
            change.manifest = after
    old, new = ({s.file.sha256: s.name for s in m.stacks} for m in (now, after))
    domains = [d.name for d in (*now.domains, *after.domains)]
    touched = [
        name
        for name in dict.fromkeys(domains)
        if now.domain_named(name) != after.domain_named(name)
    ]
    return StoreChanged(
        status=status,
        action="undo",
        store_path=str(store.path),
        domain=", ".join(touched),
        stacks=tuple(dict.fromkeys((old | new)[sha256] for sha256 in old.keys() ^ new.keys())),
        served=tuple(stack.name for stack in after.enabled_stacks()),
        notes=(*company_notes(after), *router_notes(Store(store.path, after))),
    )


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
                if column != name
                and (
                    row not in later
                    if mode == "ungated"
                    else mode == "isolated" or column not in later
                )
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


def part_of(manifest: Manifest, domains: Collection[str]) -> Manifest:
    """A store's manifest with some of its domains; the router, which is of all, goes.

    Raises: InputError naming a domain that is not there.
    """
    known = [domain.name for domain in manifest.domains]
    if unknown := sorted(set(domains) - set(known)):
        raise InputError(f"no domain {unknown[0]!a} (there are: {', '.join(known) or 'none'})")
    kept = tuple(domain for domain in manifest.domains if domain.name in domains)
    if len(kept) == len(known):
        return manifest
    needed = {stack.shared_sha256 for domain in kept for stack in domain.stacks}
    return replace(
        manifest, domains=kept, router=None,
        shared=tuple(record for record in manifest.shared if record.sha256 in needed),
        matrix={
            mode: {
                row: {name: loss for name, loss in columns.items() if name in domains}
                for row, columns in rows.items() if row in domains
            }
            for mode, rows in manifest.matrix.items()
        },
    )  # fmt: skip


def replaced_domain(
    manifest: Manifest,
    domain: DomainRecord,
    rows: Matrix,
    before: Mapping[str, float],
    after: Mapping[str, float],
    moved_above: float,
) -> Manifest:
    """The manifest with a domain trained again in its place, and later ones marked.

    rows: new rows of the matrix. before, after: prefix losses of later domains, nats per token. A
    later domain is marked (`prefix_changed`) where it was trained on stacks that are replaced, or
    its loss moved by more than `moved_above`.
    """
    old = manifest.domain_named(domain.name)
    assert old is not None
    under = {d.name for d in dependents(manifest, old)}
    matrix = without_domain(manifest, domain.name).matrix
    for mode, changed in rows.items():
        matrix.setdefault(mode, {}).update(changed)
    place = manifest.domains.index(old)
    later = []
    for other in manifest.domains[place + 1 :]:
        was, now = before.get(other.name), after.get(other.name)
        mark = other.prefix_changed
        if mark is not None and mark.loss_before is not None:
            was = mark.loss_before
        moved = None if was is None or now is None else abs(now - was) > moved_above
        if other.name in under or moved:
            names = sorted({*(mark.retrained if mark else ()), domain.name})
            other = replace(other, prefix_changed=PrefixChange(tuple(names), was, now, moved))
        later.append(other)
    domains = (*manifest.domains[:place], domain, *later)
    return replace(manifest, domains=domains, matrix=matrix)


def _change_domain(
    store_path: str | None,
    name: str | None,
    action: str,
    edit: Callable[[Manifest, DomainRecord], Manifest],
    dry_run: bool,
) -> StoreChanged:
    """Apply an edit to a domain; nothing is written where it changes nothing."""
    store = open_store(store_path)
    if name is None:
        known = ", ".join(domain.name for domain in store.manifest.domains) or "none"
        raise InputError(f"no domain given (there are: {known})")
    domain = store.domain_named(name)
    before = store.manifest
    after = edit(before, domain)
    status: Status = "planned" if dry_run else "done"
    if after == before:
        status = "nothing to do"
    elif not dry_run:
        with store.change(action, domain=name) as change:
            # the manifest can be another one since it was read without the lock
            if change.manifest != before:
                domain = store.domain_named(name)
                before = change.manifest
                after = edit(before, domain)
            change.manifest = after
    notes = [] if action == "enable" else _loss_of_ground(before, domain)
    notes += router_notes(Store(store.path, after))
    return StoreChanged(
        status=status,
        action=action,
        store_path=str(store.path),
        domain=name,
        stacks=tuple(stack.name for stack in domain.stacks),
        served=tuple(stack.name for stack in after.enabled_stacks()),
        notes=tuple(notes),
    )


def _loss_of_ground(manifest: Manifest, domain: DomainRecord) -> list[str]:
    """What it means that a domain under others goes."""
    names = [d.name for d in dependents(manifest, domain)]
    was = "was" if len(names) == 1 else "were"
    note = (
        f"{', '.join(names)} {was} trained on top of it, with its stacks on; without them their "
        "losses are no longer the measured ones."
    )
    return [note] if names else []


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
        if mark := domain.prefix_changed:
            was, now = mark.loss_before, mark.loss_after
            change = "" if was is None or now is None else f": prefix loss {was:.4f}, now {now:.4f}"
            moved = "; it moved" if mark.moved else ""
            notes.append(
                f"{domain.name} was trained before {', '.join(mark.retrained)} was trained again"
                f"{change}{moved}"
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
        differences=tuple(_differences(a, b)),
    )


_DOMAIN_FIELDS = (
    "enabled", "origin", "losses", "final_loss", "settings", "data", "protected", "trained_on",
    "prefix_changed", "aligned",
)  # fmt: skip
_STACK_FIELDS = ("domain", "round", "parameters", "loss_before", "loss_after")


def _differences(a: Manifest, b: Manifest) -> Iterator[Difference]:
    for field in ("base_model", "base_fingerprint", "code_version", "format_version"):
        yield from _unequal("base", "", {field: getattr(a, field)}, {field: getattr(b, field)})
    yield from _by_name("domain", *({d.name: _domain_facts(d) for d in m.domains} for m in (a, b)))
    names = [[domain.name for domain in m.domains] for m in (a, b)]
    order = [[name for name in side if name in names[0] and name in names[1]] for side in names]
    yield from _unequal("order", "", {"domains": order[0]}, {"domains": order[1]})
    stacks = (
        {
            s.name: {"sha256": s.file.sha256} | {name: getattr(s, name) for name in _STACK_FIELDS}
            for s in m.stacks
        }
        for m in (a, b)
    )
    yield from _by_name("stack", *stacks)
    first, second = _entries(a), _entries(b)
    for mode in dict.fromkeys([*first, *second]):
        yield from _unequal("matrix", mode, first.get(mode, {}), second.get(mode, {}))
    yield from _unequal("router", "", *({"sha256": m.router and m.router.sha256} for m in (a, b)))


def _domain_facts(domain: DomainRecord) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for field in _DOMAIN_FIELDS:
        value = getattr(domain, field)
        if isinstance(value, dict):
            facts |= {f"{field}.{key}": part for key, part in value.items()}
        else:
            facts[field] = value
    return facts | {"split": domain.split and domain.split.sha256}


def _by_name(
    what: str, first: dict[str, dict[str, Any]], second: dict[str, dict[str, Any]]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*first, *second]):
        if name in first and name in second:
            yield from _unequal(what, name, first[name], second[name])
        else:
            yield Difference(what, name, "present", name in first, name in second)


def _entries(manifest: Manifest) -> dict[str, dict[str, float]]:
    return {
        mode: {
            f"{column} after {row}": loss
            for row, columns in rows.items()
            for column, loss in columns.items()
        }
        for mode, rows in manifest.matrix.items()
    }


def _unequal(
    what: str, name: str, first: dict[str, Any], second: dict[str, Any]
) -> Iterator[Difference]:
    for field in dict.fromkeys([*first, *second]):
        values = first.get(field), second.get(field)
        if values[0] != values[1]:
            yield Difference(what, name, field, *values)
