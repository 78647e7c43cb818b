"""The manifest of a store: which domains and stacks there are, their files and their losses.

It holds no times and no names of machines, and its JSON has sorted keys: two equal runs write equal
bytes. Its last key, `checksum`, is the SHA-256 of the rest as compact JSON.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from mlxstacks.files.strict_json import (
    STRICT,
    JsonObject,
    VersionedRecord,
    json_sha256,
    read_object,
)

FOLDERS = ("stacks", "splits", "shared", "routers", "blocks")

MatrixMode = Literal["ungated", "prefix", "isolated"]
Matrix = dict[MatrixMode, dict[str, dict[str, float]]]
Origin = Literal["trained", "imported"]

# Names become parts of file names, on file systems that differ in what they take.
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
SHA256 = r"^[0-9a-f]{64}$"
DomainName = Annotated[str, Field(pattern=NAME)]
StackName = Annotated[str, Field(pattern=NAME.replace("63", "99"))]
Sha256 = Annotated[str, Field(pattern=SHA256)]
# Before a base's fingerprint that covers every byte; those without it are of samples.
FULL = "full:"
Fingerprint = Annotated[str, Field(pattern=rf"^({FULL})?[0-9a-f]{{64}}$")]
_FILE = rf"^({'|'.join(FOLDERS)})/[A-Za-z0-9][A-Za-z0-9._-]{{0,199}}$"
Count = Annotated[int, Field(ge=0, le=2**60)]
Round = Annotated[int, Field(ge=0, le=9999)]


def binding_notes(fingerprint: str | None) -> list[str]:
    """What to say of a fingerprint of samples, which earlier versions wrote."""
    if fingerprint is None or fingerprint.startswith(FULL):
        return []
    note = (
        "bound weakly to its base: an earlier version took the fingerprint from samples, so bytes "
        "between them are not compared"
    )
    return [note]


@dataclass(frozen=True)
class FileRecord:
    """One file of the store: its path inside it, its hash, its size. Its name ends in the hash."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    file: Annotated[str, Field(pattern=_FILE)]
    sha256: Sha256
    nbytes: Count


@dataclass(frozen=True)
class StackRecord:
    """One frozen stack, or the capability block of a domain. loss_before, loss_after: validation
    loss of its round; None: not measured (imported). shared_sha256: the file of `Manifest.shared`
    that it needs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: StackName
    domain: DomainName
    round: Round
    file: FileRecord
    parameters: Count
    loss_before: float | None
    loss_after: float | None
    shared_sha256: Sha256 | None = None

    @property
    def is_block(self) -> bool:
        return self.file.file.startswith("blocks/")


@dataclass(frozen=True)
class PrefixChange:
    """What became of a domain whose earlier domains `retrained` were trained again after it.

    loss_before, loss_after: its prefix loss before the first of them and after the last, nats a
    token; None where it was not measured (disabled). moved: whether they differ by more than the
    threshold of the last run.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    retrained: tuple[DomainName, ...]
    loss_before: float | None
    loss_after: float | None
    moved: bool | None


