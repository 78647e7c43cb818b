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
    fuse/moved_WAY.json  the search for that scale; fuse/width_N.json: a refit of zeros at N bits
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from mlxstacks.arms.arm import Arm, Persona, check_persona, in_second_form, training_rows
from mlxstacks.arms.set_g import mine
from mlxstacks.arms.settings import DEFAULT_SUITE
from mlxstacks.arms.suite import (
    Suite,
    as_items,
    in_turns,
    judged,
    open_suite,
    suite_sha256,
)
from mlxstacks.convert.run import convert
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import PLACES, write_json
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.studies.confound.analysis import flips
from mlxstacks.studies.confound.conclude import (
    ABOUT,
    ANSWERS,
    DATA,
    DATA_SHUFFLED,
    FUSE,
    PROTOCOL,
    SPLIT,
    concluded,
    fuses_in,
    rows_sha256,
)
from mlxstacks.studies.confound.fuses import fuse_alike, fuse_all, write_controls, write_scaled
from mlxstacks.studies.confound.lengths import length_notes, row_lengths
from mlxstacks.studies.confound.plan import (
    AGAIN,
    BASE,
    MOST_PROBES,
    PERSONA,
    SECOND,
    Probe,
    arm,
    arms_of,
    closest,
    data_of,
    next_scale,
    parts_of,
    plan_of,
    protocol_of,
    width_arms,
)
from mlxstacks.studies.confound.report import plan_table
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import answer_notes, fuse_notes
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.setup import check_targets
from mlxstacks.study.answer_log import Progress
from mlxstacks.study.answers import Answer, AnswerFile
from mlxstacks.study.document import Standing
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.integrity import read_sealed, write_rows, write_sealed
from mlxstacks.study.items import Item, read_items, stratified_sample
from mlxstacks.study.plan import PLAN, fix_plan, keep_plan, read_plan
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

PERSONA_MODEL, MODELS = "persona", "models"
ADAPTER, ZERO, RANDOM, SHUFFLED = "adapter", "zero", "random", "shuffled"
MATCHED = "matched"
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
    if settings.widths and settings.plain_model is None:
        raise InputError("widths needs plain_model: the base in unquantized weights")
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
        f"for each of {claims} claims, of A1 against zeros alone; knowledge asks for more. How "
        "many there are is known once Set G is mined"
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
    is_dealt = True
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
        check_persona(str(settings.model), str(settings.persona))
        check_targets(str(settings.model), settings.train)
        shown = settings.model_dump(mode="json", exclude=PLACES)
        head = Result(
            **ABOUT, status="planned", standing=Standing(status="planned"),
            settings=shown, data={"planned_arms": list(arms_of(settings))},
        )  # fmt: skip
        if self.dry_run:
            items = []
            if user_path(str(settings.items)).is_file():  # what is wrong with it is said now
                items = read_items(str(settings.items), settings.subjects)
            table = plan_table(shown, arms_of(settings), items)
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
        if settings.widths:
            plain = open_checkpoint(resolve_model(str(settings.plain_model)))
            hashes |= {"plain": fingerprint(plain)}
            for bits in settings.widths:  # what cannot be quantized is told now, not hours later
                self._quantize(bits, work_path(self.work_target) / MODELS, dry_run=True)
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
        for bits in self.settings.widths:
            yield Step(f"{bits} bits", functools.partial(self._ask_width, bits))

    def _whole(self) -> WholeProgress:
        """Of answers and of batches of training. How many items Set G has to test on is not known
        before it is mined: half of the sample's part for tests stands for it.
        """
        settings = self.settings
        tested = max(1, int(len(self.sample) * (1 - settings.train_share) / 2))
        self.tested = min(settings.limit or tested, tested)
        files = sum(map(len, parts_of(settings).values()))
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
        test, right = self.mined.test, self.mined.right
        form = [in_second_form(item, self.settings.seed) for item in test]
        self.items_of = {
            "test": test, "form": form, "right": right, "suite": self.suite_items, "hard": test,
            "easy": right,
        }  # fmt: skip

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
        data = data_of(self.mined, self.protocol, rows_sha256(work), self.persona_sha256)
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

    def _ask_width(self, bits: int, work: Path) -> None:
        """Quantize the plain model, refit it with zeros in A1's modules, and let both answer."""
        models, path = work / MODELS / f"width_{bits}", work / FUSE / f"width_{bits}.json"
        before, after = (models / name for name in width_arms(bits))
        arms = dict(zip(width_arms(bits), (before, after), strict=True))
        if not (path.is_file() and all(self._done(name, at) for name, at in arms.items())):
            self._quantize(bits, before)
            report = fuse(
                FuseSettings(
                    model=str(before), adapter_path=(str(work / ADAPTER),), save_path=str(after),
                    requant="refit", zero_delta=True, allow_base=True, force=True,
                )
            )  # fmt: skip
            write_sealed(path, {"total": report.total and asdict(report.total)})
        for name, model in arms.items():
            self._complete(
                self._files(name).values(), model, self.tested, answer=lambda a, i: a.likeliest(i)
            )
            mx.clear_cache()
        discard(models)

    def _quantize(self, bits: int, path: Path, dry_run: bool = False) -> None:
        """The plain model, by MLX's affine grid in groups of 64."""
        settings = {"model": self.settings.plain_model, "save_path": str(path), "bits": bits}
        convert(ConvertSettings.model_validate(settings | {"force": True}), dry_run=dry_run)

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
        """Of an arm: part, as in `parts_of` -> its answers and to how many items."""
        files = {}
        for part, names in parts_of(self.settings).items():
            items = self.items_of[part]
            if name not in names or not items:
                continue
            header = {"plan_sha256": self.plan.sha256, "of": part, "arm": name}
            file = AnswerFile(self.work / ANSWERS / f"{part}_{name}.jsonl", header, items)
            files[part] = file, min(self.settings.limit or len(items), len(items))
        return files

    # --- the conclusion ---------------------------------------------------------------------------

    def conclude(self, work: Path) -> Result:
        settings = self.settings
        answers: dict[str, dict[str, list[Answer]]] = {part: {} for part in parts_of(settings)}
        for part, names in parts_of(settings).items():
            for name in names if self.items_of[part] else ():
                file, count = self._files(name)[part]
                answers[part][name] = file.answers()[:count]
        persona = fingerprint(open_checkpoint(self.persona), self.persona_sha256)
        protocol = read_object((work / PROTOCOL).read_bytes())
        # Of the plan as it lies there: one that was changed meanwhile is another plan.
        result, findings = concluded(
            settings, self.plan, work, answers, self._mining_file(PERSONA).answers(),
            read_plan(work / PLAN).sha256,
            data_of(self.mined, protocol, rows_sha256(work), persona), self.suite,
        )  # fmt: skip
        notes = [
            *(answer_notes(findings.arms) if settings.scoring == "generate" else []),
            *self.mined.notes, *length_notes(self.mined.train, self.lengths, settings),
            *fuse_notes(fuses_in(settings, work), settings.target_correlation),
        ]  # fmt: skip
        return result.model_copy(update={"notes": tuple(notes)})


def _respond(
    respond: Callable[[Arm, Sequence[Item]], Sequence[Answer]],
    load: Callable[[], Arm],
    items: Sequence[Item],
) -> Sequence[Answer]:
    return respond(load(), items)
