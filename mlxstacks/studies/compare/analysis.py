"""From cells to differences between arms, seed by seed, and a verdict by the plan's rule.

Every arm is compared with the first one, the control. A difference is arm less control, paired by
seed, with Student's interval over seeds. Only the primary measure is judged:

    better, worse         the interval, its confidence shared out over the arms (Bonferroni), lies
                          on one side of 0, and the mean is at least the margin away from it
    no difference shown   the whole interval lies inside the margin
    undecided             anything else: too few seeds, a cell without a result, unequal steps

Measures of a cell, from the result of its run of `stack`, in nats per token; means over domains,
followed by the values of each:

    task_loss         validation loss of each domain right after its training, with the stacks up
                      to its own: cross entropy alone, without the balance of experts
    later_task_loss   the same of all domains but the first
    ungated           loss at the end with every stack on; ungated_earlier: without the last domain
    ungated_rise      how much that lies above task_loss, earlier domains
    prefix, isolated  loss at the end with the stacks up to its own, with its own alone
    train_loss, balance_loss   of the last step that was logged, the balance for each projection
    parameters, steps, seconds what was kept, what was done, processor time of the whole run

Arms may differ in the order of the domains or in what these train on; every arm measures a domain
on the same rows. Of different orders `later_task_loss`, `ungated_earlier` and `ungated_rise` would
be of different domains: there is none, and the matrix is compared where the same domains are on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean
from typing import Any, Literal

from mlxstacks.errors import InputError
from mlxstacks.stats import MeanInterval, mean_interval
from mlxstacks.studies.compare.settings import CompareSettings, at_rate
from mlxstacks.study.render.words import capital

Outcome = Literal["better", "worse", "no difference shown", "undecided"]
# failed: training said so (NaN, no memory). crashed: its process died.
Status = Literal["trained", "failed", "crashed"]
Matrix = dict[str, dict[str, dict[str, MeanInterval]]]
Budgets = Mapping[str, Mapping[str, int]]
"""Arm -> what all rounds of all its domains may spend: trained parameters (routers and noise
included), optimizer steps, and tokens of the rows of all batches, without padding, repeated rows
counted again. Rows are no budget: a packed one holds many."""
RULES = {
    "difference": "arm less control (the first arm), paired by seed; Student's interval over seeds",
    "better": "the interval below 0 and the mean at least the margin below it",
    "worse": "the interval above 0 and the mean at least the margin above it",
    "no difference shown": "the whole interval inside the margin",
    "undecided": "anything else; also where a cell has no result, or arms that share the budget of "
    "steps or tokens did different shares of the steps that were planned",
    "family": "for the primary measure the confidence is shared out over the arms (Bonferroni); "
    "all other measures are told, not judged",
}
SEARCH_RULE = {
    "rate": "each arm at that of `rates` with the lowest task_loss, mean over `search_seeds`, "
    "among those that gave a result with every one of them"
}
Searches = Mapping[str, Mapping[str, Any]]
"""Arm -> `rate`, its best learning rate, and `losses`: rate, as text -> mean task_loss over the
search's seeds, None where one of them gave none."""
# In this order in tables; name -> how it is called there.
SUMMARY = {
    "task_loss": "task loss",
    "later_task_loss": "of later domains",
    "ungated": "ungated",
    "ungated_earlier": "ungated, earlier domains",
    "ungated_rise": "ungated rise",
    "isolated": "isolated",
    "train_loss": "loss in training",
    "balance_loss": "balance loss",
    "parameters": "kept parameters",
    "steps": "steps",
    "seconds": "CPU seconds",
}


# Of other domains in another order.
_OF_THE_ORDER = ("later_task_loss", "ungated_earlier", "ungated_rise")


