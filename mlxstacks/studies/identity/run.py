"""`mlxstacks identity`: does a persona survive a second adapter that is fused after it?

Conditions of the study and our controls answer a suite of prompts, under each policy of fusing;
base and persona answer broad and narrow items too. Factual adapters are trained on items that base
and persona both get wrong, on the model that they are fused into; the second persona adapter on the
persona's rows and the fused persona. Until it is done the run lives in its work directory
(study/engine.py):

    answers/        suite_ARM, items_ARM and narrow_ARM.jsonl, appended as they come; changed ones
                    are refused
    split.json      which item went where; data/train.jsonl the factual training rows
    factual/ factual_second/ factual_stress/ base_factual/ again/   the adapters
    models/ARM      a fused model, until it has answered; fuse/ARM.json what the fuse did
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxstacks.arms.arm import Arm, Persona, check_persona, is_adapter, training_rows
from mlxstacks.arms.set_g import mine
from mlxstacks.arms.settings import DEFAULT_SUITE
from mlxstacks.arms.suite import (
    Suite,
    as_items,
    check_verdicts,
    in_turns,
    judged,
    open_suite,
    suite_of,
    suite_text,
)
from mlxstacks.errors import InputError
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.adapters import WEIGHTS
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import has_shape_of
from mlxstacks.files.outputs import PLACES, write_json
from mlxstacks.files.settings import AdapterConvertSettings
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.studies.identity.analysis import analyse, flips_note, verdict
from mlxstacks.studies.identity.plan import (
    AGAIN,
    BASE,
    BASE_FACTUAL,
    BASE_ZERO,
    CONDITIONS,
    FACTUAL,
    PERSONA,
    REFERENCE,
    RERUN,
    SECOND,
    STRESS,
    UNFUSED,
    adapter_of,
    arm,
    data_of,
    item_arms,
    kinds_of,
    plan_of,
    power_lines,
    suite_arms,
    trained,
    training_of,
)
from mlxstacks.studies.identity.report import blocks, outcome_of, plan_table
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.setup import check_targets
from mlxstacks.study.answer_log import AnswerLog, Progress
from mlxstacks.study.answers import Answer, AnswerFile, read_answers
from mlxstacks.study.document import RESULT, Standing
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.integrity import file_sha256, read_sealed, write_rows, write_sealed
from mlxstacks.study.items import Item, read_items, stratified_sample
from mlxstacks.study.plan import PLAN, Evidence, read_plan, standing
from mlxstacks.study.progress import WholeProgress
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import (
    RECIPE,
    discard,
    recorded_fingerprint,
    work_path,
    write_recipe,
)

ABOUT = {
    "kind": "identity",
    "title": "Identity",
    "question": "Does the persona survive a second adapter?",
}
ANSWERS, DATA, FUSE, MODELS = "answers", "data", "fuse", "models"
ADAPTERS = (FACTUAL, AGAIN, SECOND, STRESS, BASE_FACTUAL)
# Multiple-choice items of ours, close to identity.
NARROW = Path(__file__).resolve().parents[2] / "assets" / "identity-adjacent.jsonl"
SPLIT, SUITE = "split.json", "suite.json"
PUBLISHED_MODEL = "qwen3.5-35b-a3b-3bit"
_KEPT_FIGURES = ("total", "extra_bytes", "verdict", "zero_delta")
_NOT_HASHED = "0" * 64  # of inputs that a plan for another machine cannot see


def run(
    settings: IdentitySettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Plan, mine, train, fuse, ask, judge; write all of it to `save_path`.

    Raises:
        InputError: model, persona, items, suite or target cannot be used, nothing is left to train
            on, or the work directory holds a run of another plan.
        ResourceLimitError: the guard predicts that the training does not fit.
    """
    if None in (settings.model, settings.persona, settings.items, settings.save_path):
        raise InputError("identity needs model, persona, items and save_path")
    return run_study(_Identity(settings, progress, dry_run), dry_run=dry_run, progress=progress)


