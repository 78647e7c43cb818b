"""`mlxstacks identity`: does a persona survive a second adapter that is fused after it?

Conditions of the study and our controls answer a suite of prompts, under each policy of fusing, and
the items of a broad regression. The factual adapters are trained on items that base and persona
both get wrong. The run lives in `.NAME.work` beside its target until it is done:

    plan.json       the plan, fixed before any model answers anything; another one is refused
    answers/        suite_ARM.jsonl and items_ARM.jsonl, appended as they come; changed ones are
                    refused
    split.json      which item went where; data/train.jsonl the factual training rows
    factual/ factual_second/   the adapters
    models/ARM      a fused model, until it has answered; fuse/ARM.json what the fuse did

Killed at any moment, the same command goes on: what is there is kept.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import check_target, write_json
from mlxstacks.files.shipped_configs import has_shape_of
from mlxstacks.studies.confound.answers import Answer, AnswerFile, AnswerItems
from mlxstacks.studies.confound.asking import Progress, ask_missing
from mlxstacks.studies.confound.items import Item, read_items, stratified_sample
from mlxstacks.studies.confound.mining import Mined, mine
from mlxstacks.studies.confound.plan import evidence_of, file_sha256
from mlxstacks.studies.confound.prompts import training_rows
from mlxstacks.studies.confound.scoring import Arm
from mlxstacks.studies.identity.asking import ask, check_verdicts, item_settings
from mlxstacks.studies.identity.conditions import (
    BASE,
    BASE_ZERO,
    FACTUAL,
    PERSONA,
    REFERENCE,
    RERUN,
    SECOND,
    UNFUSED,
    arm,
    is_adapter,
    item_arms,
    kinds_of,
    suite_arms,
)
from mlxstacks.studies.identity.models import Models
from mlxstacks.studies.identity.plan import (
    data_of,
    plan_of,
    power_lines,
    source_sha256,
)
from mlxstacks.studies.identity.report import (
    PUBLISHED_MODEL,
    IdentityReport,
    find,
    flips_note,
    suite_as_json,
)
from mlxstacks.studies.identity.settings import DEFAULT_SUITE, IdentitySettings
from mlxstacks.studies.identity.suite import Suite, as_items, in_turns, open_suite
from mlxstacks.studies.identity.target import write_target
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.report import versions
from mlxstacks.study.integrity import write_rows
from mlxstacks.study.plan import PLAN, Evidence, Plan, Standing, fix_plan, standing
from mlxstacks.study.provenance import MadeFrom, of_bytes
from mlxstacks.study.run_directory import RunDirectory, recorded_fingerprint, work_path

SPLIT, DATA = "split.json", "data"
_NOT_HASHED = "0" * 64  # of inputs that a plan for another machine cannot see


def run(
    settings: IdentitySettings, *, dry_run: bool = False, progress: Progress | None = None
) -> IdentityReport:
    """Plan, mine, train, fuse, ask, judge; write all of it to `save_path`.

    Raises:
        InputError: model, persona, items, suite or target cannot be used, nothing is left to train
            on, or the work directory holds a run of another plan.
        ResourceLimitError: the guard predicts that the training does not fit.
    """
    if None in (settings.model, settings.persona, settings.items, settings.save_path):
        raise InputError("identity needs model, persona, items and save_path")
    suite = open_suite(settings.suite, settings.persona_card)
    persona, target = user_path(str(settings.persona)), user_path(str(settings.save_path))
    has_adapter = is_adapter(persona, missing_is=True if dry_run else None)
    shown = settings.model_dump(mode="json", exclude={"force", "save_path", "resume"})
    report = IdentityReport(
        "planned", str(target), shown, list(suite_arms(settings, has_adapter)),
        suite_as_json(suite),
    )  # fmt: skip
    if dry_run:
        return IdentityReport(**vars(report) | _planned(settings, suite, has_adapter))
    inputs = [user_path(str(p)) for p in (settings.model, settings.persona, settings.items)]
    if settings.suite not in (None, DEFAULT_SUITE):
        inputs.append(user_path(str(settings.suite)))
    check_target(target, force=settings.force, inputs=[path for path in inputs if path.exists()])
    # Before there is a work directory: inputs that cannot be used leave none to go on with.
    # A quick look has its own: its split and adapters are not those of the whole run.
    of_work = target if settings.limit is None else Path(f"{target}.limit-{settings.limit}")
    prepared = _Identity(settings, suite, work_path(of_work), progress)
    work = RunDirectory(of_work, {"kind": "identity"}, resume=settings.resume)
    try:
        made = prepared.run(report)
        write_target(target, work.path, made, suite, settings)
        work.remove()
    finally:
        work.close()
    return made


def _planned(settings: IdentitySettings, suite: Suite, has_adapter: bool) -> dict[str, Any]:
    """What is known before models and items are looked at; the power does not hang on them."""
    names = ("base", "persona", "tokenizer")
    plan = plan_of(settings, suite, [], dict.fromkeys(names, _NOT_HASHED), has_adapter=has_adapter)
    notes = [] if user_path(str(settings.persona)).exists() else [
        f"{settings.persona} is not here; it is taken for an adapter."
    ]  # fmt: skip
    return {"power": power_lines(plan), "notes": notes}


class WholeProgress:
    """One count over all parts of a run, an answer or a batch of training each."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0
        self._starts: dict[str, int] = {}

    def part(self, size: int, what: str) -> Progress:
        """The callback of the next part, `size` of the whole; its own counts are scaled to that.

        A part that is begun again, as answers that two steps need, adds nothing and says nothing.
        """
        again = what in self._starts
        start = self._starts.setdefault(what, self._done)
        self._done = max(self._done, start + size)

        def step(done: float, total: float, detail: str = "") -> None:
            if self._progress and total and not again:
                self._progress(start + size * done / total, self._total, what)

        return step


