"""Prints what `mlxstacks eval` found, or what it would ask."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output
from mlxstacks.stats import share_note

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.benchmarks.analysis import Comparison, Rate
    from mlxstacks.studies.benchmarks.means import MeanDifference
    from mlxstacks.studies.benchmarks.report import EvalReport, Findings, TaskFinding


# Of the column "outcome", which 80 columns leave little room for.
_SHORT = {"not distinguishable": "not told apart"}
_ALONE = (
    "*: p is below alpha, p (Holm) is not: of so many tests one may well have such a p by chance."
)
_MEAN_ALONE = (
    "*: its 95% interval is clear of 0; widened so that those of all pairs hold together, it is "
    "not."
)


def render(console: "Console", report: "EvalReport") -> None:
    """The plan; or each task's arms and pairs, the means, published and old scores, the verdict."""
    found = report.findings
    if found is None:
        _render_plan(console, report)
        return
    console.print(f"Plan {str(report.plan_sha256)[:16]}, {found.standing.status}.", markup=False)
    for reason in found.standing.reasons:
        console.print(f"EXPLORATORY: {reason}", markup=False, style="bold")
    for finding in found.tasks.values():
        _render_task(console, finding, report.settings["normalisation"])
    if len(found.tasks) > 1:
        console.print(_mean_table(found))
        if any(one.in_words != one.label for one in found.differences):
            console.print(_MEAN_ALONE, markup=False, style="dim")
    published = _published_table(found)
    if published is not None:
        console.print(published)
    for name, task in report.harness.get("tasks", {}).items():
        console.print(_harness_table(name, task, found.standing.mark))
    for line in report.power:
        console.print(line, markup=False, style="dim")
    for note in (*_arm_notes(report), *report.notes):
        console.print(note, markup=False, style="dim")
    plots = f", plots {', '.join(report.plots)}" if report.plots else ""
    console.print(
        f"{report.seconds:.0f} s. Wrote {report.save_path}: eval_report.json, plan, every answer"
        f"{plots}.",
        markup=False,
    )
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _render_plan(console: "Console", report: "EvalReport") -> None:
    settings = report.settings
    keys = (
        "model",
        "adapter_path",
        "store_path",
        "data",
        "items_per_task",
        "limit",
        "sample",
        "normalisation",
    )
    console.print(output.details((key, settings[key]) for key in keys))
    rows: list[list[output.Cell]] = [
        [name, one["kind"], one["n"], one["available"], ", ".join(one["arms"])]
        for name, one in report.tasks.items()
    ]
    if rows:
        console.print(output.table(["task", "kind", "items", "of", "arms"], rows))
    for name, one in report.tasks.items():
        for note in one["notes"]:
            console.print(f"{name}: {note}", markup=False, style="dim")
    for line in report.power:
        console.print(line, markup=False, style="dim")
    for line in "\n".join(report.notes).splitlines():
        console.print(line, markup=False, style="dim", soft_wrap=line.startswith(" "))
    console.print(f"Planned only: would write {report.save_path}.", markup=False)


def _render_task(console: "Console", finding: "TaskFinding", normalisation: str) -> None:
    mark, asked = finding.standing.mark, finding.asked
    title = f"{asked.task.title}, {len(asked.items):,} of {asked.available:,} items"
    if asked.task.kind == "likelihood":
        for table in _likelihood_tables(finding, mark(f"{title}, by {normalisation}")):
            console.print(table)
    else:
        console.print(_reply_table(finding, mark(title)))
    console.print(f"All {share_note(len(asked.items))}.", markup=False, style="dim")
    if finding.comparisons:
        console.print(_pair_table(finding.comparisons, mark(f"{asked.task.title}, pairs of arms")))
        if any(one.in_words != one.label for one in finding.comparisons):
            console.print(_ALONE, markup=False, style="dim")
    for words in finding.marks:
        console.print(f"{asked.task.name}: {words}", markup=False, style="dim")


def _arm_notes(report: "EvalReport") -> list[str]:
    """Each note once, behind the arms that have it."""
    arms: dict[str, list[str]] = {}
    for name, arm in report.arms.items():
        for note in arm["notes"]:
            arms.setdefault(note, []).append(name)
    every = list(report.arms)
    return [
        note if names == every or note.startswith(names[0]) else f"{', '.join(names)}: {note}"
        for note, names in arms.items()
    ]


def _likelihood_tables(finding: "TaskFinding", title: str) -> list[object]:
    """Score and interval by the primary normalisation, the other ones, letters, the old rule; and
    what it took, in a table of its own where 80 columns do not hold both.
    """
    letters = any(one.letters for one in finding.arms.values())
    old = any(one.reference for one in finding.arms.values())
    scores: list[list[output.Cell]] = []
    costs: list[list[output.Cell]] = []
    for name, one in finding.arms.items():
        by = one.normalisations
        scores.append([
            name, *_rate(one.primary), *(_percent(by.get(key)) for key in by),
            *([_percent(one.letters)] if letters else []),
            *([_percent(one.reference)] if old else []),
        ])  # fmt: skip
        costs.append([one.ties, f"{one.mean_active_domains:.2f}", f"{one.seconds:.1f}"])
    kinds = next(iter(finding.arms.values())).normalisations
    of_scores = [
        "arm", "right", "95%", *kinds, *(["letters"] if letters else []),
        *(["old rule"] if old else []),
    ]  # fmt: skip
    of_costs = ["ties", "domains", "s"]
    if not letters and not old:
        rows = [[*score, *cost] for score, cost in zip(scores, costs, strict=True)]
        return [output.table([*of_scores, *of_costs], rows, title=title)]
    rows = [[name, *cost] for name, cost in zip(finding.arms, costs, strict=True)]
    return [
        output.table(of_scores, scores, title=title),
        output.table(["arm", *of_costs], rows, title=f"{finding.asked.task.title}, what it took"),
    ]


