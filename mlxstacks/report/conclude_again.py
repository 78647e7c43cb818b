"""The conclusion of a study drawn again from the files that lie next to its result.

A seal shows a change to a result by one who did not compute a new seal. Where a conclusion follows
from settings and files alone, the page also draws it again: figures or a verdict that the files do
not bear out make the result exploratory, whatever its seal says.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks.study.document import Standing
from mlxstacks.study.result import Result

Drawn = dict[str, Any]
"""`outcome`, `verdict`, and of `data` what follows from the files."""
_MOST_NAMED = 3


def check_conclusion(result: Result, directory: Path) -> Result:
    """The result, exploratory where another conclusion follows from the files of `directory`.

    Results of another version of mlxstacks are left as they are: their words and figures may differ
    for that alone. So are results whose files are missing, which `Result.open` has marked already.
    """
    draw = _DRAW.get(result.kind)
    made_with = result.environment.versions.get("mlxstacks") if result.environment else None
    if draw is None or result.status != "done" or made_with != version("mlxstacks"):
        return result
    if not all((directory / name).is_file() for name in result.provenance):
        return result
    try:
        drawn = json.loads(json.dumps(draw(result, directory)))
        own = {"outcome": result.outcome, "verdict": result.verdict, "data": result.data}
        differing = list(_differences(own, drawn))
        reason = f"another {', '.join(differing[:_MOST_NAMED])} follows from the files next to it"
    except Exception as error:  # the files may be anybody's
        differing, reason = ["all"], f"nothing follows from the files next to it: {error!s:.200}"
    if not differing:
        return result
    reasons = (*result.standing.reasons, reason)
    standing = Standing(status="exploratory", reasons=reasons)
    return result.model_copy(update={"standing": standing})


def _differences(own: Any, drawn: Any, name: str = "") -> Iterator[str]:
    """Names of values that are not those drawn again; what was not drawn again is passed over.

    Numbers may differ in their last digits, as between machines.
    """
    if isinstance(drawn, dict) and isinstance(own, dict):
        for key, value in drawn.items():
            yield from _differences(own.get(key), value, f"{name}.{key}" if name else key)
    elif isinstance(drawn, list) and isinstance(own, list) and len(own) == len(drawn):
        for place, (mine, value) in enumerate(zip(own, drawn, strict=True)):
            yield from _differences(mine, value, f"{name}.{place}")
    elif isinstance(drawn, float) and type(own) in (int, float):
        if not math.isclose(own, drawn, rel_tol=1e-6, abs_tol=1e-9):
            yield name
    elif own != drawn:
        yield name


def _sweep(result: Result, directory: Path) -> Drawn:
    from mlxstacks.studies.sweep.cells import cells_of, read_results
    from mlxstacks.studies.sweep.report import concluded
    from mlxstacks.studies.sweep.settings import SweepSettings

    settings = SweepSettings.model_validate(result.settings)
    cells = read_results(directory / "cells")
    return _drawn(concluded(settings, [cells[cell] for cell in cells_of(settings)]))


def _comparison(result: Result, directory: Path) -> Drawn:
    from mlxstacks.studies.compare.run import concluded
    from mlxstacks.studies.compare.settings import CompareSettings

    settings = CompareSettings.model_validate(result.settings)
    budgets = (result.plan or {})["budgets"]
    return _drawn(concluded(settings, budgets, directory))


def _buffers(result: Result, directory: Path) -> Drawn:
    from mlxstacks.studies.buffers.run import concluded
    from mlxstacks.studies.buffers.settings import BufferSettings

    return _drawn(concluded(BufferSettings.model_validate(result.settings), directory))


def _confound(result: Result, directory: Path) -> Drawn:
    """Of the figures those that follow from answers: not what lies in the fuses' files."""
    from mlxstacks.studies.confound.report import OUTCOMES
    from mlxstacks.studies.confound.run import read_findings
    from mlxstacks.studies.confound.settings import ConfoundSettings
    from mlxstacks.studies.confound.verdict import verdict

    findings = read_findings(ConfoundSettings.model_validate(result.settings), directory)
    about = {"outcome": OUTCOMES[findings.outcome], "verdict": verdict(findings)}
    return {**about, "data": findings.as_json()}


def _identity(result: Result, directory: Path) -> Drawn:
    """Of the figures those that follow from replies and answers; the suite is the result's own."""
    from mlxstacks.studies.identity.analysis import analyse, verdict
    from mlxstacks.studies.identity.plan import UNFUSED, item_arms
    from mlxstacks.studies.identity.report import outcome_of
    from mlxstacks.studies.identity.run import ANSWERS
    from mlxstacks.studies.identity.settings import IdentitySettings
    from mlxstacks.studies.identity.suite import suite_of
    from mlxstacks.study.answer_log import AnswerLog
    from mlxstacks.study.answers import Answer, read_answers
    from mlxstacks.study.plan import PLAN, read_plan
    from mlxstacks.study.plan import Standing as PlanStanding

    settings = IdentitySettings.model_validate(result.settings)
    plan = read_plan(directory / PLAN)
    has_adapter = UNFUSED in plan.arms

    def read(of: str, names: Iterable[str]) -> dict[str, list[Answer]]:
        header = {"plan_sha256": plan.sha256, "of": of}
        files = {name: directory / ANSWERS / f"{of}_{name}.jsonl" for name in names}
        logs = {name: AnswerLog(path, {**header, "arm": name}) for name, path in files.items()}
        return {name: read_answers(log) for name, log in logs.items()}

    standing = PlanStanding(result.standing.reasons)
    figures = analyse(
        read("suite", plan.arms), read("items", item_arms(settings, has_adapter)),
        suite=suite_of(result.data["suite"], "the suite in the result"), settings=settings,
        has_adapter=has_adapter, standing=standing,
        is_published_model=bool(result.data["published"]),
    )  # fmt: skip
    about = {"outcome": outcome_of(figures), "verdict": verdict(figures, settings, standing)}
    return {**about, "data": figures}


def _drawn(result: Result) -> Drawn:
    return {"outcome": result.outcome, "verdict": result.verdict, "data": result.as_json()["data"]}


_DRAW: dict[str, Callable[[Result, Path], Drawn]] = {
    "sweep": _sweep,
    "stack compare": _comparison,
    "sweep buffers": _buffers,
    "confound": _confound,
    "identity": _identity,
}
