"""A store: a directory of frozen stacks with one manifest, changed in steps that happen or do not.

    manifest.json    what is there, with hashes and a checksum of itself
    stacks/ splits/ shared/ routers/    content files, never changed
    blocks/          capability blocks, in place of stacks
    log.jsonl        when what was done; the only place with times
    previous.json    the manifest before the last change, for `stacks undo`
    base.json        where base and data are on this machine (`find_base`); may be left out
    .lock            held by the one writer

Readers take no lock. They read the manifest once and find every file it names, whatever a writer
does meanwhile: a change writes new files next to the old ones and replaces the manifest last; a
file that nothing names any more stays until `gc`. Whatever else lies in the directory (`run/`,
reports) belongs to somebody else and is left alone.

The manifest names the base (hub id, or the directory's name) and holds its fingerprint; the paths
of its data begin in a directory that it does not name. Both places are a matter of this machine, so
they stand in `base.json`: equal runs still write equal manifests, and whoever hands a store on may
leave it out. Of a path inside the home directory it holds what follows `~`; a path from the store
to the base is left out where it would lead into the home directory from above. No export holds
either.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxstacks import __version__
from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError, OtherBaseError, StoreError
from mlxstacks.files.block_file import BlockFile, BlockHeader, read_block, write_block
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint, read_json_object
from mlxstacks.files.disk import target_errors, user_path, write_new
from mlxstacks.files.hub import in_hub_cache, may_be_hub_id, resolve_model
from mlxstacks.files.manifest import (
    DomainRecord,
    FileRecord,
    Manifest,
    StackRecord,
    binding_notes,
    check_name,
)
from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.files.router_file import (
    RouterFile,
    RouterHeader,
    check_router,
    read_router,
    write_router,
)
from mlxstacks.files.stack_file import (
    StackFile,
    StackHeader,
    StackIndex,
    hash_file,
    read_arrays,
    read_stack,
    read_stack_index,
    write_arrays,
    write_stack,
)
from mlxstacks.files.store_files import (
    LOCATION,
    LOG,
    MANIFEST,
    PREVIOUS,
    add_content,
    file_of,
    log_line,
    own_entries,
    read_checked,
    read_manifest,
    writers_lock,
)
from mlxstacks.files.strict_json import MAX_JSON_BYTES, read_object

# What a file takes besides its numbers: header, manifest, log.
_MARGIN_BYTES = 1 << 20


class Store:
    """An opened store. `manifest` is the state it had when it was opened or last changed here."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def create(
        cls, path: str | Path, base_model: str, base_fingerprint: str, *, force: bool = False
    ) -> "Store":
        """A new store without stacks.

        base_model: hub id or name of the base, without paths of this machine.
        force: replace an existing store.
        Raises: TargetError: something is there, is being written, or the place is not writable.
        """
        manifest = Manifest(base_model, base_fingerprint, code_version=__version__)
        target = user_path(path)
        with staged_directory(
            target, force=force, needed_bytes=_MARGIN_BYTES, owned=own_entries
        ) as staged:
            write_json(staged / MANIFEST, manifest.document(), sort_keys=True)
        return cls(target.resolve(), manifest)

    @classmethod
    def open(cls, path: str | Path, *, blocks: bool = False) -> "Store":
        """An existing store. Takes no lock; reads no stack.

        blocks: it may hold capability blocks in place of stacks.
        Raises: InputError: no store is there; it holds blocks. StoreError: its manifest is missing
            or damaged.
        """
        root = user_path(path)
        try:
            is_there = root.is_dir()
        except (OSError, ValueError) as error:
            raise InputError(f"{str(path)[:200]!a}: not a usable path: {error}") from None
        if not is_there:
            what = "a file" if root.exists() else "not there"
            raise InputError(
                f"{root}: {what}; give a store's directory (`mlxstacks stack` makes one)"
            )
        root = root.resolve()
        manifest = read_manifest(root)
        if manifest.holds_blocks and not blocks:
            raise InputError(
                f"{root}: holds capability blocks in place of stacks; generate, chat, serve, push "
                "and stacks list, verify, export, enable, disable and remove take them"
            )
        return cls(root, manifest)

    def refresh(self) -> Manifest:
        """Read the manifest again; returns it. Raises: as `open`."""
        self.manifest = read_manifest(self.path)
        return self.manifest

    def enabled_stacks(self) -> list[StackRecord]:
        """The stacks that are served, in the order of training."""
        return self.manifest.enabled_stacks()

    def stack_named(self, name: str) -> StackRecord:
        """Raises: InputError listing the stacks there are."""
        for stack in self.manifest.stacks:
            if stack.name == name:
                return stack
        known = ", ".join(stack.name for stack in self.manifest.stacks) or "none"
        raise InputError(f"{self.path}: no stack {name[:100]!a} (there are: {known})")

    def domain_named(self, name: str) -> DomainRecord:
        """Raises: InputError listing the domains there are."""
        domain = self.manifest.domain_named(name)
        if domain is not None:
            return domain
        owner = next((s.domain for s in self.manifest.stacks if s.name == name), None)
        if owner is not None:
            raise InputError(f"{name} is a stack; its domain is {owner}: name that")
        known = ", ".join(domain.name for domain in self.manifest.domains) or "none"
        raise InputError(f"{self.path}: no domain {name[:100]!a} (there are: {known})")

    def check_base(self, fingerprint: str) -> None:
        """Raises: OtherBaseError where a model of another fingerprint is to be used with it."""
        if fingerprint != self.manifest.base_fingerprint:
            raise OtherBaseError(
                f"{self.path}: its stacks were trained on {self.manifest.base_model} with "
                f"fingerprint {self.manifest.base_fingerprint[:12]}, this model has "
                f"{fingerprint[:12]}; use that base, or train a store of its own for this one"
            )

    def read_stack(self, record: StackRecord, *, known: StackIndex | None = None) -> StackFile:
        """The stack behind a record, checked against it: size, hash, header, base, numbers.

        known: see `stack_file.read_stack`; of its file only the size is checked again.
        Raises: StoreError naming the file and what is wrong with it.
        """
        path = file_of(self.path, record.file)
        stack = read_stack(path, record.file.sha256, known=known)
        if problems := header_problems(stack.header, record, self.manifest):
            raise StoreError(f"{path}: {'; '.join(problems)}")
        return stack

    def read_block(self, record: StackRecord) -> BlockFile:
        """As `read_stack`, of a capability block."""
        path = file_of(self.path, record.file)
        block = read_block(path, record.file.sha256)
        if problems := header_problems(block.header, record, self.manifest):
            raise StoreError(f"{path}: {'; '.join(problems)}")
        return block

    def read_header(self, record: StackRecord) -> StackHeader:
        """The header alone; neither hash nor numbers are checked. Raises: StoreError."""
        return self.read_index(record).header

    def read_index(self, record: StackRecord) -> StackIndex:
        """As `read_header`, to read the stack with later, without checking it again."""
        return read_stack_index(file_of(self.path, record.file))

    def read_json(self, record: FileRecord) -> dict[str, Any]:
        """A JSON file of the store (a split). Raises: StoreError naming the file."""
        try:
            return read_object(read_checked(self.path, record))
        except ValueError as error:
            raise StoreError(f"{self.path / record.file}: {error}") from None

    def read_shared(self, record: FileRecord) -> dict[str, mx.array]:
        """Arrays that several stacks read (latent projections). Raises: StoreError."""
        return read_arrays(file_of(self.path, record), record.sha256)

    def read_router(self, record: FileRecord | None = None) -> RouterFile:
        """The router behind a record, by default the manifest's; `check_router` says whether it
        fits the store's present stacks.

        Raises: InputError: the store has no router. StoreError naming the file and what is wrong.
        """
        record = record or self.manifest.router
        if record is None:
            train = command_line("mlxstacks route train", self.path)
            raise InputError(f"{self.path}: the store has no router; `{train}` trains one")
        return read_router(file_of(self.path, record), record.sha256)

    @contextmanager
    def change(self, event: str = "change", **details: Any) -> Iterator["Change"]:
        """Hold the writers' lock, and replace the manifest with `change.manifest` at the end.

        event, details: what log.jsonl says of the change; details are JSON values.
        Law: whenever the process dies, the store is as before or as after. On an exception in the
        block nothing changes, and files added in it are removed.

        Raises: StoreError: another process is changing the store, or the new manifest is not
            valid (ValueError). TargetError: full disk, read-only.
        """
        with writers_lock(self.path):
            change = Change(self.path, self.refresh())
            try:
                yield change
                if change.manifest != self.manifest:
                    change.commit(event, details)
            finally:
                change.drop_unnamed()
            self.manifest = change.manifest

    def log(self, event: str, **details: Any) -> None:
        """Add a line to log.jsonl. details: JSON values. Raises: TargetError."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        log_line(self.path / LOG, json.dumps({"time": now, "event": event, **details}))


class Change:
    """A change in the making: new files, and the manifest that will name them."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._before = manifest
        self._added: list[FileRecord] = []

    def add_stack(
        self,
        tensors: Mapping[str, mx.array],
        header: StackHeader | BlockHeader,
        loss_before: float | None = None,
        loss_after: float | None = None,
    ) -> StackRecord:
        """Write a stack's file, or a block's; the record is yours to put into a domain of
        `manifest`.

        Raises: StoreError for a stack of another base. ValueError and TargetError as `write_stack`.
        """
        if header.base_fingerprint != self.manifest.base_fingerprint:
            raise StoreError(
                f"{self.path}: stack {header.name} is of a base with fingerprint "
                f"{header.base_fingerprint[:12]}, the store's has "
                f"{self.manifest.base_fingerprint[:12]}; a store holds stacks of one base"
            )
        check_name(header.domain)
        stem = f"{header.domain}-r{header.round}"

        def write(path: Path) -> str:
            if isinstance(header, BlockHeader):
                return write_block(path, tensors, header)
            return write_stack(path, tensors, header)

        folder = "blocks" if isinstance(header, BlockHeader) else "stacks"
        file = self._add(folder, stem, tensors, write)
        parameters = sum(array.size for array in tensors.values())
        return StackRecord(
            header.name, header.domain, header.round, file, parameters, loss_before, loss_after,
            header.shared_sha256,
        )  # fmt: skip

    def add_json(self, folder: str, stem: str, value: Mapping[str, Any]) -> FileRecord:
        """Write a JSON file, keys sorted. folder: "splits" or "shared".

        Raises: ValueError for NaN or a stem that is no name; TargetError.
        """
        check_name(stem, "file")
        data = json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(f"{stem}: {len(data)} bytes of JSON, allowed: {MAX_JSON_BYTES}")
        file = add_content(
            self.path, folder, stem, "json", len(data), lambda path: write_new(path, data)
        )
        self._added.append(file)
        return file

    def _add(
        self,
        folder: str,
        stem: str,
        arrays: Mapping[str, mx.array],
        write: Callable[[Path], str],
    ) -> FileRecord:
        nbytes = sum(array.nbytes for array in arrays.values()) + _MARGIN_BYTES
        self._added.append(add_content(self.path, folder, stem, "safetensors", nbytes, write))
        return self._added[-1]

    def add_shared(self, stem: str, arrays: Mapping[str, mx.array]) -> FileRecord:
        """Write float32 arrays that several stacks read, and name the file in `manifest.shared`.

        Raises: ValueError for another dtype, NaN or Inf, a stem that is no name; TargetError.
        """
        check_name(stem, "file")
        file = self._add("shared", stem, arrays, lambda path: write_arrays(path, arrays))
        if file not in self.manifest.shared:
            self.manifest = replace(self.manifest, shared=(*self.manifest.shared, file))
        return file

    def set_router(self, tensors: Mapping[str, mx.array], header: RouterHeader) -> FileRecord:
        """Write a router's file, and name it in `manifest` in place of the one before.

        Raises: StoreError as `check_router`. ValueError and TargetError as `write_router`.
        """
        check_router(header, self)
        write = partial(write_router, tensors=tensors, header=header)
        file = self._add("routers", "router", tensors, write)
        self.manifest = replace(self.manifest, router=file)
        return file

    def adopt(self, other: Store) -> None:
        """Take over the manifest of a copy of this store that went on, and its new files.

        Raises: StoreError: a store of another base, or a file that is not what its manifest says.
        """
        if other.manifest.base_fingerprint != self.manifest.base_fingerprint:
            raise StoreError(f"{other.path}: is of another base than {self.path}")
        known = {*self.manifest.files()}
        for record in other.manifest.files():
            if record in known:
                continue
            source = file_of(other.path, record)

            def write(path: Path, source: Path = source) -> str:
                with source.open("rb") as given, path.open("xb") as copy:
                    shutil.copyfileobj(given, copy)
                    copy.flush()
                    os.fsync(copy.fileno())
                return hash_file(path, "copy it again")

            folder, _, name = record.file.partition("/")
            stem, _, suffix = name.rpartition(".")
            stem = stem.removesuffix(f"-{record.sha256[:12]}")
            added = add_content(self.path, folder, stem, suffix, record.nbytes, write)
            self._added.append(added)
            if added != record:
                raise StoreError(f"{source}: its bytes changed; its manifest names others")
        self.manifest = other.manifest

    def commit(self, event: str, details: Mapping[str, Any]) -> None:
        """Replace the manifest; called by `Store.change`."""
        # the version that wrote last; a resumed run of one version writes equal bytes
        self.manifest = replace(self.manifest, code_version=__version__)
        document = self.manifest.document()
        kept = {record.file for record in self.manifest.files()}
        for record in self._before.files():
            # gc counts the age of an unnamed file from here on, for readers of the old manifest
            if record.file not in kept and (self.path / record.file).is_file():
                with target_errors(self.path / record.file):
                    os.utime(self.path / record.file, follow_symlinks=False)
        # before the manifest: a full disk is met while nothing has changed yet
        Store(self.path, self._before).log(event, checksum=document["checksum"][:12], **details)
        write_json(self.path / PREVIOUS, self._before.document(), sort_keys=True)
        write_json(self.path / MANIFEST, document, sort_keys=True)

    def drop_unnamed(self) -> None:
        """Remove added files that the manifest on disk, old or new, does not name."""
        if not self._added:
            return
        # read again: an interrupt can come after the manifest was replaced
        named = {record.file for record in read_manifest(self.path).files()}
        for record in self._added:
            if record.file not in named:
                (self.path / record.file).unlink(missing_ok=True)


