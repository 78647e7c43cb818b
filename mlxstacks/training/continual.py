"""The outer loop: one domain after another, each on all that was frozen before.

A domain is trained (boost.py), the forgetting matrix gets its row, and the prefix losses of all
earlier domains must be exactly what they were (matrix.py). Only then may the store have it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.data import Row
from mlxstacks.files.manifest import stack_name
from mlxstacks.training.boost import DomainJob, Keeper, RoundRecord, boost_domain
from mlxstacks.training.matrix import Row as MatrixRow
from mlxstacks.training.matrix import Served, check_prefix, measure_row
from mlxstacks.training.protect import Stage, sample_rows
from mlxstacks.training.stack_settings import MatrixMode, NullSpaceSettings

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
    keeper: Keeper,
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
    earlier = keeper.rounds()
    records = boost_domain(model, job, keeper, group, earlier)
    kept = [record for record in records if record.kept]
    losses = (records[0].loss_before, *(record.loss_after for record in kept))
    served = Served(job.name, tuple(stack_name(job.name, record.number) for record in kept))
    measured = dict.fromkeys(["prefix", *modes])  # the check needs it, asked for or not
    row = measure_row(model, [*before, served], loss_of, list(measured), dtype, on_loss)
    own = row["prefix"][job.name]
    last = kept[-1].number if kept else 1
    # another version or device may have measured it, before this run was stopped
    if last <= len(earlier) and not arrival_problems({job.name: losses[-1]}, {job.name: own})[0]:
        check_prefix(expected, row["prefix"])
    else:
        check_prefix({**expected, job.name: losses[-1]}, row["prefix"])
    return DomainResult(records, losses, {mode: row[mode] for mode in modes}, served, own)


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
    order = [one.domain for one in served] + [new]
    found = []
    for place in range(1, len(order)):
        names = {
            "previous": order[:place],
            "new": [order[place]],
            "both": order[: place + 1],
        }[settings.data]
        rows = {name: samples[name] for name in names if name in samples}
        stacks = tuple(name for one in served[:place] for name in one.stacks)
        found.append(Stage(stacks, sample_rows(rows, settings.samples)))
    return found
