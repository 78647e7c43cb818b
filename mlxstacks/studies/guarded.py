"""The guard's word on a run of `train`, before it begins and before each of its batches."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxstacks import memory
from mlxstacks.errors import ResourceLimitError
from mlxstacks.files.hub import resolve_model
from mlxstacks.guard.report import GuardReport
from mlxstacks.guard.run import guard
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.studies.train.report import guard_json
from mlxstacks.studies.train.setup import TrainSetup, set_up
from mlxstacks.training.settings import TrainSettings


def verdict(
    settings: TrainSettings,
    longest_row_tokens: int,
    in_float32: bool,
    *,
    validates: bool,
    layers: str | None = None,
    processes: int = 1,
) -> GuardReport:
    """What the guard says of a run with these rows, for each of its processes.

    in_float32: the base computes so, whatever its config says. validates: the best weights so far
    are kept beside the present ones. layers: those that train, where
    the settings only tell how many.
    """
    asked = asked_of(
        settings, str(resolve_model(settings.model or "")), longest_row_tokens,
        validates=validates, layers=layers, processes=processes, in_float32=in_float32,
    )  # fmt: skip
    return guard(asked)


def asked_of(
    settings: TrainSettings,
    model: str,
    longest_row_tokens: int,
    *,
    validates: bool,
    layers: str | None = None,
    processes: int = 1,
    in_float32: bool = False,
) -> GuardSettings:
    """What the guard is asked of a run with these rows; see `verdict`."""
    return GuardSettings(
        model=model,
        # the guard counts inputs, a row has one token more
        max_seq_length=longest_row_tokens - 1,
        batch_size=-(-settings.batch_size // processes),
        grad_accumulation_steps=settings.grad_accumulation_steps,
        rank=settings.rank,
        dropout=settings.dropout,
        base="float32" if in_float32 else "stored",
        layers=layers or settings.layers,
        keys=settings.keys,
        optimizer="adamw",
        checkpointing="layers" if settings.grad_checkpoint else "none",
        compile=compiles(settings.compile_step),
        recurrence="chunked",
        loss="pieces",
        adapter_copies=int(validates),
        resource_limit=settings.resource_limit,
        working_set_bytes=settings.working_set_bytes,
        force=settings.force or settings.guard == "warn",
    )


def compiles(choice: Literal["auto", "on", "off"]) -> bool:
    """Whether the step is compiled. On a CPU that gains 4% (benchmarks/bench_train.py) and each
    shape has to be built first, by the system's C++ compiler.
    """
    if choice == "auto":
        return memory.device().kind != "cpu"
    return choice == "on"


def train_change(report: GuardReport) -> dict[str, Any]:
    """The guard's cheapest change as settings of `train`."""
    asked = dict(report.change.settings) if report.change else {}
    change: dict[str, Any] = {}
    if asked.get("checkpointing") == "layers":
        change["grad_checkpoint"] = True
    if "max_seq_length" in asked:
        # the guard counts inputs, a row has one token more
        change["max_seq_length"] = asked["max_seq_length"] + 1
    return change


@dataclass(frozen=True, eq=False)
class GuardedRun:
    """A run as it may go on. settings, setup: with the guard's change, where it made one. report:
    None where the guard was not asked.
    """

    settings: TrainSettings
    setup: TrainSetup
    report: GuardReport | None = None
    change: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any] | None:
        return None if self.report is None else guard_json(self.report, self.change)

    def watch(self) -> memory.ResourceGuard | None:
        """Watches the batches of the run; it refuses none where the run was only warned of."""
        report = self.report
        if report is None:
            return None

        def predicted(tokens: int) -> int:
            # At most so many for shorter rows: the count grows with their length.
            longest: int = report.settings["max_seq_length"]
            return round(report.buffers * max(1.0, tokens / longest))

        force = _only_warns(self.settings, report)
        return memory.ResourceGuard(predicted, limit=report.limit.buffers, force=force)


def guarded(
    settings: TrainSettings, setup: TrainSetup, processes: int = 1, *, plan_only: bool = False
) -> GuardedRun:
    """The run as it is, or reshaped. Notes of the setup tell what the guard said.

    plan_only: a refusal is a note too.
    Raises: ResourceLimitError from 90% of a limit on, unless the settings want otherwise.
    """
    if settings.guard == "off":
        return GuardedRun(settings, setup)
    report, change = _verdict_of(settings, setup, processes), {}
    if report.outcome == "refused" and settings.guard == "reshape":
        change = train_change(report)
    if change:
        settings = settings.model_copy(update=change)
        setup = set_up(settings)
        report = _verdict_of(settings, setup, processes)
        setup.notes.append(f"Reshaped by the guard: {_in_words(change)}.")
    if report.outcome == "tight" or (report.outcome == "refused" and _only_warns(settings, report)):
        setup.notes.append(f"The guard warns: {report.verdict}.")
    elif report.outcome == "refused":
        if not plan_only:
            raise ResourceLimitError(_refusal(report))
        setup.notes.append(_refusal(report))
    return GuardedRun(settings, setup, report, change)


def _only_warns(settings: TrainSettings, report: GuardReport) -> bool:
    return settings.force or settings.guard == "warn" or limit_is_assumed(report)


def limit_is_assumed(report: GuardReport) -> bool:
    """The only limit is Metal's usual one, and this is no Metal: no reason to refuse a run."""
    return not (report.limit.known or report.limit.nbytes)


def _verdict_of(settings: TrainSettings, setup: TrainSetup, processes: int) -> GuardReport:
    layers = ",".join(map(str, sorted({target.layer for target in setup.targets})))
    longest = max(setup.plan.widths)
    rows = min(settings.batch_size, len(setup.train.rows))
    return verdict(
        settings.model_copy(update={"batch_size": rows}), longest, setup.float32_base,
        validates=setup.validation is not None, layers=layers, processes=processes,
    )  # fmt: skip


def _refusal(report: GuardReport) -> str:
    lines = [f"the guard refuses this run: {report.verdict}"]
    change = train_change(report)
    if report.change and change:
        lines.append(f"cheapest change: {report.change.words} ({_in_words(change)})")
    remedies = ["--guard reshape makes that change"] if change else ["shorten the rows"]
    lines.append("; ".join([*remedies, "--guard warn runs all the same"]))
    return "\n".join(lines)


def _in_words(change: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in change.items())
