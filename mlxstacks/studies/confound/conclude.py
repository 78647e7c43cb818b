"""The conclusion of a confound run, a pure function of the files that it left."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxstacks.arms.suite import Suite, check_verdicts, suite_of
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.studies.confound.analysis import Answers, suite_figures
from mlxstacks.studies.confound.mechanism import mechanism
from mlxstacks.studies.confound.plan import PERSONA, Probe, arms_of, parts_of, saturated
from mlxstacks.studies.confound.report import blocks
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import Criterion, Findings, find, headline, verdict
from mlxstacks.study.answer_log import AnswerLog
from mlxstacks.study.answers import Answer, read_answers
from mlxstacks.study.integrity import file_sha256, read_sealed
from mlxstacks.study.plan import PLAN, Evidence, Plan, read_plan, standing
from mlxstacks.study.result import Result

ABOUT = {
    "kind": "confound",
    "title": "Stacking confound",
    "question": "Does fusing a second adapter add knowledge, or only jitter?",
}
PROTOCOL, SPLIT = "protocol.json", "split.json"
ANSWERS, DATA, FUSE = "answers", "data", "fuse"
DATA_SHUFFLED = f"{DATA}-shuffled"


_OF_ONE = "for A1 against zeros alone; knowledge asks for more"


def rows_sha256(work: Path) -> dict[str, str]:
    """Of the rows to train on."""
    names = {"train_rows": DATA, "shuffled_rows": DATA_SHUFFLED}
    paths = {name: work / directory / "train.jsonl" for name, directory in names.items()}
    return {name: file_sha256(path) for name, path in paths.items() if path.is_file()}


def fuses_in(settings: ConfoundSettings, work: Path) -> dict[str, Any]:
    """Policy -> what its fuses did to the weights."""
    fuses = {}
    for policy in (way for way in settings.ways if way != "unfused"):
        moved = work / FUSE / f"moved_{policy}.json"
        more = {"moved": read_sealed(moved)[0]["fuse"]} if moved.is_file() else {}
        fuses[policy] = read_sealed(work / FUSE / f"{policy}.json")[0] | more
    return fuses


def _matching(settings: ConfoundSettings, work: Path) -> dict[str, Any]:
    """Way -> the search for the scale of its random delta: target, scale, probes."""
    paths = {way: work / FUSE / f"moved_{way}.json" for way in settings.ways}
    searches = {way: read_sealed(path)[0] for way, path in paths.items() if path.is_file()}
    return {way: {k: v for k, v in s.items() if k != "fuse"} for way, s in searches.items()}


def concluded(
    settings: ConfoundSettings, plan: Plan, work: Path, answers: Mapping[str, Answers],
    mined: Sequence[Answer], plan_sha256: str, data: Mapping[str, str], suite: Suite,
) -> tuple[Result, Findings]:  # fmt: skip
    """answers: part, as in `parts_of` -> arm -> answers. mined: the persona's, of the mining."""
    items = {name: [answer.item_id for answer in given] for name, given in answers["test"].items()}
    fuses, matching = fuses_in(settings, work), _matching(settings, work)
    findings = find(
        answers["test"], answers["right"], mined, ways=settings.ways,
        criterion=Criterion(settings.least_gain, settings.alpha),
        second_form=answers["form"],
        standing=standing(plan, Evidence(plan_sha256, items, data, (settings.seed,))),
        saturated=[
            way for way, search in matching.items()
            if saturated(search["target"], [Probe(**probe) for probe in search["probes"]])
        ],
    )  # fmt: skip
    for name, given in answers["suite"].items():
        check_verdicts(name, given, suite)
    identity = suite_figures(answers["suite"]) if suite else {}
    split = read_object((work / SPLIT).read_bytes())
    totals = {way: figures["a0"]["total"] for way, figures in fuses.items()} | {
        f"{bits} bits": read_sealed(work / FUSE / f"width_{bits}.json")[0]["total"]
        for bits in settings.widths
    }
    codes = {name: total and total["codes_changed_at_zero"] for name, total in totals.items()}
    moves = mechanism(answers, settings.ways, settings.widths, codes, settings.normalisation)
    result = Result(
        **ABOUT, status="done", outcome=headline(findings, findings.judgements[0]),
        verdict=verdict(findings), standing=findings.standing,
        plan=plan.as_json(), plan_sha256=plan.sha256, power=(*plan.power_lines(), _OF_ONE),
        data={
            "planned_arms": list(arms_of(settings)), "mined": split, "fuses": fuses,
            "matching": matching, **findings.as_json(),
            "suite": [prompt.as_json() for prompt in suite], "identity": identity,
            "mechanism": moves,
        },
        blocks=blocks(findings, fuses, split, settings, matching, identity, moves),
    )  # fmt: skip
    return result, findings


def conclude_again(result: Result, directory: Path) -> Result:
    """What follows from the answers, the plan and the figures that lie in a finished run.

    The hashes of models and items are those of the plan. Raises: InputError for a missing or
    changed file.
    """
    settings = ConfoundSettings.model_validate(result.settings)
    plan = read_plan(directory / PLAN)
    protocol_sha256 = json_sha256(read_object((directory / PROTOCOL).read_bytes()))

    def read(of: str, name: str, fixed_by: dict[str, str]) -> list[Answer]:
        path = directory / ANSWERS / f"{of}_{name}.jsonl"
        return read_answers(AnswerLog(path, {**fixed_by, "of": of, "arm": name}))

    suite = suite_of(result.data["suite"], "the suite in the result") if settings.has_suite else ()
    answers = {
        part: {
            name: read(part, name, {"plan_sha256": plan.sha256})[: settings.limit] for name in arms
        }
        for part, arms in parts_of(settings).items()
    }
    data = {**plan.data, "protocol": protocol_sha256, **rows_sha256(directory)}
    mined = read("mining", PERSONA, {"protocol_sha256": protocol_sha256})
    return concluded(settings, plan, directory, answers, mined, plan.sha256, data, suite)[0]
