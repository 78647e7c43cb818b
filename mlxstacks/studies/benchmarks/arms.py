"""The modes that benchmarks compare, opened one after the other; a model is loaded for all that can
share it.

    for arm in open_arms(("base", "routed", "fused"), settings):
        scored = arm.score(items)

base, ungated, routed, oracle and random are one model with every stack of the store in it: a mode
is a selection among them. adapter and fused are another one: the LoRA beside the packed weights is
taken off again, then fused in memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.store import Store, find_base
from mlxstacks.fuse.in_memory import attach_adapters, fuse_in_memory
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.selection import base
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing.router import load_prompt_router
from mlxstacks.studies.benchmarks.arm_model import Loaded, ModelArm, Routes
from mlxstacks.studies.benchmarks.settings import (
    ADAPTER_ARMS,
    ARMS,
    NEED_LABELS,
    STORE_ARMS,
    ArmName,
    ArmSettings,
)
from mlxstacks.studies.route.data import stack_hashes
from mlxstacks.studies.route.served import open_served, with_controls
from mlxstacks.training.modes import prepare_base


def choose_arms(settings: ArmSettings, names: Sequence[ArmName], labelled: bool) -> list[ArmName]:
    """The arms asked for (names), else all that these settings have what they need for, in the
    order of ARMS.

    labelled: whether items name a domain, which oracle and random need. Loads nothing; whether the
    store has a router is seen when it is opened.
    Raises: InputError for an arm that lacks its adapter or store.
    """
    lacking = dict.fromkeys(() if settings.adapter_path else ADAPTER_ARMS, "an adapter_path")
    lacking |= dict.fromkeys(() if settings.store_path else STORE_ARMS, "a store_path of stacks")
    for name in names:
        if name in lacking:
            raise InputError(f"arm {name} needs {lacking[name]}")
    if settings.model is None and settings.store_path is None:
        raise InputError("give a model, or a store, whose base is taken")
    if names:
        return [name for name in ARMS if name in names]
    return [n for n in ARMS if n not in lacking and (labelled or n not in NEED_LABELS)]


def open_arms(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    """The arms, each ready to be asked, one after the other.

    In this order, whatever that of `names`: base, ungated, routed, oracle, random (one model),
    adapter, fused (another one). An arm is closed when the next one is asked for, and a model is
    let go before the next one is loaded.

    Raises: InputError: whatever of model, adapter, store or router cannot be used. StoreError: the
        store is of another base, or damaged.
    """
    for group, opened in ((("base", *STORE_ARMS), _store_arms), (ADAPTER_ARMS, _adapter_arms)):
        if of_group := [name for name in ARMS if name in group and name in names]:
            yield from opened(of_group, settings)
            mx.clear_cache()


def _store_arms(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    if settings.store_path is None or names == ["base"]:
        loaded = _load(_checkpoint(settings), settings)
        with closing(ModelArm("base", loaded, Routes("base"))) as arm:
            yield arm
        return
    store = Store.open(settings.store_path)
    served = open_served(store, settings.model, settings.base)
    set_mode(served.model, base(), served.dtype)
    config = dict(_checkpoint(settings).config)
    loaded = Loaded(served.model, served.tokenizer, config, settings, served.dtype, served.notes)
    router = None
    if "routed" in names:
        router = load_prompt_router(store, served.model, served.tokenizer, settings.router_path)
        served.notes.extend(router.notes)
    if "random" in names:
        with_controls(served, stack_hashes(store, served.domains), settings.seed)
        set_mode(served.model, base(), served.dtype)
    for name in names:
        routes = Routes(name, served.domains, router, settings.hard)
        with closing(ModelArm(name, loaded, routes)) as arm:
            yield arm


def _checkpoint(settings: ArmSettings) -> Checkpoint:
    """Of the model named, else of the store's base."""
    if settings.model is not None:
        return open_checkpoint(resolve_model(settings.model))
    assert settings.store_path is not None
    return find_base(Store.open(settings.store_path), None)


def _load(checkpoint: Checkpoint, settings: ArmSettings) -> Loaded:
    model, tokenizer, config = base_model.load(checkpoint.directory, lazy=True)
    notes: list[str] = []
    in_float32 = prepare_base(model, settings.base, notes)
    model.eval()
    dtype = mx.float32 if in_float32 else None
    return Loaded(model, tokenizer, config, settings, dtype, notes)


def _adapter_arms(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    assert settings.adapter_path is not None
    checkpoint = _checkpoint(settings)
    model = str(checkpoint.directory)
    fuse = FuseSettings(
        model=model, adapter_path=(settings.adapter_path,),
        requant=settings.requant, seed=settings.seed,
    )  # fmt: skip
    loaded = _load(checkpoint, settings)
    if "adapter" in names:
        attach_adapters(loaded.model, checkpoint, fuse, loaded.dtype)
        with closing(ModelArm("adapter", loaded, Routes("adapter"))) as arm:
            yield arm
        _take_off(loaded.model)
    if "fused" in names:
        fused = fuse_in_memory(loaded.model, fuse)
        notes = [f"fused ({settings.requant}): {fused.verdict}", *fused.notes]
        details = {"requant": settings.requant, "fuse": fused.as_json()}
        with closing(ModelArm("fused", loaded, Routes("fused"), notes, details)) as arm:
            yield arm


def _take_off(model: nn.Module) -> None:
    """Put the projections that mlx-lm's LoRA layers wrap back in their places."""
    inner = [
        (path, module[name])
        for path, module in model.named_modules()
        if "lora_a" in module
        for name in ("linear", "embedding")
        if name in module
    ]
    model.update_modules(tree_unflatten(inner))
