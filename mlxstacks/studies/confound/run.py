"""`mlxstacks confound`: does an adapter that is fused into a quantized persona model add knowledge?

Mines what base and persona both get wrong, trains on a part of it, and lets every arm answer the
rest. The run lives in `.NAME.work` beside its target until it is done:

    protocol.json   everything that is decided before the first answer; another one is refused
    answers/        of every model and arm, appended as they come; changed ones are refused
    split.json      which item went where
    plan.json       the plan, fixed before the first arm answers
    adapter/ zero/ random/   A1, its zero-delta control, a random delta of equal norm
    fuse/WAY.json   what a policy's fuses did to the weights

Killed at any moment, the same command goes on: what is there is kept.
"""

import functools
import time
from pathlib import Path

import mlx.core as mx

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, write_json
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.studies.confound.adapters import write_controls
from mlxstacks.studies.confound.answers import Answer, AnswerFile
from mlxstacks.studies.confound.asking import Progress, ask_missing
from mlxstacks.studies.confound.evaluation import Evaluation
from mlxstacks.studies.confound.items import read_items, stratified_sample
from mlxstacks.studies.confound.lengths import length_notes, row_lengths
from mlxstacks.studies.confound.mining import Mined, mine
from mlxstacks.studies.confound.persona import PersonaSource
from mlxstacks.studies.confound.plan import (
    PERSONA,
    arms_of,
    data_of,
    evidence_of,
    file_sha256,
    plan_of,
    protocol_of,
)
from mlxstacks.studies.confound.prompts import training_rows
from mlxstacks.studies.confound.report import ConfoundReport, find
from mlxstacks.studies.confound.scoring import Arm
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.target import PARTS, write_target
from mlxstacks.studies.confound.verdict import Criterion
from mlxstacks.studies.confound.words import answer_notes, fuse_notes
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.report import versions
from mlxstacks.study.integrity import write_rows
from mlxstacks.study.plan import PLAN, Plan, fix_plan, keep_plan, read_plan, standing
from mlxstacks.study.power import items_for_two_proportions
from mlxstacks.study.provenance import MadeFrom, of_bytes
from mlxstacks.study.run_directory import RunDirectory, recorded_fingerprint, work_path

PROTOCOL, SPLIT = "protocol.json", "split.json"


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
        self.made_from: MadeFrom = {}
        every = read_items(str(settings.items), settings.subjects)
        self.sample = stratified_sample(every, settings.sample, settings.seed)
        self.source = PersonaSource(settings)
        self.protocol = protocol_of(settings, self.source.hashes(work / PROTOCOL), self.sample)
        self.lengths = row_lengths(self.sample, settings, self.source.speaker)

    def run(self, report: ConfoundReport) -> ConfoundReport:
        # Before the persona is fused: a run that goes on must not take another one's for its own.
        keep_plan(self.work / PROTOCOL, self.protocol, "a confound run")
        self.persona = self.source.model(self.work / PARTS.persona)
        recorded = recorded_fingerprint(self.work / PLAN, "data", "persona_model")
        self.persona_sha256 = fingerprint(open_checkpoint(self.persona), recorded)
        mined, persona_answers = self._mine()
        plan = self._plan(mined)
        self._train()
        arms = Evaluation(self.settings, self.work, self.persona, mined, plan.sha256, self.progress)
        arms.run()
        data = data_of(
            mined, read_object((self.work / PROTOCOL).read_bytes()), file_sha256(self._rows_path),
            fingerprint(open_checkpoint(self.persona), self.persona_sha256),
        )  # fmt: skip
        # Of the plan as it lies there: one that was changed meanwhile is another plan.
        fixed = read_plan(self.work / PLAN).sha256
        evidence = evidence_of(arms.test, fixed, data, self.settings.seed)
        findings = find(
            arms.test, arms.right, persona_answers,
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
            "power": plan.power_lines(),
            "mined": mined.as_json(),
            "fuses": arms.fuses,
            "findings": findings,
            "made_from": self.made_from | arms.made_from,
            "seconds": time.monotonic() - self.started,
            "versions": versions(),
            "device": f"{device.name} ({device.kind})",
            "notes": [
                *said,
                *mined.notes,
                *length_notes(mined.train, self.lengths, self.settings),
                *fuse_notes(arms.fuses),
            ],
        }
        return ConfoundReport(**values)

    def _mine(self) -> tuple[Mined, list[Answer]]:
        """Set G, from the answers of base and persona to the sample; and the persona's answers."""
        base = self._mining_answers("base", self.source.base)
        persona = self._mining_answers(PERSONA, self.persona)
        settings = self.settings
        mined = mine(
            self.sample, base, persona,
            train_share=settings.train_share, right_items=settings.right_items, seed=settings.seed,
        )  # fmt: skip
        write_json(self.work / SPLIT, mined.as_json())
        self.made_from[SPLIT] = of_bytes((self.work / SPLIT).read_bytes())
        return mined, persona

    def _mining_answers(self, name: str, model: Path) -> list[Answer]:
        header = {"of": "mining", "protocol_sha256": json_sha256(self.protocol), "arm": name}
        path = self.work / "answers" / f"mining_{name}.jsonl"
        load = functools.cache(lambda: Arm(model, self.settings))
        file, count = AnswerFile(path, header, self.sample), len(self.sample)
        found = ask_missing(
            file, count, self.settings.batch_size, lambda items: load().answer(items),
            self.progress,
        )  # fmt: skip
        self.made_from[f"answers/{path.name}"] = file.made_from(count)
        return found

    @property
    def _rows_path(self) -> Path:
        return self.work / "data" / "train.jsonl"

    def _plan(self, mined: Mined) -> Plan:
        """Writes the training rows and the plan, or finds the same ones written."""
        settings = self.settings
        rows = training_rows(mined.train, settings.scoring, settings.train_answers, settings.seed)
        self.made_from["data/train.jsonl"] = of_bytes(write_rows(self._rows_path, rows))
        plan = plan_of(
            settings, mined, self.protocol, file_sha256(self._rows_path), self.persona_sha256
        )
        results = sorted((self.work / "answers").glob("test_*.jsonl"))
        fix_plan(self.work / PLAN, plan, results)
        return plan

    def _train(self) -> None:
        """A1 and its two controls."""
        adapter = self.work / PARTS.adapter
        if not adapter.exists():
            change = {
                "model": str(self.persona), "data": str(self._rows_path.parent),
                "save_path": str(adapter), "seed": self.settings.seed,
                "thinking": self.settings.thinking, "allow_special": self.settings.allow_special,
            }  # fmt: skip
            train_run.run(self.settings.train.model_copy(update=change), progress=self.progress)
            mx.clear_cache()
        write_controls(
            adapter, self.work / PARTS.zero, self.work / PARTS.random, self.settings.seed
        )
