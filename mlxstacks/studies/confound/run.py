"""`mlxstacks confound`: does an adapter that is fused into a quantized persona model add knowledge?

Mines what base and persona both get wrong, trains on a part of it, and lets every arm answer the
rest. Until it is done the run lives in its work directory (study/engine.py):

    protocol.json   everything that is decided before the first answer; another one is refused
    answers/        of every model and arm, appended as they come; changed ones are refused
    split.json      which item went where; data/, data-shuffled/ the rows to train on
    plan.json       the plan, fixed before the first arm answers
    adapter/ zero/ random/ shuffled/   A1, its zero-delta control, a random delta of equal norm, and
                    an adapter that was trained alike on the same rows with shuffled answers
    matched/WAY/    the random delta at the scale at which it moves as many answers as A1
    fuse/POLICY.json what a policy's fuses did to the weights; models/ until they have answered
    fuse/moved_WAY.json  the search for that scale
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxstacks.arms.arm import Arm, Persona, in_second_form, training_rows
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
    suite_sha256,
)
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.outputs import PLACES, write_json
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.studies.confound.analysis import flips, suite_figures
from mlxstacks.studies.confound.fuses import fuse_alike, fuse_all, write_controls, write_scaled
from mlxstacks.studies.confound.lengths import length_notes, row_lengths
from mlxstacks.studies.confound.matching import MOST_PROBES, Probe, closest, next_scale, saturated
from mlxstacks.studies.confound.plan import (
    AGAIN,
    BASE,
    PERSONA,
    SECOND,
    arm,
    arms_of,
    data_of,
    form_arms_of,
    plan_of,
    protocol_of,
    right_arms_of,
    suite_arms_of,
)
from mlxstacks.studies.confound.report import OUTCOMES, blocks, plan_table
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import (
    Criterion,
    Findings,
    answer_notes,
    find,
    fuse_notes,
    verdict,
)
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.setup import check_targets
from mlxstacks.study import document
from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.answers import Answer, AnswerFile, Progress, read_answers
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.integrity import file_sha256, read_sealed, write_rows, write_sealed
from mlxstacks.study.items import Item, read_items, stratified_sample
from mlxstacks.study.plan import PLAN, Evidence, Plan, fix_plan, keep_plan, read_plan, standing
from mlxstacks.study.power import items_for_two_proportions
from mlxstacks.study.progress import WholeProgress
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import (
    RECIPE,
    discard,
    recorded_fingerprint,
    work_path,
    write_recipe,
)

ABOUT = {
    "kind": "confound",
    "title": "Stacking confound",
    "question": "Does fusing a second adapter add knowledge, or only jitter?",
}
PROTOCOL, SPLIT = "protocol.json", "split.json"
ANSWERS, DATA, FUSE = "answers", "data", "fuse"
PERSONA_MODEL, MODELS = "persona", "models"
ADAPTER, ZERO, RANDOM, SHUFFLED = "adapter", "zero", "random", "shuffled"
MATCHED, DATA_SHUFFLED = "matched", f"{DATA}-{SHUFFLED}"
ADAPTERS = {"a1": ADAPTER, "a0": ZERO, "random": RANDOM, "shuffled": SHUFFLED}


def run(
    settings: ConfoundSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Mine, split, plan, train, fuse, evaluate, decide; write all of it to `save_path`.

    Raises:
        InputError: model, persona, items or target cannot be used, nothing is left to test on, or
            the work directory holds a run of another protocol.
        ResourceLimitError: the guard predicts that the training does not fit.
    """
    if None in (settings.model, settings.persona, settings.items, settings.save_path):
        raise InputError("confound needs model, persona, items and save_path")
    return run_study(_Confound(settings, progress, dry_run), dry_run=dry_run, progress=progress)


def planned_power(settings: ConfoundSettings) -> tuple[str, ...]:
    """What can be said of power before Set G is mined."""
    claims = len(settings.ways)
    alpha, gain = settings.alpha / claims, settings.least_gain
    if not 0 < gain < 1 - settings.expected_rate:
        return ()
    needed = items_for_two_proportions(settings.expected_rate, gain, alpha=alpha)
    words = (
        f"{needed:,} test items an arm find {100 * gain:g} points at 80% power, alpha {alpha:.4g} "
        f"for each of {claims} claims; how many there are is known once Set G is mined"
    )
    return (words,)


