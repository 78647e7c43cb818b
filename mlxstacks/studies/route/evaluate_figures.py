"""Figures of `mlxstacks route evaluate`: losses of modes with intervals, a router's metrics, gaps.

A domain's loss in a mode is the mean over the tokens of its rows, as the one evaluator has it.
Intervals are percentiles of a bootstrap over rows: rows are drawn with replacement, each with all
its tokens, the same rows for all modes. A difference between two modes is of pairs: the same tokens
in both. Where its interval holds 0 the modes are not distinguishable.

Of few rows percentiles are too close to each other (they never leave the range of the rows, and
the bootstrap's variance lacks the factor n / (n - 1)). Their distances from the value are therefore
stretched by sqrt(n / (n - 1)) t / z, Student's quantile over the normal one; the same correction as
in Hesterberg, What teachers should know about the bootstrap (2015), made on the bounds.

Letters: n rows of a domain, R bootstrap draws.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
from mlxstacks.studies.route.evaluate_rows import OTHER, UNSEEN, EvaluatedRow

CONFIDENCE = 0.95
# Under this name stands the mean over domains, each counting alike.
ALL = "all domains"
# Scores are float32: nearer to 0 or 1 than this they are rounded to it.
_SMALLEST = 1e-7

Estimate = dict[str, float | None]
"""value, low, high; no bounds where one row tells nothing of the spread."""
Matrix = dict[str, dict[str, Estimate]]


@dataclass(frozen=True, eq=False)
class DomainLosses:
    """One domain's rows. tokens (n,): with loss weight. sums: mode -> (n,) nats of all of them."""

    tokens: np.ndarray
    sums: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class _Drawn:
    """value: of the rows as they are. replicates (R,): of the drawn ones. n: rows."""

    value: float
    replicates: np.ndarray
    n: int

    def estimate(self) -> Estimate:
        if self.n < 2:
            return {"value": self.value, "low": None, "high": None}
        tail = 50 * (1 - CONFIDENCE)
        bounds = np.percentile(self.replicates, [tail, 100 - tail])
        low, high = self.value + _stretch(self.n) * (bounds - self.value)
        return {"value": self.value, "low": float(low), "high": float(high)}


def _stretch(n: int) -> float:
    """What the interval of a bootstrap over n >= 2 rows lacks in width; towards 1 for many."""
    from scipy.special import ndtri, stdtrit

    upper = 0.5 + CONFIDENCE / 2
    return math.sqrt(n / (n - 1)) * float(stdtrit(n - 1, upper) / ndtri(upper))


def loss_matrix(
    losses: Mapping[str, DomainLosses],
    modes: Sequence[str],
    averaged: Collection[str],
    draws: int,
    seed: int,
    against: str | None = None,
) -> Matrix:
    """Mode -> domain -> loss; or that less the loss of the mode `against`: below 0 is better. ALL
    is the mean over the `averaged` domains.

    Law: the difference of a mode to an equal one is 0, with an interval of no width.
    """
    matrix = {}
    for mode in modes:
        if mode == against:
            continue
        drawn = {}
        for place, (name, domain) in enumerate(losses.items()):
            sums = domain.sums[mode] - (domain.sums[against] if against else 0)
            drawn[name] = _drawn(sums, domain.tokens, draws, seed + place)
        matrix[mode] = _estimates(drawn, averaged)
    return matrix


def _estimates(drawn: Mapping[str, _Drawn], averaged: Collection[str]) -> dict[str, Estimate]:
    estimates = {name: d.estimate() for name, d in drawn.items()}
    if among := [d for name, d in drawn.items() if name in averaged]:
        value = float(np.mean([d.value for d in among]))
        replicates = np.mean([d.replicates for d in among], axis=0)
        estimates[ALL] = _Drawn(value, replicates, min(d.n for d in among)).estimate()
    return estimates


