"""Which output directions a new domain's stacks keep out of: null-space bases from samples.

A stage is what was frozen before one domain, with samples to run through it. The scope `aggregate`
looks at the last stage alone; `cumulative` goes through all of them and adds directions at each, so
nothing but stacks and rows is needed to find the same basis again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.data import Row
from mlxstacks.layers.delta_rows import collect_delta_rows
from mlxstacks.layers.nullspace import NullBasis, null_basis
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.training.modes import evaluating
from mlxstacks.training.stack_settings import NullSpaceSettings

# From this share of the output on, what is left for new stacks is little.
WARN_AT_CAPACITY = 0.5

Bases = dict[str, NullBasis]


@dataclass(frozen=True, eq=False)
class Stage:
    """stacks: names of those that were frozen. samples: token ids (T,) each."""

    stacks: tuple[str, ...]
    samples: list[mx.array]


def sample_rows(rows: Mapping[str, Sequence[Row]], count: int) -> list[mx.array]:
    """At most `count` rows as token ids (T,), the first ones of each domain, evenly: a domain with
    fewer rows leaves its share to the others.
    """
    taken = dict.fromkeys(rows, 0)
    left = count
    while left > 0 and (open_ := [name for name in rows if taken[name] < len(rows[name])]):
        each, extra = divmod(left, len(open_))
        for place, name in enumerate(open_):
            more = min(each + (place < extra), len(rows[name]) - taken[name])
            taken[name] += more
            left -= more
    return [mx.array(row.tokens) for name in rows for row in rows[name][: taken[name]]]


def protected_bases(
    model: nn.Module, stages: Sequence[Stage], settings: NullSpaceSettings, seed: int
) -> Bases:
    """The basis of every projection on which a frozen stack of the last stage writes, by path.

    Law: the model is afterwards as it was.
    """
    bases: Bases = {}
    for stage in stages if settings.scope == "cumulative" else stages[-1:]:
        with _only(model, stage.stacks):
            rows = collect_delta_rows(model, stage.samples, _forward)
        for path, deltas in rows.items():
            bases[path] = null_basis(
                deltas, settings.directions, scope=settings.scope, previous=bases.get(path),
                oversampling=settings.oversampling, seed=seed,
            )  # fmt: skip
    return bases


def _forward(model: nn.Module, tokens: mx.array) -> mx.array:
    with evaluating(model):
        logits: mx.array = model(tokens)
    return logits


@contextmanager
def _only(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Frozen stacks of other names taken out for the length of a block."""
    layers = dict(stacked_layers(model))
    # Where all of them stay nothing is packed again: that would hold every stack twice.
    before = {
        path: layer.stacks.stacks()
        for path, layer in layers.items()
        if any(stack_id.name not in names for stack_id in layer.stacks.ids)
    }
    for path, stacks in before.items():
        layers[path].set_stacks([stack for stack in stacks if stack.id.name in names])
    try:
        yield
    finally:
        for path, stacks in before.items():
            layers[path].set_stacks(stacks)


def full_projections(bases: Mapping[str, NullBasis], paths: Sequence[str]) -> list[str]:
    """Those of `paths` where nothing is left to write into."""
    return [path for path in paths if path in bases and bases[path].capacity >= 1]


def protection_report(bases: Mapping[str, NullBasis]) -> dict[str, Any]:
    """Directions, captured energy and capacity used of each projection, and of all together."""
    energies = [b.captured_energy for b in bases.values() if b.captured_energy is not None]
    capacities = [basis.capacity for basis in bases.values()]
    return {
        "captured_energy_mean": sum(energies) / len(energies) if energies else None,
        "captured_energy_lowest": min(energies, default=None),
        "capacity_used_highest": max(capacities, default=0.0),
        "projections": {
            path: {
                "directions": int(basis.vectors.shape[1]),
                "captured_energy": basis.captured_energy,
                "capacity_used": basis.capacity,
            }
            for path, basis in sorted(bases.items())
        },
    }


def capacity_warning(bases: Mapping[str, NullBasis]) -> str | None:
    """A sentence about projections of which half or more is protected, or None."""
    used = {path: b.capacity for path, b in bases.items() if b.capacity >= WARN_AT_CAPACITY}
    if not used:
        return None
    worst = max(sorted(used), key=lambda path: used[path])
    return (
        f"{len(used)} of {len(bases)} projections have {WARN_AT_CAPACITY:.0%} or more of their "
        f"output directions protected (most: {worst}, {used[worst]:.0%}); new stacks can write "
        "into the rest only. Fewer null_space.directions leave more room."
    )