def _not_limited(settings: ConfoundSettings) -> tuple[str, ...]:
    """What `limit` leaves at its size."""
    if settings.limit is None:
        return ()
    items = "every item" if settings.sample is None else f"up to {settings.sample:,} items"
    note = (
        f"limit {settings.limit} cuts the answers of the arms alone. Not mining, where base and "
        f"persona answer {items} each (--sample N cuts it), and not training, "
        f"{settings.train.iters} batches (--set train.iters=N)."
    )
    return (note,)


class _Confound(Study):
    provenance = (PROTOCOL, SPLIT, f"{ANSWERS}/*.jsonl", f"{FUSE}/*.json", f"{DATA}*/*.jsonl")
    settings: ConfoundSettings

    def __init__(
        self, settings: ConfoundSettings, progress: Progress | None, dry_run: bool
    ) -> None:
        self.settings, self.progress, self.dry_run = settings, progress, dry_run
        self.suite: Suite = ()
        if settings.has_suite:
            self.suite = open_suite(settings.suite, settings.persona_card)
        self.prompts = {prompt.prompt_id: prompt for prompt in self.suite}
        self.suite_items = as_items(in_turns(self.suite))
        suite = None if settings.suite == DEFAULT_SUITE else settings.suite
        self.inputs = (settings.model, settings.persona, settings.items, suite)
        self.plot_formats = FORMATS if settings.plots else ()
        models = (PERSONA_MODEL, MODELS) if settings.keep_models else ()
        self.artifacts = (
            ANSWERS, DATA, DATA_SHUFFLED, FUSE, *ADAPTERS.values(), MATCHED, PROTOCOL, SPLIT,
            RECIPE, *models,
        )  # fmt: skip

    # --- before the first answer ------------------------------------------------------------------

    def planned(self) -> Result:
        settings = self.settings
        check_targets(str(settings.model), settings.train)
        shown = settings.model_dump(mode="json", exclude=PLACES)
        head = Result(
            **ABOUT, status="planned", standing=document.Standing(status="planned"),
            settings=shown, data={"planned_arms": list(arms_of(settings))},
        )  # fmt: skip
        if self.dry_run:
            table = plan_table(shown, arms_of(settings))
            return head.model_copy(
                update={
                    "power": planned_power(settings), "blocks": (table,),
                    "notes": _not_limited(settings),
                }
            )  # fmt: skip
        self.sample = stratified_sample(
            read_items(str(settings.items), settings.subjects), settings.sample, settings.seed
        )
        self.source = Persona(str(settings.model), str(settings.persona))
        hashes = self.source.hashes(
            functools.partial(
                recorded_fingerprint, work_path(self.work_target) / PROTOCOL, "hashes",
                resume=settings.resume,
            ),
            "persona_adapter" if self.source.adapter else "persona",
        )  # fmt: skip
        if self.suite:
            hashes |= {"suite": suite_sha256(self.suite)}
        self.protocol = protocol_of(settings, hashes, self.sample)
        self.lengths = row_lengths(self.sample, settings, self.source.speaker)
        return head

    # --- steps: each resumes by what lies in the work directory -----------------------------------

    def steps(self, work: Path) -> Iterator[Step]:
        self.work = work
        self.whole = self._whole()
        yield Step("protocol", self._prepare)
        yield Step("mining", self._mine)
        yield Step("plan", self._plan)
        yield Step("training", self._train)
        if self.suite:
            yield Step(BASE, lambda _: self._ask(BASE, self.source.base))
        for name in (PERSONA, AGAIN):
            yield Step(name, lambda _, name=name: self._ask(name, self.persona))  # type: ignore[misc]
        yield Step(SECOND, self._ask_second)
        for way in self.settings.ways:
            run_way = self._ask_unfused if way == "unfused" else self._ask_fused
            yield Step(way, functools.partial(run_way, way))
            yield Step(arm("moved", way), functools.partial(self._ask_matched, way))

    def _whole(self) -> WholeProgress:
        """Of answers and of batches of training. How many items Set G has to test on is not known
        before it is mined: half of the sample's part for tests stands for it.
        """
        settings, arms = self.settings, arms_of(self.settings)
        tested = max(1, int(len(self.sample) * (1 - settings.train_share) / 2))
        self.tested = min(settings.limit or tested, tested)
        files = len(arms) + (len(right_arms_of(settings)) if settings.right_items else 0)
        files += len(suite_arms_of(settings)) + len(form_arms_of(settings))
        # A search is shorter than its most probes; half of them stand for it.
        self.search = settings.probe_items * MOST_PROBES // 2
        total = 2 * len(self.sample) + 2 * (settings.train.iters or 1) + files * self.tested
        total += len(settings.ways) * self.search
        return WholeProgress(self.progress, total)

    def _prepare(self, work: Path) -> None:
        # Before the persona is fused: a run that resumes must not take another one's for its own.
        keep_plan(work / PROTOCOL, self.protocol, "a confound run")
        write_recipe(work, "confound", self.settings)
        self.persona = self.source.speaker
        if self.source.adapter:
            self.persona = work / PERSONA_MODEL
            if not self.persona.exists():
                fuse(
                    FuseSettings(
                        model=str(self.source.base), adapter_path=(str(self.source.adapter),),
                        save_path=str(self.persona), requant=self.settings.persona_requant,
                        target_correlation=self.settings.target_correlation,
                        seed=self.settings.seed,
                    )
                )  # fmt: skip
        recorded = recorded_fingerprint(work / PLAN, "data", "persona_model")
        self.persona_sha256 = fingerprint(open_checkpoint(self.persona), recorded)

    def _mine(self, work: Path) -> None:
        """Set G, from the answers of base and persona to the sample."""
        for name, model in (("base", self.source.base), (PERSONA, self.persona)):
            self._complete([(self._mining_file(name), len(self.sample))], model, len(self.sample))
        answers = (self._mining_file(name).answers() for name in ("base", PERSONA))
        self.mined = mine(
            self.sample, *answers, train_share=self.settings.train_share,
            right_items=self.settings.right_items, seed=self.settings.seed,
        )  # fmt: skip
        write_json(work / SPLIT, self.mined.as_json())

    def _mining_file(self, name: str) -> AnswerFile:
        header = {"of": "mining", "protocol_sha256": json_sha256(self.protocol), "arm": name}
        return AnswerFile(self.work / ANSWERS / f"mining_{name}.jsonl", header, self.sample)

    def _complete(
        self,
        files: Iterable[tuple[AnswerFile, int]],
        model: Path,
        size: int,
        adapter: Path | None = None,
        answer: Callable[[Arm, Sequence[Item]], Sequence[Answer]] | None = None,
    ) -> None:
        """Of each file the first so many; the model is loaded only where some are missing. size: of
        each in the whole run's progress, 0 for parts of a part. answer: by default `Arm.answer`; to
        the suite an arm replies.
        """
        load = functools.cache(functools.partial(Arm, model, self.settings, adapter))
        for file, count in files:
            progress = self.whole.part(size, file.path.stem.replace("_", " ")) if size else None
            respond = self._reply if file.items is self.suite_items else answer or Arm.answer
            ask = functools.partial(_respond, respond, load)
            file.complete(count, self.settings.batch_size, ask, progress)

    def _reply(self, arm: Arm, items: Sequence[Item]) -> list[Answer]:
        """An arm's replies to prompts of the suite, judged."""
        replies = arm.replies([item.question for item in items])
        return [judged(self.prompts[i.item_id], r) for i, r in zip(items, replies, strict=True)]

    def _plan(self, work: Path) -> None:
        """Writes the training rows and the plan, or finds the same ones written."""
        settings = self.settings
        for name, shuffle in ((DATA, False), (DATA_SHUFFLED, True)):
            rows = training_rows(
                self.mined.train, settings.scoring, settings.train_answers, settings.seed,
                shuffle=shuffle,
            )  # fmt: skip
            write_rows(work / name / "train.jsonl", rows)
        data = data_of(self.mined, self.protocol, _rows_sha256(work), self.persona_sha256)
        self.plan = plan_of(settings, self.mined, data)
        fix_plan(work / PLAN, self.plan, sorted((work / ANSWERS).glob("test_*.jsonl")))

    def _train(self, work: Path) -> None:
        """A1 and its controls."""
        for adapter, rows in ((ADAPTER, DATA), (SHUFFLED, DATA_SHUFFLED)):
            self._train_one(work / adapter, work / rows)
        write_controls(work / ADAPTER, work / ZERO, work / RANDOM, self.settings.seed)

    def _train_one(self, adapter: Path, rows: Path) -> None:
        if adapter.exists():
            return
        settings = self.settings
        change = {
            "model": str(self.persona), "data": str(rows), "save_path": str(adapter),
            "seed": settings.seed, "thinking": settings.thinking,
            "allow_special": settings.allow_special,
        }  # fmt: skip
        progress = self.whole.part(settings.train.iters or 1, f"training {adapter.name}")
        train_run.run(settings.train.model_copy(update=change), progress=progress)
        mx.clear_cache()

    def _ask_second(self, work: Path) -> None:
        """The persona's second choices: where it would go, were it pushed a little."""
        for part, file in self._files(SECOND).items():
            persona, _ = self._files(PERSONA)[part]
            first = {answer.item_id: answer for answer in persona.answers()}

            def answer(
                model: Arm, items: Sequence[Item], first: Mapping[str, Answer] = first
            ) -> list[Answer]:
                return model.second_choices(items, [first[item.item_id] for item in items])

            self._complete([file], self.persona, self.tested, answer=answer)

    def _ask_unfused(self, way: str, work: Path) -> None:
        for kind, adapter in ADAPTERS.items():
            self._ask(arm(kind, way), self.persona, work / adapter)

    def _ask_fused(self, way: str, work: Path) -> None:
        """Fuse, unless every answer of it is there, and let the models answer."""
        settings, path = self.settings, work / FUSE / f"{way}.json"
        models = {arm(kind, way): work / MODELS / way / kind for kind in ADAPTERS}
        if not (path.is_file() and all(self._done(name, at) for name, at in models.items())):
            adapters = {kind: work / ADAPTERS[kind] for kind in ADAPTERS if kind != "a0"}
            figures = fuse_all(
                self.persona, adapters, work / MODELS / way, cast("PolicyName", way),
                settings.target_correlation, settings.seed,
            )  # fmt: skip
            write_sealed(path, figures)
        for name, model in models.items():
            self._ask(name, model)

    def _done(self, name: str, model: Path) -> bool:
        """Whether an arm has answered all, or what it needs to is there."""
        files = self._files(name).values()
        return model.exists() or all(len(file.answers()) >= count for file, count in files)

    def _ask_matched(self, way: str, work: Path) -> None:
        """Search the scale at which the random delta moves as many answers as A1, and let it
        answer; the way's models go.
        """
        settings, name, models = self.settings, arm("moved", way), work / MODELS / way
        target, probes = self._search(way, work)
        scale, path = closest(target, probes).scale, work / FUSE / f"moved_{way}.json"
        adapter = work / MATCHED / way
        model = adapter if way == "unfused" else models / "moved"
        if not (path.is_file() and self._done(name, model)):
            figures = self._write_scaled(way, scale, adapter, model, work)
            tried = [asdict(probe) for probe in probes]
            write_sealed(path, {"target": target, "scale": scale, "probes": tried, "fuse": figures})
        if way == "unfused":
            self._ask(name, self.persona, adapter)
        else:
            self._ask(name, model)
        if way == "unfused" or not settings.keep_models:
            discard(models)

    def _search(self, way: str, work: Path) -> tuple[float, list[Probe]]:
        """The share of the test's answers that A1 moves; what the random delta moves by scale, of
        items to train on, which it has never met.
        """
        settings, models = self.settings, work / MODELS / way
        moved = flips(self._answers(PERSONA), self._answers(arm("a1", way)))
        target = moved.changed / moved.n
        before, items = self._mining_file(PERSONA).answers(), self.mined.train
        items = items[: settings.probe_items]
        progress = self.whole.part(self.search, f"matching {way}")
        probes: list[Probe] = []
        while (scale := next_scale(target, probes)) is not None:
            progress(len(probes), MOST_PROBES)
            number = len(probes) + 1
            header = {
                "plan_sha256": self.plan.sha256, "of": f"probe {number}",
                "arm": arm("moved", way), "scale": scale,
            }  # fmt: skip
            file = AnswerFile(work / ANSWERS / f"probe_{way}_{number}.jsonl", header, items)
            if len(file.answers()) < len(items):
                adapter, model = models / "probe_adapter", models / "probe"
                self._write_scaled(way, scale, adapter, model, work)
                if way == "unfused":
                    self._complete([(file, len(items))], self.persona, 0, adapter)
                else:
                    self._complete([(file, len(items))], model, 0)
                mx.clear_cache()
            found = flips(before, file.answers())
            probes.append(Probe(scale, found.changed, found.n))
        return target, probes

    def _write_scaled(
        self, way: str, scale: float, adapter: Path, model: Path, work: Path
    ) -> dict[str, Any] | None:
        """The random delta at a scale; by a policy fused too, with A1's decisions."""
        settings = self.settings
        discard(adapter)
        write_scaled(work / RANDOM, adapter, scale)
        if way == "unfused":
            return None
        bits = read_sealed(work / FUSE / f"{way}.json")[0]["bits_of_a1"]
        return fuse_alike(
            self.persona, adapter, model, cast("PolicyName", way), settings.target_correlation,
            settings.seed, bits,
        )  # fmt: skip

    def _answers(self, name: str) -> list[Answer]:
        """Of an arm, to the test's items."""
        file, count = self._files(name)["test"]
        return file.answers()[:count]

    def _ask(self, name: str, model: Path, adapter: Path | None = None) -> None:
        """An arm's answers to its parts."""
        self._complete(self._files(name).values(), model, self.tested, adapter)
        mx.clear_cache()

    def _files(self, name: str) -> dict[str, tuple[AnswerFile, int]]:
        """Of an arm: part (test, form, right, suite) -> its answers and to how many items."""
        parts: dict[str, list[Item]] = {} if name == BASE else {"test": self.mined.test}
        if name in form_arms_of(self.settings):
            seed = self.settings.seed
            parts["form"] = [in_second_form(item, seed) for item in self.mined.test]
        if name in right_arms_of(self.settings) and self.mined.right:
            parts["right"] = self.mined.right
        if self.suite and name != SECOND:
            parts["suite"] = self.suite_items
        files = {}
        for part, items in parts.items():
            header = {"plan_sha256": self.plan.sha256, "of": part, "arm": name}
            file = AnswerFile(self.work / ANSWERS / f"{part}_{name}.jsonl", header, items)
            whole = len(items) if part == "suite" else len(self.mined.test)
            files[part] = file, min(self.settings.limit or whole, len(items))
        return files

    # --- the conclusion ---------------------------------------------------------------------------

    def conclude(self, work: Path) -> Result:
        settings = self.settings
        answers: dict[str, dict[str, list[Answer]]] = {
            part: {} for part in ("test", "form", "right", "suite")
        }
        for name in (*((BASE,) if self.suite else ()), *arms_of(settings)):
            for part, (file, count) in self._files(name).items():
                answers[part][name] = file.answers()[:count]
        fuses = _fuses(settings, work)
        data = data_of(
            self.mined, read_object((work / PROTOCOL).read_bytes()),
            _rows_sha256(work), fingerprint(open_checkpoint(self.persona), self.persona_sha256),
        )  # fmt: skip
        # Of the plan as it lies there: one that was changed meanwhile is another plan.
        findings = _found(
            settings, self.plan, answers, self._mining_file(PERSONA).answers(),
            read_plan(work / PLAN).sha256, data, _matching(settings, work),
        )  # fmt: skip
        notes = [
            *(answer_notes(findings.arms) if settings.scoring == "generate" else []),
            *self.mined.notes, *length_notes(self.mined.train, self.lengths, settings),
            *fuse_notes(fuses),
        ]  # fmt: skip
        result = _concluded(
            settings, self.plan, self.mined.as_json(), fuses, findings, _matching(settings, work),
            self.suite, answers["suite"],
        )  # fmt: skip
        return result.model_copy(update={"notes": tuple(notes)})


