"""Runs `mlxstacks route discover`, on nano where the store is nano's, and prints what it found."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output
from mlxstacks.command_line import command_line

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.routing.outcome_settings import OutcomeSettings
    from mlxstacks.studies.route.discover import DiscoverReport

_MOST_SETS = 4


def run(
    settings: "OutcomeSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "DiscoverReport":
    """The discovery. nano and its routing data stand in where they are what the store was trained
    on; studies know no nano.
    """
    from mlxstacks.studies.route import discover as route_discover

    if settings.store_path and not settings.model:
        settings = settings.model_copy(update=nano_parts(settings))
    return route_discover.run(settings, dry_run=dry_run, progress=progress)


def nano_parts(settings: "OutcomeSettings") -> dict[str, str]:
    """nano's model and data, for a store whose base is nano."""
    from mlxstacks.nano.exports import nano_model, nano_paths

    model = nano_model(settings.store_path)
    if model is None:
        return {}
    parts = {"model": str(model)}
    if not settings.data and not settings.sources:
        parts["data"] = str(nano_paths().routing_path)
    return parts


def render(console: "Console", report: "DiscoverReport") -> None:
    """Counts; which sets win for which label; the random control; the verdict."""
    counts = report.counts
    rows: list[list[output.Cell]] = [
        [name, one["examples"], one["trained_on"], one["samples"], one["samples_trained_on"]]
        for name, one in counts["labels"].items()
    ]
    columns = ["label", "examples", "trained on", "searched", "of them trained on"]
    console.print(output.table(columns, rows))
    if counts["dropped_without_answer_tokens"]:
        console.print(
            f"{counts['dropped_without_answer_tokens']} pairs have no answer token within "
            "max_tokens; dropped.",
            markup=False,
        )
    if report.status == "planned":
        console.print(
            f"Planned only: {counts['passes_expected']:,} to {counts['passes_at_most']:,} losses, "
            f"and would write {report.save_path}.",
            markup=False,
        )
    else:
        _render_done(console, report)
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    if report.status != "planned":
        speed = report.figures["pairs_per_second"]
        console.print(
            f"Wrote {report.save_path}: {report.figures['seconds']:.0f} s"
            + (f", {speed:.2f} pairs a second." if speed else "."),
            markup=False,
        )
        console.print(f"Verdict: {report.verdict}", markup=False, style="bold")
        train = command_line(
            "mlxstacks route train", report.store_path, targets=report.save_path,
            model=report.settings["model"],
        )  # fmt: skip
        output.next_step(console, "Next", train)


def _render_done(console: "Console", report: "DiscoverReport") -> None:
    rows: list[list[output.Cell]] = []
    for one in report.oracle:
        for place, found in enumerate(one["sets"][:_MOST_SETS]):
            first = place == 0
            rows.append([
                f"{one['label']} ({one['n']})" if first else "", found["set"] or "(base)",
                _percent(found), _nats(one["gain"]) if first else "",
            ])  # fmt: skip
    if rows:
        console.print(
            output.table(
                ["label (prompts)", "best set", "share", "mean gain"],
                rows,
                title="which set lowers the answer's loss most, and by how many nats",
            )
        )
    if report.control:
        twins: list[list[output.Cell]] = [
            [
                name,
                _nats(found["gain_all"]),
                _nats(found["random_gain_all"]),
                _nats(found["gain_own"]),
                _nats(found["random_gain_own"]),
            ]
            for name, found in report.control["domains"].items()
        ]
        console.print(
            output.table(
                ["domain", "all prompts", "random", "its own prompts", "random"],
                twins,
                title="nats gained by one domain alone, and by its random twin",
            )
        )


def _percent(found: Mapping[str, Any]) -> str:
    low, high = (100 * found["interval"][key] for key in ("low", "high"))
    return f"{100 * found['share']:.0f}% ({low:.0f} to {high:.0f})"


def _nats(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    half = "" if found["low"] is None else f" +-{(found['high'] - found['low']) / 2:.3f}"
    return f"{found['mean']:+.3f}{half}"
