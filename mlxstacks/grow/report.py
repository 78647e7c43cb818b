"""Tables and words of `mlxstacks grow`."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.grow.settings import STAGES, GrowSettings, Stage
from mlxstacks.study.document import Cell, Table, counted
from mlxstacks.study.result import Result

Stages = Mapping[str, Sequence[Mapping[str, Any]]]
_DOES = {
    "confirm": "measure whether present stacks answer rows of the domain",
    "gather": "read, clean and keep its rows",
    "train": "train its stacks on a copy of the store",
    "gate": "test what they learned, and the other domains",
    "route": "extend the router on the copy, and test it on the other domains",
    "accept": "put domain and router into the store, in one change",
}
ABOUT = {
    "kind": "grow",
    "title": "Growth of a store",
    "question": "Which prompts does no domain fit, and can the store learn them without harm?",
}


def stage_table(done: Stages, next_stage: Stage | None) -> Table:
    """What each stage found, or what it would do."""
    rows: list[tuple[Cell, ...]] = []
    for stage in STAGES:
        if stage not in done:
            state = "next" if stage == next_stage else "not run"
            rows.append((stage, _DOES[stage], state, "", ""))
        for check in done.get(stage, ()):
            state = "passed" if check["passed"] else "FAILED"
            rows.append((stage, check["name"], state, check["found"], check["needed"]))
    columns: Any = dict.fromkeys(("stage", "check", "state", "found", "needed"), "text")
    return Table.of("stages", "Stages", columns, rows)


def waiting(head: Result, settings: GrowSettings, stage: Stage, done: Stages) -> Result:
    """The result of a run that stopped before a stage that was not approved."""
    approved = [*(s for s in STAGES if s in done), stage]
    again = command_line(
        "mlxstacks grow", settings.store_path, domain=settings.domain, yes=approved,
        **settings.model_dump(
            exclude={"store_path", "domain", "yes"}, exclude_unset=True, exclude_none=True
        ),
    )  # fmt: skip
    passed = f"{', '.join(done)} passed. " if done else ""
    return head.model_copy(update={
        "verdict": f"{passed}The store is as it was; next is {stage}: {_DOES[stage]}.",
        "blocks": (stage_table(done, stage),),
        "data": {"stages": dict(done), "next": stage},
        "next_steps": {"Next": again},
    })  # fmt: skip


def concluded(settings: GrowSettings, watched: Mapping[str, Any], done: Stages) -> Result:
    """The result of a run that has nothing left to do."""
    failed = [
        f"{stage}: {check['name']}: {check['found']}, needed is {check['needed']}"
        for stage, checks in done.items()
        for check in checks
        if not check["passed"]
    ]
    events = watched["events"]
    store, name = settings.store_path, settings.domain
    steps, gate = dict[str, str](), None
    if "accept" in done:
        outcome = f"{name} accepted"
        verdict = (
            f"Accepted: {name} is in {store}, with a router that knows it, from "
            f"{counted(events, 'gap')}; every other domain passed its checks."
        )
        steps = {"Undo": command_line("mlxstacks stacks undo", store)}
    elif failed:
        outcome = f"{name} refused"
        gate = "; ".join(failed)
        verdict = f"Refused: {name}. The store is as it was. {gate[0].upper()}{gate[1:]}."
    else:
        outcome = "no gap"
        least = settings.minimum_events
        verdict = f"No domain is proposed: {counted(events, 'gap')} so far, {least} are asked for."
    return Result(
        **ABOUT, status="done", outcome=outcome, verdict=verdict,
        data={"accepted": "accept" in done, "stages": dict(done), "gaps": watched["groups"]},
        blocks=(stage_table(done, None),), failed_gate=gate, next_steps=steps,
    )  # fmt: skip
