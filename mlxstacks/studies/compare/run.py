"""`mlxstacks stack compare`: arms of a question, seed by seed, each cell a run of `stack`.

The plan (question, arms, seeds, data, measures, margin, rules) is written and hashed before the
first run. The comparison lives in `.NAME.work` beside its target until every cell is done:

    plan.json              the plan; another one is refused
    cells/ARM_seed-S/      the cell's store, whole or to be gone on with
    cells/ARM_seed-S.json  what is kept of the cell once it is done
    cells/ARM_seed-S.log   what the cell's process printed

Killed at any moment, the same command goes on: finished cells are kept, the one under way continues
from its last saved state.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.studies.compare.analysis import RULES, Rule, analyse, verdict
from mlxstacks.studies.compare.budget import ArmBudget, as_json, check_budgets, planned_budget
from mlxstacks.studies.compare.cells import CellRecord, read_record, write_record
from mlxstacks.studies.compare.measures import measures
from mlxstacks.studies.compare.report import blocks, budget_table, outcome
from mlxstacks.studies.compare.settings import ArmSettings, CompareSettings
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.study.child_process import Message, how_it_ended, run_child
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.settings import StackRunSettings

CELLS = "cells"
ABOUT = {
    "kind": "stack compare",
    "title": "Comparison of stack settings",
}
WORKER = "mlxstacks.studies.compare.worker"
Progress = Callable[..., None]
# Where files lie and how a run goes on, not what comes of it.
_NOT_OF_THE_PLAN = {"model", "data", "save_path", "resume", "force", "retry"}


def run(
    settings: CompareSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Write the plan, run every cell that has no result yet, judge, write to `save_path`.

    A cell that fails or crashes is a result, and the comparison goes on.

    Raises:
        InputError: anything that an arm cannot use, found before the first run; budgets that are
            said to be equal and are not; or the work directory holds another plan.
        RuntimeError: a cell's process ended in a way that is a mistake of ours.
    """
    if settings.model is None or settings.data is None or settings.save_path is None:
        raise InputError("stack compare needs model, data and save_path")
    return run_study(_Comparison(settings, progress), dry_run=dry_run)


