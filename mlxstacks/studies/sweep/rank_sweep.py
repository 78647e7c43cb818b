"""`mlxstacks sweep`: a run of `train` for every cell, and what rank did to all of them.

The sweep lives in its work directory (study/engine.py) until every cell is done:

    cells/CELL.json    the cell's result, or that it was begun, and all that its weights depend on
    cells/CELL/        what `train` wrote, whole
    cells/CELL.log     what the cell's process printed

Each cell is a process of its own. Killed at any moment, even with kill -9, the same command
resumes: finished cells are kept as they are, the one under way continues from its last saved state.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from mlxstacks.data import train_data_paths
from mlxstacks.errors import InputError
from mlxstacks.files.side_files import clone_or_link
from mlxstacks.guard.run import GuardReport
from mlxstacks.studies.sweep.cells import (
    Cell,
    CellResult,
    cells_of,
    read_results,
    write_result,
)
from mlxstacks.studies.sweep.planning import BaseAt, CellPlan, Forecast, Planner
from mlxstacks.studies.sweep.report import ABOUT, concluded, plan_table
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.train.setup import guard_json, limit_is_assumed, train_change
from mlxstacks.study.buffer_counter import preload
from mlxstacks.study.child_process import Message, how_it_ended, run_child
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import LOG, what_differs, work_path

CELLS = "cells"
WORKER = "mlxstacks.studies.sweep.cell_worker"
_ADOPTING = ".adopting"
Progress = Callable[..., None]


def run(
    settings: SweepSettings,
    *,
    base_at: BaseAt | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Run every cell that has no result yet, then write all of them to `settings.save_path`.

    base_at: where the base of a width is; by default `{bits}` in the model's name.
    A cell that is refused, fails or crashes is a result, and the sweep goes on.

    Raises:
        InputError: anything that some cell cannot use, found before the first one runs; or the
            work directory holds cells of another sweep.
        RuntimeError: a cell's process ended in a way that is a mistake of ours.
    """
    if settings.model is None or settings.data is None or settings.save_path is None:
        raise InputError("sweep needs model, data and save_path")
    return run_study(_Sweep(settings, base_at, progress, dry_run), dry_run=dry_run)