def _drawn(sums: np.ndarray, tokens: np.ndarray, draws: int, seed: int) -> _Drawn:
    """Sums, tokens (n,): the mean a token. The rows drawn depend on n, draws and seed alone."""
    n = len(tokens)
    chosen = np.random.default_rng(seed).integers(0, n, (draws, n))
    replicates = sums[chosen].sum(axis=1) / tokens[chosen].sum(axis=1)  # (R,)
    return _Drawn(float(sums.sum() / tokens.sum()), replicates, n)


def router_metrics(
    rows: Sequence[EvaluatedRow],
    scores: Sequence[Mapping[str, float]],
    domains: Sequence[str],
    threshold: float,
) -> dict[str, Any]:
    """single_top1, mixed_set: rates; bce: nats a score; calibration and precision by domain.

    Against the labels: what the data says a prompt is of. A target that discovery found may differ
    from it (another domain's stacks may help more), so `route train` has these metrics against its
    targets. scores: raw, of each row. domains: of the router. Rows of unseen domains are left out;
    rows of no domain count where every domain's target is 0 (bce, calibration, precision).
    """
    known = [i for i, row in enumerate(rows) if not row.group.startswith(UNSEEN)]
    given = np.array([[scores[i][d] for d in domains] for i in known], dtype=np.float64)
    labels = np.array(
        [[float(d in rows[i].example.label) for d in domains] for i in known], dtype=np.float64
    )
    kinds = np.array([rows[i].example.kind for i in known])
    # what a router does not know it cannot find: those rows are of no use to judge it by
    knows = np.array([set(rows[i].example.label) <= set(domains) for i in known], dtype=bool)
    single, mixed = (kinds == "single") & knows, (kinds == "mixed") & knows
    clipped = np.clip(given, _SMALLEST, 1 - _SMALLEST)
    bce = -(labels * np.log(clipped) + (1 - labels) * np.log(1 - clipped))
    top1, top2 = top1_hits(given[single], labels[single]), top2_hits(given[mixed], labels[mixed])
    table = calibration(given, labels)
    return {
        "single_top1": rate_json(int(top1.sum()), len(top1)),
        "mixed_set": rate_json(int(top2.sum()), len(top2)),
        "bce": float(bce.mean()),
        "calibration_error": table["expected_calibration_error"],
        "calibration": table,
        "domains": domain_metrics(given, labels, domains, threshold),
        "confusion": confusion(given[single], labels[single], domains),
    }


def over_routers(routers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Means over routers (as of several seeds) with Student's interval; None for one router."""
    if len(routers) < 2:
        return None
    metrics = [router["metrics"] for router in routers]
    values = {key: [m[key] for m in metrics] for key in ("bce", "calibration_error")}
    for mode in ("routed", "routed_hard"):
        for to in ("base", "ungated"):
            differences = [router["differences"][to][mode][ALL]["value"] for router in routers]
            values[f"{mode}_to_{to}"] = differences
    for key in ("single_top1", "mixed_set"):
        if all(m[key] for m in metrics):
            values[key] = [m[key]["rate"] for m in metrics]
    return {key: mean_interval(of_key).as_json() for key, of_key in values.items()}


def gap_summary(flags: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """How often gaps are seen where they are, and where they are not; rates with Wilson's interval.

    flags: group -> whether each of its rows is a gap by one test: scores (every raw score is below
    the threshold; what the chat uses) or loss (no set of domains lowers the loss of the known
    answer enough). detection: over rows of unseen domains. false_alarms: over rows of the store's
    domains and mixed ones. others: prompts that are nobody's, where a gap is no mistake but the
    base can do without.
    """
    kinds: dict[str, list[bool]] = {"detection": [], "false_alarms": [], "others": []}
    for group, values in flags.items():
        is_unseen = group.startswith(UNSEEN)
        known = "others" if group == OTHER else "false_alarms"
        kinds["detection" if is_unseen else known] += values
    rates, by_group = (
        {name: rate_json(sum(values), len(values)) for name, values in table.items()}
        for table in (kinds, flags)
    )
    return {**rates, "by_group": by_group}
