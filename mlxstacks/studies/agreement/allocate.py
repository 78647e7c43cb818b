"""`mlxstacks fuse --target-kl`: as few bytes as reach a KL from the unfused adapter.

Of each module the KL is found that it alone makes at each width, while all others keep their
adapter unfused. Modules are then widened in the order of KL saved a byte, along the lower convex
hull of each module's widths. What the choices on that way make as a whole is estimated too, but
modules are not independent, above all where much of the adapter is missing. So how far to go is
found by measuring whole choices: the first where the estimate reaches the target, then where it
does with the error that was just seen.

The KL of one module is found in two ways. Measured: the module is fused in memory, alone, and the
model reads the rows again, at the module's own bits and at the widest; widths between are
interpolated. From gradients, for models without routers: to second order

    KL(p || p') = 1/2 d^T (diag(p) - p p^T) d = 1/2 E[(v^T d)^2]

where d is the change of the logits, v = sqrt(p) * z - p (sqrt(p)^T z), z ~ N(0, I): v has that
covariance. To first order v^T d = <g, dy>, with dy the change of the module's own output and g the
gradient of v^T logits by that output. So one backward pass serves all modules at all widths; and
the terms of several modules add before they are squared, which says what they do together. A router
turns a small change into another expert, which no gradient sees: on nano that is most of the KL
from 5 bits on.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxstacks import base_model
from mlxstacks.agreement import Passage, Reference, agree, refer
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import Width, widths
from mlxstacks.fuse.in_memory import fused_tensors, put
from mlxstacks.fuse.module import Module, gather_modules
from mlxstacks.fuse.report import tensor_bytes
from mlxstacks.fuse.rewrite import ModuleWork
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.working_as import working_as
from mlxstacks.ops.gptq import Moments
from mlxstacks.study.document import Block, Plot, Series, Table
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
        self.by_gptq = settings.requant == "gptq"

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

        found = widths(module, self.make.by_gptq)
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
        for width in widths(module, self.make.by_gptq):
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

    with heard(layers, hear):
        logits = model(tokens)[0, first:].astype(mx.float32)
    zeros = [mx.zeros_like(y) for y in shapes]
    mx.eval(logits, [call.args for _, call in calls])
    shapes.clear()

    def forward(*probes: mx.array) -> mx.array:
        left = iter(probes)
        with heard(layers, lambda _place, _call, y: y + next(left)):
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
def heard(
    layers: Sequence[nn.Module], hear: Callable[[int, Call, mx.array], mx.array]
) -> Iterator[None]:
    """Each call of a layer gives what `hear` makes of its output."""

    def telling(own: type, place: int) -> type:
        def method(name: str) -> Callable[..., mx.array]:
            def call(layer: nn.Module, *args: Any, **options: Any) -> mx.array:
                y = getattr(own, name)(layer, *args, **options)
                return hear(place, Call(name, args, options), y)

            return call

        # as_linear: of an embedding that is the output's weight, too.
        names = [name for name in ("__call__", "as_linear") if hasattr(own, name)]
        return type(own.__name__, (own,), {name: method(name) for name in names})

    with working_as((layer, telling(type(layer), place)) for place, layer in enumerate(layers)):
        yield


# --- fewest bytes for a KL ------------------------------------------------------------------------

# Tokens that a module is tried on; the choice as a whole is measured on all.
_TRIED_POSITIONS = 400
_MOST_ROUNDS = 8
# A choice that is closer than this to the target is not improved.
_GOOD_ENOUGH = 0.95
_PLOTTED = 60
Advance = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Allocation:
    """What was chosen. estimated, measured: KL of the whole; rounds: of each try, in order.

    path: (bytes, KL) of all choices that were in reach, from the fewest bytes on, as estimated.
    """

    options: dict[str, Option]
    estimated: float
    measured: float
    rounds: tuple[tuple[int, float, float], ...]
    path: tuple[tuple[int, float], ...]

    def bits(self) -> tuple[str, ...]:
        """As `--bits` takes them; modules that are not quantized have none."""
        return tuple(
            f"{path}={option.decision.bits}"
            for path, option in self.options.items()
            if option.decision.bits is not None
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "estimated_kl_nats": self.estimated,
            "measured_kl_nats": self.measured,
            "tries": [list(tried) for tried in self.rounds],
            "modules": {
                path: {"bits": o.decision.bits, "bytes": o.nbytes, "kl_nats": o.kl}
                for path, o in self.options.items()
            },
        }


def allocate(
    model: nn.Module,
    reference: Reference,
    settings: FuseSettings,
    moments: Mapping[str, Moments] | None = None,
    advance: Advance | None = None,
) -> Allocation:
    """Bits for each module that an adapter of `settings` changes.

    model: the base with these adapters unfused, of which `reference` was made; it is as before
        afterwards. moments: see `Module`. The cheapest choice whose measured KL is at most
        `settings.target_kl`; where no width reaches it, the widest.
    """
    assert settings.target_kl is not None
    checkpoint = open_checkpoint(resolve_model(str(settings.model)))
    modules, _ = gather_modules(checkpoint, settings, moments)
    with ThreadPoolExecutor(1) as pool:
        make, swap = Maker(settings, pool), swap_in(model)
        options_of = sensitivity(model, modules, choose_passages(reference.passages), make)
        steps = count(1)

        def step() -> None:
            if advance:
                advance(next(steps), len(modules) + _MOST_ROUNDS + 1)

        tables = {}
        for module in modules:
            tables[module.path] = options_of(module)
            step()

        def measure(choice: Mapping[str, Option]) -> float:
            with ExitStack() as stack:
                for module in modules:
                    decision = choice[module.path].decision
                    stack.enter_context(swap(module, make(module, decision)))
                kl = float(agree(model, reference).kl.mean(dtype="float64"))
            step()
            return kl

        return _search(tables, settings.target_kl, measure)


def choose_passages(passages: Sequence[Passage]) -> list[Passage]:
    """The first passages of each kind in turn, until there are tokens enough."""
    queues = [[p for p in passages if p.kind == kind] for kind in ("answer", "text")]
    chosen: list[Passage] = []
    while any(queues) and sum(p.positions for p in chosen) < _TRIED_POSITIONS:
        chosen += [queue.pop(0) for queue in queues if queue]
    return chosen


def _search(
    tables: Mapping[str, list[Option]],
    target: float,
    measure: Callable[[Mapping[str, Option]], float],
) -> Allocation:
    path = list(_choices(tables))
    sums = [(sum(o.nbytes for o in c.values()), _together(list(c.values()))) for c in path]
    widest = len(path) - 1
    rounds: dict[int, float] = {}
    low, high = 0, widest  # the cheapest that reaches the target is among these
    place = next((i for i, (_, kl) in enumerate(sums) if kl <= target), widest)
    while len(rounds) < _MOST_ROUNDS:
        rounds[place] = kl = measure(path[place])
        if kl > target:
            low = place + 1
        else:
            high = place
            if kl >= _GOOD_ENOUGH * target:
                break
        if low >= high and (low > widest or high in rounds):
            break
        # The estimate may be wrong by a factor; it is much the same for choices nearby.
        factor = kl / sums[place][1] if sums[place][1] else 1.0
        near = (i for i in range(low, high + 1) if sums[i][1] * factor <= target)
        place = min(high, next(near, high))
        if place in rounds:
            place = (low + high) // 2
    reached = [place for place, kl in rounds.items() if kl <= target]
    best = min(reached) if reached else widest
    if best not in rounds:
        rounds[best] = measure(path[best])
    tries = tuple((*sums[place], kl) for place, kl in rounds.items())
    return Allocation(path[best], sums[best][1], rounds[best], tries, tuple(sums))


def _together(options: Sequence[Option]) -> float:
    """KL of modules changed together: of their terms' sum, or the sum, as if independent."""
    terms = [option.terms for option in options if option.terms is not None]
    if len(terms) < len(options):
        return sum(option.kl for option in options)
    total = np.sum(terms, axis=0)
    return 0.5 * float(total @ total)


