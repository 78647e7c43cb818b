"""Prints what `mlxstacks train` did or would do."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.command_line import command_line
from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.train.report import TrainReport

_MOST_EVALUATIONS = 12


def render(console: "Console", report: "TrainReport") -> None:
    """The plan, the validation losses, where the adapter is, and how to try it."""
    console.print(_plan_table(report))
    if report.validation:
        console.print(_validation_table(report))
    for note in report.notes:
        console.print(note, markup=False)
    if report.status == "planned":
        console.print(f"Planned only: would write {report.save_path}.", markup=False)
        return
    console.print(_verdict(report), markup=False, style="bold")
    command = command_line(
        "mlxstacks chat", model=report.settings["model"], adapter_path=report.save_path
    )
    output.next_step(console, "Try it", command)


def _plan_table(report: "TrainReport") -> object:
    plan = report.plan
    bytes_each = f"adapter {bytes_in_words(plan['adapter_bytes'])}, "
    bytes_each += f"optimizer {bytes_in_words(plan['optimizer_bytes'])}"
    kinds = ", ".join(
        f"{name} x{count}" if count > 1 else name for name, count in plan["projections"].items()
    )
    layers = plan["layers"]
    where = f"{len(layers)} layers" if len(layers) > 8 else f"layers {', '.join(map(str, layers))}"
    rows = f"{plan['train_rows']:,} to train, {plan['validation_rows']:,} to validate"
    widths = ", ".join(map(str, plan["widths_tokens"]))
    guard = plan["guard"]
    return output.details(
        {
            "projections": f"{plan['modules']} in {where}: {kinds}",
            "trained": f"{plan['trained_parameters']:,} parameters; {bytes_each}",
            "rows": rows,
            "widths": f"{widths} tokens; {plan['padding_percent']}% padding",
            "batches": f"{plan['iters']:,} in {plan['steps']:,} optimizer steps",
            "guard": "not asked" if guard is None else guard["verdict"],
        }
    )


def _validation_table(report: "TrainReport") -> object:
    shown = report.validation
    if len(shown) > _MOST_EVALUATIONS:
        shown = [*shown[:1], *shown[1 - _MOST_EVALUATIONS :]]
    rows: list[list[output.Cell]] = [
        [
            int(record["step"]),
            f"{record['validation_loss']:.4f}",
            "best" if record["step"] == report.best_step else "",
        ]
        for record in shown
    ]
    return output.table(["step", "validation loss", ""], rows)


def _verdict(report: "TrainReport") -> str:
    seconds = report.figures["seconds"]
    words = f"Wrote {report.save_path}: the {report.kept} weights of {report.step} steps"
    first, best = report.first_validation_loss, report.best_validation_loss
    if first is not None and best is not None and report.kept == "best":
        words += f", validation loss {first:.4f} -> {best:.4f}"
    if report.reason:
        words += f"; stopped early: {report.reason}"
    return f"{words}. {seconds:.0f} s, peak {bytes_in_words(report.figures['peak_bytes'])}."
