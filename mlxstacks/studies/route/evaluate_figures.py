"""Figures of `mlxstacks route evaluate`: losses of modes with intervals, a router's metrics, gaps.

A domain's loss in a mode is the mean over the tokens of its rows, as the one evaluator has it.
Intervals are of a bootstrap over rows: rows are drawn with replacement, each with all its tokens,
the same rows for all modes. A difference between two modes is of pairs: the same tokens in both.
Where its interval holds 0 the modes show no difference.

Few rows of skewed losses, as losses are, have means that err to one side, which percentiles of the
drawn means miss. The bootstrap is therefore of t, the distance from the mean in standard errors of
the drawn rows themselves (Efron and Tibshirani 1993, section 12.5), and no bound is nearer than
Student's. benchmarks/interval_coverage.py counts what they hold: of exponential losses 94 and 97%
at 5 and 24 rows, where percentiles hold 89 and 93%; of three rows, or longer tails, too little.

Letters: n rows of a domain, R bootstrap draws.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from mlxstacks.stats import mcnemar_of_pairs, mean_interval, paired_interval
from mlxstacks.studies.route.cells import RATE, in_words, interval_plot, rate_cells, rate_in_words
from mlxstacks.studies.route.data import OTHER, UNSEEN, EvaluatedRow
from mlxstacks.study.document import Block, Columns, Table, cell_of
from mlxstacks.study.render.words import short

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
    """value: of the rows as they are, error: its standard error. replicates, errors (R,): the same
    of the drawn ones. n: rows.
    """

    value: float
    error: float
    replicates: np.ndarray
    errors: np.ndarray
    n: int

    def estimate(self) -> Estimate:
        from scipy.special import stdtrit

        if self.n < 2:
            return {"value": self.value, "low": None, "high": None}
        # Draws of one row alone have no spread to measure by.
        spread = self.errors > 1e-9 * self.error
        t = (self.replicates - self.value)[spread] / self.errors[spread]
        tail, student = 50 * (1 - CONFIDENCE), float(stdtrit(self.n - 1, 0.5 + CONFIDENCE / 2))
        least, most = np.percentile(np.append(t, 0.0), [tail, 100 - tail])
        return {
            "value": self.value,
            "low": self.value - max(float(most), student) * self.error,
            "high": self.value - min(float(least), -student) * self.error,
        }


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
        matrix[mode] = {name: of_domain.estimate() for name, of_domain in drawn.items()}
        if among := [of_domain for name, of_domain in drawn.items() if name in averaged]:
            matrix[mode][ALL] = _Drawn(
                float(np.mean([d.value for d in among])),
                math.hypot(*(d.error for d in among)) / len(among),
                np.mean([d.replicates for d in among], axis=0),
                np.sqrt(np.sum([d.errors**2 for d in among], axis=0)) / len(among),
                min(d.n for d in among),
            ).estimate()
    return matrix


def _drawn(sums: np.ndarray, tokens: np.ndarray, draws: int, seed: int) -> _Drawn:
    """Sums, tokens (n,): the mean a token. The rows drawn depend on n, draws and seed alone."""
    n = len(tokens)
    chosen = np.random.default_rng(seed).integers(0, n, (draws, n))
    (value,), (error,) = _ratio(sums[None], tokens[None])
    return _Drawn(float(value), float(error), *_ratio(sums[chosen], tokens[chosen]), n)


def _ratio(sums: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums, tokens (R, n) of R draws: mean a token (R,), and its standard error (R,), to first
    order.
    """
    n, totals = sums.shape[1], tokens.sum(axis=1)
    means = sums.sum(axis=1) / totals
    squares = ((sums - means[:, None] * tokens) ** 2).sum(axis=1)
    return means, np.sqrt(n / max(n - 1, 1) * squares) / totals


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


