"""Before a cell runs: does it fit model and data, does the guard pass it, how long will it take?"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.errors import InputError
from mlxstacks.files.hub import resolve_model
from mlxstacks.guard.run import GuardReport
from mlxstacks.layers.adapted import AdaptedLayer, projection_dims
from mlxstacks.studies.sweep.cells import Cell, CellResult, train_settings
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.train.setup import TrainSetup, set_up, verdict
from mlxstacks.training.settings import TrainSettings

# Forward, and backward through the activations; the frozen base needs no gradient of its own.
_PASSES = 2
BaseAt = Callable[[int | None], str]
"""Bits (None: as it is) -> model directory or hub id."""


@dataclass(frozen=True)
class CellPlan:
    """A cell that can run. tokens: in all its batches; active_weights: numbers of the base that a
    token is multiplied with.
    """

    cell: Cell
    train: TrainSettings
    identity: dict[str, Any]
    parameters: int
    longest_row_tokens: int
    tokens: int
    active_weights: int
    base_in_float32: bool
    validates: bool
    notes: tuple[str, ...]


class Planner:
    """Plans cells of one sweep; those that differ in their seed share what is loaded.

    base_at: where the base of each width is. directory: where cells are written.
    """

    def __init__(self, settings: SweepSettings, base_at: BaseAt, directory: Path) -> None:
        self.settings, self.base_at, self.directory = settings, base_at, directory
        self._setups: dict[tuple[Any, ...], TrainSetup] = {}

    def plan(self, cell: Cell, change: Mapping[str, Any] | None = None) -> CellPlan:
        """Raises: InputError for a model, rank, layer, projection or data that cannot be used."""
        train = self._settings_of(cell, change or {})
        shape = (cell.rank, cell.point, json.dumps(change or {}))
        if shape not in self._setups:
            self._setups = {shape: set_up(train)}
        setup = self._setups[shape]
        batches = setup.optimizer.steps * train.grad_accumulation_steps
        tokens = sum(
            len(rows) * (width - 1) for rows, width in map(setup.plan.batch, range(batches))
        )
        return CellPlan(
            cell, train, setup.identity(train), setup.parameters, max(setup.plan.widths), tokens,
            _active_weights(setup.model), setup.float32_base, setup.validation is not None,
            tuple(setup.notes),
        )  # fmt: skip

    def plan_all(self, cells: list[Cell]) -> dict[Cell, CellPlan]:
        """Raises: InputError listing what is wrong with which cells, each problem once."""
        plans: dict[Cell, CellPlan] = {}
        problems: dict[str, Cell] = {}
        for cell in cells:
            try:
                plans[cell] = self.plan(cell)
            except InputError as error:
                problems.setdefault(str(error), cell)
        if problems:
            lines = [f"{cell.name}: {error}" for error, cell in problems.items()]
            raise InputError("\n".join(lines))
        return plans

    def _settings_of(self, cell: Cell, change: Mapping[str, Any]) -> TrainSettings:
        try:
            model = resolve_model(self.base_at(cell.bits))
        except InputError as error:
            raise InputError(f"model: {error}") from None
        where = self.directory / cell.name
        return train_settings(self.settings, cell, model, where, change)

    def verdict(self, plan: CellPlan) -> GuardReport:
        """What the guard says of a run: at the longest row of its data."""
        limits = {
            "resource_limit": self.settings.resource_limit,
            "working_set_bytes": self.settings.working_set_bytes,
            "guard": self.settings.guard,
        }
        train = plan.train.model_copy(update=limits)
        return verdict(
            train, plan.longest_row_tokens, plan.base_in_float32, validates=plan.validates
        )


def _active_weights(model: nn.Module) -> int:
    """Numbers of linear and expert projections that one token meets; experts by their share."""
    text = getattr(getattr(model, "language_model", model), "args", None)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    total = 0
    for _, module in model.named_modules():
        if isinstance(module, AdaptedLayer):
            continue
        dims = projection_dims(module)
        if dims is not None:
            copies = chosen if dims.base_experts else 1
            total += copies * dims.input_dims * dims.output_dims
    return total


class Forecast:
    """Time from what a token took in the cells that are trained; where none is, the least that the
    products of a run take at the speed of a square one here.
    """

    def __init__(self, trained: Sequence[CellResult], plans: Mapping[Cell, CellPlan]) -> None:
        # The seconds of a resumed run are those of its last part.
        whole = [result for result in trained if not result.figures.get("resumed_from_step")]
        seconds = sum(result.figures.get("seconds") or 0.0 for result in whole)
        tokens = sum(plans[result.cell].tokens for result in whole)
        self.seconds_per_token = seconds / tokens if tokens else None
        self.speed = multiplications_per_second() if self.seconds_per_token is None else None

    def cell(self, plan: CellPlan, report: GuardReport, status: str) -> dict[str, Any]:
        """A line of --dry-run. status: "planned", or that of a result that is there already.

        seconds: expected, after the finished cells of this sweep; least_seconds: what its
        arithmetic takes at the speed of this machine's matrix product, where nothing has run yet.
        """
        cell = plan.cell
        expected = least = None
        if self.seconds_per_token is not None:
            expected = round(self.seconds_per_token * plan.tokens, 1)
        if self.speed is not None:
            least = round(_PASSES * plan.tokens * plan.active_weights / self.speed, 1)
        return {
            "name": cell.name, "rank": cell.rank, "seed": cell.seed, "status": status,
            "parameters": plan.parameters, "predicted_buffers": report.buffers,
            "predicted_bytes": report.nbytes.total, "outcome": report.outcome,
            "verdict": report.verdict, "seconds": expected, "least_seconds": least,
            "layers": cell.layers, "projections": cell.projections, "bits": cell.bits,
        }  # fmt: skip


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
