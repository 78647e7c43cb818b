"""`mlxstacks distill`: one adapter that answers as a store's stacks do when they are routed.

A run of `train` whose loss is the cross-entropy of the answers and the divergence from the teacher
(training/distillation.py). The teacher's part comes first, is kept in the work directory, and its
model is gone before the student's is read. Losses are means over a row's answer tokens, then over
rows, then over domains; mixtures of them and prompts of no domain are measured beside them.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.data import EncodedRows, Row, encode_pair, make_batch
from mlxstacks.data.text_settings import Rendering
from mlxstacks.errors import InputError
from mlxstacks.evaluate import evaluate_row_losses
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.outputs import write_json
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.strict_json import read_object
from mlxstacks.routing.candidate_losses import LossCache
from mlxstacks.routing.outcomes import RouterExample
from mlxstacks.routing.resident import release_memory
from mlxstacks.routing.router import router_file_at
from mlxstacks.routing.settings import OutcomeSettings
from mlxstacks.studies.route.data import OTHERS, read_examples, template_of
from mlxstacks.studies.route.served import RowLosses
from mlxstacks.studies.route.settings import DistillSettings
from mlxstacks.studies.route.teacher import (
    Teacher,
    TeacherFiles,
    check_vocabularies,
    vocabulary_size,
)
from mlxstacks.studies.train.report import TrainReport, loss_plot, plan_table, result_of
from mlxstacks.studies.train.run import TrainRun, train_with
from mlxstacks.studies.train.setup import most_validated
from mlxstacks.study.document import Block, Columns, Table, counted
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import run_id, work_path
from mlxstacks.training.batches import choose_widths
from mlxstacks.training.distillation import (
    DistillationGradients,
    DistillationObjective,
    TaughtBatch,
)
from mlxstacks.training.loop import Record, TrainingState
from mlxstacks.training.modes import evaluating

LOSSES, TEACHER = "teacher-losses-{}.jsonl", "teacher.json"
# Held out of a label, unless rows that no stack was trained on are fewer than the others.
HELD_OUT_SHARE = 0.1
# Fewer rows give no interval that means something.
LEAST_ROWS = 8


def run(
    settings: DistillSettings, *, dry_run: bool = False, progress: Callable[..., None] | None = None
) -> Result:
    """Distil; adapter, result, log, recipe and state go to `settings.save_path`.

    Raises: as `train`; InputError too where a domain became worse than at the start by more than
        `max_rise`, or nothing was learned; StoreError for the teacher's store.
    """
    if settings.store_path is None:
        raise InputError("distill needs store_path")
    if settings.model is None:
        base = find_base(Store.open(settings.store_path), settings.teacher)
        settings = settings.model_copy(update={"model": str(base.directory)})
    return train_with(DistillRun, settings, dry_run, progress)[1]


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TaughtRows:
    """Of each row its example, in the order of the labels."""

    examples: list[RouterExample]
    rows: list[Row]

    def encoded(self, longest: int) -> EncodedRows:
        """Those as long as the limit count as cut, though some may end there."""
        cut = sum(len(row.tokens) == longest for row in self.rows)
        return EncodedRows(self.rows, [e.row_id for e in self.examples], cut, 0)


Taught = tuple[RouterExample, Row]


def group_of(example: RouterExample) -> str:
    """How tables name a row's label: `math`, `code+math`, `others`."""
    return "+".join(example.label) or OTHERS


