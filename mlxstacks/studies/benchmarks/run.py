"""`mlxstacks eval`: benchmarks in every mode of a model, on the same items, next to their controls.

The run lives in `.NAME.work` next to its target until it is done:

    plan.json                  arms, items, metric, tests, thresholds, before the first answer
    answers/TASK/ARM.*.jsonl   of every arm, appended as they come; changed ones are refused
    arms/ARM.json              notes of an arm; of `fused` what the fuse did
    harness/ARM.json           what the lm-evaluation-harness measured of it, by its own scoring

Grading comes after all answers and reads them from the files, so that `--regrade` needs no model.
An answer keeps everything the arm gave: log-likelihoods and lengths, or the raw text.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import PLACES
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.processes import dealing
from mlxstacks.studies.benchmarks import harness
from mlxstacks.studies.benchmarks.analysis import (
    Given,
    GradingTools,
    Outcome,
    claims_of,
    grade,
    grading_tools,
    harness_figures,
    likelihood_outcomes,
    reply_outcomes,
)
from mlxstacks.studies.benchmarks.arms import ModelArm, open_arms
from mlxstacks.studies.benchmarks.items import (
    AskedTask,
    ask_all,
    check_arms_fit,
    check_places,
    data_of,
    hashes_of,
    is_published_model,
    limited,
    plan_document,
    power_lines,
    with_arms,
)
from mlxstacks.studies.benchmarks.report import blocks, find, outcome, plan_blocks
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied, Scored
from mlxstacks.study.answer_log import AnswersToItems, chained
from mlxstacks.study.document import RESULT, Standing
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.integrity import Provenance, of_bytes, read_sealed, write_sealed
from mlxstacks.study.plan import PLAN, plan_from
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import (
    RECIPE,
    keep_parts,
    recorded_fingerprint,
    work_path,
    write_recipe,
)

ABOUT = {
    "kind": "eval",
    "title": "Benchmarks",
    "question": "Which modes score better on which benchmark?",
}
# What a regrade takes from its own settings; all else is that of the run.
_OF_A_REGRADE = ("allow_code", "save_path", "force", "plots", "regrade")
_ANSWERS = ("answers", "arms", "harness")
Progress = Callable[..., None]
Of = Literal["texts", "letters", "replies", "reference"]
"""What the arm was asked: candidates as texts, as letters, without their first token; a reply."""


def run(
    settings: EvalSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Plan, answer, grade, compare; write all of it to `save_path`.

    Raises:
        InputError: tasks, data, arms or target cannot be used, the work directory holds a run of
            another plan, or what is to be graded again is no finished run, or not what it was.
    """
    if settings.save_path is None:
        raise InputError("eval needs save_path")
    study = _Evaluation if settings.regrade is None else _Regrade
    return run_study(study(settings, progress, dry_run), dry_run=dry_run, progress=progress)


_NAME_TASKS = "--tasks names those that are to be evaluated"


class AnswerFile(AnswersToItems[BenchItem, Given]):
    """Answers of one arm to the items of a task."""

    def __init__(
        self, path: Path, plan_sha256: str, task: str, arm: str, of: Of, items: Sequence[BenchItem]
    ) -> None:
        header = {"plan_sha256": plan_sha256, "task": task, "arm": arm, "of": of}
        super().__init__(
            path, header, items, self._given, lambda a, item: a.item_id == item.item_id
        )
        self.of = of

    def _given(self, row: dict[str, Any]) -> Given:
        answer = dict(row["answer"])
        if self.of == "replies":
            return Given(row["item_id"], Replied(**answer), row["seconds"])
        lists = {key: tuple(answer[key]) for key in ("sums", "tokens", "characters")}
        return Given(row["item_id"], Scored(**answer | lists), row["seconds"])

    @property
    def missing(self) -> int:
        """How many items have no answer yet."""
        return len(self.items) - len(self.answers())

    def provenance(self, answers: Sequence[Given]) -> dict[str, Any]:
        """For a report that uses all answers, given by `answers`.

        digest_without_seconds: what the digest would be with no wall times in the file; the same in
        another run.
        """
        rows = [{k: v for k, v in asdict(one).items() if k != "seconds"} for one in answers]
        *_, (_, plain) = chained([self.log.header, *rows])
        return {**self.log.provenance(len(answers)), "digest_without_seconds": plain}


def _timed(
    answer: Callable[[Sequence[BenchItem]], Sequence[Scored | Replied]], items: Sequence[BenchItem]
) -> list[Given]:
    started = time.monotonic()
    answers = answer(items)
    seconds = round((time.monotonic() - started) / len(items), 6)
    return [Given(i.item_id, given, seconds) for i, given in zip(items, answers, strict=False)]


