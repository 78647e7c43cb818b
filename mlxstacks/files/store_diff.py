"""`mlxstacks stacks diff`: what two stores hold differently, from their manifests alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.files.store_commands import open_store
from mlxstacks.files.store_settings import StacksDiffSettings


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
