"""Tasks of the lm-evaluation-harness in a run of `mlxstacks eval`: asked by arm, kept, compared.

They are scored by the harness's own rules and stand in a section of their own, with tests that are
a family of their own: a task of the same data is in our table too, and would count twice.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.analysis import Comparison, Outcomes, adjusted, compare, rate
from mlxstacks.studies.benchmarks.outcomes import Outcome
from mlxstacks.studies.benchmarks.plan import claims_of
from mlxstacks.studies.benchmarks.settings import HARNESS, EvalSettings
from mlxstacks.study.integrity import read_sealed, write_sealed
from mlxstacks.study.provenance import MadeFrom, of_bytes

# Of a task with several, the metric that is right or wrong for each item; else its first one.
_PRIMARY = ("acc", "exact_match", "pass@1")


def harness_plan(settings: EvalSettings) -> dict[str, Any]:
    """What of the harness belongs into the plan; {} where none of its tasks is asked.

    Task -> its hashes; of a group each of its tasks. lm_eval's own tasks read their data for it.
    Raises: InputError for a task that there is none of, or whose data is not there.
    """
    if not settings.harness_tasks:
        return {}
    from mlxstacks.studies.benchmarks.harness.named import find_tasks

    return {
        one.name: {**one.fingerprint(settings.data), "limit": settings.items_per_task}
        for one in find_tasks(settings.harness_tasks, settings.task_files)
    }


def kept_path(work: Path, arm: str) -> Path:
    return work / "harness" / f"{arm}.json"


def ask_harness(work: Path, settings: EvalSettings, arm: Any, plan_sha256: str) -> None:
    """All tasks of the harness to one arm, kept under `work`."""
    from mlxstacks.studies.benchmarks.harness.run import run_harness

    found = run_harness(
        [arm], settings.harness_tasks, include_path=settings.task_files, data=settings.data,
        limit=_limit(settings), seed=settings.seed, chat=settings.chat == "all",
        domains=_domains(settings),
    )  # fmt: skip
    write_sealed(kept_path(work, arm.name), {"plan_sha256": plan_sha256, **found})


def _limit(settings: EvalSettings) -> int | None:
    """Items of each task: the planned ones, or the fewer of a quick look."""
    limits = (settings.items_per_task, settings.limit)
    return min((limit for limit in limits if limit is not None), default=None)


def _domains(settings: EvalSettings) -> dict[str, str]:
    """Task, or group -> its domain; lm_eval/NAME wins over NAME. A group's tasks have names too."""
    given = sorted(settings.domain_of.items(), key=lambda pair: pair[0].startswith(HARNESS))
    return {name.removeprefix(HARNESS): domain for name, domain in given}


def read_harness(
    work: Path, arms: Sequence[str], plan_sha256: str
) -> tuple[dict[str, Any], MadeFrom]:
    """Arm -> what `run_harness` gave; and the files that it is from.

    Raises: InputError for results of another plan, and for some that were changed.
    """
    found: dict[str, Any] = {}
    made_from: MadeFrom = {}
    for arm in arms:
        path = kept_path(work, arm)
        if not path.is_file():
            raise InputError(f"{path}: the harness's results of arm {arm} are missing")
        found[arm], data = read_sealed(path, "remove it to ask again")
        made_from[f"{path.parent.name}/{path.name}"] = of_bytes(data)
        if found[arm].get("plan_sha256") != plan_sha256:
            raise InputError(f"{path}: results of another plan; remove it to ask again")
    return found, made_from


def harness_findings(found: Mapping[str, Any], alpha: float) -> dict[str, Any]:
    """Task -> metric that is tested, each arm's rate with its interval and all metrics, pairs."""
    if not found:
        return {}
    arms = list(found)
    names = list(found[arms[0]]["tasks"])
    outcomes = {name: dict(_outcomes(name, found)) for name in names}
    family = adjusted(
        [c for name in names for c in compare(name, outcomes[name], claims_of(arms), alpha)], alpha
    )
    return {
        "lm_eval": found[arms[0]]["lm_eval"],
        "tests": len(family),
        "tasks": {
            name: _task(name, found, outcomes[name], [c for c in family if c.task == name])
            for name in names
        },
    }


def _task(
    name: str, found: Mapping[str, Any], outcomes: Outcomes, comparisons: Sequence[Comparison]
) -> dict[str, Any]:
    arms = {}
    for arm, of_arm in found.items():
        result = of_arm["arms"][arm]["tasks"][name]
        marks = [one.correct for one in outcomes.get(arm, ()) if one.correct is not None]
        score = rate(marks)
        arms[arm] = {
            "metrics": result["metrics"], "ties": result["ties"],
            "seconds": round(result["seconds"], 3), **(score.as_json() if score else {}),
        }  # fmt: skip
    samples = next(iter(found.values()))["arms"][next(iter(found))]["tasks"][name]["samples"]
    return {
        "metric": _metric(samples),
        "arms": arms,
        "comparisons": [one.as_json() for one in comparisons],
    }


def _outcomes(name: str, found: Mapping[str, Any]) -> Iterator[tuple[str, list[Outcome]]]:
    """Right or wrong of each item by the tested metric; nothing where it is neither."""
    for arm, of_arm in found.items():
        samples = of_arm["arms"][arm]["tasks"][name]["samples"]
        metric = _metric(samples)
        first = samples[0]["filter"] if samples else None
        values = [(s, s["metrics"].get(metric)) for s in samples if s["filter"] == first]
        if values and all(value in (0, 1) for _, value in values):
            yield (
                arm,
                [
                    Outcome(str(s["doc_id"]), "", bool(value), "", f"harness {metric}")
                    for s, value in values
                ],
            )


def _metric(samples: Sequence[Mapping[str, Any]]) -> str | None:
    there = list(samples[0]["metrics"]) if samples else []
    return next((name for name in _PRIMARY if name in there), there[0] if there else None)