@dataclass(frozen=True)
class CellRecord:
    """What is kept of a cell. values: the measures above. matrix: mode -> domain trained last ->
    domain measured -> loss. curves: domain -> validation losses by step, the steps of earlier
    rounds counted on.
    """

    arm: str
    seed: int
    status: Status
    reason: str | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    matrix: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    rounds: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.arm}_seed-{self.seed}"


ONLY_AT_THE_END = "evaluated only at the start and at the end; set run.steps_per_eval"


@dataclass(frozen=True)
class StepsToLoss:
    """How soon one arm has the validation loss of a domain that another ends with.

    reached: seeds, of n, in which it does. steps: its first evaluated step there, over those seeds.
    target_steps: the other's own first step there. ratio: target_steps by steps (2.5: that many
    times faster), a geometric mean over seeds; None where a seed does not get there, or is there
    before its first step, or where it could be nothing else than 1: `why` says so then.
    """

    n: int
    reached: int
    steps: MeanInterval | None
    target_steps: MeanInterval
    ratio: MeanInterval | None
    why: str = ""


@dataclass(frozen=True)
class ArmResult:
    """An arm against the control; the control's own has means alone.

    to_control: domain -> how soon the arm has the loss that the control ends with; to_arm: how soon
    the control has the arm's.

    means: of each measure over the seeds. differences: of each measure that both have. judged: the
    difference of the primary measure at the family's confidence. matrix: mean loss in each mode;
    matrix_differences: the same, arm less control.
    """

    arm: str
    means: dict[str, MeanInterval]
    differences: dict[str, MeanInterval] = field(default_factory=dict)
    judged: MeanInterval | None = None
    outcome: Outcome | None = None
    reason: str = ""
    matrix: Matrix = field(default_factory=dict)
    matrix_differences: Matrix = field(default_factory=dict)
    to_control: dict[str, StepsToLoss] = field(default_factory=dict)
    to_arm: dict[str, StepsToLoss] = field(default_factory=dict)


Pairs = Sequence[tuple[CellRecord, CellRecord]]
"""Cells of control and arm, seed by seed."""


def measures(report: Mapping[str, Any], seconds: float | None) -> dict[str, float | None]:
    """Name -> value; None where a run has none (balance without a router). `NAME of DOMAIN` for
    the losses of each domain.

    report: `data` of the result of a run that is complete. seconds: of its process, None where
    it was stopped on the way.
    """
    domains: Mapping[str, Mapping[str, Any]] = report["domains"]
    task = {name: float(domain["final_loss"]) for name, domain in domains.items()}
    at_end = {mode: [*rows.values()][-1] if rows else {} for mode, rows in report["matrix"].items()}
    ungated = at_end.get("ungated", {})
    earlier = [name for name in ungated if name != [*task][-1]]
    histories = [
        [step for r in domain.get("rounds", []) for step in r["history"]] or [{}]
        for domain in domains.values()
    ]
    values: dict[str, float | None] = {
        "task_loss": fmean(task.values()),
        "later_task_loss": _mean([*task.values()][1:]),
        "ungated": _mean(ungated.values()),
        "ungated_earlier": _mean([ungated[name] for name in earlier]),
        "ungated_rise": _mean([ungated[name] - task[name] for name in earlier]),
        "prefix": _mean(at_end.get("prefix", {}).values()),
        "isolated": _mean(at_end.get("isolated", {}).values()),
        "train_loss": _mean([h[-1].get("task_loss", h[-1].get("loss")) for h in histories]),
        "balance_loss": _mean([d.get("balance_loss_per_projection") for d in domains.values()]),
        "parameters": sum(domain["parameters"] for domain in domains.values()),
        "steps": sum(domain["steps"] for domain in domains.values()),
        "seconds": seconds,
    }
    for name, row in {"task_loss": task, **at_end}.items():
        values |= {f"{name} of {domain}": loss for domain, loss in row.items()}
    return values


def _mean(values: Any) -> float | None:
    """None where a value is missing, or all are."""
    listed = list(values)
    return fmean(listed) if listed and None not in listed else None


