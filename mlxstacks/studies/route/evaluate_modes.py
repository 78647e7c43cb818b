"""The modes that `mlxstacks route evaluate` compares, as weights of domains for each row.

base            none
ungated         all at 1
routed          those above the threshold, by their score (chat at its floor at least)
routed_hard     the same at 1
oracle_domain   those of the row's label at 1; for a row without a label the base
random_stack    random stacks of equal norm in the place of oracle_domain's; one draw of them, so
                intervals are over rows, not over such stacks
prefix          the first domain at 1, as it is after one domain was trained
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mlxstacks.routing.random_stack import random_name
from mlxstacks.routing.route import Route
from mlxstacks.studies.route.evaluate_losses import RowLosses
from mlxstacks.studies.route.evaluate_matrix import DomainLosses
from mlxstacks.studies.route.evaluate_rows import EvaluatedRow, by_group

ROUTED = ("routed", "routed_hard")
MODES = ("base", "ungated", *ROUTED, "oracle_domain", "random_stack", "prefix")
# What the others are compared with, row by row.
AGAINST = ("base", "ungated", "random_stack")
# Enough to compare routers by.
COMPARED = ("base", "ungated", *ROUTED)

Losses = dict[str, list[float]]


def fixed_weights(mode: str, label: Sequence[str], domains: Sequence[str]) -> dict[str, float]:
    """Weights of a mode that asks no router."""
    chosen: Mapping[str, Sequence[str]] = {
        "base": (),
        "ungated": domains,
        "oracle_domain": label,
        "random_stack": [random_name(name) for name in label],
        "prefix": domains[:1],
    }
    return dict.fromkeys(chosen[mode], 1.0)


def fixed_losses(
    rows: Sequence[EvaluatedRow],
    losses: RowLosses,
    domains: Sequence[str],
    modes: Sequence[str],
    progress: Callable[[str], None],
) -> Losses:
    """Mode -> loss of each row that has an answer."""
    found: Losses = {}
    for mode in modes:
        weights = [fixed_weights(mode, row.example.label, domains) for row in rows]
        found[mode] = losses.of(list(enumerate(weights)))
        progress(mode)
    return found


def routed_losses(
    routes: Sequence[Route], losses: RowLosses, progress: Callable[[str], None]
) -> Losses:
    """The same for the routed modes; routes: of each row, soft."""
    soft = [dict(route.weights) for route in routes]
    hard = [dict.fromkeys(weights, 1.0) for weights in soft]
    found: Losses = {}
    for mode, weights in zip(ROUTED, (soft, hard), strict=True):
        found[mode] = losses.of(list(enumerate(weights)))
        progress(mode)
    return found


def grouped(rows: Sequence[EvaluatedRow], losses: Losses) -> dict[str, DomainLosses]:
    """Losses of rows with answers, group by group, as sums over tokens."""
    counts = np.array(
        [sum(w > 0 for w in row.row.weights) for row in rows if row.row is not None], dtype=float
    )
    sums = {mode: np.array(values) * counts for mode, values in losses.items()}
    return {
        group: DomainLosses(counts[places], {mode: s[places] for mode, s in sums.items()})
        for group, places in by_group(rows).items()
    }
