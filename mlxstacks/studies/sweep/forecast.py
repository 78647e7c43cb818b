"""The lines of `sweep --dry-run`: what each cell would need, and how long it would take."""

import time
from collections.abc import Mapping, Sequence

import mlx.core as mx

from mlxstacks.guard.report import GuardReport
from mlxstacks.studies.sweep.cells import Cell, CellResult
from mlxstacks.studies.sweep.planning import CellPlan
from mlxstacks.studies.sweep.report import PlannedCell

# Forward, and backward through the activations; the frozen base needs no gradient of its own.
_PASSES = 2


class Forecast:
    """Time from what a token took in the cells that are trained; where none is, the least that the
    products of a run take at the speed of a square one here.
    """

    def __init__(self, trained: Sequence[CellResult], plans: Mapping[Cell, CellPlan]) -> None:
        # The seconds of a resumed run are those of its last part.
        whole = [result for result in trained if not result.figure("resumed_from_step")]
        seconds = sum(result.figure("seconds") or 0.0 for result in whole)
        tokens = sum(plans[result.cell].tokens for result in whole)
        self.seconds_per_token = seconds / tokens if tokens else None
        self.speed = multiplications_per_second() if self.seconds_per_token is None else None

    def cell(self, plan: CellPlan, report: GuardReport, status: str) -> PlannedCell:
        cell = plan.cell
        expected = least = None
        if self.seconds_per_token is not None:
            expected = round(self.seconds_per_token * plan.tokens, 1)
        if self.speed is not None:
            least = round(_PASSES * plan.tokens * plan.active_weights / self.speed, 1)
        return PlannedCell(
            cell.name, cell.rank, cell.seed, cell.point, status, plan.parameters, report.buffers,
            report.nbytes.total, report.outcome, report.verdict, expected, least,
        )  # fmt: skip


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
