"""Runs `mlxstacks route evaluate`, on nano where the store is nano's, and prints what it found."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.route.evaluate_report import RouteEvaluateReport
    from mlxstacks.studies.route.evaluate_settings import RouteEvaluateSettings


def run(
    settings: "RouteEvaluateSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "RouteEvaluateReport":
    """The evaluation. nano, its routing data and its held-out domain stand in where they are what
    the store was trained on; studies know no nano.
    """
    from mlxstacks.studies.route import evaluate as route_evaluate

    if settings.store_path and not settings.model:
        settings = settings.model_copy(update=_nano_parts(settings))
    return route_evaluate.run(settings, dry_run=dry_run, progress=progress)


def _nano_parts(settings: "RouteEvaluateSettings") -> dict[str, Any]:
    """nano's model and data, for a store whose base is nano."""
    from mlxstacks.data.settings import SourceSettings
    from mlxstacks.files.store import Store
    from mlxstacks.nano.curriculum import HELD_OUT_DIRECTORY
    from mlxstacks.nano.curriculum_settings import HELD_OUT
    from mlxstacks.nano.exports import nano_model, nano_paths

    model = nano_model(settings.store_path)
    if model is None:
        return {}
    parts: dict[str, Any] = {"model": str(model)}
    if settings.data or settings.sources:
        return parts
    paths = nano_paths()
    parts["data"] = str(paths.routing_path)
    manifest = Store.open(str(settings.store_path)).manifest
    if not settings.unseen and manifest.domain_named(HELD_OUT) is None:
        file = paths.curriculum_path / HELD_OUT_DIRECTORY / f"{HELD_OUT}.jsonl"
        parts["unseen"] = (SourceSettings(path=str(file)),)
    return parts


def render(console: "Console", report: "RouteEvaluateReport") -> None:
    """Losses by mode and group, differences, routers, gaps; what was written; the verdict."""
    found = report.evaluation
    if found is None:
        console.print(
            f"Planned only: would evaluate {report.store_path} and write {report.save_path}.",
            markup=False,
        )
        return
    from mlxstacks.studies.route.evaluate_matrix import ALL
    from mlxstacks.studies.route.evaluate_report import rate_words, spread

    groups = [*found.rows, ALL]
    # Groups down and modes across: there are seven modes, and any number of domains.
    losses: list[list[output.Cell]] = [
        [
            f"{g} ({found.rows[g]})" if g in found.rows else g,
            *(_digits(row[g].value) if g in row else None for row in found.matrix.values()),
        ]
        for g in groups
    ]
    heads = [mode.replace("_", " ") for mode in found.matrix]
    console.print(output.table(["rows", *heads], losses, title="loss, nats a token"))
    for to, matrix in found.differences.items():
        rows: list[list[output.Cell]] = [
            [g, *(spread(matrix[mode][g]) if g in matrix[mode] else None for mode in _compared(to))]
            for g in groups
        ]
        title = f"difference to {to}, same tokens, 95% interval"
        console.print(output.table(["rows", *_compared(to)], rows, title=title))
    routers: list[list[output.Cell]] = []
    for router in found.routers:
        metrics = router["metrics"]
        hits = [
            rate_words(metrics[k]) if metrics[k] else None for k in ("single_top1", "mixed_set")
        ]
        error = _digits(metrics["calibration_error"])
        routers.append([router["name"], *hits, error, f"{router['mean_active_domains']:.2f}"])
    columns = ["router", "top-1, single", "set, mixed", "calibration error", "active domains"]
    console.print(output.table(columns, routers))
    kinds = ("detection", "false_alarms", "others")
    gaps: list[list[output.Cell]] = [
        [test, *(rate_words(rates[kind]) if rates[kind] else None for kind in kinds)]
        for test, rates in found.gaps.items()
        if rates
    ]
    columns = ["gaps by", "unseen domains", "known domains", "other prompts"]
    console.print(output.table(columns, gaps))
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, style="dim")
    console.print(
        f"Wrote {report.save_path}: route_evaluate_report.json, route_evaluate.md (tables, "
        "samples), rows.jsonl.",
        markup=False,
    )
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")


def _compared(to: str) -> tuple[str, ...]:
    """The modes whose difference to this one is shown; the page has all."""
    shown = {"base": ("ungated", "routed"), "random_stack": ("oracle_domain", "routed")}
    return shown.get(to, ("routed", "routed_hard"))


def _digits(value: float) -> str:
    return f"{value:.3f}"
