"""What `mlxstacks stack` reports: its plan, then per domain losses, sizes and directions, and the
forgetting matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks import memory
from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.guard.report import GuardReport
from mlxstacks.memory import bytes_in_words
from mlxstacks.studies.stack.plan import DomainPlan
from mlxstacks.studies.stack.setup import StackSetup
from mlxstacks.studies.train.report import guard_json
from mlxstacks.study.run_directory import plain
from mlxstacks.training.boost import RoundRecord
from mlxstacks.training.matrix import rises
from mlxstacks.training.protect import Bases, protection_report
from mlxstacks.training.stack_settings import MATRIX_MODES


@dataclass(frozen=True, slots=True)
class StackReport:
    """Result of `stack` or, with `status` "planned", of its dry run.

    status: "trained", or "complete" where the store had every domain already.
    domains: name -> what is known of it, in the order of the store, with those planned last.
    matrix: mode -> domain trained last -> domain measured -> loss, rows in order.
    """

    status: str
    save_path: str
    settings: dict[str, Any]
    plan: dict[str, Any]
    domains: dict[str, dict[str, Any]]
    matrix: dict[str, dict[str, dict[str, float]]]
    notes: list[str]
    verdict: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        values = plain(
            {
                "status": self.status,
                "save_path": self.save_path,
                "settings": self.settings,
                "settings_sha256": json_sha256(self.settings),
                **self.plan,
                "domains": self.domains,
                "matrix": self.matrix,
                "verdict": self.verdict,
                **self.figures,
                "notes": self.notes,
            }
        )
        assert isinstance(values, dict)
        return values

    def with_details(self, name: str, details: Mapping[str, Any]) -> "StackReport":
        """The report with more about one domain."""
        known = {**self.domains.get(name, {"name": name}), **details}
        return replace(self, domains={**self.domains, name: known})

    def after(self, setup: StackSetup, seconds: float, processes: int) -> "StackReport":
        """The plan with what came of it. setup: as it is at the end."""
        assert setup.store is not None
        manifest = setup.store.manifest
        domains = {
            record.name: {**self.domains.get(record.name, {}), **stored_json(record)}
            for record in manifest.domains
        }
        trained = any(one.get("status") == "trained" for one in domains.values())
        matrix = ordered_matrix(manifest)
        device = memory.device()
        figures = {
            "seconds": round(seconds, 3),
            "processes": processes,
            "peak_bytes": memory.counters().peak_bytes,
            "device": f"{device.name} ({device.kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
        }
        return replace(
            self,
            status="trained" if trained else "complete",
            domains=domains,
            matrix=matrix,
            notes=list(dict.fromkeys(setup.notes)),
            verdict=verdict(manifest),
            figures=figures,
        )


def round_details(
    records: Sequence[RoundRecord],
    bases: Bases,
    setup: StackSetup,
    seconds: float,
    resumed_from: int | None,
) -> dict[str, Any]:
    """What the training of a domain says beside its record in the store."""
    places = len(setup.targets)
    balances = [
        record["balance_loss"] / places
        for one in records
        for record in one.history[-1:]
        if "balance_loss" in record
    ]
    return {
        "status": "trained",
        "rounds": [record.as_json() for record in records],
        "steps": sum(record.steps for record in records),
        "seconds": round(seconds, 3),
        "resumed_from_step": resumed_from,
        # uniform routing gives experts_per_token
        "balance_loss_per_projection": balances[-1] if balances else None,
        "protected": protected_json(bases),
    }


def protected_json(bases: Bases) -> dict[str, Any] | None:
    return protection_report(bases) if bases else None


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
    }


def planned(setup: StackSetup, target: Path, predicted: GuardReport | None) -> StackReport:
    """What a run with this setup would do."""
    settings, size = setup.settings, setup.size
    domains: dict[str, dict[str, Any]] = {}
    if setup.store is not None:
        for record in setup.store.manifest.domains:
            domains[record.name] = {"status": "stored", **stored_json(record)}
    for plan in setup.to_train:
        domains[plan.name] = _planned_domain(plan)
    details = {
        "base_model": setup.base_model,
        "base_fingerprint": setup.base_fingerprint,
        "base_in_float32": setup.float32_base,
        "projections": setup.projections(),
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
    }  # fmt: skip
    matrix = ordered_matrix(setup.store.manifest) if setup.store else {}
    return StackReport(
        "planned", str(target), settings.model_dump(mode="json"), details, domains, matrix,
        setup.notes,
    )  # fmt: skip


def _planned_domain(plan: DomainPlan) -> dict[str, Any]:
    rows, order = plan.rows, plan.round_plan(1)
    return {
        "name": plan.name,
        "status": "planned",
        "rounds_planned": plan.settings.rounds,
        "steps_per_round": plan.optimizer.steps,
        "iters": plan.settings.iters,
        "train_rows": len(rows.data.train),
        "validation_rows": len(rows.data.validation),
        "validation_rows_evaluated": rows.evaluated,
        "widths_tokens": list(plan.widths),
        "padding_percent": round(100 * order.padding_share(), 1),
        "data": rows.report(),
    }


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


def verdict(manifest: Manifest) -> str:
    """The matrix in words."""
    matrix = ordered_matrix(manifest)
    stacks = manifest.enabled_stacks()
    size = bytes_in_words(sum(stack.file.nbytes for stack in stacks))
    count = sum(1 for domain in manifest.domains if domain.enabled)
    words = [f"{_count(count, 'domain')} in {_count(len(stacks), 'frozen stack')} ({size})."]
    nothing = [d.name for d in manifest.domains if d.enabled and not d.stacks]
    if nothing:
        words.append(f"Training gained nothing for {', '.join(nothing)}: no stack was kept.")
    moved = {name: by for name, by in rises(matrix.get("prefix", {})).items() if by != 0}
    if len(matrix.get("prefix", {})) > 1:
        words.append(
            "With the stacks up to its own, every domain's loss is what it was, to the last bit."
            if not moved
            else f"With the stacks up to its own, the loss of {', '.join(moved)} changed: a stack "
            "before it was taken out, or another device measured it."
        )
    words += _forgotten(matrix.get("ungated", {}))
    return " ".join(words)


def _forgotten(ungated: Mapping[str, Mapping[str, float]]) -> list[str]:
    last = list(ungated)[-1] if ungated else ""
    older = {name: by for name, by in rises(ungated).items() if name != last}
    if not older:
        return []
    worst = max(older, key=lambda name: older[name])
    mean = sum(older.values()) / len(older)
    if older[worst] <= 0:
        return [f"With every stack on, no earlier domain lost anything (mean {mean:+.4f})."]
    words = (
        f"With every stack on, earlier domains moved by {mean:+.4f} on average; {worst} lost most, "
        f"{older[worst]:+.4f} to {ungated[last][worst]:.4f}."
    )
    return [words]


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
