"""`mlxstacks sweep buffers`: does rank move the number of live buffers?

Live buffers are what Metal limits (499,000 a process). A published table has LoRA runs of rank 2, 4
and 8 meet that limit at different steps and in no order; whether rank has a part in it is tested
here with a counting allocator on MLX's CPU backend. The plan (hypothesis, ranks, conditions, seeds,
margins, rules) is written and hashed before the first run; an interrupted experiment goes on.
"""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks import memory
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.studies.buffers.analysis import (
    EQUIVALENCE_CONFIDENCE,
    FAMILY_CONFIDENCE,
    Analysis,
    analyse,
)
from mlxstacks.studies.buffers.arms import Arm, ArmRecord, adapted_model, arms_of
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.study.buffer_counter import preload
from mlxstacks.study.child_process import how_it_ended, run_child
from mlxstacks.study.plan import PLAN, keep_plan
from mlxstacks.study.run_directory import RunDirectory, recorded_fingerprint, work_path

REPORT, RECORDS, LOG = "sweep_report.json", "arms.jsonl", "log.txt"
HYPOTHESIS = (
    "The number of live buffers at the peak of a training step does not depend on the rank of the "
    "LoRA, whatever the row lengths, the order of rows, and checkpointing."
)
RULES = {
    "difference": "mean over compared steps of count / count of the lowest rank - 1, by order seed",
    "equal": f"every {EQUIVALENCE_CONFIDENCE:.0%} interval inside the margin, all conditions",
    "moves": "some mean beyond the margin whose interval excludes 0, family-wise "
    f"{FAMILY_CONFIDENCE:.0%} (Bonferroni)",
    "invalid": "row length moves mlx-lm's count by less than least_effect",
    "processes": "one for each trainer, checkpointing, rank and order seed",
}


@dataclass(frozen=True)
class BufferReport:
    """The plan and, unless `status` is "planned", what came of it."""

    status: str
    save_path: str
    settings: dict[str, Any]
    plan: dict[str, Any]
    plan_sha256: str
    arms: int
    analysis: Analysis | None = None
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return self.analysis.verdict if self.analysis else "planned only; nothing was run."

    def as_json(self) -> dict[str, Any]:
        device = memory.device()
        return {
            "kind": "sweep buffers",
            "status": self.status,
            "save_path": self.save_path,
            "settings": self.settings,
            "plan": self.plan,
            "plan_sha256": self.plan_sha256,
            "arms": self.arms,
            "analysis": self.analysis.as_json() if self.analysis else None,
            "seconds": round(self.seconds, 1),
            "device": f"{device.name} ({device.kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm")},
            "verdict": self.verdict,
        }


def run(
    settings: BufferSettings,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> BufferReport:
    """Write the plan, run what is missing, judge, write report and records to `save_path`.

    Raises:
        InputError: model, layers, projections, ranks or library cannot be used, or the work
            directory holds an experiment with another plan.
        RuntimeError: a process failed; the arms that are done are kept.
    """
    if settings.model is None or settings.save_path is None:
        raise InputError("sweep buffers needs model and save_path")
    target = user_path(settings.save_path)
    check_target(target, force=settings.force, inputs=[user_path(settings.model)])
    plan = _plan(settings)
    arms = [arm for together in arms_of(settings) for arm in together]
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    shown = settings.model_dump(mode="json", exclude={"force", "save_path", "resume"})
    report = BufferReport("planned", str(target), shown, plan, digest, len(arms))
    if dry_run:
        return report
    if settings.counting_library is None:
        raise InputError(
            "sweep buffers counts with a preloaded allocator: give --counting-library; in a clone, "
            "`python -m tests.counting_allocator` builds it and prints its path"
        )
    preload(settings.counting_library)
    started = time.monotonic()
    work = RunDirectory(target, {"plan": plan}, resume=settings.resume)
    try:
        records = _run_arms(settings, work, plan, len(arms), progress)
        found = analyse(settings, records)
        made = BufferReport(
            "done", str(target), shown, plan, digest, len(arms), found, time.monotonic() - started
        )
        with staged_directory(target, force=settings.force) as directory:
            (directory / RECORDS).write_bytes((work.path / RECORDS).read_bytes())
            write_json(directory / REPORT, made.as_json())
        work.remove()
    finally:
        work.close()
    return made


def _plan(settings: BufferSettings) -> dict[str, Any]:
    """All that is decided beforehand. Raises: InputError for what does not fit the model."""
    checkpoint = open_checkpoint(user_path(str(settings.model)))
    work = work_path(user_path(str(settings.save_path)))
    recorded = recorded_fingerprint(work / PLAN, "base_fingerprint", resume=settings.resume)
    try:
        adapted_model(settings, max(settings.ranks))
    except ValueError as error:
        raise InputError(str(error)) from None
    return {
        "hypothesis": HYPOTHESIS,
        "rules": RULES,
        "base_fingerprint": fingerprint(checkpoint, recorded),
        **settings.plan(),
    }


def _run_arms(
    settings: BufferSettings,
    work: RunDirectory,
    plan: dict[str, Any],
    total: int,
    progress: Callable[..., None] | None,
) -> list[ArmRecord]:
    """Records of all arms, in the order of the plan; those in the work directory are not redone."""
    found = _kept_records(work, plan)
    for together in arms_of(settings):
        missing = [vars(arm) for arm in together if arm not in found]
        if not missing:
            continue

        def keep(message: dict[str, Any]) -> None:
            record = ArmRecord.of(message)
            _append(work.path / RECORDS, message)
            found[record.arm] = record
            if progress:
                progress(len(found), total, f"rank {record.arm.rank}")

        specification = {"settings": settings.model_dump(mode="json"), "arms": missing}
        module = "mlxstacks.studies.buffers.arms"
        log = work.path / LOG
        code = run_child(module, specification, log, keep, settings.counting_library)
        if code:
            raise RuntimeError(
                f"a counting process ended early, {how_it_ended(code, log)} (all of it in {log}); "
                f"{len(found)} of {total} runs are kept, the same command goes on"
            )
    return [found[arm] for together in arms_of(settings) for arm in together]


def _append(path: Path, message: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(message) + "\n")


def _kept_records(work: RunDirectory, plan: dict[str, Any]) -> dict[Arm, ArmRecord]:
    """What an interrupted experiment left; a half-written last line does not count.

    Raises: InputError when it had another plan.
    """
    keep_plan(work.path / PLAN, plan, "an experiment")
    path = work.path / RECORDS
    if not path.is_file():
        return {}
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    path.write_bytes(b"".join(whole))
    records = [ArmRecord.of(json.loads(line)) for line in whole]
    return {record.arm: record for record in records}