def _respond(
    respond: Callable[[Arm, Sequence[Item]], Sequence[Answer]],
    load: Callable[[], Arm],
    items: Sequence[Item],
) -> Sequence[Answer]:
    return respond(load(), items)


def _found(
    settings: ConfoundSettings, plan: Plan, answers: dict[str, dict[str, list[Answer]]],
    mined: Sequence[Answer], plan_sha256: str, data: Mapping[str, str], matching: Mapping[str, Any],
) -> Findings:  # fmt: skip
    """answers: part (test, form, right) -> arm -> answers. mined: the persona's, of the mining."""
    items = {name: [answer.item_id for answer in given] for name, given in answers["test"].items()}
    return find(
        answers["test"], answers["right"], mined, ways=settings.ways,
        criterion=Criterion(settings.least_gain, settings.alpha), seed=settings.seed,
        second_form=answers["form"],
        standing=standing(plan, Evidence(plan_sha256, items, data, (settings.seed,))),
        saturated=[
            way for way, search in matching.items()
            if saturated(search["target"], [Probe(**probe) for probe in search["probes"]])
        ],
    )  # fmt: skip


def _rows_sha256(work: Path) -> dict[str, str]:
    """Of the rows to train on."""
    names = {"train_rows": DATA, "shuffled_rows": DATA_SHUFFLED}
    paths = {name: work / directory / "train.jsonl" for name, directory in names.items()}
    return {name: file_sha256(path) for name, path in paths.items() if path.is_file()}