def check_budgets(budgets: Budgets, equal: Sequence[str], tolerance: float) -> None:
    """Raises: InputError listing every budget that differs from the control's beyond it."""
    control, *others = budgets
    problems = [
        f"\n  {name}: {budgets[arm][name]:,} of {arm}, {base:,} of {control} "
        f"({budgets[arm][name] / base - 1:+.2%}, allowed {tolerance:.2%})"
        for name in equal
        for base in [budgets[control][name]]
        for arm in others
        if abs(budgets[arm][name] - base) > tolerance * base
    ]
    if problems:
        raise InputError(
            f"the arms are to have equal budgets and have not:{''.join(problems)}\n"
            "change stack.rank, rounds, iters, batch_size, packing or max_seq_length of an arm; or "
            "leave out of `equal` what need not be equal"
        )


def check_domains(
    planned: Mapping[str, Mapping[str, Mapping[str, Any]]], primary: str = "task_loss"
) -> None:
    """planned: arm -> domain, in the order of training -> what its dry run says.

    Raises: InputError where an arm has other domains than the control, or measures one on other
        rows; where `primary` is of other domains in another order.
    """
    control, *others = planned
    base, problems = planned[control], []
    for arm in others:
        if primary in _OF_THE_ORDER and [*planned[arm]][-1] != [*base][-1]:
            problems.append(f"\n  {arm}: {primary} is of other domains in its order; use ungated")
        if odd := sorted(planned[arm].keys() ^ base.keys()):
            problems.append(f"\n  {arm}: {', '.join(odd)} in one of {arm} and {control} alone")
        problems += [
            f"\n  {arm}: {name} is measured on other rows than in {control}"
            for name in planned[arm].keys() & base.keys()
            if planned[arm][name]["validation_ids_sha256"] != base[name]["validation_ids_sha256"]
        ]
    if problems:
        raise InputError(
            f"arms have to train the same domains and measure them alike:{''.join(problems)}\n"
            "give each arm every domain; of sources that differ, add the control's with "
            "`part: validation` and mark the others `part: train`"
        )


def best_rates(settings: CompareSettings, cells: Mapping[tuple[str, int], CellRecord]) -> Searches:
    """By SEARCH_RULE. cells: of the search, by the arm's name (`at_rate`) and seed.

    Raises: InputError for an arm that no rate trains with every seed.
    """
    searches = {}
    for arm in settings.arms:
        losses = {}
        for rate in settings.rates:
            name = at_rate(arm, rate, search=True).name
            of_rate = [cells[name, seed] for seed in settings.search_seeds]
            losses[str(rate)] = _mean(cell.values.get("task_loss") for cell in of_rate)
        known = {rate: loss for rate, loss in losses.items() if loss is not None}
        if not known:
            reasons = "; ".join(f"{c.name}: {c.reason}" for c in cells.values() if c.reason)
            raise InputError(
                f"no learning rate of {list(settings.rates)} trains arm {arm.name} with each of "
                f"the search's seeds ({reasons}); give other rates, or --retry"
            )
        best = min(known, key=known.__getitem__)
        searches[arm.name] = {"rate": float(best), "losses": losses}
    return searches


def at_the_end(searches: Searches) -> list[str]:
    """Sentences on arms whose best rate is the lowest or highest one."""
    return [
        f"The best learning rate of {arm}, {found['rate']:g}, is the {word} tried: a better one "
        "may lie beyond."
        for arm, found in searches.items()
        for word, end in (("lowest", min), ("highest", max))
        if len(found["losses"]) > 1 and found["rate"] == end(map(float, found["losses"]))
    ]