def difference_json(pairs: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """(first, other) of each row -> other less first, as shares: value, low, high, n; p: of
    McNemar's exact test.
    """
    first, other = ([pair[side] for pair in pairs] for side in (0, 1))
    both = sum(a and b for a, b in pairs)
    gained, lost = sum(other) - both, sum(first) - both
    bounds = paired_interval(both, gained, lost, len(pairs), CONFIDENCE)
    return {
        "value": (gained - lost) / len(pairs), "low": bounds.low, "high": bounds.high,
        "n": len(pairs), "p": mcnemar_of_pairs(first, other).p_value,
    }  # fmt: skip


def gap_summary(flags: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """How often gaps are seen where they are, and where they are not; rates with Wilson's interval.

    flags: group -> whether each of its rows is a gap by one test: detector
    (routing/gap_detector.py; what the chat uses where a router has one), scores (every raw score is
    below the threshold; what it uses where there is none) or loss (no set of domains lowers the
    loss of the known answer enough). detection: over rows of unseen domains. false_alarms: over
    rows of the store's domains and mixed ones. others: prompts that are nobody's, where a gap is no
    mistake but the base can do without.
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


# --- tables, plots and words ----------------------------------------------------------------------


_LONGEST = 200
# The modes whose difference to a mode is shown at once; a folded table has all.
_COMPARED = {"base": ("ungated", "routed"), "random_stack": ("oracle_domain", "routed")}


def outcome(data: Mapping[str, Any]) -> str:
    return f"routed - base {in_words(data['differences']['base']['routed'][ALL])}"


def verdict(data: Mapping[str, Any]) -> str:
    return " ".join(_sentences(data))


def sign(estimate: Mapping[str, float | None]) -> int:
    """1 or -1 where the interval lies above or below 0, else 0: no difference shown."""
    low, high = estimate["low"], estimate["high"]
    return 0 if low is None or high is None else int(low > 0) - int(high < 0)


def compared_words(
    differences: Mapping[str, Mapping[str, float | None]], better: str, worse: str, unclear: str
) -> str:
    """How one mode stands to another over domains: `better a, b; worse c; unclear d`."""
    by_sign: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for name, difference in differences.items():
        if name != ALL:
            by_sign[sign(difference)].append(f"{name} ({difference['value']:+.3f})")
    words = {-1: better, 1: worse, 0: unclear}
    return "; ".join(f"{words[s]} {', '.join(names)}" for s, names in by_sign.items() if names)


def _sentences(data: Mapping[str, Any]) -> Iterator[str]:
    routed = {to: data["differences"][to]["routed"] for to in ("base", "ungated")}
    words = {-1: "lowers", 1: "raises", 0: "does not measurably change"}
    to_base, to_ungated = (routed[to][ALL] for to in routed)
    yield f"Against the base routing {words[sign(to_base)]} the mean loss: {in_words(to_base)}."
    yield f"Against ungated stacks it {words[sign(to_ungated)]} it: {in_words(to_ungated)}."
    for to, row in routed.items():
        domains = {name: row[name] for name in data["domains"] if name in data["rows"]}
        comparison = compared_words(domains, "better on", "worse on", "no difference shown on")
        yield f"Against {to}: {comparison}."
    if "random_stack" in data["matrix"]:
        random = data["differences"]["base"]["random_stack"][ALL]
        right = data["differences"]["random_stack"]["oracle_domain"][ALL]
        words = {
            -1: "the domains make a difference",
            0: "no difference shown, so no gain is shown to be the domains'",
            1: "worse than random",
        }
        yield (
            f"Random stacks of equal norm against the base: {in_words(random)}; the right ones "
            f"against these: {in_words(right)}; {words[sign(right)]}."
        )
    test = next(test for test in ("detector", "scores") if test in data["gaps"])
    detection, alarms = (data["gaps"][test][kind] for kind in ("detection", "false_alarms"))
    if detection:
        yield f"Gaps on unseen domains are seen in {rate_in_words(detection)}."
    if alarms:
        yield f"False alarms on known domains: {rate_in_words(alarms)}."
    if detection and alarms and detection["low"] <= alarms["high"]:
        yield "Unseen domains are not told from known ones."


def _words(name: str) -> str:
    return {"prefix": "first domain only"}.get(name, name.replace("_", " "))


def blocks(data: Mapping[str, Any]) -> Iterator[Block]:
    """Losses and differences first, single answers last."""
    yield from _loss_blocks(data)
    kinds = {
        "unseen domains seen": "detection", "false alarms on known ones": "false_alarms",
        "other prompts": "others",
    }  # fmt: skip
    yield Table.of(
        "gaps", "Gaps: prompts that no domain fits", {"test": "text", "prompts": "text", **RATE},
        (
            (test, name, *rate_cells(rates[kind]))
            for test, rates in data["gaps"].items() if rates
            for name, kind in kinds.items()
        ),
    )  # fmt: skip
    yield from _router_tables(data)
    yield Table.of(
        "panels", "Three panels",
        {"panel": "text", "mode": "text", "loss": ("number", 3), "exactly right": "count",
         "of answers": "count"},
        (
            (name, _words(panel["mode"]), panel["losses"].get(ALL), panel["exactly_right"],
             panel["samples"])
            for name, panel in data["panels"].items()
        ),
    )  # fmt: skip
    yield Table.of(
        "every-difference", "Every difference between modes, same tokens",
        {"mode": "text", "less": "text", "prompts": "text", "nats per token": ("change", 3)},
        (
            (_words(mode), _words(to), group, cell_of(estimate))
            for to, matrix in data["differences"].items()
            for mode, row in matrix.items()
            for group, estimate in row.items()
        ),
        folded=True,
    )  # fmt: skip
    yield _sample_table(data["samples"])


def _loss_blocks(data: Mapping[str, Any]) -> Iterator[Block]:
    """Groups down and modes across: there are seven modes, and any number of domains."""
    modes, groups = data["matrix"], {**data["rows"], ALL: None}
    columns: Columns = {
        "prompts": "text", "rows": "count", **{_words(mode): ("number", 3) for mode in modes}
    }  # fmt: skip
    yield Table.of("losses", "Loss, nats per token", columns, (
        (group, count, *(row.get(group, {}).get("value") for row in modes.values()))
        for group, count in groups.items()
    ), caption="Ungated: every domain on. Routed: weights by the router; routed hard: 0 or 1. "
        "Oracle domain: the domains of the row's label. Random stack: of equal norm, for those. "
        "First domain only: as after training one domain.")  # fmt: skip
    yield interval_plot(
        "modes", "Loss in each mode, mean over domains",
        {_words(mode): row[ALL] for mode, row in modes.items()}, "loss, nats per token",
    )  # fmt: skip
    yield interval_plot(
        "differences", "Difference to the base, same tokens, mean over domains",
        {_words(mode): row[ALL] for mode, row in data["differences"]["base"].items()},
        "difference, nats per token (left is better)", references={"no difference": 0.0},
        form="{:.2f}",
    )  # fmt: skip
    for to, matrix in data["differences"].items():
        shown = [m for m in _COMPARED.get(to, ("routed", "routed_hard")) if m in matrix]
        yield Table.of(
            f"to-{to.replace('_', '-')}", f"Difference to {_words(to)}, same tokens",
            {"prompts": "text", **{_words(mode): ("change", 3) for mode in shown}},
            ((group, *(cell_of(matrix[mode].get(group)) for mode in shown)) for group in groups),
            caption="Nats a token, 95% intervals over rows (of fewer than 24 rows they hold less); "
            "below 0 is better.",
        )  # fmt: skip


def _router_tables(data: Mapping[str, Any]) -> Iterator[Table]:
    rows = []
    for router in data["routers"]:
        metrics = router["metrics"]
        hits = [metrics[key] for key in ("single_top1", "mixed_set")]
        rates = [part for rate in hits for part in (cell_of(rate), rate and rate["n"])]
        rows.append((
            router["name"], cell_of(router["exact_set"]), *rates, metrics["bce"],
            metrics["calibration_error"], router["losses"]["routed"][ALL],
            router["mean_active_domains"],
        ))  # fmt: skip
    yield Table.of("routers", "Routers", {
        "router": "text", "exact set": ("share", 0), "right domain first": ("share", 0),
        "single prompts": "count", "both domains": ("share", 0), "mixed prompts": "count",
        "cross entropy": ("number", 3), "calibration error": ("number", 3),
        "routed loss": ("number", 3),
        "active domains": ("number", 2),
    }, rows)  # fmt: skip
    compared = [(r["name"], r["to_first"]) for r in data["routers"] if r.get("to_first")]
    if compared:
        yield Table.of(
            "routers-compared", f"Routers less {data['routers'][0]['name']}, on the same rows",
            {"router": "text", "rows": "count", "exact set": "change", "routed loss": ("change", 3),
             "routed hard": ("change", 3)},
            [(name, found["rows"], cell_of(found["set"]),
              *(cell_of(found["losses"][mode].get(ALL)) for mode in ("routed", "routed_hard")))
             for name, found in compared],
            caption="Exact set: just the domains of the label are on, a share of all rows. Losses: "
            "nats per token, mean over domains; below 0 is better. 95% intervals over rows.",
        )  # fmt: skip
    if data["over_routers"]:
        yield Table.of(
            "over-routers", "Means over routers, with Student's intervals",
            {"what": "text", "mean": ("change", 3)},
            ((_words(key), cell_of(mean)) for key, mean in data["over_routers"].items()),
        )  # fmt: skip


def _sample_table(samples: Sequence[Mapping[str, Any]]) -> Table:
    panels = list(dict.fromkeys(name for sample in samples for name in sample["answers"]))
    rows = []
    for sample in samples:
        texts = [sample["expected"] or "", *(sample["answers"][panel]["text"] for panel in panels)]
        prompt, *answers = (short(text, _LONGEST) for text in (sample["prompt"], *texts))
        rows.append((prompt, sample["group"], *answers))
    columns: Columns = dict.fromkeys(("prompt", "group", "expected", *panels), "text")
    return Table.of("samples", "Samples", columns, rows, folded=True)
