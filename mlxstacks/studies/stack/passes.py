"""Prompts through a model with frozen stacks: where each stack routes them, and what it writes.

One pass a prompt, all stacks at weight 1, nothing in training: the inputs of every router are those
of the model as it is served without gates. Gates and deltas are computed beside the pass, from the
input that the projection sees, by the functions that serve them.

Letters: n prompts, P projections of a stack, E experts, N output dims.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.base_model import gated_delta_installed
from mlxstacks.errors import StoreError
from mlxstacks.layers.gates import router_logits, top_k_softmax
from mlxstacks.layers.moe_lora import Rows
from mlxstacks.layers.packed import FrozenStack, PackedStacks
from mlxstacks.layers.selection import Selection
from mlxstacks.layers.stacked import StackedLayer, set_mode, stacked_layers
from mlxstacks.training.modes import evaluating

# (tokens of the model's vocabulary) of one prompt.
Prompt = Sequence[int]
Hear = Callable[[mx.array, Rows], None]


@dataclass(frozen=True, eq=False)
class StackRouting:
    """Routing of one stack, a row a prompt, each number a mean over the prompt's rows.

    gates, dispatch (n, P, E): gate weight, and share of rows that an expert is chosen for; they sum
    to 1 and to top_k. entropy (n, P): of the gates of a row, in nats, at most ln top_k. control:
    gates (n, P, E) of random routers of the same spread on the same inputs; what they tell of a
    domain no training put there.
    """

    name: str
    domain: str
    top_k: int
    paths: tuple[str, ...]
    gates: np.ndarray
    dispatch: np.ndarray
    entropy: np.ndarray
    control: np.ndarray


@dataclass(frozen=True, eq=False)
class Passes:
    """What the prompts left.

    labels (n,): the domain of each prompt. routing: of every stack with a router. deltas: path ->
    domain -> (n_d, N) float32, what the domain's own stacks write on its own prompts, a row a
    prompt.
    """

    labels: tuple[str, ...]
    routing: tuple[StackRouting, ...]
    deltas: dict[str, dict[str, np.ndarray]]


@dataclass
class _Heard:
    """What the projections say during one prompt, not evaluated yet."""

    gates: dict[tuple[str, str], list[mx.array]] = field(default_factory=dict)
    deltas: dict[str, mx.array] = field(default_factory=dict)


def run_prompts(
    model: nn.Module,
    prompts: Mapping[str, Sequence[Prompt]],
    progress: Callable[..., None] | None = None,
) -> Passes:
    """Pass the prompts of every domain; the model's modes are afterwards as they were.

    Raises: ValueError for no prompt at all, or an empty one. StoreError naming projection and
        domain where gates or deltas are not finite.
    """
    if not prompts or not all(len(p) for of_domain in prompts.values() for p in of_domain):
        raise ValueError("every prompt needs a token, and there must be one")
    total = sum(map(len, prompts.values()))
    labels: list[str] = []
    told: list[dict[tuple[str, str], list[np.ndarray]]] = []
    deltas: dict[str, dict[str, list[np.ndarray]]] = {}
    with gated_delta_installed(), evaluating(model), _ungated(model) as layers:
        for domain, of_domain in prompts.items():
            heard = _Heard()
            with _listening(layers, domain, heard):
                for tokens in of_domain:
                    heard.gates.clear()
                    heard.deltas.clear()
                    mx.eval(model(mx.array(tokens)[None]), heard.gates, heard.deltas)
                    told.append({k: [np.array(v) for v in vs] for k, vs in heard.gates.items()})
                    for path, row in heard.deltas.items():
                        rows = deltas.setdefault(path, {}).setdefault(domain, [])
                        rows.append(np.array(row))
                    labels.append(domain)
                    if progress:
                        progress(len(labels), total, domain)
        routing = tuple(_gather(layers, told))
    stacked = {p: {d: np.stack(rows) for d, rows in of.items()} for p, of in deltas.items()}
    _check_finite(routing, stacked)
    return Passes(tuple(labels), routing, stacked)


def _check_finite(
    routing: Sequence[StackRouting], deltas: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    wrong = [f"gates of {stack.name}" for stack in routing if not np.isfinite(stack.gates).all()]
    for path, by_domain in deltas.items():
        wrong += [
            f"{path}, stacks of {domain}"
            for domain, rows in by_domain.items()
            if not np.isfinite(rows).all()
        ]
    if wrong:
        raise StoreError(
            f"not finite on data: {wrong[0]} and {len(wrong) - 1} more; the base or an activation "
            "overflows with these stacks on: see whether `mlxstacks stacks verify` passes, and "
            "disable domains to find the one"
        )


@contextmanager
def _ungated(model: nn.Module) -> Iterator[dict[str, StackedLayer]]:
    layers = dict(stacked_layers(model))
    before = {path: layer.mode for path, layer in layers.items()}
    set_mode(model, Selection(active=False))
    try:
        yield layers
    finally:
        for path, layer in layers.items():
            layer.select(*before[path])


class _Told(PackedStacks):
    """The stacks of a projection, which tell what they are called with."""

    def __init__(self, stacks: PackedStacks, hear: Hear):
        super().__init__()
        self._stacks, self._hear = stacks, hear

    def __call__(self, x: mx.array, rows: Rows) -> mx.array | None:
        self._hear(x, rows)
        return self._stacks(x, rows)

    def add_to(self, y: mx.array, x: mx.array, rows: Rows) -> mx.array:
        """See `PackedStacks.add_to`."""
        self._hear(x, rows)
        return self._stacks.add_to(y, x, rows)


@contextmanager
def _listening(layers: Mapping[str, StackedLayer], domain: str, heard: _Heard) -> Iterator[None]:
    """Every projection tells `heard` its routing, and the delta of the domain's own stacks."""
    before = {path: layer.stacks for path, layer in layers.items()}
    for path, layer in layers.items():
        layer.stacks = _Told(before[path], _ear(path, before[path].stacks(), domain, heard))
    try:
        yield
    finally:
        for path, layer in layers.items():
            layer.stacks = before[path]


