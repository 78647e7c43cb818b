"""`mlxstacks align`: a LoRA, or a stack of a store, trained to prefer chosen answers to rejected
ones, by DPO or ORPO.

It is a run of `train` on pairs, with safeguards. The reference of DPO is the model at its starting
weights; what it gives a pair is computed in the step that first meets it, and kept in the state.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.processes import size_and_rank
from mlxstacks.stats import mean_interval, share
from mlxstacks.studies.train.grpo import GrpoRun
from mlxstacks.studies.train.report import TrainReport, plan_table, result_of
from mlxstacks.studies.train.run import train_with
from mlxstacks.studies.train.safeguarded import SafeguardedRun, safeguards_table, with_store
from mlxstacks.studies.train.setup import StackOfStore
from mlxstacks.study.document import Block, Columns, Plot, Series, Table, cell_of
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.training.loop import Record, TrainingState
from mlxstacks.training.modes import evaluating
from mlxstacks.training.preference import (
    PairBatch,
    PairGradients,
    PairScores,
    Reference,
    dpo_loss,
    measured_scores,
    orpo_loss,
    pair_batch,
    rewards,
)
from mlxstacks.training.settings import AlignSettings


def run(
    settings: AlignSettings,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
    active: StackOfStore | None = None,
) -> Result:
    """Train on pairs; adapter, result, log, recipe and state go to `settings.save_path`.

    active: the stack to train in place of an adapter, which goes into its store.
    Raises: as `train`; NonFiniteError too where the safeguards gave up.
    """
    kind = GrpoRun if settings.method == "grpo" else AlignRun
    return train_with(kind, settings, dry_run, progress, active)[1]


def align_result(report: TrainReport) -> Result:
    """The document of a run, or of its plan."""
    base = result_of(report)
    title, question = "Preference training", "Does the model prefer the chosen answers now?"
    if report.status == "planned":
        update = {"kind": "align", "title": title, "question": question}
        return with_store(base.model_copy(update=update), report)
    n = report.plan["validation_rows"]
    first, best = report.validation[0], report.validation[0]
    for record in report.validation:
        best = record if record["step"] == report.best_step else best
    (before, _, _), (after, low, high) = (share(int(r["likelier"]), n) for r in (first, best))
    margin = "" if best["margin"] is None else f"; reward margin {best['margin']:+.3f}"
    if best["margin_low"] is not None:
        margin += f" ({best['margin_low']:+.3f} to {best['margin_high']:+.3f})"
    gained = best["step"] > 0
    verdict = (
        f"Of {n} held-out pairs, the chosen answer is likelier per token in {after:.1%} "
        f"({low:.1%} to {high:.1%}), {before:.1%} before{margin}. Loss of the chosen answers: "
        f"{first['chosen_nll']:.3f} before, {best['chosen_nll']:.3f} now, nats per token."
        if gained
        else "No evaluation was better than the start, whose weights were written: of "
        f"{n} held-out pairs, the chosen answer is likelier per token in {before:.1%}."
    )
    ended = "stopped" if report.status == "stopped" else "ended"
    verdict += f" Training {ended} at step {report.step:,}"
    verdict += f": {report.reason}." if report.reason else "."
    columns: Columns = {
        "step": "count", "loss": ("number", 4), "chosen likelier": "share",
        "reward margin": ("number", 3), "loss of chosen": ("number", 3), "": "text",
    }  # fmt: skip
    rows = [
        (
            r["step"], plain(r["validation_loss"]), share(int(r["likelier"]), n),
            cell_of({"mean": r["margin"], "low": r["margin_low"], "high": r["margin_high"]}),
            r["chosen_nll"], "written" if r["step"] == best["step"] else "",
        )
        for r in report.validation
    ]  # fmt: skip
    caption = (
        "loss: the method's. chosen likelier: pairs whose chosen answer has the higher mean "
        "log-probability per token. reward margin: by how much more than at the start, times beta. "
        "Both with 95% intervals over pairs. loss of chosen: nats per token."
    )
    blocks: list[Block] = [
        _margin_plot(report.validation),
        Table.of("validation", "Held-out pairs", columns, rows, caption=caption),
        plan_table(report),
        safeguards_table(report),
    ]
    result = base.model_copy(
        update={
            "kind": "align", "title": title, "question": question, "verdict": verdict,
            "outcome": f"chosen likelier: {before:.1%} to {after:.1%}" if gained else "no gain",
            "blocks": tuple(blocks),
        }
    )  # fmt: skip
    return with_store(result, report)


def _margin_plot(validation: Sequence[Record]) -> Plot:
    steps = tuple(int(r["step"]) for r in validation)
    losses = tuple(r["chosen_nll"] for r in validation)
    series = [Series(label="loss of the chosen answers", x=steps, y=losses)]
    if validation[0]["margin"] is not None:
        margins = tuple(r["margin"] for r in validation)
        series.insert(0, Series(label="reward margin", x=steps, y=margins))
    spans = "; ".join(f"{s.label} from {s.y[0]:.3f} to {s.y[-1]:.3f}" for s in series)
    return Plot(
        id="margins", title="Preference and its cost", kind="lines", series=tuple(series),
        x_label="step", y_label="nats; the loss per token",
        alt=f"On held-out pairs by step: {spans}.",
    )  # fmt: skip


class AlignRun(SafeguardedRun):
    """A training on pairs."""

    result_of = staticmethod(align_result)
    watched = "chosen_nll", "chosen"

    def run(self) -> tuple[TrainReport, Result]:
        size, _ = size_and_rank(self.group)
        if self.settings.grad_accumulation_steps % size:
            raise InputError(
                f"{size} processes share the batches of a step, so grad_accumulation_steps has to "
                f"be a multiple of {size}; it is {self.settings.grad_accumulation_steps}"
            )
        return super().run()

    def _hooks(self, state: TrainingState) -> dict[str, Any]:
        settings, setup = self.options, self.setup
        assert setup.pairs is not None
        self.pairs, self.held = setup.pairs
        self.loss = (dpo_loss if settings.method == "dpo" else orpo_loss)(settings.strength)
        self.reference = state.reference
        known = None
        if self.start is not None:
            unknown = np.full((2, len(self.pairs.chosen)), np.nan, np.float32)
            known = self.reference.setdefault("train", unknown)
        gradients = PairGradients(self.model, self.loss, self.head, self.group, self.start, known)
        return super()._hooks(state) | {"gradients": gradients}

    def _batch(self, rows: list[int], width: int) -> PairBatch:
        return pair_batch(self.pairs, rows)  # no step is compiled, for a few widths

    def _validation_loss(self, model: Any) -> float:
        self._say("validating")
        scores, reference, margins = self._scores(), None, list[float]()
        if self.start is not None:
            # the first validation is that of the start
            now = np.array([scores.chosen, scores.rejected])
            reference = Reference(*map(mx.array, self.reference.setdefault("validation", now)))
            margins = rewards(scores, reference, self.options.strength).tolist()
        loss = mx.mean(self.loss(scores, reference)).item()
        chosen = scores.chosen / scores.chosen_tokens
        likelier = mx.sum(chosen > scores.rejected / scores.rejected_tokens).item()
        nll = -(mx.sum(scores.chosen) / mx.sum(scores.chosen_tokens)).item()
        measured: dict[str, Any] = {
            "margin": None, "margin_low": None, "margin_high": None, "likelier": likelier,
            "chosen_nll": nll,
        }  # fmt: skip
        if margins and math.isfinite(sum(margins)):
            margin = mean_interval(margins)
            measured |= {
                "margin": margin.mean, "margin_low": margin.low, "margin_high": margin.high
            }  # fmt: skip
        return self._validated(measured, loss)

    def _scores(self) -> PairScores:
        """Of all held-out pairs, by the model as it is."""
        each, n, found = self.settings.batch_size, len(self.held.chosen), []
        with evaluating(self.model):
            for start in range(0, n, each):
                batch = pair_batch(self.held, range(start, min(start + each, n)))
                found.append(measured_scores(self.model, batch, self.head))
        return PairScores(*(mx.concatenate(part) for part in zip(*found, strict=True)))
