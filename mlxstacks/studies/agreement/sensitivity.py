"""What fusing one module does to next tokens: KL of each of its widths, one module at a time.

Two ways. Measured: the module is fused in memory, alone, and the model reads the rows again, at the
module's own bits and at the widest; widths between are interpolated. From gradients, for models
without routers: to second order

    KL(p || p') = 1/2 d^T (diag(p) - p p^T) d = 1/2 E[(v^T d)^2]

where d is the change of the logits, v = sqrt(p) * z - p (sqrt(p)^T z), z ~ N(0, I): v has that
covariance. To first order v^T d = <g, dy>, with dy the change of the module's own output and g the
gradient of v^T logits by that output. So one backward pass serves all modules at all widths; and
the terms of several modules add before they are squared, which says what they do together. A router
turns a small change into another expert, which no gradient sees: on nano that is most of the KL
from 5 bits on.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxstacks import base_model
from mlxstacks.agreement import Passage, agree, refer
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import Width, widths
from mlxstacks.fuse.in_memory import fused_tensors, put
from mlxstacks.fuse.module import Module
from mlxstacks.fuse.report import tensor_bytes
from mlxstacks.fuse.rewrite import ModuleWork
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.training.modes import evaluating

# Backward passes of each passage: with 8 passages a KL is known to a quarter of itself.
_DRAWS = 4
Fused = tuple[ModuleWork, dict[str, mx.array]]
Swap = Callable[[Module, Fused], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """A module at a width: its bytes, and the KL that it alone makes, in nats per token.

    terms: (K,) float64 with kl = 1/2 |terms|^2, which add where modules are changed together; None
        where KL was measured.
    """

    decision: Decision
    nbytes: int
    kl: float
    terms: np.ndarray | None = field(default=None, compare=False)


class Sensitivity(Protocol):
    """module -> its widths, by bits."""

    def __call__(self, module: Module) -> list[Option]: ...


def sensitivity(
    model: nn.Module, modules: Sequence[Module], passages: Sequence[Passage], make: "Maker"
) -> Sensitivity:
    """Of modules of `model`, which holds their adapters unfused, on some passages."""
    swap = swap_in(model)
    if any(base_model.named_switches(model)):
        return _Measured(model, passages, make, swap)
    return FromGradients(model, modules, passages, make, swap)


class Maker:
    """(module, decision) -> the module's work and its fused tensors."""

    def __init__(self, settings: FuseSettings, pool: ThreadPoolExecutor) -> None:
        self.settings, self.pool = settings, pool

    def __call__(self, module: Module, decision: Decision) -> Fused:
        first = min(module.stages)
        same = Decision("nearest", decision.bits, mode=decision.mode)
        decisions = {stage: decision if stage == first else same for stage in module.stages}
        work = ModuleWork(module, decisions)
        plain = self.settings.model_copy(update={"zero_delta": False})
        return work, fused_tensors(work, self.pool, 1, plain)[0]


def swap_in(model: nn.Module) -> Swap:
    """A context manager of a module: inside, it is fused and has no adapter."""
    layers = dict(model.named_modules())
    kept_names = ("weight", "scales", "biases")
    settings = ("bits", "group_size", "mode")

    @contextmanager
    def swap(module: Module, made: Fused) -> Iterator[nn.Module]:
        layer = base = layers[module.path]
        while "lora_a" in base:
            base = base["embedding" if "embedding" in base else "linear"]
        arrays = {name: base[name] for name in kept_names if name in base}
        numbers = {name: getattr(base, name) for name in settings if hasattr(base, name)}
        model.update_modules(tree_unflatten([(module.path, base)]))
        try:
            put(model, *made)
            yield base
        finally:
            for name, value in {**arrays, **numbers}.items():
                setattr(base, name, value)
            model.update_modules(tree_unflatten([(module.path, layer)]))

    return swap


class _Measured:
    """KL measured at the first and the last width. Between: KL grows with the square of what of the
    trained change is missing, and with the square of the noise, each with a factor of the module's
    own that both ends are fitted to.
    """

    def __init__(
        self, model: nn.Module, passages: Sequence[Passage], make: Maker, swap: Swap
    ) -> None:
        self.model, self.make, self.swap = model, make, swap
        self.reference = refer(model, passages)

    def __call__(self, module: Module) -> list[Option]:
        from scipy.optimize import nnls

        found = widths(module)
        ends = [found[0], found[-1]][: len(found)]
        kls = []
        for width in ends:
            with self.swap(module, self.make(module, width.decision)):
                kls.append(float(agree(self.model, self.reference).kl.mean(dtype="float64")))
        # Not below zero, so that a wider one is never worse, whatever a few tokens say.
        factors, _ = nnls(np.array([(width.lost, width.noise) for width in ends]), np.array(kls))
        return [_option(module, w, float(factors @ (w.lost, w.noise))) for w in found]


