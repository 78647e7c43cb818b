"""`mlxstacks stacks export`: a stack of one expert is a LoRA, in another layout.

    adapter (lora_modules.py)                     stack (stack_header.py), E = 1
    dense   lora_a (K, R)     lora_b (R, N)       linear      (1, R, K)  (1, N, R)
    switch  lora_a (M, R, K)  lora_b (M, N, R)    per_expert  (M, R, K)  (M, N, R)

A stack of the form `shared` has one pair for all M experts; exported, each gets a copy. Numbers
move bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.files.adapters import write_adapter
from mlxstacks.files.disk import user_path
from mlxstacks.files.lora_modules import Adapter, LoraModule, mlx_config, unified
from mlxstacks.files.manifest import StackRecord
from mlxstacks.files.peft_write import write_peft
from mlxstacks.files.settings import AdapterFormat
from mlxstacks.files.stack_file import ProjectionShape, StackFile, raw_numbers
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import Status, open_store
from mlxstacks.files.store_settings import StacksExportSettings


@dataclass(frozen=True)
class Exported:
    """An adapter written from a stack. copies: pairs that are repeated for every base expert."""

    status: Status
    store_path: str
    stack: str
    save_path: str
    format: AdapterFormat
    modules: int
    parameters: int
    copies: int
    notes: tuple[str, ...]


def export_stack(settings: StacksExportSettings, dry_run: bool = False) -> Exported:
    """Write a stack of one expert as an adapter.

    Law: importing it again gives a stack with equal deltas (bit for bit but for the form `shared`).
    Raises: InputError for a stack with a token router or latent projections, with the reason;
        StoreError for a damaged file; TargetError as `write_adapter`.
    """
    store = open_store(settings.store_path)
    record = _named_stack(store, settings.stack)
    if settings.save_path is None:
        raise InputError("no target given: mlxstacks stacks export STORE STACK OUT")
    target = user_path(settings.save_path)
    if target.resolve().is_relative_to(store.path):
        raise InputError(f"{target}: lies inside the store; choose a directory outside of it")
    stack = store.read_stack(record)
    base = settings.base_model_name or store.manifest.base_model
    adapter = adapter_of(stack, store.path, base)
    if not dry_run:
        if settings.to == "peft":
            whole = settings.peft_model == "whole"
            write_peft(adapter, target, base, settings.force, whole)
        else:
            write_adapter(adapter, target, settings.force)
    return Exported(
        status="planned" if dry_run else "done",
        store_path=str(store.path),
        stack=record.name,
        save_path=str(target),
        format=settings.to,
        modules=len(adapter.modules),
        parameters=sum(module.parameters for module in adapter.modules.values()),
        copies=sum(p.form == "shared" for p in stack.header.projections.values()),
        notes=tuple(_export_notes(store, record)),
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
            "stacks trained with num_experts=1 can be exported; serve this one beside the base"
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


def _export_notes(store: Store, record: StackRecord) -> Iterator[str]:
    domain = store.domain_named(record.domain)
    below = [*domain.trained_on, *(s.name for s in domain.stacks if s.round < record.round)]
    if below:
        yield (
            f"{record.name} was trained on top of {', '.join(below)}; alone on the base it does "
            "something else than in the store"
        )
