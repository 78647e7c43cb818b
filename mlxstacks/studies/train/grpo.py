"""`mlxstacks align --method grpo`: a LoRA, or a stack, trained on rewards of answers that the model
draws.

No noise and no dropout, neither in drawing nor in scoring: a
ratio of probabilities would otherwise be wrong.
"""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.stats import mean_interval
from mlxstacks.studies.train.report import TrainReport, plan_table, result_of
from mlxstacks.studies.train.rewards import open_rewards
from mlxstacks.studies.train.safeguarded import SafeguardedRun, safeguards_table, with_store
from mlxstacks.study.document import Block, Columns, Plot, Series, Table, cell_of, counted
from mlxstacks.study.render.words import number
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.training.batches import choose_widths
from mlxstacks.training.grpo import (
    Answer,
    GroupBatch,
    GroupGradients,
    GroupObjective,
    advantages,
    group_rows,
    sample_answers,
)
from mlxstacks.training.loop import Record, TrainingState
from mlxstacks.training.modes import evaluating
from mlxstacks.training.step import answer_log_p, random_key


def grpo_result(report: TrainReport) -> Result:
    """The document of a run, or of its plan."""
    base = result_of(report)
    title, question = "Training on rewards", "Do the model's own answers earn more reward now?"
    update: dict[str, Any] = {"kind": "align", "title": title, "question": question}
    if report.status == "planned":
        return with_store(base.model_copy(update=update), report)
    first, best = report.validation[0], report.validation[0]
    for record in report.validation:
        best = record if record["step"] == report.best_step else best
    gained = best["step"] > 0
    n, each = report.plan["validation_rows"], report.settings["group_size"]
    held = f"{counted(n, 'held-out prompt')}, {counted(each, 'answer')} each"
    if gained:
        verdict = f"Mean reward {best['reward']:.3f}, {first['reward']:.3f} before"
        if best["gain_low"] is not None:
            verdict += (
                f": {best['gain']:+.3f} ({best['gain_low']:+.3f} to {best['gain_high']:+.3f})"
            )
        verdict += f", of {held}."
        if best["reference_loss"] is not None:
            verdict += (
                f" Loss of the reference answers: {first['reference_loss']:.3f} before, "
                f"{best['reference_loss']:.3f} now, nats per token."
            )
    else:
        verdict = (
            "No evaluation was better than the start, whose weights were written: mean reward "
            f"{first['reward']:.3f} of {held}."
        )
    ended = "stopped" if report.status == "stopped" else "ended"
    verdict += f" Training {ended} at step {report.step:,}"
    verdict += f": {report.reason}." if report.reason else "."
    columns: Columns = {
        "step": "count", "mean reward": ("number", 3), "gain": ("number", 3),
        "loss of references": ("number", 3), "answer tokens": ("number", 1), "cut": "share", "":
        "text",
    }  # fmt: skip
    rows = [
        (
            r["step"], cell_of({"mean": r["reward"], "low": r["low"], "high": r["high"]}),
            cell_of({"mean": r["gain"], "low": r["gain_low"], "high": r["gain_high"]}),
            r["reference_loss"], r["answer_tokens"], r["cut"],
            "written" if r["step"] == best["step"] else "",
        )
        for r in report.validation
    ]  # fmt: skip
    caption = (
        f"Of {held}, drawn from the model. mean reward: 0 to 1, with its 95% interval over "
        "prompts. gain: over the start, prompt by prompt. loss of references: nats per token. "
        "cut: answers that reached max_tokens without an end."
    )
    figures = report.figures
    drawn = {
        "answers": f"{figures['answers']:,}, {figures['answer_tokens']:,} tokens",
        "drawing": f"{figures['tokens_per_second']:,.0f} tokens a second; "
        f"{figures['drawing_share']:.0%} of the time",
        "groups without a difference": f"{figures['flat_groups']:,} of {figures['groups']:,}, "
        "from which nothing is learned",
    }
    blocks: list[Block] = [
        _reward_plot(report),
        Table.of("validation", "Held-out prompts", columns, rows, caption=caption),
        plan_table(report),
        Table.of_facts("answers", "Answers drawn" + _since(figures), drawn),
        safeguards_table(report),
    ]
    outcome = f"mean reward: {first['reward']:.3f} to {best['reward']:.3f}" if gained else "no gain"
    update |= {"verdict": verdict, "outcome": outcome, "blocks": tuple(blocks)}
    return with_store(base.model_copy(update=update), report)


def _since(figures: dict[str, Any]) -> str:
    step = figures.get("resumed_from_step")
    return f" since step {step:,}" if step else ""


def _reward_plot(report: TrainReport) -> Plot:
    held = [(int(r["step"]), r["reward"]) for r in report.validation]
    drawn = [(int(r["step"]), r["reward"]) for r in report.history if "reward" in r]
    series = [
        Series(label=label, x=tuple(x for x, _ in points), y=plain([y for _, y in points]))
        for label, points in (("held-out prompts", held), ("prompts of the step", drawn))
        if points
    ]
    spans = "; ".join(f"{s.label} from {number(s.y[0])} to {number(s.y[-1])}" for s in series)
    return Plot(
        id="rewards", title="Reward in training", kind="lines", series=tuple(series),
        x_label="step", y_label="mean reward, 0 to 1", alt=f"Mean reward by step: {spans}.",
    )  # fmt: skip


