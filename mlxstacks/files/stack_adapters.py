"""`mlxstacks stacks export | import`: a stack of one expert is a LoRA, in another layout; and any
domain a store of its own.

    adapter (lora_modules.py)                     stack (stack_file.py), E = 1
    dense   lora_a (K, R)     lora_b (R, N)       linear      (1, R, K)  (1, N, R)
    switch  lora_a (M, R, K)  lora_b (M, N, R)    per_expert  (M, R, K)  (M, N, R)

Exported, numbers move bit for bit; a stack of the form `shared` has one pair for all M experts, and
each gets a copy. Imported, an adapter becomes a domain of its own: numbers of half precision move
bit for bit into a stack of the same dtype; others are rounded once, and how much is reported.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np

from mlxstacks import __version__
from mlxstacks.errors import AdapterError, InputError, StoreError
from mlxstacks.files.adapter_commands import adapter_format
from mlxstacks.files.adapters import (
    WEIGHTS,
    BaseCheck,
    compare_base,
    load_any_adapter,
    match_adapter,
    write_adapter,
)
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.lora_modules import Adapter, LoraModule, first_non_finite, mlx_config, unified
from mlxstacks.files.manifest import (
    FULL,
    DomainRecord,
    StackRecord,
    binding_notes,
    check_name,
    stack_name,
)
from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.files.peft_config import PEFT_WEIGHTS
from mlxstacks.files.peft_export import alpha_for, write_peft
from mlxstacks.files.peft_layout import is_embedding_name, is_router_name
from mlxstacks.files.settings import (
    AdapterFormat,
    StacksExportSettings,
    StacksImportSettings,
    StacksVerifySettings,
)
from mlxstacks.files.side_files import clone_or_link
from mlxstacks.files.stack_file import (
    ProjectionShape,
    StackFile,
    StackHeader,
    StorageDtype,
    file_sha256,
    raw_numbers,
)
from mlxstacks.files.store import Store, base_name, remember_places
from mlxstacks.files.store_commands import Status, company_notes, open_store, part_of
from mlxstacks.files.store_files import MANIFEST, file_of
from mlxstacks.files.store_verify import verify_store
from mlxstacks.files.strict_json import JsonObject
from mlxstacks.ops.affine import Array, from_storage, to_storage


@dataclass(frozen=True)
class Exported:
    """An adapter written from a stack, or a store. copies: pairs that are repeated for every base
    expert. modules: of an adapter.
    """

    status: Status
    store_path: str
    stack: str
    save_path: str
    format: AdapterFormat | Literal["store"]
    modules: int
    parameters: int
    copies: int
    notes: tuple[str, ...]


def export_stack(settings: StacksExportSettings, dry_run: bool = False) -> Exported:
    """Write a stack of one expert as an adapter, or domains as a store.

    Law: importing it again gives a stack with equal deltas (bit for bit but for the form `shared`);
        the files of a store are the same bytes.
    Raises: InputError for a stack with a token router or latent projections, or a capability block,
        with the reason; StoreError for a damaged file; TargetError as `write_adapter`.
    """
    store = open_store(settings.store_path)
    record = None if settings.to == "store" else _named_stack(store, settings.stack)
    if settings.save_path is None:
        raise InputError("no target given: mlxstacks stacks export STORE STACK OUT")
    target = user_path(settings.save_path)
    if target.resolve().is_relative_to(store.path):
        raise InputError(f"{target}: lies inside the store; choose a directory outside of it")
    if record is None:
        return _export_store(store, settings, target, dry_run)
    if record.is_block:
        raise InputError(
            f"{record.name} is a capability block: decoder layers of its own, from the embeddings "
            "to the base's output. No weight of the base can take it in, so it is neither fused "
            "nor an adapter; --to store writes it as a store"
        )
    stack = store.read_stack(record)
    base = settings.base_model_name or store.manifest.base_model
    adapter = adapter_of(stack, store.path, base)
    if not dry_run:
        if settings.to == "peft":
            whole = settings.peft_model == "whole"
            write_peft(adapter, target, base, settings.force, whole)
        else:
            write_adapter(adapter, target, settings.force)
    domain = store.domain_named(record.domain)
    below = [*domain.trained_on, *(s.name for s in domain.stacks if s.round < record.round)]
    note = (
        f"{record.name} was trained on top of {', '.join(below)}; alone on the base it does "
        "something else than in the store"
    )
    return Exported(
        status="planned" if dry_run else "done",
        store_path=str(store.path),
        stack=record.name,
        save_path=str(target),
        format=settings.to,
        modules=len(adapter.modules),
        parameters=sum(module.parameters for module in adapter.modules.values()),
        copies=sum(p.form == "shared" for p in stack.header.projections.values()),
        notes=(note,) if below else (),
    )


def _export_store(
    store: Store, settings: StacksExportSettings, target: Path, dry_run: bool
) -> Exported:
    manifest = store.manifest
    if settings.stack is not None:
        manifest = part_of(manifest, [settings.stack])
    records = list(manifest.files())
    if not dry_run:
        needed = sum(record.nbytes for record in records)
        with staged_directory(target, force=settings.force, needed_bytes=needed) as staged:
            for record in records:
                (staged / record.file).parent.mkdir(exist_ok=True)
                clone_or_link(file_of(store.path, record), staged / record.file)
            write_json(staged / MANIFEST, manifest.document(), sort_keys=True)
            if problems := verify_store(StacksVerifySettings(store_path=str(staged))).problems:
                listed = ", ".join(sorted({problem.file for problem in problems}))
                raise StoreError(f"{store.path}: not exported, for it is damaged: {listed}")
    notes = company_notes(manifest)
    if store.manifest.router is not None and manifest.router is None:
        notes.append("The router, which is of all domains, is not in it; --pin and --ungated work.")
    return Exported(
        status="planned" if dry_run else "done",
        store_path=str(store.path),
        stack=", ".join(domain.name for domain in manifest.domains),
        save_path=str(target),
        format="store",
        modules=0,
        parameters=sum(stack.parameters for stack in manifest.stacks),
        copies=0,
        notes=tuple(notes),
    )


def adapter_of(stack: StackFile, directory: Path, base_model: str | None = None) -> Adapter:
    """A stack of one expert as an adapter in mlx-lm's terms, at one rank and one scale.

    directory: where it came from, for messages. Raises: InputError where it is no plain LoRA.
    """
    header = stack.header
    experts = max(p.num_experts for p in header.projections.values())
    if experts > 1:
        raise InputError(
            f"stack {header.name} has {experts} experts a projection and a router that chooses "
            "among them for each token: there is no one delta that an adapter could hold. Only "
            "stacks trained with num_experts=1 can be exported; serve this one next to the base"
        )
    if any(p.latent_dim is not None for p in header.projections.values()):
        raise InputError(
            f"stack {header.name} works behind latent projections that it shares with other "
            "stacks; an adapter has no place for them"
        )
    modules = unified(
        _module_of(path, shape, stack.tensors) for path, shape in header.projections.items()
    )
    config = mlx_config(modules, base_model, header.base_fingerprint)
    return Adapter(directory, config, modules, {})


def _module_of(path: str, shape: ProjectionShape, tensors: dict[str, mx.array]) -> LoraModule:
    array = tensors[f"{path}.lora_a"]
    a, b = raw_numbers(array), raw_numbers(tensors[f"{path}.lora_b"])
    if shape.form == "linear":
        a, b = a[0].T, b[0].T  # (K, R), (R, N)
    elif shape.form == "shared":
        copies = shape.base_experts or 1
        a, b = np.repeat(a, copies, axis=0), np.repeat(b, copies, axis=0)  # (M, R, K), (M, N, R)
    dtype = "BF16" if array.dtype == mx.bfloat16 else "F16"
    return LoraModule(path, a, b, dtype, shape.scale)


def _named_stack(store: Store, name: str | None) -> StackRecord:
    """A stack by its name, or the only one of a domain."""
    if name is None:
        known = ", ".join(stack.name for stack in store.manifest.stacks) or "none"
        raise InputError(f"no stack given (there are: {known})")
    domain = store.manifest.domain_named(name)
    if domain is None:
        return store.stack_named(name)
    if len(domain.stacks) != 1:
        listed = ", ".join(stack.name for stack in domain.stacks) or "none"
        raise InputError(f"domain {name} has {len(domain.stacks)} stacks; name one: {listed}")
    return domain.stacks[0]


_SAFETENSORS: dict[StorageDtype, str] = {"float16": "F16", "bfloat16": "BF16"}
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


@dataclass(frozen=True)
class Imported:
    """An adapter taken in. exact: every number is the adapter's own; rounding: the largest relative
    change (root of sums of squares) of a tensor by the cast. base: as in `adapters.match_adapter`.
    """

    status: Status
    store_path: str
    created: bool
    adapter_path: str
    format: AdapterFormat
    domain: str
    stack: str
    modules: int
    parameters: int
    storage: StorageDtype
    exact: bool
    rounding: float
    base: BaseCheck
    notes: tuple[str, ...]


def import_adapter(settings: StacksImportSettings, dry_run: bool = False) -> Imported:
    """Take an adapter in as the one stack of a new domain, at the end of the store.

    A store that does not exist is made where the base is given (`model`).
    Raises: InputError: the domain is there, or names nothing. AdapterError: another base without
        `allow_base`, modules that no stack can sit on, numbers too large for the storage dtype.
    """
    if settings.adapter_path is None:
        raise InputError("no adapter given: mlxstacks stacks import STORE ADAPTER --domain NAME")
    model = None if settings.model is None else open_checkpoint(resolve_model(settings.model))
    adapter = load_any_adapter(settings.adapter_path, settings.peft_layout, model)
    try:
        domain = check_name(settings.domain or adapter.directory.resolve().name)
    except ValueError as error:
        raise InputError(f"{error}; give --domain") from None
    store, base_model, base = _store_for(settings, model)
    checked = _check_base(adapter, base, model, settings.allow_base)
    if model is not None:
        match_adapter(adapter, model, allow_base=settings.allow_base)
    dtypes = {module.dtype for module in adapter.modules.values()}
    storage = settings.storage or ("bfloat16" if dtypes == {"BF16"} else "float16")
    tensors, exact, rounding = stack_tensors(adapter, storage)
    first = next(iter(adapter.modules.values()))
    format_ = adapter_format(adapter.directory)
    weights = adapter.directory  # a GGUF file is the adapter
    if format_ != "gguf":
        weights /= PEFT_WEIGHTS if format_ == "peft" else WEIGHTS
    header = StackHeader(
        name=stack_name(domain, 1),
        domain=domain,
        round=1,
        base_model=base_model,
        base_fingerprint=base,
        projections={path: _shape_of(module) for path, module in adapter.modules.items()},
        alpha=float(alpha_for(first.scale, first.rank)),
        scale_rule="lora",
        storage=storage,
        data_sha256={"adapter": file_sha256(weights)},
        code_version=__version__,
    )
    if store is not None:
        _check_new(store, header)
    created = store is None
    if not dry_run:
        if store is None:
            assert settings.store_path is not None
            store = Store.create(settings.store_path, base_model, base)
        if settings.model is not None:
            remember_places(store, settings.model)
        with store.change("import", domain=domain) as change:
            _check_new(store, header)
            record = change.add_stack(tensors, header)
            data: JsonObject = {"adapter": adapter.directory.resolve().name, "base": checked,
                    "rounding": rounding}  # fmt: skip
            if checked == "overridden":
                data["adapter_base_fingerprint"] = str(adapter.base_fingerprint)[:69]
            imported = DomainRecord(domain, True, (record,), data=data, origin="imported")
            change.manifest = change.manifest.with_domain(imported)
    return Imported(
        status="planned" if dry_run else "done",
        store_path=str(store.path if store else user_path(settings.store_path or "")),
        created=created,
        adapter_path=str(adapter.directory),
        format=format_,
        domain=domain,
        stack=header.name,
        modules=len(adapter.modules),
        parameters=sum(module.parameters for module in adapter.modules.values()),
        storage=storage,
        exact=exact,
        rounding=rounding,
        base=checked,
        notes=tuple(_import_notes(adapter, checked, exact, rounding, storage)),
    )


def _store_for(
    settings: StacksImportSettings, model: Checkpoint | None
) -> tuple[Store | None, str, str]:
    """The store (None: to be made), its base's name and fingerprint."""
    path = settings.store_path
    if path is not None and not user_path(path).exists():
        if model is None:
            raise InputError(f"{path}: no store there; --model makes one for that base")
        return None, base_name(settings.model or ""), fingerprint(model)
    store = open_store(path, blocks=False)
    if model is not None:
        store.check_base(fingerprint(model, store.manifest.base_fingerprint))
    return store, store.manifest.base_model, store.manifest.base_fingerprint


