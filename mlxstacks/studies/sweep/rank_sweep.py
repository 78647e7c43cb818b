"""`mlxstacks sweep`: a run of `train` for every cell, and what rank did to all of them.

The sweep lives in its work directory (study/engine.py) until every cell is done:

    cells/CELL.json    the cell's result, or that it was begun, and all that its weights depend on
    cells/CELL/        what `train` wrote, whole
    cells/CELL.log     what the cell's process printed

Each cell is a process of its own (worker.py). Killed at any moment, even with kill -9, the same
command resumes: finished cells are kept as they are, the one under way continues from its last
saved state.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.data import train_data_paths
from mlxstacks.errors import InputError
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import PLACES
from mlxstacks.files.side_files import clone_or_link
from mlxstacks.guard.run import GuardReport, guard
from mlxstacks.layers.adapted import AdaptedLayer, projection_dims
from mlxstacks.studies.sweep.cells import (
    Cell,
    CellResult,
    cells_of,
    read_result,
    read_results,
    train_settings,
    write_result,
)
from mlxstacks.studies.sweep.report import ABOUT, concluded, plan_table
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.train.setup import (
    TrainSetup,
    asked_of,
    guard_json,
    limit_is_assumed,
    set_up,
    train_change,
)
from mlxstacks.study.child_process import Message, run_cell
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import LOG, STATE, what_differs, work_path
from mlxstacks.training.settings import TrainSettings

CELLS = "cells"
WORKER = "mlxstacks.studies.sweep.worker"
_ADOPTING = ".adopting"
# Forward, and backward through the activations; the frozen base needs no gradient of its own.
_PASSES, _TRAINED_PASSES = 2, 3
BaseAt = Callable[[int | None], str]
"""Bits (None: as it is) -> model directory or hub id."""
Progress = Callable[..., None]


@dataclass(frozen=True)
class CellPlan:
    """A cell that can run. products: multiplications that the tokens of its batches take."""

    cell: Cell
    train: TrainSettings
    identity: dict[str, Any]
    parameters: int
    longest_row_tokens: int
    products: int
    base_in_float32: bool
    validates: bool
    notes: tuple[str, ...]


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
    return run_study(
        _Sweep(settings, base_at, progress, dry_run), dry_run=dry_run, progress=progress
    )


class _Sweep(Study):
    artifacts, provenance, plot_formats = (CELLS,), (f"{CELLS}/*.json",), FORMATS
    is_dealt = True
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
        self.base_at: BaseAt = base_at or (
            lambda bits: model if bits is None else model.replace("{bits}", str(bits))
        )
        self.setups: dict[tuple[Any, ...], TrainSetup] = {}
        self.guards: dict[str, GuardReport] = {}

    def planned(self) -> Result:
        self.plans: dict[Cell, CellPlan] = {}
        problems: dict[str, Cell] = {}  # each once, with the first cell that has it
        for cell in self.cells:
            try:
                self.plans[cell] = self._plan(cell)
            except InputError as error:
                problems.setdefault(str(error), cell)
        if problems:
            raise InputError("\n".join(f"{cell.name}: {error}" for error, cell in problems.items()))
        shown = self.settings.model_dump(mode="json", exclude=PLACES)
        notes = tuple(dict.fromkeys(note for p in self.plans.values() for note in p.notes))
        head = Result(**ABOUT, status="planned", settings=shown, notes=notes)
        if not self.dry_run:
            return head
        kept = self._checked(read_results(self.directory) if self.settings.resume else {})
        forecast = self._forecast(kept)
        cells = []
        for place, cell in enumerate(self.cells):
            self._tell(place, 0.0, cell, "guard")
            result, plan = kept.get(cell), self.plans[cell]
            report = self._guard(plan)
            cells.append({
                "name": cell.name, "rank": cell.rank, "seed": cell.seed,
                "status": result.status if result and self._is_final(result) else "planned",
                "parameters": plan.parameters, "predicted_buffers": report.buffers,
                "predicted_bytes": report.nbytes.total, "outcome": report.outcome,
                "verdict": report.verdict, **forecast(plan),
                "layers": cell.layers, "projections": cell.projections, "bits": cell.bits,
            })  # fmt: skip
        return head.model_copy(update={"data": {"cells": cells}, "blocks": (plan_table(cells),)})

    def _plan(self, cell: Cell, change: Mapping[str, Any] | None = None) -> CellPlan:
        """Cells that differ in their seed share what is loaded. change: see `train_settings`.

        Raises: InputError for a model, rank, layer, projection or data that cannot be used.
        """
        try:
            model = resolve_model(self.base_at(cell.bits))
        except InputError as error:
            raise InputError(f"model: {error}") from None
        train = train_settings(self.settings, cell, model, self.directory / cell.name, change or {})
        shape = (cell.rank, cell.point, json.dumps(change or {}))
        if shape not in self.setups:
            self.setups = {shape: set_up(train)}
        setup = self.setups[shape]
        batches = setup.optimizer.steps * train.grad_accumulation_steps
        tokens = sum(
            len(rows) * (width - 1) for rows, width in map(setup.plan.batch, range(batches))
        )
        return CellPlan(
            cell, train, setup.identity(train), setup.parameters, max(setup.plan.widths),
            tokens * _products_of_a_token(setup.model, cell.rank), setup.float32_base,
            setup.validation is not None, tuple(setup.notes),
        )  # fmt: skip

    def _forecast(self, kept: Mapping[Cell, CellResult]) -> Callable[[CellPlan], dict[str, Any]]:
        """(plan) -> seconds: as a product took in the cells that are trained; least_seconds: where
        none is, what the products of the run take at the speed of a square one here.
        """
        # The seconds of a resumed run are those of its last part.
        whole = [
            result
            for result in kept.values()
            if result.status == "trained" and not result.figures.get("resumed_from_step")
        ]
        seconds = sum(result.figures.get("seconds") or 0.0 for result in whole)
        products = sum(self.plans[result.cell].products for result in whole)
        if products:
            return lambda plan: {
                "seconds": round(seconds / products * plan.products, 1), "least_seconds": None
            }  # fmt: skip
        speed = multiplications_per_second()
        return lambda plan: {
            "seconds": None,
            "least_seconds": round(plan.products / speed, 1),
        }

    def steps(self, work: Path) -> Iterator[Step | list[Step]]:
        yield Step(CELLS, self._adopt_from_target)
        self._checked(read_results(self.directory))
        yield [
            Step(cell.name, partial(self._end_cell, cell, place))
            for place, cell in enumerate(self.cells)
        ]

    def _end_cell(self, cell: Cell, place: int, work: Path) -> None:
        """Run a cell that has no final result, and leave its files as the target keeps them."""
        path = self.directory / cell.name
        is_there = path.with_name(f"{cell.name}.json").exists()
        result = read_result(path.with_name(f"{cell.name}.json")) if is_there else None
        if result is None or not self._is_final(result):
            self._run_cell(cell, place, result)
        # the state of a run that has ended is three times its adapter
        (path / STATE).unlink(missing_ok=True)
        unfinished = path.with_name(f"{cell.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        if work_path(path).is_dir():
            _link_tree(work_path(path), unfinished)

    def conclude(self, work: Path) -> Result:
        results = self._checked(read_results(work / CELLS))
        return concluded(self.settings, [results[cell] for cell in self.cells])

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
                f"{self.directory.parent}: holds an interrupted sweep of other settings:{lines}\n"
                "give its settings (ranks, seeds and sets may be added), another --save-path, or "
                "--no-resume to remove it and start again"
            )
        return results

    def _differences(self, cell: Cell, result: CellResult) -> list[str]:
        plan = self.plans[cell]
        if result.guard.get("change"):
            plan = self._plan(cell, result.guard["change"])
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
            limits = {
                name: getattr(self.settings, name)
                for name in ("resource_limit", "working_set_bytes", "guard")
            }
            train = plan.train.model_copy(update=limits)
            self.guards[key] = guard(asked_of(
                train, str(train.model), plan.longest_row_tokens, validates=plan.validates,
                in_float32=plan.base_in_float32,
            ))  # fmt: skip
        return self.guards[key]

    def _run_cell(self, cell: Cell, place: int, before: CellResult | None) -> None:
        if before is not None and before.status == "trained":
            # a policy is missing, or the files are
            write_result(self.directory, self._train(self.plans[cell], before, place))
            return
        self._tell(place, 0.0, cell, "guard")
        plan, change = self.plans[cell], {}
        report = self._guard(plan)
        if report.outcome == "refused" and self.settings.guard == "reshape":
            change = train_change(report)
            if change:
                plan = self._plan(cell, change)
                report = self._guard(plan)
        result = CellResult(cell, "started", plan.identity, guard_json(report, change))
        may_run = self.settings.guard == "warn" or limit_is_assumed(report)
        if report.outcome == "refused" and not may_run:
            result = replace(result, status="refused", reason=report.verdict)
        write_result(self.directory, result)
        if result.status == "started":
            write_result(self.directory, self._train(plan, result, place))

    def _train(self, plan: CellPlan, result: CellResult, place: int) -> CellResult:
        """Run the cell's process to its end, however it ends."""
        cell, steps = plan.cell, 0

        def on_progress(message: Message) -> None:
            nonlocal steps
            steps = message["done"]
            self._tell(place, steps / message["total"], cell, message["what"])

        specification = {
            "train": plan.train.model_dump(mode="json"),
            "policies": list(self.settings.policies),
        }
        log = self.directory / f"{cell.name}.log"
        ended = run_cell(WORKER, specification, log, on_progress)
        if ended["status"] == "trained":
            return replace(
                result, status="trained", figures=ended["figures"], survival=ended["survival"]
            )
        # Steps at which a run that did not end saved its state: its usable checkpoints.
        path = work_path(self.directory / cell.name) / LOG
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        records = [json.loads(line) for line in lines if '"saved"' in line]
        saved = sorted({record["step"] for record in records if record["event"] == "saved"})
        return replace(
            result, status=ended["status"], reason=ended["reason"],
            figures={"step": steps, "saved_steps": saved},
        )  # fmt: skip

    def _tell(self, place: int, share: float, cell: Cell, what: str) -> None:
        if self.progress:
            where = f"{place + 1}/{len(self.cells)} rank {cell.rank}, seed {cell.seed}"
            costs = [self.plans[cell].products for cell in self.cells]
            done = sum(costs[:place]) + share * costs[place]
            self.progress(done, sum(costs), f"{where} {what}".strip())


def _link_tree(source: Path, destination: Path) -> None:
    """Every file again under another directory, without its bytes."""
    shutil.copytree(
        source, destination, copy_function=lambda old, new: clone_or_link(Path(old), Path(new))
    )


def _products_of_a_token(model: nn.Module, rank: int) -> int:
    """Of linear and expert projections and of their LoRAs, forward and backward; experts by their
    share.
    """
    text = getattr(getattr(model, "language_model", model), "args", None)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    total = 0
    for _, module in model.named_modules():
        adapted = isinstance(module, AdaptedLayer)
        dims = module.dims if adapted else projection_dims(module)
        if dims is not None:
            copies = chosen if dims.base_experts else 1
            numbers = _PASSES * dims.input_dims * dims.output_dims
            if adapted:
                numbers = _TRAINED_PASSES * rank * (dims.input_dims + dims.output_dims)
            total += copies * numbers
    return total


def multiplications_per_second(size: int = 1024) -> float:
    """Of a square float32 product on the default device: the best of three."""
    a = mx.ones((size, size))
    mx.eval(a)
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(a @ a)
        best = max(best, size**3 / (time.perf_counter() - start))
    return best