def header_problems(
    header: StackHeader | BlockHeader, record: StackRecord, manifest: Manifest
) -> list[str]:
    """How the own header of a stack, or a block, contradicts the manifest."""
    pairs = {
        "name": (header.name, record.name),
        "domain": (header.domain, record.domain),
        "round": (header.round, record.round),
        "shared file": (header.shared_sha256, record.shared_sha256),
        "base fingerprint": (header.base_fingerprint, manifest.base_fingerprint),
    }
    return [
        f"its header says {what} {str(mine)[:69]}, the manifest {str(theirs)[:69]}"
        for what, (mine, theirs) in pairs.items()
        if mine != theirs
    ]


_PACKAGE = Path(__file__).resolve().parents[1]


def base_name(model: str | Path) -> str:
    """The name of a base without where it is: a hub id, or the last part of a directory's path.

    A directory inside the hub cache has the name of its repository.
    """
    path = user_path(model)
    if not path.is_dir():
        return str(model)
    directory = path.resolve()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return directory.name


def remember_places(store: Store, model: str, data: Path | None = None) -> None:
    """Write where the base is, from the store and on this machine, if it is a directory: what has a
    hub id is found by that. And where the paths of a domain's data begin. Raises: TargetError.
    """
    location: dict[str, Any] = {}
    directory = user_path(model).resolve()
    if directory.is_dir():
        location["path"] = _below_home(directory)
        common, home = Path(os.path.commonpath([directory, store.path])), Path.home().resolve()
        if common == home or not home.is_relative_to(common):
            location["relative_path"] = os.path.relpath(directory, store.path)
    data_places = _strings(_location(store).get("data"))
    if data is not None:
        data_places.append(_below_home(data.resolve()))
    if data_places:
        location["data"] = list(dict.fromkeys(data_places))
    if location:
        write_json(store.path / LOCATION, location, sort_keys=True)