def _fuses(settings: ConfoundSettings, work: Path) -> dict[str, Any]:
    """Policy -> what its fuses did to the weights."""
    fuses = {}
    for policy in (way for way in settings.ways if way != "unfused"):
        moved = work / FUSE / f"moved_{policy}.json"
        more = {"moved": read_sealed(moved)[0]["fuse"]} if moved.is_file() else {}
        fuses[policy] = read_sealed(work / FUSE / f"{policy}.json")[0] | more
    return fuses


def _matching(settings: ConfoundSettings, work: Path) -> dict[str, Any]:
    """Way -> the search for the scale of its random delta: target, scale, probes."""
    paths = {way: work / FUSE / f"moved_{way}.json" for way in settings.ways}
    searches = {way: read_sealed(path)[0] for way, path in paths.items() if path.is_file()}
    return {way: {k: v for k, v in s.items() if k != "fuse"} for way, s in searches.items()}


def _concluded(
    settings: ConfoundSettings, plan: Plan, mined: dict[str, Any], fuses: dict[str, Any],
    findings: Findings, matching: dict[str, Any], suite: Suite,
    replies: Mapping[str, Sequence[Answer]],
) -> Result:  # fmt: skip
    reached, identity = findings.standing, {}
    if suite:
        for name, given in replies.items():
            check_verdicts(name, given, suite)
        identity = suite_figures(replies)
    return Result(
        **ABOUT, status="done", outcome=OUTCOMES[findings.outcome], verdict=verdict(findings),
        standing=document.Standing(status=reached.status, reasons=reached.reasons),
        plan=plan.as_json(), plan_sha256=plan.sha256, power=tuple(plan.power_lines()),
        data={
            "planned_arms": list(arms_of(settings)), "mined": mined, "fuses": fuses,
            "matching": matching, **findings.as_json(),
            "suite": [prompt.as_json() for prompt in suite], "identity": identity,
        },
        blocks=blocks(findings, fuses, mined, settings, matching, identity),
    )  # fmt: skip


