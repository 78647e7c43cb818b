"""`mlxstacks align`: a LoRA, or a stack of a store, trained to prefer chosen answers to rejected
ones, by DPO or ORPO.

It is a run of `train` on pairs, with safeguards. The reference of DPO is the model at its starting
weights, whose log-probabilities are computed once, before the first step, and kept in the work
directory: there is no second copy of the model.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.base_model import load_arrays, save_arrays
from mlxstacks.data import EncodedPairs
from mlxstacks.errors import InputError
from mlxstacks.files.disk import mlx_write_errors
from mlxstacks.processes import size_and_rank
from mlxstacks.stats import mean_interval, share
from mlxstacks.studies.train.grpo import GrpoRun
from mlxstacks.studies.train.report import TrainReport, plan_table, result_of
from mlxstacks.studies.train.run import train_with
from mlxstacks.studies.train.safeguarded import SafeguardedRun, safeguards_table, with_store
from mlxstacks.studies.train.setup import StackOfStore
from mlxstacks.study.document import Block, Columns, Plot, Series, Table, cell_of
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain, run_id, work_path
from mlxstacks.training.batches import choose_widths
from mlxstacks.training.loop import Record, TrainingState, arrays_sha256
from mlxstacks.training.modes import evaluating
from mlxstacks.training.preference import (
    PairBatch,
    PairGradients,
    PairScores,
    dpo_loss,
    orpo_loss,
    pair_batch,
    pair_scores,
    reference_of,
    rewards,
)
from mlxstacks.training.settings import AlignSettings

REFERENCE = "reference.safetensors"


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
        self.reference = self._reference() if settings.method == "dpo" else None
        return super()._hooks(state) | {
            "gradients": PairGradients(self.model, self.loss, self.head, self.group)
        }

    def _batch(self, rows: list[int], width: int) -> PairBatch:
        sides = self.pairs.chosen, self.pairs.rejected
        chosen, rejected = ([side[i] for i in rows] for side in sides)
        reference = None if self.reference is None else self.reference["train"][rows]
        return pair_batch(chosen, rejected, width, reference)

    def _validation_loss(self, model: Any) -> float:
        self._say("validating")
        reference = None if self.reference is None else self.reference["validation"]
        loss = nll = tokens = 0.0
        likelier, margins = 0, list[float]()
        for batch, scores in self._scored(self.held, reference):
            of_batch = reference_of(batch)
            loss += mx.sum(self.loss(scores, of_batch)).item()
            if of_batch is not None:
                margins += rewards(scores, of_batch, self.options.strength).tolist()
            good = scores.chosen / scores.chosen_tokens
            likelier += int(mx.sum(good > scores.rejected / scores.rejected_tokens).item())
            nll -= mx.sum(scores.chosen).item()
            tokens += mx.sum(scores.chosen_tokens).item()
        n = len(self.held.chosen)
        measured: dict[str, Any] = {
            "margin": None, "margin_low": None, "margin_high": None, "likelier": likelier,
            "chosen_nll": nll / tokens,
        }  # fmt: skip
        if margins and math.isfinite(sum(margins)):
            margin = mean_interval(margins)
            measured |= {
                "margin": margin.mean, "margin_low": margin.low, "margin_high": margin.high
            }  # fmt: skip
        return self._validated(measured, loss / n)

    # --- the reference ----------------------------------------------------------------------------

    def _scored(
        self, pairs: EncodedPairs, reference: np.ndarray | None
    ) -> "Sequence[tuple[PairBatch, PairScores]]":
        """Batches of pairs in their order, and what the model as it is gives them."""
        size = self.settings.batch_size
        scored = []
        with evaluating(self.model):
            for start in range(0, len(pairs.chosen), size):
                part = slice(start, start + size)
                rows = pairs.chosen[part], pairs.rejected[part]
                longest = max(len(row.tokens) for side in rows for row in side)
                (width, *_) = choose_widths([longest], self.settings.max_seq_length)
                batch = pair_batch(*rows, width, None if reference is None else reference[part])
                scores = pair_scores(self.model, batch, self.head)
                mx.eval(scores)
                scored.append((batch, scores))
        return scored

    def _reference(self) -> dict[str, np.ndarray]:
        """(n, 2) float32 of each part: computed at the start, read by a resumed run."""
        path = work_path(self.target) / REFERENCE
        if self.resumed_from:
            return self._read_reference(path)
        self._say("scoring the answers at the start")
        plan, each = self.setup.plan, self.settings.grad_accumulation_steps
        batches = map(plan.batch, range(self.setup.optimizer.steps * each))
        met = sorted({row for rows, _ in batches for row in rows})
        of_training = EncodedPairs(
            [self.pairs.chosen[i] for i in met], [self.pairs.rejected[i] for i in met], 0, 0
        )
        # NaN for pairs that the run does not come to
        arrays = {"train": np.full((len(self.pairs.chosen), 2), np.nan, np.float32)}
        arrays["train"][met] = self._scores_at_start(of_training)
        arrays["validation"] = self._scores_at_start(self.held)
        if self.work is not None:
            stored = {name: mx.array(array) for name, array in arrays.items()}
            about = {"run_id": run_id(self.identity)}
            about["sha256"] = arrays_sha256(stored, about)
            temporary = path.with_name(f".{path.name}.tmp.safetensors")
            with mlx_write_errors(path):
                save_arrays(temporary, stored, about)
            temporary.replace(path)
        return arrays

    def _scores_at_start(self, pairs: EncodedPairs) -> np.ndarray:
        columns = [(s.chosen, s.rejected) for _, s in self._scored(pairs, None)]
        both = [mx.concatenate(side) for side in zip(*columns, strict=True)]
        return np.array(mx.stack(both, axis=1))

    def _read_reference(self, path: Path) -> dict[str, np.ndarray]:
        again = "give --no-resume to start again"
        try:
            stored, about = load_arrays(path)
            mx.eval(stored)
        except (RuntimeError, ValueError, OSError) as error:
            raise InputError(f"{path}: missing or damaged ({error}); {again}") from None
        digest = about.pop("sha256", None)
        if digest != arrays_sha256(stored, about) or about.get("run_id") != run_id(self.identity):
            raise InputError(f"{path}: not what this run wrote; {again}")
        return {name: np.array(array) for name, array in stored.items()}
