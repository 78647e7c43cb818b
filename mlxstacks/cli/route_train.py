"""Runs `mlxstacks route train`, on nano where the store is nano's, and prints what came of it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output
from mlxstacks.command_line import command_line

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.routing.router_settings import RouterTrainSettings
    from mlxstacks.studies.route.train import RouteTrainReport


def run(
    settings: "RouterTrainSettings",
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> "RouteTrainReport":
    """The training. nano stands in for a base that is nano; its own store, which lies in the
    package, is read and not changed.
    """
    from mlxstacks.nano.exports import nano_model
    from mlxstacks.studies.route import train as route_train

    notes: list[str] = []
    if settings.store_path:
        changes: dict[str, Any] = {}
        if not settings.model and (model := nano_model(settings.store_path)):
            changes["model"] = str(model)
        if settings.install and _in_package(settings.store_path):
            changes["install"] = False
            notes.append("nano's own store is not changed; the router is in the save path alone.")
        settings = settings.model_copy(update=changes)
    report = route_train.run(settings, dry_run=dry_run, progress=progress)
    report.notes[:0] = notes
    return report


def _in_package(store_path: str) -> bool:
    from mlxstacks.files.disk import user_path
    from mlxstacks.nano.exports import ASSETS

    return Path(user_path(store_path)).resolve().is_relative_to(ASSETS.resolve())


def render(console: "Console", report: "RouteTrainReport") -> None:
    """Examples and domains; epochs; per-domain numbers; calibration; the verdict."""
    console.print(output.details(_facts(report)))
    if report.status == "planned":
        for note in report.notes:
            console.print(note, markup=False, style="dim")
        console.print(f"Planned only: would write {report.save_path}.", markup=False)
        return
    held_out = (report.metrics.get("examples") or {}).values()
    console.print(_epochs(report.history, report.best_epoch, sum(held_out)))
    console.print(_domains(report.metrics["domains"]))
    console.print(_calibration(report.metrics["calibration"]))
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    store = f"; the store {report.store_path} has it too" if report.installed else ""
    console.print(f"Wrote {report.save_path}: router.safetensors{store}.", markup=False)
    console.print(f"Verdict: {report.verdict}", markup=False, style="bold")
    chat = command_line(
        "mlxstacks chat", routed=True, model=report.settings["model"],
        store_path=report.store_path, router_path=None if report.installed else report.save_path,
    )  # fmt: skip
    output.next_step(console, "Next", chat)


def _facts(report: "RouteTrainReport") -> dict[str, output.Cell]:
    examples = report.examples
    facts: dict[str, output.Cell] = {
        "store": report.store_path,
        "domains": ", ".join(report.domains),
        "examples": f"{examples['all']:,}, of {examples['discovered']:,} the outcome is known",
    }
    if report.parameters is not None:
        facts["router"] = f"{report.parameters:,} parameters on {report.input_dims} dims"
        split = report.split
        facts["split"] = f"{split['training']:,} to train, {split['validation']:,} held out"
    return facts


def _epochs(history: list[dict[str, Any]], best: int | None, held_out: int) -> object:
    rows: list[list[output.Cell]] = [
        [
            f"{one['epoch']}{' *' if one['epoch'] == best else ''}",
            one["train_loss"],
            _percent(one["single_top1"]),
            _percent(one["mixed_set"]),
            one["val_bce"],
            one["checkpoint_score"],
        ]
        for one in history
    ]
    columns = ["epoch (* kept)", "loss", "single", "mixed", "validation BCE", "score"]
    title = "epochs, on held-out prompts but for the loss"
    if held_out:
        title += f"; of up to {held_out:,}, intervals in the verdict"
    return output.table(columns, rows, title=title)


def _domains(domains: Mapping[str, Mapping[str, Any]]) -> object:
    rows: list[list[output.Cell]] = [
        [
            name,
            one["true"],
            one["chosen"],
            _rate(one["precision"]),
            _rate(one["recall"]),
            one["expected_calibration_error"],
        ]
        for name, one in domains.items()
    ]
    columns = ["domain", "wanted", "chosen", "precision", "recall", "calibration error"]
    return output.table(columns, rows, title="domains")


def _calibration(found: Mapping[str, Any]) -> object:
    rows: list[list[output.Cell]] = [
        [f"{bin_['low']:.1f} to {bin_['high']:.1f}", bin_["count"], bin_["mean_score"],
         bin_["mean_target"]]
        for bin_ in found["bins"]
    ]  # fmt: skip
    return output.table(["score", "pairs", "mean score", "mean target"], rows, title="calibration")


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f}%"


def _rate(found: Mapping[str, float] | None) -> str | None:
    if found is None:
        return None
    return f"{100 * found['rate']:.0f}% ({100 * found['low']:.0f} to {100 * found['high']:.0f})"
