"""`mlxstacks fuse --target-kl`: as few bytes as reach a KL from the unfused adapter.

Of each module two fuses are tried in memory, alone, while all others keep their adapter unfused: at
the module's own bits, and at the first wider ones. What they do to the next tokens is measured. Of
yet wider bits it is estimated: KL grows with the square of a small error of the weights, and the
size of that error is known of every width. Modules are then widened in the order of KL saved a
byte, along the lower convex hull of each module's widths, until the sum of all reaches the target.

The sum takes errors of modules for independent, so what was chosen is measured as a whole, and the
target of the sum is corrected by what came, a few times.
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
_MOST_ROUNDS = 4
# A choice that is this much better than asked is tried for fewer bytes.
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
    with ThreadPoolExecutor(1) as pool, _bases(model, modules) as swap:
        make = _Maker(settings, pool)
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


@contextmanager
def _bases(model: nn.Module, modules: Sequence[Module]) -> Iterator[Swap]:
    """A context manager for one module at a time: inside, it is fused and has no adapter."""
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

    yield swap


def _options(
    module: Module, model: nn.Module, reference: Reference, make: _Maker, swap: Swap
) -> list[Option]:
    """The module at each width, KL measured at the first two and estimated from there on."""
    found: list[Option] = []
    measured: tuple[float, float] | None = None  # squared error, KL
    for place, width in enumerate(widths(module)):
        nbytes = tensor_bytes(module, width.decision)
        if place < 2:
            with swap(module, make(module, width.decision)):
                kl = float(agree(model, reference).kl.mean(dtype="float64"))
            measured = width.squared_error, kl
        else:
            assert measured is not None
            kl = measured[1] * width.squared_error / measured[0] if measured[0] else 0.0
        found.append(Option(width.decision, nbytes, kl))
    return found


def _search(
    tables: Mapping[str, list[Option]],
    target: float,
    measure: Callable[[Mapping[str, Option]], float],
) -> Allocation:
    path = list(_choices(tables))
    sums = [(sum(o.nbytes for o in c.values()), sum(o.kl for o in c.values())) for c in path]
    aim, best = target, None
    rounds: list[tuple[int, float]] = []
    low, high = 0, len(path) - 1  # places on the path that are known to miss, and to be in reach
    for _ in range(_MOST_ROUNDS):
        place = next((i for i, (_, kl) in enumerate(sums) if kl <= aim), len(path) - 1)
        place = min(max(place, low), high)
        if any(done[0] == place for done in rounds):
            break
        kl = measure(path[place])
        rounds.append((place, kl))
        if kl <= target:
            best, high = (place, kl), place - 1
            if kl >= _GOOD_ENOUGH * target or place == 0:
                break
        else:
            low = place + 1
            if place == len(path) - 1:
                break
        if low > high:
            break
        aim = target * sums[place][1] / kl if kl else target
    if best is None:
        last = len(path) - 1
        known = dict(rounds)
        best = last, known[last] if last in known else measure(path[last])
        if last not in known:
            rounds.append(best)
    tries = tuple((*sums[place], kl) for place, kl in rounds)
    return Allocation(path[best[0]], sums[best[0]][1], best[1], tries, tuple(sums))


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