def _rows_sha256(source: str) -> str:
    """Of a file, or of the files of a directory. Raises: InputError where there are none."""
    path = user_path(source)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.is_file())
    if not files:
        raise InputError(f"{path}: persona_data needs a file of rows, or a directory with some")
    return json_sha256({file.name: file_sha256(file) for file in files})


class _Identity(Study):
    provenance = (f"{ANSWERS}/*.jsonl", f"{FUSE}/*.json", f"{DATA}/*.jsonl", SPLIT, SUITE)
    settings: IdentitySettings

    def __init__(
        self, settings: IdentitySettings, progress: Progress | None, dry_run: bool
    ) -> None:
        self.settings, self.dry_run = settings, dry_run
        self.suite = open_suite(settings.suite, settings.persona_card)
        suite = None if settings.suite == DEFAULT_SUITE else settings.suite
        self.narrow_source = settings.narrow_items or settings.items
        if self.narrow_source == DEFAULT_SUITE:
            self.narrow_source = str(NARROW)
        self.inputs = (
            settings.model, settings.persona, settings.persona_data, settings.items,
            self.narrow_source, suite,
        )  # fmt: skip
        parts = (ANSWERS, DATA, FUSE, *ADAPTERS, SPLIT, SUITE, RECIPE)
        self.artifacts = (*parts, MODELS) if settings.keep_models else parts
        # The split and the adapters of a quick look are not those of the whole run.
        part = "" if settings.max_prompts is None else f".limit-{settings.max_prompts}"
        self.part = "" if str(settings.save_path).endswith(part) else part
        self._progress = progress

    # --- before the first answer ------------------------------------------------------------------

    def planned(self) -> Result:
        settings, persona = self.settings, user_path(str(self.settings.persona))
        check_persona(str(settings.model), str(settings.persona))
        for train in (settings.train, *([settings.persona_train] if settings.persona_data else [])):
            check_targets(str(settings.model), train)
        # A plan for another machine takes a persona that is not here for an adapter.
        self.has_adapter = is_adapter(persona) or (self.dry_run and not persona.exists())
        self.suite_arms = suite_arms(settings, self.has_adapter)
        self.item_arms = item_arms(settings, self.has_adapter)
        self.trained = trained(settings, self.has_adapter)
        prompts = [prompt.as_json() for prompt in self.suite]
        head = Result(
            **ABOUT, status="planned", standing=Standing(status="planned"),
            settings=settings.model_dump(mode="json", exclude=PLACES),
            data={"planned_arms": list(self.suite_arms), "suite": prompts},
            blocks=(plan_table(settings, self.suite, self.suite_arms),),
        )  # fmt: skip
        if self.dry_run:
            # No model is looked at, and of items that are here only whether they can be read.
            if user_path(str(settings.items)).is_file():
                read_items(str(settings.items))
            hashes = dict.fromkeys(("base", "persona", "tokenizer"), _NOT_HASHED)
            plan = plan_of(settings, self.suite, [], hashes, has_adapter=self.has_adapter)
            missing = f"{settings.persona} is not here; it is taken for an adapter."
            notes = () if persona.exists() else (missing,)
            return head.model_copy(update={"power": tuple(power_lines(plan)), "notes": notes})
        every = read_items(str(settings.items))
        self.planned_items = stratified_sample(every, settings.regression_items, settings.seed)
        self.items = stratified_sample(self.planned_items, settings.most_items, settings.seed)
        self.planned_narrow: list[Item] = []
        if settings.has_narrow:
            self.planned_narrow = read_items(str(self.narrow_source), settings.narrow_subjects)
        self.asked = {
            "suite": as_items(in_turns(self.suite))[: settings.max_prompts],
            "items": self.items,
            "narrow": stratified_sample(self.planned_narrow, settings.most_items, settings.seed),
        }
        self.prompts = {prompt.prompt_id: prompt for prompt in self.suite}
        self.source = Persona(str(settings.model), str(settings.persona))
        asked = {of: len(items) for of, items in self.asked.items()}
        total = asked["suite"] * len(self.suite_arms)
        total += (asked["items"] + asked["narrow"]) * len(self.item_arms)
        total += sum(training_of(name, settings).iters or 1 for name in self.trained)
        self.progress = WholeProgress(self._progress, total)
        self.plan = plan_of(
            settings, self.suite, self.planned_items, self._hashes(), narrow=self.planned_narrow,
            has_adapter=self.has_adapter,
        )  # fmt: skip
        power = tuple(power_lines(self.plan))
        on_persona = (
            "Second adapters were trained on the persona fused by "
            f"{settings.persona_requant} (that of base + factual on the base) and are the same "
            "under all policies; under each the persona itself was fused by that policy first."
        )
        given = (
            "The persona was given as a model: it is the same under all policies, and there is no "
            "unfused persona and no zero-delta fuse of the base."
        )
        return head.model_copy(
            update={
                "plan": self.plan.as_json(), "power": power,
                "notes": (on_persona,) if self.has_adapter else (on_persona, given),
            }
        )  # fmt: skip

    def _hashes(self) -> dict[str, str]:
        plan = work_path(self.work_target) / PLAN
        recorded = functools.partial(
            recorded_fingerprint, plan, "data", resume=self.settings.resume
        )
        hashes = self.source.hashes(recorded, "persona")
        rows = self.settings.persona_data
        return hashes | ({"persona_data": _rows_sha256(rows)} if rows is not None else {})

    # --- steps: each resumes by what lies in the work directory -----------------------------------

    def steps(self, work: Path) -> Iterator[Step]:
        self.work = work
        yield Step("base and persona", self._ask_unfused)
        yield Step("mining", self._mine)
        for name in self.trained:
            yield Step(name, functools.partial(self._train, name))
        for policy in self.settings.policies:
            yield Step(policy, functools.partial(self._ask_policy, policy))

    def _ask_unfused(self, work: Path) -> None:
        """The base, and the persona's adapter beside it."""
        (work / SUITE).write_text(suite_text(self.suite), encoding="utf-8")
        write_recipe(work, "identity", self.settings)
        adapters: dict[str, Path | None] = {BASE: None}
        if self.has_adapter:
            adapters[UNFUSED] = self._adapter(PERSONA)
        for name, adapter in adapters.items():
            load = functools.cache(functools.partial(Arm, self.source.base, self.settings, adapter))
            for of in self.asked:
                self._ask(of, name, load)

    def _mine(self, work: Path) -> None:
        """Set G: the items that the base and the persona fused by `persona_requant` get wrong."""
        policy, seed = self.settings.persona_requant, self.settings.seed
        name, load = arm(REFERENCE, policy), self._loader(REFERENCE, policy)
        self._ask("suite", name, load)
        persona = self._ask("items", name, load)
        mined = mine(
            self.items, self._file("items", BASE).answers(), persona,
            train_share=self.settings.train_share, right_items=None, seed=seed,
        )  # fmt: skip
        write_json(work / SPLIT, mined.as_json())
        rows = training_rows(mined.train, self.settings.scoring, "right", seed)
        write_rows(work / DATA / "train.jsonl", rows)

    def _train(self, name: str, work: Path) -> None:
        """An adapter, on the model that it is fused into, unless it is there."""
        settings, training = self.settings, training_of(name, self.settings)
        progress = self.progress.part(training.iters or 1, f"training {name}")
        if (work / name).exists():
            return
        model = self.source.base
        if CONDITIONS[name].source != BASE:
            model = self._model(REFERENCE, settings.persona_requant)
        change = {
            "model": str(model), "save_path": str(work / name),
            "data": settings.persona_data if name == AGAIN else str(work / DATA),
            "seed": settings.seed, "thinking": settings.thinking,
            "allow_special": settings.allow_special,
        }  # fmt: skip
        train_run.run(training.model_copy(update=change), progress=progress)
        mx.clear_cache()

    def _ask_policy(self, policy: str, work: Path) -> None:
        """Every condition under a policy; the persona's model stays until the last one."""
        kinds = kinds_of(self.settings, self.has_adapter)
        for kind in (*kinds, *((BASE_ZERO,) if self.has_adapter else ())):
            name, load = arm(kind, policy), self._loader(kind, policy)
            if kind != BASE_ZERO:
                self._ask("suite", name, load)
            if kind in (REFERENCE, BASE_ZERO):
                self._ask("items", name, load)
                self._ask("narrow", name, load)
            if kind == REFERENCE and policy == self.settings.policies[0]:
                self._ask("suite", RERUN, self._loader(kind, policy))
            mx.clear_cache()
            if kind != REFERENCE:
                self._drop(kind, policy)
        self._drop(REFERENCE, policy)

    def _loader(self, kind: str, policy: str) -> Callable[[], Arm]:
        """A function that fuses and loads an arm when it is first called."""
        return functools.cache(lambda: Arm(self._model(kind, policy), self.settings))

    def _ask(self, of: str, name: str, load: Callable[[], Arm]) -> list[Answer]:
        """An arm's replies to the suite, or its answers to items: what is missing is asked."""
        file = self._file(of, name)
        if not file.items:
            return []
        progress = self.progress.part(len(file.items), file.path.stem.replace("_", " "))

        def answer(items: Sequence[Item]) -> Sequence[Answer]:
            if of != "suite":
                return load().answer(items)
            replies = load().replies([item.question for item in items])
            return [
                judged(self.prompts[item.item_id], reply)
                for item, reply in zip(items, replies, strict=True)
            ]

        answers = file.complete(len(file.items), self.settings.batch_size, answer, progress)
        if of == "suite":
            check_verdicts(name, answers, self.suite)
        return answers

    def _file(self, of: str, name: str) -> AnswerFile:
        header = {"plan_sha256": self.plan.sha256, "of": of, "arm": name}
        return AnswerFile(self.work / ANSWERS / f"{of}_{name}.jsonl", header, self.asked[of])

    # --- models -----------------------------------------------------------------------------------

    def _adapter(self, name: str) -> Path:
        """The persona's, or one that was trained. A PEFT persona is written in mlx-lm's format
        first, the only one that can run beside the base.
        """
        if name != PERSONA:
            return self.work / name
        assert self.source.adapter is not None
        if (self.source.adapter / WEIGHTS).is_file():
            return self.source.adapter
        converted = self.work / "persona_mlx"
        if not converted.exists():
            convert_adapter(
                AdapterConvertSettings(
                    adapter_path=str(self.source.adapter), save_path=str(converted), to="mlx",
                    model=str(self.source.base),
                )
            )  # fmt: skip
        return converted

    def _model(self, kind: str, policy: str) -> Path:
        """The model of a condition, fused when it is first needed: of a second adapter from the
        persona's model of the same policy. What the fuse did is kept when the model goes.
        """
        if kind == REFERENCE and not self.has_adapter:
            return self.source.speaker
        condition, name = CONDITIONS[kind], arm(kind, policy)
        target, onto_base = self.work / MODELS / name, condition.source == BASE
        adapter = adapter_of(kind, self.settings)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            fuse(
                FuseSettings(
                    model=str(self.source.base if onto_base else self._model(REFERENCE, policy)),
                    adapter_path=(str(self._adapter(adapter)),),
                    save_path=str(target),
                    requant=policy,
                    zero_delta=condition.zero,
                    target_correlation=self.settings.target_correlation,
                    # The conditions are fuses onto other models than the adapters were trained on.
                    allow_base=adapter != PERSONA or not onto_base,
                    seed=self.settings.seed,
                )
            )
        figures = self.work / FUSE / f"{name}.json"
        if not figures.is_file():
            result = read_object((target / RESULT).read_bytes())
            report = result["data"] | {"verdict": result["verdict"]}
            write_sealed(figures, {key: report[key] for key in _KEPT_FIGURES})
        return target

    def _drop(self, kind: str, policy: str) -> None:
        """Remove a model that has answered, unless models are kept."""
        if not self.settings.keep_models:
            discard(self.work / MODELS / arm(kind, policy))

    # --- the conclusion ---------------------------------------------------------------------------

    def conclude(self, work: Path) -> Result:
        settings = self.settings
        replies = {name: self._file("suite", name).answers() for name in self.plan.arms}
        answers = {name: self._file("items", name).answers() for name in self.item_arms}
        narrow = {name: self._file("narrow", name).answers() for name in self.item_arms}
        for name, given in replies.items():
            check_verdicts(name, given, self.suite)
        reached = self._standing(replies)
        config = open_checkpoint(self.source.base).config
        return _concluded(
            settings, work, self.suite, replies, answers, narrow, self.has_adapter, reached,
            has_shape_of(config, PUBLISHED_MODEL),
        )  # fmt: skip

    def _standing(self, replies: Mapping[str, Sequence[Answer]]) -> Standing:
        """Of a quick look with all that it left out."""
        data = data_of(self._hashes(), self.suite, self.planned_items, self.planned_narrow)
        items = {name: [reply.item_id for reply in given] for name, given in replies.items()}
        evidence = Evidence(self.plan.sha256, items, data, (self.settings.seed,))
        reasons = list(standing(self.plan, evidence).reasons)
        for of, planned in (("regression", self.planned_items), ("narrow", self.planned_narrow)):
            answered = len(self.asked["items" if of == "regression" else of])
            if answered < len(planned):
                reasons.append(f"a subset of the {of} items, {answered} of {len(planned)}")
        whole_settings = self.settings.model_copy(update={"max_prompts": None})
        cut: dict[str, list[str]] = {}
        for name in self.trained:
            iters, whole = (training_of(name, s).iters for s in (self.settings, whole_settings))
            if iters != whole:
                batches = f"{iters}{'' if whole is None else f' of {whole:,}'} batches"
                cut.setdefault(batches, []).append(name)
        reasons += [f"{', '.join(names)} trained for {n}" for n, names in cut.items()]
        return Standing.of(reasons)


