"""`mlxstacks stacks import`: an adapter becomes a stack of one expert, in a domain of its own.

The layouts are those of stack_export.py. Numbers of half precision move bit for bit into a stack of
the same dtype; others are rounded once, and how much is reported.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxstacks import __version__
from mlxstacks.errors import AdapterError, InputError
from mlxstacks.files.adapter_commands import adapter_format
from mlxstacks.files.adapter_match import BaseCheck, match_adapter
from mlxstacks.files.adapter_names import is_embedding_name, is_router_name
from mlxstacks.files.adapters import WEIGHTS, load_any_adapter
from mlxstacks.files.base_location import base_name, remember_places
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint, resolve_model
from mlxstacks.files.disk import user_path
from mlxstacks.files.lora_modules import Adapter, LoraModule, first_non_finite
from mlxstacks.files.manifest import FULL, DomainRecord, binding_notes, check_name, stack_name
from mlxstacks.files.peft_config import PEFT_WEIGHTS
from mlxstacks.files.peft_write import alpha_for
from mlxstacks.files.settings import AdapterFormat
from mlxstacks.files.stack_file import ProjectionShape, StackHeader, StorageDtype, file_sha256
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import Status, open_store
from mlxstacks.files.store_settings import StacksImportSettings
from mlxstacks.files.strict_json import JsonObject
from mlxstacks.ops.affine import Array, from_storage, to_storage

_SAFETENSORS: dict[StorageDtype, str] = {"float16": "F16", "bfloat16": "BF16"}
_IN_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


@dataclass(frozen=True)
class Imported:
    """An adapter taken in. exact: every number is the adapter's own; rounding: the largest relative
    change (root of sums of squares) of a tensor by the cast. base: as in `adapter_match`.
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
    domain = _domain_name(settings, adapter)
    store, base_model, base = _store_for(settings, model)
    checked = _check_base(adapter, base, model, settings.allow_base)
    if model is not None:
        match_adapter(adapter, model, allow_base=settings.allow_base)
    storage = settings.storage or _natural_storage(adapter)
    tensors, exact, rounding = stack_tensors(adapter, storage)
    header = _header(adapter, domain, base_model, base, storage)
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
            made = DomainRecord(domain, True, (record,), data=data, origin="imported")
            change.manifest = change.manifest.with_domain(made)
    return Imported(
        status="planned" if dry_run else "done",
        store_path=str(store.path if store else user_path(settings.store_path or "")),
        created=created,
        adapter_path=str(adapter.directory),
        format=adapter_format(adapter.directory),
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
    store = open_store(path)
    if model is not None:
        store.check_base(fingerprint(model, store.manifest.base_fingerprint))
    return store, store.manifest.base_model, store.manifest.base_fingerprint


def _domain_name(settings: StacksImportSettings, adapter: Adapter) -> str:
    name = settings.domain or adapter.directory.resolve().name
    try:
        return check_name(name)
    except ValueError as error:
        raise InputError(f"{error}; give --domain") from None


def _check_base(
    adapter: Adapter, base: str, model: Checkpoint | None, allow_base: bool
) -> BaseCheck:
    trained_on = adapter.base_fingerprint
    if trained_on is None:
        return "not verifiable"
    is_full = trained_on.startswith(FULL)
    if is_full != base.startswith(FULL):
        if model is None:
            return "not verifiable"
        base = fingerprint(model, trained_on)
    if trained_on == base:
        return "verified" if is_full else "verified by samples"
    if not allow_base:
        raise AdapterError(
            f"adapter {adapter.directory}: trained on the base with fingerprint {trained_on[:69]}, "
            f"the store's has {base}; use a store of that base, or --allow-base to import it "
            "marked as of another base"
        )
    return "overridden"


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


def _natural_storage(adapter: Adapter) -> StorageDtype:
    dtypes = {module.dtype for module in adapter.modules.values()}
    return "bfloat16" if dtypes == {"BF16"} else "float16"


def _header(
    adapter: Adapter, domain: str, base_model: str, base: str, storage: StorageDtype
) -> StackHeader:
    first = next(iter(adapter.modules.values()))
    weights = [adapter.directory / name for name in (WEIGHTS, PEFT_WEIGHTS)]
    return StackHeader(
        name=stack_name(domain, 1),
        domain=domain,
        round=1,
        base_model=base_model,
        base_fingerprint=base,
        projections={path: _shape_of(module) for path, module in adapter.modules.items()},
        alpha=float(alpha_for(first.scale, first.rank)),
        scale_rule="lora",
        storage=storage,
        data_sha256={"adapter": file_sha256(next(path for path in weights if path.exists()))},
        code_version=__version__,
    )


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
    problems = [text for path in adapter.modules if (text := _unfit(path))]
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


def _unfit(path: str) -> str | None:
    if is_embedding_name(path) or is_router_name(path) or not _IN_A_LAYER.search(path):
        return (
            f"{path}: stacks sit on linear and expert projections of decoder layers, not on "
            "embeddings, heads and routers; leave this module out of the adapter, or fuse it"
        )
    return None


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
        yield f"numbers were rounded to {storage}; the most changed tensor by {rounding:.2g} of it"
