"""`mlxstacks confound`: does an adapter that is fused into a quantized persona model add knowledge?

Mines what base and persona both get wrong, trains on a part of it, and lets every arm answer the
rest. The run lives in `.NAME.work` beside its target until it is done:

    protocol.json   everything that is decided before the first answer; another one is refused
    answers/        of every model and arm, appended as they come
    split.json      which item went where
    plan.json       the plan, fixed before the first arm answers
    adapter/ zero/ random/   A1, its zero-delta control, a random delta of equal norm
    fuse/WAY.json   what a policy's fuses did to the weights

Killed at any moment, the same command goes on: what is there is kept.
"""

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.experiments.confound.adapters import write_controls
from mlxstacks.experiments.confound.answers import Answer, AnswerFile
from mlxstacks.experiments.confound.fuses import KINDS, FusePlaces, fuse_all
from mlxstacks.experiments.confound.items import Item, read_items, stratified_sample
from mlxstacks.experiments.confound.lengths import length_notes, row_lengths
from mlxstacks.experiments.confound.mining import Mined, mine
from mlxstacks.experiments.confound.plan import (
    AGAIN,
    PERSONA,
    arm,
    arms_of,
    data_of,
    evidence_of,
    file_sha256,
    plan_of,
    protocol_of,
    right_arms_of,
)
from mlxstacks.experiments.confound.prompts import training_rows
from mlxstacks.experiments.confound.report import ConfoundReport, find
from mlxstacks.experiments.confound.scoring import Arm
from mlxstacks.experiments.confound.settings import ConfoundSettings
from mlxstacks.experiments.confound.target import PARTS, write_target
from mlxstacks.experiments.confound.verdict import Criterion
from mlxstacks.experiments.confound.words import answer_notes, fuse_notes
from mlxstacks.experiments.power import items_for_two_proportions
from mlxstacks.experiments.prereg import PLAN, Plan, fix_plan, keep_plan, read_plan, standing
from mlxstacks.experiments.run_directory import RunDirectory, discard, work_path
from mlxstacks.experiments.train import run as train_run
from mlxstacks.experiments.train.report import versions
from mlxstacks.files.adapter_file import CONFIG
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import check_target, write_json
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings

PROTOCOL, SPLIT = "protocol.json", "split.json"
Progress = Callable[..., None]


