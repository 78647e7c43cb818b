"""Prints what `mlxstacks route gaps` found."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.route.gaps import GapsReport

_MOST_ROWS = 24
_SHOWN_CHARACTERS = 60


def render(console: "Console", report: "GapsReport") -> None:
    """A row a group, with prompts; what could not be read; the verdict."""
    rows: list[list[output.Cell]] = []
    for number, cluster in enumerate(report.clusters[:_MOST_ROWS], start=1):
        best = next(iter(cluster.mean_scores().items()), None)
        prompts = [_short(text) for text in cluster.prompts(report.settings.samples)]
        rows.append([
            number, len(cluster.events), f"{cluster.cohesion:.2f}",
            f"{best[0]} {best[1]:.2f}" if best else None,
            "\n".join(prompts) or "(text not kept)",
        ])  # fmt: skip
    if rows:
        columns = ["group", "events", "cosine", "nearest domain", "prompts"]
        console.print(output.table(columns, rows))
    if len(report.clusters) > _MOST_ROWS:
        rest = len(report.clusters) - _MOST_ROWS
        console.print(f"... and {rest} smaller groups (--json has them all)")
    if report.damaged:
        console.print(f"Note: {report.damaged} damaged lines were left out.", style="dim")
    if report.without_feature:
        console.print(
            f"Note: {report.without_feature} events have no feature and are in no group.",
            style="dim",
        )
    if report.too_old:
        console.print(f"Note: the {report.too_old} oldest events are in no group.", style="dim")
    console.print(f"{report.events} events in {len(report.clusters)} groups.")
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[: _SHOWN_CHARACTERS - 3]}..."