def _below_home(path: Path) -> str:
    home = Path.home().resolve()
    return str(Path("~") / path.relative_to(home) if path.is_relative_to(home) else path)


def data_directories(store: Store) -> list[Path]:
    """Where relative paths of its domains' data began when they were trained, on this machine."""
    return [Path(os.path.expanduser(place)) for place in _strings(_location(store).get("data"))]


def _location(store: Store) -> dict[str, Any]:
    try:
        return read_json_object(store.path / LOCATION)
    except InputError:  # an older store, or one that was handed on
        return {}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def find_base(store: Store, model: str | None, notes: list[str] | None = None) -> Checkpoint:
    """The base of a store, its fingerprint compared.

    model: a directory or hub id that somebody gave; nothing else is tried then. None: next to the
        store, where it was when the store was made (seen from the store, then on this machine),
        where the manifest's name leads from here, the hub by its id.
    notes: gets a line on where it was, if nobody gave it, and one on a weak bond.
    Raises: InputError: no such model; in none of these places, each with what is there instead.
        StoreError: the model that was given is another one.
    """
    manifest = store.manifest
    # nano's store and model come together, so what binds them is of no use to its users
    if notes is not None and not store.path.is_relative_to(_PACKAGE):
        notes += [f"{store.path}: {note}" for note in binding_notes(manifest.base_fingerprint)]
    if model is not None:
        checkpoint = open_checkpoint(resolve_model(model))
        store.check_base(fingerprint(checkpoint, manifest.base_fingerprint))
        return checkpoint
    problems = []
    for place in _places(store):
        try:
            checkpoint = open_checkpoint(resolve_model(place))
            candidate = fingerprint(checkpoint, manifest.base_fingerprint)
        except InputError as error:
            missing = isinstance(place, Path) and not os.path.isdir(place)
            problems.append(f"{place}: not there" if missing else str(error))
            continue
        if candidate == manifest.base_fingerprint:
            if notes is not None:
                notes.append(f"The base of the store is {checkpoint.directory}.")
            return checkpoint
        problems.append(f"{place}: another model, with fingerprint {candidate[:12]}")
    listed = "".join(f"\n  {problem}" for problem in problems)
    raise InputError(
        f"{store.path}: its base {manifest.base_model} (fingerprint "
        f"{manifest.base_fingerprint[:12]}) is not found here; looked at:{listed}\n"
        "give its directory or hub id with --model"
    )


def _places(store: Store) -> Iterator[Path | str]:
    """Directories, then a hub id, each once."""
    name = store.manifest.base_model
    location = _location(store)
    relative, path = location.get("relative_path"), location.get("path")
    places = [store.path.parent / Path(name).name]
    places += [store.path / relative] if isinstance(relative, str) else []
    places += [Path(os.path.expanduser(path))] if isinstance(path, str) else []
    places.append(Path(os.path.expanduser(name)))
    yield from dict.fromkeys(Path(os.path.abspath(place)) for place in places)
    if may_be_hub_id(name) and ("/" in name or in_hub_cache(name)):
        yield name
