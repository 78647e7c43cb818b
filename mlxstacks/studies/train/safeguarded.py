"""What trainings on pairs and on rewards share: safeguards, the stack of a store that they may
train, and how both are told.
"""

import math
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from mlxstacks.command_line import command_line
from mlxstacks.processes import gathered
from mlxstacks.studies.train.report import TrainReport
from mlxstacks.studies.train.run import TrainRun
from mlxstacks.study.document import Columns, Table, counted
from mlxstacks.study.result import Result
from mlxstacks.training.loop import Record, TrainingState, trainable_weights
from mlxstacks.training.reference import StartingModel
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


def with_store(result: Result, report: TrainReport) -> Result:
    """The result, with what becomes of the store whose stack was trained; as it is without one."""
    if (plan := report.plan.get("store")) is None:
        return result
    store = report.figures.get("store", plan)
    path, stack, losses = store["store_path"], store["stack"], store.get("losses", {})
    unchanged, marked = (", ".join(store[key]) for key in ("unchanged", "marked"))
    if report.status == "planned":
        verdict = f"Would train {stack} on {', '.join(store['trains_on']) or 'the base'}, and "
        verdict += f"replace it in {path}."
        verdict += f" Must not change: the prefix losses of {unchanged}." if unchanged else ""
        verdict += f" Would be marked: {marked}, trained on top of it." if marked else ""
        return result.model_copy(update={"verdict": verdict})
    if not losses:
        verdict = f"{result.verdict} {path} is as it was: {stack} was not replaced.".replace(
            "weights were written", "weights stay"
        )
        return result.model_copy(update={"verdict": verdict, "next_steps": {}})
    verdict = f"{result.verdict} Replaced in {path}: {stack}"
    verdict += f"; prefix losses unchanged: {unchanged}" if unchanged else ""
    verdict += f"; marked, since trained on top of it: {marked}." if marked else "."
    columns: Columns = {
        "domain": "text", "loss before": ("number", 4), "loss after": ("number", 4), "": "text"
    }  # fmt: skip
    words = {store["domain"]: "trained", **dict.fromkeys(store["marked"], "marked")}
    rows = [(name, *loss.values(), words.get(name, "")) for name, loss in losses.items()]
    caption = (
        "Validation loss with the stacks up to each domain's own, or with those that the trained "
        "one is on, nats a token."
    )
    table = Table.of("store", "Domains of the store", columns, rows, caption=caption)
    chat = command_line("mlxstacks chat", path, model=report.settings["model"], ungated=True)
    steps = {"Try it": chat, "Undo it": command_line("mlxstacks stacks undo", path)}
    blocks = (*result.blocks, table)
    return result.model_copy(update={"verdict": verdict, "next_steps": steps, "blocks": blocks})


class SafeguardedRun(TrainRun):
    """A training that ends where it damages the model.

    watched: the loss among a validation's figures that may not rise far, and of which answers; nor
    may that of a stack's domain.
    """

    command = "align"
    watched: ClassVar[tuple[str, str]]
    measured: Record
    stored: dict[str, Any] | None = None

    @property
    def options(self) -> AlignSettings:
        assert isinstance(self.settings, AlignSettings)
        return self.settings

    def _load(self) -> None:
        super()._load()
        if self.setup.active is not None:
            self.setup.active.begin(self._say)
            mx.reset_peak_memory()
        compares = self.options.method != "orpo" and self.options.strength > 0
        weights = trainable_weights(self.model)
        self.start = StartingModel(self.model, self.head, weights) if compares else None

    def _hooks(self, state: TrainingState) -> dict[str, Any]:
        self.start_losses = state.validation[0] if state.validation else None
        self.safeguards = Safeguards(self.options.safeguards, self.model, state.safeguards)
        return {"safeguards": self.safeguards}

    def _validated(self, measured: Record, loss: float) -> float:
        """Keep the figures of a validation; its loss, or infinity where a watched one rose too
        far: such weights must not be the best ones.
        """
        if (active := self.setup.active) is not None:
            is_start = self.start_losses is None
            measured["domain_loss"] = active.loss_before if is_start else active.loss()
        # The first process's: hosts may round differently, and all have to stop together.
        figures: list[Any] = [measured, loss]
        self.measured, loss = gathered(figures, self.group)[0]
        self.start_losses = self.start_losses or self.measured
        return math.inf if self._risen() else loss

    def _risen(self) -> tuple[str, str] | None:
        """The watched loss that rose too far."""
        most, start = self.options.safeguards.max_nll_rise, self.start_losses or {}
        for key, answers in (self.watched, ("domain_loss", "domain's")):
            now = self.measured.get(key)
            if most is not None and now is not None and now > (start[key] or 0.0) + most:
                return key, answers
        return None

    def _on_validation(self, state: TrainingState, record: Record) -> None:
        record |= self.measured
        if risen := self._risen():
            key, answers = risen
            state.stopped = (
                f"the loss of the {answers} answers rose by more than "
                f"{self.options.safeguards.max_nll_rise:g} nats per token, to "
                f"{self.measured[key]:.3f}"
            )
        super()._on_validation(state, record)

    def _write_adapter(self, directory: Path, tensors: dict[str, mx.array]) -> None:
        if self.setup.active is None:
            super()._write_adapter(directory, tensors)

    def _ended(self, state: TrainingState) -> None:
        active = self.setup.active
        if active is None or state.best is None or state.best.step == 0 or not self.is_main:
            return
        # a manifest names no directory
        rewards = [r if "=" in r else Path(r).name for r in self.options.reward]
        how = {
            "settings": {**self.identity, "reward": rewards}, "steps": state.step,
            "best_step": state.best.step, "stopped": state.stopped, "safeguards": self._counts(),
        }  # fmt: skip
        self.stored = active.finish(how, self.options.safeguards.max_nll_rise, self._say)

    def _counts(self) -> dict[str, int]:
        return {key: self.safeguards.counts[key] for key in ("skipped", "restored", "capped")}

    def _figures(self) -> dict[str, Any]:
        return {
            "safeguards": self._counts(),
            **({} if self.stored is None else {"store": self.stored}),
        }
