"""From settings to a model that answers: load the base, check that the stacks are its, open them.

    engine = open_routed(GenerateSettings(model=..., store_path=..., routed=True))

Weights of the base are read when they are first used, those of stacks when a route asks for them.
"""

from typing import Any

import mlx.core as mx

from mlxstacks import base_model, memory
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.store import Store, find_base
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.fuse.unfused import attach_adapters
from mlxstacks.routing.chat_settings import AnswerSettings
from mlxstacks.routing.engine import RoutedModel
from mlxstacks.routing.gaps import GapLog
from mlxstacks.routing.generation import Sampling
from mlxstacks.routing.resident import Resident
from mlxstacks.routing.router import PromptRouter, load_prompt_router
from mlxstacks.training.prepare_base import prepare_base

# Longer contexts are what tokenizers say that know none: transformers writes 1e30.
_MOST_CONTEXT = 2**31


def open_routed(settings: AnswerSettings) -> RoutedModel:
    """The model of the settings with its stacks; the router too, where they ask for it.

    Raises: InputError: model, store or router cannot be used, an unknown domain is pinned.
        StoreError: the store is of another base, or damaged.
    """
    if settings.wants_store and settings.store_path is None:
        raise InputError(
            "routed, ungated, pin and compare need stacks; give --store-path, a store that "
            "`mlxstacks stack` made for this model"
        )
    store = None if settings.store_path is None else Store.open(settings.store_path)
    notes: list[str] = []
    if store is not None:
        checkpoint = find_base(store, settings.model, notes)
    elif settings.model is not None:
        checkpoint = open_checkpoint(resolve_model(settings.model))
    else:
        raise InputError("give a model")
    model, tokenizer, config = base_model.load(checkpoint.directory, lazy=True)
    dtype = mx.float32 if prepare_base(model, settings.base, notes) else None
    model.eval()
    if settings.adapter_path:
        notes += attach_adapters(model, checkpoint, _adapters(settings), dtype)
    resident = None
    if store is not None:
        resident = Resident(model, store, budget_bytes=_budget(settings), dtype=dtype)

    def open_router() -> PromptRouter:
        if store is None:
            raise InputError("there is no store, so no router; give --store-path")
        router = load_prompt_router(store, model, tokenizer, settings.router_path)
        notes.extend(router.notes)
        return router

    engine = RoutedModel(
        model, tokenizer, store=store, resident=resident, open_router=open_router,
        context_tokens=context_tokens(config, tokenizer), hard=settings.hard,
        allow_special=settings.allow_special, mode=settings.mode, pins=settings.pin,
        gap_log=_gap_log(settings), notes=notes,
        adapters=[user_path(path).resolve().name for path in settings.adapter_path],
    )  # fmt: skip
    engine.check_domains(settings.pin) if settings.pin else None
    if settings.routed or settings.compare:
        _ = engine.router  # a router that does not fit is bad input now, not at the first prompt
    return engine


def _adapters(settings: AnswerSettings) -> FuseSettings:
    """The adapters as the fuse reads them."""
    return FuseSettings(
        model=settings.model, adapter_path=settings.adapter_path,
        peft_layout=settings.peft_layout, allow_base=settings.allow_base,
    )  # fmt: skip


def context_tokens(config: dict[str, Any], tokenizer: Any) -> int | None:
    """Most tokens a model was made for: of its config, else of its tokenizer; None where neither
    says. A rope that is stretched in the config raises it to factor times the original.
    """
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        limit = _count(part.get("max_position_embeddings"))
        if limit is None:
            continue
        rope = part.get("rope_scaling") or part.get("rope_parameters")
        rope = rope if isinstance(rope, dict) else {}
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if isinstance(factor, int | float) and isinstance(original, int | float):
            limit = max(limit, int(factor * original))
        return limit
    return _count(getattr(tokenizer, "model_max_length", None))


def _count(value: Any) -> int | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if usable and 0 < value < _MOST_CONTEXT else None


def _budget(settings: AnswerSettings) -> int | None:
    """Bytes for stacks: what was asked for, else a quarter of the memory, so that a store of any
    size can be served; None where the memory is not known.
    """
    if settings.budget is not None:
        return settings.budget
    device = memory.device()
    whole = device.working_set_bytes or device.memory_bytes
    return None if whole is None else whole // 4


def _gap_log(settings: AnswerSettings) -> GapLog | None:
    return None if settings.gap_log == "none" else GapLog(settings.gap_log)


def sampling_of(settings: AnswerSettings) -> Sampling:
    """How the settings choose tokens."""
    return Sampling(settings.temp, settings.top_p, settings.max_tokens,
                    settings.repetition_penalty, settings.seed, settings.min_p,
                    settings.top_k)  # fmt: skip
