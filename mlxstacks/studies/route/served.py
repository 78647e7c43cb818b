"""A base with every enabled stack of a store in it, and losses under any weights of its domains.

All stacks are resident, and a mode is a selection among them; the engine of the chat, which loads
what it needs, gives equal outputs. Losses are those of the evaluator of `route discover`: of a row,
one prompt and its answer as tokens, the mean over the answer's tokens. All modes see the same ones.

The control of all of them is a random stack of equal norm for each real one. A stack that was
trained on nothing, with deltas as large, says how much of a gain any perturbation of this size
would find: a search takes the lowest of several noisy losses. Equal to those of the real stack are
shapes, scale and top-k, each expert's |B A| (Frobenius), and the deviation of the router's weights.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import Row
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.router_file import RouterHeader
from mlxstacks.files.store import Store, find_base
from mlxstacks.layers.freezing import add_frozen
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.selection import Selection, StackId, base, routed
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.routing.candidate_losses import (
    CandidateLosses,
    LossCache,
    candidate,
    choose_batch_tokens,
)
from mlxstacks.routing.generation import PromptCache, Sampling, encode_prompt, generate
from mlxstacks.routing.outcomes import DomainSet, Found, Rules, search_all
from mlxstacks.studies.route.data import routed_domains, stack_hashes
from mlxstacks.training.modes import prepare_base

# No domain of a store can be called so: names hold no colon.
PREFIX = "random:"


def random_name(domain: str) -> str:
    """Name of the control of a domain, and of its stacks' domain in a model."""
    return f"{PREFIX}{domain}"


def random_hash(sha256: str, seed: int) -> str:
    """Stands for the hash of a random stack's file: all that it depends on."""
    return f"{PREFIX}{seed}:{sha256}"


def expert_norms(stack: FrozenStack) -> mx.array:
    """|B_e A_e| (Frobenius) of each pair, float32: (E,), or (M, E) of the form per_expert.

    Of latent stacks inside the latent space, which its orthonormal projections do not change.
    Worked out from r x r products: |BA|^2 = sum((B^T B) * (A A^T)); no (N, K) array is made.
    """
    a, b = _by_expert(stack)
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    grams = (b.swapaxes(-1, -2) @ b) * (a @ a.swapaxes(-1, -2))
    return mx.sqrt(mx.maximum(mx.sum(grams, axis=(-2, -1)), 0))


def random_stack(stack: FrozenStack, key: mx.array) -> FrozenStack:
    """A random stack in the place of `stack`, at its dtypes, in the domain `random_name`.

    Laws: each expert's norm is that of `stack` (to the rounding of its dtype), so zero stays zero;
    the same key gives the same stack.
    """
    key_a, key_b, key_router = mx.random.split(key, 3)
    noise_a, noise_b = (
        mx.random.normal(array.shape, key=key) * _deviation(array)
        for array, key in ((stack.lora_a, key_a), (stack.lora_b, key_b))
    )
    stack_id = StackId(random_name(stack.id.name), random_name(stack.id.domain))
    drawn = replace(stack, id=stack_id, lora_a=noise_a, lora_b=noise_b, router=None)
    norms = expert_norms(drawn)
    factor = mx.where(norms > 0, expert_norms(stack) / mx.maximum(norms, 1e-30), 0)
    # on the columns of lora_b, as it is stored
    if stack.shape.form == "per_expert":
        columns = mx.repeat(factor, stack.shape.rank, axis=-1)[:, None, :]  # (M, 1, E*R)
    else:
        columns = factor[:, None, None]  # (E, 1, 1)
    router = None
    if stack.router is not None:
        values = stack.router.astype(mx.float32)
        noise = mx.random.normal(values.shape, key=key_router)
        router = (noise * _deviation(values)).astype(stack.router.dtype)
    control = replace(
        drawn, lora_a=noise_a.astype(stack.lora_a.dtype), router=router,
        lora_b=(noise_b * columns).astype(stack.lora_b.dtype),
    )  # fmt: skip
    mx.eval(list(control.tensors().values()))
    return control


