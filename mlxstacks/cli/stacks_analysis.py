"""Runs `mlxstacks stacks analyse`, on nano where the store is nano's, and prints what it found."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.stack.analysis import AnalysisReport
    from mlxstacks.studies.stack.analysis_settings import StacksAnalyseSettings

_MOST_ROWS = 24


def run(
    settings: "StacksAnalyseSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "AnalysisReport":
    """The analysis. nano and its curriculum stand in where they are what the store was trained on;
    studies know no nano.
    """
    from mlxstacks.studies.stack import analysis as stack_analysis

    unsaid = not (settings.model or settings.weights_only or dry_run)
    if settings.store_path and unsaid:
        settings = settings.model_copy(update=_nano_parts(settings))
    return stack_analysis.run(settings, dry_run=dry_run, progress=progress)


def _nano_parts(settings: "StacksAnalyseSettings") -> dict[str, str]:
    """nano's model and data, for a store whose base is nano."""
    from mlxstacks.nano.exports import nano_model, nano_paths

    model = nano_model(settings.store_path)
    if model is None:
        return {}
    return {"model": str(model), "data": settings.data or str(nano_paths().curriculum_path)}


def render(console: "Console", report: "AnalysisReport") -> None:
    """Domains; spectra, cosines, expert loads, separation; what was written; the verdict."""
    console.print(output.table(*_domains(report.domains)))
    if report.status == "planned":
        console.print(
            f"Planned only: would look at {report.store_path} and write {report.save_path}.",
            markup=False,
        )
        return
    for title, columns, rows in _tables(report):
        if rows:
            console.print(output.table(columns, rows[:_MOST_ROWS], title=title))
            if len(rows) > _MOST_ROWS:
                console.print(f"... and {len(rows) - _MOST_ROWS} more rows; all in the report")
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    plots = f", plots {', '.join(report.plots)}" if report.plots else ""
    console.print(f"Wrote {report.save_path}: analysis_report.json{plots}.", markup=False)
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


Rows = list[list[output.Cell]]


def _domains(domains: Iterable[Mapping[str, Any]]) -> tuple[list[str], Rows]:
    rows: Rows = []
    for domain in domains:
        losses, protected = domain["losses"], domain["protected"] or {}
        rows.append([
            domain["name"] if domain["enabled"] else f"{domain['name']} (disabled)",
            len(domain["stacks"]),
            output.bytes_text(domain["bytes"]),
            " -> ".join(f"{loss:.3f}" for loss in losses) or None,
            _percent(protected.get("captured_energy_mean")),
            _percent(protected.get("capacity_used_highest")),
        ])  # fmt: skip
    columns = ["domain", "stacks", "bytes", "validation loss", "energy held", "capacity used"]
    return columns, rows


def _tables(report: "AnalysisReport") -> Iterable[tuple[str, list[str], Rows]]:
    """(title, columns, rows) of each table that there are numbers for."""
    geometry, routing = report.geometry, report.routing
    yield (
        "spectra of the stacks' deltas, mean over projections",
        ["stack", "effective rank", "stable rank", "16th value / 1st"],
        [
            [name, *(_mean(found[key]) for key in ("effective_rank", "stable_rank", "value_16"))]
            for name, found in geometry["spectra"].items()
        ],
    )
    for what in ("weights", "data"):
        if table := geometry[what]:
            yield _cosine_table(what, table)
    if routing:
        for what, words in (("gate", "mean gate weight"), ("dispatch", "dispatch share")):
            yield _load_table(words, what, routing["stacks"])
        yield _distance_table(routing["stacks"])
        yield _separation_table(routing["points"])


def _cosine_table(what: str, table: Mapping[str, Any]) -> tuple[str, list[str], Rows]:
    names = list(table["matrix"])
    title = f"largest cosine of {table['directions']} directions from {what}, mean over projections"
    if table["pairs"]:
        title += f" (chance {table['mean_chance']:.3f})"
    rows: Rows = [[a, *(_digits(table["matrix"][a][b]) for b in names)] for a in names]
    return title, ["", *names], rows if table["pairs"] else []


def _load_table(
    words: str, what: str, stacks: Mapping[str, Mapping[str, Any]]
) -> tuple[str, list[str], Rows]:
    most = max(stack["experts"] for stack in stacks.values())
    rows: Rows = []
    for name, stack in stacks.items():
        for domain, found in stack["on"].items():
            means = [_with_half(expert) for expert in found[what]]
            uniform = _digits(stack[f"uniform_{what}"])
            rows.append([name, domain, *means, *[None] * (most - len(means)), uniform])
    experts = [f"expert {number}" for number in range(most)]
    return f"{words}, mean over projections", ["stack", "rows of", *experts, "uniform"], rows


def _distance_table(stacks: Mapping[str, Mapping[str, Any]]) -> tuple[str, list[str], Rows]:
    """Domains against each other inside a stack: averaged over projections, and one by one."""
    rows: Rows = []
    for name, stack in stacks.items():
        found = stack["domain_distance"]
        if found:
            entropies = [on["load_entropy_by_projection"] for on in stack["on"].values()]
            rows.append([
                name, _digits(min(entropies)), _digits(stack["largest_gate_difference"]),
                _digits(found["distance"]),
                _digits(stack["domain_distance_of_random_routers"]["distance"]),
                _digits(found["permuted"]), _digits(found["p"]),
            ])  # fmt: skip
    title = "domains inside a stack"
    columns = [
        "stack", "load entropy", "gate difference", "by projection", "random router", "shuffled",
        "p",
    ]  # fmt: skip
    return title, columns, rows


def _separation_table(points: Mapping[str, Any] | None) -> tuple[str, list[str], Rows]:
    title = "a prompt's domain from its routing, nearest centroid"
    columns = ["routing of", "right", "interval", "chance", "shuffled", "silhouette"]
    if points is None:
        return title, columns, []
    if points["separation"]:
        title += f"; n = {points['separation']['n']} prompts, 95% intervals"
    named = {
        "all projections": points["separation"],
        "two components": points["separation_on_two_components"],
        "projections averaged": points["separation_of_averages"],
        "random routers": points["separation_of_random_routers"],
        **{f"stack {name}": found for name, found in points["separation_by_stack"].items()},
    }
    rows: Rows = [
        [
            name, _percent(found["accuracy"]),
            f"{_percent(found['interval']['low'])} to {_percent(found['interval']['high'])}",
            _percent(found["chance"]), _percent(found["permuted_accuracy"]),
            f"{found['silhouette']:.2f}",
        ]
        for name, found in named.items()
        if found
    ]  # fmt: skip
    return title, columns, rows


def _mean(found: Mapping[str, Any] | None) -> str | None:
    return None if found is None else f"{found['mean']:.2f}"


def _with_half(found: Mapping[str, Any]) -> str:
    """A mean and half of its interval."""
    if found["low"] is None:
        return f"{found['mean']:.3f}"
    return f"{found['mean']:.3f} +-{(found['high'] - found['low']) / 2:.3f}"


def _digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.0f}%"
