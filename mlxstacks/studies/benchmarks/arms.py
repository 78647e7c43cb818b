"""The modes that benchmarks compare, opened one after the other; a model is loaded for all that can
share it.

    for arm in open_arms(("base", "routed", "fused"), settings):
        scored = arm.score(items)

base, ungated, routed, oracle and random are one model with every stack of the store in it: a mode
is a selection among them. adapter and fused are another one: the LoRA beside the packed weights is
taken off again, then fused in memory.
"""

import difflib
from collections.abc import Iterator, Sequence

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


def available_arms(settings: ArmSettings, labelled: bool = True) -> tuple[ArmName, ...]:
    """Arms that these settings have what they need for, in the order of ARMS.

    labelled: whether items name a domain, which oracle and random need. Loads nothing; whether the
    store has a router is seen when it is opened.
    """
    return tuple(
        name
        for name in ARMS
        if (settings.adapter_path or name not in ADAPTER_ARMS)
        and (settings.store_path or name not in STORE_ARMS)
        and (labelled or name not in NEED_LABELS)
    )


def check_arms(names: Sequence[str], settings: ArmSettings) -> tuple[ArmName, ...]:
    """The arms asked for in the order of ARMS. Raises: InputError for an unknown name (the nearest
    is named), one asked for twice, one that lacks its adapter or store, none at all. Loads nothing.
    """
    if not names:
        raise InputError(f"no arms; give some of {', '.join(ARMS)}")
    for name in names:
        if name not in ARMS:
            close = difflib.get_close_matches(name, ARMS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InputError(f"no arm {name!r}{hint} (there are: {', '.join(ARMS)})")
        if names.count(name) > 1:
            raise InputError(f"arm {name} is asked for {names.count(name)} times")
        if name in ADAPTER_ARMS and not settings.adapter_path:
            raise InputError(f"arm {name} needs an adapter; give adapter_path")
        if name in STORE_ARMS and not settings.store_path:
            raise InputError(f"arm {name} needs a store of stacks; give store_path")
    if settings.model is None and settings.store_path is None:
        raise InputError("give a model, or a store, whose base is taken")
    return tuple(name for name in ARMS if name in names)


def open_arms(names: Sequence[str], settings: ArmSettings) -> Iterator[ModelArm]:
    """The arms, each ready to be asked, one after the other.

    In this order, whatever that of `names`: base, ungated, routed, oracle, random (one model),
    adapter, fused (another one). An arm is closed when the next one is asked for, and a model is
    let go before the next one is loaded.

    Raises: InputError: as `check_arms`, and whatever of model, adapter, store or router cannot be
        used. StoreError: the store is of another base, or damaged.
    """
    asked = check_arms(names, settings)  # now, not when the first arm is asked for
    return _opened(asked, settings)


def _opened(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    store_arms = [name for name in names if name not in ADAPTER_ARMS]
    adapter_arms = [name for name in names if name in ADAPTER_ARMS]
    if store_arms:
        yield from _store_arms(store_arms, settings)
        mx.clear_cache()
    if adapter_arms:
        yield from _adapter_arms(adapter_arms, settings)
        mx.clear_cache()


def _given(arm: ModelArm) -> Iterator[ModelArm]:
    """An arm, closed once the next one is asked for."""
    try:
        yield arm
    finally:
        arm.close()


# --- base and stacks ------------------------------------------------------------------------------


def _store_arms(names: Sequence[ArmName], settings: ArmSettings) -> Iterator[ModelArm]:
    if settings.store_path is None or names == ["base"]:
        loaded = _load(_checkpoint(settings), settings)
        yield from _given(ModelArm("base", loaded, Routes("base")))
        return
    store = Store.open(settings.store_path)
    served = open_served(store, settings.model, settings.base)
    set_mode(served.model, base(), served.dtype)
    config = dict(_checkpoint(settings).config)
    loaded = Loaded(
        served.model, served.tokenizer, config, settings, served.dtype, served.notes
    )  # fmt: skip
    router = None
    if "routed" in names:
        router = load_prompt_router(store, served.model, served.tokenizer, settings.router_path)
        served.notes.extend(router.notes)
    if "random" in names:
        with_controls(served, stack_hashes(store, served.domains), settings.seed)
        set_mode(served.model, base(), served.dtype)
    for name in names:
        routes = Routes(name, served.domains, router, settings.hard)
        yield from _given(ModelArm(name, loaded, routes))


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


# --- an adapter -----------------------------------------------------------------------------------


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
        yield from _given(ModelArm("adapter", loaded, Routes("adapter")))
        _take_off(loaded.model)
    if "fused" in names:
        fused = fuse_in_memory(loaded.model, fuse)
        notes = [f"fused ({settings.requant}): {fused.verdict}", *fused.notes]
        details = {"requant": settings.requant, "fuse": fused.as_json()}
        yield from _given(ModelArm("fused", loaded, Routes("fused"), notes, details))


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
