"""Runs `mlxstacks route explain`, on nano where the store is nano's, and prints what it found."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.route.explain import Explanation
    from mlxstacks.studies.route.explain_settings import RouteExplainSettings


def run(settings: "RouteExplainSettings") -> "Explanation":
    """The explanation. nano stands in for a base that is nano; studies know no nano."""
    from mlxstacks.nano.exports import nano_model
    from mlxstacks.studies.route import explain as route_explain

    if not settings.model and (model := nano_model(settings.store_path)):
        settings = settings.model_copy(update={"model": str(model)})
    return route_explain.run(settings)


def render(console: "Console", found: "Explanation") -> None:
    """A row a domain, a row a set of domains where an answer was given, the verdict."""
    rows: list[list[output.Cell]] = []
    for name, score in found.route.scores.items():
        weight = found.route.weights.get(name)
        floor = name == found.chat_domain and score < found.chat_floor
        served = name in found.domains
        why = "" if served else "not served"
        rows.append([
            name, f"{score:.3f}", None if weight is None else f"{weight:.3f}",
            f"floor {found.chat_floor:.2f}" if floor else why,
        ])  # fmt: skip
    console.print(output.table(["domain", "score", "weight", ""], rows))
    console.print(
        f"Active above {found.threshold:.2f}; template {found.template}"
        + (f"; {found.chat_domain} is never below {found.chat_floor:.2f}."
           if found.chat_domain else "; no domain has a floor."),
        markup=False,
    )  # fmt: skip
    if found.losses is not None:
        table: list[list[output.Cell]] = []
        for one in found.losses:
            on = ", ".join(f"{name} {weight:.2f}" for name, weight in one.weights.items())
            table.append(
                [one.name, f"{one.loss:.3f}", f"{one.difference_to_base:+.3f}", on or "none"]
            )
        console.print(
            output.table(
                ["set", "loss", "to base", "weights"], table, title="the answer, nats a token"
            )
        )
    for note in found.notes:
        console.print(f"Note: {note}", markup=False, style="dim")
    console.print(f"Verdict: {found.verdict}", markup=False, style="bold")