@dataclass(frozen=True)
class DomainRecord:
    """One domain and its stacks, in the order of training.

    losses: validation loss before training, then after each round. settings: what it was trained
    with; settings_sha256: `json_sha256` of it, or of what stands for it. data: the report on its
    data. split: row ids of its training and validation rows; None where there are none (imported).
    protected: what its null space held, None where nothing was protected. trained_on: names of the
    stacks that were on while it was trained. prefix_changed: None, unless an earlier
    domain was trained again since. aligned: how its last stack was trained on preferences or
    rewards, each time.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: DomainName
    enabled: bool
    stacks: tuple[StackRecord, ...]
    losses: tuple[float, ...] = ()
    final_loss: float | None = None
    settings: JsonObject = field(default_factory=dict)
    settings_sha256: Sha256 | None = None
    data: JsonObject = field(default_factory=dict)
    split: FileRecord | None = None
    protected: JsonObject | None = None
    origin: Origin = "trained"
    trained_on: tuple[StackName, ...] = ()
    prefix_changed: PrefixChange | None = None
    aligned: tuple[JsonObject, ...] = ()


@dataclass(frozen=True)
class Manifest(VersionedRecord):
    """All of a store. domains: in the order of training. matrix: mode -> domain trained last ->
    domain measured -> loss. shared: files that several stacks read (latent projections). router:
    the meta-router, None without one; it goes by the names of domains.
    """

    KIND: ClassVar[str] = "store"

    base_model: Annotated[str, Field(max_length=4096)]
    base_fingerprint: Fingerprint
    domains: tuple[DomainRecord, ...] = ()
    matrix: Matrix = field(default_factory=dict)
    shared: tuple[FileRecord, ...] = ()
    code_version: Annotated[str, Field(max_length=100)] = ""
    format_version: Literal[1] = 1
    router: FileRecord | None = None

    @property
    def stacks(self) -> tuple[StackRecord, ...]:
        """Every stack, enabled or not, in order."""
        return tuple(stack for domain in self.domains for stack in domain.stacks)

    @property
    def holds_blocks(self) -> bool:
        """Whether capability blocks stand in the place of stacks."""
        return any(stack.is_block for stack in self.stacks)

    def enabled_stacks(self) -> list[StackRecord]:
        """The stacks that are served, in order."""
        return [stack for domain in self.domains if domain.enabled for stack in domain.stacks]

    def domain_named(self, name: str) -> DomainRecord | None:
        return next((domain for domain in self.domains if domain.name == name), None)

    def with_domain(self, domain: DomainRecord) -> "Manifest":
        """This manifest with a domain added at the end, or replaced in its place by name.

        A new domain without `trained_on` gets the names of the stacks that are enabled now.
        """
        old = self.domain_named(domain.name)
        if old is not None:
            if not domain.trained_on:
                domain = replace(domain, trained_on=old.trained_on)
            kept = tuple(domain if d.name == domain.name else d for d in self.domains)
            return replace(self, domains=kept)
        if not domain.trained_on and domain.origin == "trained":
            names = tuple(stack.name for stack in self.enabled_stacks())
            domain = replace(domain, trained_on=names)
        return replace(self, domains=(*self.domains, domain))

    def files(self) -> Iterator[FileRecord]:
        """Every file that the manifest names."""
        yield from self.shared
        if self.router is not None:
            yield self.router
        for domain in self.domains:
            if domain.split is not None:
                yield domain.split
            yield from (stack.file for stack in domain.stacks)

    def as_json(self) -> dict[str, Any]:
        """As of any record; without a router, a changed prefix or preferences, there is no such
        key: the bytes are those of versions that knew none.
        """
        value = super().as_json()
        if value["router"] is None:
            del value["router"]
        for domain in value["domains"]:
            if domain["prefix_changed"] is None:
                del domain["prefix_changed"]
            if not domain["aligned"]:
                del domain["aligned"]
        return value

    def problems(self) -> Iterator[str]:
        """Names given twice, and records that contradict each other."""
        names = [domain.name.casefold() for domain in self.domains]
        yield from (f"two domains named {name}" for name in _twice(names))
        # Domains and stacks are selected by name alike.
        stacks = [stack.name.casefold() for stack in self.stacks]
        yield from (f"two stacks named {name}" for name in _twice(stacks))
        yield from (f"a domain and a stack named {name}" for name in sorted({*names} & {*stacks}))
        files = list(self.files())
        yield from (f"{file} is named twice" for file in _twice([r.file.casefold() for r in files]))
        for record in files:
            if not record.file.rpartition(".")[0].endswith(f"-{record.sha256[:12]}"):
                yield f"{record.file}: its name must end in the first 12 digits of its sha256"
        for domain in self.domains:
            rounds = [stack.round for stack in domain.stacks]
            if rounds != sorted(set(rounds)):
                yield f"domain {domain.name}: rounds {rounds} must rise"
            for stack in domain.stacks:
                if stack.domain != domain.name:
                    yield f"stack {stack.name}: says domain {stack.domain}, stands in {domain.name}"
        known = {domain.name for domain in self.domains}
        for mode, rows in self.matrix.items():
            unknown = {*rows, *(column for row in rows.values() for column in row)} - known
            yield from (f"matrix {mode} names {name[:80]!a}, no domain" for name in sorted(unknown))
        shared = {record.sha256 for record in self.shared}
        for stack in self.stacks:
            if stack.shared_sha256 is not None and stack.shared_sha256 not in shared:
                yield f"stack {stack.name}: its shared file {stack.shared_sha256[:12]} is not named"
        kind = "blocks" if self.holds_blocks else "stacks"
        folders = [(kind, stack.file) for stack in self.stacks]
        folders += [("splits", domain.split) for domain in self.domains if domain.split]
        folders += [("shared", record) for record in self.shared]
        folders += [("routers", self.router)] if self.router else []
        for folder, record in folders:
            if not record.file.startswith(f"{folder}/"):
                yield f"{record.file}: must lie in {folder}/"

    def document(self) -> dict[str, Any]:
        """What manifest.json holds: `as_json` and its checksum. Raises: ValueError as `from_json`:
        what could not be read again is not written.
        """
        value = self.as_json()
        Manifest.from_json(value)
        return {**value, "checksum": json_sha256(value)}

    @property
    def checksum(self) -> str:
        """SHA-256 (hex) of all that the manifest says."""
        return json_sha256(self.as_json())


def parse_manifest(data: bytes) -> Manifest:
    """A manifest from the bytes of manifest.json.

    Raises: ValueError: not JSON, another checksum than its content has, and as `from_json`.
    """
    value = read_object(data)
    checksum = value.pop("checksum", None)
    if checksum != (expected := json_sha256(value)):
        raise ValueError(
            f"checksum is {str(checksum)[:12]}, its content has {expected[:12]}: it was changed by "
            "something else than mlxstacks"
        )
    return Manifest.from_json(value)


def stack_name(domain: str, number: int) -> str:
    """The usual name of the stack of a domain's round."""
    return f"{domain}-r{number}"


def check_name(name: str, what: str = "domain") -> str:
    """`name`, if it can name a domain or a stack. Raises: ValueError saying what can."""
    if not re.match(NAME.replace("$", r"\Z"), name):
        raise ValueError(
            f"{what} {name[:100]!a}: allowed are 1 to 64 letters, digits, dots, dashes and "
            "underscores of ASCII, the first a letter or digit"
        )
    return name


def _twice(names: list[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)
