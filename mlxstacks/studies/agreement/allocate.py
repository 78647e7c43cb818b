"""`mlxstacks fuse --target-kl`: as few bytes as reach a KL from the unfused adapter.

Of each module two fuses are tried in memory, alone, while all others keep their adapter unfused: at
the module's own bits, and at the widest. What they do to the next tokens is measured. Of the widths
between it is interpolated: KL grows with the square of what of the trained change is missing, and
with the square of the noise, each with a factor of the module's own, and of every width both are
known. Modules are then widened in the order of KL saved a byte, along the lower convex hull of each
module's widths.

The sum takes modules for independent. They are not, above all where much of the adapter is missing,
so how far to go is found by measuring whole choices: the first where the sum reaches the target,
then halving the range that is left.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlxstacks.agreement import Passage, Reference, agree, refer
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import widths
from mlxstacks.fuse.in_memory import fused_tensors, put
from mlxstacks.fuse.module import Module, gather_modules
from mlxstacks.fuse.report import tensor_bytes
from mlxstacks.fuse.rewrite import ModuleWork
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.study.document import Block, Plot, Series, Table

# Tokens that a module is tried on; the choice as a whole is measured on all.
_TRIED_POSITIONS = 400
_MOST_ROUNDS = 8
# A choice that is closer than this to the target is not improved.
_GOOD_ENOUGH = 0.8
_PLOTTED = 60
Advance = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Option:
    """A module at a width: its bytes, and the KL that it alone makes, in nats a token."""

    decision: Decision
    nbytes: int
    kl: float


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
    passages: Sequence[Passage],
    reference: Reference,
    settings: FuseSettings,
    advance: Advance | None = None,
) -> Allocation:
    """Bits for each module that an adapter of `settings` changes.

    model: the base with these adapters unfused, of which `reference` was made; it is as before
        afterwards. The cheapest choice whose measured KL is at most `settings.target_kl`; where no
        width reaches it, the widest.
    """
    assert settings.target_kl is not None
    checkpoint = open_checkpoint(resolve_model(str(settings.model)))
    modules, _ = gather_modules(checkpoint, settings)
    tried = _some(passages)
    near = refer(model, tried) if len(tried) < len(passages) else reference
    with ThreadPoolExecutor(1) as pool:
        make, swap = _Maker(settings, pool), _swap_in(model)
        tables = {}
        for number, module in enumerate(modules, 1):
            tables[module.path] = _options(module, model, near, make, swap)
            if advance:
                advance(number, len(modules) + _MOST_ROUNDS)

        def measure(choice: Mapping[str, Option]) -> float:
            with ExitStack() as stack:
                for module in modules:
                    decision = choice[module.path].decision
                    stack.enter_context(swap(module, make(module, decision)))
                return float(agree(model, reference).kl.mean(dtype="float64"))

        return _search(tables, settings.target_kl, measure)


def _some(passages: Sequence[Passage]) -> list[Passage]:
    """The first passages of each kind in turn, until there are tokens enough."""
    queues = [[p for p in passages if p.kind == kind] for kind in ("answer", "text")]
    chosen: list[Passage] = []
    while any(queues) and sum(p.positions for p in chosen) < _TRIED_POSITIONS:
        chosen += [queue.pop(0) for queue in queues if queue]
    return chosen


class _Maker:
    """(module, decision) -> the module's work and its fused tensors."""

    def __init__(self, settings: FuseSettings, pool: ThreadPoolExecutor) -> None:
        self.settings, self.pool = settings, pool

    def __call__(
        self, module: Module, decision: Decision
    ) -> tuple[ModuleWork, dict[str, mx.array]]:
        first = min(module.stages)
        same = Decision("nearest", decision.bits, mode=decision.mode)
        decisions = {stage: decision if stage == first else same for stage in module.stages}
        work = ModuleWork(module, decisions)
        plain = self.settings.model_copy(update={"zero_delta": False})
        return work, fused_tensors(work, self.pool, 1, plain)[0]


Swap = Callable[[Module, tuple[ModuleWork, dict[str, mx.array]]], Any]


def _swap_in(model: nn.Module) -> Swap:
    """A context manager of a module: inside, it is fused and has no adapter."""
    layers = dict(model.named_modules())
    kept_names = ("weight", "scales", "biases")
    settings = ("bits", "group_size", "mode")

    @contextmanager
    def swap(module: Module, made: tuple[ModuleWork, dict[str, mx.array]]) -> Iterator[None]:
        layer = base = layers[module.path]
        while "lora_a" in base:
            base = base["embedding" if "embedding" in base else "linear"]
        arrays = {name: base[name] for name in kept_names if name in base}
        numbers = {name: getattr(base, name) for name in settings if hasattr(base, name)}
        model.update_modules(tree_unflatten([(module.path, base)]))
        try:
            put(model, *made)
            yield
        finally:
            for name, value in {**arrays, **numbers}.items():
                setattr(base, name, value)
            model.update_modules(tree_unflatten([(module.path, layer)]))

    return swap


def _options(
    module: Module, model: nn.Module, reference: Reference, make: _Maker, swap: Swap
) -> list[Option]:
    """The module at each width; KL measured at the first and the last, and fitted to both."""
    from scipy.optimize import nnls

    found = widths(module)
    ends = [found[0], found[-1]][: len(found)]
    kls = []
    for width in ends:
        with swap(module, make(module, width.decision)):
            kls.append(float(agree(model, reference).kl.mean(dtype="float64")))
    # Not below zero, so that a wider one is never worse, whatever a few tokens say.
    factors, _ = nnls(np.array([(width.lost, width.noise) for width in ends]), np.array(kls))
    return [
        Option(
            width.decision,
            tensor_bytes(module, width.decision),
            float(factors @ (width.lost, width.noise)),
        )
        for width in found
    ]


def _search(
    tables: Mapping[str, list[Option]],
    target: float,
    measure: Callable[[Mapping[str, Option]], float],
) -> Allocation:
    path = list(_choices(tables))
    sums = [(sum(o.nbytes for o in c.values()), sum(o.kl for o in c.values())) for c in path]
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
        place = min(high, (low + high) // 2)
        if place in rounds:
            break
    reached = [place for place, kl in rounds.items() if kl <= target]
    best = min(reached) if reached else widest
    if best not in rounds:
        rounds[best] = measure(path[best])
    tries = tuple((*sums[place], kl) for place, kl in rounds.items())
    return Allocation(path[best], sums[best][1], rounds[best], tries, tuple(sums))


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
    for bits, count in sorted(by_width.items(), key=lambda pair: pair[0] or 0):
        chosen = [o for o in allocation.options.values() if o.decision.bits == bits]
        rows.append((bits, count, sum(o.nbytes for o in chosen), sum(o.kl for o in chosen)))
    chosen_table = Table.of(
        "target-kl", f"Bits for a KL of {target:g} nats a token",
        {"bits": "count", "modules": "count", "size": "bytes", "KL": ("number", 5)}, rows,
        caption="KL: what these modules make alone, summed; the sum takes modules for independent.",
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
        x_label="MB", y_label="KL, nats a token",
        series=(
            Series(label="estimated", x=sizes, y=tuple(kl for _, kl in drawn)),
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
