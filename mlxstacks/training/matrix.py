"""The forgetting matrix: the loss of every domain so far, after each was trained, in three modes.

    ungated    every stack on
    prefix     the stacks of domains 1..j for domain j: frozen, so a column never changes again
    isolated   domain j's own stacks alone; less than it was trained with, but for the first one

A prefix loss that moved means that something frozen was written to, or that another base, other
rows or another evaluator is in use. It is compared exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.errors import StoreError
from mlxstacks.layers.selection import subset, ungated
from mlxstacks.layers.stacked import set_mode
from mlxstacks.training.stack_settings import MatrixMode

Row = dict[str, float]


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
    place = [one.domain for one in served].index(domain)
    if mode == "isolated":
        return served[place].stacks
    until = served if mode == "ungated" else served[: place + 1]
    return tuple(name for one in until for name in one.stacks)


def measure_row(
    model: nn.Module,
    served: Sequence[Served],
    loss_of: Mapping[str, Callable[[nn.Module], float]],
    modes: Sequence[MatrixMode],
    dtype: mx.Dtype | None = None,
    on_loss: Callable[[MatrixMode, str, float], None] | None = None,
) -> dict[MatrixMode, Row]:
    """Mode -> domain -> validation loss, of all domains served that have a `loss_of` (imported
    ones have no rows).

    dtype: see `PackedStacks.serve`. Two entries with the same stacks on are measured once.
    Law: afterwards every stack is on.
    """
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    rows: dict[MatrixMode, Row] = {}
    for mode in modes:
        rows[mode] = {}
        for one in served:
            if one.domain not in loss_of:
                continue
            names = stacks_for(mode, served, one.domain)
            if (one.domain, names) not in found:
                set_mode(model, subset(names), dtype)
                found[one.domain, names] = loss_of[one.domain](model)
            rows[mode][one.domain] = found[one.domain, names]
            if on_loss is not None:
                on_loss(mode, one.domain, rows[mode][one.domain])
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


def rises(matrix: Mapping[str, Mapping[str, float]]) -> Row:
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
