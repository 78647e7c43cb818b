"""`mlxstacks stack compare`: arms of a question, seed by seed, each cell a run of `stack`.

The plan (question, arms, seeds, data, measures, margin, rules) is written and hashed before the
first run. The comparison lives in `.NAME.work` beside its target until every cell is done:

    plan.json              the plan; another one is refused
    cells/ARM_seed-S/      the cell's store, whole or to be resumed
    cells/ARM_seed-S.json  what is kept of the cell once it is done
    cells/ARM_seed-S.log   what the cell's process printed
    cells/ARM_rate-R_...   the same of each cell of the search of learning rates; no store is kept
    rates.json             what the search says, once it is done; the cells above come after it

Killed at any moment, the same command resumes: finished cells are kept, the one under way continues
from its last saved state. As a program this file is the process of one cell:

    python -m mlxstacks.studies.compare.run < specification
"""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError, ResourceLimitError, StoreError
from mlxstacks.files.outputs import PLACES, write_json
from mlxstacks.files.strict_json import read_object
from mlxstacks.studies.compare.analysis import (
    RULES,
    SEARCH_RULE,
    CellRecord,
    analyse,
    best_rates,
    check_budgets,
    check_domains,
    measures,
    verdict,
)
from mlxstacks.studies.compare.report import arm_table, blocks, budget_table
from mlxstacks.studies.compare.settings import ArmSettings, CompareSettings, at_rate
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.study.child_process import Message, as_child, run_cell
from mlxstacks.study.document import Cell, Table
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain, work_path
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.settings import StackRunSettings

CELLS, RATES = "cells", "rates.json"
ABOUT = {
    "kind": "stack compare",
    "title": "Comparison of stack settings",
}
WORKER = "mlxstacks.studies.compare.run"
Progress = Callable[..., None]
# Where files lie and how a run resumes, not what comes of it.
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
    if settings.model is None or settings.save_path is None:
        raise InputError("stack compare needs model and save_path")
    return run_study(_Comparison(settings, progress), dry_run=dry_run, progress=progress)


