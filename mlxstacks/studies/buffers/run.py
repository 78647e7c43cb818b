"""`mlxstacks sweep buffers`: does rank move the number of live buffers?

Live buffers are what Metal limits (499,000 a process). A published table has LoRA runs of rank 2, 4
and 8 meet that limit at different steps and in no order; whether rank has a part in it is tested
here with a counting allocator on MLX's CPU backend. The plan (hypothesis, ranks, conditions, seeds,
margins, rules) is written and hashed before the first run; an interrupted experiment goes on.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.studies.buffers.analysis import (
    EQUIVALENCE_CONFIDENCE,
    FAMILY_CONFIDENCE,
    analyse,
    blocks,
    plan_table,
)
from mlxstacks.studies.buffers.arms import Arm, ArmRecord, adapted_model, arms_of
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.study.buffer_counter import preload
from mlxstacks.study.child_process import how_it_ended, run_child
from mlxstacks.study.document import Standing
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.plan import PLAN
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import recorded_fingerprint, work_path

ABOUT = {
    "kind": "sweep buffers",
    "title": "Live buffers",
    "question": "Does rank move the number of live buffers?",
}
RECORDS, LOG = "arms.jsonl", "log.txt"
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


WITHOUT_LIBRARY = (
    "Nothing was counted: that takes a preloaded allocator (Linux). Give --counting-library; in a "
    "clone, `python -m tests.counting_allocator` builds it and prints its path."
)


def run(
    settings: BufferSettings,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> Result:
    """Write the plan, run what is missing, judge, write result and records to `save_path`. Without
    a library that counts, the plan alone.

    Raises:
        InputError: model, layers, projections, ranks or library cannot be used, or the work
            directory holds an experiment with another plan.
        RuntimeError: a process failed; the arms that are done are kept.
    """
    if settings.model is None or settings.save_path is None:
        raise InputError("sweep buffers needs model and save_path")
    counts = settings.counting_library is not None
    result = run_study(_Buffers(settings, progress), dry_run=dry_run or not counts)
    # A script that asked for counts has to see that there are none.
    return result if counts or dry_run else result.model_copy(update={"failure": WITHOUT_LIBRARY})


class _Buffers(Study):
    artifacts = provenance = (RECORDS,)
    settings: BufferSettings

    def __init__(self, settings: BufferSettings, progress: Callable[..., None] | None) -> None:
        self.settings, self.progress = settings, progress
        self.inputs = (settings.model,)
        self.arms = [arm for together in arms_of(settings) for arm in together]

    def planned(self) -> Result:
        """All that is decided beforehand. Raises: InputError for what does not fit the model."""
        settings = self.settings
        checkpoint = open_checkpoint(user_path(str(settings.model)))
        recorded = recorded_fingerprint(
            work_path(self.work_target) / PLAN, "base_fingerprint", resume=settings.resume
        )
        try:
            adapted_model(settings, max(settings.ranks))
        except ValueError as error:
            raise InputError(str(error)) from None
        preload(settings.counting_library)
        plan = {
            "hypothesis": HYPOTHESIS,
            "rules": RULES,
            "base_fingerprint": fingerprint(checkpoint, recorded),
            **settings.plan(),
        }
        return Result(
            **ABOUT, status="planned", standing=Standing(status="planned"), plan=plan,
            settings=settings.model_dump(mode="json", exclude={"force", "save_path", "resume"}),
            data={"arms": len(self.arms)}, blocks=(plan_table(plan, len(self.arms)),),
            notes=() if settings.counting_library else (WITHOUT_LIBRARY,),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        for together in arms_of(self.settings):
            yield Step(f"rank {together[0].rank}", partial(self._run_arms, together))

    def conclude(self, work: Path) -> Result:
        records = _kept_records(work)
        analysis = analyse(self.settings, [records[arm] for arm in self.arms])
        figures = analysis.as_json()
        return Result(
            **ABOUT, status="done", outcome=analysis.outcome, verdict=analysis.verdict,
            data={"arms": len(self.arms), "analysis": figures},
            blocks=blocks(figures, self.settings.margin),
        )  # fmt: skip

    def _run_arms(self, together: list[Arm], work: Path) -> None:
        """One process for the arms of these that have no record yet."""
        records = _kept_records(work)
        missing = [vars(arm) for arm in together if arm not in records]
        if not missing:
            return

        def keep(message: dict[str, Any]) -> None:
            record = ArmRecord.of(message)
            with (work / RECORDS).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(message) + "\n")
            records[record.arm] = record
            if self.progress:
                self.progress(len(records), len(self.arms), f"rank {record.arm.rank}")

        specification = {"settings": self.settings.model_dump(mode="json"), "arms": missing}
        log, library = work / LOG, self.settings.counting_library
        code = run_child("mlxstacks.studies.buffers.arms", specification, log, keep, library)
        if code:
            raise RuntimeError(
                f"a counting process ended early, {how_it_ended(code, log)} (all of it in {log}); "
                f"{len(records)} of {len(self.arms)} runs are kept, the same command goes on"
            )


def _kept_records(work: Path) -> dict[Arm, ArmRecord]:
    """What the processes wrote; a half-written last line does not count."""
    path = work / RECORDS
    if not path.is_file():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    records = [ArmRecord.of(json.loads(line)) for line in whole.splitlines()]
    return {record.arm: record for record in records}
