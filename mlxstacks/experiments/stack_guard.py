"""The guard's word on a run of `stack`, before it begins."""

import json
import tempfile
from pathlib import Path

from mlxstacks import memory
from mlxstacks.errors import ResourceLimitError
from mlxstacks.experiments.stack_setup import StackSetup
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.guard.report import GuardReport
from mlxstacks.guard.run import guard
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.training.stack_settings import StackRunSettings


def compiles(settings: StackRunSettings) -> bool:
    """Whether the step is compiled; see the setting."""
    if settings.compile_step == "auto":
        return memory.device().kind != "cpu"
    return settings.compile_step == "on"


def guarded(setup: StackSetup, processes: int = 1) -> GuardReport | None:
    """What the guard says of the longest batch; None where nothing is trained, or it is off.

    It counts a stack as one LoRA of all its ranks: routers and frozen stacks come on top.
    Raises: ResourceLimitError where it refuses and the settings do not want otherwise.
    """
    settings = setup.settings
    if settings.guard == "off" or not setup.to_train:
        return None
    report = _verdict(setup, processes)
    if report.outcome == "fits":
        return report
    known = report.limit.known or report.limit.nbytes or settings.resource_limit
    if report.outcome == "tight" or settings.guard == "warn" or not known:
        setup.notes.append(f"The guard warns: {report.verdict}.")
        return report
    advice = f"\ncheapest change: {report.change.words}" if report.change else ""
    raise ResourceLimitError(
        f"the guard refuses this run: {report.verdict}{advice}\n--guard warn runs all the same"
    )


def _verdict(setup: StackSetup, processes: int) -> GuardReport:
    settings = setup.settings
    longest = max(max(plan.widths) for plan in setup.to_train)
    asked = GuardSettings(
        model=str(resolve_model(settings.model or "")),
        # the guard counts inputs, a row has one token more
        max_seq_length=longest - 1,
        batch_size=-(-settings.batch_size // processes),
        rank=settings.stack.num_experts * settings.stack.rank,
        layers=",".join(map(str, sorted({target.layer for target in setup.targets}))),
        keys=settings.keys,
        optimizer="adamw",
        checkpointing="layers" if settings.grad_checkpoint else "none",
        compile=compiles(settings),
        recurrence="chunked",
        resource_limit=settings.resource_limit,
        working_set_bytes=settings.working_set_bytes,
        force=settings.guard == "warn",
    )
    if not setup.float32_base:
        return guard(asked)
    config = open_checkpoint(Path(str(asked.model))).config
    plain = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(plain | {"dtype": "float32"}), encoding="utf-8")
        return guard(asked.model_copy(update={"model": str(path)}))
