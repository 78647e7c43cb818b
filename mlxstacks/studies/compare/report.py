"""What `mlxstacks stack compare` found, as tables and plots: budgets, arms, differences, losses."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from mlxstacks.stats import MeanInterval
from mlxstacks.studies.compare.analysis import ArmResult
from mlxstacks.studies.compare.budget import ArmBudget
from mlxstacks.studies.compare.cells import CellRecord
from mlxstacks.studies.compare.measures import SUMMARY
from mlxstacks.studies.compare.settings import CompareSettings
from mlxstacks.study.document import Block, Cell, Column, Plot, Series, Table

_COUNTS = ("parameters", "steps", "seconds")
_NOT_COMPARED = (*_COUNTS, "balance_loss")


def budget_table(settings: CompareSettings, budgets: Mapping[str, ArmBudget]) -> Table:
    """Each budget of each arm, and how far it is from the control's."""
    control = next(iter(budgets.values()))
    names = ("parameters", "steps", "rows")
    rows = tuple(
        (arm, *(_beside(getattr(budget, name), getattr(control, name)) for name in names))
        for arm, budget in budgets.items()
    )
    equal = ", ".join(settings.equal) or "nothing"
    return Table(
        id="budgets", title=f"Budgets; equal within {settings.tolerance:.2%}: {equal}", rows=rows,
        columns=(Column(name="arm"), *(Column(name=name) for name in names)),
    )  # fmt: skip


def _beside(count: int, base: int) -> str:
    return f"{count:,}" if count == base else f"{count:,} ({count / base - 1:+.2%})"


def outcome(results: Sequence[ArmResult]) -> str:
    return ", ".join(f"{result.arm}: {result.outcome}" for result in results[1:])


def blocks(
    settings: CompareSettings,
    budgets: Mapping[str, ArmBudget],
    results: Sequence[ArmResult],
    cells: Sequence[CellRecord],
) -> tuple[Block, ...]:
    """Plots, then tables; of each arm its differences to the control, the first arm."""
    found: list[Block] = [*_judged_plot(settings, results), *_curves(cells)]
    found += [budget_table(settings, budgets), _judged_table(settings, results)]
    found += [_mean_table(settings, results), _spent_table(settings, results)]
    for place, result in enumerate(results[1:], 1):
        found += _arm_tables(settings, results[0], result, place)
    return tuple(found)


def _cell(found: MeanInterval | None) -> Cell:
    if found is None or found.low is None or found.high is None:
        return None if found is None else found.mean
    return found.mean, found.low, found.high


def _judged_plot(settings: CompareSettings, results: Sequence[ArmResult]) -> Iterator[Plot]:
    judged = {r.arm: r.judged for r in results[1:] if r.judged is not None}
    if not judged:
        return
    title = f"Arms less {results[0].arm}: {SUMMARY[settings.primary]}"
    words = ", ".join(f"{arm} {found.mean:+.4g}" for arm, found in judged.items())
    yield Plot(
        id="differences", title=title, kind="intervals", categories=tuple(judged),
        series=(Series(
            label=settings.primary, y=tuple(found.mean for found in judged.values()),
            low=tuple(found.low for found in judged.values()),
            high=tuple(found.high for found in judged.values()),
        ),),
        x_label="difference to the control, nats a token",
        references={
            "no difference": 0.0, "what counts as better": -settings.margin,
            "what counts as worse": settings.margin,
        },
        alt=f"{title}, nats a token, with intervals: {words}.",
    )  # fmt: skip


def _curves(cells: Sequence[CellRecord]) -> Iterator[Plot]:
    """Validation loss of each domain by step: of an arm the mean over its seeds, at the steps that
    all of them have.
    """
    trained = [cell for cell in cells if cell.status == "trained"]
    arms = list(dict.fromkeys(cell.arm for cell in trained))
    for place, domain in enumerate(trained[0].curves if trained else ()):
        series = []
        for arm in arms:
            curves = [dict(cell.curves[domain]) for cell in trained if cell.arm == arm]
            steps = sorted(set.intersection(*map(set, curves)))
            losses = tuple(fmean(curve[step] for curve in curves) for step in steps)
            series.append(Series(label=arm, x=tuple(steps), y=losses))
        ends = ", ".join(f"{s.label} {s.y[-1]:.3g}" for s in series if s.y)
        title = f"Validation loss of {domain}, mean over seeds"
        yield Plot(
            id=f"curves-{place + 1}", title=title, kind="lines", series=tuple(series),
            x_label="step", y_label="nats a token", alt=f"{title}; at the end {ends}.",
        )  # fmt: skip