def _ear(path: str, stacks: Sequence[FrozenStack], domain: str, heard: _Heard) -> Hear:
    own = PackedStacks()
    own.replace_all([stack for stack in stacks if stack.id.domain == domain])
    routed = [(stack, random_router(stack, path)) for stack in stacks if stack.router is not None]

    def hear(x: mx.array, rows: Rows) -> None:
        for stack, random in routed:
            control, *_ = prompt_routing(random, x)
            heard.gates[path, stack.id.name] = [*prompt_routing(stack, x), control]
        delta = own(x, rows)
        if delta is not None:
            heard.deltas[path] = _row_mean(delta)

    return hear


def random_router(stack: FrozenStack, path: str) -> FrozenStack:
    """The stack with a normal draw in place of its router, of the same standard deviation.

    The draw is a function of path and name.
    """
    assert stack.router is not None
    key = mx.random.key(zlib.crc32(f"{path}/{stack.id.name}".encode()))
    drawn = mx.std(stack.router) * mx.random.normal(stack.router.shape, key=key)
    return replace(stack, router=drawn)


def prompt_routing(stack: FrozenStack, x: mx.array) -> list[mx.array]:
    """[mean gates (E,), dispatch (E,), mean entropy ()] over the rows of x (..., K), float32.

    Rows sorted by expert hold a token once for each of its base experts: the mean is the same.
    """
    assert stack.router is not None
    if stack.shape.latent is not None:
        x = x.astype(mx.float32) @ stack.shape.latent.d_in.T  # (..., l)
    routing = top_k_softmax(router_logits(x, stack.router), stack.shape.top_k)
    gates = routing.gates
    surprise = mx.where(gates > 0, -gates * mx.log(mx.maximum(gates, 1e-38)), 0)
    entropy = mx.mean(mx.sum(surprise, axis=-1))
    return [_row_mean(gates), _row_mean(routing.chosen), entropy]


def _row_mean(values: mx.array) -> mx.array:
    """values (..., N): the mean over all rows, float32."""
    return mx.mean(values.reshape(-1, values.shape[-1]).astype(mx.float32), axis=0)


def _gather(
    layers: Mapping[str, StackedLayer],
    told: Sequence[Mapping[tuple[str, str], Sequence[np.ndarray]]],
) -> Iterator[StackRouting]:
    """Per stack, in the order of its first projection."""
    paths: dict[str, list[str]] = {}
    shapes: dict[str, FrozenStack] = {}
    for path, layer in layers.items():
        for stack in layer.stacks.stacks():
            if stack.router is not None:
                paths.setdefault(stack.id.name, []).append(path)
                shapes[stack.id.name] = stack
    for name, of_stack in paths.items():
        gates, dispatch, entropy, control = (
            np.array([[prompt[path, name][part] for path in of_stack] for prompt in told])
            for part in range(4)
        )
        stack = shapes[name]
        yield StackRouting(
            name, stack.id.domain, stack.shape.top_k, tuple(of_stack), gates, dispatch, entropy,
            control,
        )  # fmt: skip