class GrpoRun(SafeguardedRun):
    """A training on rewards."""

    in_one_process = True
    result_of = staticmethod(grpo_result)
    watched = "reference_loss", "reference"

    def run(self) -> tuple[TrainReport, Result]:
        settings = self.options
        assert self.setup.prompts is not None
        self.tokenizer = self.setup.tokenizer
        self.end_tokens = sorted(self.tokenizer.eos_token_ids)
        self.prompts, self.held = self.setup.prompts
        self.groups: list[GroupBatch] = []
        self.counts = {"answers": 0, "answer_tokens": 0, "groups": 0, "flat_groups": 0}
        self.drawing_seconds = 0.0
        with open_rewards(settings.reward, allow_code=settings.allow_code) as reward:
            self.reward = reward
            return super().run()

    def _hooks(self, state: TrainingState) -> dict[str, Any]:
        objective = GroupObjective(self.options.clip, self.options.strength)
        gradients = GroupGradients(self.model, objective, self.head, self.start)
        return super()._hooks(state) | {"gradients": gradients}

    # --- answers ----------------------------------------------------------------------------------

    def _draw(self, prompt: Sequence[int], key: mx.array) -> list[Answer]:
        """The answers to one prompt, from the model as it is; in eval mode."""
        begun = time.monotonic()
        answers = sample_answers(
            self.model, prompt, self.options.group_size, self.options.max_tokens, self.end_tokens,
            key,
        )  # fmt: skip
        self.drawing_seconds += time.monotonic() - begun
        self.counts["answers"] += len(answers)
        self.counts["answer_tokens"] += sum(len(answer.tokens) for answer in answers)
        return answers

    def _rewards(self, answers: Sequence[Answer], row: dict[str, Any]) -> list[float]:
        """Of each answer's text, without its end mark."""
        texts = (
            self.tokenizer.decode(list(a.tokens[:-1] if a.ended else a.tokens)) for a in answers
        )
        return [self.reward(text, row) for text in texts]

    def _batches_at(self, step: int) -> list[GroupBatch]:
        settings = self.options
        if step % settings.updates == 0 or not self.groups:
            self.groups = self._round(step // settings.updates)
        return self.groups

    def _round(self, number: int) -> list[GroupBatch]:
        """Groups of the prompts of a step, a function of its number and the weights."""
        settings, each = self.options, self.settings.grad_accumulation_steps
        groups: list[GroupBatch] = []
        with evaluating(self.model):
            for place in range(number * each, (number + 1) * each):
                numbers, width = self.setup.plan.batch(place)
                if self.guard is not None:
                    self.guard.check(width - 1)
                for i, prompt in enumerate(numbers):
                    self._say(f"answering prompt {len(groups) + 1} of the step")
                    ids = self.prompts.prompts[prompt]
                    key = random_key(f"{settings.seed}/answers/{place}/{i}")
                    answers = self._draw(ids, key)
                    rewards = self._rewards(answers, self.prompts.rows[prompt])
                    rows = group_rows(ids, answers, self._width(ids, answers))
                    better = advantages(rewards)
                    self.counts["groups"] += 1
                    self.counts["flat_groups"] += not better.any()
                    groups.append(GroupBatch(rows, np.asarray(rewards, np.float32), better))
            if settings.updates > 1:
                for group in groups:
                    group.old = answer_log_p(self.model, group.rows, self.head)
        return groups

    def _width(self, prompt: Sequence[int], answers: Sequence[Answer]) -> int:
        longest = len(prompt) + max(len(answer.tokens) for answer in answers)
        return choose_widths([longest], self.settings.max_seq_length)[-1]

    # --- validation -------------------------------------------------------------------------------

    def _validation_loss(self, model: Any) -> float:
        """1 less the mean reward of answers to the held-out prompts; the same chance every time."""
        means, tokens, cut = [], [], []
        with evaluating(model):
            for i, (prompt, row) in enumerate(zip(self.held.prompts, self.held.rows, strict=True)):
                self._say(f"validating on prompt {i + 1} of {len(self.held.prompts)}")
                key = random_key(f"{self.settings.seed}/validation/{i}")
                answers = self._draw(prompt, key)
                means.append(fmean(self._rewards(answers, row)))
                tokens += [len(answer.tokens) for answer in answers]
                cut += [not answer.ended for answer in answers]
            references = self.held.references
            loss = None
            if references:
                longest = max(len(row.tokens) for row in references)
                widths = choose_widths([longest], self.settings.max_seq_length)
                loss = evaluate_mean_loss(
                    model, references, self.settings.batch_size, widths, head=self.head
                )
        before = self.safeguards.counts.setdefault("start_rewards", means)
        reward = mean_interval(means)
        gain = mean_interval([now - then for now, then in zip(means, before, strict=True)])
        measured = {
            "reward": reward.mean, "low": reward.low, "high": reward.high,
            "gain": gain.mean, "gain_low": gain.low, "gain_high": gain.high,
            "reference_loss": loss, "answer_tokens": fmean(tokens), "cut": fmean(cut),
        }  # fmt: skip
        return self._validated(plain(measured), 1 - reward.mean)

    def _on_step(self, state: TrainingState, record: Record) -> None:
        most, found = self.options.safeguards.max_divergence, record.get("divergence", 0.0)
        if most is not None and found > most and state.stopped is None:
            state.stopped = (
                f"the answers of the last step diverged by {found:.3f} nats per token from the "
                f"model at the start, more than {most:g}"
            )
        super()._on_step(state, record)

    def _save(self, state: TrainingState) -> None:
        """Between rounds alone: answers are not kept, but drawn again from the weights."""
        last = state.stopped is not None or state.step == self.setup.optimizer.steps
        if last or state.step % self.options.updates == 0:
            super()._save(state)

    def _figures(self) -> dict[str, Any]:
        seconds = self.drawing_seconds
        return super()._figures() | {
            **self.counts,
            "tokens_per_second": round(self.counts["answer_tokens"] / max(seconds, 1e-9), 1),
            "drawing_share": round(seconds / max(time.monotonic() - self.started, 1e-9), 3),
        }
