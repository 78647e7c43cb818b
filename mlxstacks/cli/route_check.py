"""Runs `mlxstacks route check`, on nano where the store is nano's, and prints what it found."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.route.check import RouteCheckReport
    from mlxstacks.studies.route.check_settings import RouteCheckSettings

_SHOWN_CHARACTERS = 70


def run(
    settings: "RouteCheckSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "RouteCheckReport":
    """The check. nano stands in for a base that is nano; studies know no nano."""
    from mlxstacks.nano.exports import nano_model
    from mlxstacks.studies.route import check as route_check

    if not settings.model and (model := nano_model(settings.store_path)):
        settings = settings.model_copy(update={"model": str(model)})
    return route_check.run(settings, dry_run=dry_run, progress=progress)


def render(console: "Console", report: "RouteCheckReport") -> None:
    """A row a prompt; what is wrong with each answer that does not hold; the verdict."""
    if report.status == "planned":
        console.print(
            f"Planned only: would ask {len(report.settings['prompts'])} prompts of "
            f"{report.store_path} and write {report.save_path}.",
            markup=False,
        )
        return
    modes = list(report.summary()["answers"])
    rows: list[list[output.Cell]] = []
    for one in report.checked:
        active = ", ".join(f"{name} {weight:.2f}" for name, weight in one.route.weights.items())
        lacks = f" (lacks {', '.join(one.missing)})" if one.missing else ""
        held = [_held(one.answers[m].failed) if m in one.answers else None for m in modes]
        rows.append([one.check.name, (active or "none") + lacks, *held])
    console.print(output.table(["prompt", "active domains", *modes], rows))
    for one in report.checked:
        for mode, judged in one.answers.items():
            if judged.failed:
                said = " ".join(judged.text.split())[:_SHOWN_CHARACTERS]
                why = "; ".join(judged.failed)
                console.print(f"{one.check.name}, {mode}: {why}: {said!r}", markup=False)
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, style="dim")
    console.print(f"Wrote {report.save_path}: route_check_report.json.", markup=False)
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _held(failed: tuple[str, ...]) -> str:
    return "fails" if failed else "holds"