def _reply_table(finding: "TaskFinding", title: str) -> object:
    boxes = finding.asked.task.grader == "boxed"
    rows: list[list[output.Cell]] = []
    for name, one in finding.arms.items():
        rows.append([
            name, *_rate(one.primary), f"{100 * one.parse_failure_rate:.0f}%",
            *([f"{100 * one.boxed_rate:.0f}%"] if boxes else []),
            one.cut, f"{one.mean_active_domains:.2f}", f"{one.seconds:.1f}",
        ])  # fmt: skip
    columns = [
        "arm", "right", "95%", "no answer", *(["boxed"] if boxes else []), "cut", "domains", "s",
    ]  # fmt: skip
    return output.table(columns, rows, title=title)


def _harness_table(name: str, task: Mapping[str, Any], mark: Callable[[str], str]) -> object:
    """An arm a row, with its difference from base where there is one."""
    against = {one["arm"]: one for one in task["comparisons"] if one["control"] == "base"}
    rows: list[list[output.Cell]] = []
    for arm, one in task["arms"].items():
        metrics = ", ".join(
            f"{key.removesuffix(',none')} {value:.3f}"
            for key, value in one["metrics"].items()
            if key != "sample_len"
        )
        pair = against.get(arm)
        interval = one.get("interval")
        rows.append([
            arm, metrics, f"{100 * interval['low']:.1f}-{100 * interval['high']:.1f}"
            if interval else None, f"{100 * pair['difference']:+.1f}" if pair else None,
            pair["in_words"] if pair else None,
        ])  # fmt: skip
    columns = ["arm", "metrics", "95%", "points", "against base"]
    title = mark(f"lm-evaluation-harness, by its own scoring: {name}, tested: {task['metric']}")
    return output.table(columns, rows, title=title)


def _rate(rate: "Rate | None") -> tuple[output.Cell, output.Cell]:
    if rate is None:
        return "not graded", None
    low, high = 100 * rate.interval.low, 100 * rate.interval.high
    return f"{100 * rate.score:.1f}%", f"{low:.0f}-{high:.0f}"


def _percent(rate: "Rate | None") -> output.Cell:
    return None if rate is None else f"{100 * rate.score:.1f}%"


def _pair_table(comparisons: "list[Comparison]", title: str) -> object:
    rows: list[list[output.Cell]] = []
    for one in comparisons:
        low, high = 100 * one.interval.low, 100 * one.interval.high
        rows.append([
            f"{one.arm} - {one.control}", f"{100 * one.difference:+.1f}",
            f"{low:+.1f}, {high:+.1f}", f"{one.mcnemar.p_value:.2g}", f"{one.p_adjusted:.2g}",
            _outcome(one),
        ])  # fmt: skip
    columns = ["pair", "points", "95%", "p", "p (Holm)", "outcome"]
    return output.table(columns, rows, title=title)


def _outcome(one: "Comparison | MeanDifference") -> str:
    alone = "*" if one.in_words != one.label else ""
    return _SHORT.get(one.label, one.label) + alone


def _mean_table(found: "Findings") -> object:
    rows: list[list[output.Cell]] = []
    for name, one in found.means.items():
        rows.append([name, *_mean(one.mean, one.interval.as_json(), ".1f"), one.tasks, None])
    for pair in found.differences:
        name = f"{pair.arm} - {pair.control}"
        mean = pair.mean
        shown = _mean(mean.mean, mean.interval.as_json(), "+.1f")
        rows.append([name, *shown, mean.tasks, _outcome(pair)])
    columns = ["mean over tasks", "points", "95%", "tasks", "outcome"]
    return output.table(columns, rows, title=found.standing.mark("all tasks, each the same weight"))


def _mean(mean: float, interval: Mapping[str, float], form: str) -> tuple[str, str]:
    low, high = (format(100 * interval[key], form) for key in ("low", "high"))
    return format(100 * mean, form), f"{low}, {high}"


def _published_table(found: "Findings") -> object | None:
    """Scores of the paper, where the model is its own: beside, never compared."""
    from mlxstacks.studies.benchmarks.tasks import PUBLISHED_MODEL

    rows: list[list[output.Cell]] = []
    old = any(arm.reference for one in found.tasks.values() for arm in one.arms.values())
    for finding in found.tasks.values():
        published = finding.published
        if published is None:
            continue
        ours = [finding.arms.get(name) for name in ("base", "routed")]
        rows.append([
            finding.asked.task.title, f"{100 * published.base:.1f}%",
            f"{100 * published.routed:.1f}%", *(_percent(o.primary) if o else None for o in ours),
            *((_percent(o.reference) if o else None for o in ours) if old else ()),
        ])  # fmt: skip
    columns = ["task", "published base", "published routed", "base", "routed",
               *(("base, old rule", "routed, old rule") if old else ())]  # fmt: skip
    title = f"published, not measured here: {PUBLISHED_MODEL}, old rule"
    return output.table(columns, rows, title=title) if rows else None
