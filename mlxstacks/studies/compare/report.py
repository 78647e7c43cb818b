"""What `mlxstacks stack compare` shows, as tables and plots: budgets, arms, differences, losses."""

from collections.abc import Iterator, Sequence

from mlx.utils import tree_flatten

from mlxstacks.stats import MeanInterval, mean_interval
from mlxstacks.studies.compare.analysis import SUMMARY, ArmResult, Budgets, CellRecord, Searches
from mlxstacks.studies.compare.settings import BUDGETS, CompareSettings, at_rate
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table, counted

_SPENT: Columns = {
    "parameters": ("count", 1), "steps": ("count", 1), "seconds": "seconds"
}  # fmt: skip


def _name(budget: str) -> str:
    return "trained parameters" if budget == "parameters" else budget


def arm_table(settings: CompareSettings, searches: Searches) -> Table:
    """Settings down, arms across: what differs between them."""
    arms = [at_rate(a, searches[a.name]["rate"]) if searches else a for a in settings.arms]
    values = [dict(tree_flatten(settings.settings_of(arm).model_dump())) for arm in arms]
    names = dict.fromkeys(name for of_arm in values for name in of_arm)
    told = {name: [str(of_arm.get(name, "")) for of_arm in values] for name in names}
    return Table.of(
        "arm-settings", "What the arms differ in",
        {"setting": "text", **dict.fromkeys((arm.name for arm in arms), "text")},
        [(name, *of_arms) for name, of_arms in told.items() if len({*of_arms}) > 1],
    )  # fmt: skip


def budget_table(settings: CompareSettings, budgets: Budgets) -> Table:
    """Each budget of each arm, and how far it is from the control's."""
    control = next(iter(budgets.values()))
    differing = [n for n in BUDGETS if len({budget[n] for budget in budgets.values()}) > 1]
    columns: Columns = {
        "arm": "text", **dict.fromkeys(map(_name, BUDGETS), "count"),
        **{f"{_name(name)} beside control": ("points", 2) for name in differing},
    }  # fmt: skip
    rows: list[list[Cell]] = [
        [arm, *(budget[name] for name in BUDGETS),
         *(budget[name] / control[name] - 1 for name in differing)]
        for arm, budget in budgets.items()
    ]  # fmt: skip
    equal = ", ".join(map(_name, settings.equal)) or "nothing"
    title = f"Budgets; equal within {settings.tolerance:.2%}: {equal}"
    caption = "Trained parameters include the noise of routers, which is not kept."
    caption += " Beside control: percent more or less." if differing else ""
    return Table.of("budgets", title, columns, rows, caption=caption)


def blocks(
    settings: CompareSettings,
    budgets: Budgets,
    results: Sequence[ArmResult],
    cells: Sequence[CellRecord],
    searches: Searches | None = None,
) -> tuple[Block, ...]:
    """Plots, then tables; of each arm its differences to the control, the first arm."""
    plots = (*_judged_plot(settings, results), *_curves(cells))
    tables: list[Table] = []
    for place, result in enumerate(results[1:], 1):
        tables += _arm_tables(settings, results[0], result, place)
    return (
        *plots, arm_table(settings, searches or {}), budget_table(settings, budgets),
        *_search_table(settings, searches or {}),
        *_tables_of_all(settings, results), *tables,
    )  # fmt: skip


def _search_table(settings: CompareSettings, searches: Searches) -> Iterator[Table]:
    """Learning rates down, arms across, and which arms each is the best of."""
    if searches:
        means = "means over seeds" if len(settings.search_seeds) > 1 else "seed"
        yield Table.of(
            "rates", "Search of learning rates: task loss",
            {"learning rate": "text", **dict.fromkeys(searches, ("number", 4)), "best for": "text"},
            [(f"{rate:g}", *(found["losses"][str(rate)] for found in searches.values()),
              ", ".join(arm for arm, found in searches.items() if found["rate"] == rate))
             for rate in settings.rates],
            caption=f"Nats a token, {means} {', '.join(map(str, settings.search_seeds))}, used for "
            "the search alone; fixed before the first seed that judges.",
        )  # fmt: skip


def _cell(interval: MeanInterval | None) -> Cell:
    return None if interval is None else interval.cell


def _same(interval: MeanInterval | None) -> Cell:
    """Without an interval where every seed has the same: a count, or steps that are known to one
    evaluation only.
    """
    same = interval is not None and interval.low == interval.high
    return interval.mean if interval is not None and same else _cell(interval)


def _judged_plot(settings: CompareSettings, results: Sequence[ArmResult]) -> Iterator[Plot]:
    judged = {r.arm: r.judged for r in results[1:] if r.judged is not None}
    if not judged:
        return
    title = f"Difference to {results[0].arm}: {SUMMARY[settings.primary]}"
    words = ", ".join(f"{arm} {interval.mean:+.4g}" for arm, interval in judged.items())
    yield Plot(
        id="differences", title=title, kind="intervals", categories=tuple(judged),
        series=(Series.of_intervals(settings.primary, map(_cell, judged.values())),),
        x_label="difference to the control, nats per token",
        references={
            "no difference": 0.0, "what counts as better": -settings.margin,
            "what counts as worse": settings.margin,
        },
        alt=f"{title}, nats per token, with intervals: {words}.",
    )  # fmt: skip


