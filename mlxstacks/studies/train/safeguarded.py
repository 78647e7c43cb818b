"""What trainings on pairs and on rewards share: safeguards, and how they are told."""

import math
from typing import Any, ClassVar

from mlxstacks.studies.train.report import TrainReport
from mlxstacks.studies.train.run import TrainRun
from mlxstacks.study.document import Table, counted
from mlxstacks.training.loop import Record, TrainingState
from mlxstacks.training.safeguards import Safeguards
from mlxstacks.training.settings import AlignSettings


def safeguards_table(report: TrainReport) -> Table:
    counts = report.figures["safeguards"]
    facts = {
        "skipped steps": f"{counts['skipped']:,}",
        "best weights restored": counted(counts["restored"], "time"),
        "deltas scaled down": counted(counts["capped"], "time"),
    }
    return Table.of_facts("safeguards", "Safeguards", facts)


class SafeguardedRun(TrainRun):
    """A training in one process, which ends where it damages the model.

    watched: the loss among a validation's figures that may not rise far, and of which answers.
    """

    command = "align"
    in_one_process = True
    watched: ClassVar[tuple[str, str]]
    measured: Record

    @property
    def options(self) -> AlignSettings:
        assert isinstance(self.settings, AlignSettings)
        return self.settings

    def _hooks(self, state: TrainingState) -> dict[str, Any]:
        self.start_loss = state.validation[0][self.watched[0]] if state.validation else None
        self.safeguards = Safeguards(self.options.safeguards, self.model, state.safeguards)
        return {"safeguards": self.safeguards}

    def _validated(self, measured: Record, loss: float) -> float:
        """Keep the figures of a validation; its loss, or infinity where the watched one rose too
        far: such weights must not be the best ones.
        """
        self.measured = measured
        if self.start_loss is None:
            self.start_loss = measured[self.watched[0]]
        return math.inf if self._rose_too_far() else loss

    def _rose_too_far(self) -> bool:
        most, now = self.options.safeguards.max_nll_rise, self.measured[self.watched[0]]
        return most is not None and now is not None and now > (self.start_loss or 0.0) + most

    def _on_validation(self, state: TrainingState, record: Record) -> None:
        record |= self.measured
        if self._rose_too_far():
            key, answers = self.watched
            state.stopped = (
                f"the loss of the {answers} answers rose by more than "
                f"{self.options.safeguards.max_nll_rise:g} nats per token, to "
                f"{self.measured[key]:.3f}"
            )
        super()._on_validation(state, record)

    def _figures(self) -> dict[str, Any]:
        counts = self.safeguards.counts
        return {"safeguards": {key: counts[key] for key in ("skipped", "restored", "capped")}}