def _check_base(
    adapter: Adapter, base: str, model: Checkpoint | None, allow_base: bool
) -> BaseCheck:
    trained_on = adapter.base_fingerprint
    if trained_on is not None and trained_on.startswith(FULL) != base.startswith(FULL):
        if model is None:
            return "not verifiable"
        base = fingerprint(model, trained_on)
    return compare_base(adapter, base, allow_base)


def _check_new(store: Store, header: StackHeader) -> None:
    """Raises: InputError where the name is taken; AdapterError where dims differ from a stack's."""
    if store.manifest.domain_named(header.domain) is not None:
        raise InputError(f"{store.path}: domain {header.domain} is there; give another --domain")
    names = {stack.name.casefold() for stack in store.manifest.stacks}
    if header.name.casefold() in names or header.domain.casefold() in names:
        raise InputError(f"{store.path}: a stack has that name; give another --domain")
    problems = []
    for record in store.manifest.stacks:
        other = store.read_header(record).projections
        for path in header.projections.keys() & other.keys():
            mine, theirs = _dims(header.projections[path]), _dims(other[path])
            if mine != theirs:
                problems.append(f"{path}: dims {mine}, {record.name} has {theirs} there")
    if problems:
        raise AdapterError("\n  ".join(["the adapter is of another base:", *sorted(problems)[:8]]))