class _Evaluation(Study):
    artifacts = (*_ANSWERS, RECIPE)
    provenance = tuple(f"{name}/**/*.json*" for name in _ANSWERS)
    is_dealt = True
    settings: EvalSettings

    def __init__(self, settings: EvalSettings, progress: Progress | None, dry_run: bool) -> None:
        self.settings, self.progress, self.dry_run = settings, progress, dry_run
        self.inputs: Sequence[str | None] = (
            settings.model, settings.data, settings.adapter_path, settings.store_path,
        )  # fmt: skip
        self.plot_formats = FORMATS if settings.plots else ()

    def planned(self) -> Result:
        if self.dry_run:
            return self._glance()
        settings = self.settings
        self._ask(check_places(settings))
        check_arms_fit(settings, self.arms)
        plan = work_path(user_path(str(settings.save_path))) / PLAN
        recorded = recorded_fingerprint(plan, "hashes", "model", resume=settings.resume)
        self.hashes: Mapping[str, str] = hashes_of(settings, self.arms, recorded)
        self.is_published_model = is_published_model(settings)
        return self._head(plan_document(settings, self.planned_tasks, self.hashes))

    def _head(self, plan: Mapping[str, Any]) -> Result:
        self.plan, self.plan_sha256 = dict(plan), json_sha256(plan)
        return Result(**ABOUT, status="planned", settings=self._shown(), plan=self.plan)

    def _shown(self) -> dict[str, Any]:
        return self.settings.model_dump(mode="json", exclude=PLACES)

    def _ask(self, elsewhere: Sequence[str] = ()) -> None:
        """Read the tasks. elsewhere: what else is not here, and would have to be downloaded.

        Raises: InputError listing that and every task whose data cannot be used.
        """
        asked, problems = ask_all(self.settings, self.settings.own_tasks)
        if problems:
            raise InputError("\n".join([*elsewhere, *problems, _NAME_TASKS]))
        self.planned_tasks, self.arms = with_arms(self.settings, asked)
        self.asked = [limited(self.settings, task) for task in self.planned_tasks]

    def _glance(self) -> Result:
        """From settings and data alone; what cannot be read here is noted, unless it is all."""
        settings, shown = self.settings, self._shown()
        asked, problems = ask_all(settings, settings.own_tasks)
        if problems and not asked and settings.data and user_path(settings.data).exists():
            raise InputError("\n".join([*problems, _NAME_TASKS]))
        asked, arms = with_arms(settings, asked)
        if settings.model is not None and user_path(settings.model).is_dir():
            check_arms_fit(settings, arms)
        notes = [f"Not read: {problem}" for problem in problems]
        if settings.limit is not None:
            notes.append(f"--limit {settings.limit}: a quick look, and its result is exploratory.")
        if settings.harness_tasks:
            notes.append(f"By the lm-evaluation-harness: {', '.join(settings.harness_tasks)}.")
            try:
                harness.find_tasks(settings.harness_tasks, settings.task_files)
            except InputError as error:
                if find_spec("lm_eval"):
                    raise
                notes.append(f"Not read: {error}")
        names = ", ".join(problem.partition(":")[0] for problem in problems)
        tasks = {task.name: task.as_json() for task in asked}
        tests = sum(len(claims_of(task.arms)) for task in asked)
        return Result(
            **ABOUT, status="planned", settings=shown, data={"planned_tasks": tasks},
            verdict=f"Not read, and the run needs it: {names}." if names else "",
            power=power_lines(settings, {task.name: len(task.items) for task in asked}, tests),
            blocks=plan_blocks(shown, tasks), notes=tuple(notes),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        yield Step("answers", self._answer_all)
        self.hashes = hashes_of(self.settings, self.arms, self.hashes.get("model"))
        yield Step("recipe", lambda work: write_recipe(work, "eval", self.settings))

    def _files(self, work: Path, task: AskedTask, arm: str) -> list[AnswerFile]:
        parts: dict[Of, Sequence[BenchItem]] = {"replies": task.items}
        if task.task.kind == "likelihood":
            letters = task.lettered if self.settings.letters else ()
            parts = {"texts": task.items, "letters": letters, "reference": task.reference}
        directory = work / "answers" / task.name
        return [
            AnswerFile(directory / f"{arm}.{of}.jsonl", self.plan_sha256, task.name, arm, of, items)
            for of, items in parts.items()
            if items
        ]

    def _every_file(self, work: Path) -> dict[str, list[AnswerFile]]:
        """Arm -> its files."""
        return {
            arm: [
                f for task in self.asked if arm in task.arms for f in self._files(work, task, arm)
            ]
            for arm in self.arms
        }

    def _answer_all(self, work: Path) -> None:
        """Everything that is missing; a model is loaded only for that."""
        files = self._every_file(work)
        missing = {arm: sum(file.missing for file in files[arm]) for arm in self.arms}
        totals = {arm: sum(len(file.items) for file in files[arm]) for arm in self.arms}
        self.total = sum(totals.values())
        self.done = self.total - sum(missing.values())
        unfinished = [
            arm
            for arm in self.arms
            # An arm killed between its last answer and its notes is opened for these alone.
            if missing[arm] or self._lacks_harness(work, arm)
            or (files[arm] and not _path(work, "arms", arm).is_file())
        ]  # fmt: skip
        for arm in open_arms(unfinished, self.settings):
            for task in self.asked:
                if arm.name in task.arms:
                    self._answer(work, task, arm)
            self._finish(work, arm, totals[arm.name] - missing[arm.name])

    def _answer(self, work: Path, task: AskedTask, arm: ModelArm) -> None:
        answer: dict[Of, Callable[..., Any]] = {
            "texts": arm.score,
            "letters": partial(arm.score, candidates="letters"),
            "reference": partial(arm.score, as_reference=True),
            "replies": partial(arm.reply, max_tokens=task.task.max_tokens),
        }

        for file in self._files(work, task, arm.name):
            missing = file.missing
            before = self.done + missing - len(file.items)

            def tell(done: int, *_: object, before: int = before) -> None:
                if self.progress:
                    self.progress(before + done, self.total, f"{arm.name} {task.name}")

            size = len(file.items)
            file.complete(size, self.settings.save_every, partial(_timed, answer[file.of]), tell)
            tell(size)
            self.done += missing

    def _lacks_harness(self, work: Path, arm: str) -> bool:
        return bool(self.settings.harness_tasks) and not _path(work, "harness", arm).is_file()

    def _finish(self, work: Path, arm: ModelArm, before: int) -> None:
        """The harness's tasks; and at its end an arm knows most of itself, as where it routed.

        before: answers that an interrupted run had written already.
        """
        if self._lacks_harness(work, arm.name):
            settings = self.settings
            limits = [n for n in (settings.items_per_task, settings.limit) if n is not None]
            results = harness.run_harness(
                [arm], settings.harness_tasks, include_path=settings.task_files,
                data=settings.data, limit=min(limits, default=None), seed=settings.seed,
                chat=settings.chat == "all", domains=settings.harness_labels,
            )  # fmt: skip
            sealed = {"plan_sha256": self.plan_sha256, **results}
            write_sealed(_path(work, "harness", arm.name), sealed)
        if dealing() is not None:
            arm.gather()
        notes = list(arm.notes)
        if before:
            notes.append(
                f"{arm.name}: resumed after an interruption; its own counts of prompts are "
                f"without the {before:,} answers from before, the tables' are of all"
            )
        write_sealed(_path(work, "arms", arm.name), {"notes": notes, "details": arm.details})

    def conclude(self, work: Path) -> Result:
        settings, sources = self.settings, Provenance()
        with grading_tools(settings.allow_code) as tools:
            outcomes = {
                task.name: {
                    arm: self._outcomes(work, task, arm, tools, sources) for arm in task.arms
                }
                for task in self.asked
            }
            graded_with = tools.as_json()
        limit, planned = settings.limit, settings.items_per_task
        is_part = limit is not None and (planned is None or limit < planned)
        figures, verdict = find(
            self.asked, outcomes,
            {name: plan_from(plan) for name, plan in self.plan["tasks"].items()},
            {task.name: data_of(task, self.hashes) for task in self.planned_tasks},
            alpha=settings.alpha, seed=settings.seed,
            part_of_harness=is_part and bool(settings.harness_tasks),
            is_published_model=self.is_published_model,
        )  # fmt: skip
        arms: dict[str, Any] = {
            arm: _read(work, _path(work, "arms", arm), sources)
            for arm in self.arms
            if _path(work, "arms", arm).is_file()
        }
        of_harness = harness_figures(self._harness_results(work, sources), settings.alpha)
        counts = {task.name: len(task.items) for task in self.planned_tasks}
        return Result(
            **ABOUT, status="done", outcome=outcome(figures), verdict=verdict,
            standing=Standing(**figures["standing"]),
            power=power_lines(settings, counts, figures["tests"]),
            data={
                "planned_tasks": {task.name: task.as_json() for task in self.planned_tasks},
                "arms": arms, **figures, "harness": of_harness, "graded_with": graded_with,
            },
            blocks=blocks(figures, of_harness, self._shown()), notes=_notes_of(arms),
            provenance=sources,
        )  # fmt: skip

    def _outcomes(
        self, work: Path, task: AskedTask, arm: str, tools: GradingTools, sources: Provenance
    ) -> list[Outcome]:
        answers: dict[Of, list[Given]] = {}
        for file in self._files(work, task, arm):
            answers[file.of] = file.answers()
            sources[str(file.path.relative_to(work))] = file.provenance(answers[file.of])
        if task.task.kind == "generate":
            return reply_outcomes(
                task.items, answers["replies"], lambda i, text: grade(task.task, i, text, tools)
            )
        letters, reference = (
            {given.item_id: given for given in answers.get(of, ())}
            for of in ("letters", "reference")
        )
        return likelihood_outcomes(
            task.items, answers["texts"], letters, reference, self.settings.normalisation
        )

    def _harness_results(self, work: Path, sources: Provenance) -> dict[str, Any]:
        """Arm -> what `run_harness` gave. Raises: InputError for results of another plan, and for
        some that were changed.
        """
        results: dict[str, Any] = {}
        for arm in self.arms if self.settings.harness_tasks else ():
            path = _path(work, "harness", arm)
            results[arm] = _read(work, path, sources, "remove it to ask again")
            if results[arm].get("plan_sha256") != self.plan_sha256:
                raise InputError(f"{path}: results of another plan; remove it to ask again")
        return results


def _path(work: Path, directory: str, arm: str) -> Path:
    return work / directory / f"{arm}.json"


def _read(work: Path, path: Path, sources: Provenance, *remedy: str) -> dict[str, Any]:
    value, data = read_sealed(path, *remedy)
    sources[str(path.relative_to(work))] = of_bytes(data)
    return value


def _notes_of(arms: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """Each note once, behind the arms that have it."""
    names: dict[str, list[str]] = {}
    for name, arm in arms.items():
        for note in arm["notes"]:
            names.setdefault(note, []).append(name)
    return tuple(
        note if of == list(arms) or note.startswith(of[0]) else f"{', '.join(of)}: {note}"
        for note, of in names.items()
    )


class _Regrade(_Evaluation):
    """The answers of a finished run graded again, under its plan and with its settings."""

    def __init__(self, settings: EvalSettings, progress: Progress | None, dry_run: bool) -> None:
        self.source = user_path(str(settings.regrade))
        self.before = _finished_run(self.source)
        former = EvalSettings.model_validate(self.before.settings)
        given = settings.model_fields_set - {*_OF_A_REGRADE, "resume"}
        if other := sorted(k for k in given if getattr(settings, k) != getattr(former, k)):
            raise InputError(
                f"{self.source} is graded again with its own settings; leave out {', '.join(other)}"
            )
        changes = {key: getattr(settings, key) for key in _OF_A_REGRADE}
        super().__init__(former.model_copy(update=changes), progress, dry_run)
        self.inputs = (str(self.source),)

    def planned(self) -> Result:
        if self.dry_run:
            return self._glance()
        self._ask()
        head = self._head(self.before.plan or {})
        self.hashes = self.plan["hashes"]
        # The model need not be here; the first grading knew it.
        self.is_published_model = any(t["published"] for t in self.before.data["tasks"].values())
        files = self._every_file(self.source)
        missing = [str(f.path) for of_arm in files.values() for f in of_arm if f.missing]
        if missing:
            raise InputError(f"{self.source}: answers are missing in {', '.join(missing[:5])}")
        return head

    def steps(self, work: Path) -> Iterator[Step]:
        yield Step("answers", self._take_over)
        yield Step("recipe", lambda work: write_recipe(work, "eval", self.settings))

    def _take_over(self, work: Path) -> None:
        for name in _ANSWERS:  # of a regrade that was killed while it copied them
            shutil.rmtree(work / name, ignore_errors=True)
        keep_parts(self.source, work, _ANSWERS, ())


def _finished_run(source: Path) -> Result:
    """Its result. Raises: InputError for a directory that is no finished run, and for one
    whose files are not those that its result was made from.
    """
    not_one = f"{source}: not a finished run of `mlxstacks eval`"
    if not (source / RESULT).is_file():
        why = f"it has no {RESULT}" if source.is_dir() else "no such directory"
        raise InputError(f"{not_one}: {why}; give --regrade the directory of one")
    try:
        written = Result.from_json(read_object((source / RESULT).read_bytes()))
        if written.kind != "eval" or written.status != "done" or written.plan is None:
            raise ValueError(f"{RESULT} is of {written.kind}, {written.status}")
        EvalSettings.model_validate(written.settings)
    except (OSError, ValueError) as error:
        raise InputError(f"{not_one}: {error}") from None
    reasons = written.checked(source).standing.reasons[len(written.standing.reasons) :]
    if reasons:
        lines = "".join(f"\n  {line}" for line in reasons)
        raise InputError(f"{source}: not what its result was made from:{lines}")
    return written
