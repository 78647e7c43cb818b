"""`mlxstacks eval`: benchmarks in every mode of a model, on the same items, beside their controls.

The run lives in `.NAME.work` beside its target until it is done:

    plan.json               arms, items, metric, tests, thresholds, fixed before the first answer
    answers/TASK/ARM.*.jsonl   of every arm, appended as they come; changed ones are refused
    arms/ARM.json           notes of an arm; of `fused` what the fuse did

Killed at any moment, the same command goes on. Grading comes after all answers and reads them from
the files, so that `--regrade` needs no model.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.studies.benchmarks.analysis import Outcomes
from mlxstacks.studies.benchmarks.answers import AnswerFile, Given, Of
from mlxstacks.studies.benchmarks.arms import ModelArm, open_arms
from mlxstacks.studies.benchmarks.asked import AskedTask, ask_all, limited, with_arms
from mlxstacks.studies.benchmarks.grading import GradingTools, grade, grading_tools
from mlxstacks.studies.benchmarks.harness.results import (
    ask_harness,
    harness_findings,
    harness_plan,
    kept_path,
    read_harness,
)
from mlxstacks.studies.benchmarks.outcomes import likelihood_outcomes, reply_outcomes
from mlxstacks.studies.benchmarks.plan import (
    check_places,
    claims_of,
    data_of,
    hashes_of,
    is_published_model,
    plan_document,
    power_lines,
)
from mlxstacks.studies.benchmarks.report import REPORT, EvalReport, find
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.target import write_target
from mlxstacks.studies.benchmarks.types import BenchItem
from mlxstacks.studies.train.report import versions
from mlxstacks.study.integrity import read_sealed, write_sealed
from mlxstacks.study.plan import PLAN, keep_plan, plan_from
from mlxstacks.study.provenance import MadeFrom, check_made_from, of_bytes
from mlxstacks.study.run_directory import RunDirectory, recorded_fingerprint, work_path

Progress = Callable[..., None]
_NOT_OF_THE_RESULT = {"force", "save_path", "resume"}
# What a regrade takes from its own settings; all else is that of the run.
_OF_A_REGRADE = ("allow_code", "save_path", "force", "plots", "regrade")


def run(
    settings: EvalSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> EvalReport:
    """Plan, answer, grade, compare; write all of it to `save_path`.

    Raises:
        InputError: tasks, data, arms or target cannot be used, or the work directory holds a run
            of another plan.
    """
    if settings.save_path is None:
        raise InputError("eval needs save_path")
    if settings.regrade is not None:
        return _regrade(settings, dry_run)
    target = user_path(settings.save_path)
    if dry_run:
        return _planned(settings, target)
    named = (settings.model, settings.data, settings.adapter_path, settings.store_path)
    inputs = [path for path in (user_path(str(name)) for name in named if name) if path.exists()]
    check_target(target, force=settings.force, inputs=inputs)
    elsewhere = check_places(settings)
    asked, arms = _asked(settings, elsewhere)
    recorded = recorded_fingerprint(
        work_path(target) / PLAN, "hashes", "model", resume=settings.resume
    )
    hashes = hashes_of(settings, arms, recorded)
    document = plan_document(settings, asked, hashes, harness_plan(settings))
    work = RunDirectory(target, {"kind": "eval"}, resume=settings.resume)
    try:
        keep_plan(work.path / PLAN, document, "answers")
        evaluation = _Evaluation(settings, asked, arms, document, work.path, progress)
        evaluation.is_published_model = is_published_model(settings)
        evaluation.answer()
        evaluation.hashes = hashes_of(settings, arms, hashes.get("model"))  # as they are now
        report = write_target(target, work.path, evaluation.report(target), settings)
        work.remove()
    finally:
        work.close()
    return report


def _planned(settings: EvalSettings, target: Path) -> EvalReport:
    """From settings and data alone; what cannot be read here is said, not refused."""
    asked, unread = ask_all(settings, settings.own_tasks)
    asked, _ = with_arms(settings, asked)
    tests = sum(len(claims_of(one.arms)) for one in asked)
    notes = [f"Not read: {problem}" for problem in unread.in_words()]
    if settings.limit is not None:
        notes.append(f"--limit {settings.limit}: a quick look, and its result is exploratory.")
    if settings.harness_tasks:
        notes.append(f"By the lm-evaluation-harness: {', '.join(settings.harness_tasks)}.")
    return EvalReport(
        "planned", str(target), _shown(settings), {one.task.name: one.as_json() for one in asked},
        power=power_lines(settings, {one.task.name: len(one.items) for one in asked}, tests),
        notes=notes,
    )  # fmt: skip


def _regrade(settings: EvalSettings, dry_run: bool) -> EvalReport:
    """The answers of a finished run graded again, under its plan and with its settings.

    Raises: InputError for a directory that is no finished run, or whose answers are incomplete or
        not those that its report was made from.
    """
    source = user_path(str(settings.regrade))
    for name in (REPORT, PLAN):
        if not (source / name).is_file():
            there = f"it has no {name}" if source.is_dir() else "no such directory"
            raise InputError(
                f"{source}: not a finished run of `mlxstacks eval`: {there}; give --regrade the "
                "directory of one"
            )
    try:
        before = read_object((source / REPORT).read_bytes())
        document = read_object((source / PLAN).read_bytes())
        old = EvalSettings.model_validate(before["settings"])
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{source}: not a finished run of `mlxstacks eval`: {error}") from None
    now = settings.model_dump()
    settings = old.model_copy(update={key: now[key] for key in _OF_A_REGRADE})
    target = user_path(str(settings.save_path))
    if dry_run:
        return _planned(settings, target)
    check_target(target, force=settings.force, inputs=[source])
    _check_answers(source, before)
    asked, arms = _asked(settings)
    evaluation = _Evaluation(settings, asked, arms, document, source, None)
    # The model need not be here; the first grading knew it.
    tasks = before.get("tasks") or {}
    evaluation.is_published_model = any(task.get("published") for task in tasks.values())
    missing = [str(file.path) for file in evaluation.files() if file.missing]
    if missing:
        raise InputError(f"{source}: answers are missing in {', '.join(missing[:5])}")
    return write_target(target, source, evaluation.report(target), settings)


def _check_answers(source: Path, before: Mapping[str, Any]) -> None:
    made_from = before.get("made_from")
    if not isinstance(made_from, dict) or not made_from:
        raise InputError(
            f"{source}: its report holds no digests of its answers, so it was made by an older "
            "version, and nothing shows that they are still what was answered; run it again"
        )
    checked = check_made_from(source, made_from)
    wrong = [*checked.other, *(f"{name} is missing" for name in checked.missing)]
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong[:5])
        raise InputError(f"{source}: not what its report was made from:{lines}")


def _asked(
    settings: EvalSettings, elsewhere: Sequence[str] = ()
) -> tuple[list[AskedTask], tuple[str, ...]]:
    """(tasks, all arms). elsewhere: what else is not here, and would have to be downloaded.

    Raises: InputError listing that and every task whose data cannot be used.
    """
    asked, unread = ask_all(settings, settings.own_tasks)
    if unread:
        last = "--tasks names those that are to be evaluated"
        raise InputError("\n".join([*elsewhere, *unread.in_words(), last]))
    return with_arms(settings, asked)


def _shown(settings: EvalSettings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)


class _Evaluation:
    def __init__(
        self,
        settings: EvalSettings,
        asked: Sequence[AskedTask],
        arms: Sequence[str],
        document: Mapping[str, Any],
        work: Path,
        progress: Progress | None,
    ) -> None:
        self.settings, self.arms, self.planned = settings, arms, asked
        self.asked = [limited(settings, one) for one in asked]
        self.document, self.work, self.progress = document, work, progress
        self.hashes: Mapping[str, str] = document["hashes"]
        self.sha256 = json_sha256(document)
        self.started = time.monotonic()
        self.made_from: MadeFrom = {}
        self.is_published_model = False

    # --- answers ----------------------------------------------------------------------------------

    def files(self) -> Iterator[AnswerFile]:
        """Of every task and arm."""
        for one in self.asked:
            for arm in one.arms:
                yield from self._files(one, arm)

    def _files_of(self, arm: str) -> list[AnswerFile]:
        return [f for one in self.asked if arm in one.arms for f in self._files(one, arm)]

    def _files(self, one: AskedTask, arm: str) -> list[AnswerFile]:
        parts: dict[Of, Sequence[BenchItem]] = {"replies": one.items}
        if one.task.kind == "likelihood":
            letters = one.lettered if self.settings.letters else ()
            parts = {"texts": one.items, "letters": letters, "reference": one.reference}
        return [self._file(one, arm, of, items) for of, items in parts.items() if items]

    def _file(self, one: AskedTask, arm: str, of: Of, items: Sequence[BenchItem]) -> AnswerFile:
        path = self.work / "answers" / one.task.name / f"{arm}.{of}.jsonl"
        return AnswerFile(path, self.sha256, one.task.name, arm, of, items)

    def answer(self) -> None:
        """Everything that is missing; a model is loaded only for that."""
        self.total = sum(len(file.items) for file in self.files())
        self.done = self.total - sum(file.missing for file in self.files())
        unfinished = [arm for arm in self.arms if self._is_unfinished(arm)]
        # The old rule is asked for by name, beside the right one.
        settings = self.settings.model_copy(update={"reference_offset": False})
        for arm in open_arms(unfinished, settings) if unfinished else ():
            before = sum(len(file.items) - file.missing for file in self._files_of(arm.name))
            for one in self.asked:
                if arm.name in one.arms:
                    self._answer(one, arm)
            self._finish(arm, before)

    def _is_unfinished(self, arm: str) -> bool:
        files = self._files_of(arm)
        # One that was killed between its last answer and its notes is opened for these alone.
        lacks_notes = bool(files) and not self._notes_path(arm).is_file()
        return lacks_notes or self._lacks_harness(arm) or any(file.missing for file in files)

    def _notes_path(self, arm: str) -> Path:
        return self.work / "arms" / f"{arm}.json"

    def _lacks_harness(self, arm: str) -> bool:
        return bool(self.settings.harness_tasks) and not kept_path(self.work, arm).is_file()

    def _answer(self, one: AskedTask, arm: ModelArm) -> None:
        ask: dict[Of, Callable[..., Any]] = {
            "texts": arm.score,
            "letters": partial(arm.score, candidates="letters"),
            "reference": arm.score_as_reference,
            "replies": partial(arm.reply, max_tokens=one.task.max_tokens),
        }
        for file in self._files(one, arm.name):
            tick = partial(self._tick, f"{arm.name} {one.task.name}")
            file.go_on(self.settings.save_every, ask[file.of], tick)

    def _tick(self, what: str, more: int) -> None:
        self.done += more
        if self.progress:
            self.progress(self.done, self.total, what)

    def _finish(self, arm: ModelArm, before: int) -> None:
        """The harness's tasks; and at its end an arm knows most of itself, as where it routed.

        before: answers that an interrupted run had written already.
        """
        if self._lacks_harness(arm.name):
            ask_harness(self.work, self.settings, arm, self.sha256)
        notes = list(arm.notes)
        if before:
            notes.append(
                f"{arm.name}: gone on with after an interruption; its own counts of prompts are "
                f"without the {before:,} answers from before, the tables' are of all"
            )
        write_sealed(
            self._notes_path(arm.name), {"notes": notes, "details": getattr(arm, "details", {})}
        )

    # --- from the files ---------------------------------------------------------------------------

    def report(self, target: Path) -> EvalReport:
        """Grade what is in the files, and everything that follows from it."""
        with grading_tools(self.settings.allow_code) as tools:
            outcomes = {one.task.name: self._outcomes(one, tools) for one in self.asked}
            graded_with = tools.as_json()
        found = find(
            self.asked, outcomes,
            {name: plan_from(plan) for name, plan in self.document["tasks"].items()},
            {one.task.name: data_of(one, self.hashes) for one in self.planned},
            alpha=self.settings.alpha, seed=self.settings.seed,
            part_of_harness=self._part_of_harness(), is_published_model=self.is_published_model,
        )  # fmt: skip
        harness: dict[str, Any] = {}
        if self.settings.harness_tasks:
            harness, of_harness = read_harness(self.work, self.arms, self.sha256)
            self.made_from |= of_harness
        device = memory.device()
        return EvalReport(
            "done", str(target), _shown(self.settings),
            {one.task.name: one.as_json() for one in self.planned},
            plan=dict(self.document), plan_sha256=self.sha256,
            power=power_lines(
                self.settings, {one.task.name: len(one.items) for one in self.asked}, found.tests
            ),
            arms=self._notes(), findings=found, graded_with=graded_with,
            harness=harness_findings(harness, self.settings.alpha),
            seconds=time.monotonic() - self.started, versions=versions(),
            device=f"{device.name} ({device.kind})", made_from=self.made_from,
        )  # fmt: skip

    def _part_of_harness(self) -> bool:
        """Whether the harness's tasks were put to fewer items than planned."""
        planned, limit = self.settings.items_per_task, self.settings.limit
        is_part = limit is not None and (planned is None or limit < planned)
        return is_part and bool(self.settings.harness_tasks)

    def _outcomes(self, one: AskedTask, tools: GradingTools) -> Outcomes:
        return {arm: self._outcomes_of(one, arm, tools) for arm in one.arms}

    def _outcomes_of(self, one: AskedTask, arm: str, tools: GradingTools) -> Any:
        found = {}
        for file in self._files(one, arm):
            found[file.of] = given = file.answers()
            self.made_from[str(file.path.relative_to(self.work))] = file.made_from(given)
        if one.task.kind == "generate":
            return reply_outcomes(
                one.items, found["replies"], lambda item, text: grade(one.task, item, text, tools)
            )
        return likelihood_outcomes(
            one.items, found["texts"], _by_id(found.get("letters", ())),
            _by_id(found.get("reference", ())), self.settings.normalisation,
        )  # fmt: skip

    def _notes(self) -> dict[str, dict[str, Any]]:
        notes = {}
        for name in self.arms:
            path = self._notes_path(name)
            if path.is_file():
                notes[name], data = read_sealed(path)
                self.made_from[str(path.relative_to(self.work))] = of_bytes(data)
        return notes


def _by_id(found: Sequence[Given]) -> dict[str, Given]:
    return {one.item_id: one for one in found}