def _dims(shape: ProjectionShape) -> tuple[int, int, int | None]:
    return shape.input_dims, shape.output_dims, shape.base_experts


def _shape_of(module: LoraModule) -> ProjectionShape:
    a, b = module.lora_a.shape, module.lora_b.shape
    if module.is_switch:
        dims = {"input_dims": a[2], "output_dims": b[1], "base_experts": a[0]}
        return ProjectionShape("per_expert", 1, module.rank, 1, module.scale, **dims)
    return ProjectionShape("linear", 1, module.rank, 1, module.scale, a[0], b[1])


def stack_tensors(
    adapter: Adapter, storage: StorageDtype
) -> tuple[dict[str, mx.array], bool, float]:
    """The adapter's numbers in a stack's layout, whether they are its own bit for bit, and the
    largest relative change of a tensor by the cast.

    Raises: AdapterError listing modules that no stack can sit on, and numbers too large.
    """
    outside = [
        path
        for path in adapter.modules
        if is_embedding_name(path) or is_router_name(path) or not _IN_A_LAYER.search(path)
    ]
    problems = []
    if outside:
        train = ""
        if inside := sorted(adapter.modules.keys() - {*outside}):
            first, given = adapter.modules[inside[0]], adapter.config.get("lora_parameters")
            dropout = given.get("dropout", 0.0) if isinstance(given, dict) else 0.0
            keys = ", ".join(sorted({_IN_A_LAYER.split(path)[-1] for path in inside}))
            train = (
                f"train it again with `lora_parameters: {{rank: {first.rank}, scale: "
                f"{first.scale:g}, dropout: {dropout}, keys: [{keys}]}}`, or "
            )
        more = f" and {len(outside) - 4:,} more" if len(outside) > 4 else ""
        problems.append(
            f"{', '.join(outside[:4])}{more}: stacks sit on linear and expert projections of "
            "decoder layers, not on embeddings, heads and routers; "
            f"{train}fuse the adapter into its base (`mlxstacks fuse`)"
        )
    tensors: dict[str, mx.array] = {}
    rounding = [0.0]
    for path, module in adapter.modules.items():
        for leaf, raw in (("lora_a", module.lora_a), ("lora_b", module.lora_b)):
            cast, change = _cast(raw, module.dtype, _SAFETENSORS[storage])
            if cast is None:
                largest = np.max(np.abs(from_storage(raw, module.dtype)))
                problems.append(
                    f"{path}.{leaf}: reaches {largest:.3g}, too large for {storage}; import it "
                    "with --storage bfloat16"
                )
                continue
            rounding.append(change)
            laid = cast if module.is_switch else cast.T[None]
            array = mx.array(np.ascontiguousarray(laid))
            tensors[f"{path}.{leaf}"] = array.view(mx.bfloat16) if storage == "bfloat16" else array
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems[:20])
        raise AdapterError(f"adapter {adapter.directory} cannot become a stack:{lines}")
    return tensors, not any(rounding), max(rounding)


