"""`mlxstacks fuse --target-kl`: as few bytes as reach a KL from the unfused adapter.

Of each module the KL is found that it alone makes at each width, while all others keep their
adapter unfused (`sensitivity`). Modules are then widened in the order of KL saved a byte, along the
lower convex hull of each module's widths. What the choices on that way make as a whole is estimated
too, but modules are not independent, above all where much of the adapter is missing. So how far to
go is found by measuring whole choices: the first where the estimate reaches the target, then
halving the range that is left.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.nn as nn
import numpy as np

from mlxstacks.agreement import Passage, Reference, agree
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.fuse.module import gather_modules
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.studies.agreement.sensitivity import Maker, Option, sensitivity, swap_in
from mlxstacks.study.document import Block, Plot, Series, Table

# Tokens that a module is tried on; the choice as a whole is measured on all.
_TRIED_POSITIONS = 400
_MOST_ROUNDS = 8
# A choice that is closer than this to the target is not improved.
_GOOD_ENOUGH = 0.8
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
    with ThreadPoolExecutor(1) as pool:
        make, swap = Maker(settings, pool), swap_in(model)
        options_of = sensitivity(model, modules, choose_passages(passages), make)
        tables = {}
        for number, module in enumerate(modules, 1):
            tables[module.path] = options_of(module)
            if advance:
                advance(number, len(modules) + _MOST_ROUNDS)

        def measure(choice: Mapping[str, Option]) -> float:
            with ExitStack() as stack:
                for module in modules:
                    decision = choice[module.path].decision
                    stack.enter_context(swap(module, make(module, decision)))
                return float(agree(model, reference).kl.mean(dtype="float64"))

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
        place = min(high, (low + high) // 2)
        if place in rounds:
            break
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
    for bits, count in sorted(by_width.items(), key=lambda pair: pair[0] or 0):
        chosen = [o for o in allocation.options.values() if o.decision.bits == bits]
        rows.append((bits, count, sum(o.nbytes for o in chosen), sum(o.kl for o in chosen)))
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