def _curves(cells: Sequence[CellRecord]) -> Iterator[Plot]:
    """Validation loss of each domain by step: of an arm the mean over its seeds with its interval,
    at the steps that all of them have, without the untrained loss where others are.
    """
    trained = [cell for cell in cells if cell.status == "trained"]
    arms = list(dict.fromkeys(cell.arm for cell in trained))
    for place, domain in enumerate(trained[0].curves if trained else ()):
        series = []
        for arm in arms:
            curves = [dict(cell.curves[domain]) for cell in trained if cell.arm == arm]
            steps = sorted(set.intersection(*map(set, curves)))
            steps = [step for step in steps if step or len(steps) < 3]
            means = [mean_interval([curve[step] for curve in curves]) for step in steps]
            series.append(Series.of_intervals(arm, map(_cell, means), x=steps))
        ends = ", ".join(f"{s.label} {s.y[-1]:.3g}" for s in series if s.y)
        title = f"Validation loss of {domain}, mean over seeds with 95% interval"
        yield Plot(
            id=f"curves-{place + 1}", title=title, kind="lines", series=tuple(series),
            x_label="step", y_label="nats per token", alt=f"{title}; at the end {ends}.",
        )  # fmt: skip


def _tables_of_all(settings: CompareSettings, results: Sequence[ArmResult]) -> Iterator[Table]:
    """Outcomes, losses and what was spent, a row or a column an arm."""
    reasons = any(result.reason for result in results)
    columns: Columns = {
        "arm": "text", "mean": ("number", 4), "difference (arm - control)": "change",
        "seeds": "count", "outcome": "text", **({"why": "text"} if reasons else {}),
    }  # fmt: skip
    rows: list[list[Cell]] = [
        [r.arm, _cell(r.means.get(settings.primary)), _cell(r.judged),
         None if r.judged is None else r.judged.n, r.outcome or "control", *[r.reason] * reasons]
        for r in results
    ]  # fmt: skip
    yield Table.of(
        "arms", f"Arms, by {SUMMARY[settings.primary]}", columns, rows,
        caption="Nats a token; intervals of Student over seeds, those of the differences for all "
        "arms together (Bonferroni).",
    )  # fmt: skip
    seeds, arms = counted(len(settings.seeds), "seed"), [result.arm for result in results]
    yield Table.of(
        "losses", f"Losses, means over {seeds}",
        {"nats per token": "text", **dict.fromkeys(arms, ("number", 4))},
        [[label, *(_cell(result.means.get(name)) for result in results)]
         for name, label in _measures(results)],
    )  # fmt: skip
    yield Table.of(
        "spent", f"What was kept and spent, means over {seeds}",
        {"arm": "text", **{SUMMARY[name]: kind for name, kind in _SPENT.items()}},
        [[r.arm, *(_same(r.means.get(name)) for name in _SPENT)] for r in results],
    )  # fmt: skip


def _measures(results: Sequence[ArmResult]) -> list[tuple[str, str]]:
    """(name, label) of every loss that some arm has; those of domains below theirs."""
    measured = {name for result in results for name in result.means} - _SPENT.keys()
    if "later_task_loss" not in measured:  # one domain: every mode is the same
        measured -= {"ungated", "isolated"}
    labels: list[tuple[str, str]] = []
    for name, label in SUMMARY.items():
        if name in measured:
            labels.append((name, label))
        start = f"{name} of "
        domains = [n.removeprefix(start) for n in results[0].means if n.startswith(start)]
        if len(domains) > 1:
            labels += [(start + domain, f"{label} of {domain}") for domain in domains]
    return labels


def _arm_tables(
    settings: CompareSettings, control: ArmResult, result: ArmResult, place: int
) -> Iterator[Table]:
    difference = f"mean ({settings.confidence:.0%} interval)"
    yield Table.of(
        f"arm-{place}", f"{result.arm} - {control.arm}, paired by seed",
        {"nats per token": "text", difference: "change", "n": "count"},
        [(label, _cell(interval), interval.n)
         for name, label in _measures([result])
         if name != "balance_loss" and (interval := result.differences.get(name)) is not None],
        caption="Each interval by itself, not for all arms together: the verdict uses those of the "
        "table of arms." if len(settings.arms) > 2 else "",
    )  # fmt: skip
    if result.to_control:
        whys = {f.why: None for of in (result.to_control, result.to_arm) for f in of.values()}
        # one row a domain and direction
        yield Table.of(
            f"steps-{place}", "Steps to the same validation loss",
            {"domain": "text", "arm": "text", "has the loss of": "text", "seeds": "text",
             "steps": ("number", 1), "steps of the other": ("number", 1),
             "times faster": ("number", 2)},
            [(domain, arm, other, f"{found.reached} of {found.n}", _same(found.steps),
              _same(found.target_steps), _cell(found.ratio))
             for arm, other, of_domains in ((result.arm, control.arm, result.to_control),
                                            (control.arm, result.arm, result.to_arm))
             for domain, found in of_domains.items()],
            caption="First evaluation at which an arm has the lowest loss of the other, means over "
            "seeds; known to one evaluation. Times faster: geometric mean, where all seeds do."
            + "".join(f" None is given: {why}." for why in whys if why),
        )  # fmt: skip
    differences = result.matrix_differences.get("ungated", {})
    if len(differences) > 1:
        # no arm's name holds a space
        yield Table.of(
            f"matrix-{place}", "Loss with every stack on",
            {"trained last": "text", "loss of": "text", control.arm: ("number", 4),
             result.arm: ("number", 4), difference: "change"},
            [(after, domain, control.matrix["ungated"][after][domain].mean,
              result.matrix["ungated"][after][domain].mean, _cell(interval))
             for after, columns in differences.items()
             for domain, interval in columns.items()],
        )  # fmt: skip