def _cast(raw: Array, dtype: str, storage: str) -> tuple[Array | None, float]:
    """Raw numbers at the storage dtype (None where they overflow) and their relative change."""
    if dtype == storage:
        return raw, 0.0
    wide = from_storage(raw, dtype)
    with np.errstate(over="ignore"):
        cast = to_storage(wide, storage)
    if first_non_finite(cast, storage) is not None:
        return None, 0.0
    exact = wide.astype(np.float64)
    size = float(np.sqrt(np.sum(exact**2)))
    error = float(np.sqrt(np.sum((from_storage(cast, storage) - exact) ** 2)))
    return cast, error / size if size else 0.0


def _import_notes(
    adapter: Adapter, base: BaseCheck, exact: bool, rounding: float, storage: str
) -> Iterator[str]:
    if base == "not verifiable":
        reason = (
            "adapter and store have fingerprints of two kinds, which --model can compare"
            if adapter.base_fingerprint
            else "the adapter names no base"
        )
        yield f"{reason}: names and shapes alone were checked"
    if base == "verified by samples":
        yield from (f"the adapter is {note}" for note in binding_notes(adapter.base_fingerprint))
    if base == "overridden":
        yield "the adapter was trained on another base; the store keeps that mark"
    if not exact:
        percent = f"{100 * rounding:.2g}%"
        yield f"numbers were rounded to {storage}, by at most {percent} of a tensor's norm"
