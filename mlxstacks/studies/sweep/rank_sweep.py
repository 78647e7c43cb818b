"""`mlxstacks sweep`: a run of `train` for every cell, and what rank did to all of them.

The sweep lives in `.NAME.work` beside its target until every cell is done:

    cells/CELL.json    the cell's result, or that it was begun, and all that its weights depend on
    cells/CELL/        what `train` wrote, whole
    cells/CELL.log     what the cell's process printed

Each cell is a process of its own. Killed at any moment, even with kill -9, the same command goes
on: finished cells are kept as they are, the one under way continues from its last saved state.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlxstacks.data import train_data_paths
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, clone_or_link, staged_directory, write_json
from mlxstacks.guard.report import GuardReport
from mlxstacks.studies.guarded import limit_is_assumed, train_change
from mlxstacks.studies.sweep.cells import (
    Cell,
    CellResult,
    cells_of,
    read_results,
    write_result,
)
from mlxstacks.studies.sweep.forecast import Forecast
from mlxstacks.studies.sweep.planning import BaseAt, CellPlan, Planner
from mlxstacks.studies.sweep.plots import write_plots
from mlxstacks.studies.sweep.report import SweepReport, report_of, shown_settings
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.train.report import guard_json
from mlxstacks.study.buffer_counter import preload
from mlxstacks.study.child_process import Message, how_it_ended, run_child
from mlxstacks.study.run_directory import LOG, RunDirectory, what_differs, work_path

REPORT, CELLS = "sweep_report.json", "cells"
WORKER = "mlxstacks.studies.sweep.cell_worker"
_ADOPTING = ".adopting"
Progress = Callable[..., None]


def run(
    settings: SweepSettings,
    *,
    base_at: BaseAt | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SweepReport:
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
    target = user_path(settings.save_path)
    inputs = [user_path(path) for path in (settings.model, *train_data_paths(settings.data))]
    check_target(target, force=settings.force, inputs=inputs)
    preload(settings.counting_library)
    return _Sweep(settings, target, base_at or _by_name(settings.model), progress).run(dry_run)


def _by_name(model: str) -> BaseAt:
    return lambda bits: model if bits is None else model.replace("{bits}", str(bits))


class _Sweep:
    def __init__(
        self, settings: SweepSettings, target: Path, base_at: BaseAt, progress: Progress | None
    ) -> None:
        self.settings, self.target, self.progress = settings, target, progress
        self.cells = cells_of(settings)
        self.directory = work_path(target) / CELLS
        self.planner = Planner(settings, base_at, self.directory)
        self.plans = self.planner.plan_all(self.cells)
        self.guards: dict[str, GuardReport] = {}
        self.started = time.monotonic()

    def run(self, dry_run: bool) -> SweepReport:
        if dry_run:
            return self._planned()
        with_lock = RunDirectory(self.target, {"kind": "sweep"}, resume=self.settings.resume)
        try:
            self.directory.mkdir(exist_ok=True)
            self._adopt_from_target()
            kept = self._checked(read_results(self.directory))
            results = []
            for place, cell in enumerate(self.cells):
                result = kept.get(cell)
                if result is None or not self._is_final(result):
                    result = self._run_cell(cell, place, result)
                    write_result(self.directory, result)
                results.append(result)
            report = self._write(results)
            with_lock.remove()
        finally:
            with_lock.close()
        return report

    # --- what is there already --------------------------------------------------------------------

    def _adopt_from_target(self) -> None:
        """Cells of an older result with these settings, which is about to be replaced."""
        for path in self.directory.iterdir():
            # A run notes that it began before its directory appears: this is half an adoption.
            orphan = path.is_dir() and not path.with_name(f"{path.name}.json").exists()
            if path.name.endswith(_ADOPTING) or (orphan and not path.name.startswith(".")):
                shutil.rmtree(path)
        if not (self.settings.resume and self.settings.force):
            return
        old = self.target / CELLS
        for cell, result in (read_results(old) if old.is_dir() else {}).items():
            there = self.directory / cell.name
            same = cell in self.plans and not self._differences(cell, result)
            if same and result.status == "trained" and not there.exists():
                staged = self.directory / f".{cell.name}{_ADOPTING}"
                _link_tree(old / cell.name, staged)
                staged.rename(there)
                write_result(self.directory, result)

    def _checked(self, found: dict[Cell, CellResult]) -> dict[Cell, CellResult]:
        """Raises: InputError when a cell has other settings, or is none of this sweep."""
        problems = []
        for cell, result in found.items():
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
        return found

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

    def _run_cell(self, cell: Cell, place: int, before: CellResult | None) -> CellResult:
        if (
            before is not None and before.status == "trained"
        ):  # a policy is missing, or the files are
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
            counted = last["figures"]["measured_buffers"] or result.figure("measured_buffers")
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
        if not path.is_file():
            return []
        records = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if '"saved"' in line:
                records.append(json.loads(line))
        return sorted({record["step"] for record in records if record["event"] == "saved"})

    def _tell(self, place: int, share: float, cell: Cell, what: str) -> None:
        if self.progress:
            where = f"{place + 1}/{len(self.cells)} rank {cell.rank}, seed {cell.seed}"
            self.progress(place + share, len(self.cells), f"{where} {what}".strip())

    # --- the end ----------------------------------------------------------------------------------

    def _write(self, results: list[CellResult]) -> SweepReport:
        seconds = time.monotonic() - self.started
        report = report_of(self.settings, str(self.target), results, self._notes(results), seconds)
        with staged_directory(self.target, force=self.settings.force) as directory:
            (directory / CELLS).mkdir()
            for result in results:
                name = result.cell.name
                write_result(directory / CELLS, result)
                for source in (self.directory / name, work_path(self.directory / name)):
                    if source.is_dir():
                        unfinished = f"{name}.unfinished" if source.name.startswith(".") else name
                        _link_tree(source, directory / CELLS / unfinished)
            plots, note = write_plots(directory, report)
            report = replace(report, plots=plots, notes=[*report.notes, *note])
            write_json(directory / REPORT, report.as_json())
        return report

    def _notes(self, results: list[CellResult]) -> list[str]:
        notes = [note for plan in self.plans.values() for note in plan.notes]
        notes += [_how_it_went(result) for result in results if result.reason]
        notes += [
            f"{r.cell.name}: the guard warns: {r.guard['verdict']}."
            for r in results
            if r.guard["outcome"] != "fits" and r.status != "refused"
        ]
        notes += [
            f"{r.cell.name}: reshaped by the guard, {r.guard['change']}; not like for like."
            for r in results
            if r.guard.get("change")
        ]
        resumed = [r.cell.name for r in results if r.figure("resumed_from_step")]
        if resumed:
            notes.append(f"Seconds are of the last part of a resumed run: {', '.join(resumed)}.")
        return list(dict.fromkeys(notes))

    def _planned(self) -> SweepReport:
        kept = read_results(self.directory) if self.settings.resume else {}
        kept = self._checked(kept)
        whole = [r for r in kept.values() if r.status == "trained"]
        forecast = Forecast(whole, self.plans)
        planned = []
        for place, cell in enumerate(self.cells):
            self._tell(place, 0.0, cell, "guard")
            result, plan = kept.get(cell), self.plans[cell]
            status = result.status if result and self._is_final(result) else "planned"
            planned.append(forecast.cell(plan, self._guard(plan), status))
        notes = list(dict.fromkeys(note for plan in self.plans.values() for note in plan.notes))
        return SweepReport(
            "planned", str(self.target), shown_settings(self.settings), planned, notes=notes
        )


def _how_it_went(result: CellResult) -> str:
    """A cell without an adapter: why, how far it came, which checkpoints it left."""
    words = f"{result.cell.name}: {result.status}: {result.reason}"
    if result.status == "refused":
        return words
    saved = ", ".join(map(str, result.figures.get("saved_steps", []))) or "none"
    return f"{words} (after step {result.figures.get('step', 0)}; states saved at: {saved})"


def _link_tree(source: Path, destination: Path) -> None:
    """Every file again under another directory, without its bytes; but no state of a run that has
    ended, which is three times its adapter.
    """
    finished = not source.name.startswith(".")
    for path in sorted(source.rglob("*")):
        there = destination / path.relative_to(source)
        if path.is_file() and not (finished and path.name == "checkpoint.safetensors"):
            there.parent.mkdir(parents=True, exist_ok=True)
            clone_or_link(path, there)