class _Identity:
    def __init__(
        self, settings: IdentitySettings, suite: Suite, work: Path, progress: Progress | None
    ) -> None:
        self.settings, self.suite, self.work = settings, suite, work
        self.started = time.monotonic()
        every = read_items(str(settings.items))
        self.planned_items = stratified_sample(every, settings.regression_items, settings.seed)
        self.items = stratified_sample(self.planned_items, settings.most_items, settings.seed)
        self.asked = as_items(in_turns(suite))[: settings.limit]
        self.prompts = {one.prompt_id: one for one in suite}
        base, persona = resolve_model(str(settings.model)), user_path(str(settings.persona))
        self.has_adapter = is_adapter(persona)
        if not self.has_adapter:
            persona = resolve_model(str(settings.persona))
        self.models = Models(settings, work, base, persona, self.has_adapter)
        self.of_items = item_settings(settings)
        total = len(self.asked) * len(suite_arms(settings, self.has_adapter))
        total += len(self.items) * len(item_arms(settings, self.has_adapter))
        self.progress = WholeProgress(progress, total + 2 * (settings.training.iters or 1))
        self.made_from: MadeFrom = {}
        self.replies: dict[str, list[Answer]] = {}
        self.answers: dict[str, list[Answer]] = {}

    def run(self, report: IdentityReport) -> IdentityReport:
        plan = self._plan()
        self._ask_unfused()
        mined = self._mine()
        for name, rank in (
            (FACTUAL, self.settings.train.rank),
            (SECOND, self.settings.second_rank),
        ):
            self._train(name, rank)
        for policy in self.settings.policies:
            self._ask_policy(policy)
        data = data_of(self._hashes(), self.suite, self.planned_items)
        evidence = evidence_of(self.replies, plan.sha256, data, self.settings.seed)
        findings = find(
            # In the plan's order, whatever came first.
            {name: self.replies[name] for name in plan.arms},
            {name: self.answers[name] for name in item_arms(self.settings, self.has_adapter)},
            suite=self.suite, settings=self.settings, has_adapter=self.has_adapter,
            standing=self._standing(plan, evidence),
            is_published_model=has_shape_of(
                open_checkpoint(self.models.base).config, PUBLISHED_MODEL
            ),
        )  # fmt: skip
        fuses, of_fuses = self.models.figures()
        device = memory.device()
        values = vars(report) | {
            "status": "done",
            "plan": plan.as_json(),
            "plan_sha256": plan.sha256,
            "power": power_lines(plan),
            "mined": {"counts": mined.table["all"], "train": len(mined.train)},
            "fuses": fuses,
            "findings": findings,
            "made_from": self.made_from | of_fuses,
            "seconds": time.monotonic() - self.started,
            "versions": versions(),
            "device": f"{device.name} ({device.kind})",
            "notes": [*self._notes(), *flips_note(findings.compared, RERUN)],
        }
        return IdentityReport(**values)

    def _standing(self, plan: Plan, evidence: Evidence) -> Standing:
        """Of a quick look with all that it left out."""
        reasons = list(standing(plan, evidence).reasons)
        planned, answered = len(self.planned_items), len(self.items)
        if answered < planned:
            reasons.append(f"a subset of the regression, {answered} of {planned} items")
        whole, cut = self.settings.train.iters, self.settings.training.iters
        if cut != whole:
            planned_batches = "" if whole is None else f" of {whole}"
            reasons.append(f"factual adapters trained for {cut}{planned_batches} batches")
        return Standing(tuple(reasons))

    # --- before the conditions --------------------------------------------------------------------

    def _plan(self) -> Plan:
        """Fixed before any answer, or found the same."""
        plan = plan_of(
            self.settings,
            self.suite,
            self.planned_items,
            self._hashes(),
            has_adapter=self.has_adapter,
        )
        results = sorted((self.work / "answers").glob("*.jsonl"))
        fix_plan(self.work / PLAN, plan, results)
        self.of_plan = {"plan_sha256": plan.sha256}
        return plan

    def _hashes(self) -> dict[str, str]:
        models, plan = self.models, self.work / PLAN
        found = {
            name: source_sha256(
                path, adapter=is_adapter, recorded=recorded_fingerprint(plan, "data", name)
            )
            for name, path, is_adapter in (
                ("base", models.base, False),
                ("persona", models.persona, self.has_adapter),
            )
        }
        tokenizer = models.base / "tokenizer.json"
        return found | ({"tokenizer": file_sha256(tokenizer)} if tokenizer.is_file() else {})

    def _ask_unfused(self) -> None:
        """The base, and the persona's adapter beside it."""
        base = self.models.base
        adapters = {BASE: None}
        if self.has_adapter:
            adapters[UNFUSED] = self.models.adapter(PERSONA)  # type: ignore[assignment]
        for name, adapter in adapters.items():
            self._ask(name, functools.cache(lambda a=adapter: Arm(base, self.of_items, a)), True)

    def _mine(self) -> Mined:
        """Set G: the items that the base and the persona fused by `persona_requant` get wrong."""
        policy = self.settings.persona_requant
        name = arm(REFERENCE, policy)
        self._ask(name, self._loader(REFERENCE, policy), True)
        mined = mine(
            self.items, self.answers[BASE], self.answers[name],
            train_share=self.settings.train_share, right_items=None, seed=self.settings.seed,
        )  # fmt: skip
        write_json(self.work / SPLIT, mined.as_json())
        self.made_from[SPLIT] = of_bytes((self.work / SPLIT).read_bytes())
        rows = training_rows(mined.train, self.settings.scoring, "right", self.settings.seed)
        data = write_rows(self.work / DATA / "train.jsonl", rows)
        self.made_from[f"{DATA}/train.jsonl"] = of_bytes(data)
        return mined

    def _train(self, name: str, rank: int) -> None:
        """A factual adapter, unless it is there."""
        target = self.work / name
        training = self.settings.training
        progress = self.progress.part(training.iters or 1, f"training {name}")
        if target.exists():
            return
        change = {
            "model": str(self.models.model(REFERENCE, self.settings.persona_requant)),
            "data": str(self.work / DATA), "save_path": str(target), "rank": rank,
            "seed": self.settings.seed,
            "thinking": self.settings.thinking, "allow_special": self.settings.allow_special,
        }  # fmt: skip
        train_run.run(training.model_copy(update=change), progress=progress)
        mx.clear_cache()

    # --- conditions -------------------------------------------------------------------------------

    def _ask_policy(self, policy: str) -> None:
        """Every condition under a policy; the persona's model stays until the last one."""
        kinds = kinds_of(self.has_adapter)
        for kind in (*kinds, *((BASE_ZERO,) if self.has_adapter else ())):
            name = arm(kind, policy)
            loader = self._loader(kind, policy)
            if kind != BASE_ZERO:
                self._ask(name, loader, kind == REFERENCE)
            else:
                self.answers[name] = self._answer_items(name, loader)
            if kind == REFERENCE and policy == self.settings.policies[0]:
                self._ask(RERUN, self._loader(kind, policy), False)
            mx.clear_cache()
            if kind != REFERENCE:
                self.models.drop(kind, policy)
        self.models.drop(REFERENCE, policy)

    def _loader(self, kind: str, policy: str) -> Callable[[], Arm]:
        """A function that fuses and loads an arm when it is first called."""
        return functools.cache(lambda: Arm(self.models.model(kind, policy), self.of_items))

    def _ask(self, name: str, load: Callable[[], Arm], with_items: bool) -> None:
        """An arm's replies to the suite and, for some, its answers to the items."""
        found = self._answered(
            self._file(f"suite_{name}", "suite", name, self.asked), len(self.asked),
            lambda items: ask(load(), items, self.prompts),
        )  # fmt: skip
        check_verdicts(name, found, self.suite)
        self.replies[name] = found
        if with_items:
            self.answers[name] = self._answer_items(name, load)

    def _answer_items(self, name: str, load: Callable[[], Arm]) -> list[Answer]:
        file = self._file(f"items_{name}", "items", name, self.items)
        return self._answered(file, len(self.items), lambda items: load().answer(items))

    def _file(self, stem: str, of: str, name: str, items: Sequence[Item]) -> AnswerFile:
        header = {**self.of_plan, "of": of, "arm": name}
        return AnswerFile(self.work / "answers" / f"{stem}.jsonl", header, items)

    def _answered(self, file: AnswerFile, count: int, answer: AnswerItems) -> list[Answer]:
        progress = self.progress.part(count, file.path.stem.replace("_", " "))
        found = ask_missing(file, count, self.settings.batch_size, answer, progress)
        self.made_from[f"answers/{file.path.name}"] = file.made_from(count)
        return found

    def _notes(self) -> list[str]:
        settings = self.settings
        trained = (
            f"The factual adapters were trained on the persona fused by {settings.persona_requant} "
            "and are the same under all policies; under each the persona itself was fused by that "
            "policy first."
        )
        notes = [trained]
        if not self.has_adapter:
            notes.append(
                "The persona was given as a model: it is the same under all policies, there is no "
                "persona beside the base, no second identity fuse and no zero-delta fuse of the "
                "base."
            )
        return notes