def analyse(
    settings: CompareSettings, budgets: Budgets, cells: Sequence[CellRecord]
) -> list[ArmResult]:
    """One result an arm, the control's first. cells: in any order."""
    by_arm = {
        arm.name: {c.seed: c for c in cells if c.arm == arm.name and c.status == "trained"}
        for arm in settings.arms
    }
    control, *others = by_arm
    confidence = settings.confidence
    orders = {tuple(cell.curves) for trained in by_arm.values() for cell in trained.values()}
    results = []
    for arm, trained in by_arm.items():
        means = {}
        for name in dict.fromkeys(name for cell in trained.values() for name in cell.values):
            values = [v for cell in trained.values() if (v := cell.values.get(name)) is not None]
            if values and not (len(orders) > 1 and name in _OF_THE_ORDER):
                means[name] = mean_interval(values, confidence)
        matrix = _mean_matrix([cell.matrix for cell in trained.values()], confidence)
        if arm == control:
            results.append(ArmResult(arm, means, matrix=matrix))
            continue
        shared = [s for s in settings.seeds if s in by_arm[control] and s in trained]
        pairs = [(by_arm[control][seed], trained[seed]) for seed in shared]
        paired = {name: _paired(pairs, name) for name in dict.fromkeys((*means, settings.primary))}
        primary, family = paired[settings.primary], 1 - (1 - confidence) / len(others)
        judged = mean_interval(primary, family) if primary else None
        results.append(ArmResult(
            arm, means, {n: mean_interval(paired[n], confidence) for n in means if paired[n]},
            judged, *judge(settings, budgets, judged, pairs), matrix,
            _mean_matrix([_less(cell.matrix, base.matrix) for base, cell in pairs], confidence),
            steps_to_loss(pairs, confidence),
            steps_to_loss([(cell, base) for base, cell in pairs], confidence),
        ))  # fmt: skip
    return results


def _mean_matrix(matrices: Sequence[Mapping[str, Any]], confidence: float) -> Matrix:
    """Each entry's mean over cells that all have it."""
    return {
        mode: {
            row: {
                column: mean_interval([m[mode][row][column] for m in matrices], confidence)
                for column in columns
            }
            for row, columns in rows.items()
        }
        for mode, rows in (matrices[0] if matrices else {}).items()
    }


def _paired(pairs: Pairs, name: str) -> list[float]:
    """Arm less control of every pair; nothing where a pair lacks the measure."""
    values = [(base.values.get(name), cell.values.get(name)) for base, cell in pairs]
    differences = [high - low for low, high in values if low is not None and high is not None]
    return differences if len(differences) == len(pairs) else []


def steps_to_loss(pairs: Pairs, confidence: float) -> dict[str, StepsToLoss]:
    """Domain -> how soon the second cell of each pair has the lowest loss of the first.

    Laws: against itself every ratio is 1; nothing depends on losses after the first step there.
    """
    found = {}
    for domain in pairs[0][0].curves if pairs else ():
        steps, targets = [], []
        for first, second in pairs:
            target = min(loss for _, loss in first.curves[domain])
            targets.append(_first_step(first.curves[domain], target) or 0)
            steps.append(_first_step(second.curves[domain], target))
        there = [step for step in steps if step is not None]
        ratios = [math.log(a / b) for a, b in zip(targets, steps, strict=True) if a and b]
        curves = [cell.curves[domain] for pair in pairs for cell in pair]
        ends = {curve[-1][0] for curve in curves}
        at_the_end = len(ends) == 1 and all({*map(itemgetter(0), c)} <= {0, *ends} for c in curves)
        found[domain] = StepsToLoss(
            len(pairs), len(there), mean_interval(there, confidence) if there else None,
            mean_interval(targets, confidence),
            _exp(mean_interval(ratios, confidence))
            if len(ratios) == len(pairs) and not at_the_end else None,
            ONLY_AT_THE_END if at_the_end else "",
        )  # fmt: skip
    return found


def _first_step(curve: Sequence[tuple[int, float]], target: float) -> int | None:
    return next((step for step, loss in curve if loss <= target), None)