def _choices(tables: Mapping[str, list[Option]]) -> Iterator[dict[str, Option]]:
    """All choices in reach, each one step wider than the last: most KL saved a byte first."""
    hulls = {path: _hull(options) for path, options in tables.items()}
    choice = {path: hull[0] for path, hull in hulls.items()}
    steps = [
        ((old.kl - new.kl) / (new.nbytes - old.nbytes), path, new)
        for path, hull in hulls.items()
        for old, new in pairwise(hull)
    ]
    yield dict(choice)
    for _, path, new in sorted(steps, key=lambda step: -step[0]):
        choice[path] = new
        yield dict(choice)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull: options that cost more bytes for less and less KL."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.kl)):
        if hull and option.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Option, second: Option) -> float:
    return (second.kl - first.kl) / (second.nbytes - first.nbytes)


# --- in the result --------------------------------------------------------------------------------


def blocks(allocation: Allocation, target: float) -> tuple[Block, ...]:
    """The widths that were chosen, the tries, and bytes against KL."""
    by_width = Counter(option.decision.bits for option in allocation.options.values())
    rows = []
    for bits, modules in sorted(by_width.items(), key=lambda pair: pair[0] or 0):
        chosen = [o for o in allocation.options.values() if o.decision.bits == bits]
        rows.append((bits, modules, sum(o.nbytes for o in chosen), sum(o.kl for o in chosen)))
    chosen_table = Table.of(
        "target-kl", f"Bits for a KL of {target:g} nats per token",
        {"bits": "count", "modules": "count", "size": "bytes", "KL": ("number", 5)}, rows,
        caption="KL: what each of these modules makes alone, summed.",
    )  # fmt: skip
    tries = Table.of(
        "target-kl-tries", "Choices that were measured",
        {"size": "bytes", "KL, estimated": ("number", 5), "KL, measured": ("number", 5)},
        allocation.rounds, folded=True,
    )  # fmt: skip
    step = max(1, len(allocation.path) // _PLOTTED)
    drawn = [*allocation.path[:-1:step], allocation.path[-1]]
    sizes = tuple(nbytes / 1e6 for nbytes, _ in drawn)
    measured = sorted(allocation.rounds)
    plot = Plot(
        id="kl-by-bytes", title="KL by bytes of the fused modules", kind="lines",
        x_label="MB", y_label="KL, nats per token",
        series=(
            Series(label="estimated", x=sizes, y=tuple(kl for _, kl in drawn)),
            Series(
                label="measured",
                x=tuple(nbytes / 1e6 for nbytes, _, _ in measured),
                y=tuple(kl for _, _, kl in measured),
            ),
        ),
        references={"target": target},
        alt="KL from the unfused adapter by megabytes of the fused modules: "
        + ", ".join(f"{nbytes / 1e6:.1f} MB {kl:.4f} measured" for nbytes, _, kl in measured)
        + f"; estimated from {drawn[0][1]:.4f} at {sizes[0]:.1f} MB to {drawn[-1][1]:.4f} at "
        f"{sizes[-1]:.1f} MB.",
    )  # fmt: skip
    return chosen_table, tries, plot


def note(allocation: Allocation, target: float) -> str | None:
    """What to do where no width reaches the target."""
    if allocation.measured <= target:
        return None
    return (
        f"--target-kl {target:g} is out of reach: the widest, 8 bits, reach "
        f"{allocation.measured:.4f}. Take that as the target, --requant dequantize, or serve the "
        "adapter unfused (--adapter-path)."
    )
