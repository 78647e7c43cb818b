"""Prints what `mlxstacks stack` did or would do."""

from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output
from mlxstacks.command_line import command_line
from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.studies.stack.report import StackReport

_TITLES = {
    "ungated": "Loss with every stack on, after each domain",
    "prefix": "Loss with the stacks up to the domain's own",
    "isolated": "Loss with the domain's own stacks alone",
}


def render(console: "Console", report: "StackReport") -> None:
    """The plan or the domains, the forgetting matrix in its modes, the verdict."""
    console.print(_plan_table(report))
    if report.status == "planned":
        _render_plan(console, report)
        return
    console.print(_domain_table(report))
    for mode, rows in report.matrix.items():
        if rows:
            console.print(_matrix_table(mode, rows))
    for note in report.notes:
        console.print(note, markup=False)
    if report.status == "complete":
        console.print("Nothing was trained: the store has every domain.", markup=False)
    console.print(report.verdict, markup=False, style="bold")
    seconds, peak = report.figures["seconds"], bytes_in_words(report.figures["peak_bytes"])
    console.print(f"Store: {report.save_path}. {seconds:.0f} s, peak {peak}.", markup=False)
    chat = command_line(
        "mlxstacks chat", ungated=True, model=report.settings["model"], store_path=report.save_path
    )
    output.next_step(console, "See also", command_line("mlxstacks stacks list", report.save_path))
    if any(domain["stacks"] for domain in report.domains.values()):
        output.next_step(console, "Try it", chat)


def _plan_table(report: "StackReport") -> object:
    plan, stack = report.plan, report.settings["stack"]
    kinds = ", ".join(
        f"{name} x{count}" if count > 1 else name for name, count in plan["projections"].items()
    )
    layers = plan["layers"]
    where = f"{len(layers)} layers" if len(layers) > 8 else f"layers {', '.join(map(str, layers))}"
    experts = f"{stack['num_experts']} experts of rank {stack['rank']}"
    top = min(stack["experts_per_token"], stack["num_experts"])
    rows: dict[str, output.Cell] = {
        "base": f"{plan['base_model']}{' in float32' if plan['base_in_float32'] else ''}",
        "projections": f"{plan['modules']} in {where}: {kinds}",
        "a stack": f"{experts}, {top} a token: {plan['trained_parameters']:,} parameters, "
        f"{bytes_in_words(plan['stack_bytes'])} frozen",
    }
    if report.status == "planned":
        rows["training"] = (
            f"stack {bytes_in_words(plan['trained_bytes'])}, "
            f"optimizer {bytes_in_words(plan['optimizer_bytes'])}"
        )
        if plan["guard"]:
            rows["memory"] = output.byte_parts(plan["guard"]["parts_bytes"])
            rows["guard"] = plan["guard"]["verdict"]
    return output.details(rows)


def _render_plan(console: "Console", report: "StackReport") -> None:
    rows: list[list[output.Cell]] = []
    for name, domain in report.domains.items():
        planned = domain["status"] == "planned"
        rows.append(
            [
                name,
                "to train" if planned else "in the store",
                domain["train_rows"] if planned else None,
                domain["validation_rows"] if planned else None,
                domain["rounds_planned"] if planned else len(domain["stacks"]),
                domain["steps_per_round"] if planned else None,
            ]
        )
    columns = ["domain", "", "rows", "validation", "stacks, at most", "steps each"]
    console.print(output.table(columns, rows))
    for note in report.notes:
        console.print(note, markup=False)
    console.print(f"Planned only: would write {report.save_path}.", markup=False)


def _domain_table(report: "StackReport") -> object:
    rows: list[list[output.Cell]] = []
    for name, domain in report.domains.items():
        protected = domain.get("protected") or {}
        energy, used = protected.get("captured_energy_mean"), protected.get("capacity_used_highest")
        rows.append(
            [
                name if domain["enabled"] else f"{name} (disabled)",
                len(domain["stacks"]),
                " ".join(f"{loss:.4f}" for loss in domain["losses"]) or None,
                bytes_in_words(domain["bytes"]),
                None if energy is None else f"{100 * energy:.0f}%",
                None if used is None else f"{100 * used:.0f}%",
                _why(domain),
            ]
        )
    columns = ["domain", "stacks", "losses", "size", "energy", "protected", "ended early"]
    columns = columns if any(row[-1] for row in rows) else columns[:-1]
    title = "energy: of what earlier stacks write, so much lies in the protected directions"
    shown = title if any(row[4] for row in rows) else None
    return output.table(columns, [row[: len(columns)] for row in rows], title=shown)


def _why(domain: dict[str, Any]) -> str | None:
    """Why a domain has fewer rounds than it could have had."""
    from mlxstacks.training.boost import LAST_ROUND

    rounds = domain.get("rounds") or []
    last = rounds[-1]["last"] if rounds else None
    return None if last == LAST_ROUND else last


def _matrix_table(mode: str, rows: dict[str, dict[str, float]]) -> object:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    shown: list[list[output.Cell]] = [
        [name, *(f"{row[c]:.4f}" if c in row else "" for c in columns)]
        for name, row in rows.items()
    ]
    return output.table(["after", *columns], shown, title=_TITLES[mode])