def conclude_again(result: Result, directory: Path) -> Result:
    """What follows from the answers, the plan and the figures that lie in a finished run.

    The hashes of models and items are those of the plan. Raises: InputError for a missing or
    changed file.
    """
    settings = ConfoundSettings.model_validate(result.settings)
    plan = read_plan(directory / PLAN)
    protocol_sha256 = json_sha256(read_object((directory / PROTOCOL).read_bytes()))

    def read(of: str, name: str, fixed_by: dict[str, str]) -> list[Answer]:
        path = directory / ANSWERS / f"{of}_{name}.jsonl"
        return read_answers(AnswerLog(path, {**fixed_by, "of": of, "arm": name}))

    suite = suite_of(result.data["suite"], "the suite in the result") if settings.has_suite else ()
    names = {
        "test": arms_of(settings), "form": form_arms_of(settings),
        "right": right_arms_of(settings), "suite": suite_arms_of(settings),
    }  # fmt: skip
    sizes = {"suite": len(suite)}
    answers = {
        part: {
            name: read(part, name, {"plan_sha256": plan.sha256})[
                : settings.limit or sizes.get(part, plan.n)
            ]
            for name in arms
        }
        for part, arms in names.items()
    }
    data = {**plan.data, "protocol": protocol_sha256, **_rows_sha256(directory)}
    mined = read("mining", PERSONA, {"protocol_sha256": protocol_sha256})
    matching = _matching(settings, directory)
    findings = _found(settings, plan, answers, mined, plan.sha256, data, matching)
    split = read_object((directory / SPLIT).read_bytes())
    return _concluded(
        settings, plan, split, _fuses(settings, directory), findings, matching, suite,
        answers["suite"],
    )  # fmt: skip