class FromGradients:
    """See above. Holds the inputs of all modules on all passages, and the gradients by their
    outputs, in the dtypes that the model computes in.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Sequence[Module],
        passages: Sequence[Passage],
        make: Maker,
        swap: Swap,
    ) -> None:
        self.make, self.swap = make, swap
        self.places = {module.path: place for place, module in enumerate(modules)}
        named = dict(model.named_modules())
        self.layers = [named[path] for path in self.places]
        positions = sum(passage.positions for passage in passages)
        self.scale = (_DRAWS * positions) ** -0.5
        with evaluating(model, for_gradients=True), base_model.gated_delta_installed():
            self.passages = [
                gradients(model, self.layers, passage, _DRAWS, seed)
                for seed, passage in enumerate(passages)
            ]

    def __call__(self, module: Module) -> list[Option]:
        place = self.places[module.path]
        calls = [call for passage in self.passages for call in passage[place]]
        before = [call.output(self.layers[place]) for call in calls]
        options = []
        for width in widths(module):
            made = self.make(module, width.decision)
            with self.swap(module, made) as fused:
                changes = [c.output(fused) - y for c, y in zip(calls, before, strict=True)]
                sums = [call.products(dy) for call, dy in zip(calls, changes, strict=True)]
                mx.eval(sums)
            terms = np.zeros((len(self.passages), _DRAWS))
            if calls:  # with several a passage, all change the same logits
                terms += np.array(sums, np.float64).reshape(len(terms), -1, _DRAWS).sum(axis=1)
            terms = self.scale * terms.reshape(-1)
            options.append(_option(module, width, 0.5 * float(terms @ terms), terms))
        return options


def _option(module: Module, width: Width, kl: float, terms: np.ndarray | None = None) -> Option:
    return Option(width.decision, tensor_bytes(module, width.decision), kl, terms)


@dataclass(eq=False)
class Call:
    """One call of a layer: its method and arguments; of the output y, the gradients of v^T logits,
    one of y's shape a draw.
    """

    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    gradients: list[mx.array] = field(default_factory=list)

    def output(self, layer: nn.Module) -> mx.array:
        method = getattr(type(layer), self.method)
        return method(layer, *self.args, **self.options)

    def products(self, change: mx.array) -> mx.array:
        """(draws,) float32: of each gradient with a change of the output."""
        change = change.astype(mx.float32)
        return mx.stack([(change * g.astype(mx.float32)).sum() for g in self.gradients])


def gradients(
    model: nn.Module, layers: Sequence[nn.Module], passage: Passage, draws: int, seed: int
) -> list[list[Call]]:
    """The calls of each layer while `model` reads a passage, with the gradients of `draws` draws.

    The model is in the mode that it computes in, with gradients, and unchanged afterwards.
    """
    tokens, first = mx.array([passage.tokens[:-1]]), passage.start - 1
    calls: list[tuple[int, Call]] = []
    shapes: list[mx.array] = []

    def hear(place: int, call: Call, y: mx.array) -> mx.array:
        calls.append((place, call))
        shapes.append(y)
        return y

    with _heard(layers, hear):
        logits = model(tokens)[0, first:].astype(mx.float32)
    zeros = [mx.zeros_like(y) for y in shapes]
    mx.eval(logits, [call.args for _, call in calls])
    shapes.clear()

    def forward(*probes: mx.array) -> mx.array:
        left = iter(probes)
        with _heard(layers, lambda _place, _call, y: y + next(left)):
            return model(tokens)[0, first:].astype(mx.float32)

    p = mx.softmax(logits, axis=-1)
    root, keys = mx.sqrt(p), mx.random.split(mx.random.key(seed), draws)
    for key in keys:
        z = root * mx.random.normal(p.shape, key=key)
        v = z - p * z.sum(axis=-1, keepdims=True)
        _, found = mx.vjp(forward, zeros, [v])
        mx.eval(found)
        for (_, call), gradient in zip(calls, found, strict=True):
            call.gradients.append(gradient)
    by_layer: list[list[Call]] = [[] for _ in layers]
    for place, call in calls:
        by_layer[place].append(call)
    return by_layer


@contextmanager
def _heard(
    layers: Sequence[nn.Module], hear: Callable[[int, Call, mx.array], mx.array]
) -> Iterator[None]:
    """Each call of a layer gives what `hear` makes of its output."""
    before = [type(layer) for layer in layers]

    def telling(own: type, place: int) -> type:
        def method(name: str) -> Callable[..., mx.array]:
            def call(layer: nn.Module, *args: Any, **options: Any) -> mx.array:
                y = getattr(own, name)(layer, *args, **options)
                return hear(place, Call(name, args, options), y)

            return call

        # as_linear: of an embedding that is the output's weight, too.
        names = [name for name in ("__call__", "as_linear") if hasattr(own, name)]
        return type(own.__name__, (own,), {name: method(name) for name in names})

    try:
        for place, (layer, own) in enumerate(zip(layers, before, strict=True)):
            layer.__class__ = telling(own, place)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.__class__ = own