def _exp(interval: MeanInterval) -> MeanInterval:
    low, high = (None if v is None else math.exp(v) for v in (interval.low, interval.high))
    return MeanInterval(math.exp(interval.mean), low, high, interval.n, interval.confidence)


def _less(own: Any, base: Any) -> Any:
    """A matrix less another, entry by entry, of the rows after the same domains."""
    return {
        mode: {
            row: {column: loss - base[mode][row][column] for column, loss in columns.items()}
            for row, columns in rows.items()
            if base[mode][row].keys() == columns.keys()
        }
        for mode, rows in own.items()
    }


def judge(
    settings: CompareSettings, budgets: Budgets, judged: MeanInterval | None, pairs: Pairs
) -> tuple[Outcome, str]:
    """The outcome by the plan's rule, and why it is undecided where it is."""
    seeds = len(settings.seeds)
    if judged is None or len(pairs) < seeds:
        return "undecided", f"{seeds - len(pairs)} of {seeds} seeds have no pair of results"
    if judged.low is None or judged.high is None:
        return "undecided", "one seed has no interval"
    for base, cell in pairs if {"steps", "tokens"} & {*settings.equal} else ():
        # they differ where a round ended early, or was not begun
        steps = [pair.values["steps"] or 0.0 for pair in (base, cell)]
        planned = [budgets[pair.arm]["steps"] for pair in (base, cell)]
        done = [count / of for count, of in zip(steps, planned, strict=True)]
        if max(done) - min(done) > settings.tolerance * max(done):
            return "undecided", (
                f"seed {cell.seed} did {steps[1]:,.0f} of {planned[1]:,} steps, the control "
                f"{steps[0]:,.0f} of {planned[0]:,}"
            )
    if judged.within(settings.margin):
        return "no difference shown", ""
    if judged.excludes(0.0) and abs(judged.mean) >= settings.margin:
        return ("better", "") if judged.mean < 0 else ("worse", "")
    if judged.excludes(0.0):
        return "undecided", "the difference may or may not be one that counts"
    return "undecided", "the interval holds 0 and reaches beyond what counts"


def of_domains(settings: CompareSettings, result: ArmResult) -> dict[str, MeanInterval]:
    """Domain -> difference of the primary measure, of the domains that it is a mean of."""
    start = f"{settings.primary.removesuffix('_earlier')} of "
    found = {
        name.removeprefix(start): interval
        for name, interval in result.differences.items()
        if name.startswith(start)
    }
    if settings.primary == "ungated_earlier":
        found.pop(next(reversed(result.matrix.get("ungated", {"": {}}))), None)
    return found if len(found) > 1 else {}


def verdict(
    settings: CompareSettings, results: Sequence[ArmResult], searches: Searches | None = None
) -> str:
    """The outcomes in words."""
    control, *others = results
    sentences: list[str] = []
    for result in others:
        primary = SUMMARY[settings.primary]
        words = f"{primary}, {result.arm} against {control.arm}: {result.outcome}"
        if (judged := result.judged) is not None:
            words += f", {judged.mean:+.4f} ("
            if judged.low is not None and judged.high is not None:
                words += f"{judged.low:+.4f} to {judged.high:+.4f} at {judged.confidence:.3g}, "
            words += f"n={judged.n})"
        if result.reason:
            words += f" ({result.reason})"
        if domains := of_domains(settings, result):
            words += "; by domain " + ", ".join(
                f"{domain} {i.mean:+.3f}"
                + ("" if i.low is None or i.high is None else f" ({i.low:+.3f} to {i.high:+.3f})")
                for domain, i in domains.items()
            )
        sentences.append(f"{capital(words) if sentences else words}.")
    if searches:
        rates = ", ".join(f"{arm} {found['rate']:g}" for arm, found in searches.items())
        sentences.append(f"Each at the best of {len(settings.rates)} learning rates: {rates}.")
        sentences += at_the_end(searches)
    return f"{' '.join(sentences)} What counts is {settings.margin:g} nats per token."
