"""Prints what the nano commands return."""

from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output
from mlxstacks.command_line import command_line

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.nano.build import RebuildResult
    from mlxstacks.nano.exports import ExportResult
    from mlxstacks.nano.show import NanoInfo


def render_show(console: "Console", info: "NanoInfo") -> None:
    """Where nano is, how large it is, and what it was measured to know."""
    facts: dict[str, output.Cell] = {
        key: value for key, value in info.paths.as_json().items() if value is not None
    }
    facts["parameters"] = info.manifest["parameters"]
    facts["shipped at"] = f"{info.manifest['stored_bits']} bits"
    console.print(output.details(facts))
    _print_measured(console, info.manifest)


def render_rebuild(console: "Console", result: "RebuildResult") -> None:
    """Where the new model is, how long it took, and what it knows."""
    seconds = result.manifest["total_seconds"]
    console.print(f"Wrote {result.save_path} in {seconds / 60:.1f} minutes.", markup=False)
    _print_measured(console, result.manifest)
    console.print(
        "To ship it, replace mlxstacks/assets/nano by it; its fingerprint is a new one.",
        markup=False,
    )


def render_export(console: "Console", result: "ExportResult") -> None:
    """What was written, and how to try it."""
    width = "float32" if result.bits is None else f"{result.bits} bits"
    size = output.bytes_text(result.model_bytes)
    console.print(f"Wrote {result.model_path} at {width}, {size}.", markup=False)
    command = command_line("mlx_lm.generate", model=result.model_path, prompt="Who are you?")
    output.next_step(console, "Try it", command)


def _print_measured(console: "Console", manifest: dict[str, Any]) -> None:
    """Validation loss by domain and multiple-choice accuracy of each export, from the manifest."""
    models = manifest["measured"]["models"]
    domains = list(next(iter(models.values()))["validation_loss"])
    rows: list[list[output.Cell]] = []
    for name, figures in models.items():
        choice = figures["multiple_choice"]
        low, high = choice["interval"]["low"], choice["interval"]["high"]
        losses = [f"{figures['validation_loss'][domain]:.3f}" for domain in domains]
        accuracy = f"{choice['accuracy']:.1%} ({low:.0%} to {high:.0%})"
        rows.append([name.replace("_", " "), *losses, accuracy])
    items = next(iter(models.values()))["multiple_choice"]["n"]
    title = f"loss in nats a token, and accuracy on {items} choices (95% interval)"
    console.print(output.table(["model", *domains, "accuracy"], rows, title=title))