class _Sweep(Study):
    artifacts, provenance, plot_formats = (CELLS,), (f"{CELLS}/*.json",), FORMATS
    settings: SweepSettings

    def __init__(
        self,
        settings: SweepSettings,
        base_at: BaseAt | None,
        progress: Progress | None,
        dry_run: bool,
    ) -> None:
        self.settings, self.progress, self.dry_run = settings, progress, dry_run
        self.inputs = (settings.model, *train_data_paths(settings.data))
        self.cells = cells_of(settings)
        self.directory = work_path(self.work_target) / CELLS
        model = str(settings.model)
        self.planner = Planner(
            settings,
            base_at or (lambda bits: model if bits is None else model.replace("{bits}", str(bits))),
            self.directory,
        )
        self.guards: dict[str, GuardReport] = {}

    def planned(self) -> Result:
        preload(self.settings.counting_library)
        self.plans = self.planner.plan_all(self.cells)
        shown = self.settings.model_dump(mode="json", exclude={"force", "save_path", "resume"})
        notes = tuple(dict.fromkeys(note for p in self.plans.values() for note in p.notes))
        head = Result(**ABOUT, status="planned", settings=shown, notes=notes)
        if not self.dry_run:
            return head
        kept = self._checked(read_results(self.directory) if self.settings.resume else {})
        forecast = Forecast([r for r in kept.values() if r.status == "trained"], self.plans)
        cells = []
        for place, cell in enumerate(self.cells):
            self._tell(place, 0.0, cell, "guard")
            result, plan = kept.get(cell), self.plans[cell]
            status = result.status if result and self._is_final(result) else "planned"
            cells.append(forecast.cell(plan, self._guard(plan), status))
        return head.model_copy(update={"data": {"cells": cells}, "blocks": (plan_table(cells),)})

    def steps(self, work: Path) -> Iterator[Step]:
        yield Step(CELLS, self._adopt_from_target)
        kept = self._checked(read_results(self.directory))
        for place, cell in enumerate(self.cells):
            result = kept.get(cell)
            if result is None or not self._is_final(result):
                yield Step(cell.name, partial(self._run_cell, cell, place, result))
        yield Step("tidy", self._tidy)

    def conclude(self, work: Path) -> Result:
        results = read_results(work / CELLS)
        return concluded(self.settings, [results[cell] for cell in self.cells])

    def _tidy(self, work: Path) -> None:
        """No state of a run that has ended, which is three times its adapter; what a run that did
        not end has left, as NAME.unfinished.
        """
        for cell in self.cells:
            path = self.directory / cell.name
            (path / "checkpoint.safetensors").unlink(missing_ok=True)
            unfinished = path.with_name(f"{cell.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            if work_path(path).is_dir():
                _link_tree(work_path(path), unfinished)

    # --- what earlier runs left -------------------------------------------------------------------

    def _adopt_from_target(self, work: Path) -> None:
        """Cells of an older result with these settings, which is about to be replaced."""
        self.directory.mkdir(exist_ok=True)
        for path in self.directory.iterdir():
            # A run notes that it began before its directory appears: this is half an adoption.
            orphan = path.is_dir() and not path.with_name(f"{path.name}.json").exists()
            if path.name.endswith(_ADOPTING) or (orphan and not path.name.startswith(".")):
                shutil.rmtree(path)
        if not (self.settings.resume and self.settings.force):
            return
        old = self.work_target / CELLS
        for cell, result in (read_results(old) if old.is_dir() else {}).items():
            adopted = self.directory / cell.name
            same = cell in self.plans and not self._differences(cell, result)
            if same and result.status == "trained" and not adopted.exists():
                staged = self.directory / f".{cell.name}{_ADOPTING}"
                _link_tree(old / cell.name, staged)
                staged.rename(adopted)
                write_result(self.directory, result)

    def _checked(self, results: dict[Cell, CellResult]) -> dict[Cell, CellResult]:
        """Raises: InputError when a cell has other settings, or is none of this sweep."""
        problems = []
        for cell, result in results.items():
            if cell not in self.plans:
                problems.append(f"{cell.name} is none of its cells")
                continue
            differing = self._differences(cell, result)
            problems += [f"{cell.name} differs in {line}" for line in differing]
        if problems:
            lines = "".join(f"\n  {line}" for line in problems)
            raise InputError(
                f"{self.directory.parent}: holds an interrupted sweep that this one does not go on "
                f"with:{lines}\ngive its settings (ranks, seeds and sets may be added), another "
                "--save-path, or --no-resume to remove it and start anew"
            )
        return results

    def _differences(self, cell: Cell, result: CellResult) -> list[str]:
        plan = self.plans[cell]
        if result.guard.get("change"):
            plan = self.planner.plan(cell, result.guard["change"])
        return what_differs(result.identity, json.loads(json.dumps(plan.identity)))

    def _is_final(self, result: CellResult) -> bool:
        """Whether a result stands. What was refused is asked again: limits may be other ones."""
        if result.status == "trained":  # and not removed by hand since
            is_there = (self.directory / result.cell.name).is_dir()
            return is_there and set(self.settings.policies) <= set(result.survival)
        return result.status in ("failed", "crashed") and not self.settings.retry

    # --- one cell ---------------------------------------------------------------------------------

    def _guard(self, plan: CellPlan) -> GuardReport:
        """The guard's word on a cell; seeds share it."""
        seedless = replace(plan.cell, seed=0).name
        key = json.dumps([seedless, plan.train.grad_checkpoint, plan.longest_row_tokens])
        if key not in self.guards:
            self.guards[key] = self.planner.verdict(plan)
        return self.guards[key]

    def _run_cell(self, cell: Cell, place: int, before: CellResult | None, work: Path) -> None:
        write_result(self.directory, self._result_of(cell, place, before))

    def _result_of(self, cell: Cell, place: int, before: CellResult | None) -> CellResult:
        if before is not None and before.status == "trained":
            # a policy is missing, or the files are
            return self._train(self.plans[cell], before, place)
        self._tell(place, 0.0, cell, "guard")
        plan, change = self.plans[cell], {}
        report = self._guard(plan)
        if report.outcome == "refused" and self.settings.guard == "reshape":
            change = train_change(report)
            if change:
                plan = self.planner.plan(cell, change)
                report = self._guard(plan)
        result = CellResult(cell, "started", plan.identity, guard_json(report, change))
        may_run = self.settings.guard == "warn" or limit_is_assumed(report)
        if report.outcome == "refused" and not may_run:
            return replace(result, status="refused", reason=report.verdict)
        write_result(self.directory, result)
        return self._train(plan, result, place)

    def _train(self, plan: CellPlan, result: CellResult, place: int) -> CellResult:
        """Run the cell's process to its end, however it ends."""
        cell, last, steps = plan.cell, {}, 0

        def on_message(message: Message) -> None:
            nonlocal last, steps
            if "status" in message:
                last = message
            else:
                steps = message["done"]
                share = message["done"] / message["total"]
                self._tell(place, share, cell, message["what"])

        specification = {
            "train": plan.train.model_dump(mode="json"),
            "policies": list(self.settings.policies),
        }
        log = self.directory / f"{cell.name}.log"
        library = self.settings.counting_library
        code = run_child(WORKER, specification, log, on_message, library)
        if last.get("status") == "trained":
            # A count is of the process that trained, which may have been an earlier one.
            counted = last["figures"]["measured_buffers"] or result.figures.get("measured_buffers")
            figures = last["figures"] | {"measured_buffers": counted}
            return replace(result, status="trained", figures=figures, survival=last["survival"])
        if last.get("status") == "wrong":
            raise InputError(f"{cell.name}: {last['reason']}")
        if code > 0 or (code == 0 and not last):
            raise RuntimeError(f"{cell.name}: {how_it_ended(code, log)} (all of it in {log})")
        figures = {"step": steps, "saved_steps": self._saved_steps(cell)}
        status = last.get("status", "crashed")
        reason = last.get("reason") or how_it_ended(code, log)
        return replace(result, status=status, reason=reason, figures=figures)

    def _saved_steps(self, cell: Cell) -> list[int]:
        """Steps at which a run that did not end saved its state: its usable checkpoints."""
        path = work_path(self.directory / cell.name) / LOG
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        records = [json.loads(line) for line in lines if '"saved"' in line]
        return sorted({record["step"] for record in records if record["event"] == "saved"})

    def _tell(self, place: int, share: float, cell: Cell, what: str) -> None:
        if self.progress:
            where = f"{place + 1}/{len(self.cells)} rank {cell.rank}, seed {cell.seed}"
            self.progress(place + share, len(self.cells), f"{where} {what}".strip())


def _link_tree(source: Path, destination: Path) -> None:
    """Every file again under another directory, without its bytes."""
    shutil.copytree(
        source, destination, copy_function=lambda old, new: clone_or_link(Path(old), Path(new))
    )