def read_taught(
    settings: DistillSettings, tokenizer: Any, notes: list[str]
) -> tuple[TaughtRows, TaughtRows]:
    """Rows to train on and rows to validate with, each with an answer.

    See `split`. Raises: InputError: nothing is left to train on, or no row of a domain to validate
    with.
    """
    store = Store.open(str(settings.store_path))
    template = template_of(settings.template, store)
    rendering = Rendering(settings.thinking, settings.allow_special)
    asked = OutcomeSettings(
        store_path=settings.store_path, data=settings.data, single_cap=settings.rows_per_domain,
        mixed_cap=settings.rows_per_domain, seed=settings.seed,
    )  # fmt: skip
    by_group: dict[str, list[Taught]] = {}
    empty = 0
    about_rows: list[str] = []  # an error lists them all
    for example in read_examples(asked, store, tokenizer, about_rows):
        row = None
        if example.answer is not None:
            longest = settings.max_seq_length
            row = encode_pair(
                example.prompt, example.answer, tokenizer, template, longest, rendering
            )
        if row is None:
            empty += 1
            continue
        by_group.setdefault(group_of(example), []).append((example, row))
    notes += about_rows
    if empty:
        notes.append(
            f"Left out: {counted(empty, 'row')} without an answer within max_seq_length tokens."
        )
    most = most_validated(settings)
    train: list[Taught] = []
    held: list[Taught] = []
    for group, pairs in by_group.items():
        of_held, of_train = split(pairs, most)
        held += of_held
        train += of_train
        if not of_held:
            notes.append(f"{group}: too few rows to hold one out; no limit guards its loss.")
        elif all(example.trained_on for example, _ in of_held):
            notes.append(f"{group}: stacks were trained on every row, which flatters them.")
    if not train or not domains_of(group_of(example) for example, _ in held):
        raise InputError(
            "distill needs rows of a domain with answers, some to train on and some to validate "
            f"with; got {len(train)} and {len(held)}. Give --data with more of them, or a larger "
            "--max-seq-length"
        )
    parts = [TaughtRows([e for e, _ in pairs], [r for _, r in pairs]) for pairs in (train, held)]
    return parts[0], parts[1]


def split(pairs: Sequence[Taught], most: int | None) -> tuple[list[Taught], list[Taught]]:
    """(held out, to train on) of one label's rows, which are in an order by chance.

    Held out first are rows that no stack was trained on: all of them, or HELD_OUT_SHARE of all rows
    where they are none or more than half; at most `most`, but for other answers to the same
    prompts. Law: no prompt is on both sides.
    """
    ordered = sorted(pairs, key=lambda pair: pair[0].trained_on)
    unknown = sum(not example.trained_on for example, _ in pairs)
    count = unknown
    if not 0 < unknown <= len(pairs) / 2:
        count = math.ceil(HELD_OUT_SHARE * len(pairs)) if len(pairs) > 1 else 0
    prompts = {example.prompt for example, _ in ordered[: min(count, most or count)]}
    held = [pair for pair in ordered if pair[0].prompt in prompts]
    return held, [pair for pair in ordered if pair[0].prompt not in prompts]


def distill_rows(
    settings: Any, tokenizer: Any, notes: list[str]
) -> tuple[EncodedRows, EncodedRows | None, dict[str, Any]]:
    """Rows as `studies.train.setup.set_up` takes them."""
    train, held = read_taught(settings, tokenizer, notes)
    groups = dict(Counter(map(group_of, held.examples)))
    report = {
        "sources": [{"path": settings.data, "sha256": {"train": _ids_sha256(train)}}],
        "validation_sources": [{"path": settings.data, "sha256": {"held": _ids_sha256(held)}}],
        "train_rows": len(train.rows), "validation_rows": len(held.rows), "groups": groups,
    }  # fmt: skip
    longest = settings.max_seq_length
    return train.encoded(longest), held.encoded(longest), report


