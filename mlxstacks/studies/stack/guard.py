"""The guard's word on a run of `stack`, before it begins."""

from mlxstacks.errors import ResourceLimitError
from mlxstacks.files.hub import resolve_model
from mlxstacks.guard.report import GuardReport
from mlxstacks.guard.run import guard
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.studies.guarded import compiles, limit_is_assumed
from mlxstacks.studies.stack.setup import StackSetup
from mlxstacks.training.stack_settings import StackRunSettings


def guarded(
    setup: StackSetup, processes: int = 1, *, plan_only: bool = False
) -> GuardReport | None:
    """What the guard says of the longest batch in the last round, when all other stacks are frozen;
    None where nothing is trained, or it is off.

    plan_only: a refusal is a note too.
    Raises: ResourceLimitError where it refuses and the settings do not want otherwise.
    """
    settings = setup.settings
    if settings.guard == "off" or not setup.to_train:
        return None
    report = _verdict(setup, processes)
    if report.outcome == "fits":
        return report
    may_run = settings.guard == "warn" or limit_is_assumed(report)
    if report.outcome == "tight" or may_run:
        setup.notes.append(f"The guard warns: {report.verdict}.")
        return report
    advice = f"\ncheapest change: {report.change.words}" if report.change else ""
    refusal = (
        f"the guard refuses this run: {report.verdict}{advice}\n--guard warn runs all the same"
    )
    if not plan_only:
        raise ResourceLimitError(refusal)
    setup.notes.append(refusal)
    return report


def _verdict(setup: StackSetup, processes: int) -> GuardReport:
    asked = asked_of(
        setup.settings,
        str(resolve_model(setup.settings.model or "")),
        max(max(plan.widths) for plan in setup.to_train),
        layers=",".join(map(str, sorted({target.layer for target in setup.targets}))),
        domains=len(setup.served) + len(setup.to_train),
        stacks=_stacks(setup),
        processes=processes,
        in_float32=setup.float32_base,
    )
    return guard(asked)


def asked_of(
    settings: StackRunSettings,
    model: str,
    longest_row_tokens: int,
    *,
    layers: str,
    domains: int,
    stacks: int,
    processes: int = 1,
    in_float32: bool = False,
) -> GuardSettings:
    """What the guard is asked of a run. domains, stacks: how many there are at the end; the guard
    takes all for stacks of this run's shape, on its projections.
    """
    space = settings.null_space
    widths = 0 if space is None or domains < 2 else space.directions
    if space is not None and space.scope == "cumulative":
        widths *= domains - 1
    return GuardSettings(
        model=model,
        # the guard counts inputs, a row has one token more
        max_seq_length=longest_row_tokens - 1,
        batch_size=-(-settings.batch_size // processes),
        grad_accumulation_steps=settings.grad_accumulation_steps,
        stack=settings.stack,
        frozen_stacks=stacks - 1,
        directions=widths,
        base="float32" if in_float32 else "stored",
        layers=layers,
        keys=settings.keys,
        optimizer="adamw",
        checkpointing="layers" if settings.grad_checkpoint else "none",
        compile=compiles(settings.compile_step),
        recurrence="chunked",
        loss="pieces",
        adapter_copies=1,  # the best weights so far
        resource_limit=settings.resource_limit,
        working_set_bytes=settings.working_set_bytes,
        force=settings.guard == "warn",
    )


def _stacks(setup: StackSetup) -> int:
    """Frozen stacks at the end: those in the store, and one for each round."""
    rounds = sum(plan.settings.rounds or setup.settings.rounds for plan in setup.to_train)
    return rounds + sum(len(served.stacks) for served in setup.served)
