"""A base with every enabled stack of a store in it: what `route explain`, `evaluate` and `check`
ask. All stacks are resident, and a mode is a selection among them; the engine of the chat, which
loads what it needs, gives equal outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.base_location import find_base
from mlxstacks.files.store import Store
from mlxstacks.layers.selection import Selection, base, routed, ungated
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing.generation import Sampling, encode_prompt, generate
from mlxstacks.routing.prompt_cache import PromptCache
from mlxstacks.routing.route import Route
from mlxstacks.studies.route.data import routed_domains
from mlxstacks.training.prepare_base import prepare_base

Messages = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Served:
    """dtype: that frozen stacks compute in, as in `set_mode`."""

    model: nn.Module
    tokenizer: Any
    store: Store
    dtype: mx.Dtype | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def domains(self) -> tuple[str, ...]:
        """Enabled ones with stacks, in the store's order."""
        return routed_domains(self.store)

    def answer(
        self, prompt: str, selection: Selection, max_tokens: int, rendering: Rendering = PLAIN
    ) -> str:
        """The greedy answer to one question, in the model's chat template, without the end mark."""
        set_mode(self.model, selection, self.dtype)
        asked: Messages = [{"role": "user", "content": prompt}]
        pieces = generate(
            self.model,
            self.tokenizer,
            encode_prompt(self.tokenizer, asked, rendering),
            PromptCache(lambda: base_model.make_prompt_cache(self.model)),
            Sampling(max_tokens=max_tokens),
        )
        return "".join(piece.text for piece in pieces)


def open_served(store: Store, model: str | None, base_numbers: str) -> Served:
    """Load base and stacks. model: a path or hub id; None: what the store names. base_numbers: the
    setting `base`.

    Raises: InputError: no model is found, no enabled stack. StoreError: another base, damaged file.
    """
    if not store.enabled_stacks():
        raise InputError(f"{store.path}: holds no enabled stack; there is nothing to route to")
    notes: list[str] = []
    checkpoint = find_base(store, model, notes)
    loaded, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
    in_float32 = prepare_base(loaded, base_numbers, notes)
    serve(loaded, store, base_fingerprint=store.manifest.base_fingerprint)
    return Served(loaded, tokenizer, store, mx.float32 if in_float32 else None, notes)


def selection_of(route: Route) -> Selection:
    """The mode of a fully resident model in which it answers as the route says."""
    if route.mode == "base":
        return base()
    return ungated() if route.mode == "ungated" else weighted(route.weights)


def weighted(weights: Mapping[str, float]) -> Selection:
    """Domains by weight; without any the base."""
    return routed(tuple(weights), list(weights.values())) if weights else base()
