"""A router's metrics on held-out prompts, against their labels.

The label is what the data says a prompt is of; a target that discovery found may differ from it
(another domain's stacks may help more), so `route train` reports these metrics against its targets.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlxstacks.routing.router_metrics import (
    calibration,
    confusion,
    domain_metrics,
    rate_json,
    top1_hits,
    top2_hits,
)
from mlxstacks.stats import mean_interval
from mlxstacks.studies.route.evaluate_matrix import ALL
from mlxstacks.studies.route.evaluate_rows import UNSEEN, EvaluatedRow

# Scores are float32: nearer to 0 or 1 than this they are rounded to it.
_SMALLEST = 1e-7


def router_metrics(
    rows: Sequence[EvaluatedRow],
    scores: Sequence[Mapping[str, float]],
    domains: Sequence[str],
    threshold: float,
) -> dict[str, Any]:
    """single_top1, mixed_set: rates; bce: nats a score; calibration and precision by domain.

    scores: raw, of each row. domains: of the router. Rows of unseen domains are left out; rows of
    no domain count where every domain's target is 0 (bce, calibration, precision).
    """
    known = [i for i, row in enumerate(rows) if not row.group.startswith(UNSEEN)]
    found = np.array([[scores[i][d] for d in domains] for i in known], dtype=np.float64)
    labels = np.array(
        [[float(d in rows[i].example.label) for d in domains] for i in known], dtype=np.float64
    )
    kinds = np.array([rows[i].example.kind for i in known])
    # what a router does not know it cannot find: those rows are of no use to judge it by
    told = np.array([set(rows[i].example.label) <= set(domains) for i in known], dtype=bool)
    single, mixed = (kinds == "single") & told, (kinds == "mixed") & told
    kept = np.clip(found, _SMALLEST, 1 - _SMALLEST)
    bce = -(labels * np.log(kept) + (1 - labels) * np.log(1 - kept))
    top1, top2 = top1_hits(found[single], labels[single]), top2_hits(found[mixed], labels[mixed])
    table = calibration(found, labels)
    return {
        "single_top1": rate_json(int(top1.sum()), len(top1)),
        "mixed_set": rate_json(int(top2.sum()), len(top2)),
        "bce": float(bce.mean()),
        "calibration_error": table["expected_calibration_error"],
        "calibration": table,
        "domains": domain_metrics(found, labels, domains, threshold),
        "confusion": confusion(found[single], labels[single], domains),
    }


def over_routers(routers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Means over routers (as of several seeds) with Student's interval; None for one router."""
    if len(routers) < 2:
        return None
    metrics = [router["metrics"] for router in routers]
    values = {
        "bce": [m["bce"] for m in metrics],
        "calibration_error": [m["calibration_error"] for m in metrics],
        **{
            f"{mode}_to_{to}": [router["differences"][to][mode][ALL]["value"] for router in routers]
            for mode in ("routed", "routed_hard")
            for to in ("base", "ungated")
        },
    }
    for key in ("single_top1", "mixed_set"):
        if all(m[key] for m in metrics):
            values[key] = [m[key]["rate"] for m in metrics]
    return {key: mean_interval(found).as_json() for key, found in values.items()}