class _Comparison(Study):
    artifacts, provenance, plot_formats = (CELLS,), (f"{CELLS}/*.json",), FORMATS
    settings: CompareSettings

    def __init__(self, settings: CompareSettings, progress: Progress | None) -> None:
        self.settings, self.progress = settings, progress
        self.inputs = (settings.model, settings.data)
        self.directory = work_path(self.work_target) / CELLS
        self.cells = [(arm, seed) for seed in settings.seeds for arm in settings.arms]

    def planned(self) -> Result:
        settings = self.settings
        planned = {arm.name: self._planned(arm) for arm in settings.arms}
        self.budgets = {
            arm.name: planned_budget(self._of(arm), planned[arm.name]) for arm in settings.arms
        }
        check_budgets(self.budgets, settings.equal, settings.tolerance)
        notes = dict.fromkeys(note for arm in planned.values() for note in arm.notes)
        return Result(
            **ABOUT, question=settings.question, status="planned", notes=tuple(notes),
            settings=settings.model_dump(mode="json", exclude={"force", "save_path", "resume"}),
            plan=plan_of(settings, planned, self.budgets),
            data={"budgets": as_json(self.budgets)},
            blocks=(budget_table(settings, self.budgets),),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        self.directory.mkdir(exist_ok=True)
        for place, (arm, seed) in enumerate(self.cells):
            yield Step(_cell_name(arm, seed), partial(self._cell, arm, seed, place))

    def conclude(self, work: Path) -> Result:
        settings, rule = self.settings, rule_of(self.settings)
        files = [work / CELLS / f"{_cell_name(arm, seed)}.json" for arm, seed in self.cells]
        records = [read_record(file) for file in files]
        trained = [record.figures() for record in records if record.status == "trained"]
        results = analyse(rule, [arm.name for arm in settings.arms], settings.seeds, trained)
        return Result(
            **ABOUT, status="done", outcome=outcome(results), verdict=verdict(rule, results),
            data={
                "budgets": as_json(self.budgets),
                "arms": [result.as_json() for result in results],
                "cells": [record.as_json() for record in records],
            },
            blocks=blocks(settings, self.budgets, results, records),
            notes=tuple(_how_cells_ended(records)),
        )  # fmt: skip

    # --- the plan ---------------------------------------------------------------------------------

    def _of(self, arm: ArmSettings, **given: Any) -> StackRunSettings:
        places = {"model": self.settings.model, "data": self.settings.data}
        return self.settings.settings_of(arm, **places, **given)

    def _planned(self, arm: ArmSettings) -> Result:
        """The arm's run as it would be. Raises: InputError naming the arm."""
        nowhere = self.directory / f".{arm.name}.plan"
        try:
            return stack_run.run(self._of(arm, save_path=str(nowhere)), dry_run=True)
        except InputError as error:
            raise type(error)(f"arm {arm.name}: {error}") from error

    # --- one cell ---------------------------------------------------------------------------------

    def _cell(self, arm: ArmSettings, seed: int, place: int, work: Path) -> None:
        """Run a cell that has no result yet, or, with `retry`, none of a whole run."""
        path = self.directory / f"{_cell_name(arm, seed)}.json"
        if path.is_file() and (read_record(path).status == "trained" or not self.settings.retry):
            return
        write_record(self.directory, self._run_cell(arm, seed, place))

    def _run_cell(self, arm: ArmSettings, seed: int, place: int) -> CellRecord:
        """Run the cell's process to its end, however it ends."""
        name = _cell_name(arm, seed)
        last: Message = {}

        def on_message(message: Message) -> None:
            nonlocal last
            if "status" in message:
                last = message
            elif self.progress:
                where = f"{place + 1}/{len(self.cells)} {arm.name}, seed {seed}: {message['what']}"
                share = message["done"] / message["total"]
                self.progress(place + share, len(self.cells), where)

        # The guard was asked when the arm was planned; seeds do not change its answer.
        stack = self._of(arm, save_path=str(self.directory / name), seed=seed, guard="off")
        log = self.directory / f"{name}.log"
        # A default is not said again: experts_per_token of one expert may not be.
        specification = {"stack": stack.model_dump(mode="json", exclude_defaults=True)}
        code = run_child(WORKER, specification, log, on_message)
        if last.get("status") == "trained":
            return trained_record(arm.name, seed, last["report"], last["seconds"])
        if last.get("status") == "wrong":
            raise InputError(f"{name}: {last['reason']}")
        if code > 0 or (code == 0 and not last):
            raise RuntimeError(f"{name}: {how_it_ended(code, log)} (all of it in {log})")
        status = last.get("status", "crashed")
        return CellRecord(arm.name, seed, status, last.get("reason") or how_it_ended(code, log))


def _cell_name(arm: ArmSettings, seed: int) -> str:
    return CellRecord(arm.name, seed, "crashed").name


def rule_of(settings: CompareSettings) -> Rule:
    return Rule(
        settings.primary, settings.margin, settings.confidence, settings.tolerance,
        "steps" in settings.equal,
    )  # fmt: skip


def plan_of(
    settings: CompareSettings,
    planned: dict[str, Result],
    budgets: dict[str, ArmBudget],
) -> dict[str, Any]:
    """All that is decided beforehand: the settings but for where files lie, each arm's whole run,
    base and data by their hashes, budgets, rules.
    """
    first = next(iter(planned.values()))
    arms = {
        arm.name: settings.settings_of(arm).model_dump(
            mode="json", exclude={*_NOT_OF_THE_PLAN, "seed"}
        )
        for arm in settings.arms
    }
    return {
        **settings.model_dump(mode="json", exclude={*_NOT_OF_THE_PLAN, "arms", "run"}),
        "control": settings.arms[0].name,
        "arms": arms,
        "budgets": as_json(budgets),
        "rules": RULES,
        "base_fingerprint": first.data["base_fingerprint"],
        "data": {name: domain["data"] for name, domain in first.data["domains"].items()},
    }


def trained_record(
    arm: str, seed: int, report: dict[str, Any], seconds: float | None
) -> CellRecord:
    """What is kept of a complete run; seconds: see `measures`."""
    domains = report["domains"]
    kept = ("number", "kept", "loss_before", "loss_trained", "loss_after", "steps", "best_step",
            "ended", "last")  # fmt: skip
    rounds = {
        name: [{key: one[key] for key in kept} for one in domain.get("rounds", [])]
        for name, domain in domains.items()
    }
    curves = {name: curve_of(domain.get("rounds", [])) for name, domain in domains.items()}
    values = measures(report, seconds)
    return CellRecord(arm, seed, "trained", None, values, report["matrix"], curves, rounds)


def curve_of(rounds: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, validation loss) of all rounds, the steps of earlier rounds counted on."""
    curve: list[tuple[int, float]] = []
    done = 0
    for one in rounds:
        curve += [(done + r["step"], r["validation_loss"]) for r in one["validation"]]
        done += one["steps"]
    return curve


def _how_cells_ended(records: list[CellRecord]) -> list[str]:
    notes = [f"{r.name}: {r.status}: {r.reason}" for r in records if r.status != "trained"]
    resumed = [r.name for r in records if r.status == "trained" and r.values["seconds"] is None]
    if resumed:
        notes.append(f"No seconds of runs that were stopped on the way: {', '.join(resumed)}.")
    for record in records:
        for domain, rounds in record.rounds.items():
            notes += [
                f"{record.name}, {domain}: round {one['number']} was not kept, {one['last']}."
                for one in rounds
                if not one["kept"]
            ]
    return notes