def add_random_stacks(
    model: nn.Module, hashes: Mapping[str, str], domains: Iterable[str], seed: int
) -> None:
    """Put the control of every stack of these domains into a model that serves them.

    hashes: stack name -> sha256 of its file; draws depend on it, the path and the seed alone.
    """
    wanted = set(domains)
    by_name: dict[str, dict[str, FrozenStack]] = {}
    for path, layer in stacked_layers(model):
        for stack in layer.stacks.stacks():
            if stack.id.domain in wanted:
                text = f"{random_hash(hashes[stack.id.name], seed)}/{path}"
                digest = hashlib.sha256(text.encode()).digest()
                key = mx.random.key(int.from_bytes(digest[:8], "little"))
                by_name.setdefault(stack.id.name, {})[path] = random_stack(stack, key)
    for parts in by_name.values():
        add_frozen(model, parts)


def _by_expert(stack: FrozenStack) -> tuple[mx.array, mx.array]:
    """A (..., E, R, K) and B (..., E, N, R); the leading axis of per_expert is M."""
    if stack.shape.form != "per_expert":
        return stack.lora_a, stack.lora_b
    experts, rank = stack.shape.num_experts, stack.shape.rank
    a = mx.unflatten(stack.lora_a, 1, (experts, rank))  # (M, E, R, K)
    b = mx.unflatten(stack.lora_b, 2, (experts, rank))  # (M, N, E, R)
    return a, b.swapaxes(1, 2)  # (M, E, N, R)


def _deviation(values: mx.array) -> mx.array:
    return mx.std(values.astype(mx.float32))


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
        messages = [{"role": "user", "content": prompt}]
        pieces = generate(
            self.model, self.tokenizer, encode_prompt(self.tokenizer, messages, rendering),
            PromptCache(lambda: base_model.make_prompt_cache(self.model)),
            Sampling(max_tokens=max_tokens),
        )  # fmt: skip
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


def weighted(weights: Mapping[str, float]) -> Selection:
    """Domains by weight; without any the base."""
    return routed(tuple(weights), list(weights.values())) if weights else base()


def rules_for(header: RouterHeader, domains: tuple[str, ...], threshold: float) -> Rules:
    """Of a search among the served domains, with the floor that a router was trained for."""
    chat = header.chat_domain if header.chat_domain in domains else None
    return Rules(domains, threshold, chat, header.chat_floor)


def with_controls(
    served: Served, stacks: Mapping[str, list[str]], seed: int
) -> dict[str, list[str]]:
    """Put a random stack of equal norm into the model for each of these domains' stacks; returns
    `stacks` (domain -> hashes) with what stands for the hashes of the random ones.
    """
    by_name = {stack.name: stack.file.sha256 for stack in served.store.enabled_stacks()}
    add_random_stacks(served.model, by_name, stacks, seed)
    random = {random_name(d): [random_hash(h, seed) for h in of_d] for d, of_d in stacks.items()}
    return {**stacks, **random}


class RowLosses(CandidateLosses):
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
        stacks = stack_hashes(served.store, served.domains)
        if control_seed is not None:
            stacks = with_controls(served, stacks, control_seed)
        head, note = find_output_head(served.model)
        self.notes = [note] if note else []
        numbers = "stored" if served.dtype is None else "float32"
        if batch_tokens is None:
            width = USUAL_WIDTH
            if head is not None:  # of the hidden states that it is given; nothing is evaluated
                width = head.hidden_states(served.model, mx.zeros((1, 2), mx.int32)).shape[-1]
            batch_tokens = choose_batch_tokens(width)
        super().__init__(
            served.model, rows, stacks, f"{served.store.manifest.base_fingerprint}/{numbers}",
            LossCache() if cache is None else cache, batch_tokens=batch_tokens,
            dtype=served.dtype, head=head, on_batch=on_batch,
        )  # fmt: skip

    def of(self, pairs: Sequence[tuple[int, Mapping[str, float]]]) -> list[float]:
        """[(number of the row, weights of the domains that are on)] -> mean nats per token."""
        return self([candidate(number, weights) for number, weights in pairs])

    def search(self, rules: Rules, numbers: Sequence[int]) -> list[Found]:
        """The best sets of domains for these rows."""

        def losses_of(pairs: Sequence[tuple[int, DomainSet]]) -> list[float]:
            return self.of([(numbers[place], rules.weights(on)) for place, on in pairs])

        return search_all(rules, len(numbers), losses_of)
