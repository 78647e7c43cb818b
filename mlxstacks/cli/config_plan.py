"""Prints a plan that was made from a config alone: the model, what trains, what is not here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlxstacks.cli import output
from mlxstacks.memory import bytes_in_words
from mlxstacks.recipe.inputs import absent

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.recipe.config_plan import ConfigPlan, PlannedTraining
    from mlxstacks.recipe.inputs import Input


def render(console: "Console", plan: "ConfigPlan") -> None:
    """Settings that are not at their default, sizes, the guard's verdicts, inputs, what to do."""
    console.print(
        output.details((key, output.setting(value)) for key, value in plan.changed.items())
    )
    if plan.source is not None:
        console.print()
        console.print(f"Planned from {plan.source}.", markup=False)
        console.print(_model_words(plan), markup=False)
    for training in plan.training:
        console.print()
        console.print(output.details(_training_rows(training)))
    console.print()
    for one in plan.inputs:
        console.print(f"{one.key}: {one.words}", markup=False, soft_wrap=True)
    for note in plan.notes:
        console.print(note, markup=False)
    writes = f"would write {', '.join(plan.writes)}" if plan.writes else "writes nothing"
    console.print(f"Planned only: {plan.command} {writes}.", markup=False)
    say_missing(console, absent(plan.inputs))


def say_missing(console: "Console", missing: Sequence["Input"]) -> None:
    """The end of a plan: what the run would need that is not here."""
    keys = ", ".join(dict.fromkeys(one.key for one in missing))
    console.print(f"The run itself needs what is not here: {keys}.", markup=False, style="bold")


def _model_words(plan: "ConfigPlan") -> str:
    facts = plan.model
    words = f"{facts['model_type']}: {facts['parameters']:,} parameters, "
    words += f"{bytes_in_words(facts['weights_bytes'])} of weights, {facts['layers']} layers"
    if facts["experts"]:
        words += f", {facts['experts_per_token']} of {facts['experts']} experts a token"
    return words


def _training_rows(training: "PlannedTraining") -> dict[str, output.Cell]:
    kinds = ", ".join(
        f"{name} x{count}" if count > 1 else name for name, count in training.projections.items()
    )
    many = len(training.layers) > 8
    where = f"{len(training.layers)} layers" if many else f"layers {_listed(training.layers)}"
    size = f"{training.trained_parameters:,} parameters; in training "
    size += f"{bytes_in_words(training.adapter_bytes)}, its optimizer "
    size += bytes_in_words(training.optimizer_bytes)
    if training.frozen_bytes is not None:
        size += f"; frozen {bytes_in_words(training.frozen_bytes)}"
    batches = "the data once" if training.batches is None else f"{training.batches:,} batches"
    again = f"{training.runs} runs, each " if training.runs > 1 else ""
    guard = training.guard
    rows: dict[str, output.Cell] = {
        "trains": training.name,
        "projections": f"{where}: {kinds}",
        "size": size,
        "batches": f"{again}{batches}, rows of at most {training.longest_row_tokens:,} tokens",
    }
    if guard is not None:
        rows["memory"] = output.byte_parts(guard["parts_bytes"])
    return rows | {"guard": "not asked" if guard is None else guard["verdict"]}


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