class _Comparison(Study):
    artifacts, provenance, plot_formats = (CELLS, RATES), (f"{CELLS}/*.json", RATES), FORMATS
    is_dealt = True
    settings: CompareSettings

    def __init__(self, settings: CompareSettings, progress: Progress | None) -> None:
        self.settings, self.progress = settings, progress
        self.inputs = (settings.model, settings.data)
        self.directory = work_path(self.work_target) / CELLS
        self.arms = [profiled(settings, arm) for arm in settings.arms]
        self.search = [
            (at_rate(arm, rate, search=True), seed)
            for seed in settings.search_seeds
            for rate in settings.rates
            for arm in self.arms
        ]
        self.cells = [(arm, seed) for seed in settings.seeds for arm in self.arms]

    def planned(self) -> Result:
        settings = self.settings
        planned: dict[str, Result] = {}
        self.budgets: dict[str, dict[str, int]] = {}
        for arm in self.arms:
            stack = self._of(arm, save_path=str(self.directory / f".{arm.name}.plan"))
            try:
                plan = planned[arm.name] = stack_run.run(stack, dry_run=True)
            except InputError as error:
                raise type(error)(f"arm {arm.name}: {error}") from error
            self.budgets[arm.name] = _budget(plan.data)
        check_domains(
            {name: plan.data["domains"] for name, plan in planned.items()}, settings.primary
        )
        check_budgets(self.budgets, settings.equal, settings.tolerance)
        notes = dict.fromkeys(note for plan in planned.values() for note in plan.notes)
        about_rates = "Learning rates were given, not searched: an arm may win because its rate "
        about_rates += "suits it. --rates gives each arm its own best one."
        if self.search:
            about_rates = (
                f"{len(self.search)} runs search learning rates, then {len(self.cells)} judge."
            )
        return Result(
            **ABOUT, question=settings.question, status="planned",
            notes=(*notes, about_rates),
            settings=settings.model_dump(mode="json", exclude=PLACES),
            plan=self._plan({name: plan.data for name, plan in planned.items()}),
            data={"budgets": self.budgets},
            blocks=(
                self._plan_table(), arm_table(settings, {}), budget_table(settings, self.budgets)
            ),
        )  # fmt: skip

    def _plan_table(self) -> Table:
        settings = self.settings
        facts: dict[str, Cell] = {
            "arms, the control first": ", ".join(arm.name for arm in self.arms),
            "seeds": ", ".join(map(str, settings.seeds)),
            "trainings that are judged": len(self.cells),
            "primary measure": settings.primary,
            "margin, nats per token": settings.margin,
            "confidence of intervals": settings.confidence,
        }
        if self.search:
            facts |= {
                "learning rates to search": ", ".join(f"{rate:g}" for rate in settings.rates),
                "seeds of the search": ", ".join(map(str, settings.search_seeds)),
                "trainings of the search": len(self.search),
            }
        return Table.of_facts("plan", "What is compared", facts)

    def _plan(self, planned: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """All that is decided beforehand: the settings but for where files lie, each arm's whole
        run, base and data by their hashes, budgets, rules. planned: arm -> its planned run.
        """
        first, *others = (_data_of(plan) for plan in planned.values())
        own = {arm: data for arm, data in zip([*planned][1:], others, strict=True) if data != first}
        settings, search = self.settings, {"rates", "search_seeds"}
        given = _NOT_OF_THE_PLAN | {"arms", "run"} | (set() if settings.rates else search)
        of_cell = _NOT_OF_THE_PLAN | {"seed"} | ({"learning_rate"} if settings.rates else set())
        return {
            **settings.model_dump(mode="json", exclude=given),
            "control": settings.arms[0].name,
            "arms": {
                arm.name: settings.settings_of(arm).model_dump(mode="json", exclude=of_cell)
                for arm in self.arms
            },
            "budgets": self.budgets,
            "rules": RULES | (SEARCH_RULE if settings.rates else {}),
            "base_fingerprint": planned[settings.arms[0].name]["base_fingerprint"],
            "data": first,
            **({"data_of_arms": own} if own else {}),
        }

    def _of(self, arm: ArmSettings, **given: Any) -> StackRunSettings:
        paths = {"model": self.settings.model, "data": self.settings.data}
        return self.settings.settings_of(arm, **paths, **given)

    def steps(self, work: Path) -> Iterator[Step | list[Step]]:
        self.directory.mkdir(exist_ok=True)
        if self.search:
            # Once it has chosen, nothing is run again that it was chosen by.
            yield [
                Step(_cell_name(arm, seed), partial(self._search_cell, arm, seed, place))
                for place, (arm, seed) in enumerate(self.search)
                if not (work / RATES).exists()
            ]
            yield Step("rates", self._choose_rates, (RATES,))
            chosen = read_object((work / RATES).read_bytes())
            rates = {name: rate["rate"] for name, rate in chosen.items()}
            self.cells = [(at_rate(arm, rates[arm.name]), seed) for arm, seed in self.cells]
        yield [
            Step(_cell_name(arm, seed), partial(self._run_cell, arm, seed, place))
            for place, (arm, seed) in enumerate(self.cells, len(self.search))
        ]

    def conclude(self, work: Path) -> Result:
        return concluded(self.settings, self.budgets, work)

    def _search_cell(self, arm: ArmSettings, seed: int, place: int, work: Path) -> None:
        """The record is all that a search is for."""
        self._run_cell(arm, seed, place, work)
        shutil.rmtree(self.directory / _cell_name(arm, seed), ignore_errors=True)

    def _choose_rates(self, out: Path) -> None:
        records = {
            (arm.name, seed): _read_record(self.directory / f"{_cell_name(arm, seed)}.json")
            for arm, seed in self.search
        }
        write_json(out / RATES, best_rates(self.settings, records))

    def _run_cell(self, arm: ArmSettings, seed: int, place: int, work: Path) -> None:
        """Run a cell's process to its end, however it ends; not where it has a result already, or,
        with `retry`, one of a whole run.
        """
        name = _cell_name(arm, seed)
        path = self.directory / f"{name}.json"
        if path.is_file() and (_read_record(path).status == "trained" or not self.settings.retry):
            return

        def on_progress(message: Message) -> None:
            if self.progress:
                total = len(self.search) + len(self.cells)
                where = f"{place + 1}/{total} {arm.name}, seed {seed}: {message['what']}"
                self.progress(place + message["done"] / message["total"], total, where)

        # The guard was asked when the arm was planned; seeds do not change its answer.
        stack = self._of(arm, save_path=str(self.directory / name), seed=seed, guard="off")
        log = self.directory / f"{name}.log"
        # A default is not said again: experts_per_token of one expert may not be.
        specification = {"stack": stack.model_dump(mode="json", exclude_defaults=True)}
        ended = run_cell(WORKER, specification, log, on_progress)
        if ended["status"] == "trained":
            record = _trained_record(arm.name, seed, ended["report"], ended["seconds"])
        else:
            record = CellRecord(arm.name, seed, ended["status"], ended["reason"])
        write_json(path, _record_json(record))


def concluded(
    settings: CompareSettings, budgets: dict[str, dict[str, int]], directory: Path
) -> Result:
    """The result of the cells in `directory`. Raises: InputError for one that is missing."""
    cells = [_cell_name(arm, seed) for seed in settings.seeds for arm in settings.arms]
    records = [_read_record(directory / CELLS / f"{name}.json") for name in cells]
    results = analyse(settings, budgets, records)
    searches = read_object((directory / RATES).read_bytes()) if settings.rates else {}
    return Result(
        **ABOUT, status="done", verdict=verdict(settings, results, searches),
        outcome=", ".join(f"{result.arm}: {result.outcome}" for result in results[1:]),
        data={
            "budgets": budgets,
            "arms": [asdict(result) for result in results],
            "cells": [_record_json(record) for record in records],
            **({"rates": searches} if searches else {}),
        },
        blocks=blocks(settings, budgets, results, records, searches),
        notes=tuple(_how_cells_ended(records)),
    )  # fmt: skip


def conclude_again(result: Result, directory: Path) -> Result:
    """What follows from the cells of a finished comparison. Raises: ValueError, InputError."""
    settings = CompareSettings.model_validate(result.settings)
    if len(settings.seeds) * len(settings.arms) > len(result.provenance):
        raise ValueError("more cells than files")
    return concluded(settings, (result.plan or {})["budgets"], directory)


def profiled(settings: CompareSettings, arm: ArmSettings) -> ArmSettings:
    """The arm with each domain's layers by its profile. Raises: InputError: no such profile, or a
    domain that is no group of it.
    """
    if arm.profile is None:
        return arm
    profile = Result.open(arm.profile)
    if profile.kind != "profile" or profile.status != "done":
        raise InputError(f"arm {arm.name}: {arm.profile} holds no finished profile")
    layers = profile.data["tables"]["top_layers"]["by_kl"]
    domains = settings.settings_of(arm).domains
    if not domains or any(domain.name not in layers for domain in domains):
        raise InputError(
            f"arm {arm.name}: {arm.profile} has the groups {', '.join(layers)}; run.domains has to "
            "name domains among them"
        )
    changed = [d.model_dump(exclude_defaults=True) | {"layers": layers[d.name]} for d in domains]
    return arm.model_copy(update={"change": {**arm.change, "domains": changed}})


def _data_of(planned: dict[str, Any]) -> dict[str, Any]:
    """What each domain of a planned run reads."""
    return {name: domain["data"] for name, domain in planned["domains"].items()}


def _budget(planned: dict[str, Any]) -> dict[str, int]:
    """What a run would spend, from the figures of its dry run."""
    domains = [d for d in planned["domains"].values() if d["status"] == "planned"]
    parameters = sum(d["rounds_planned"] * d["trained_parameters"] for d in domains)
    steps = sum(domain["rounds_planned"] * domain["steps_per_round"] for domain in domains)
    tokens = sum(domain["rounds_planned"] * domain["tokens_per_round"] for domain in domains)
    return {"parameters": parameters, "steps": steps, "tokens": tokens}


# --- what is kept of a cell -----------------------------------------------------------------------


def _cell_name(arm: ArmSettings, seed: int) -> str:
    return CellRecord(arm.name, seed, "crashed").name


def _record_json(record: CellRecord) -> dict[str, Any]:
    return {"name": record.name, **asdict(record)}


def _read_record(path: Path) -> CellRecord:
    """Raises: InputError for a file that is not a cell's result."""
    try:
        document = read_object(path.read_bytes())
        document.pop("name")
        return CellRecord(**document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: not a result of a comparison ({type(error).__name__}: {error}); move it away"
        ) from None


def _trained_record(
    arm: str, seed: int, report: dict[str, Any], seconds: float | None
) -> CellRecord:
    """What is kept of a complete run; seconds: see `measures`."""
    keys = ("number", "kept", "loss_before", "loss_trained", "loss_after", "steps", "best_step",
            "ended", "last")  # fmt: skip
    by_domain = {name: domain.get("rounds", []) for name, domain in report["domains"].items()}
    return CellRecord(
        arm, seed, "trained", None, measures(report, seconds), report["matrix"],
        {name: curve_of(rounds) for name, rounds in by_domain.items()},
        {name: [{key: r[key] for key in keys} for r in rounds]
         for name, rounds in by_domain.items()},
    )  # fmt: skip


def curve_of(rounds: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, validation loss) of all rounds, the steps of earlier rounds counted on."""
    curve: list[tuple[int, float]] = []
    done = 0
    for record in rounds:
        curve += [(done + r["step"], r["validation_loss"]) for r in record["validation"]]
        done += record["steps"]
    return curve


def _how_cells_ended(records: list[CellRecord]) -> list[str]:
    notes = [f"Cell {r.name} {r.status}: {r.reason}" for r in records if r.status != "trained"]
    resumed = [r.name for r in records if r.status == "trained" and r.values["seconds"] is None]
    if resumed:
        notes.append(f"No seconds of runs that were stopped on the way: {', '.join(resumed)}.")
    notes += [
        f"Cell {record.name}, {domain}: round {r['number']} was not kept, {r['last']}."
        for record in records
        for domain, rounds in record.rounds.items()
        for r in rounds
        if not r["kept"]
    ]
    return notes


# --- the process of a cell ------------------------------------------------------------------------


def run_one(specification: Message, send: Callable[[Message], None]) -> Message:
    """Train a cell, or resume its store: the report, or why there is none."""
    settings = StackRunSettings.model_validate(specification["stack"])
    started = time.process_time()

    def tell(done: float, total: float, what: str = "") -> None:
        send({"done": done, "total": total, "what": what})

    try:
        result = stack_run.run(settings, progress=tell)
    except (ResourceLimitError, NonFiniteError) as error:
        return {"status": "failed", "reason": str(error)}
    except (InputError, StoreError) as error:
        return {"status": "wrong", "reason": str(error)}
    except RuntimeError as error:
        # MLX has no type of its own for memory or buffers that are not to be had.
        if "malloc" not in str(error):
            raise
        return {"status": "failed", "reason": str(error)}
    in_one_go = all(
        domain["status"] == "trained" and domain["resumed_from_step"] is None
        for domain in result.data["domains"].values()
    )
    seconds = time.process_time() - started if in_one_go else None
    return {"status": "trained", "report": result.data, "seconds": seconds}


def main() -> None:
    specification, send = as_child()
    send(plain(run_one(specification, send)))


if __name__ == "__main__":
    main()
