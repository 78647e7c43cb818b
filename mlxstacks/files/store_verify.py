"""`mlxstacks stacks verify`: every file of a store against the manifest, and against a model.

A bad file is named and the rest is checked all the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxstacks.command_line import command_line
from mlxstacks.errors import CheckpointError, StoreError
from mlxstacks.files.block_file import read_block
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.manifest import FOLDERS, FileRecord, StackRecord, binding_notes
from mlxstacks.files.settings import StacksVerifySettings
from mlxstacks.files.stack_file import (
    StackHeader,
    file_sha256,
    read_arrays,
    read_stack,
)
from mlxstacks.files.store import Store, header_problems
from mlxstacks.files.store_commands import open_store, router_notes
from mlxstacks.files.store_files import file_of, temporaries, unnamed_files
from mlxstacks.files.stored_weight import weight_shape

Kind = Literal["missing", "size", "bytes", "swapped", "content", "header", "shape", "base"]
Checked = Literal["not checked", "same", "another"]


@dataclass(frozen=True)
class Problem:
    """What is wrong with one file (or with the store's base, which is no file)."""

    file: str
    kind: Kind
    message: str


@dataclass(frozen=True)
class Verified:
    """The result. notes: what is no damage but worth knowing."""

    store_path: str
    files: int
    nbytes: int
    stacks: int
    base: Checked
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def failure(self) -> str | None:
        """Why the command ends with exit code 1, or None."""
        if not self.problems:
            return None
        bad = sorted({problem.file for problem in self.problems})
        return f"{len(bad)} of the store's files cannot be trusted: {', '.join(bad[:5])}"


def verify_store(settings: StacksVerifySettings, progress: Any = None) -> Verified:
    """Check hashes, sizes, headers, shapes and numbers of every file.

    Raises: StoreError where the manifest itself is damaged: nothing else can be judged then.
        CheckpointError for a model that cannot be read.
    """
    store = open_store(settings.store_path)
    model = None if settings.model is None else open_checkpoint(resolve_model(settings.model))
    manifest = store.manifest
    records = list(manifest.files())
    problems: list[Problem] = []
    whole: set[str] = set()
    for done, record in enumerate(records):
        if progress is not None:
            progress(done, len(records), record.file)
        damage = list(_file_problems(store.path, record, records))
        problems += damage
        if not damage:
            whole.add(record.file)
    headers = {}
    for stack in manifest.stacks:
        if stack.file.file in whole:
            headers[stack.file.file] = _check_stack(store, stack, problems)
    notes = [*binding_notes(manifest.base_fingerprint), *_notes(store, records)]
    for record in records:
        if record.file in whole and not record.file.startswith(("stacks/", "blocks/")):
            _check_content(store, record, problems, notes)
    readable = {file: header for file, header in headers.items() if header is not None}
    problems += _shape_differences(readable)
    base: Checked = "not checked"
    if model is not None:
        fingerprint_here = fingerprint(model, manifest.base_fingerprint)
        base = "same" if fingerprint_here == manifest.base_fingerprint else "another"
        if base == "another":
            text = (
                f"the store's base has fingerprint {manifest.base_fingerprint[:12]}, "
                f"{model.directory} has {fingerprint_here[:12]}"
            )
            problems.append(Problem("manifest.json", "base", text))
        for file, header in readable.items():
            texts = model_differences(header, model)
            problems += [Problem(file, "shape", text) for text in texts]
    return Verified(
        store_path=str(store.path),
        files=len(records),
        nbytes=sum(record.nbytes for record in records),
        stacks=len(manifest.stacks),
        base=base,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _file_problems(root: Path, record: FileRecord, records: list[FileRecord]) -> Iterator[Problem]:
    """Missing, a link, of another size, of other bytes."""
    path, wrong_size = root / record.file, None
    try:
        file_of(root, record)
    except StoreError as error:
        if not path.is_file() or path.is_symlink() or path.parent.is_symlink():
            yield Problem(record.file, "missing", str(error))
            return
        wrong_size = str(error)
    try:
        sha256 = file_sha256(path)
    except StoreError as error:
        yield Problem(record.file, "bytes", str(error))
        return
    if sha256 == record.sha256:
        return
    if others := [r.file for r in records if r.sha256 == sha256]:
        yield Problem(record.file, "swapped", f"{path}: holds the bytes of {others[0]}")
    elif wrong_size:
        yield Problem(record.file, "size", wrong_size)
    else:
        message = f"{path}: bytes changed: sha256 {sha256[:12]}, expected {record.sha256[:12]}"
        yield Problem(record.file, "bytes", message)


def _check_stack(store: Store, stack: StackRecord, problems: list[Problem]) -> StackHeader | None:
    """The header of a stack whose bytes are those of its hash; None where it is no stack, or a
    block.
    """
    path = store.path / stack.file.file
    try:
        # one stack in memory at a time
        file = read_block(path) if stack.is_block else read_stack(path)
    except StoreError as error:
        problems.append(Problem(stack.file.file, "content", str(error)))
        return None
    texts = header_problems(file.header, stack, store.manifest)
    parameters = sum(array.size for array in file.tensors.values())
    if parameters != stack.parameters:
        texts.append(f"holds {parameters} parameters, the manifest says {stack.parameters}")
    problems += [Problem(stack.file.file, "header", f"{path}: {text}") for text in texts]
    return file.header if isinstance(file.header, StackHeader) else None


def _check_content(
    store: Store, record: FileRecord, problems: list[Problem], notes: list[str]
) -> None:
    """A router of another base is a problem; one for other stacks is whole, and no longer used."""
    try:
        if not record.file.startswith("routers/"):
            if record.file.endswith(".safetensors"):
                read_arrays(store.path / record.file)
            else:
                store.read_json(record)
            return
        trained_on = store.read_router(record).header.base_fingerprint
    except StoreError as error:
        problems.append(Problem(record.file, "content", str(error)))
        return
    if trained_on == store.manifest.base_fingerprint:
        notes += router_notes(store)
        return
    text = f"its header says base fingerprint {trained_on[:12]}, the manifest "
    text += store.manifest.base_fingerprint[:12]
    problems.append(Problem(record.file, "header", f"{store.path / record.file}: {text}"))


def _shape_differences(headers: dict[str, StackHeader]) -> Iterator[Problem]:
    """Stacks of one base have the same dims at the same path."""
    first: dict[str, tuple[str, tuple[int, int, int | None]]] = {}
    for file, header in headers.items():
        for path, p in header.projections.items():
            dims = (p.input_dims, p.output_dims, p.base_experts)
            other, known = first.setdefault(path, (file, dims))
            if known != dims:
                text = f"{path}: dims {dims}, {other} has {known} there"
                yield Problem(file, "shape", text)


def model_differences(header: StackHeader, model: Checkpoint) -> list[str]:
    """Projections of a stack that the model lacks, or has in another shape."""
    problems = []
    for path, p in header.projections.items():
        experts = () if p.base_experts is None else (p.base_experts,)
        wanted = (*experts, p.output_dims, p.input_dims)
        try:
            shape = weight_shape(model, path)
        except CheckpointError as error:
            text = str(error)
            problems.append(text if text.startswith(path) else f"{path}: {text}")
            continue
        if shape != wanted:
            problems.append(
                f"{path}: the stack is for a weight of {list(wanted)}, the model has {list(shape)}"
            )
    return problems


def _notes(store: Store, records: list[FileRecord]) -> Iterator[str]:
    content, strange = unnamed_files(store.path, {record.file for record in records})
    for path in content:
        collect = command_line("mlxstacks stacks gc", store.path)
        yield f"{path.relative_to(store.path)}: named by nothing; `{collect}` removes it"
    for path in temporaries(store.path):
        yield f"{path.relative_to(store.path)}: left by a writer that died, or is at work"
    for path in strange:
        yield f"{path.relative_to(store.path)}: extra, no file of a store; remove it yourself"
    for folder in FOLDERS:
        if (store.path / folder).is_symlink():
            yield f"{folder}: is a link"