def run(
    settings: ConfoundSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> ConfoundReport:
    """Mine, split, plan, train, fuse, evaluate, decide; write all of it to `save_path`.

    Raises:
        InputError: model, persona, items or target cannot be used, nothing is left to test on, or
            the work directory holds a run of another protocol.
        ResourceLimitError: the guard predicts that the training does not fit.
    """
    if None in (settings.model, settings.persona, settings.items, settings.save_path):
        raise InputError("confound needs model, persona, items and save_path")
    target = user_path(str(settings.save_path))
    shown = settings.model_dump(mode="json", exclude={"force", "save_path", "resume"})
    report = ConfoundReport("planned", str(target), shown, list(arms_of(settings)))
    if dry_run:
        return ConfoundReport(**vars(report) | {"power": planned_power(settings)})
    inputs = [user_path(str(p)) for p in (settings.model, settings.persona, settings.items)]
    check_target(target, force=settings.force, inputs=[path for path in inputs if path.exists()])
    # Before there is a work directory: inputs that cannot be used leave none to go on with.
    prepared = _Confound(settings, work_path(target), progress)
    work = RunDirectory(target, {"kind": "confound"}, resume=settings.resume)
    try:
        made = prepared.run(report)
        made = write_target(target, work.path, made, settings)
        work.remove()
    finally:
        work.close()
    return made


def planned_power(settings: ConfoundSettings) -> list[str]:
    """What can be said of power before Set G is mined."""
    claims = len(settings.ways)
    alpha, gain = settings.alpha / claims, settings.least_gain
    if not 0 < gain < 1 - settings.expected_rate:
        return []
    needed = items_for_two_proportions(settings.expected_rate, gain, alpha=alpha)
    words = (
        f"{needed:,} test items an arm find {100 * gain:g} points at 80% power, alpha {alpha:.4g} "
        f"for each of {claims} claims; how many there are is known once Set G is mined"
    )
    return [words]


class _Confound:
    def __init__(self, settings: ConfoundSettings, work: Path, progress: Progress | None) -> None:
        self.settings, self.work, self.progress = settings, work, progress
        self.started = time.monotonic()
        every = read_items(str(settings.items), settings.subjects)
        self.sample = stratified_sample(every, settings.sample, settings.seed)
        self.base = resolve_model(str(settings.model))
        self.protocol = protocol_of(settings, self._hashes(), self.sample)
        self.lengths = row_lengths(self.sample, settings, self._speaker)

    def run(self, report: ConfoundReport) -> ConfoundReport:
        # Before the persona is fused: a run that goes on must not take another one's for its own.
        keep_plan(self.work / PROTOCOL, self.protocol, "a confound run")
        self.persona = self._persona()
        self.persona_sha256 = fingerprint(open_checkpoint(self.persona))
        mined, persona_answers = self._mine()
        plan = self._plan(mined)
        self._train()
        answers, right, fuses = self._evaluate(mined, plan)
        data = data_of(
            mined, read_object((self.work / PROTOCOL).read_bytes()), file_sha256(self._rows_path),
            fingerprint(open_checkpoint(self.persona)),
        )  # fmt: skip
        # Of the plan as it lies there: one that was changed meanwhile is another plan.
        fixed = read_plan(self.work / PLAN).sha256
        evidence = evidence_of(answers, fixed, data, self.settings.seed)
        findings = find(
            answers, right, persona_answers,
            ways=self.settings.ways,
            criterion=Criterion(self.settings.least_gain, self.settings.alpha),
            standing=standing(plan, evidence),
            seed=self.settings.seed,
        )  # fmt: skip
        said = answer_notes(findings.arms) if self.settings.scoring == "generate" else []
        device = memory.device()
        values = vars(report) | {
            "status": "done",
            "plan": plan.as_json(),
            "plan_sha256": plan.sha256,
            "power": plan.power().lines(),
            "mined": mined.as_json(),
            "fuses": fuses,
            "findings": findings,
            "seconds": time.monotonic() - self.started,
            "versions": versions(),
            "device": f"{device.name} ({device.kind})",
            "notes": [
                *said,
                *mined.notes,
                *length_notes(mined.train, self.lengths, self.settings),
                *fuse_notes(fuses),
            ],
        }
        return ConfoundReport(**values)

    # --- before the first arm ---------------------------------------------------------------------

    def _persona(self) -> Path:
        """The model with the persona: given, or made by fusing its adapter into the base."""
        given = self._persona_adapter
        if given is None:
            return resolve_model(str(self.settings.persona))
        target = self.work / PARTS.persona
        if not target.exists():
            fuse(
                FuseSettings(
                    model=str(self.base), adapter_path=(str(given),), save_path=str(target),
                    requant=self.settings.persona_requant, seed=self.settings.seed,
                    target_correlation=self.settings.target_correlation,
                )
            )  # fmt: skip
        return target

    @property
    def _persona_adapter(self) -> Path | None:
        """The adapter that makes the persona; None where a model is given that has it already."""
        given = user_path(str(self.settings.persona))
        return given if (given / CONFIG).is_file() else None

    @property
    def _speaker(self) -> Path:
        """The model whose tokenizer and chat template the persona has."""
        if self._persona_adapter is not None:
            return self.base
        found = resolve_model(str(self.settings.persona))
        if not (found / "config.json").is_file():
            raise InputError(
                f"{found}: no persona: neither an adapter ({CONFIG}) nor a model (config.json) is "
                "in it"
            )
        return found

    def _hashes(self) -> dict[str, str]:
        """Of what is given: base, tokenizer, and the persona as an adapter or a model."""
        found = {"base": fingerprint(open_checkpoint(self.base))}
        if self._persona_adapter is not None:
            files = [CONFIG, *(path.name for path in self._persona_adapter.glob("*.safetensors"))]
            named = {name: file_sha256(self._persona_adapter / name) for name in files}
            found["persona_adapter"] = json_sha256(named)
        else:
            found["persona"] = fingerprint(open_checkpoint(self._speaker))
        tokenizer = self._speaker / "tokenizer.json"
        return found | ({"tokenizer": file_sha256(tokenizer)} if tokenizer.is_file() else {})

    def _mine(self) -> tuple[Mined, list[Answer]]:
        """Set G, from the answers of base and persona to the sample; and the persona's answers."""
        of = {"of": "mining", "protocol_sha256": json_sha256(self.protocol)}
        models = {"base": self.base, PERSONA: self.persona}
        base, persona = (
            self._answered(
                self._file(f"mining_{name}", of | {"arm": name}, self.sample),
                len(self.sample), self._loader(model),
            )
            for name, model in models.items()
        )  # fmt: skip
        settings = self.settings
        mined = mine(
            self.sample, base, persona,
            train_share=settings.train_share, right_items=settings.right_items, seed=settings.seed,
        )  # fmt: skip
        write_json(self.work / SPLIT, mined.as_json())
        return mined, persona

    @property
    def _rows_path(self) -> Path:
        return self.work / "data" / "train.jsonl"

    def _plan(self, mined: Mined) -> Plan:
        """Writes the training rows and the plan, or finds the same ones written."""
        settings = self.settings
        rows = training_rows(mined.train, settings.scoring, settings.train_answers, settings.seed)
        _write_rows(self._rows_path, rows)
        plan = plan_of(
            settings, mined, self.protocol, file_sha256(self._rows_path), self.persona_sha256
        )
        results = sorted((self.work / "answers").glob("test_*.jsonl"))
        fix_plan(self.work / PLAN, plan, results)
        return plan

    # --- arms -------------------------------------------------------------------------------------

    def _train(self) -> None:
        """A1 and its two controls."""
        adapter = self.work / PARTS.adapter
        if not adapter.exists():
            change = {
                "model": str(self.persona), "data": str(self._rows_path.parent),
                "save_path": str(adapter), "seed": self.settings.seed,
            }  # fmt: skip
            train_run.run(self.settings.train.model_copy(update=change), progress=self.progress)
            mx.clear_cache()
        write_controls(
            adapter, self.work / PARTS.zero, self.work / PARTS.random, self.settings.seed
        )

    def _evaluate(
        self, mined: Mined, plan: Plan
    ) -> tuple[dict[str, list[Answer]], dict[str, list[Answer]], dict[str, Any]]:
        """Answers of all arms to the test items and to the right ones, and the fuses' figures."""
        self.of_plan = {"plan_sha256": plan.sha256}
        parts = {"test": mined.test, "right": mined.right}
        found: dict[str, dict[str, list[Answer]]] = {"test": {}, "right": {}}
        fuses: dict[str, Any] = {}
        for name in (PERSONA, AGAIN):
            self._arm(name, self.persona, None, parts, found)
        for way in self.settings.ways:
            if way == "unfused":
                sources = (PARTS.adapter, PARTS.zero, PARTS.random)
                for kind, source in zip(KINDS, sources, strict=True):
                    self._arm(arm(kind, way), self.persona, self.work / source, parts, found)
                continue
            fuses[way] = self._fused_way(way, parts, found)
        return found["test"], found["right"], fuses

    def _fused_way(
        self,
        way: str,
        parts: dict[str, list[Item]],
        found: dict[str, dict[str, list[Answer]]],
    ) -> dict[str, Any]:
        """Fuse, unless every answer of it is there, and let the three models answer."""
        settings, path = self.settings, self.work / "fuse" / f"{way}.json"
        places = FusePlaces(
            self.persona, self.work / PARTS.adapter, self.work / PARTS.random,
            self.work / PARTS.models / way,
        )  # fmt: skip
        names = {arm(kind, way): places.of(kind) for kind in KINDS}
        answered = all(self._is_answered(name, parts) for name in names)
        if not (path.is_file() and (answered or all(p.exists() for p in names.values()))):
            figures = fuse_all(places, way, settings.target_correlation, settings.seed)  # type: ignore[arg-type]
            path.parent.mkdir(exist_ok=True)
            write_json(path, figures)
        for name, model in names.items():
            self._arm(name, model, None, parts, found)
        if not settings.keep_models:
            discard(places.directory)
        return read_object(path.read_bytes())

    def _counts(self, name: str, parts: dict[str, list[Item]]) -> dict[str, int]:
        """Part -> how many of its items this arm answers."""
        limit = self.settings.limit or len(parts["test"])
        counts = {"test": min(limit, len(parts["test"]))}
        if name in right_arms_of(self.settings) and parts["right"]:
            counts["right"] = min(limit, len(parts["right"]))
        return counts

    def _is_answered(self, name: str, parts: dict[str, list[Item]]) -> bool:
        return all(
            self._part_file(name, part, parts).is_complete(count)
            for part, count in self._counts(name, parts).items()
        )

    def _part_file(self, name: str, part: str, parts: dict[str, list[Item]]) -> AnswerFile:
        header = {**self.of_plan, "of": part, "arm": name}
        return self._file(f"{part}_{name}", header, parts[part])

    def _arm(
        self,
        name: str,
        model: Path,
        adapter: Path | None,
        parts: dict[str, list[Item]],
        found: dict[str, dict[str, list[Answer]]],
    ) -> None:
        """An arm's answers to its parts, into `found`."""
        load = self._loader(model, adapter)
        for part, count in self._counts(name, parts).items():
            file = self._part_file(name, part, parts)
            found[part][name] = self._answered(file, count, load)
        mx.clear_cache()

    def _loader(self, model: Path, adapter: Path | None = None) -> Callable[[], Arm]:
        """A function that loads the arm when it is first called."""
        return functools.cache(lambda: Arm(model, self.settings, adapter))

    def _file(self, name: str, header: dict[str, Any], items: Sequence[Item]) -> AnswerFile:
        return AnswerFile(self.work / "answers" / f"{name}.jsonl", header, items)

    def _answered(self, file: AnswerFile, count: int, load: Callable[[], Arm]) -> list[Answer]:
        """The answers of a file; a model is loaded only where some are missing."""
        done = len(file.answers())

        def answer(items: Sequence[Item]) -> list[Answer]:
            nonlocal done
            if self.progress:
                self.progress(done, count, file.path.stem)
            found = load().answer(items)
            done += len(found)
            return found

        return file.go_on(count, self.settings.batch_size, answer)


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Training rows, or nothing where the same ones lie there."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
