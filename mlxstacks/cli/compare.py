"""Prints what `mlxstacks stack compare` found, or what it would run."""

from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.experiments.compare.analysis import ArmResult
    from mlxstacks.experiments.compare.report import CompareReport
    from mlxstacks.stats import MeanInterval

_COUNTS = ("parameters", "steps", "seconds")


def render(console: "Console", report: "CompareReport") -> None:
    """The plan with its budgets; then arms, differences, the ungated matrix, the verdict."""
    console.print(str(report.settings["question"]), markup=False, style="bold")
    console.print(_budget_table(report))
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    if report.status == "planned":
        cells = len(report.settings["seeds"]) * len(report.budgets)
        console.print(
            f"Plan {report.plan_sha256[:16]}: {cells} runs into {report.save_path}. Planned only.",
            markup=False,
        )
        return
    console.print(_arm_table(report))
    for result in report.results[1:]:
        console.print(_difference_table(report, result))
        if len(result.matrix_differences.get("ungated", {})) > 1:
            console.print(_matrix_table(report, result))
    plots = f", plots {', '.join(report.plots)}" if report.plots else ""
    console.print(
        f"Plan {report.plan_sha256[:16]}, {len(report.cells)} runs. Wrote {report.save_path}: "
        f"compare_report.json, plan.json, cells{plots}.",
        markup=False,
    )
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _budget_table(report: "CompareReport") -> object:
    """Each budget of each arm, and how far it is from the control's."""
    control = report.budgets[report.plan["control"]]
    rows: list[list[output.Cell]] = []
    for arm, budget in report.budgets.items():
        row: list[output.Cell] = [arm]
        for name in ("parameters", "steps", "rows"):
            own, base = getattr(budget, name), getattr(control, name)
            row.append(f"{own:,}" if own == base else f"{own:,} ({own / base - 1:+.2%})")
        rows.append(row)
    asked = ", ".join(report.settings["equal"]) or "nothing"
    title = f"budgets; equal within {report.settings['tolerance']:.2%}: {asked}"
    return output.table(["arm", "parameters", "steps", "rows"], rows, title=title)


def _arm_table(report: "CompareReport") -> object:
    """Means over seeds: a line a measure, a column an arm."""
    rows: list[list[output.Cell]] = []
    for name, called in _measures(report.results):
        means = [result.means.get(name) for result in report.results]
        rows.append([called, *(_mean(name, found) for found in means)])
    seeds = len(report.settings["seeds"])
    title = f"means over {seeds} seed{'s' if seeds > 1 else ''}"
    return output.table(["", *(result.arm for result in report.results)], rows, title=title)


def _measures(results: Any) -> list[tuple[str, str]]:
    """(name, how it is called) of every measure that some arm has; those of domains indented."""
    from mlxstacks.experiments.compare.measures import SUMMARY

    has = {name for result in results for name in result.means}
    if "later_task_loss" not in has:  # one domain: every mode is the same
        has -= {"ungated", "isolated"}
    found: list[tuple[str, str]] = []
    for name, called in SUMMARY.items():
        if name in has:
            found.append((name, called))
        start = f"{name} of "  # of one domain
        own = [one for result in results[:1] for one in result.means if one.startswith(start)]
        found += [(one, f"  {one.removeprefix(start)}") for one in own if len(own) > 1]
    return found


def _mean(name: str, found: "MeanInterval | None") -> str | None:
    if found is None:
        return None
    return f"{found.mean:,.0f}" if name in _COUNTS else f"{found.mean:.4f}"


def _difference_table(report: "CompareReport", result: "ArmResult") -> object:
    confidence = report.settings["confidence"]
    rows: list[list[output.Cell]] = []
    for name, called in _measures([result]):
        found = result.differences.get(name)
        if found is not None:
            digits = 0 if name in _COUNTS else 4
            rows.append([called, f"{found.mean:+,.{digits}f}", _interval(found, digits), found.n])
    title = f"{result.arm} less {report.plan['control']}, paired by seed"
    return output.table(["", "mean", f"{confidence:.0%} interval", "n"], rows, title=title)


def _interval(found: "MeanInterval", digits: int) -> str | None:
    if found.low is None or found.high is None:
        return None
    return f"{found.low:+,.{digits}f} to {found.high:+,.{digits}f}"


def _matrix_table(report: "CompareReport", result: "ArmResult") -> object:
    """The ungated matrix: control, arm, and what the arm changes, with its interval."""
    mode = "ungated"
    rows: list[list[output.Cell]] = []
    for trained, columns in result.matrix_differences[mode].items():
        for domain, found in columns.items():
            base = report.results[0].matrix[mode][trained][domain].mean
            own = result.matrix[mode][trained][domain].mean
            rows.append(
                [trained, domain, f"{base:.4f}", f"{own:.4f}", f"{found.mean:+.4f}",
                 _interval(found, 4)]
            )  # fmt: skip
    head = ["after", "loss of", report.plan["control"], result.arm, "difference", "interval"]
    return output.table(head, rows, title="loss with every stack on")
