"""Result of `mlxstacks eval`: everything that the tables show, as one record and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxstacks.studies.benchmarks.analysis import (
    ArmScore,
    Comparison,
    Outcomes,
    adjusted,
    arm_score,
    compare,
)
from mlxstacks.studies.benchmarks.means import (
    Mean,
    MeanDifference,
    arm_means,
    mean_differences,
)
from mlxstacks.studies.benchmarks.plan import AskedTask, claims_of, evidence_of, least_effect
from mlxstacks.studies.benchmarks.tasks import PUBLISHED_MODEL, Published
from mlxstacks.study.plan import Plan, Standing, standing

REPORT = "eval_report.json"
# Arms that choose among stacks.
CHOOSING = ("routed", "oracle", "random")
_MOSTLY = 0.5
# Differences of rates that only a broken arm has.
_LARGE = 0.2


@dataclass(frozen=True)
class TaskFinding:
    """What one benchmark says. marks: what a reader of its scores must know. published: the paper's
    scores, where the model is the paper's.
    """

    asked: AskedTask
    arms: dict[str, ArmScore]
    comparisons: list[Comparison]
    standing: Standing
    marks: list[str]
    published: Published | None = None

    def as_json(self) -> dict[str, Any]:
        task = self.asked.task
        published = asdict(self.published) if self.published else None
        return {
            "title": task.title,
            "kind": task.kind,
            "metric": task.metric,
            "n": len(self.asked.items),
            "available": self.asked.available,
            "guess_rate": self.asked.guess_rate,
            "arms": {name: one.as_json() for name, one in self.arms.items()},
            "comparisons": [one.as_json() for one in self.comparisons],
            "standing": self.standing.as_json(),
            "published": published and {**published, "of": PUBLISHED_MODEL, "measured_here": False},
            "marks": self.marks,
        }


@dataclass(frozen=True)
class Findings:
    """means: over the tasks that every arm has a score on. standing: reasons of any task."""

    tasks: dict[str, TaskFinding]
    means: dict[str, Mean]
    differences: list[MeanDifference]
    tests: int
    standing: Standing
    verdict: str

    def as_json(self) -> dict[str, Any]:
        return {
            "tasks": {name: one.as_json() for name, one in self.tasks.items()},
            "means": {name: one.as_json() for name, one in self.means.items()},
            "mean_differences": [one.as_json() for one in self.differences],
            "tests": self.tests,
            "standing": self.standing.as_json(),
        }


def find(
    asked: Sequence[AskedTask],
    outcomes: Mapping[str, Outcomes],
    plans: Mapping[str, Plan],
    data: Mapping[str, Mapping[str, str]],
    *,
    alpha: float,
    seed: int,
    part_of_harness: bool = False,
    is_published_model: bool = False,
) -> Findings:
    """Everything from outcomes (task -> arm -> items). data: task -> hashes as they are now.

    part_of_harness: the lm-evaluation-harness was given fewer items than planned.
    is_published_model: the model is the paper's, whose scores then stand beside.

    Raises: ValueError where two arms answered different items.
    """
    scores = {
        one.task.name: {
            arm: arm_score(arm, outcomes[one.task.name][arm])
            for arm in one.arms
            if outcomes[one.task.name].get(arm)
        }
        for one in asked
    }
    family = adjusted(
        [
            comparison
            for one in asked
            for comparison in compare(
                one.task.name, outcomes[one.task.name], claims_of(one.arms), alpha
            )
        ],
        alpha,
    )
    tasks = {}
    for one in asked:
        name = one.task.name
        found = standing(plans[name], evidence_of(plans[name], outcomes[name], data[name], seed))
        tasks[name] = TaskFinding(
            one, scores[name], [c for c in family if c.task == name],
            found, marks_of(one, scores[name]), one.task.published if is_published_model else None,
        )  # fmt: skip
    reasons = [reason for one in tasks.values() for reason in one.standing.reasons]
    if part_of_harness:
        reasons.append("tasks of the lm-evaluation-harness: a subset of the planned items")
    overall = Standing(tuple(dict.fromkeys(reasons)))
    differences = mean_differences(family, alpha)
    return Findings(
        tasks, arm_means(scores), differences, len(family), overall,
        verdict_in_words(tasks, family, differences, overall, too_few(tasks, plans, len(family))),
    )  # fmt: skip


def too_few(tasks: Mapping[str, TaskFinding], plans: Mapping[str, Plan], tests: int) -> list[str]:
    """Sentences on tasks of so few items that little or nothing can be shown; a task with a
    difference that counts is no such one.
    """
    said: dict[str, list[str]] = {}
    for name, one in tasks.items():
        if all(c.label == "not distinguishable" for c in one.comparisons) and one.comparisons:
            least, share = least_effect(plans[name], tests), plans[name].expected_discordant
            if least is None:
                words = f"can show no difference at all, if {share:.0%} of pairs differ"
            elif least > _LARGE:
                words = f"show only differences above {100 * least:.0f} points"
            else:
                continue
            said.setdefault(words, []).append(name)
    return [
        f"So few items {words}{'' if len(tasks) == 1 else f' ({_and(names)})'}."
        for words, names in said.items()
    ]


def marks_of(asked: AskedTask, arms: Mapping[str, ArmScore]) -> list[str]:
    """What makes a score say less than it seems to."""
    marks = list(asked.notes)
    guess = asked.guess_rate
    at_guess = [
        name
        for name, one in arms.items()
        if guess is not None and one.primary is not None
        and one.primary.interval.low <= guess <= one.primary.interval.high
    ]  # fmt: skip
    if guess is not None and at_guess:
        marks.append(f"at the level of guessing ({100 * guess:.1f}%): {', '.join(at_guess)}")
    boxes = asked.task.grader == "boxed"
    lists = {
        "never boxed an answer, so its score is 0 whatever it knows": [
            name for name, one in arms.items() if boxes and one.boxed_rate == 0
        ],
        "gave no answer that a rule finds to half of the items or more": [
            name
            for name, one in arms.items()
            if one.parse_failure_rate >= _MOSTLY and not (boxes and one.boxed_rate == 0)
        ],
        "not graded (programs of a model run with --allow-code only)": [
            name for name, one in arms.items() if one.primary is None
        ],
        "not graded in part": [
            name for name, one in arms.items() if one.primary and one.primary.n < one.n
        ],
    }
    marks += [f"{words}: {', '.join(names)}" for words, names in lists.items() if names]
    counts = {
        "prompts cut from the left": {name: one.truncated for name, one in arms.items()},
        "replies cut at max_tokens": {name: one.cut for name, one in arms.items()},
        "answered by the base, no domain active": {
            name: one.without_domains for name, one in arms.items() if name in CHOOSING
        },
        "ties, counted as wrong": {name: one.ties for name, one in arms.items()},
    }
    for words, found in counts.items():
        if any(found.values()):
            marks.append(f"{words}: {', '.join(f'{k} {v}' for k, v in found.items() if v)}")
    return marks


def verdict_in_words(
    tasks: Mapping[str, TaskFinding],
    family: Sequence[Comparison],
    differences: Sequence[MeanDifference],
    overall: Standing,
    few: Sequence[str] = (),
) -> str:
    """Sentences: each pair of arms, how many tests count, what else bears on it. few: `too_few`."""
    if not tasks:
        sentences = ["No tasks but the harness's; their tests are in its own section."]
    elif not family:
        names = ", ".join(dict.fromkeys(arm for one in tasks.values() for arm in one.arms))
        sentences = [f"One arm ({names}), or nothing graded: nothing is compared."]
    else:
        if len(tasks) > 1:
            sentences = [_difference_in_words(one) for one in differences]
        else:  # one task: its own tests decide, not the interval of a mean of one
            sentences = _outcomes_in_words(family)
        counted = sum(one.label != "not distinguishable" for one in family)
        sentences.append(
            f"{counted} of {len(family)} tests count as differences at Holm-adjusted p; the rest "
            "are not distinguishable, which is not the same as equal."
        )
    guessing = [name for name, one in tasks.items() if _all_guess(one)]
    if guessing:
        sentences.append(
            f"On {', '.join(guessing)} every arm is at the level of guessing: equal scores there "
            "say nothing."
        )
    return " ".join([*sentences, *few, overall.in_words()])


def _all_guess(finding: TaskFinding) -> bool:
    guess = finding.asked.guess_rate
    rates = [one.primary for one in finding.arms.values() if one.primary]
    return guess is not None and bool(rates) and all(
        one.interval.low <= guess <= one.interval.high for one in rates
    )  # fmt: skip


def _outcomes_in_words(family: Sequence[Comparison]) -> list[str]:
    """Of one task: what is better, what is worse, what is neither."""
    said = []
    for label in ("better", "worse"):
        found: dict[str, list[Comparison]] = {}
        for one in family:
            if one.label == label:
                found.setdefault(one.arm, []).append(one)
        said += [
            f"{arm.capitalize()} is {label} than {_and([_points(c, c.control) for c in pairs])}."
            for arm, pairs in found.items()
        ]
    open_ = [_points(c, f"{c.arm} from {c.control}") for c in family
             if c.label == "not distinguishable"]  # fmt: skip
    return [*said, f"Not distinguishable: {_and(open_)}."] if open_ else said


def _points(one: Comparison, pair: str) -> str:
    low, high = 100 * one.interval.low, 100 * one.interval.high
    alone = ""
    if one.only_alone:
        alone = f"; p {one.mcnemar.p_value:.2g} alone, {one.p_adjusted:.2g} by Holm's rule"
    return f"{pair} ({100 * one.difference:+.1f} points, 95% {low:+.1f} to {high:+.1f}{alone})"


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _difference_in_words(one: MeanDifference) -> str:
    low, high = 100 * one.mean.interval.low, 100 * one.mean.interval.high
    words = (
        f"{one.arm.capitalize()} less {one.control}: {100 * one.mean.mean:+.1f} points in the mean "
        f"of {one.mean.tasks} tasks (95% {low:+.1f} to {high:+.1f}), {one.in_words}"
    )
    on = [
        f"{label} on {', '.join(names)}"
        for label, names in (("better", one.better), ("worse", one.worse))
        if names
    ]
    return "; ".join([words, *on]) + "."


@dataclass(frozen=True)
class EvalReport:
    """status: "planned" or "done". tasks: name -> {"n", "available", "arms"}, as planned.

    arms: name -> its notes and details (of fused what the fuse did). harness: what the
    lm-evaluation-harness measured, by its own scoring: task -> arm -> metrics. made_from: file ->
    digest of what was read of it, see made_from.py.
    """

    status: str
    save_path: str
    settings: dict[str, Any]
    tasks: dict[str, dict[str, Any]]
    plan: dict[str, Any] | None = None
    plan_sha256: str | None = None
    power: list[str] = field(default_factory=list)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: Findings | None = None
    harness: dict[str, Any] = field(default_factory=dict)
    graded_with: dict[str, Any] = field(default_factory=dict)
    plots: list[str] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    device: str | None = None
    notes: list[str] = field(default_factory=list)
    made_from: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def verdict(self) -> str | None:
        return self.findings.verdict if self.findings else None

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "eval",
            "status": self.status,
            "verdict": self.verdict,
            "save_path": self.save_path,
            "settings": self.settings,
            "plan": self.plan,
            "plan_sha256": self.plan_sha256,
            "power": self.power,
            "planned_tasks": self.tasks,
            "arms": self.arms,
            **(self.findings.as_json() if self.findings else {}),
            "harness": self.harness,
            "graded_with": self.graded_with,
            "plots": self.plots,
            "seconds": round(self.seconds, 3),
            "versions": self.versions,
            "device": self.device,
            "notes": self.notes,
            "made_from": self.made_from,
        }
