"""The outer loop: one domain after another, each on all that was frozen before.

A domain is trained (boost.py), the forgetting matrix gets its row, and the prefix losses of all
earlier domains must be exactly what they were. Only then may the store have it. The matrix has the
loss of every domain so far, after each was trained, in three modes:

    ungated    every stack on
    prefix     the stacks of domains 1..j for domain j: frozen, so a column never changes again
    isolated   domain j's own stacks alone; less than it was trained with, but for the first one

A prefix loss that moved means that something frozen was written to, or that another base, other
rows or another evaluator is in use. It is compared exactly.

New stacks keep out of directions of the output: null-space bases from samples. A stage is what was
frozen before one domain, with samples to run through it. The scope `aggregate` looks at the last
stage alone; `cumulative` goes through all of them and adds directions at each, so nothing but
stacks and rows is needed to find the same basis again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.data import Row
from mlxstacks.errors import StoreError
from mlxstacks.files.manifest import stack_name
from mlxstacks.layers.delta_rows import collect_delta_rows
from mlxstacks.layers.nullspace import NullBasis, null_basis
from mlxstacks.layers.selection import subset, ungated
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.training.boost import Checkpoints, DomainJob, RoundRecord, boost_domain
from mlxstacks.training.modes import evaluating
from mlxstacks.training.settings import MatrixMode, NullSpaceSettings

MatrixRow = dict[str, float]
"""Domain -> validation loss."""


class DriftError(StoreError):
    """A prefix loss is not what it was: frozen stacks did not stay frozen."""


@dataclass(frozen=True)
class Served:
    """A domain whose stacks are in the model, by name in order (none, where training gained
    nothing).
    """

    domain: str
    stacks: tuple[str, ...]


def stacks_for(mode: MatrixMode, served: Sequence[Served], domain: str) -> tuple[str, ...]:
    """Names of the stacks that are on where `domain` is measured."""
    place = [entry.domain for entry in served].index(domain)
    if mode == "isolated":
        return served[place].stacks
    until = served if mode == "ungated" else served[: place + 1]
    return tuple(name for entry in until for name in entry.stacks)


def measure_row(
    model: nn.Module,
    served: Sequence[Served],
    loss_of: Mapping[str, Callable[[nn.Module], float]],
    modes: Sequence[MatrixMode],
    dtype: mx.Dtype | None = None,
    on_loss: Callable[[MatrixMode, str, float], None] | None = None,
) -> dict[MatrixMode, MatrixRow]:
    """Mode -> domain -> validation loss, of all domains served that have a `loss_of` (imported
    ones have no rows).

    dtype: see `PackedStacks.serve`. Two entries with the same stacks on are measured once.
    Law: afterwards every stack is on.
    """
    losses: dict[tuple[str, tuple[str, ...]], float] = {}
    rows: dict[MatrixMode, MatrixRow] = {}
    for mode in modes:
        rows[mode] = {}
        for entry in served:
            if entry.domain not in loss_of:
                continue
            names = stacks_for(mode, served, entry.domain)
            if (entry.domain, names) not in losses:
                set_mode(model, subset(names), dtype)
                losses[entry.domain, names] = loss_of[entry.domain](model)
            rows[mode][entry.domain] = losses[entry.domain, names]
            if on_loss is not None:
                on_loss(mode, entry.domain, rows[mode][entry.domain])
    set_mode(model, ungated(), dtype)
    return rows


def check_prefix(expected: Mapping[str, float], measured: Mapping[str, float]) -> None:
    """Raises: DriftError naming every domain whose prefix loss is not exactly what it was."""
    moved = [
        f"{domain}: was {expected[domain]!r}, is {loss!r}"
        for domain, loss in measured.items()
        if domain in expected and loss != expected[domain]
    ]
    if moved:
        lines = "".join(f"\n  {line}" for line in moved)
        raise DriftError(
            "the loss of earlier domains changed with their own stacks alone on, which cannot be "
            f"while frozen stacks and base stay as they are:{lines}\n"
            "nothing was added to the store; see whether something else writes to the model, run "
            "`mlxstacks stacks verify`, then run again with --no-resume"
        )


def rises(matrix: Mapping[str, Mapping[str, float]]) -> MatrixRow:
    """Domain -> how much its loss rose from the row where it was trained to the last row.

    matrix: rows in the order of training.
    """
    if not matrix:
        return {}
    last = matrix[next(reversed(list(matrix)))]
    return {
        domain: last[domain] - row[domain]
        for domain, row in matrix.items()
        if domain in last and domain in row
    }


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

    def forward(model: nn.Module, tokens: mx.array) -> mx.array:
        with evaluating(model):
            logits: mx.array = model(tokens)
        return logits

    bases: Bases = {}
    for stage in stages if settings.scope == "cumulative" else stages[-1:]:
        with _only(model, stage.stacks):
            rows = collect_delta_rows(model, stage.samples, forward)
        for path, deltas in rows.items():
            bases[path] = null_basis(
                deltas, settings.directions, scope=settings.scope, previous=bases.get(path),
                oversampling=settings.oversampling, seed=seed,
            )  # fmt: skip
    return bases


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


# Prefix losses that another machine or version measured may differ by rounding, no more.
ARRIVAL_TOLERANCE = 2e-3

LossOf = Mapping[str, Callable[[nn.Module], float]]


@dataclass(frozen=True, eq=False)
class DomainResult:
    """losses: before training, then after each kept round. row: of the matrix, mode -> domain ->
    loss. served: the domain's stacks, as they are in the model now. prefix_loss: its loss as this
    process measures it; losses[-1], but for rounding where an earlier process measured that.
    """

    records: list[RoundRecord]
    losses: tuple[float, ...]
    row: dict[MatrixMode, MatrixRow]
    served: Served
    prefix_loss: float


def train_domain(
    model: nn.Module,
    job: DomainJob,
    checkpoints: Checkpoints,
    before: Sequence[Served],
    loss_of: LossOf,
    modes: Sequence[MatrixMode],
    expected: Mapping[str, float],
    *,
    dtype: mx.Dtype | None = None,
    group: mx.distributed.Group | None = None,
    on_loss: Callable[[MatrixMode, str, float], None] | None = None,
) -> DomainResult:
    """Train a domain on top of `before`, and measure every domain.

    expected: prefix losses of earlier domains as this process measured them.
    Raises: DriftError where one of them is another now, in whatever modes; and as `boost_domain`.
    """
    earlier = checkpoints.rounds()
    records = boost_domain(model, job, checkpoints, group, earlier)
    kept = [record for record in records if record.kept]
    losses = (records[0].loss_before, *(record.loss_after for record in kept))
    served = Served(job.name, tuple(stack_name(job.name, record.number) for record in kept))
    measured = dict.fromkeys(["prefix", *modes])  # the check needs it, asked for or not
    row = measure_row(model, [*before, served], loss_of, list(measured), dtype, on_loss)
    prefix_loss = row["prefix"][job.name]
    last = kept[-1].number if kept else 1
    # another version or device may have measured it, before this run was stopped
    if (
        last <= len(earlier)
        and not arrival_problems({job.name: losses[-1]}, {job.name: prefix_loss})[0]
    ):
        check_prefix(expected, row["prefix"])
    else:
        check_prefix({**expected, job.name: losses[-1]}, row["prefix"])
    return DomainResult(records, losses, {mode: row[mode] for mode in modes}, served, prefix_loss)


def arrival_problems(
    stored: Mapping[str, float], measured: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """Prefix losses of a store against those that this process measures: what cannot be rounding,
    and what can.
    """
    wrong: list[str] = []
    rounding: list[str] = []
    for domain, loss in measured.items():
        if domain not in stored or loss == stored[domain]:
            continue
        line = f"{domain}: {stored[domain]:.6f} in the store, {loss:.6f} here"
        near = abs(loss - stored[domain]) <= ARRIVAL_TOLERANCE * max(1.0, abs(stored[domain]))
        (rounding if near else wrong).append(line)
    return wrong, rounding


def stages(
    served: Sequence[Served],
    new: str,
    samples: Mapping[str, Sequence[Row]],
    settings: NullSpaceSettings,
) -> list[Stage]:
    """What was frozen before each domain, with the rows to look at it through.

    samples: domain -> validation rows, of the domains served and of the new one. Domains without
    any (imported ones) are protected by the others' rows.
    """
    order = [entry.domain for entry in served] + [new]
    result = []
    for place in range(1, len(order)):
        names = {
            "previous": order[:place],
            "new": [order[place]],
            "both": order[: place + 1],
        }[settings.data]
        rows = {name: samples[name] for name in names if name in samples}
        stacks = tuple(name for entry in served[:place] for name in entry.stacks)
        result.append(Stage(stacks, sample_rows(rows, settings.samples)))
    return result