def _concluded(
    settings: IdentitySettings, work: Path, suite: Suite, replies: Mapping[str, Sequence[Answer]],
    answers: Mapping[str, Sequence[Answer]], narrow: Mapping[str, Sequence[Answer]],
    has_adapter: bool, reached: Standing, is_published_model: bool,
) -> Result:  # fmt: skip
    split = read_object((work / SPLIT).read_bytes())
    figures: dict[str, Any] = {
        "planned_arms": list(suite_arms(settings, has_adapter)),
        "suite": [prompt.as_json() for prompt in suite],
        "mined": {"counts": split["table"]["all"], "train": len(split["train"])},
        "fuses": {
            file.stem: read_sealed(file, "--no-resume starts again")[0]
            for file in sorted((work / FUSE).glob("*.json"))
        },
        **analyse(
            replies, answers, narrow=narrow, suite=suite, settings=settings,
            has_adapter=has_adapter, standing=reached, is_published_model=is_published_model,
        ),
    }  # fmt: skip
    return Result(
        **ABOUT, status="done", outcome=outcome_of(figures),
        verdict=verdict(figures, settings, reached), data=figures, blocks=blocks(figures),
        standing=reached, notes=flips_note(figures["compared"]),
    )  # fmt: skip


def conclude_again(result: Result, directory: Path) -> Result:
    """What follows from the replies and answers that lie in a finished run. Suite and standing are
    those of its result.

    Raises: InputError for a missing or changed file.
    """
    settings = IdentitySettings.model_validate(result.settings)
    plan = read_plan(directory / PLAN)
    suite = suite_of(result.data["suite"], "the suite in the result")
    has_adapter = UNFUSED in plan.arms

    def read(of: str, names: Iterable[str]) -> dict[str, list[Answer]]:
        header = {"plan_sha256": plan.sha256, "of": of}
        files = {name: directory / ANSWERS / f"{of}_{name}.jsonl" for name in names}
        logs = {name: AnswerLog(path, {**header, "arm": name}) for name, path in files.items()}
        return {name: read_answers(log) for name, log in logs.items()}

    replies = read("suite", plan.arms)
    for name, given in replies.items():
        check_verdicts(name, given, suite)
    of_items = item_arms(settings, has_adapter)
    return _concluded(
        settings, directory, suite, replies, read("items", of_items), read("narrow", of_items),
        has_adapter, Standing.of(result.standing.reasons), bool(result.data["published"]),
    )  # fmt: skip
