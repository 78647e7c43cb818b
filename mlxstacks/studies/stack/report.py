"""The result of `mlxstacks stack`: its plan, then losses, sizes and directions by domain, and the
forgetting matrix; and what every command shows of a store.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxstacks import memory
from mlxstacks.command_line import command_line
from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.guard.run import GuardReport
from mlxstacks.layers.targets import stack_size
from mlxstacks.memory import bytes_in_words
from mlxstacks.studies.stack.plan import FEW_ROWS
from mlxstacks.studies.stack.samples import samples_table
from mlxstacks.studies.stack.setup import StackSetup
from mlxstacks.studies.train.setup import guard_json
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table, counted
from mlxstacks.study.render.console import byte_parts
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.study.write import environment
from mlxstacks.training.boost import LAST_ROUND, RoundRecord
from mlxstacks.training.continual import Bases, protection_report, rises
from mlxstacks.training.settings import MATRIX_MODES

ABOUT = {
    "kind": "stack",
    "title": "Stacks",
    "question": "What does each domain gain, and what do later ones cost it?",
}
MODES = {
    "ungated": "every stack on",
    "prefix": "the stacks up to its own",
    "isolated": "its own stacks alone",
}
Domains = Mapping[str, Mapping[str, Any]]
Matrix = Mapping[str, Mapping[str, Mapping[str, float]]]


# --- the run --------------------------------------------------------------------------------------


def planned_result(setup: StackSetup, target: Path, predicted: GuardReport | None) -> Result:
    """What a run with this setup would do. data: figures of the plan; `domains`: name -> what is
    known of it, in the order of the store, with those planned last; `matrix`: mode -> domain
    trained last -> domain measured -> loss, rows in order.
    """
    settings = setup.settings
    size = stack_size(setup.targets, settings.stack)
    domains: dict[str, Any] = {}
    if setup.store is not None:
        for record in setup.store.manifest.domains:
            domains[record.name] = {"status": "stored", **stored_json(record)}
    for plan in setup.to_train:
        domains[plan.name] = {
            "name": plan.name,
            "status": "planned",
            "rounds_planned": plan.settings.rounds,
            "steps_per_round": plan.optimizer.steps,
            "trained_parameters": stack_size(
                setup.targets_of(plan.settings), settings.stack
            ).parameters,
            "tokens_per_round": plan.tokens_per_round,
            "iters": plan.settings.iters,
            "train_rows": len(plan.rows.data.train),
            "validation_rows": len(plan.rows.data.validation),
            "validation_rows_evaluated": plan.rows.evaluated,
            "validation_ids_sha256": plan.rows.identity()["validation_ids_sha256"],
            "widths_tokens": list(plan.widths),
            "padding_percent": round(100 * plan.round_plan(1).padding_share(), 1),
            "data": plan.rows.report(),
        }
    shown = settings.model_dump(mode="json")
    data = {
        "status": "planned",
        "save_path": str(target),
        "settings_sha256": json_sha256(shown),
        "base_model": setup.base_model,
        "base_fingerprint": setup.base_fingerprint,
        "base_in_float32": setup.float32_base,
        "projections": dict(sorted(Counter(t.name for t in setup.targets).items())),
        "modules": len(setup.targets),
        "layers": sorted({target.layer for target in setup.targets}),
        "trained_parameters": size.parameters,
        "trained_bytes": size.trained_bytes,
        # Adam keeps two numbers for each that is trained.
        "optimizer_bytes": 2 * size.trained_bytes,
        "stack_bytes": size.frozen_bytes,
        "shared_bytes": size.shared_bytes,
        "to_train": [plan.name for plan in setup.to_train],
        "guard": None if predicted is None else guard_json(predicted, {}),
        "writes": [str(target)],
        "domains": domains,
        "matrix": ordered_matrix(setup.store.manifest) if setup.store else {},
    }
    return Result(
        **ABOUT, status="planned", settings=shown, data=plain(data), notes=tuple(setup.notes),
        blocks=(_run_table(data, shown, planned=True), _planned_table(domains)),
        directory=str(target),
    )  # fmt: skip


def done_result(
    planned: Result, setup: StackSetup, domains: Domains, seconds: float, processes: int
) -> Result:
    """The plan with what came of it. setup: as it is at the end; domains: with what their training
    said. `status` in data: "trained", or "complete" where the store had every domain already.
    """
    assert setup.store is not None
    manifest = setup.store.manifest
    known = {
        record.name: {**domains.get(record.name, {}), **stored_json(record)}
        for record in manifest.domains
    }
    trained = any(domain.get("status") == "trained" for domain in known.values())
    data = plain({
        **planned.data,
        "status": "trained" if trained else "complete",
        "domains": known,
        "matrix": ordered_matrix(manifest),
        "processes": processes,
    })  # fmt: skip
    samples = {name: domain["samples"] for name, domain in known.items() if "samples" in domain}
    nothing = [] if trained else ["Nothing was trained: the store has every domain."]
    where = environment(seconds)
    store, model = planned.data["save_path"], planned.settings["model"]
    next_steps = {"See also": command_line("mlxstacks stacks list", store)}
    if manifest.enabled_stacks():
        next_steps["Try it"] = command_line(
            "mlxstacks chat", ungated=True, model=model, store_path=store
        )
    return planned.model_copy(update={
        "status": "done",
        "outcome": outcome(manifest),
        "verdict": verdict(manifest),
        "environment": where.model_copy(update={"peak_bytes": memory.counters().peak_bytes}),
        "data": data,
        "blocks": (
            _run_table(data, planned.settings, planned=False), domain_table(known),
            *matrix_blocks(data["matrix"]),
            *([samples_table(samples)] if samples else ()),
        ),
        "notes": tuple(dict.fromkeys([*setup.notes, *nothing])),
        "next_steps": next_steps,
    })  # fmt: skip


def round_details(
    records: Sequence[RoundRecord],
    bases: Bases,
    projections: int,
    seconds: float,
    resumed_from: int | None,
) -> dict[str, Any]:
    """What the training of a domain says apart from its record in the store."""
    balances = [
        record.history[-1]["balance_loss"] / projections
        for record in records
        if record.history and "balance_loss" in record.history[-1]
    ]
    return {
        "status": "trained",
        "rounds": [asdict(record) for record in records],
        "steps": sum(record.steps for record in records),
        "seconds": round(seconds, 3),
        "resumed_from_step": resumed_from,
        # uniform routing gives experts_per_token
        "balance_loss_per_projection": balances[-1] if balances else None,
        "protected": protection_report(bases) if bases else None,
    }


def stored_json(record: DomainRecord) -> dict[str, Any]:
    """What the store knows of a domain."""
    return {
        "name": record.name,
        "enabled": record.enabled,
        "origin": record.origin,
        "losses": list(record.losses),
        "final_loss": record.final_loss,
        "stacks": [stack.name for stack in record.stacks],
        "parameters": sum(stack.parameters for stack in record.stacks),
        "bytes": sum(stack.file.nbytes for stack in record.stacks),
        "protected": record.protected,
        "data": record.data,
        **({"prefix_changed": asdict(record.prefix_changed)} if record.prefix_changed else {}),
    }


# --- tables and plots -----------------------------------------------------------------------------


def _run_table(data: Mapping[str, Any], settings: Mapping[str, Any], *, planned: bool) -> Table:
    stack, layers = settings["stack"], data["layers"]
    kinds = ", ".join(
        f"{name} x{count}" if count > 1 else name for name, count in data["projections"].items()
    )
    experts = counted(stack["num_experts"], "expert")
    where = f"{len(layers)} layers" if len(layers) > 8 else f"layers {', '.join(map(str, layers))}"
    top = min(stack["experts_per_token"], stack["num_experts"])
    frozen = bytes_in_words(data["stack_bytes"])
    noise = ", without its routers' noise" if stack["num_experts"] > 1 else ""
    facts: dict[str, Cell] = {
        "base": f"{data['base_model']}{' in float32' if data['base_in_float32'] else ''}",
        "projections": f"{data['modules']} in {where}: {kinds}",
        "a stack": f"{experts} of rank {stack['rank']}, {top} a token",
        "its size": f"{data['trained_parameters']:,} trained parameters; frozen {frozen}{noise}",
    }
    if planned:
        trained, optimizer = (bytes_in_words(data[f"{n}_bytes"]) for n in ("trained", "optimizer"))
        facts["training"] = f"stack {trained}, optimizer {optimizer}"
    if planned and data["guard"]:
        guard = data["guard"]
        facts |= {"memory": byte_parts(guard["parts_bytes"]), "guard": guard["verdict"]}
    return Table.of_facts("run", "Run", facts)


def _planned_table(domains: Domains) -> Table:
    columns: Columns = {
        "domain": "text", "where": "text", "rows": "count", "validation": "count",
        "stacks, at most": "count", "steps each": "count",
    }  # fmt: skip
    return Table.of("domains", "Domains", columns, [
        (name, "to train", domain["train_rows"], domain["validation_rows"],
         domain["rounds_planned"], domain["steps_per_round"])
        if domain["status"] == "planned"
        else (name, "in the store", None, None, len(domain["stacks"]), None)
        for name, domain in domains.items()
    ])  # fmt: skip


def domain_table(domains: Domains) -> Table:
    """What a store says of its domains, and how their training ended where that is known."""
    rows: list[tuple[Cell, ...]] = []
    for name, domain in domains.items():
        protected, rounds = domain.get("protected") or {}, domain.get("rounds") or [{}]
        ended = rounds[-1].get("last")
        rows.append((
            name, domain["enabled"], len(domain["stacks"]), domain["parameters"], domain["bytes"],
            *((domain["losses"][0], domain["losses"][-1]) if domain["losses"] else (None, None)),
            protected.get("captured_energy_mean"), protected.get("capacity_used_highest"),
            max((o["share"] for o in protected.get("overlap", {}).values()), default=None),
            None if ended == LAST_ROUND else ended,
        ))  # fmt: skip
    columns: Columns = {
        "domain": "text", "served": "text", "stacks": "count", "parameters": "count",
        "size": "bytes", "loss before": ("number", 4), "loss after": ("number", 4),
        "energy": ("share", 0), "protected": ("share", 0), "overlap": ("share", 0),
        "ended early": "text",
    }  # fmt: skip
    # of directions and early ends only where there are some
    kept = [
        place for place in range(11) if place < 7 or any(row[place] is not None for row in rows)
    ]
    energy = (
        "; energy: of what earlier stacks write, so much lies in the protected directions; "
        "overlap: of what its stacks can write, so much lies in an earlier domain's leading "
        "directions, at most"
    )
    return Table.of(
        "domains", "Domains, in the order of training",
        dict(list(columns.items())[place] for place in kept),
        [[row[place] for place in kept] for row in rows],
        caption="Validation loss before the first round and after the last that was kept, nats a "
        f"token{energy if 7 in kept else ''}; parameters: those kept, which leave out the noise of "
        "routers; size: of the files, with their headers.",
    )  # fmt: skip


def matrix_blocks(matrix: Matrix) -> Iterator[Block]:
    """For each mode that was measured the losses as a table; above it, of domains that were trained
    one after the other, how much each of them lost since. One table where no domain was measured
    after another, as then all modes are the same.
    """
    later = {
        mode: rows
        for mode, rows in matrix.items()
        if any(column != name for name, row in rows.items() for column in row)
    }
    if not later and (rows := next(iter(matrix.values()), {})):
        yield Table.of(
            "losses-alone", "Losses", {"domain": "text", "loss": ("number", 4)},
            [(name, row.get(name)) for name, row in rows.items()],
            caption="Validation loss of each domain when it had been trained, nats per token. None "
            "was measured again after another domain.",
        )  # fmt: skip
    for mode, rows in later.items():
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        if (plot := _forgetting_plot(mode, rows, columns)) is not None:
            yield plot
        yield Table.of(
            f"losses-{mode}", f"Losses, {mode}: {MODES[mode]}",
            {"trained last": "text", **{f"of {column}": ("number", 4) for column in columns}},
            [(name, *(row.get(column) for column in columns)) for name, row in rows.items()],
            caption="Validation loss of each domain, nats per token.",
        )  # fmt: skip


def _forgetting_plot(
    mode: str, rows: Mapping[str, Mapping[str, float]], columns: Sequence[str]
) -> Plot | None:
    """Loss of each domain (column) after each later one (row), less its loss when it had just been
    trained; None where nothing came later.
    """
    changes = {
        name: tuple(
            row[column] - rows[column][column]
            if column in row and column in rows.get(column, {})
            else None
            for column in columns
        )
        for name, row in rows.items()
    }
    later = {
        (name, column): change
        for name, row in changes.items()
        for column, change in zip(columns, row, strict=True)
        if change is not None and name != column
    }
    if not later:
        return None
    title = f"Forgetting, {mode} ({MODES[mode]})"
    (last, domain), most = max(later.items(), key=lambda item: item[1])
    limit = max(0.1, *(abs(change) for change in later.values()))  # less is next to nothing
    return Plot(
        id=f"forgetting-{mode}", title=title, kind="heat map", categories=tuple(columns),
        series=tuple(Series(label=name, y=row) for name, row in changes.items()),
        x_label="domain measured", y_label="domain trained last", form="{:+.2f}",
        unit="change of loss, nats per token", limits=(-limit, limit),
        alt=f"{title}: change of each domain's validation loss since its training, nats per token. "
        f"Rows: the domain trained last; columns: the domain measured. The largest: {domain} "
        f"{most:+.4g} after {last}.",
    )  # fmt: skip


# --- the matrix in words --------------------------------------------------------------------------


def ordered_matrix(manifest: Manifest) -> dict[str, dict[str, dict[str, float]]]:
    """The matrix with rows and columns in the order of training; files have sorted keys."""
    order = [domain.name for domain in manifest.domains]
    return {
        mode: {
            row: {column: rows[row][column] for column in order if column in rows[row]}
            for row in order
            if row in rows
        }
        for mode in MATRIX_MODES
        if (rows := manifest.matrix.get(mode)) is not None
    }


def outcome(manifest: Manifest) -> str:
    words = f"{counted(len(manifest.domains), 'domain')}, {counted(len(manifest.stacks), 'stack')}"
    moved = _moved(ordered_matrix(manifest).get("ungated", {}))
    worst = max(moved, key=lambda name: moved[name], default=None)
    if worst is None:
        return words
    return f"{words}; with every stack on, the loss of {worst} moved by {moved[worst]:+.3f}"


def verdict(manifest: Manifest) -> str:
    """The matrix in words."""
    matrix = ordered_matrix(manifest)
    stacks = manifest.enabled_stacks()
    size = bytes_in_words(sum(stack.file.nbytes for stack in stacks))
    count = sum(1 for domain in manifest.domains if domain.enabled)
    kind = "capability block" if manifest.holds_blocks else "frozen stack"
    words = [f"{counted(count, 'domain')} in {counted(len(stacks), kind)} ({size})."]
    nothing = [d.name for d in manifest.domains if d.enabled and not d.stacks]
    if nothing:
        words.append(f"Training gained nothing for {', '.join(nothing)}: no stack was kept.")
    few = []
    for domain in manifest.domains:
        held = domain.data.get("validation_rows")
        if domain.enabled and isinstance(held, int) and held < FEW_ROWS:
            few.append(f"{domain.name} {held}")
    if few:
        words.append(f"Few rows to validate with: {', '.join(few)} (see validation_rows).")
    prefix = matrix.get("prefix", {})
    changed = [name for name, rise in rises(prefix).items() if rise != 0]
    if _moved(prefix):
        words.append(
            "With the stacks up to its own, every domain's loss is what it was, to the last bit."
            if not changed
            else f"With the stacks up to its own, the loss of {', '.join(changed)} changed: a "
            "stack before it was taken out or trained again, or another device measured it."
        )
    ungated = matrix.get("ungated", {})
    moved = _moved(ungated)
    if moved:
        worst = max(moved, key=lambda name: moved[name])
        mean = sum(moved.values()) / len(moved)
        words.append(
            f"With every stack on, no earlier domain lost anything (mean {mean:+.4f})."
            if moved[worst] <= 0
            else f"With every stack on, earlier domains moved by {mean:+.4f} on average; {worst} "
            f"lost most, {moved[worst]:+.4f} to {list(ungated.values())[-1][worst]:.4f}."
        )
    return " ".join(words)


def _moved(ungated: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How much the loss of each domain but the last rose since its own training."""
    return {name: rise for name, rise in rises(ungated).items() if name != list(ungated)[-1]}
