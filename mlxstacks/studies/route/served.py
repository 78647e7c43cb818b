"""A base with every enabled stack of a store in it, and losses under any weights of its domains.

All stacks are resident, and a mode is a selection among them; the engine of the chat, which loads
what it needs, gives equal outputs. Losses are those of the evaluator of `route discover`: of a row,
one prompt and its answer as tokens, the mean over the answer's tokens. All modes see the same ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import Row
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.store import Store, find_base
from mlxstacks.layers.output_head import OutputHead, find_output_head
from mlxstacks.layers.selection import Selection, base, routed, ungated
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing.candidate_losses import (
    CandidateLosses,
    LossCache,
    candidate,
    choose_batch_tokens,
)
from mlxstacks.routing.generation import Sampling, encode_prompt, generate
from mlxstacks.routing.outcomes import DomainSet, Found, Rules, search_all
from mlxstacks.routing.prompt_cache import PromptCache
from mlxstacks.routing.random_stack import add_random_stacks, random_hash, random_name
from mlxstacks.routing.route import Route
from mlxstacks.studies.route.data import routed_domains, stack_hashes
from mlxstacks.training.prepare_base import prepare_base

# Of a model whose head, and so whose width, is not found.
USUAL_WIDTH = 4096


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
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        pieces = generate(
            self.model,
            self.tokenizer,
            encode_prompt(self.tokenizer, messages, rendering),
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


def with_controls(
    served: Served, stacks: Mapping[str, list[str]], seed: int
) -> dict[str, list[str]]:
    """Put a random stack of equal norm into the model for each of these domains' stacks; returns
    `stacks` (domain -> hashes) with what stands for the hashes of the random ones.
    """
    by_name = {stack.name: stack.file.sha256 for stack in served.store.enabled_stacks()}
    add_random_stacks(served.model, by_name, stacks, seed)
    return {
        **stacks,
        **{random_name(d): [random_hash(h, seed) for h in of_d] for d, of_d in stacks.items()},
    }


class RowLosses:
    """Losses of rows on a model that serves a store.

    cache: of losses that are known. control_seed: also put random stacks of equal norm in, under
    the names `random_stack.random_name` gives. batch_tokens: None: by the model's width and the
    device. on_batch: called with the number of losses made. notes: of what the model lacks.
    """

    def __init__(
        self,
        served: Served,
        rows: Sequence[Row],
        cache: LossCache | None = None,
        control_seed: int | None = None,
        batch_tokens: int | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> None:
        self.rows = rows
        stacks = stack_hashes(served.store, served.domains)
        if control_seed is not None:
            stacks = with_controls(served, stacks, control_seed)
        head, note = find_output_head(served.model)
        self.notes = [note] if note else []
        numbers = "stored" if served.dtype is None else "float32"
        self.losses = CandidateLosses(
            served.model,
            rows,
            stacks,
            f"{served.store.manifest.base_fingerprint}/{numbers}",
            LossCache() if cache is None else cache,
            batch_tokens=batch_tokens or choose_batch_tokens(_width(served.model, head)),
            dtype=served.dtype,
            head=head,
            on_batch=on_batch,
        )

    def of(self, pairs: Sequence[tuple[int, Mapping[str, float]]]) -> list[float]:
        """[(number of the row, weights of the domains that are on)] -> mean nats a token."""
        return self.losses([candidate(number, weights) for number, weights in pairs])

    def search(self, rules: Rules, numbers: Sequence[int]) -> list[Found]:
        """The best sets of domains for these rows."""

        def losses_of(pairs: Sequence[tuple[int, DomainSet]]) -> list[float]:
            return self.of([(numbers[place], rules.weights(on)) for place, on in pairs])

        return search_all(rules, len(numbers), losses_of)


def _width(model: nn.Module, head: OutputHead | None) -> int:
    """Of the hidden states that the head is given; nothing is evaluated."""
    if head is None:
        return USUAL_WIDTH
    return int(head.hidden_states(model, mx.zeros((1, 2), mx.int32)).shape[-1])