def _judged_table(settings: CompareSettings, results: Sequence[ArmResult]) -> Table:
    rows = tuple(
        (r.arm, _cell(r.means.get(settings.primary)), _cell(r.judged), r.judged and r.judged.n,
         r.outcome or "control", r.reason)
        for r in results
    )  # fmt: skip
    return Table(
        id="arms", title=f"Arms, by {SUMMARY[settings.primary]}", rows=rows,
        columns=(
            Column(name="arm"), Column(name="mean", kind="number", digits=4),
            Column(name="less control", kind="change"),
            Column(name="seeds", kind="count"), Column(name="outcome"), Column(name="why"),
        ),
        caption="Nats a token; intervals of Student over seeds, those of the differences for all "
        "arms together (Bonferroni).",
    )  # fmt: skip


def _measures(results: Sequence[ArmResult]) -> list[tuple[str, str]]:
    """(name, how it is called) of every loss that some arm has; those of domains below theirs."""
    has = {name for result in results for name in result.means} - {*_COUNTS}
    if "later_task_loss" not in has:  # one domain: every mode is the same
        has -= {"ungated", "isolated"}
    found: list[tuple[str, str]] = []
    for name, called in SUMMARY.items():
        if name in has:
            found.append((name, called))
        start = f"{name} of "
        own = [one for one in results[0].means if one.startswith(start)]
        found += [(one, f"{called} of {one.removeprefix(start)}") for one in own if len(own) > 1]
    return found


def _mean_table(settings: CompareSettings, results: Sequence[ArmResult]) -> Table:
    rows = tuple(
        (called, *(_cell(result.means.get(name)) for result in results))
        for name, called in _measures(results)
    )
    arms = (Column(name=result.arm, kind="number", digits=4) for result in results)
    seeds = len(settings.seeds)
    return Table(
        id="losses", title=f"Losses, means over {seeds} seed{'s' if seeds > 1 else ''}", rows=rows,
        columns=(Column(name="nats a token"), *arms),
    )  # fmt: skip


def _spent_table(settings: CompareSettings, results: Sequence[ArmResult]) -> Table:
    rows = tuple(
        (SUMMARY[name], *(found and found.mean for found in (r.means.get(name) for r in results)))
        for name in _COUNTS
    )
    arms = (Column(name=result.arm, kind="count") for result in results)
    return Table(
        id="spent", title="What was kept and spent, means over seeds", rows=rows,
        columns=(Column(name="of a run"), *arms),
    )  # fmt: skip


def _arm_tables(
    settings: CompareSettings, control: ArmResult, result: ArmResult, place: int
) -> Iterator[Table]:
    rows = tuple(
        (called, _cell(found), found.n)
        for name, called in _measures([result])
        if name not in _NOT_COMPARED and (found := result.differences.get(name)) is not None
    )
    difference = f"mean ({settings.confidence:.0%} interval)"
    yield Table(
        id=f"arm-{place}", title=f"{result.arm} less {control.arm}, paired by seed", rows=rows,
        columns=(
            Column(name="nats a token"), Column(name=difference, kind="change"),
            Column(name="n", kind="count"),
        ),
    )  # fmt: skip
    mode = "ungated"
    entries = [
        (after, domain, control.matrix[mode][after][domain].mean,
         result.matrix[mode][after][domain].mean, _cell(found))
        for after, columns in result.matrix_differences.get(mode, {}).items()
        for domain, found in columns.items()
    ]  # fmt: skip
    if len(result.matrix_differences.get(mode, {})) > 1:
        yield Table(
            id=f"matrix-{place}", title="Loss with every stack on", rows=tuple(entries),
            columns=(
                Column(name="after"), Column(name="loss of"),
                Column(name=control.arm, kind="number", digits=4),
                Column(name=result.arm, kind="number", digits=4),
                Column(name=difference, kind="change"),
            ),
        )  # fmt: skip