def _ids_sha256(rows: TaughtRows) -> str:
    """Of what is learned: labels, prompts to route by, tokens."""
    lines = (
        f"{group_of(e)}\t{e.prompt!r}\t{row.tokens}\t{row.weights}"
        for e, row in zip(rows.examples, rows.rows, strict=True)
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# --- what came of it ------------------------------------------------------------------------------

DRAWS = 2000


def domains_of(groups: Iterable[str]) -> list[str]:
    """The groups of one domain each; where there is none, of several."""
    named = [group for group in groups if group != OTHERS]
    return [group for group in named if "+" not in group] or named


def _means(groups: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(np.mean(rows)) for name, rows in groups.items()}


def _overall(means: Mapping[str, float]) -> float:
    """The mean over domains."""
    return float(np.mean([means[group] for group in domains_of(means)]))


def _read_losses(path: Path, identity: str) -> list[float] | None:
    """What the teacher was measured at; None where that is still to be done."""
    if not path.is_file():
        return None
    try:
        found = read_object(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found["losses"] if found.get("run_id") == identity else None


def recovered(
    losses: Mapping[str, Mapping[str, Sequence[float]]], seed: int
) -> dict[str, list[float] | None]:
    """Share of the teacher's gain over the start that the student has: (share, low, high) by group,
    and `all`, the ratio of both gains' means over domains.

    losses: start, teacher, student -> group -> loss of each row. Intervals: 95%, bootstrap over
    rows within groups. None of fewer than LEAST_ROWS rows, and where the teacher's gain is not
    above 0 in 97.5% of the draws.
    """
    rng = np.random.default_rng(seed)
    gains: list[tuple[np.ndarray, np.ndarray]] = []  # (1 + DRAWS,) each; the first is the estimate
    shares: dict[str, list[float] | None] = {}
    domains = domains_of(losses["start"])
    for group in losses["start"]:
        start, teacher, student = (
            np.array(losses[name][group]) for name in ("start", "teacher", "student")
        )
        n = len(start)
        drawn = np.vstack([np.ones(n), rng.multinomial(n, np.full(n, 1 / n), size=DRAWS)]) / n
        both = drawn @ (start - teacher), drawn @ (start - student)
        shares[group] = None if group == OTHERS or n < LEAST_ROWS else _share(*both)
        if group in domains:
            gains.append(both)
    of_teacher, of_student = (np.mean(column, axis=0) for column in zip(*gains, strict=True))
    enough = sum(len(losses["start"][group]) for group in domains) >= LEAST_ROWS
    return shares | {"all": _share(of_teacher, of_student) if enough else None}


def _share(of_teacher: np.ndarray, of_student: np.ndarray) -> list[float] | None:
    if of_teacher[0] <= 0 or np.quantile(of_teacher[1:], 0.025) <= 0:
        return None
    low, high = np.quantile(of_student[1:] / of_teacher[1:], [0.025, 0.975])
    return [float(of_student[0] / of_teacher[0]), float(low), float(high)]


def distill_result(report: TrainReport) -> Result:
    """The document of a run, or of its plan."""
    base = result_of(report)
    about = {
        "kind": "distill", "title": "Distillation",
        "question": "Does one adapter answer as the routed stacks do?",
    }  # fmt: skip
    if report.status == "planned":
        return base.model_copy(update=about)
    figures = report.figures
    losses, shares = figures["losses"], figures["recovered"]
    start, teacher, student = (_overall(losses[name]) for name in ("start", "teacher", "student"))
    smaller = report.plan["trained_parameters"] / figures["teacher_parameters"]
    of_gain = shares["all"]
    verdict = (
        "Whether the routed stacks gain anything over the start is not certain on these rows."
        if of_gain is None
        else f"The adapter has {of_gain[0]:.0%} ({of_gain[1]:.0%} to {of_gain[2]:.0%}) of what the "
        f"routed stacks gain, with {smaller:.0%} of their parameters."
    )
    verdict += (
        f" Mean loss over {len(domains_of(losses['start']))} domains: {start:.3f} at the "
        f"start, {teacher:.3f} routed stacks, {student:.3f} adapter, nats per token."
    )
    if OTHERS in losses["start"]:
        before, routed, now = (losses[name][OTHERS] for name in ("start", "teacher", "student"))
        verdict += f" Prompts of no domain: {before:.3f}, {routed:.3f}, {now:.3f}."
    columns: Columns = {
        "group": "text", "rows": "count", "start": ("number", 3), "routed stacks": ("number", 3),
        "adapter": ("number", 3), "share of the gain": "share",
    }  # fmt: skip
    rows = [
        (
            group, count, losses["start"][group], losses["teacher"][group],
            losses["student"][group], shares[group] and tuple(shares[group]),
        )
        for group, count in report.plan["data"]["groups"].items()
    ]  # fmt: skip
    caption = (
        "Held-out rows: mean cross-entropy per answer token, then over rows. start: the student "
        "before training. share of the gain: adapter against routed stacks, both over the start, "
        f"with 95% intervals over rows; empty for fewer than {LEAST_ROWS} rows, for prompts of no "
        "domain, and where the stacks gain nothing for certain."
    )
    blocks: list[Block] = [
        Table.of("domains", "Loss by group", columns, rows, caption=caption),
        *([] if (plot := loss_plot(report)) is None else [plot]),
        plan_table(report),
    ]
    outcome = "no certain gain" if of_gain is None else f"{of_gain[0]:.0%} of the gain"
    return base.model_copy(
        update={**about, "verdict": verdict, "outcome": outcome, "blocks": tuple(blocks)}
    )


# --- the run --------------------------------------------------------------------------------------


class DistillRun(TrainRun):
    """A training of a student."""

    command = "distill"
    in_one_process = True
    rows_of = staticmethod(distill_rows)
    result_of = staticmethod(distill_result)
    measured: dict[str, Any]
    files: TeacherFiles
    teacher_losses: list[float]
    start: list[float] | None

    @property
    def options(self) -> DistillSettings:
        assert isinstance(self.settings, DistillSettings)
        return self.settings

    def _identity(self) -> dict[str, Any]:
        """The store by its files, not by where it lies."""
        store = Store.open(str(self.options.store_path))
        places = {"store_path", "teacher", "router"}
        own = {key: value for key, value in super()._identity().items() if key not in places}
        router = store.manifest.router
        sha256 = router.sha256 if router else None
        if self.options.router is not None:
            sha256 = hashlib.sha256(router_file_at(self.options.router).read_bytes()).hexdigest()
        return own | {
            "teacher_fingerprint": store.manifest.base_fingerprint,
            "teacher_stacks": [
                [stack.domain, stack.file.sha256] for stack in store.enabled_stacks()
            ],
            "router_sha256": sha256,
        }

    def _load(self) -> None:
        self._teach()
        super()._load()
        tokens = vocabulary_size(self.setup.tokenizer)
        if self.head is not None and self.head.vocabulary_size < tokens:
            raise InputError(
                f"{self.settings.model}: its head makes logits of {self.head.vocabulary_size} "
                f"tokens, its tokenizer has {tokens}; a teacher's tokens would be missing"
            )

    def _hooks(self, state: TrainingState) -> dict[str, Any]:
        first: Any = state.validation[0] if state.validation else {}
        self.start = first.get("row_losses")
        objective = DistillationObjective(self.options.temperature)
        return {"gradients": DistillationGradients(self.model, objective, self.head)}

    def _batch(self, rows: list[int], width: int) -> TaughtBatch:
        made = make_batch([self.setup.train.rows[row] for row in rows], width)
        return TaughtBatch(made, self.files.of(rows))

    # --- the teacher ------------------------------------------------------------------------------

    def _teach(self) -> None:
        """Everything that the teacher is asked, unless it is there."""
        directory, plan = work_path(self.target), self.setup.plan
        batches = self.setup.optimizer.steps * self.settings.grad_accumulation_steps
        rows = sorted({row for place in range(batches) for row in plan.batch(place)[0]})
        about = {"run_id": run_id(self.identity)}
        self.files = TeacherFiles(directory, rows, about)
        missing, found = self.files.missing(), _read_losses(directory / TEACHER, about["run_id"])
        if found is None or missing:
            self._ask(missing)
            found = _read_losses(directory / TEACHER, about["run_id"])
        assert found is not None
        self.teacher_losses = found

    def _ask(self, missing: list[tuple[int, list[int]]]) -> None:
        options, directory = self.options, work_path(self.target)
        self._say("loading the teacher")
        store, base = Store.open(str(options.store_path)), options.teacher
        bound = store.manifest.base_fingerprint
        if base is None and fingerprint(open_checkpoint(self.setup.base_directory), bound) == bound:
            base = str(self.setup.base_directory)
        teacher = Teacher(store, base, options.base, options.routes, options.seed, options.router)
        notes = [*teacher.served.notes, *teacher.router.notes]
        self.setup.notes.extend(note for note in notes if note not in self.setup.notes)
        check_vocabularies(self.setup.tokenizer, teacher.served.tokenizer)
        train, held = read_taught(options, self.setup.tokenizer, [])
        cache = LossCache(directory / LOSSES.format(run_id(self.identity)))
        try:
            self._say("asking the teacher")
            for number, rows in missing:
                own = [train.rows[row] for row in rows]
                weights = teacher.weights([train.examples[row].prompt for row in rows], own, cache)
                self.files.write(
                    number,
                    teacher.distributions(own, weights, options.temperature, options.top_logits),
                )
            self._say("the teacher's own losses")
            losses = RowLosses(teacher.served, held.rows, cache)
            weights = teacher.routed([e.prompt for e in held.examples])
            of_teacher = losses.of([*enumerate(weights)])
            write_json(directory / TEACHER, {"run_id": run_id(self.identity), "losses": of_teacher})
        finally:
            cache.close()
        del teacher, losses
        release_memory()

    # --- validation -------------------------------------------------------------------------------

    def _row_losses(self) -> list[float]:
        """Of each held-out row under the model as it is."""
        rows, size = self.setup.validation_rows, self.settings.batch_size
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].tokens))
        found: dict[int, float] = {}
        with evaluating(self.model):
            for start in range(0, len(order), size):
                part = order[start : start + size]
                longest = max(len(rows[i].tokens) for i in part)
                width = choose_widths([longest], self.settings.max_seq_length)[-1]
                batch = make_batch([rows[i] for i in part], width)
                losses = evaluate_row_losses(self.model, batch, self.head).tolist()
                found |= dict(zip(part, losses, strict=True))
        return [found[i] for i in range(len(rows))]

    def _by_group(self, losses: Sequence[float]) -> dict[str, list[float]]:
        parts, start = {}, 0
        for group, count in self.setup.data["groups"].items():
            parts[group] = list(losses[start : start + count])
            start += count
        return parts

    def _validation_loss(self, model: Any) -> float:
        """The mean over domains; at least that of the start where one of them rose too far above
        it: such weights must not be the best ones.
        """
        self._say("validating")
        losses = self._row_losses()
        self.measured = {"losses": _means(self._by_group(losses))}
        if self.start is None:
            self.start = losses
            self.measured["row_losses"] = losses
        then, now = _means(self._by_group(self.start)), self.measured["losses"]
        most = self.options.max_rise
        rose = any(not now[group] <= then[group] + most for group in now if group != OTHERS)
        return max(_overall(now), _overall(then)) if rose else _overall(now)

    def _on_validation(self, state: TrainingState, record: Record) -> None:
        record |= self.measured
        super()._on_validation(state, record)

    def _figures(self) -> dict[str, Any]:
        """The losses of the weights that are written.

        Raises: InputError: no evaluation was better than the start with every group within its
            limit.
        """
        losses = self._row_losses()
        assert self.start is not None
        rows = {"start": self.start, "teacher": self.teacher_losses, "student": losses}
        by_group = {name: self._by_group(found) for name, found in rows.items()}
        means = {name: _means(groups) for name, groups in by_group.items()}
        if _overall(means["student"]) >= _overall(means["start"]):
            raise InputError(
                f"no evaluation was better than the start, {_overall(means['start']):.3f} nats per "
                "token, without a domain whose loss had risen by more than "
                f"{self.options.max_rise:g}. Train longer (--iters), or with another "
                f"--learning-rate or --rank. Nothing was written but {work_path(self.target)}"
            )
        stacks = Store.open(str(self.options.store_path)).enabled_stacks()
        return {
            "teacher_parameters": sum(stack.parameters for stack in stacks),
            "losses": means,
            "recovered": recovered(by_group, self.options.seed),
        }
